"""Solutions of the exercises of 08_choosing_a_schedule.ipynb: one way of many."""

import cpt_core as cpt
from cpt_core.teaching import exercises

# 1. The solver bends the cosine until its cost is the budget.
half = cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=64_000, family="cosine")

# 2. Never above q_min: static 4 bits.
lowest = (4**2 + 2 * 4 * 8) / 192

# 3. The q_min that the range test found.
bits = 4


# 5. Every bit less makes the variance of the rounding four times as large.
def noise(schedule):
    """Return the noise exposure of a schedule, relative to static 8 bits."""
    return (4.0 ** (8 - schedule.bits())).mean()


exercises.check("08.1", half)
exercises.check("08.2", lowest)
exercises.check("08.3", bits)
exercises.check("08.5", noise)
