"""Solutions of the exercises of 07_critical_periods.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. A step at 2 bits costs (4 + 2 * 16) / 192.
relative = (200 * 36 + 400 * 192) / (600 * 192)

# 2. The end of a window is not in it.
window = cpt.DeficitSchedule(3, 8, [(16_000, 144_000)], 256_000)

# 3. Damage is a loss against the good steps alone: N, which are 400. Against R + N steps it may be lost time.
steps = 400

# 5. Two windows.
both_ends = cpt.DeficitSchedule(2, 8, [(0, 100), (500, 600)], 600)


# 6. Low steps at their cost, the others at 1.
def cost_of_deficit(low_steps, steps, q):
    """Return the cost of a training with a deficit, relative to 8 bits throughout."""
    low = (q**2 + 2 * q * 8) / (3 * 8**2)
    return (low_steps * low + steps - low_steps) / steps


exercises.check("07.1", relative)
exercises.check("07.2", window)
exercises.check("07.3", steps)
exercises.check("07.5", both_ends)
exercises.check("07.6", cost_of_deficit)
