"""Costs of the arms of H7 and H10 under three cost models, against sums written out by hand."""

import pytest

from cpt_lab.studies import prices
from cpt_lab.studies.h7.arms import STUDY as H7
from cpt_lab.studies.h10.arms import STUDY as H10


def by_hand(parts):
    """Return shares of 8/8 by a * b, max(a, b)^2 and tensor-core rate; ``parts`` are (weight, forward, gradient)."""
    functions = (
        lambda a, b: a * b,
        lambda a, b: max(a, b) ** 2,
        lambda a, b: 0.5 if max(a, b) <= 4 else 1.0,
    )
    for price in functions:
        spent = sum(share * (price(f, f) + 2 * price(f, g)) for share, f, g in parts)
        yield spent / (3 * price(8, 8))


ARMS = {
    "4/4": [(1, 4, 4)],
    "4/6": [(1, 4, 6)],
    "5/4": [(1, 5, 4)],
    "forward late": [(0.8, 4, 4), (0.2, 8, 4)],
    "forward spread": [(0.8, 4, 4), (0.2, 8, 4)],
    "gradients late": [(0.5, 4, 4), (0.5, 4, 8)],
    "8/8": [(1, 8, 8)],
}


@pytest.mark.parametrize("case", ["digits", "digits-mx"])
def test_prices_of_switches_equal_hand_computation(case):
    found = prices.prices(H10, case).set_index("arm")
    assert list(found.columns) == list(prices.PRICES)
    for arm in set(ARMS) & set(found.index):
        assert found.loc[arm].tolist() == pytest.approx(
            list(by_hand(ARMS[arm])), abs=1e-3
        ), arm
    assert {"4/6", "forward late", "8/8"} <= set(found.index)


def test_prices_disagree_on_cheaper_arm():
    """Price static 4/6 above the late forward switch by two models, at equal cost by a * b."""
    found = prices.prices(H10, "digits").set_index("arm")
    late, static = found.loc["forward late"], found.loc["4/6"]
    assert late[prices.BITOPS] == pytest.approx(static[prices.BITOPS])
    assert static[prices.WIDER_OPERAND] > late[prices.WIDER_OPERAND] + 0.05
    assert static[prices.TENSOR_CORES] > late[prices.TENSOR_CORES] + 0.2


def test_price_table_selects_arms():
    table = prices.price_table(H7, "digits", ["3/8", "4/5"])
    assert table["arm"].tolist() == ["3/8", "4/5"]
    assert table[prices.BITOPS].tolist() == ["0.297", "0.292"]
    assert table[prices.WIDER_OPERAND].tolist() == ["0.714", "0.344"]
    assert table[prices.TENSOR_CORES].tolist() == ["0.833", "0.833"]
