"""Solutions of the exercises of 02_quantizers_and_bitops.ipynb: one way of many."""

import torch

import cpt_core as cpt
from cpt_lessons import exercises


# 5, in section 1. The formula line by line; where all values are equal, the least step saves from 0 / 0.
def quantize(x, q):
    """Return x on a grid of 2^q values."""
    s = ((x.max() - x.min()) / (2**q - 1)).clamp(min=1e-8)
    return torch.round((x - x.min()) / s) * s + x.min()


# 7, in section 2. x + (x_q - x) has the values of x_q; what is detached adds nothing to the gradient of x, which is 1.
def straight_through(x, q):
    """Return the values of x_q, with the gradient of x."""
    x_q = cpt.quantize(x.detach(), q)
    return x + (x_q - x).detach()


# 1. 2^q.
values = 2**5

# 2. Three products of 4 by 4 bits beside three of 8 by 8: here halving the bits does quarter the cost.
relative = (3 * 4 * 4) / (3 * 8 * 8)


# 4. Three products: q by q bits, and twice q by q_max.
def step_cost(q, q_max):
    """Return the cost of a step at q bits, relative to one at q_max."""
    return (q**2 + 2 * q * q_max) / (3 * q_max**2)


# 6. 4 pictures, 32 x 32 places, 32 channels out, each a sum over 16 channels of 3 x 3.
macs = cpt.count_bitops(torch.nn.Conv2d(16, 32, 3, padding=1), (torch.empty(4, 16, 32, 32),)).forward_macs


# 8. As 5, but minimum and maximum are columns: one of each per row.
def quantize_rows(x, q):
    """Return every row of a matrix on a grid of 2^q values of its own."""
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    s = ((high - low) / (2**q - 1)).clamp(min=1e-8)
    return torch.round((x - low) / s) * s + low


exercises.check("02.5", quantize)
exercises.check("02.7", straight_through)
exercises.check("02.1", values)
exercises.check("02.2", relative)
exercises.check("02.4", step_cost)
exercises.check("02.6", macs)
exercises.check("02.8", quantize_rows)
