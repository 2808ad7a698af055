"""Solutions of the exercises of 01_schedules.ipynb: one way of many."""

import math

import cpt_core as cpt
from cpt_lessons import exercises

# 1. The exponential leaves q_min at once, its horizontal mirror comes to q_min only at the end.
name = "ETH"

# 2. The straight line costs 0.63; a power above 1 stays low for longer.
mine = cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=1000)


# 3. The place in the cycle, the profile or its mirror image, the bits.
def eth(t):
    """Return the bits of step t."""
    cycle, x = divmod(t / 8000, 1)
    if cycle % 2 == 0:
        x = 1 - x
    return round(3 + 5 * (1 - math.exp(-4 * x)))


# 4. True counts as 1.
def share_at_min(schedule):
    """Return the share of steps at q_min."""
    return (schedule.bits() == schedule.q_min).mean()


# 5. RR stays at few bits for most of a cycle; one cycle ends with many of them.
cheap = cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=400, n_cycles=1)

exercises.check("01.1", name)
exercises.check("01.2", mine)
exercises.check("01.3", eth)
exercises.check("01.4", share_at_min)
exercises.check("01.5", cheap)
