"""Solutions of the exercises of 11_from_bitops_to_seconds.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. The solver bends a curve until the mean cost of its steps is the budget. Half of them are then above 8 bits, for
#    (0.5 * 20 + 0.5 * 40) / 40 = 0.75.
schedule = cpt.solve_schedule(
    0.75, q_min=4, q_max=16, total_steps=64_000, cost=lambda q: 20 if q <= 8 else 40
)


# 2. 16 times a code is four bits further up, and there the first code of the pair has none: so the two do not mix.
def pack(codes):
    """Return bytes of two codes of 4 bits each, the first in the low four."""
    return codes[0::2] | codes[1::2] << 4


# 3. x = torch.randn(384, 32), and two torch.nn.Linear(32, 32). Products shrink with the square of the width, rounding
#    in proportion to it, and what Python does for every layer not at all.

exercises.check("11.1", schedule)
exercises.check("11.2", pack)
