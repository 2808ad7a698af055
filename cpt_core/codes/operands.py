"""The operands of a layer's products, and its output's gradient, as codes.  Beyond the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from cpt_core.kernels.operators import check_floating, range_of
from cpt_core.kernels.quantized_tensor import QuantizedTensor
from cpt_core.kernels.reference import clips
from cpt_core.quantization.precision import LayerPrecision


def encoded(p: LayerPrecision, role: str, x: Tensor, channels_last: bool = False) -> QuantizedTensor:
    """Return what ``p.operand`` returns as codes; for at most ``CODE_BITS`` bits, and without a gradient.

    Raises:
        RuntimeError: for float64, which the input of products on codes is not, and under ``torch.jit.trace``.
    """
    p.require_bits()
    check_floating(x)
    if torch.jit.is_tracing():  # it would keep the ranges of the example, as numbers
        raise RuntimeError("torch.jit.trace cannot record products on codes; take execution 'simulated'")
    if x.dtype == torch.float64:
        raise RuntimeError(
            f"the layer's {role} is torch.float64, its input is not: bring both to one type, as with model.float()"
        )
    p.follow(x)
    p.observe(role, x)
    quantizer = p.quantizers[role]
    if p.training or not quantizer.running:
        low, width = range_of(x, quantizer.grid)
        if quantizer.running:
            p.track(role, low, width)
    else:
        low, width = p.evaluated(role, x)
        low = p.marked(role, x, low)
    return QuantizedTensor.on(x, low, width, p.levels_for(role), None, p.clips(role), channels_last)


def encoded_gradient(p: LayerPrecision, role: str, gradient: Tensor, channels_last: bool = False) -> QuantizedTensor:
    """Return the codes of a gradient on its own range, as ``p.gradient`` rounds it in the backward pass."""
    p.observe(role, gradient)
    grid, key = p.quantizers[role].grid, p.noise_key if p.quantizers[role].rounding == "stochastic" else None
    ranges = range_of(gradient, grid)
    codes = QuantizedTensor.on(gradient, *ranges, p.grad_levels, key, clips(grid, key is not None), channels_last)
    if key is not None:
        key.add_(1)
    return codes
