"""Verdicts and predictions of notebooks 08 and 12; what they draw and print of committed rows, nbval compares."""

import numpy as np
import pytest

from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis.estimates import Estimate
from cpt_lessons import choosing
from cpt_lessons.predictions import PREDICTIONS


def test_the_cycle_that_is_predicted_spends_most_steps_at_2_bits():
    cycle = solve_schedule(StaticSchedule(3, 160).relative_cost(8, 8), 2, 8, 160, n_cycles=2, family="cosine")
    assert PREDICTIONS["steps at 2 bits"][0] == "c"
    assert cycle.share_at(2) > 2 / 3


def test_a_verdict_needs_holms_correction():
    rng = np.random.default_rng(0)
    near = Estimate("near", "points", 0.1 * (x := rng.normal(size=9)) - 0.1 * x.mean(), 0.2)
    far, wide = Estimate("far", "points", near.values - 1, 0.2), Estimate("wide", "points", 99 * near.values, 0.2)
    words = [line[-1] for line in choosing.in_margins([near, far, wide], "abc", below="lost")]
    assert [word.split(" ")[0] for word in words] == ["alike", "lost", "open"]
    assert choosing.in_margins([far], "a", above="won")[0][1] == pytest.approx(-5)
