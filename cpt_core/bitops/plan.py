"""The plan: BitOps of a model, and its other costs, counted before it trains.  Paper: section 4.1.

Every layer reports the multiply-accumulates (MACs) of its own call; a pass costs MACs * b_a * b_b / 32**2.
Two conventions price them:

- ``"per_op"``: what runs. What is quantised costs its bits, the rest 32, and only products that are computed cost
  anything (the first layer, for example, needs no error product). It also counts what the authors leave out: the sums
  over neighbours in graph convolutions, an operation per edge and feature, and every product outside the layers known
  here, such as both of attention, at the bits of the module that quantises it, else at 32;
- ``"paper"``, the paper's convention: all counted work at the bits of the step, three products for every layer, also
  of layers that run in float32, BatchNorm and the upsampling of feature pyramids included, as the authors price it. The
  total is without what the authors leave out; the plan holds it as ``unpriced``.

>>> import torch
>>> from cpt_core.quantization.convert import quantize_
>>> from cpt_core.schedules.schedule import StaticSchedule
>>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
>>> plan = count_bitops(model, (torch.ones(4, 4),), StaticSchedule(8, 1))
>>> plan.forward_macs, plan.total, plan.by_convention["paper"]
(72, 124.0, 13.5)
>>> plan.float32  # shares of the MACs of the forward passes
{'1': 0.5555555555555556}
>>> plan.costs["traffic"]  # bytes
328.0
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from cpt_core.bitops import tally
from cpt_core.bitops.macs import UPSAMPLING
from cpt_core.bitops.tally import IN_FLOAT32, Tally, rank, widest
from cpt_core.bitops.trace import CONVENTIONS, Call, trace
from cpt_core.checks import check_bits, choose, declared
from cpt_core.formats.costs import Operands
from cpt_core.formats.ladder import AFFINE, FormatLadder
from cpt_core.quantization.convert import all_precisions
from cpt_core.quantization.layers import PASSES
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import Schedules, assign_schedules
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd

PAPERS = "the paper's convention, which prices layers in float32 at the bits of the step"


@dataclass(frozen=True)
class BitOpsPlan:
    """BitOps of a training run, in units of one 32 x 32-bit MAC; ``print`` it for a table.

    Attributes:
        convention: "paper" or "per_op".
        steps: optimizer steps counted.
        macs: forward MACs of one step by layer.
        bitops: layer -> pass -> squared bits x MACs, exact integers.
        float32: layer -> share of the forward MACs of the run that run in float32 there, by either convention: their
            sum is the share of all of it.
        by_convention: the total by each convention.
        at_32_bits: BitOps of the same products, all in float32.
        unpriced: layer -> MACs of one forward pass that "paper" leaves out and "per_op" prices: products that no known
            layer reports, both products of attention, sums over neighbours. The total is without them.
        uncounted: operation -> output elements of one forward pass, for what no convention prices: elementwise work
            and pooling; by "per_op" also "upsampling", which copies.
        prices: layer -> name of ``COSTS`` -> total of the run, in the unit of that cost.
    """

    convention: str
    steps: int
    macs: Mapping[str, int]
    bitops: Mapping[str, Mapping[str, int]]
    float32: Mapping[str, float]
    by_convention: Mapping[str, float]
    at_32_bits: float
    unpriced: Mapping[str, int]
    uncounted: Mapping[str, int]
    prices: Mapping[str, Mapping[str, float]]

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
        return self.by_convention[self.convention]

    @property
    def relative_to_float32(self) -> float:
        """The total, divided by that of the same products in float32; NaN where there are none."""
        return self.total / self.at_32_bits if self.at_32_bits else math.nan

    @property
    def costs(self) -> dict[str, float]:
        """Totals by every cost of ``COSTS``, each in its unit, without what is ``unpriced``."""
        return {**tally.totals(self.prices), "bitops": self.total}

    def table(self) -> pd.DataFrame:
        """Return all costs: a line per layer, and the total."""
        return tally.table(self.prices)

    def __str__(self) -> str:
        """Return a table by layer."""
        width = max([len(n) for n in self.macs] + [5])
        lines = [f"{'layer':<{width}}  {'forward MACs':>15}  {'BitOps':>12}"]
        lines += [f"{n:<{width}}  {self.macs[n]:>15,}  {b:>12.5g}" for n, b in self.by_layer.items()]
        lines.append(f"{'total':<{width}}  {self.forward_macs:>15,}  {self.total:>12.5g}")
        lines.append(f"{self.relative_to_float32:.4f} of the BitOps of the same products in float32")
        lines.append(tally.mostly_float32(self.float32))
        paper, ran = self.by_convention["paper"], self.by_convention["per_op"]
        if self.convention == "per_op":
            lines += [f"{paper:.5g} BitOps by {PAPERS}"] * (paper > 0)
        else:
            lines.append(f"the total is by {PAPERS}; what runs takes {ran:.5g} BitOps")
        if self.unpriced:
            missing = sum(self.unpriced.values())
            share = missing / (self.forward_macs + missing)
            lines.append(
                f"total is without {missing:,} MACs per step ({share:.1%} of the forward pass), which "
                f'"{self.convention}" does not price: {tally.largest(self.unpriced, ",", "unpriced")}'
            )
        if self.uncounted:
            lines.append("not counted: " + ", ".join(f"{op} ({n:,} elements)" for op, n in self.uncounted.items()))
        return "\n".join(lines)


def count_bitops(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: Schedules | None = None,
    *,
    convention: str = "per_op",
    q_grad: int | None = None,
) -> BitOpsPlan:
    """Count the BitOps of training ``model`` for a whole schedule, before it runs, and its other costs.

    The forward pass is traced once on the ``meta`` device: no data is computed and the model is not touched. Of a model
    that asks for data while it runs (detectors, layers of DGL) a copy runs on the data given; a warning says so.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward for ONE optimizer step (the whole batch); only shapes matter.
        schedule: as for ``PrecisionScheduler``; None counts one step at 32 bits.
        convention: "paper" or "per_op", see the module.
        q_grad: gradient bits; None takes the schedule's ``q_max``. All bits are levels where a layer has ladders.

    Raises:
        ValueError: for an unknown convention, when nothing in the model can be counted, when it cannot be copied, or
            when it asks for data and has none, being on ``meta`` itself.

    Paper: section 4.1.
    Differs: "paper" prices the float32 layers (classifier, BatchNorm) at q bits, as the authors' scripts do.
    """
    declared(count_bitops, {"model": model, "schedule": schedule}, parts=True)
    choose("convention", convention, CONVENTIONS)
    q_grad = None if q_grad is None else check_bits("q_grad", q_grad)
    calls, uncounted = trace(model, inputs)
    return price(calls, uncounted, formats_per_layer(model, calls, schedule, q_grad), convention)


InForce = tuple[tuple[Operands, int], ...]  # the formats of a layer's operands, each with its number of steps
Formats = dict[str | None, InForce]  # by layer; None: of all others


def price(
    calls: list[Call], uncounted: Mapping[str, int], formats: Mapping[str, Formats], convention: str
) -> BitOpsPlan:
    """Price the calls of one step at the formats in force in a run, by layer; see ``count_bitops``."""
    work = {name: Tally() for name in CONVENTIONS}
    macs: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    copied: Counter[str] = Counter()
    for call in calls:
        for name, of_layers in formats.items():
            found = of_layers.get(call.owner, of_layers[None])
            if call.once:
                found = tuple({(o.activation, o.weight): (o, 1) for o, _ in found}.values())
            for operands, times in found:
                work[name].add(call, call.passes(name), operands, times)
        if call.passes(convention):
            macs[call.layer] += call.macs
        elif call.kind == UPSAMPLING:
            copied[call.kind] += call.macs
        else:
            unpriced[call.layer] += call.macs
    chosen = work[convention]
    return BitOpsPlan(
        convention=convention,
        steps=sum(n for _, n in formats[convention][None]),
        macs=dict(macs),
        bitops={k: dict(v) for k, v in chosen.squared_bits().items()},
        float32=work["per_op"].float32(),
        by_convention={name: done.total() for name, done in work.items()},
        at_32_bits=chosen.total(FULL_PRECISION),
        unpriced=dict(unpriced),
        uncounted={**uncounted, **copied},
        prices=chosen.prices(),
    )


def formats_per_layer(
    model: nn.Module, calls: list[Call], schedule: Schedules | None, q_grad: int | None
) -> dict[str, Formats]:
    """Return convention -> layer -> the formats of its operands, with the number of their steps, as ``price`` takes it.

    By "per_op" a layer that is not converted runs in float32; by "paper" it is on the paper's ladder.
    """
    if schedule is None:
        return {name: {None: ((IN_FLOAT32, 1),)} for name in CONVENTIONS}
    precisions = all_precisions(model) if any(isinstance(m, LayerPrecision) for m in model.modules()) else {}
    driven = {name: p.driver for name, p in precisions.items() if model.training and not p.training}
    if apart := [name for name, driver in driven.items() if getattr(driver, "eval_bits", "current") != "current"]:
        said = f"{', '.join(apart)}: in eval mode inside a model that trains, so at eval_bits; priced by the schedule"
        warnings.warn(said, stacklevel=3)
    owners = dict.fromkeys(c.owner for c in calls if c.owner is not None)
    groups: dict[tuple[int, tuple[FormatLadder, ...]], tuple[Schedule, list[str]]] = {}
    for s, layers in assign_schedules(schedule, precisions or owners or {"": None}).values():
        for name in layers:
            of_roles = precisions[name].ladders if name in precisions else (AFFINE,) * len(Operands._fields)
            groups.setdefault((id(s), tuple(of_roles)), (s, []))[1].append(name)

    formats: Formats = {}
    every: list[list[int]] = []
    ladders: list[FormatLadder] = []
    for (_, of_roles), (s, names) in groups.items():
        rows = [levels.tolist() for levels in s.levels(q_grad)]
        formats.update(dict.fromkeys(names, _counted(rows, of_roles)))
        every, ladders = every + rows, [*ladders, *of_roles]
    # work outside the quantised layers has no formats of its own: "paper" takes the widest of each step
    everywhere, plain = _counted(every, ladders), ((IN_FLOAT32, len(every[0])),)
    return {"paper": {**formats, None: everywhere}, "per_op": {**(formats if precisions else {}), None: plain}}


def _counted(rows: list[list[int]], ladders: Sequence[FormatLadder]) -> InForce:
    """Count the steps by formats: the levels of a layer's four roles, or of several layers, of which the widest."""
    found: Counter[Operands] = Counter()
    for levels, steps in Counter(zip(*rows, strict=True)).items():
        of_roles = [ladder.priced(level) for ladder, level in zip(ladders, levels, strict=True)]
        found[widest(Operands(*of_roles[i : i + 4]) for i in range(0, len(of_roles), 4))] += steps
    return tuple(sorted(found.items(), key=lambda item: [rank(f) for f in item[0]]))
