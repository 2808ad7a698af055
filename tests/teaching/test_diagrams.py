"""Drawings that explain an idea show what they say."""

import numpy as np
import pytest

from cpt_core.schedules import cost
from cpt_lessons import diagrams


@pytest.mark.parametrize("q", [2, 3, 5])
def test_slopes_are_0_nearly_everywhere_or_near_1(q):
    left, right = diagrams.slopes(q, narrow=1e-4, wide=0.4).axes
    wide, narrow, _ = (line.get_ydata() for line in right.lines)
    assert np.median(narrow) == 0
    assert 0 < (narrow > 2).mean() < 0.05  # at the jumps
    assert np.abs(wide - 1).max() <= 2 / (2**q - 1) / 0.8 + 1e-9  # the bound of the notebook: s / 2h
    assert len(set(np.round(left.lines[1].get_ydata(), 9))) == 2**q
    for line in left.lines[2:]:  # a difference is drawn from stair to stair
        (x0, x1), (y0, y1) = line.get_data()
        assert abs((y1 - y0) / (x1 - x0) - 1) <= 2 / (2**q - 1) / (x1 - x0) + 1e-9


def test_at_random_the_mean_is_the_value_and_to_nearest_a_stair():
    nearest, random = (
        {line.get_label(): line.get_data() for line in ax.lines} for ax in diagrams.random_rounding(4).axes
    )
    x, mean = random["mean of the results"]
    assert np.abs(mean - x).max() < 0.08  # five times the deviation of the mean of 1000 draws
    x, mean = nearest["mean of the results"]
    assert mean.tolist() == np.rint(x).tolist()


@pytest.mark.parametrize(("q", "q_grad"), [(2, 8), (5, 6)])
def test_products_have_the_bits_of_their_operands_and_the_cost_of_a_step(q, q_grad):
    figure = diagrams.three_products(q, q_grad)
    assert figure.get_supxlabel().endswith(f"= {cost.step_cost(q, q_grad)}")
    bits = [sorted(int(t.get_text().split()[-2]) for t in ax.texts if "bits" in t.get_text()) for ax in figure.axes]
    assert bits == [[q, q], [q, q_grad], [q, q_grad]]
    said = figure.description().split("; ")
    assert said[1] == (
        f"error product: output gradients of {q_grad} bits times weights of {q} bits, cost {q * q_grad}, gives input "
        "gradients in float32"
    )
    assert [words.split(" product")[0] for words in said] == ["forward", "error", "weight gradient"]
