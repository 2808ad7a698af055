"""Schedules by every cost: the table of the report."""

import pytest

from cpt_core.formats.costs import COSTS
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.costs import relative_costs, sections, table


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
    assert (affine.sort_values("bitops").diff().iloc[1:] > -1e-3).all(axis=None)  # other prices, the same order
    for _, part in shown.groupby(level="ladder"):
        assert part.iloc[-1].tolist() == pytest.approx([1.0] * len(COSTS), abs=1e-15)


def test_the_sections_say_what_the_costs_are():
    (costs,) = sections()
    assert costs.title == "Costs beside BitOps"
    assert len(costs.table) == 3 * len(SUITE) + 6 + 5 + 4
    said = " ".join(costs.notes)
    assert all(f"{name} ({cost.unit}; {cost.source})" in said for name, cost in COSTS.items())
