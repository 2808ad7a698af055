"""The plan: BitOps of a model, counted before it trains.  Paper: section 4.1.

Every layer reports the multiply-accumulates (MACs) of its own call; a pass costs MACs * b_a * b_b / 32**2.
Two conventions price them:

- ``"paper"``: all counted work at the bits of the step, three products for every layer, BatchNorm included, as the
  authors price it, and the upsampling of feature pyramids;
- ``"per_op"``: what is quantised at its bits, the rest at 32, and only the products that are computed (the first
  layer, for example, needs no error product). It also counts what the authors leave out: the sums over neighbours in
  graph convolutions, an operation per edge and feature, both products of attention, and every product outside the
  layers known here, at 32 bits: matmul or attention as a plain function, GRUs, transposed convolutions. The total of
  "paper" is without these; the plan holds them as ``unpriced``.

>>> import torch
>>> plan = count_bitops(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.ones(1, 4),))
>>> plan.forward_macs, plan.total
(8, 24.0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from cpt_core.bitops.macs import UPSAMPLING
from cpt_core.bitops.trace import CONVENTIONS, PASSES, Call, trace
from cpt_core.checks import choose
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import Schedules, assign_schedules
from cpt_core.schedules.cost import FULL_PRECISION


@dataclass(frozen=True)
class BitOpsPlan:
    """BitOps of a training run, in units of one 32 x 32-bit MAC; ``print`` it for a table.

    Attributes:
        convention: "paper" or "per_op".
        steps: optimizer steps counted.
        macs: forward MACs of one step by layer.
        bitops: layer -> pass -> squared bits x MACs, exact integers.
        unpriced: layer -> MACs of one forward pass that "paper" leaves out and "per_op" prices: products that no known
            layer reports, both products of attention, sums over neighbours. The total is without them.
        uncounted: operation -> output elements of one forward pass, for what no convention prices: elementwise work
            and pooling; by "per_op" also "upsampling", which copies.
    """

    convention: str
    steps: int
    macs: Mapping[str, int]
    bitops: Mapping[str, Mapping[str, int]]
    unpriced: Mapping[str, int]
    uncounted: Mapping[str, int]

    @property
    def forward_macs(self) -> int:
        """MACs of the forward pass of one step, without those that are ``unpriced``."""
        return sum(self.macs.values())

    @property
    def by_layer(self) -> dict[str, float]:
        """BitOps of every layer."""
        return {layer: sum(passes.values()) / FULL_PRECISION**2 for layer, passes in self.bitops.items()}

    @property
    def by_pass(self) -> dict[str, float]:
        """BitOps of the forward, error and weight-gradient products."""
        return {p: sum(b.get(p, 0) for b in self.bitops.values()) / FULL_PRECISION**2 for p in PASSES}

    @property
    def total(self) -> float:
        """BitOps of the run, without what is ``unpriced``."""
        return sum(sum(passes.values()) for passes in self.bitops.values()) / FULL_PRECISION**2

    def __str__(self) -> str:
        """Return a table by layer."""
        width = max([len(n) for n in self.macs] + [5])
        lines = [f"{'layer':<{width}}  {'MACs/step':>15}  {'BitOps':>12}"]
        lines += [f"{n:<{width}}  {self.macs[n]:>15,}  {b:>12.5g}" for n, b in self.by_layer.items()]
        lines.append(f"{'total':<{width}}  {self.forward_macs:>15,}  {self.total:>12.5g}")
        if self.unpriced:
            missing = sum(self.unpriced.values())
            most = sorted(self.unpriced, key=lambda layer: -self.unpriced[layer])
            named = [f"{layer} {self.unpriced[layer]:,}" for layer in most[:3]]
            if len(most) > 3:
                named.append(f"{len(most) - 3} more in .unpriced")
            share = missing / (self.forward_macs + missing)
            lines.append(
                f"total is without {missing:,} MACs per step ({share:.1%} of the forward pass), which "
                f'"{self.convention}" does not price: {", ".join(named)}'
            )
        if self.uncounted:
            lines.append("not counted: " + ", ".join(f"{op} ({n:,} elements)" for op, n in self.uncounted.items()))
        return "\n".join(lines)


def count_bitops(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: Schedules | None = None,
    *,
    convention: str = "paper",
    q_grad: int | None = None,
) -> BitOpsPlan:
    """Count the BitOps of training ``model`` for a whole schedule, before it runs.

    The forward pass is traced once on the ``meta`` device: no data is computed and the model is not touched. Of a model
    that asks for data while it runs (detectors, layers of DGL) a copy runs on the data given; a warning says so.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward for ONE optimizer step (the whole batch); only shapes matter.
        schedule: as for ``PrecisionScheduler``; None counts one step at 32 bits.
        convention: "paper" or "per_op", see the module.
        q_grad: gradient bits; None takes the schedule's ``q_max``.

    Raises:
        ValueError: for an unknown convention, when nothing in the model can be counted, when it cannot be copied, or
            when it asks for data and has none, being on ``meta`` itself.

    Paper: section 4.1.
    Differs: "paper" prices the float32 layers (classifier, BatchNorm) at q bits, as the authors' scripts do.
    """
    choose("convention", convention, CONVENTIONS)
    calls, uncounted = trace(model, inputs)
    return price(calls, uncounted, bits_per_layer(model, calls, schedule, q_grad), convention)


def price(
    calls: list[Call],
    uncounted: Mapping[str, int],
    bits: Mapping[str, tuple[np.ndarray, np.ndarray]],
    convention: str,
) -> BitOpsPlan:
    """Price the calls of one step at the (forward bits, gradient bits) of every step, by layer; see ``count_bitops``.

    Layers that ``bits`` does not name are in float32; the key "" holds the bits at which "paper" prices them.
    """
    result: dict[str, Counter[str]] = {}
    macs: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    copied: Counter[str] = Counter()
    for call in calls:
        if not call.passes(convention):
            if call.kind == UPSAMPLING:
                copied[call.kind] += call.macs
            else:
                unpriced[call.layer] += call.macs
            continue
        result.setdefault(call.layer, Counter())
        macs[call.layer] += call.macs
        if call.owner is not None and call.owner in bits:
            q, g = bits[call.owner]
        else:
            q, g = bits[""] if convention == "paper" else _float32(bits[""])
        if call.once:
            q = np.unique(q)
        for name in call.passes(convention):
            result[call.layer][name] += call.macs * int((q * (q if name == "forward" else g)).sum())
    bitops = {k: dict(v) for k, v in result.items()}
    return BitOpsPlan(convention, len(bits[""][0]), dict(macs), bitops, dict(unpriced), {**uncounted, **copied})


def _float32(like: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.full_like(like[0], FULL_PRECISION), np.full_like(like[1], FULL_PRECISION)


def bits_per_layer(
    model: nn.Module, calls: list[Call], schedule: Schedules | None, q_grad: int | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the (forward bits, gradient bits) of every step, by layer, as ``price`` takes them."""
    if schedule is None:
        one = np.array([FULL_PRECISION])
        return {"": (one, one)}
    converted = any(isinstance(m, LayerPrecision) for m in model.modules())
    owners = dict.fromkeys(c.owner for c in calls if c.owner is not None)
    names = list(layer_precisions(model) if converted else owners or [""])
    bits = {}
    for s, layers in assign_schedules(schedule, names).values():
        pair = (s.bits(), np.full(s.total_steps, q_grad or s.q_max))
        bits.update(dict.fromkeys(layers, pair))
    # work outside the quantised layers has no bits of its own: "paper" takes the highest of each step
    pairs = list(bits.values())
    bits[""] = (np.max([q for q, _ in pairs], axis=0), np.max([g for _, g in pairs], axis=0))
    return bits
