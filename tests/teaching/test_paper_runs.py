"""Runs of the paper's figures, from the parameters of notebooks."""

from collections import Counter

import pytest
from helpers import refused

from cpt_core.schedules.profiles import SUITE
from cpt_lessons import paper_runs, parameters
from cpt_lessons.parameters import check_parameters

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)

# figure -> task of the notebook, embedded data set, the paper's
FIGURES = {
    paper_runs.figure_3: ("image", "digits", "cifar10"),
    paper_runs.figure_4: ("detection", "digit-scenes", "voc2012"),
    paper_runs.figure_6: ("graph", "digits-graph", "ogbn-arxiv"),
    paper_runs.figure_7: ("language_model", "pydoc", "ptb"),
}
LISTS = {"schedules": list(SUITE), "static_bits": None, "q_max": [8], "seeds": None}


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    """Allow parameters to name missing data."""
    monkeypatch.setattr(parameters, "check_data", lambda recipe: None)


def given(figure, scale, **more):
    task, embedded, of_paper = FIGURES[figure]
    names = {
        **LISTS,
        "q_min": None,
        "q_grad": None,
        "n_cycles": None,
        "steps": None,
        "learning_rate": None,
    }
    if figure is paper_runs.figure_6:
        names["aggregations"] = ["fp"]
    return check_parameters(
        task,
        scale=scale,
        dataset=of_paper if scale == "paper" else embedded,
        **{**names, **more},
    )


def arms_of(specs):
    assert len({s.key for s in specs}) == len(specs)
    return Counter((s.arm, s.q_max) for s in specs)


@pytest.mark.parametrize("scale", ["smoke", "demo", "paper"])
@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.__name__)
def test_figure_trains_two_schedules_with_two_seeds(figure, scale):
    specs = figure(
        given(figure, scale, schedules=["CR", "RR"], static_bits=[], seeds=[0, 1])
    )
    assert arms_of(specs) == {("CR", 8): 2, ("RR", 8): 2}


@pytest.mark.parametrize("scale", ["smoke", "demo", "paper"])
@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.__name__)
def test_figure_covers_every_q_max(figure, scale):
    found = arms_of(figure(given(figure, scale, q_max=[6, 8], seeds=[3])))
    for top in (6, 8):
        assert {(name, top) for name in (*SUITE, f"static {top}")} <= set(found)
        assert (
            max(
                int(arm[-1])
                for arm, q_max in found
                if q_max == top and arm.startswith("static")
            )
            == top
        )


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.__name__)
def test_figure_takes_all_parameters(figure):
    settings = {
        "q_min": 4,
        "q_grad": 7,
        "n_cycles": 3,
        "steps": 90,
        "learning_rate": 0.125,
        "static_bits": [5],
    }
    specs = figure(given(figure, "smoke", schedules=["RR"], seeds=[9], **settings))
    assert {s.arm for s in specs} == {"RR", "static 5"}
    assert {
        (
            s.recipe.q_min,
            s.q_grad,
            s.recipe.n_cycles,
            s.recipe.steps,
            s.recipe.lr,
            s.seed,
        )
        for s in specs
    } == {(4, 7, 3, 90, 0.125, 9)}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.__name__)
def test_figure_defaults_to_recipe_values(figure):
    specs = figure(given(figure, "smoke"))
    recipe = specs[0].recipe
    assert {s.seed for s in specs} == set(recipe.seeds)
    assert {s.q_grad for s in specs} == {8}
    assert len(specs) == {"figure_4": 11}.get(
        figure.__name__, 12
    )  # a notebook trains this in seconds


def test_figure_3_drops_static_above_q_max():
    found = arms_of(
        paper_runs.figure_3(
            given(
                paper_runs.figure_3, "demo", q_max=[6, 8], static_bits=[4, 8], seeds=[0]
            )
        )
    )
    assert {key for key in found if key[0].startswith("static")} == {
        ("static 4", 6),
        ("static 4", 8),
        ("static 8", 8),
    }


def test_figure_5_compares_aggregations_per_q_max():
    P = check_parameters(
        "graph", dataset="digits-graph", **{**LISTS, "q_max": [6, 8], "seeds": [0, 1]}
    )
    specs = paper_runs.figure_5(P)
    assert Counter((s.arm, s.recipe.aggregation) for s in specs) == {
        (f"static {top}", kind): 2 for top in (6, 8) for kind in ("fp", "quantized")
    }
    P.aggregations = ["quantized"]
    assert paper_runs.figure_5(P) == []
    P.aggregations, P.static_bits = ["fp", "quantized"], []
    assert paper_runs.figure_5(P) == []


def test_figure_6_has_both_aggregations():
    P = check_parameters(
        "graph", dataset="digits-graph", **LISTS, aggregations=["fp", "quantized"]
    )
    specs = paper_runs.figure_6(P)
    assert Counter(s.recipe.aggregation for s in specs) == {"fp": 12, "quantized": 12}
    assert {s.key for s in paper_runs.figure_5(P)} < {
        s.key for s in specs
    }  # static 8 is of both figures


def test_figure_7_has_text_and_sentence_pairs():
    P = check_parameters("language_model", dataset="pydoc", pairs="templates", **LISTS)
    specs = paper_runs.figure_7(P)
    assert Counter(s.recipe.task for s in specs) == {
        "language_model": 12,
        "entailment": 11,
    }
    P.steps, P.learning_rate = None, 0.1
    refused(
        "learning_rate: expected None for a text and sentence pairs together",
        paper_runs.figure_7,
        P,
    )
    P.dataset = ""
    assert {(s.recipe.task, s.recipe.lr) for s in paper_runs.figure_7(P)} == {
        ("entailment", 0.1)
    }


@pytest.mark.parametrize(
    ("scale", "top", "static"),
    [
        ("smoke", 8, {8}),
        ("demo", 8, {3, 5, 8}),
        ("demo", 6, {3, 5, 6}),
        ("demo", 2, {2}),
    ],
)
def test_figure_7_pairs_train_few_static_bits(scale, top, static):
    P = check_parameters(
        "language_model",
        scale=scale,
        dataset="",
        pairs="templates",
        schedules=[],
        q_max=[top],
        seeds=[0],
    )
    assert {s.arm for s in paper_runs.figure_7(P)} == {
        f"static {bits}" for bits in static
    }


@pytest.mark.parametrize(
    ("dataset", "task"),
    [("digits", "image"), ("digits-graph", "graph"), ("pydoc", "language_model")],
)
def test_section_5_takes_data_of_every_task(dataset, task):
    P = check_parameters(
        "image",
        dataset=dataset,
        deficit_lengths=[0, 5],
        deficit_starts=[1],
        deficit_window=4,
    )
    assert P.task == P.store.stem == task
    specs = paper_runs.section_5(P)
    assert {s.recipe.task for s in specs} == {task}
    assert len(specs) == 1 + 3 + 3 - (
        specs[0].recipe.steps == specs[-1].recipe.steps
    )  # one control is shared


def test_section_5_equals_table_1_of_paper():
    P = check_parameters(
        "image",
        scale="paper",
        dataset="cifar10",
        deficit_lengths=None,
        deficit_starts=[16_000, 32_000, 64_000],
        decay=["recipe"],
        controls=False,
    )
    specs = paper_runs.section_5(P)
    assert [s.arm for s in specs if s.seed == 0] == [
        "no deficit, 256K",
        "[0, 16K) of 272K",
        "[0, 32K) of 288K",
        "[0, 64K) of 320K",
        "[0, 128K) of 384K",
        "[0, 256K) of 512K",
        "[16K, 144K) of 256K",
        "[32K, 160K) of 256K",
        "[64K, 192K) of 256K",
    ]


def test_section_5_trains_every_decay():
    names = {
        "deficit_lengths": [0, 5],
        "deficit_starts": [],
        "controls": False,
        "q_max": [6, 8],
        "seeds": [0],
    }
    P = check_parameters(
        "image", dataset="digits-graph", decay=["constant", "step", "cosine"], **names
    )
    specs = paper_runs.section_5(P)
    assert Counter((s.recipe.lr_rule, s.q_max) for s in specs) == {
        (rule, top): 2 for rule in P.decay for top in (6, 8)
    }


def test_figure_6_prints_short_cycle_warnings(capsys):
    paper_runs.figure_6(given(paper_runs.figure_6, "demo"))
    assert "ShortCycleWarning: RR: 4 cycles" in capsys.readouterr().out
    paper_runs.figure_6(given(paper_runs.figure_6, "smoke"))
    assert capsys.readouterr().out == ""
