"""Random Hadamard rotation, which spreads what is large in a few places over all of them.  Beyond the paper.

>>> x = torch.tensor([[8.0, 0.0, 0.0, 0.0]])
>>> rotate(x, 4, seed=0).abs().tolist()
[[4.0, 4.0, 4.0, 4.0]]
>>> rotate(rotate(x, 4, seed=0), 4, seed=0, inverse=True).tolist()
[[8.0, 0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpt_core.kernels.reference import traced_noise
from cpt_core.kernels.traced import matmul


def rotate(x: Tensor, size: int, seed: int, inverse: bool = False) -> Tensor:
    """Rotate blocks of ``size`` along the last dimension by one orthonormal matrix, D H / sqrt(size).

    H is Walsh's matrix of -1 and 1, D has random signs on its diagonal. Both operands of a product that are rotated
    along its sum, with the same seed, have the same product.

    Args:
        x: floating, (..., F); the result has its shape and dtype, and gradients go back through the rotation.
        size: of a block, a power of two, as a ``Quantizer`` has it.
        seed: of the signs.
        inverse: rotate back.

    Raises:
        ValueError: for a size that does not divide F.
    """
    if not x.dim() or x.shape[-1] % size:
        raise ValueError(f"rotations of {size} do not divide the last dimension of a tensor of shape {tuple(x.shape)}")
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=x.device)
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < size:
        matrix = torch.kron(matrix, step)
    noise = traced_noise(torch.tensor(seed, device=x.device), size)
    matrix = torch.where(noise[:, None] < 0, -matrix, matrix) * size**-0.5
    blocks = x.unflatten(-1, (-1, size))
    return matmul(blocks, (matrix.t() if inverse else matrix).to(x.dtype)).flatten(-2)
