"""Schedules by every cost: the table of the report, and which arms two costs rank differently."""

import pandas as pd
import pytest

from cpt_core.formats.costs import COSTS
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.costs import TIE, ranked_differently, relative_costs, sections, table


@pytest.fixture(scope="module")
def shown():
    return table()


def test_the_arms_of_the_paper_by_every_cost(shown):
    ladders = shown.index.get_level_values("ladder").unique()
    assert list(ladders) == ["affine, levels 3 to 8", "minifloat, levels 4 to 8", "mx, levels 1 to 4"]
    affine = shown.loc["affine, levels 3 to 8"]
    assert list(affine.index) == [*SUITE, *(f"static {q}" for q in range(3, 9))]
    assert list(affine.columns) == list(COSTS)
    assert affine.loc["CR", "bitops"] == pytest.approx(0.633, abs=5e-4)
    assert affine["ace"].tolist() == affine["bitops"].tolist()
    assert affine.loc["static 3", "traffic"] == (3 / 4 + 4 + 2 * (3 / 8 + 1 + 4)) / 18
    assert relative_costs(3, 8).equals(affine)
    for _, part in shown.groupby(level="ladder"):
        assert part.iloc[-1].tolist() == pytest.approx([1.0] * len(COSTS), abs=1e-15)


def test_pairs_that_two_costs_rank_differently():
    costs = pd.DataFrame({"one": [1.0, 2.0, 3.0], "other": [2.0, 1.0, 3.0]}, index=["a", "b", "c"])
    (line,) = ranked_differently(costs).to_dict("records")
    assert line == {"cheaper": "a", "dearer": "b", "by": "one", "but_by": "other", "gap": 1.0, "other_gap": -0.5}
    (turned,) = ranked_differently(costs[["other", "one"]]).to_dict("records")
    assert (turned["cheaper"], turned["dearer"], turned["by"]) == ("b", "a", "other")


@pytest.mark.parametrize(("gap", "pairs"), [(0.5 * TIE, 0), (2 * TIE, 1), (0.0, 0)])
def test_ties_are_not_ranked(gap, pairs):
    costs = pd.DataFrame({"one": [1.0, 1.0 + gap], "other": [2.0, 1.0]})
    assert len(ranked_differently(costs)) == pairs


def test_whole_numbers_are_ranked_alike_and_floats_are_not(shown):
    assert ranked_differently(shown.loc["affine, levels 3 to 8"]).empty
    minifloat = ranked_differently(shown.loc["minifloat, levels 4 to 8"])
    found = minifloat[(minifloat["by"] == "bitops") & (minifloat["but_by"] == "multiplier")]
    pairs = set(zip(found["cheaper"], found["dearer"], strict=True))
    assert ("LR", "CR") in pairs
    assert ("static 7", "ER") in pairs  # e3m3 has the significand of e4m3
    assert not ((minifloat["by"] == "bitops") & (minifloat["but_by"] == "ace")).any()


def test_the_sections_say_what_the_costs_are():
    costs, pairs = sections()
    assert costs.title == "Costs beside BitOps"
    assert len(costs.table) == 3 * len(SUITE) + 6 + 5 + 4
    said = " ".join(costs.notes)
    assert all(f"{name} ({cost.unit}; {cost.source})" in said for name, cost in COSTS.items())
    assert "No pair on: affine" in pairs.notes[0]
    assert "ace" not in set(pairs.table["by"]) | set(pairs.table["but by"])
    assert len(pairs.table) > 10
