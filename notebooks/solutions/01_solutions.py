"""Solutions of the exercises of 01_schedules.ipynb: one way of many."""

import math

import cpt_core as cpt
from cpt_core.teaching import exercises

# 1. The exponential leaves q_min at once, its horizontal mirror comes to q_min only at the end.
name = "ETH"

# 2. The straight line costs 0.63; a power above 1 stays low for longer.
mine = cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=1000)


# 3. The place in the cycle, the profile, the bits.
def cosine(t):
    """Return the bits of step t."""
    x = (t % 8000) / 8000
    return round(3 + 5 * (1 - math.cos(math.pi * x)) / 2)


# 4. True counts as 1.
def share_at_min(schedule):
    """Return the share of steps at q_min."""
    return (schedule.bits() == schedule.q_min).mean()


exercises.check("01.1", name)
exercises.check("01.2", mine)
exercises.check("01.3", cosine)
exercises.check("01.4", share_at_min)
