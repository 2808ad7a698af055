"""Solutions of the exercises of 08_choosing_a_schedule.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. The solver bends the cosine until its cost is the budget.
half = cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=64_000, family="cosine")

# 2. Never above q_min: static 4 bits.
lowest = (4**2 + 2 * 4 * 8) / 192

# 3. The q_min that the range test found.
bits = 4


# 4. The one that stays nearest to its mean: every step at the lowest precision adds more noise than one at the highest
# saves.
families = ("rex", "linear", "cosine", "exponential")
noises = {
    name: cpt.solve_schedule(0.45, q_min=3, q_max=8, total_steps=64_000, family=name).noise_exposure()
    for name in families
}
quietest = min(noises, key=noises.get)


# 5. Every bit less makes the variance of the rounding four times as large.
def noise(schedule):
    """Return the noise exposure of a schedule, relative to static 8 bits."""
    return (4.0 ** (8 - schedule.bits())).mean()


# 6. The cost of a step at q bits grows with q.
def static_of(budget):
    """Return the bits of the dearest static precision that a budget pays for."""
    return max(q for q in range(1, 9) if (q**2 + 2 * q * 8) / (3 * 8**2) <= budget)


exercises.check("08.1", half)
exercises.check("08.2", lowest)
exercises.check("08.3", bits)
exercises.check("08.4", quietest)
exercises.check("08.5", noise)
exercises.check("08.6", static_of)
