"""Solutions of the exercises of 02_quantizers_and_bitops.ipynb: one way of many."""

import torch

import cpt_core as cpt
from cpt_core.teaching import exercises

# 1. 2^q.
values = 2**5

# 2. Three products: 4 by 4 bits, and twice 4 by 8.
relative = (4**2 + 2 * 4 * 8) / (3 * 8**2)


# 4. The same with letters.
def step_cost(q, q_max):
    """Return the cost of a step at q bits, relative to one at q_max."""
    return (q**2 + 2 * q * q_max) / (3 * q_max**2)


# 5. The formula of section 1, line by line.
def rounded(x, q):
    """Return x on a grid of 2^q values."""
    step = (x.max() - x.min()) / (2**q - 1)
    return torch.round((x - x.min()) / step) * step + x.min()


# 6. 4 pictures, 32 x 32 places, 32 channels out, each a sum over 16 channels of 3 x 3.
macs = cpt.count_bitops(torch.nn.Conv2d(16, 32, 3, padding=1), (torch.empty(4, 16, 32, 32),)).forward_macs

exercises.check("02.1", values)
exercises.check("02.2", relative)
exercises.check("02.4", step_cost)
exercises.check("02.5", rounded)
exercises.check("02.6", macs)
