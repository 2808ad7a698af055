"""Solutions of the exercises of 13_solver_and_range_test.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. The solver bends the cosine until its cost equals the budget.
half = cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=64_000, family="cosine")

# 2. A larger power keeps the bits low for longer. In the limit they never rise above 4, which is static 4 bits.
lowest = (4**2 + 2 * 4 * 8) / 192

# 3. The one that stays nearest to its mean, because a step at the lowest precision adds more noise than one at the
# highest saves.
families = ("rex", "linear", "cosine", "exponential")
noises = {
    name: cpt.solve_schedule(
        0.45, q_min=3, q_max=8, total_steps=64_000, family=name
    ).noise_exposure()
    for name in families
}
quietest = min(noises, key=noises.get)

exercises.check("13.1", half)
exercises.check("13.2", lowest)
exercises.check("13.3", quietest)
