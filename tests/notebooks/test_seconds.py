"""What notebook 09 draws, on costs that are known."""

import pytest

from cpt_core.inspecting.measured import MeasuredCost, Spent
from cpt_lessons import seconds


def test_a_step_over_its_bits_relative_to_one():
    steps = {q: Spent(took, kept, 1.0) for q, took, kept in ((3, 2.0, 10), (8, 4.0, 10), (16, 5.0, 40))}
    (ax,) = seconds.promise_and_machine(MeasuredCost("a machine", 8, "paper", steps, {})).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert drawn["bit operations"] == pytest.approx([57 / 192, 1, 512 / 192])
    assert drawn["seconds"] == [0.5, 1, 1.25]
    assert drawn["memory for the backward pass"] == [1, 1, 4]
    assert all(line.get_xdata().tolist() == [3, 8, 16] for line in ax.lines)
