"""The precision of one quantised layer: bits, running ranges, rounding noise.  All that conversion adds to a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from cpt_core.checks import choose
from cpt_core.kernels.execution import execution
from cpt_core.kernels.integer import MOST_BITS, QuantizedTensor, multiplies_codes
from cpt_core.kernels.operators import fake_quantize, range_of, round_to_grid, track_
from cpt_core.kernels.reference import RUNNING_DECAY, Range
from cpt_core.quantization.fake_quantize import levels_of, quantize_gradient
from cpt_core.quantization.quantizers import IDENTITY_BITS, Quantizer, check_bits, check_floating
from cpt_core.quantization.reuse import Reuse

RUNNING_STARTS = ("corrected", "zero")
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


class LayerPrecision(nn.Module):
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

    noise_key: Tensor

    def __init__(self, quantizers: Mapping[str, Quantizer], key: int = 0, running_start: str = "corrected") -> None:
        """Start without a precision: using the layer before one is set is an error."""
        super().__init__()
        choose("running_start", running_start, RUNNING_STARTS)
        self.quantizers = dict(quantizers)
        self.corrected = running_start == "corrected"
        self.key = key
        self.q_max: int | None = None  # of the schedule that drives the layer, for precision(model, "q_max")
        self.calibrated = not self.corrected  # whether the running ranges are known to be filled
        self.levels, self.grad_levels = (torch.zeros((), dtype=torch.float32, device="cpu") for _ in range(2))
        self._in_force: Bits | None = None
        # what follows from it; compiled code reads these and would be specialised to the bits themselves
        self.is_set = self.quantizes = self.quantizes_gradient = False
        self.fits_codes = False, False  # whether codes are asked for and hold the bits, forward and of gradients
        self.name = ""
        self.execution = "simulated"
        self.called: bool | None = None
        self.reuse = Reuse()
        self.register_buffer("noise_key", self._start("noise_key"), persistent=False)
        for role, quantizer in self.quantizers.items():
            if quantizer.running:  # running minimum, running width, and the weight both have gathered
                self.register_buffer(f"running_{role}", self._start(f"running_{role}"), persistent=False)

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
            return round_to_grid(x, *self._evaluated(role, x), self.levels, clip=True)
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
            low, width = self._evaluated(role, x)
            low = self.marked(role, x, low)
        return QuantizedTensor.on(x, low, width, self.levels, clip=self.clips(role))

    def marked(self, role: str, x: Tensor, low: Tensor) -> Tensor:
        """Return the minimum of a stored range, NaN if ``x`` holds any: there is no code for it."""
        if self.training or not self.quantizers[role].running:
            return low
        own = range_of(x, "per_tensor")[0]
        return torch.where(own.isnan(), own, low)

    def encoded_gradient(self, role: str, gradient: Tensor) -> QuantizedTensor:
        """Return the codes of a gradient on its own range, as ``gradient`` rounds it in the backward pass."""
        quantizer = self.quantizers[role]
        key = self.noise_key if quantizer.rounding == "stochastic" else None
        ranges = quantizer.range_of(gradient)
        rounded = QuantizedTensor.on(gradient, *ranges, self.grad_levels, key, quantizer.clips)
        if key is not None:
            key.add_(1)
        return rounded

    def _evaluated(self, role: str, x: Tensor) -> Range:
        return self.running_range(role) or self.or_running(role, *self.quantizers[role].range_of(x.detach()))

    def running_range(self, role: str) -> Range | None:
        """Return the stored range of a role where it is used: in evaluation, once training has filled it."""
        if not self.quantizers[role].running or self.training or not self.calibrated:
            return None
        return self._stored(role)[:2]

    def or_running(self, role: str, minimum: Tensor, width: Tensor) -> Range:
        """Return the range at hand, or in evaluation the stored one where it has been filled since ``train(False)``.

        An average of models (``AveragedModel``) gets its running ranges like that. Decided on the device.
        """
        if self.training or not self.quantizers[role].running:
            return minimum, width
        low, wide, weight = self._stored(role)
        return torch.where(weight > 0, low, minimum), torch.where(weight > 0, wide, width)

    def stored_range(self, role: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return minimum, width and weight for an operator that decides as ``running_range`` and ``or_running`` do.

        All None: every tensor has a range of its own. Weight None: the stored range counts; else where it is above 0.
        """
        if self.training or not self.quantizers[role].running:
            return None, None, None
        low, wide, weight = self._stored(role)
        return low, wide, None if self.calibrated else weight

    def clips(self, role: str) -> bool:
        """Whether values can lie outside the range of their role."""
        quantizer = self.quantizers[role]
        return quantizer.clips or (quantizer.running and not self.training)

    def _stored(self, role: str) -> tuple[Tensor, Tensor, Tensor]:
        minimum, width, weight = self.get_buffer(f"running_{role}").unbind()
        return (minimum / weight, width / weight, weight) if self.corrected else (minimum, width, weight)

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Let a running range follow the range of one call (0-d), or those of several calls one after the other (T,).

        running = 0.9 running + 0.1 current, see ``kernels.reference.track``; a call that is not finite leaves it alone,
        and so does a forward pass inside a backward pass: activation checkpointing runs it a second time. (Not seen
        where a module is compiled by itself and then checkpointed; a compiled model may checkpoint its parts.)
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        running = self.get_buffer(f"running_{role}")
        if minimum.dim() == 0:
            track_(running, minimum, width)
            return
        now = torch.stack([minimum, width, torch.ones_like(width)])
        counts = now.isfinite().all(0)
        later = counts.flip(0).cumsum(0).flip(0) - counts.int()  # calls that count and come after this one
        shares = torch.where(counts, (1 - RUNNING_DECAY) * RUNNING_DECAY**later, 0.0)
        running.mul_(RUNNING_DECAY ** counts.sum()).add_((torch.where(counts, now, 0.0) * shares).sum(1))

    def train(self, mode: bool = True) -> Self:
        """Set the mode; on the way to evaluation see whether the running ranges have been filled."""
        super().train(mode)
        self.reuse.clear()
        if not mode and self.corrected:
            ranges = [b for n, b in self.named_buffers() if n.startswith("running_")]
            self.calibrated = all(not b.is_meta and float(b[2]) > 0 for b in ranges)
        return self

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

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of what training changes besides the bits, for a checkpoint."""
        return {k: v.clone() for k, v in self.named_buffers() if k.startswith(("running_", "noise_key"))}

    def set_running(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``get_running`` returned."""
        for name, value in state.items():
            if self.noise_key.is_meta:  # where copies are lost
                self._move(value.device)
            self.get_buffer(name).copy_(value)
        self.train(self.training)

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
        if self.noise_key.is_meta:  # there are no numbers on meta, and to_empty brings none
            self._buffers.update({name: self._start(name) for name in self._buffers})
            self.calibrated = not self.corrected
        self._buffers.update({name: buffer.to(device) for name, buffer in self.named_buffers()})
        if device != self.levels.device:
            self.levels, self.grad_levels = (torch.empty_like(self.levels, device=device) for _ in range(2))
            self._fill()

    def _start(self, name: str) -> Tensor:
        """Return what a buffer holds before any training."""
        if name == "noise_key":
            return torch.tensor(self.key, dtype=torch.int64, device="cpu")
        return torch.zeros(3, dtype=torch.float32, device="cpu")

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
