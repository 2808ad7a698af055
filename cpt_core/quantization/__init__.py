"""Quantised training of any model: conversion in place, interception, rounding, scheduler.  Paper: figure 1.

The problem: in every matmul and convolution, weights and activations are to be rounded to ``q_t`` bits and gradients to
``q_max`` bits. The model contains no code for it, and the bits change at every optimizer step.

The design. ``quantize_`` gives each layer a ``LayerPrecision`` and registers hooks; it replaces no module, so
optimizers and checkpoints stay valid. While the model runs, one ``TorchFunctionMode`` intercepts ``F.linear``,
``conv2d``, ``matmul``, attention and others. Each becomes three rounded GEMMs:

    forward  y = q(x) q(w)       dgrad  dx = q(dy) q(w)       wgrad  dw = q(x) q(dy)

q maps a tensor to a uniform grid of 2**bits values between the minimum and the maximum of its range, nearest for
operands and stochastic for gradients. Gradients pass q unchanged (straight-through estimator), and the optimizer
updates float32 weights. Which elements share a range depends on the role of the operand: the input of a linear layer
has one running range, a weight one range per row.

The files in the order of reading:

- roles.py, rounding.py: the quantiser of every role, the grid, and the noise of stochastic rounding in plain torch, the
  reference for every faster implementation. fake_quantize.py adds the straight-through estimator.
- active_bits.py, precision.py: the active bits of a layer, its running ranges and noise.
- op_interception.py: the function mode, and the one method that rounds operands, computes, reports the work and rounds
  the gradient. op_handlers.py names the operands of each torch function; lstm.py and graph_handlers.py do so for LSTMs
  and graph convolutions; feature_axes.py tells features from tokens.
- convert.py, scheduler.py: ``quantize_`` and ``PrecisionScheduler``.

The trade-offs: any model can be converted and restored, without tracing or copying; but every torch function costs a
Python call while a model runs. Rounding is simulated: values lie on the grid and are stored in float32. The number of
grid steps is a tensor, so that one compiled graph serves all bits.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.quantization.roles import QUANTIZERS as QUANTIZERS
    from cpt_core.quantization.roles import Quantizer as Quantizer
    from cpt_core.quantization.scheduler import copy_ranges as copy_ranges
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
