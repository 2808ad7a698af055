"""The precision of one quantised layer: bits, running ranges, rounding noise.  All that conversion adds to a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from cpt_core.checks import choose
from cpt_core.quantization.fake_quantize import levels_of, quantize_gradient, round_gradient, straight_through
from cpt_core.quantization.noise import NoisePool
from cpt_core.quantization.quantizers import IDENTITY_BITS, Quantizer, Range, check_bits

RUNNING_DECAY = 0.9  # weight of the old value; torch's BatchNorm counts its momentum the other way round
RUNNING_STARTS = ("corrected", "zero")
HALF = (torch.float16, torch.bfloat16)  # 11 and 8 significant bits: a grid of 8 bits does not survive them


class LayerPrecision(nn.Module):
    """Bits, running ranges and rounding noise of one quantised layer: all that conversion adds to a module.

    Attributes:
        name: of the layer in the model that was converted, for messages.
        called: whether the layer's own forward has run; False only when its parent's has run without it, and None as
            long as nobody can know.

    Args:
        quantizers: the quantiser of every role of the layer, such as "input", "weight", "bias", "grad".
        noise: the pool shared by the layers of a model.
        key: start of this layer's noise in compiled code; different in every layer.
        running_start: "corrected" divides a running range by the weight it has gathered, so that the first
            evaluations are right; "zero" is the authors' rule, which starts at 0 and does not.

    The numbers live in 0-d non-persistent buffers that are filled in place: a change of bits recompiles nothing and
    adds no ``state_dict`` key. ``bits`` and ``q_grad`` are the same numbers for Python: None means float32.

    Differs: running ranges are bias-corrected by default.
    """

    levels: Tensor
    grad_levels: Tensor
    noise_key: Tensor

    def __init__(
        self, quantizers: Mapping[str, Quantizer], noise: NoisePool, key: int = 0, running_start: str = "corrected"
    ) -> None:
        """Start without a precision: using the layer before one is set is an error."""
        super().__init__()
        choose("running_start", running_start, RUNNING_STARTS)
        self.quantizers = dict(quantizers)
        self.noise = noise
        self.corrected = running_start == "corrected"
        self.bits: int | None = None
        self.q_grad: int | None = None
        self.q_max: int | None = None  # of the schedule that drives the layer, for precision(model, "q_max")
        self.is_set = self.quantizes = self.quantizes_gradient = False
        self.name = ""
        self.called: bool | None = None
        self.calibrated = not self.corrected  # whether the running ranges can be used
        float32: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
        self.register_buffer("levels", torch.zeros((), **float32), persistent=False)
        self.register_buffer("grad_levels", torch.zeros((), **float32), persistent=False)
        self.register_buffer("noise_key", torch.tensor(key, dtype=torch.int64, device="cpu"), persistent=False)
        for role, quantizer in self.quantizers.items():
            if quantizer.running:  # running minimum, running width, and the weight both have gathered
                self.register_buffer(f"running_{role}", torch.zeros(3, **float32), persistent=False)

    def set_bits(self, bits: int | None, q_grad: int | None) -> None:
        """Set forward and gradient bits, each 1..32 or None for float32; 24 and more is the identity."""
        bits = None if bits is None else check_bits("bits", bits)
        q_grad = None if q_grad is None else check_bits("q_grad", q_grad)
        if self.is_set and (bits, q_grad) == (self.bits, self.q_grad):
            return
        self.is_set, self.bits, self.q_grad = True, bits, q_grad
        self.quantizes = bits is not None and bits < IDENTITY_BITS
        self.quantizes_gradient = q_grad is not None and q_grad < IDENTITY_BITS
        if bits is not None:
            self.levels.fill_(levels_of(bits))
        if q_grad is not None:
            self.grad_levels.fill_(levels_of(q_grad))

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

    def operand(self, role: str, x: Tensor) -> Tensor:
        """Return an operand of the layer's product, quantised with the straight-through estimator."""
        self.require_bits()
        if x.dtype in HALF and (self.quantizes or self.quantizes_gradient):
            x = x.float()
        if not self.quantizes or x.numel() == 0:
            return x
        stored = self.running_range(role)
        if stored is not None:
            return straight_through(x, *stored, self.levels, True)
        quantizer = self.quantizers[role]
        minimum, width = quantizer.range_of(x.detach())
        if quantizer.running and self.training:
            self.track(role, minimum, width)
        return straight_through(x, minimum, width, self.levels, quantizer.clips)

    def running_range(self, role: str) -> Range | None:
        """Return the stored range of a role where it is used: in evaluation, once training has filled it."""
        if not self.quantizers[role].running or self.training or not self.calibrated:
            return None
        minimum, width, weight = self.get_buffer(f"running_{role}").unbind()
        return (minimum / weight, width / weight) if self.corrected else (minimum, width)

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Let a running range follow the range of one call (0-d), or those of several calls one after the other (T,).

        running = 0.9 running + 0.1 current; a call that is not finite leaves it alone.
        """
        running = self.get_buffer(f"running_{role}")
        now = torch.stack([minimum, width, torch.ones_like(width)])
        if now.dim() == 1:
            running.copy_(torch.where(now.isfinite().all(), torch.lerp(now, running, RUNNING_DECAY), running))
            return
        counts = now.isfinite().all(0)
        later = counts.flip(0).cumsum(0).flip(0) - counts.int()  # calls that count and come after this one
        shares = torch.where(counts, (1 - RUNNING_DECAY) * RUNNING_DECAY**later, 0.0)
        running.mul_(RUNNING_DECAY ** counts.sum()).add_((torch.where(counts, now, 0.0) * shares).sum(1))

    def train(self, mode: bool = True) -> Self:
        """Set the mode; on the way to evaluation see whether the running ranges have been filled."""
        super().train(mode)
        if not mode and self.corrected:
            ranges = [b for n, b in self.named_buffers() if n.startswith("running_")]
            self.calibrated = all(not b.is_meta and float(b[2]) > 0 for b in ranges)
        return self

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return the layer's output; the gradient that comes back through it is quantised."""
        if not self.quantizes_gradient or not y.requires_grad:
            return y
        if torch.compiler.is_compiling():  # eager noise comes from the pool, compiled noise from a hash of the key
            key = self.noise_key.clone()
            self.noise_key.add_(1)
            return quantize_gradient(y, self.grad_levels, self.quantizers[role], None, key)
        return quantize_gradient(y, self.grad_levels, self.quantizers[role], self.noise)

    def quantized_gradient(self, role: str, gradient: Tensor) -> Tensor:
        """Return a gradient, quantised: for layers that write their backward pass themselves."""
        return round_gradient(gradient, self.grad_levels, self.quantizers[role], self.noise, None)

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of what training changes besides the bits, for a checkpoint."""
        return {k: v.clone() for k, v in self.named_buffers() if k.startswith(("running_", "noise_key"))}

    def set_running(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``get_running`` returned."""
        for name, value in state.items():
            self.get_buffer(name).copy_(value)
        self.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # follow the model to another device but stay in float32 when it is cast to half precision
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer.new_empty(0)).device)
        return self

    def extra_repr(self) -> str:
        """Show the current bits."""
        if not self.is_set:
            return "bits=not set"
        return f"bits={self.bits or 'float32'}, q_grad={self.q_grad or 'float32'}"
