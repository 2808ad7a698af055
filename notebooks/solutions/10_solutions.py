"""Solutions of the exercises of 10_baselines_of_equal_cost.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises


# 1. More bits cost more, so the most expensive precision within the budget has the most bits. It is the baseline of
# every schedule of that budget.
def static_of(budget):
    """Return the most bits of a static precision within a budget."""
    return max(q for q in range(1, 9) if (q**2 + 2 * q * 8) / (3 * 8**2) <= budget)


# 2. Solve 192 c = q^2 + 16 q for q. The bits grow like a root of the cost, and noise falls by 4 with each bit, so the
# first bits save far more noise than the last ones: n is convex, as Jensen's inequality requires.
def noise(cost):
    """Return the noise of a step of some cost, relative to a step at 8 bits."""
    bits = (64 + 192 * cost) ** 0.5 - 8
    return 4 ** (8 - bits)


# 3. Few bits first, then as many as the budget allows, without a cycle. `train(mine, seed) - train(static, seed)`
# over ten seeds shows whether it wins.
mine = cpt.FunctionSchedule(
    lambda u: 2 if u < 0.45 else 3 if u < 0.9 else 4, total_steps=160
)
assert mine.relative_cost(q_grad=8, q_max=8) <= cpt.StaticSchedule(
    3, 160
).relative_cost(q_grad=8, q_max=8)

exercises.check("10.1", static_of)
exercises.check("10.2", noise)
