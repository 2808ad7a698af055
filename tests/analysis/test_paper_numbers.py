"""Numbers printed in the paper: completeness, places, spreads, and measured values in equal units."""

import pandas as pd
import pytest

from cpt_lab.analysis import paper_comparison
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.paths import paper_dir
from tests.helpers import row_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


def with_valid(row, value):
    """Return the row with its main metric on validation data added."""
    (metric, *_) = row["metrics"]
    return {**row, "metrics": [metric, {**metric, "split": "valid", "value": value}]}


def test_paper_numbers_have_places_and_spreads():
    listed = pd.read_csv(paper_dir() / "numbers.csv")
    assert len(listed) > 20
    assert listed.place.str.len().gt(4).all()
    assert listed.value.notna().all()
    assert not listed.duplicated(
        ["artefact", "dataset", "model", "arm", "minus", "q_max", "metric"]
    ).any()
    table_1 = listed[listed.artefact == "table_1"]
    assert table_1["std"].between(0.03, 0.2).all()
    known = table_1[table_1.arm == "no deficit"].set_index("dataset")
    assert known.value.to_dict() == {"cifar10": 92.23, "imagenet": 67.44}
    assert known["std"].to_dict() == {"cifar10": 0.09, "imagenet": 0.12}
    assert set(table_1["value"]) >= {92.08, 66.65}


def test_paper_comparison_uses_paper_units():
    choices = {"schedules": ["CR"], "static_bits": [8], "q_max": [8], "seeds": [0, 1]}
    specs = designs.quality_cost("paper", "ptb", task="language_model", **choices)
    rows = [
        {
            **row_of(s, 100.0, "perplexity"),
            "bitops": {"paper": 9.1555e13 + 1e11 * s.seed},
        }
        for s in specs
    ]
    found = paper_comparison.summary(table(rows)).set_index(["what", "arm"])[
        "ours (+- std, or [95 %])"
    ]
    assert found["figure 7: ptb, lstm", "static 8"] == "9.16 +- 0.01 (n = 2)"
    assert found["figure 7: ptb, lstm", "RR"] == "not run"
    assert set(found["table 1: cifar10, resnet74"]) == {"not run"}


def test_paper_comparison_computes_differences():
    """Compare differences in points per experiment at paper scale; compute the savings."""
    specs = designs.quality_cost("paper", "voc2012", schedules=["ETV"], seeds=[0, 1, 2])
    rows = [row_of(s, 0.6 + 0.0102 * (s.arm == "ETV"), "map50") for s in specs]
    nodes = designs.quality_cost(
        "paper", "ogbn-products", schedules=["RR", "RTH"], q_max=[6]
    )
    rows += [row_of(s, 0.7 + 0.01 * (s.arm == "RTH")) for s in nodes]
    pairs = designs.aggregation("paper", "ogbn-arxiv")
    rows += [
        with_valid(row_of(s, 0.5), 0.6 + 0.004 * (s.recipe.aggregation == "fp"))
        for s in pairs
    ]
    small = [
        row_of(s, 0.1)
        for s in designs.quality_cost("demo", "ogbn-arxiv", schedules=["RR", "RTH"])
    ]
    found = paper_comparison.summary(table([*rows, *small])).set_index(["what", "arm"])[
        "ours (+- std, or [95 %])"
    ]
    assert found["figure 4: voc2012, retinanet", "ETV minus static"].startswith(
        "made up, q_max 8: +1.02 ["
    )
    assert (
        "; " not in found["figure 4: voc2012, retinanet", "ETV minus static"]
    )  # the paper's is of q_max 8
    assert found["figure 6: ogbn-products, sage", "large minus static"].startswith(
        "made up, q_max 6: +0.50 "
    )
    assert found["figure 5: ogbn-arxiv, gcn", "FP-Agg minus Q-Agg"].startswith(
        "made up: +0.40 "
    )  # validation
    assert (
        found["figure 6: ogbn-arxiv, gcn", "large minus static"]
        == "+0.00 [+0.00, +0.00] (n = 3)"
    )  # small scale
    assert found["figure 4: voc2012, retinanet", "ETV"] == "23.1 %, computed"
    assert found["figure 6: ogbn-products, sage", "large"] == "60.1 %, computed"


def test_paper_comparison_labels_best_test_epoch():
    """Label the best epoch as chosen on the test set, as no data are held out at paper scale."""
    (spec,) = designs.deficit_length(
        "paper", "imagenet", deficit_lengths=[0], seeds=[0]
    )
    row = row_of(spec, 0.67)
    row["metrics"].append({**row["metrics"][0], "when": "best_test", "value": 0.68})
    found = (
        paper_comparison.summary(table([row]))
        .set_index(["what", "arm"])
        .loc[("table 1: imagenet, resnet18", "no deficit")]
    )
    assert found[
        ["ours (+- std, or [95 %])", "ours, best epoch on test"]
    ].to_list() == [
        "67.00 (n = 1)",
        "68.00 (n = 1)",
    ]
