"""The precision of one quantised layer: bits in force and what they do to operands and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.formats.format import Format
from cpt_core.kernels.integer import QuantizedTensor, multiplies_codes
from cpt_core.kernels.operators import fake_quantize
from cpt_core.kernels.rotation import rotate
from cpt_core.quantization.fake_quantize import counts_in_backward, quantize_gradient, round_gradient
from cpt_core.quantization.levels import LevelState, weight_role
from cpt_core.quantization.quantizers import Quantizer, check_floating
from cpt_core.quantization.two_gradients import two_gradients

EXECUTIONS = ("simulated", "integer", "auto")
HALF = (torch.float16, torch.bfloat16)  # 11 and 8 significant bits: a grid of 8 bits does not survive them


@torch.compiler.assume_constant_result
def _multiplies_codes(execution: str, device: torch.device) -> bool:
    """Whether products are to be computed on codes on a device; warns once of one where that is slow."""
    fast = multiplies_codes(device)
    if execution == "integer" and not fast and device not in _warned:
        _warned.add(device)
        warnings.warn(
            f"this device ({device}) has no instructions for products of 8-bit integers: execution='integer' computes "
            "them all the same, and is slower there than float32; execution='auto' would simulate them",
            stacklevel=2,
        )
    return fast or execution == "integer"


_warned: set[torch.device] = set()


class LayerPrecision(LevelState):
    """Bits, running ranges and rounding noise of one quantised layer: all that conversion adds to a module.

    Attributes:
        called: whether the layer's own forward has run; False only when its parent's has run without it, and None as
            long as nobody can know.
        must_be_there: whether a checkpoint has the layer in any case: not that of a module whose own forward may, as it
            turns out, multiply nothing.
        sums: the dimension over which a product sums, of operands where it is not the last.

    Args:
        quantizers: the quantiser of every role of the layer, such as "input", "weight", "bias", "grad".
        key: start of this layer's rounding noise; different in every layer.
        running_start: "corrected" divides a running range by the weight it has gathered, so that the first
            evaluations are right; "zero" is the authors' rule, which starts at 0 and does not.

    Running ranges are buffers, the key of the noise is none: every process has its own. Neither is in the
    ``state_dict``.

    Copies (``deepcopy``, pickle, ``AveragedModel``) keep bits that ``precision`` or ``set_bits`` gave. Those of a
    scheduler they do not: they refuse to run outside ``precision(copy, ...)`` without a ``PrecisionScheduler`` of their
    own.

    Differs: running ranges are bias-corrected by default.
    """

    observer: Callable[..., None] | None = None  # of the roundings of a recorded step, see ``record``

    def __init__(self, quantizers: Mapping[str, Quantizer], key: int = 0, running_start: str = "corrected") -> None:
        """Start without a precision: using the layer before one is set is an error."""
        super().__init__(quantizers, key, running_start)
        self.sums: Mapping[str, int] = {}
        self.called: bool | None = None
        self.must_be_there = True

    def require_bits(self) -> None:
        """Raise RuntimeError as long as nobody has set a precision; every quantised layer asks first."""
        if not self.is_set and self.highest is not None:  # only copies know a schedule and have no bits
            raise RuntimeError(
                "this quantised layer is in a copy of a model whose bits a PrecisionScheduler sets, which does not "
                'drive copies: run the copy in `with cpt.precision(copy, "q_max"):` (or other bits), or make it a '
                "PrecisionScheduler of its own"
            )
        if not self.is_set:
            raise RuntimeError(
                "this quantised layer has no precision yet: make a PrecisionScheduler(model, schedule), "
                "or use `with precision(model, bits=8):`"
            )
        if not torch.compiler.is_compiling() and not self.called:  # in this order: compiled code is not guarded on it
            self.called = True

    def half_dtype(self, x: Tensor) -> torch.dtype | None:
        """Return the half precision in which a plain layer would answer ``x``, None for full precision.

        Under autocast, or in a model of that type. Quantised products run in float32 there and only their results are
        rounded: bfloat16 would leave 17 of the 256 values of an 8-bit grid between 10 and 11.
        """
        if not self.active:
            return None
        if x.dtype in HALF:
            return x.dtype
        autocast = x.dtype == torch.float32 and not x.is_meta and torch.is_autocast_enabled(x.device.type)
        return torch.get_autocast_dtype(x.device.type) if autocast else None

    @property
    def keeps_by_bits(self) -> bool:
        """Whether what the layer computes of constant features is kept, and is another thing for every bit width."""
        return False

    def on_codes(self, x: Tensor) -> bool:
        """Whether products with ``x`` are computed on codes now: the layer is asked to, and the bits fit."""
        if self.execution == "simulated" or not self.fits_codes[0] or x.numel() == 0:
            return False
        if x.is_meta or x.dtype != torch.float32:
            return False
        return _multiplies_codes(self.execution, x.device)

    def operand(self, role: str, x: Tensor, along: int | None = None) -> Tensor:
        """Return an operand of the layer's product, quantised with the straight-through estimator.

        Args:
            role: one of the layer's ``quantizers``.
            x: the operand.
            along: the dimension over which the product sums; None for that of the role, see ``sums``.
        """
        self.require_bits()
        if x.dtype in HALF and self.active:
            x = x.float()
        if not (self.quantizes_weight if role in self.of_weights else self.quantizes) or x.numel() == 0:
            return x
        check_floating(x)
        self.follow(x)
        quantizer, levels = self.quantizers[role], self.levels_for(role)
        if quantizer.along_sum and (dim := self.sums.get(role, -1) if along is None else along) != -1:
            moved = quantizer, levels, x.transpose(dim, -1)
            return self._rounded(role, *moved).transpose(dim, -1)
        return self._rounded(role, quantizer, levels, x)

    def _rounded(self, role: str, quantizer: Quantizer, levels: Tensor, x: Tensor) -> Tensor:
        if quantizer.hadamard and role != "bias":
            x = rotate(x, quantizer.hadamard, self.key)
        if quantizer.running and not self.training:
            return quantizer.round_in(x, self.evaluated(role, x), levels)
        self.observe(role, x)
        y, low, width = fake_quantize(x, levels, quantizer.granularity)
        if quantizer.running:
            self.track(role, low, width)
        return y

    def encoded(self, role: str, x: Tensor, channels_last: bool = False) -> QuantizedTensor:
        """Return the same operand as codes; for at most ``MOST_BITS`` bits, and without a gradient.

        Raises:
            RuntimeError: for float64, which the input of products on codes is not, and under ``torch.jit.trace``.
        """
        self.require_bits()
        check_floating(x)
        if torch.jit.is_tracing():  # it would keep the ranges of the example, as numbers
            raise RuntimeError("torch.jit.trace cannot record products on codes; take execution 'simulated'")
        if x.dtype == torch.float64:
            raise RuntimeError(
                f"the layer's {role} is torch.float64, its input is not: bring both to one type, as with model.float()"
            )
        self.follow(x)
        self.observe(role, x)
        quantizer = self.quantizers[role]
        if self.training or not quantizer.running:
            low, width = quantizer.range_of(x)
            if quantizer.running:
                self.track(role, low, width)
        else:
            low, width = self.evaluated(role, x)
            low = self.marked(role, x, low)
        levels = self.levels_for(role)
        return QuantizedTensor.on(x, low, width, levels, clip=self.clips(role), channels_last=channels_last)

    def encoded_gradient(self, role: str, gradient: Tensor, channels_last: bool = False) -> QuantizedTensor:
        """Return the codes of a gradient on its own range, as ``gradient`` rounds it in the backward pass."""
        self.observe(role, gradient)
        quantizer = self.quantizers[role]
        key = self.noise_key if quantizer.rounding == "stochastic" else None
        ranges = quantizer.range_of(gradient)
        rounded = QuantizedTensor.on(gradient, *ranges, self.grad_levels, key, quantizer.clips, channels_last)
        if key is not None:
            key.add_(1)
        return rounded

    def multiplied(self, multiply: Callable[..., Tensor], *operands: Any, role: str = "grad") -> Tensor:
        """Return ``multiply(*operands)``, a product of quantised operands, whose gradient is quantised.

        Args:
            multiply: linear in each operand; a function of an activation, a weight and perhaps a bias.
            operands: what ``operand`` returned.
            role: of the gradient.
        """
        if self.apart and torch.is_grad_enabled():
            return two_gradients(partial(self.rounded_gradients, role=role), multiply, *operands)
        return self.gradient(role, multiply(*operands))

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return the layer's output; the gradient that comes back through it is quantised."""
        if not self.quantizes_gradient or not y.requires_grad:
            return y
        key, quantizer = self.noise_key, self.quantizers[role]
        if quantizer.rounding == "stochastic" and not counts_in_backward():
            self.noise_key = key + 1
        if quantizer.along_sum and (dim := self.sums.get(role, -1)) != -1:
            turned = quantize_gradient(y.transpose(dim, -1), self.grad_levels, quantizer, key)
            return self._shown(role, turned).transpose(dim, -1)
        return self._shown(role, quantize_gradient(y, self.grad_levels, quantizer, key))

    def _shown(self, role: str, y: Tensor) -> Tensor:
        """Show the gradient of what ``quantize_gradient`` returned, when it comes and is not yet rounded."""
        if self.observed:
            y.register_hook(partial(self.observe, role))
        return y

    def rounded_gradients(self, gradient: Tensor, role: str = "grad") -> tuple[Tensor, Tensor]:
        """Return an output's gradient as the error product takes it, and as the weight gradient does."""
        formats, dim = self.formats_in_force, self.sums.get(role, -1)

        def rounded(format: Format | None, role: str, levels: Tensor) -> Tensor:
            if format is None:
                return gradient
            quantizer = self.quantizers[role]
            turned = gradient.transpose(dim, -1) if quantizer.along_sum else gradient
            self.observe(role, turned)
            turned = round_gradient(turned, levels, quantizer, self.noise_key)
            return turned.transpose(dim, -1) if quantizer.along_sum else turned

        error = rounded(formats.error, role, self.grad_levels)
        return error, rounded(formats.weight_gradient, weight_role(role), self.weight_grad_levels)

    @property
    def observed(self) -> bool:
        """Whether someone looks at what is rounded now; in this order: compiled code is not guarded on it."""
        return not torch.compiler.is_compiling() and self.observer is not None and self.training

    def observe(self, role: str, x: Tensor, rows: Sequence[int] = ()) -> None:
        """Show a tensor that is about to be rounded, whose parts of so many ``rows`` have ranges of their own."""
        if self.observed and self.observer is not None:
            self.observer(role, x, rows)

    def gradient_noise(self, role: str, count: int) -> tuple[Tensor | None, str, Tensor | None, bool]:
        """Return what an operator that quantises ``count`` gradients in its backward pass has to know.

        The levels, None where it leaves them alone; the granularity; the key of the noise, None for none; and whether
        the backward pass is to add 1 to the key for each of them, as eager code does.
        """
        quantizer = self.quantizers[role]
        if not self.quantizes_gradient:
            return None, quantizer.granularity, None, False
        if quantizer.rounding == "nearest":
            return self.grad_levels, quantizer.granularity, None, False
        key = self.noise_key
        if not (counts := counts_in_backward()):
            self.noise_key = key + count
        return self.grad_levels, quantizer.granularity, key, counts
