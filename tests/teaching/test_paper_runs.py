"""Runs of the paper's figures, from the parameters of notebooks."""

from collections import defaultdict

import pytest
from helpers import refused

from cpt_core.schedules.profiles import SUITE
from cpt_lessons import paper_runs, parameters
from cpt_lessons.paper_runs import figure_3, figure_4, figure_5, figure_6, figure_7
from cpt_lessons.parameters import check_parameters

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)

# figure -> task of the notebook, embedded data set, the paper's
FIGURES = {
    figure_3: ("image", "digits", "cifar10"),
    figure_4: ("detection", "digit-scenes", "voc2012"),
    figure_6: ("graph", "digits-graph", "ogbn-arxiv"),
    figure_7: ("language_model", "pydoc", "ptb"),
}
DEFAULTS = {
    "schedules": list(SUITE),
    "static_bits": None,
    "q_max": [8],
    "seeds": None,
    "q_min": None,
    "q_grad": None,
    "n_cycles": None,
    "steps": None,
    "learning_rate": None,
}
TWO_SCHEDULES = {"schedules": ["CR", "RR"], "static_bits": [], "seeds": [0, 1]}
CHANGED = {
    **{"schedules": ["RR"], "static_bits": [5], "q_min": 4, "q_grad": 7, "seeds": [9]},
    **{"n_cycles": 3, "steps": 90, "learning_rate": 0.125},
}
PAIRS = {"pairs": "templates", "schedules": [], "seeds": [0]}
GRAPH = {"q_max": [6, 8], "seeds": [0, 1]}
BOTH_AGGREGATIONS = {"aggregations": ["fp", "quantized"]}


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    """Allow parameters to name missing data."""
    monkeypatch.setattr(parameters, "check_data", lambda recipe: None)


def parameters_of(figure, scale="smoke", **changes):
    task, embedded, of_paper = FIGURES.get(figure, FIGURES[figure_6])
    values = {**DEFAULTS, "dataset": of_paper if scale == "paper" else embedded}
    if figure is figure_6:
        values["aggregations"] = ["fp"]
    return check_parameters(task, scale=scale, **{**values, **changes})


def describe(specs):
    """Return a line for all runs that differ in arm and seed alone, with the seeds of every arm."""
    assert len({s.key for s in specs}) == len(specs)
    seeds = defaultdict(lambda: defaultdict(list))
    for s in specs:
        r = s.recipe
        kind = f" {r.aggregation}" if r.task == "graph" else ""
        settings = f"{r.task}{kind}, {r.steps} steps, {r.n_cycles} cycles, "
        settings += f"rate {r.lr} ({getattr(r, 'lr_rule', 'of its task')}), "
        settings += f"bits {r.q_min} to {s.q_max}, gradients {s.q_grad}"
        seeds[settings][s.arm].append(s.seed)
    lines = []
    for settings, arms in seeds.items():
        by_seeds = defaultdict(list)
        for arm, numbers in arms.items():
            by_seeds[" ".join(map(str, numbers))].append(arm)
        lines += [f"{settings}:"]
        lines += [f"  seeds {key}: {', '.join(by_seeds[key])}" for key in by_seeds]
    return "\n".join(lines or ["no runs"])


EVERY_SCALE = [
    (scale, changes)
    for scale in ("smoke", "demo", "paper")
    for changes in (TWO_SCHEDULES, {"q_max": [6, 8], "seeds": [3]})
]
CASES = {  # figure -> scales and parameters
    figure_3: [
        *EVERY_SCALE,
        ("demo", {"q_max": [6, 8], "static_bits": [4, 8], "seeds": [0]}),
    ],
    figure_4: EVERY_SCALE,
    figure_5: [
        ("smoke", GRAPH),
        ("smoke", {**GRAPH, "aggregations": ["quantized"]}),
        ("smoke", {**GRAPH, **BOTH_AGGREGATIONS, "static_bits": []}),
    ],
    figure_6: [*EVERY_SCALE, ("smoke", BOTH_AGGREGATIONS)],
    figure_7: [
        *EVERY_SCALE,
        ("smoke", {"pairs": "templates"}),
        ("smoke", {"pairs": "templates", "dataset": "", "learning_rate": 0.1}),
        *(
            (scale, {**PAIRS, "dataset": "", "q_max": [q_max]})
            for scale, q_max in (("smoke", 8), ("demo", 8), ("demo", 6), ("demo", 2))
        ),
    ],
}


@pytest.mark.parametrize("figure", CASES, ids=lambda f: f.__name__)
def test_figure_runs(figure, golden):
    cases = CASES[figure]
    if figure in FIGURES:
        cases = [*cases, ("smoke", {}), ("smoke", CHANGED)]
    blocks = []
    for scale, changes in cases:
        specs = figure(parameters_of(figure, scale, **changes))
        title = ", ".join([scale, *(f"{k}={v!r}" for k, v in changes.items())])
        blocks.append(f"{title}\n{describe(specs)}\n")
    golden(f"paper_runs/{figure.__name__}.txt", "\n".join(blocks))


def test_figure_7_needs_separate_learning_rates():
    P = parameters_of(figure_7, pairs="templates", learning_rate=0.1)
    message = "learning_rate: expected None for a text and sentence pairs together"
    refused(message, figure_7, P)


def test_figure_6_prints_short_cycle_warnings(capsys):
    figure_6(parameters_of(figure_6, "demo"))
    assert "ShortCycleWarning: RR: 4 cycles" in capsys.readouterr().out
    figure_6(parameters_of(figure_6, "smoke"))
    assert capsys.readouterr().out == ""


DEFICITS = {"deficit_lengths": [0, 5], "deficit_starts": [1], "deficit_window": 4}
SECTION_5 = {
    "image": {"dataset": "digits", **DEFICITS},
    "graph": {"dataset": "digits-graph", **DEFICITS},
    "language_model": {"dataset": "pydoc", **DEFICITS},
    "table_1": {
        "scale": "paper",
        "dataset": "cifar10",
        "deficit_lengths": None,
        "deficit_starts": [16_000, 32_000, 64_000],
        "decay": ["recipe"],
        "controls": False,
    },
    "every_decay": {
        "dataset": "digits-graph",
        "decay": ["constant", "step", "cosine"],
        "deficit_lengths": [0, 5],
        "deficit_starts": [],
        "controls": False,
        "q_max": [6, 8],
        "seeds": [0],
    },
}


@pytest.mark.parametrize("name", SECTION_5)
def test_section_5_runs(name, golden):
    """Train deficits on data of every task, as in table 1 of the paper, and with every decay."""
    P = check_parameters("image", **SECTION_5[name])
    specs = paper_runs.section_5(P)
    assert {s.recipe.task for s in specs} == {P.task} == {P.store.stem}
    golden(f"paper_runs/section_5_{name}.txt", describe(specs) + "\n")
