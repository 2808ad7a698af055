"""Solutions of the exercises of 18_damage_or_lost_time.ipynb: one way of many."""

from cpt_lessons import exercises


# 1. A mean over steps does not depend on their order, so only the number of low steps matters, not their date. Low
#    steps cost (q^2 + 16 q) / 192 of one at 8 bits, all others 1.
def cost_of_deficit(low_steps, steps, q):
    """Return the cost of a training with a deficit, relative to static 8 bits."""
    low = (q**2 + 16 * q) / 192
    return (low_steps * low + steps - low_steps) / steps


# 2. arms["[100, 200) of 300"] = cpt.DeficitSchedule(2, 8, [(100, 200)], 300). Windows are half-open, so that this one
#    has exactly 100 low steps. Compare it with "no deficit, 300" and "no deficit, 200", as `against_controls` does.

# 3. Without `rate.step()` the last steps are as large as the first, and rounding errors of 2 bits move the weights by
#    as much. Low steps at the start still have 200 good ones after them.

exercises.check("18.1", cost_of_deficit)
