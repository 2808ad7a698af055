"""Quantised training of any model: interception, rounding, conversion in place, scheduler.  Paper: figure 1.

The problem: weights and activations are to be rounded to ``q_t`` bits in every matmul and convolution, gradients to
``q_max`` bits, in a model that knows nothing of it, and the bits change at every optimizer step.

The design, in the order of reading:

- roles.py, rounding.py: which elements share a range; the grid, and the noise of stochastic rounding. Plain torch, the
  reference for every faster implementation. fake_quantize.py adds the straight-through estimator.
- active_bits.py, precision.py: the active bits of a layer, its running ranges, its noise.
- op_interception.py: one function mode per model sees what a running model computes, and one method rounds operands,
  computes, reports the work and rounds the gradient. op_handlers.py says what the operands of each function are;
  lstm.py and graph_handlers.py do so for LSTMs and graph convolutions.
- convert.py, scheduler.py: ``quantize_`` gives modules a precision and hooks; ``PrecisionScheduler`` sets the bits.

The trade-offs: nothing is compiled or copied, so any model can be converted and restored; each function of torch costs
a call of Python while a model runs. Rounding is simulated: values lie on the grid, and are held in float32.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.quantization.roles import QUANTIZERS as QUANTIZERS
    from cpt_core.quantization.roles import Quantizer as Quantizer
    from cpt_core.quantization.scheduler import copy_ranges as copy_ranges
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
