"""Settings, claims and printed numbers of the paper beside those of synthetic or committed runs."""

import pandas as pd
import pytest

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import claims, figure_data, reproduction
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.experiments.grids import grid_specs
from tests.helpers import row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


def settings(topic, specs, drawn=()):
    return reproduction.settings_table(topic, specs, drawn).set_index("setting")


def test_settings_table_marks_differences():
    specs = designs.quality_cost("paper", "cifar10", "resnet74", q_max=[6, 8])
    assert not settings("images", specs)["this run"].str.contains("≠").any()
    changed = designs.quality_cost(
        "paper",
        "cifar10",
        "resnet74",
        q_max=[6, 8],
        momentum=0.5,
        flip=False,
        seeds=[0],
    )
    this = settings("images", changed)["this run"]
    assert this[this.str.contains("≠")].to_dict() == {
        "optimizer": "SGD, momentum 0.5 ≠",
        "seeds": "1 ≠",
        "flip": "no ≠",
    }


def test_settings_table_shows_paper_values():
    found = settings("images", grid_specs("cifar10-jpeg/figure_3"))
    assert found.loc["optimizer steps", "paper: CIFAR-10"] == "64,000"
    assert found.loc["optimizer steps", "paper: ImageNet"] == "450,450"
    assert found.loc["optimizer steps", "this run"] == "3,900 ≠"
    assert found.loc["learning-rate decay", "this run"] == "a tenth at 50 and 75 %"
    assert (
        found.loc["schedules and static bits", "this run"]
        == "10 schedules, static 3, 4, 5, 6, 8 ≠"
    )


@pytest.mark.parametrize(
    ("topic", "dataset", "columns"),
    [
        ("graphs", "digits-graph", ["paper: OGBN-Arxiv", "paper: OGBN-Products"]),
        ("language", "pydoc", ["paper: Penn Treebank"]),
        ("entailment", "templates", ["paper: XNLI"]),
        ("detection", "digit-scenes", ["paper: Pascal VOC 2012"]),
    ],
)
def test_settings_table_selects_task_columns(topic, dataset, columns):
    specs = designs.quality_cost("smoke", dataset)
    found = reproduction.settings_table(topic, specs, specs)
    assert list(found) == ["setting", *columns, "figure below", "this run"]


@pytest.mark.parametrize(
    ("topic", "specs", "message"),
    [
        ("pictures", [], "unknown topic 'pictures'"),
        ("images", [], "specs: expected at least one run here or in drawn, got none"),
        (
            "images",
            designs.quality_cost("demo", "pydoc", schedules=["ER"]),
            "no experiment of task 'language_model'",
        ),
    ],
)
def test_settings_table_rejects_wrong_arguments(topic, specs, message):
    with pytest.raises(ValueError, match=message):
        reproduction.settings_table(topic, specs)


def test_claims_belong_to_one_section():
    sections = [reproduction.section_of_claim(claim) for claim in claims.claims()]
    assert set(sections) == set(reproduction.SECTIONS)
    shown = sum(
        len(reproduction.claims_table(topic)) for topic in reproduction.SECTIONS
    )
    assert shown == len(sections)


def test_claims_table_names_missing_runs():
    nothing = reproduction.claims_table("images", table([]))
    assert set(nothing["verdict"]) == {"not run"}
    assert nothing["data and scale"].str.startswith("needs ").all()


def test_claims_table_prefers_experiment_nearest_paper():
    small = [
        row_of(s, 0.9 if s.arm == "static 8" else 0.8)
        for s in designs.quality_cost("demo", "digits")
    ]
    large = [
        row_of(s, 0.7 if s.arm == "static 8" else 0.75)
        for s in grid_specs("cifar10-jpeg/figure_3")
    ]
    found = reproduction.claims_table("images", table([*small, *large])).set_index(
        "the paper says"
    )
    line = found.loc[
        "CIFAR: schedules of small savings improve on static q_max (section 4.2)"
    ]
    assert "background scale (and 1 other experiment)" in line["data and scale"]
    assert "+5.00" in line["measured"]
    assert "n = 4" in line["measured"]


def test_printed_table_lists_every_paper_number():
    whole = reproduction.printed_table()
    assert len(whole) == 25
    parts = [
        reproduction.printed_table(topic)
        for topic in reproduction.SECTIONS
        if topic != "schedules"
    ]
    assert sum(map(len, parts)) == 25
    unmeasured = whole[whole["ours (+- std, or [95 %])"] == "not run"]
    assert unmeasured["data and scale"].str.startswith("needs ").all()
    measured = whole.drop(unmeasured.index)
    assert (
        measured["data and scale"]
        .str.match("paper scale|the paper's setting|stand-in: .* scale$")
        .all()
    )


def test_experiments_put_largest_scale_first():
    demo = [row_of(s, 0.8) for s in designs.quality_cost("demo", "digits")]
    background = [row_of(s, 0.7) for s in grid_specs("cifar10-jpeg/figure_3")]
    few = [
        s
        for s in designs.quality_cost("paper", "cifar10", "resnet74")
        if s.arm in ("CR", "static 8")
    ]
    runs = table([*demo, *background, *(row_of(s, 0.9) for s in few)])
    found = [
        part["scale"].iloc[0] for part in figure_data.experiments("figure_3", runs)
    ]
    assert found == [
        "background",
        "demo",
        "paper",
    ]  # two schedules do not show how quality depends on cost
    assert figure_data.best_rows("figure_3", runs)["scale"].iloc[0] == "background"
    assert set(SUITE) <= set(figure_data.best_rows("figure_3", runs)["arm"])


def test_experiments_put_single_seed_last():
    """Prefer a smaller scale with several seeds to a larger one with a single seed."""
    demo = [row_of(s, 0.8) for s in designs.quality_cost("demo", "digits")]
    background = [row_of(s, 0.7) for s in grid_specs("cifar10-jpeg/figure_3")]
    first_seed = [row for row in background if row["spec"]["seed"] == 10]
    runs = table([*demo, *first_seed])
    scales = [p["scale"].iloc[0] for p in figure_data.experiments("figure_3", runs)]
    assert scales == ["demo", "background"]


def test_experiments_combine_both_q_max():
    specs = designs.quality_cost("demo", "digits", q_max=[6, 8])
    (found,) = figure_data.experiments(
        "figure_3", table([row_of(s, 0.8) for s in specs])
    )
    assert set(found["q_max"]) == {6, 8}


def test_specs_of_reads_committed_stores():
    rows = figure_data.best_rows("figure_4")
    assert {spec.key for spec in figure_data.specs_of(rows)} == set(rows["key"])
    assert (
        figure_data.specs_of(
            pd.DataFrame({"store": ["runs/demo/image.jsonl"], "key": ["0"]})
        )
        == []
    )


def test_claims_table_prefers_seeds_to_scale():
    small = [
        row_of(s, 0.9 if s.arm == "static 8" else 0.8)
        for s in designs.quality_cost("demo", "digits")
    ]
    one_seed = [
        row_of(s, 0.7) for s in grid_specs("cifar10-jpeg/figure_3") if s.seed == 10
    ]
    found = reproduction.claims_table("images", table([*small, *one_seed])).set_index(
        "the paper says"
    )
    line = found.loc[
        "CIFAR: schedules of small savings improve on static q_max (section 4.2)"
    ]
    assert "demo scale (and 1 other experiment)" in line["data and scale"]
    assert "n = 5" in line["measured"]


def test_settings_table_uses_author_settings():
    """Compare section 5 with the settings that its authors gave."""
    found = settings("critical-periods", grid_specs("cifar10-jpeg/table_1"))
    assert found.loc["weight decay", "paper: CIFAR-10"] == "0"
    assert found.loc["weight decay", "this run"] == "0"
    assert found.loc["optimizer steps", "paper: CIFAR-10"] == "256,000"
    assert (
        "deficits of 16,000, 32,000"
        in found.loc["schedules and static bits", "paper: CIFAR-10"]
    )


def test_settings_table_compares_same_network():
    sage = designs.quality_cost("paper", "ogbn-products", "sage", q_max=[6, 8])
    found = reproduction.settings_table("graphs", [], sage).set_index("setting")[
        "figure below"
    ]
    assert not found.str.contains("≠").any()


def test_settings_table_counts_seeds_per_arm():
    specs = designs.quality_cost("demo", "digits", seeds=[0, 1])
    specs += designs.quality_cost(
        "demo", "digits", schedules=[], static_bits=[8], seeds=[2]
    )
    assert settings("images", specs).loc["seeds", "this run"].startswith("2 to 3")
