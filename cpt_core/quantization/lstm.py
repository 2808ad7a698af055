"""The quantised LSTM.  Paper: section 4.4.

``nn.LSTM`` with both products of every step quantised: the input x_t and the hidden state h, each with one range per
time step, and both weights. The gates, the cell state and the hidden state itself stay in float32.

    gates_t = q(x_t) q(W)' + q(b) + q(h_{t-1}) q(U)' + q(b')
    i, f, o = sigmoid(gates)   g = tanh(gates)   c_t = f c_{t-1} + i g   h_t = o tanh(c_t)

Written step by step this quantises the weights 2 T times; here they are quantised once and the input product of all
steps is one product, with the same bits in the result. The recurrence is one operator, ``cpt_core.kernels.lstm``.

Shapes: T steps, B sequences, I inputs, H hidden; N = B_0 + ... + B_{T-1} rows, step after step, as in a
``PackedSequence``.

>>> from cpt_core.quantization.convert import quantize_
>>> lstm = quantize_(nn.LSTM(4, 3))
>>> lstm.precision.set_bits(5, q_grad=8)
>>> lstm(torch.ones(7, 2, 4))[0].shape
torch.Size([7, 2, 3])
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cpt_core.codes.execution import multiplies_integers
from cpt_core.kernels.lstm import Forward, recurrence
from cpt_core.kernels.operators import fake_quantize, linear, range_of, round_in_range
from cpt_core.kernels.products import LONGEST
from cpt_core.quantization.fake_quantize import check_floating
from cpt_core.quantization.layers import QuantizedLayer, on_codes, seen, unseen
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import Range
from cpt_core.schedules.schedule import Levels

if TYPE_CHECKING:
    from cpt_core.quantization.convert import QuantConfig

State = tuple[Tensor, Tensor]
Steps = tuple[int, tuple[int, ...]]  # how many, and the sequences of each; nothing where all have the same


class QuantLSTM(QuantizedLayer, nn.LSTM):
    """``nn.LSTM`` with quantised products, everything else in float32.

    Roles: "input" and "hidden" (one range per time step, running ranges for every layer and direction), "weight" (one
    range per row), "bias", and "grad" (one range per sequence and step, for each of the two products by itself).

    Several layers, both directions, ``batch_first``, packed sequences, no bias, sequences without a batch: as in
    ``nn.LSTM``. Layers with a projection (``proj_size``) are not converted. Without quantisation ("float", or 24 bits
    and more) torch's own fused LSTM runs. Output and gates are computed in float32 also under autocast.

    ``torch.compile`` refuses to trace any ``nn.LSTM``; with ``torch._dynamo.config.allow_rnn = True`` it takes this one
    into its graph, where a layer in one direction is one node, and one more in the backward pass.

    Paper: section 4.4 (Penn Treebank).
    """

    FLOAT = nn.LSTM
    KIND = "lstm"

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """A projection would be a third product, which nobody has said how to quantise."""
        return "it has a projection (proj_size)" if module.proj_size else ""

    @classmethod
    def lengths(cls, module: Any) -> Levels:
        """Inputs of every layer, hidden states, gates."""
        deeper = {module.hidden_size * (1 + module.bidirectional)} if module.num_layers > 1 else set()
        inside = tuple(sorted({module.input_size, module.hidden_size} | deeper))
        return Levels(inside, inside, (4 * module.hidden_size,), (4 * module.hidden_size,))

    @classmethod
    def roles(cls, module: nn.Module, config: QuantConfig) -> dict[str, Quantizer]:
        """Every layer and direction has running ranges of its own."""
        roles = super().roles(module, config)
        data = {role: roles.pop(role) for role in ("input", "hidden")}
        return {f"{role}_{cell}": data[role] for cell in _cells(module) for role in data} | roles

    def forward(  # type: ignore[override]
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run over sequences; arguments and results as those of ``nn.LSTM``."""
        if seen():
            with unseen():
                return QuantLSTM.forward(self, input, hx)
        p = self.precision
        p.require_bits()
        if not p.now.active:
            return nn.LSTM.forward(self, input, hx)
        packed = input if isinstance(input, PackedSequence) else None
        x = input if packed is None else packed.data
        assert isinstance(x, Tensor)
        for tensor in (x, *(hx or ())):
            check_floating(tensor)  # the result would be cut to its dtype
        dtype = torch.promote_types(x.dtype, torch.float32)
        if packed is None and x.dim() not in (2, 3):
            raise ValueError(f"the input of an LSTM has 2 or 3 dimensions, got {tuple(x.shape)}")
        if packed is None and x.dim() == 2:  # one sequence without a batch
            at = 0 if self.batch_first else 1
            given = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
            y, (h, c) = QuantLSTM.forward(self, x.unsqueeze(at), given)
            return y.squeeze(at), (h.squeeze(1), c.squeeze(1))  # type: ignore[union-attr]
        if packed is not None:
            sizes = tuple(packed.batch_sizes.tolist())
            steps, batch = len(sizes), max(sizes, default=0)
            hx = None if hx is None else self.permute_hidden(hx, packed.sorted_indices)
        else:
            sizes = ()
            steps, batch = (x.shape[1], x.shape[0]) if self.batch_first else (x.shape[0], x.shape[1])
        if steps == 0:
            raise ValueError("the sequences of an LSTM need at least one step")
        if hx is None:
            zero = x.new_zeros(self.num_layers * self._directions, batch, self.hidden_size)
            hx = (zero, zero)
        self.check_forward_args(x, hx, None if packed is None else packed.batch_sizes)
        if packed is None:
            x = (x.transpose(0, 1) if self.batch_first else x).flatten(0, 1)
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            h, c = hx[0].to(dtype), hx[1].to(dtype)
            y, state = self._layers(x.to(dtype), (steps, sizes if len(set(sizes)) > 1 else ()), (h, c))
        y = y.to(x.dtype)
        state = (state[0].to(hx[0].dtype), state[1].to(hx[1].dtype))
        if packed is not None:
            packed = PackedSequence(y, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
            return packed, self.permute_hidden(state, packed.unsorted_indices)
        y = y.unflatten(0, (steps, batch))
        return (y.transpose(0, 1) if self.batch_first else y), state

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _layers(self, x: Tensor, steps: Steps, hx: State) -> tuple[Tensor, State]:
        """x (N, I) -> y (N, directions H), state (layers directions, B, H) twice."""
        ends: list[State] = []
        cells = _cells(self)
        for layer in range(self.num_layers):
            span = range(layer * self._directions, (layer + 1) * self._directions)
            found = [self._cell(cells[k], x, steps, hx[0][k], hx[1][k]) for k in span]
            for k, (y, _, _) in zip(span, found, strict=True) if self.precision.observed else ():
                rows = steps[1] or (len(x) // steps[0],) * steps[0]
                self.precision.observe(f"input_{cells[k]}", x, rows)
                before = _hidden_before(y, hx[0][k], rows, cells[k].endswith("_reverse"))
                self.precision.observe(f"hidden_{cells[k]}", before, rows)
            ends += [(h, c) for _, h, c in found]
            x = torch.cat([y for y, _, _ in found], -1)
            if self.dropout and len(ends) < len(hx[0]):
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, (torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends]))

    def _cell(self, cell: str, x: Tensor, steps: Steps, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One direction of one layer: x (N, I), h and c (B, H) -> y (N, H), h and c."""
        p, role = self.precision, f"hidden_{cell}"
        if multiplies_integers(p, x) and not self.not_on_codes():
            return on_codes("lstm", self, cell, x, steps, h, c)
        (w, b), (u, d) = (self.weights(kind, cell, x.dtype) for kind in ("ih", "hh"))
        w, u = p.operand("weight", w), p.operand("weight", u)
        b, d = (None if bias is None else p.operand("bias", bias) for bias in (b, d))
        x_gates = self._gradient(linear(self._input(cell, x, steps), w, b), steps)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_gates, u, d, h, c))
        low, width, filled = p.stored_range(role)
        grad_levels, grad_granularity, key, advance = p.gradient_noise("grad", steps[0] if save else 0)
        y, h, c, ranges = recurrence(Forward(
            x_gates, u, d, h, c, *steps, reverse=cell.endswith("_reverse"), save=save,
            levels=p.levels if p.now.activation else None, granularity=p.quantizers[role].grid,
            low=low, width=width, filled=filled,
            grad_levels=grad_levels, grad_granularity=grad_granularity, key=key, advance=advance,
        ))  # fmt: skip
        if self.training and p.quantizers[role].running and ranges.numel():
            p.track(role, *ranges)
        return y, h, c

    def not_on_codes(self) -> str:
        """Return why no product of this layer has an integer form, or ""."""
        role = next(r for r in self.precision.quantizers if r.startswith("hidden_"))
        if self.precision.quantizers[role].grid != "per_tensor":
            return "hidden states have several ranges"
        return "sums over the gates overflow 32 bits" if 4 * self.hidden_size > LONGEST else ""

    def weights(self, kind: str, cell: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of a cell's input ("ih") or hidden state ("hh"), not quantised."""
        weight = getattr(self, f"weight_{kind}_{cell}").to(dtype)
        return weight, getattr(self, f"bias_{kind}_{cell}").to(dtype) if self.bias else None

    def _input(self, cell: str, x: Tensor, steps: Steps) -> Tensor:
        """Quantise x (N, I), every step on its own range."""
        p, role = self.precision, f"input_{cell}"
        quantizer = p.quantizers[role]
        if not p.now.activation or x.numel() == 0 or p.running_range(role) is not None:
            return p.operand(role, x)
        count, sizes = steps
        if not sizes and quantizer.granularity == "per_tensor" and (self.training or not quantizer.running):
            steps_apart = x.unflatten(0, (count, -1))  # a step is as a channel
            y, low, width = fake_quantize(
                steps_apart, p.levels, replace(quantizer, granularity="per_channel", running=False).grid
            )
            self._track(cell, low.flatten(), width.flatten())
            return y.flatten(0, 1)
        low, width = self.ranges(cell, x.detach(), steps)
        return round_in_range(x, low, width, p.levels, quantizer.grid, clip=p.clips(role))

    def ranges(self, cell: str, x: Tensor, steps: Steps) -> Range:
        """Return the ranges of x (N, I), every step its own, as those of its rows."""
        p, role = self.precision, f"input_{cell}"
        quantizer = p.quantizers[role]
        count, sizes = steps
        if not sizes and quantizer.granularity == "per_tensor":
            found = range_of(x.unflatten(0, (count, -1)), "per_channel")
            of_steps = [r.flatten() for r in found]
            rows = [r.expand(count, len(x) // count, 1).reshape(-1, 1) for r in found]
        else:
            parts = x.split(sizes or len(x) // count)
            ranges = [range_of(part, quantizer.grid) for part in parts]
            of_steps = [torch.stack(found) for found in zip(*ranges, strict=True)] if quantizer.running else []
            rows = [
                torch.cat([r.expand(len(part), 1) for r, part in zip(found, parts, strict=True)])
                for found in zip(*ranges, strict=True)
            ]
        if quantizer.running and self.training:
            self._track(cell, *of_steps)
        return p.or_running(role, *rows)

    def _track(self, cell: str, low: Tensor, width: Tensor) -> None:
        """Let the running range of the input follow the ranges of all steps, (T,), in the order of the direction."""
        if self.precision.quantizers[f"input_{cell}"].running:
            low, width = (r.flip(0) if cell.endswith("_reverse") else r for r in (low, width))
            self.precision.track(f"input_{cell}", low, width)

    def _gradient(self, y: Tensor, steps: Steps) -> Tensor:
        """Quantise the gradient of the input product, (N, 4 H), step by step."""
        p = self.precision
        if p.quantizers["grad"].granularity == "per_row":  # a row belongs to one step: all steps at once
            return p.gradient("grad", y)
        count, sizes = steps
        return torch.cat([p.gradient("grad", part) for part in y.split(sizes or len(y) // count)])


def _hidden_before(y: Tensor, h: Tensor, rows: tuple[int, ...], reverse: bool) -> Tensor:
    """Return the hidden states that enter the steps, (N, H): y (N, H) behind them, h (B, H) before the first."""
    behind = y.split(rows)
    if reverse:  # sequences that end earlier begin with states of h
        later = zip(rows, (*behind[1:], h[:0]), strict=True)
        return torch.cat([torch.cat([states, h[len(states) : n]]) for n, states in later])
    return torch.cat([h[: rows[0]], *(states[:n] for states, n in zip(behind[:-1], rows[1:], strict=True))])


def _cells(module: nn.Module) -> list[str]:
    """Names of the layers and directions of an ``nn.LSTM``, as in its parameters."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(int(module.num_layers)) for direction in directions]  # type: ignore[arg-type]
