"""Solutions of the exercises of 00_start_here.ipynb: one way of many."""

import cpt_core as cpt
from cpt_core.teaching import exercises

# 1. Large savings: RR or RTH.
half = cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=64_000)

# 2. Small savings, and its first cycle runs downwards.
falling = cpt.make_schedule("ETH", q_min=3, q_max=8, total_steps=64_000)

# 3. The cosine rounds to 8 bits above 7.5: in the last fifth of a cycle.
share = (cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64_000, n_cycles=8).bits() == 8).mean()

exercises.check("00.1", half)
exercises.check("00.2", falling)
exercises.check("00.3", share)
