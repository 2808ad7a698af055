"""The quantised LSTM.  Paper: section 4.4.

``nn.LSTM`` with both products of every step quantised: the input x_t and the hidden state h, each with one range per
time step, and both weights. The gates, the cell state and the hidden state itself stay in float32.

    gates_t = q(x_t) q(W)' + q(b) + q(h_{t-1}) q(U)' + q(b')
    i, f, o = sigmoid(gates)   g = tanh(gates)   c_t = f c_{t-1} + i g   h_t = o tanh(c_t)

Written step by step this quantises the weights 2 T times; here they are quantised once and the input product of all
steps is one product, with the same bits in the result. The recurrence is one autograd Function.

Shapes: T steps, B sequences, I inputs, H hidden; N = B_0 + ... + B_{T-1} rows, step after step, as in a
``PackedSequence``.

>>> lstm = QuantLSTM.from_float(nn.LSTM(4, 3))
>>> lstm.precision.set_bits(5, q_grad=8)
>>> lstm(torch.ones(7, 2, 4))[0].shape
torch.Size([7, 2, 3])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from cpt_core.kernels.operators import round_to_grid
from cpt_core.kernels.reference import per_channel
from cpt_core.quantization.layers import QuantizedLayer
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.quantizers import Quantizer, Range, check_floating

State = tuple[Tensor, Tensor]


@dataclass
class _Steps:
    """The time steps of one direction of one layer, and how the hidden state is quantised in them.

    ``sizes`` holds the sequences of every step, which never grow in number: a ``PackedSequence`` is sorted by length.
    """

    sizes: tuple[int, ...]
    reverse: bool
    precision: LayerPrecision
    role: str  # of the hidden state
    ranges: list[Range] = field(default_factory=list)  # those of the forward pass, step by step

    def split(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The rows of every step of several tensors, in the order in which the steps are computed."""
        steps = list(zip(*(tensor.split(self.sizes) for tensor in tensors), strict=True))
        return steps[::-1] if self.reverse else steps

    def quantize(self, h: Tensor) -> Tensor:
        """Quantise the hidden state of a step, without autograd."""
        p = self.precision
        if not p.quantizes or h.numel() == 0:
            return h
        found = p.running_range(self.role)
        if found is not None:
            return round_to_grid(h, *found, p.levels, None, clip=True)
        self.ranges.append(p.quantizers[self.role].range_of(h))
        return round_to_grid(h, *p.or_running(self.role, *self.ranges[-1]), p.levels, None, p.clips(self.role))


class _Recurrence(torch.autograd.Function):
    """All steps of an LSTM layer in one direction, from the input part of the gates.

    The gradient is written out, so that a step takes a dozen operations, and the weight gradient is one product at the
    end. The gradient behind the product with h is quantised per step, as a step-by-step program does.
    """

    @staticmethod
    def forward(
        ctx: Any, x_gates: Tensor, weight: Tensor, bias: Tensor | None, h0: Tensor, c0: Tensor, steps: _Steps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x_gates (N, 4 H), weight (4 H, H), bias (4 H,), h0 and c0 (B, H) -> hidden states (N, H), h and c (B, H)."""
        width = weight.shape[1]
        columns: list[list[Tensor]] = [[], [], [], [], []]
        gates, operands, before, tanh_c, out = columns
        h, c = h0, c0
        for (x_part,) in steps.split(x_gates):
            size = len(x_part)
            operand = steps.quantize(h[:size])
            step = nn.functional.linear(operand, weight, bias).add_(x_part)
            four = step.view(size, 4, width)
            four[:, :2].sigmoid_(), four[:, 2].tanh_(), four[:, 3].sigmoid_()
            i, f, g, o = four.unbind(1)
            cell = (c[:size] * f).add_(i * g)
            tanh = torch.tanh(cell)
            for column, value in zip((gates, operands, before, tanh_c), (step, operand, c[:size], tanh), strict=True):
                column.append(value)
            out.append(o * tanh)
            # sequences that have ended, or not begun in reverse, keep their state
            h, c = (new if size == len(old) else torch.cat([new, old[size:]]) for new, old in ((out[-1], h), (cell, c)))
        *saved, hidden = (torch.cat(column[::-1] if steps.reverse else column) for column in columns)
        ctx.save_for_backward(weight, *saved)
        ctx.steps, ctx.has_bias = steps, bias is not None
        return hidden, h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_h: Tensor, d_c: Tensor) -> tuple[Tensor | None, ...]:
        """The chain rule, from the last step to the first."""
        weight, gates, operands, before, tanh_c = ctx.saved_tensors
        steps: _Steps = ctx.steps
        p, width = steps.precision, weight.shape[1]
        four = gates.view(-1, 4, width)
        i, f, g, o = four.unbind(1)
        # what the gradients of c and h are multiplied with, for all steps at once
        slopes = four * (1 - four)  # of the sigmoids
        slopes[:, 2] = 1 - g * g
        slopes[:, 0] *= g
        slopes[:, 1] *= before
        slopes[:, 2] *= i
        slopes[:, 3] *= tanh_c
        to_c = o * (1 - tanh_c * tanh_c)
        d_gates = torch.empty_like(gates)  # what the input product gets
        behind = torch.empty_like(gates) if p.quantizes_gradient else d_gates  # what the product with h gets
        for out_part, slope, c_part, f_part, step, after in reversed(
            steps.split(d_out, slopes, to_c, f, d_gates, behind)
        ):
            size = len(step)
            dh = out_part + d_h[:size]
            dc = torch.addcmul(d_c[:size], dh, c_part)
            four = step.view(size, 4, width)
            torch.mul(slope[:, :3], dc.unsqueeze(1), out=four[:, :3])
            torch.mul(slope[:, 3], dh, out=four[:, 3])
            if p.quantizes_gradient:
                after.copy_(p.quantized_gradient("grad", step))
            new = (after @ weight, dc * f_part)
            d_h, d_c = (
                n if size == len(old) else torch.cat([n, old[size:]]) for n, old in zip(new, (d_h, d_c), strict=True)
            )
        d_weight = behind.t() @ operands if ctx.needs_input_grad[1] else None
        d_bias = behind.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return d_gates, d_weight, d_bias, d_h, d_c, None


class QuantLSTM(QuantizedLayer, nn.LSTM):
    """``nn.LSTM`` with quantised products, everything else in float32.

    Roles: "input" and "hidden" (one range per time step, running ranges for every layer and direction), "weight" (one
    range per row), "bias", and "grad" (one range per sequence and step, for each of the two products by itself).

    Several layers, both directions, ``batch_first``, packed sequences, no bias, sequences without a batch: as in
    ``nn.LSTM``. Layers with a projection (``proj_size``) are not converted. Without quantisation ("float", or 24 bits
    and more) torch's own fused LSTM runs. Output and gates are computed in float32 also under autocast.

    Paper: section 4.4 (Penn Treebank).
    """

    FLOAT = nn.LSTM
    KIND = "lstm"

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """A projection would be a third product, which nobody has said how to quantise."""
        return "it has a projection (proj_size)" if module.proj_size else ""

    @classmethod
    def roles(cls, module: nn.Module, quantizers: Mapping[str, Quantizer], aggregation: str) -> dict[str, Quantizer]:
        """Every layer and direction has running ranges of its own."""
        roles = super().roles(module, quantizers, aggregation)
        data = {role: roles.pop(role) for role in ("input", "hidden")}
        return {f"{role}_{cell}": data[role] for cell in _cells(module) for role in data} | roles

    def forward(  # type: ignore[override]
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run over sequences; arguments and results as those of ``nn.LSTM``."""
        p = self.precision
        p.require_bits()
        if not (p.quantizes or p.quantizes_gradient):
            return nn.LSTM.forward(self, input, hx)
        packed = input if isinstance(input, PackedSequence) else None
        x = input if packed is None else packed.data
        assert isinstance(x, Tensor)
        for tensor in (x, *(hx or ())):
            check_floating(tensor)  # the result would be cut to its dtype
        dtype = torch.promote_types(x.dtype, torch.float32)
        alone = packed is None and x.dim() == 2  # one sequence without a batch
        if packed is None:
            if x.dim() not in (2, 3):
                raise ValueError(f"the input of an LSTM has 2 or 3 dimensions, got {tuple(x.shape)}")
            x = x.unsqueeze(0 if self.batch_first else 1) if alone else x
        if hx is not None and alone:
            hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        if packed is not None:
            sizes = tuple(packed.batch_sizes.tolist())
            hx = None if hx is None else self.permute_hidden(hx, packed.sorted_indices)
        else:
            sizes = (x.shape[0],) * x.shape[1] if self.batch_first else (x.shape[1],) * x.shape[0]
        if not sizes:
            raise ValueError("the sequences of an LSTM need at least one step")
        if hx is None:
            zero = x.new_zeros(self.num_layers * self._directions, sizes[0], self.hidden_size)
            hx = (zero, zero)
        self.check_forward_args(x, hx, None if packed is None else packed.batch_sizes)
        if packed is None:
            x = (x.transpose(0, 1) if self.batch_first else x).flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            y, state = self._layers(x.to(dtype), sizes, (hx[0].to(dtype), hx[1].to(dtype)))
        y = y.to(x.dtype)
        state = (state[0].to(hx[0].dtype), state[1].to(hx[1].dtype))
        if packed is not None:
            packed = PackedSequence(y, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            return packed, self.permute_hidden(state, packed.unsorted_indices)
        y = y.unflatten(0, (len(sizes), sizes[0]))
        y = y.transpose(0, 1) if self.batch_first else y
        if alone:
            return y.squeeze(0 if self.batch_first else 1), (state[0].squeeze(1), state[1].squeeze(1))
        return y, state

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _layers(self, x: Tensor, sizes: tuple[int, ...], hx: State) -> tuple[Tensor, State]:
        """x (N, I) -> y (N, directions H), state (layers directions, B, H) twice."""
        ends: list[State] = []
        cells = _cells(self)
        for layer in range(self.num_layers):
            span = range(layer * self._directions, (layer + 1) * self._directions)
            found = [self._cell(cells[k], x, sizes, hx[0][k], hx[1][k]) for k in span]
            ends += [(h, c) for _, h, c in found]
            x = torch.cat([y for y, _, _ in found], -1)
            if self.dropout and len(ends) < len(hx[0]):
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, (torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends]))

    def _cell(
        self, cell: str, x: Tensor, sizes: tuple[int, ...], h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One direction of one layer: x (N, I), h and c (B, H) -> y (N, H), h and c."""
        p = self.precision
        (w, b), (u, d) = (self._quantized_weights(kind, cell, x.dtype) for kind in ("ih", "hh"))
        x_gates = self._gradient(nn.functional.linear(self._input(cell, x, sizes), w, b), sizes)
        steps = _Steps(sizes, cell.endswith("_reverse"), p, f"hidden_{cell}")
        result = _Recurrence.apply(x_gates, u, d, h, c, steps)
        if self.training and steps.ranges and p.quantizers[steps.role].running:
            p.track(steps.role, *(torch.stack(part) for part in zip(*steps.ranges, strict=True)))
        return result

    def _quantized_weights(self, kind: str, cell: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        p = self.precision
        weight = p.operand("weight", getattr(self, f"weight_{kind}_{cell}").to(dtype))
        return weight, p.operand("bias", getattr(self, f"bias_{kind}_{cell}").to(dtype)) if self.bias else None

    def _input(self, cell: str, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Quantise x (N, I), every step on its own range."""
        p, role = self.precision, f"input_{cell}"
        quantizer = p.quantizers[role]
        if not p.quantizes or x.numel() == 0 or p.running_range(role) is not None:
            return p.operand(role, x)
        counts = torch.tensor(sizes, device=x.device)
        if quantizer.granularity == "per_tensor" and sizes[0] == sizes[-1]:  # the common case: one reduction
            low, width = (part.flatten() for part in per_channel(x.detach().unflatten(0, (len(sizes), sizes[0]))))
        elif quantizer.granularity == "per_tensor":
            low, width = (
                torch.stack(part) for part in zip(*map(quantizer.range_of, x.detach().split(sizes)), strict=True)
            )
        else:
            parts = [(len(part), quantizer.range_of(part)) for part in x.detach().split(sizes)]
            low, width = (torch.cat([r[k].expand(n, 1) for n, r in parts]) for k in (0, 1))
            return round_to_grid(x, low, width, p.levels, clip=quantizer.clips)
        if quantizer.running and self.training:
            p.track(role, *(part.flip(0) if cell.endswith("_reverse") else part for part in (low, width)))
        low, width = p.or_running(role, low, width)
        low, width = (part.repeat_interleave(counts, output_size=len(x)).unsqueeze(1) for part in (low, width))
        return round_to_grid(x, low, width, p.levels, clip=p.clips(role))

    def _gradient(self, y: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Quantise the gradient of the input product, (N, 4 H), step by step."""
        p = self.precision
        if p.quantizers["grad"].granularity == "per_row":  # a row belongs to one step: all steps at once
            return p.gradient("grad", y)
        return torch.cat([p.gradient("grad", part) for part in y.split(sizes)])


def _cells(module: nn.Module) -> list[str]:
    """Names of the layers and directions of an ``nn.LSTM``, as in its parameters."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(int(module.num_layers)) for direction in directions]  # type: ignore[arg-type]


CONVERSIONS: dict[type[nn.Module], type[QuantizedLayer]] = {nn.LSTM: QuantLSTM}
