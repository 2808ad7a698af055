"""The precision of one quantised layer: bits in force and what they do to operands and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from cpt_core.kernels.execution import execution
from cpt_core.kernels.integer import MOST_BITS, QuantizedTensor, multiplies_codes
from cpt_core.kernels.operators import fake_quantize, round_to_grid
from cpt_core.quantization.fake_quantize import levels_of, quantize_gradient
from cpt_core.quantization.quantizers import IDENTITY_BITS, Quantizer, check_bits, check_floating
from cpt_core.quantization.reuse import Reuse
from cpt_core.quantization.running import RunningState

EXECUTIONS = ("simulated", "integer", "auto")
HALF = (torch.float16, torch.bfloat16)  # 11 and 8 significant bits: a grid of 8 bits does not survive them
Bits = tuple[int | None, int | None]  # forward and gradient bits; None is float32


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


class LayerPrecision(RunningState):
    """Bits, running ranges and rounding noise of one quantised layer: all that conversion adds to a module.

    Attributes:
        name: of the layer in the model that was converted, for messages.
        execution: of ``EXECUTIONS``, see ``QuantConfig``.
        called: whether the layer's own forward has run; False only when its parent's has run without it, and None as
            long as nobody can know.

    Args:
        quantizers: the quantiser of every role of the layer, such as "input", "weight", "bias", "grad".
        key: start of this layer's rounding noise; different in every layer.
        running_start: "corrected" divides a running range by the weight it has gathered, so that the first
            evaluations are right; "zero" is the authors' rule, which starts at 0 and does not.

    ``in_force`` alone says what the bits are. The products read ``levels`` and ``grad_levels``, 0-d tensors that are
    filled from it in place, so that a change of bits recompiles nothing. They are no buffers: what copies, averages or
    broadcasts the buffers of a model (``AveragedModel``, ``functional_call``, DDP) would change the grid behind the
    bits. Running ranges and the key of the noise are buffers; none is in the ``state_dict``.

    Copies (``deepcopy``, pickle, ``AveragedModel``) keep the bits in force when they were made and are driven by no
    scheduler: use them inside ``precision(copy, ...)`` or give them a ``PrecisionScheduler`` of their own.

    Differs: running ranges are bias-corrected by default.
    """

    def __init__(self, quantizers: Mapping[str, Quantizer], key: int = 0, running_start: str = "corrected") -> None:
        """Start without a precision: using the layer before one is set is an error."""
        super().__init__(quantizers, key, running_start)
        self.q_max: int | None = None  # of the schedule that drives the layer, for precision(model, "q_max")
        self.levels, self.grad_levels = (torch.zeros((), dtype=torch.float32, device="cpu") for _ in range(2))
        self._in_force: Bits | None = None
        # what follows from it; compiled code reads these and would be specialised to the bits themselves
        self.is_set = self.quantizes = self.quantizes_gradient = False
        self.fits_codes = False, False  # whether codes are asked for and hold the bits, forward and of gradients
        self.name = ""
        self.execution = "simulated"
        self.called: bool | None = None
        self.reuse = Reuse()

    @property
    def in_force(self) -> Bits | None:
        """The bits (forward, gradient), None as long as nobody has set any; assign what it was to put that back."""
        return self._in_force

    @in_force.setter
    def in_force(self, value: Bits | None) -> None:
        self.reuse.clear()
        if value != self._in_force:
            self._in_force, self.is_set = value, value is not None
            bits, q_grad = value or (None, None)
            self.quantizes, self.quantizes_gradient = (q is not None and q < IDENTITY_BITS for q in (bits, q_grad))
            asked = self.execution != "simulated"
            # None leaves the levels of gradients as they are, and a backward pass may still read them
            gradient = self.fits_codes[1] if q_grad is None else asked and q_grad <= MOST_BITS
            self.fits_codes = asked and bits is not None and bits <= MOST_BITS, gradient
            self._fill()

    def _fill(self) -> None:
        for q, levels in zip(self.in_force or (), (self.levels, self.grad_levels), strict=False):
            if q is not None:
                levels.fill_(levels_of(q))

    @property
    def bits(self) -> int | None:
        """Forward bits; None for float32, or when none are set."""
        return self.in_force[0] if self.in_force else None

    @property
    def q_grad(self) -> int | None:
        """Gradient bits, likewise."""
        return self.in_force[1] if self.in_force else None

    def set_bits(self, bits: int | None, q_grad: int | None) -> None:
        """Set forward and gradient bits, each 1..32 or None for float32; 24 and more is the identity."""
        bits = None if bits is None else check_bits("bits", bits)
        if not self.is_set:
            execution()  # here, before anything is traced
        self.in_force = bits, None if q_grad is None else check_bits("q_grad", q_grad)

    def require_bits(self) -> None:
        """Raise RuntimeError as long as nobody has set a precision; every quantised layer asks first."""
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
        if not (self.quantizes or self.quantizes_gradient):
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

    def operand(self, role: str, x: Tensor) -> Tensor:
        """Return an operand of the layer's product, quantised with the straight-through estimator."""
        self.require_bits()
        if x.dtype in HALF and (self.quantizes or self.quantizes_gradient):
            x = x.float()
        if not self.quantizes or x.numel() == 0:
            return x
        check_floating(x)
        self.follow(x)
        quantizer = self.quantizers[role]
        if quantizer.running and not self.training:
            return round_to_grid(x, *self.evaluated(role, x), self.levels, clip=True)
        if role == "weight" and not quantizer.running and not torch.compiler.is_compiling():  # guarded on the bits
            return self.reuse(x, self.bits, lambda: fake_quantize(x, self.levels, quantizer.granularity)[0])
        y, low, width = fake_quantize(x, self.levels, quantizer.granularity)
        if quantizer.running:
            self.track(role, low, width)
        return y

    def encoded(self, role: str, x: Tensor) -> QuantizedTensor:
        """Return the same operand as codes; for at most ``MOST_BITS`` bits, and without a gradient."""
        self.require_bits()
        check_floating(x)
        self.follow(x)
        quantizer = self.quantizers[role]
        if self.training or not quantizer.running:
            low, width = quantizer.range_of(x)
            if quantizer.running:
                self.track(role, low, width)
        else:
            low, width = self.evaluated(role, x)
            low = self.marked(role, x, low)
        return QuantizedTensor.on(x, low, width, self.levels, clip=self.clips(role))

    def encoded_gradient(self, role: str, gradient: Tensor) -> QuantizedTensor:
        """Return the codes of a gradient on its own range, as ``gradient`` rounds it in the backward pass."""
        quantizer = self.quantizers[role]
        key = self.noise_key if quantizer.rounding == "stochastic" else None
        ranges = quantizer.range_of(gradient)
        rounded = QuantizedTensor.on(gradient, *ranges, self.grad_levels, key, quantizer.clips)
        if key is not None:
            key.add_(1)
        return rounded

    def train(self, mode: bool = True) -> Self:
        """Set the mode, see ``RunningState``."""
        self.reuse.clear()
        return super().train(mode)

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return the layer's output; the gradient that comes back through it is quantised."""
        if not self.quantizes_gradient or not y.requires_grad:
            return y
        key = self.noise_key
        if torch.compiler.is_compiling():  # eager code adds 1 in the backward pass, which compiled code cannot do
            self.noise_key = key + 1
        return quantize_gradient(y, self.grad_levels, self.quantizers[role], key)

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
        key, compiling = self.noise_key, torch.compiler.is_compiling()
        if compiling:
            self.noise_key = key + count
        return self.grad_levels, quantizer.granularity, key, not compiling

    def follow(self, x: Tensor) -> None:
        """Be where ``x`` is, also when something other than ``to`` moved the model there, such as FSDP."""
        if self.levels.device != x.device and not x.is_meta:
            self._move(x.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # follow the model to another device but stay in float32 when it is cast to half precision
        self._move(fn(self.levels.new_empty(0)).device)
        return self

    @torch.inference_mode(False)  # what is made in a forward pass is written to elsewhere
    def _move(self, device: torch.device) -> None:
        super()._move(device)
        if device != self.levels.device:
            self.levels, self.grad_levels = (torch.empty_like(self.levels, device=device) for _ in range(2))
            self._fill()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the kernels in the process that a stored layer comes to."""
        super().__setstate__(state)
        if self.is_set:
            execution()

    def extra_repr(self) -> str:
        """Show the current bits."""
        if not self.is_set:
            return "bits=not set"
        return f"bits={self.bits or 'float32'}, q_grad={self.q_grad or 'float32'}"
