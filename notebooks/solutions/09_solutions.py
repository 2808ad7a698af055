"""Solutions of the exercises of 09_from_bitops_to_seconds.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. The mean of the steps' times, over that of a step at 16 bits.
relative = (0.4 * 20 + 0.6 * 40) / 40

# 2. Half of its steps are above 8 bits.
schedule = cpt.solve_schedule(0.75, q_min=4, q_max=16, total_steps=64_000, cost=lambda q: 20 if q <= 8 else 40)


# 3. 153.6 for 512 rows, 384 inputs, 1536 outputs.
def intensity(rows, inputs, outputs):
    """Return operations per byte."""
    return 2 * rows * inputs * outputs / (rows * inputs + inputs * outputs + 4 * rows * outputs)


# 4. 16 times a code is four bits further up.
def pack(codes):
    """Return bytes of two codes of 4 bits each, the first in the low four."""
    return codes[0::2] | codes[1::2] << 4


exercises.check("09.1", relative)
exercises.check("09.2", schedule)
exercises.check("09.3", intensity)
exercises.check("09.4", pack)
