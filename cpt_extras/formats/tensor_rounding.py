"""Rounding of single tensors, outside of models: to the paper's grids, or to number formats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.active_bits import MAX_GRID_BITS
from cpt_core.quantization.roles import Quantizer, find_quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_core.validation import check_bits
from cpt_extras.formats.ladder_rounding import quantize_to_format


def quantize(
    x: Tensor,
    bits: int | None = None,
    quantizer: Quantizer | str | None = None,
    *,
    format: Any = None,
    seed: int | None = None,
) -> Tensor:
    """Quantise a tensor to ``bits`` bits, or to a number format, on its own range; straight-through estimator.

    >>> quantize(torch.tensor([0.0, 0.2, 1.0]), bits=1).tolist()
    [0.0, 0.0, 1.0]
    >>> quantize(torch.tensor([0.3, 5.1, -1000.0]), format="e4m3").tolist()
    [0.3125, 5.0, -448.0]

    Args:
        x: floating tensor of any shape; empty tensors come back as they are.
        bits: of the grid, 1 to 32; 24 and more is the identity.
        quantizer: a ``Quantizer`` or a role of ``QUANTIZERS``, "conv_input" where ``bits`` are given; its granularity
            counts, its rounding and running range play no part here.
        format: instead of ``bits``: a number format of ``cpt.formats``, or its name.
        seed: of the noise of a format that rounds stochastically, an integer; the same seed, the same numbers.

    Raises:
        ValueError: for an unknown role or format, bits outside 1..32, both or neither of bits and format; a tensor of
            integers, booleans or complex numbers; what a format cannot take; a seed that is missing, or that nothing
            uses.
    """
    fake_quantize.check_floating(x)
    if x.layout != torch.strided:
        raise ValueError(
            f"only dense tensors can be quantised, got {x.layout}; convert it with .to_dense() first"
        )
    if (bits is None) == (format is None):
        raise ValueError(
            f"give either bits or a format, got bits={bits!r} and format={format!r}"
        )
    if format is not None:
        return quantize_to_format(x, format, quantizer, seed)
    if seed is not None:
        raise ValueError(
            f"stochastic rounding needs a seed, and nothing else takes one; got seed={seed!r} for a grid of bits"
        )
    grid = find_quantizer("conv_input" if quantizer is None else quantizer).grid
    bits = check_bits("bits", bits)
    if bits > MAX_GRID_BITS or x.numel() == 0:
        return x
    fake_quantize.load_kernels()
    steps = torch.tensor(num_steps(bits), dtype=torch.float32, device=x.device)
    return fake_quantize.operators.fake_quantize(x, steps, grid)[0]
