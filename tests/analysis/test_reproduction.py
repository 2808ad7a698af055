"""Settings, claims and printed numbers of the paper beside those of synthetic or committed runs."""

from functools import partial

import pandas as pd
import pytest
from helpers import refused

from cpt_lab.analysis import figure_data, reproduction
from cpt_lab.analysis.rendering import terminal
from cpt_lab.analysis.run_table import committed, table
from cpt_lab.experiments import designs
from cpt_lab.experiments.grids import grid_specs
from tests.analysis.synthetic import rows_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("few_preregistered"),
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]

paper = partial(designs.quality_cost, "paper")
smoke = partial(designs.quality_cost, "smoke")


def settings_tables():
    """Yield settings of topics: (title, topic, runs, drawn runs)."""
    own = paper("cifar10", "resnet74", q_max=[6, 8])
    yield "the paper's CIFAR-10", "images", own, ()
    changes = {"momentum": 0.5, "flip": False, "seeds": [0], "q_max": [6, 8]}
    yield "three changes", "images", paper("cifar10", "resnet74", **changes), ()
    copies = grid_specs("cifar10-jpeg/figure_3")
    yield "copies of CIFAR-10", "images", copies, ()
    for topic, dataset in (
        ("graphs", "digits-graph"),
        ("language", "pydoc"),
        ("entailment", "templates"),
        ("detection", "digit-scenes"),
    ):
        specs = smoke(dataset)
        yield f"smoke scale, {dataset}", topic, specs, specs
    deficits = grid_specs("cifar10-jpeg/table_1")
    yield "deficits", "critical-periods", deficits, ()
    sage = paper("ogbn-products", "sage", q_max=[6, 8])
    yield "the paper's GraphSAGE, drawn", "graphs", [], sage
    uneven = designs.quality_cost("demo", seeds=[0, 1], static_bits=[])
    uneven += designs.quality_cost("demo", schedules=[], static_bits=[8], seeds=[2])
    yield "seeds per arm", "images", uneven, ()


def test_settings_table_marks_differences_from_paper(golden):
    text = ""
    for title, topic, specs, drawn in settings_tables():
        shown = reproduction.settings_table(topic, specs, drawn)
        text += f"=== {title}\n{terminal(shown)}\n\n"
    golden("tables/settings.txt", text)


def shown_settings(topic, dataset, **changes):
    """Return the settings of smoke runs, {setting: words with a mark}."""
    specs = smoke(dataset, schedules=["ER"], static_bits=[], **changes)
    shown = reproduction.settings_table(topic, specs)
    return dict(zip(shown["setting"], shown["this run"], strict=True))


WSD = "rises from 0 in the first 5 %, falls to 0 in the last 20 %"
DECAY_WORDS = {
    ("images", "digits"): {
        "milestones": "a tenth at 50 and 75 %",
        "constant": "none ≠",
        "cosine": "cosine to 0 ≠",
        "wsd": f"{WSD} ≠",
        "cyclic_falling": "falls to 0 in every cycle ≠",
        "cyclic_rising": "rises from 0 in every cycle ≠",
    },
    ("language", "pydoc"): {
        "cosine": "cosine to 0.05 of it ≠",
        "step": "a tenth at 80 and 90 % ≠",
        "constant": "none ≠",
        "wsd": f"{WSD} ≠",
        "cyclic_falling": "falls to 0 in every cycle ≠",
        "cyclic_rising": "rises from 0 in every cycle ≠",
    },
}


@pytest.mark.parametrize(("topic", "dataset"), DECAY_WORDS)
def test_settings_table_names_every_decay(topic, dataset):
    expected = DECAY_WORDS[topic, dataset]
    shown = {
        rule: shown_settings(topic, dataset, lr_rule=rule)["learning-rate decay"]
        for rule in expected
    }
    assert shown == expected


def test_settings_table_rejects_decay_without_words():
    (spec,) = smoke("digits", schedules=["ER"], static_bits=[])
    object.__setattr__(spec.recipe, "lr_rule", "polynomial")
    refused(
        "lr_rule: no words for 'polynomial'",
        reproduction.settings_table,
        "images",
        [spec],
    )


@pytest.mark.parametrize(
    ("topic", "dataset", "words"),
    [("images", "digits", "SGD, momentum 0.9"), ("language", "pydoc", "SGD")],
)
def test_settings_table_names_optimizer(topic, dataset, words):
    assert shown_settings(topic, dataset)["optimizer"] == words
    assert shown_settings(topic, dataset, optimizer="adamw")["optimizer"] == "AdamW ≠"


@pytest.mark.parametrize(
    ("topic", "dataset", "message"),
    [
        ("pictures", "", "unknown topic 'pictures'"),
        ("images", "", "expected at least one run here or in drawn, got none"),
        ("images", "pydoc", "no experiment of task 'language_model'"),
    ],
)
def test_settings_table_rejects_wrong_arguments(topic, dataset, message):
    specs = smoke(dataset, schedules=["ER"]) if dataset else []
    refused(message, reproduction.settings_table, topic, specs)


@pytest.mark.parametrize(
    ("seeds", "scale", "words"),
    [((10, 11, 12, 13), "background", ("+5.00", "n = 4")), ((10,), "demo", ("n = 5",))],
)
def test_claims_table_prefers_seeds_then_scale(seeds, scale, words):
    small = rows_of(
        designs.quality_cost("demo", "digits", static_bits=[8]),
        lambda s: 0.9 if s.arm == "static 8" else 0.8,
        noise=0,
    )
    copies = [s for s in grid_specs("cifar10-jpeg/figure_3") if s.seed in seeds]
    large = rows_of(copies, lambda s: 0.7 if s.arm == "static 8" else 0.75, noise=0)
    found = reproduction.claims_table("images", table([*small, *large]))
    claim = "CIFAR: schedules of small savings improve on static q_max (section 4.2)"
    line = found.set_index("the paper says").loc[claim]
    assert f"{scale} scale (and 1 other experiment)" in line["data and scale"]
    assert all(word in line["measured"] for word in words)


def test_specs_of_reads_committed_stores():
    rows = figure_data.best_rows("figure_4", committed("detection_scenes"))
    assert len(rows)
    assert {spec.key for spec in figure_data.specs_of(rows)} == set(rows["key"])
    unknown = pd.DataFrame({"store": ["runs/demo/image.jsonl"], "key": ["0"]})
    assert figure_data.specs_of(unknown) == []
