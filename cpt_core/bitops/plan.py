"""BitOps plan of a training: BitOps and other costs, counted before the model trains.  Paper: section 4.1.

``count_bitops`` runs a copy of the model once, which reports the multiply-accumulates (MACs) of every operation, and
prices them at the formats of every step of a schedule: a pass costs MACs * b_a * b_b / 32**2. The result is a
``BitOpsPlan``. Two conventions price operations differently, see ``conventions``.

>>> import torch
>>> from cpt_core.quantization.convert import quantize_
>>> from cpt_core.schedules.schedule import StaticSchedule
>>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
>>> plan = count_bitops(model, (torch.ones(4, 4),), StaticSchedule(8, 1))
>>> plan.forward_macs, plan.total, plan.by_convention["paper"]
(72, 124.0, 13.5)
>>> plan.float32  # matmuls and convolutions that run in float32; BatchNorm is neither
{}
>>> plan.costs["traffic"]  # bytes
328.0
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from cpt_core import extensions
from cpt_core.bitops.conventions import (
    CONVENTIONS,
    is_matmul,
    priced_passes,
    row_name,
)
from cpt_core.bitops.counting import copy_inputs, report_operations, tensors_in
from cpt_core.bitops.shadow import meta_copy, preserve_state
from cpt_core.bitops.tally import (
    IN_FLOAT32,
    Formats,
    NotIntercepted,
    Tally,
    describe_float32,
    largest_layers,
    widest,
)
from cpt_core.quantization.active_bits import AFFINE_GRIDS, AffineGrids
from cpt_core.quantization.convert import (
    all_precisions,
    layer_weights,
    precision_of,
)
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.scheduler import Schedules, assign_schedules
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import PASS_OPERANDS, RoleLevels, Schedule
from cpt_core.text_repr import show_text
from cpt_core.validation import (
    ForwardInputs,
    check_bits,
    check_choice,
    check_inputs,
    check_types,
    run_forward,
)

if TYPE_CHECKING:
    import pandas as pd

# words of the printed table
PAPER_CONVENTION = (
    "the paper's convention, which prices layers in float32 at the bits of the step"
)


@dataclass(frozen=True)
class BitOpsPlan:
    """BitOps of a training run, in units of one 32 x 32-bit MAC; ``print`` it for a table.

    Attributes:
        convention: "paper" or "per_op".
        steps: optimizer steps counted.
        macs: forward MACs of one step by layer.
        bitops: layer -> pass -> MACs x bits of one operand x bits of the other, exact integers; divided by 32**2 they
            are the BitOps of ``by_layer``.
        float32: layer -> share of the run's forward MACs of matmuls and convolutions that runs in float32 in it,
            whatever the convention. The sum is the share of the model.
        by_convention: convention -> total BitOps.
        at_32_bits: BitOps of the same operations, all in float32.
        unpriced: layer -> MACs of one forward pass that the convention does not price: "paper" matmuls outside of
            layers, both of attention, and sums over neighbours; "per_op" upsampling, which copies.
        tally: counted MACs, for other prices.
        not_intercepted: work that was not intercepted: it runs in float32, and no number of this plan includes it.
    """

    convention: str
    steps: int
    macs: Mapping[str, int]
    bitops: Mapping[str, Mapping[str, int]]
    float32: Mapping[str, float]
    by_convention: Mapping[str, float]
    at_32_bits: float
    unpriced: Mapping[str, int]
    tally: Tally = field(repr=False)
    not_intercepted: NotIntercepted = field(default_factory=NotIntercepted)

    @property
    def forward_macs(self) -> int:
        """MACs of the forward pass of one step, without ``unpriced`` ones."""
        return sum(self.macs.values())

    @property
    def by_layer(self) -> dict[str, float]:
        """BitOps of every layer."""
        return {
            layer: sum(passes.values()) / FULL_PRECISION**2
            for layer, passes in self.bitops.items()
        }

    @property
    def by_pass(self) -> dict[str, float]:
        """BitOps of the forward pass, of input gradients ("error") and of weight gradients."""
        squared_bits: Counter[str] = Counter(dict.fromkeys(PASS_OPERANDS, 0))
        for passes in self.bitops.values():
            squared_bits.update(passes)
        return {name: bits / FULL_PRECISION**2 for name, bits in squared_bits.items()}

    @property
    def total(self) -> float:
        """BitOps of the run, without ``unpriced`` MACs."""
        return self.by_convention[self.convention]

    @property
    def relative_to_float32(self) -> float:
        """Ratio of the total to the BitOps of a float32 run; NaN without operations."""
        return self.total / self.at_32_bits if self.at_32_bits else math.nan

    @property
    def costs(self) -> dict[str, float]:
        """Totals by every cost of ``cpt.formats.COSTS``, each in its unit, without ``unpriced`` MACs."""
        totals: dict[str, float] = extensions.load("prices").total_prices(self.tally)
        return totals

    def table(self) -> pd.DataFrame:
        """Return a table of all costs, with a row per layer and the total."""
        return extensions.load("prices").price_table(self.tally)

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        """Return a table by layer."""
        width = max([len(n) for n in self.macs] + [5])
        lines = [f"{'layer':<{width}}  {'forward MACs':>15}  {'BitOps':>12}"]
        lines += [
            f"{n:<{width}}  {self.macs[n]:>15,}  {b:>12.5g}"
            for n, b in self.by_layer.items()
        ]
        lines.append(
            f"{'total':<{width}}  {self.forward_macs:>15,}  {self.total:>12.5g}"
        )
        training = (
            "one training step"
            if self.steps == 1
            else f"a training of {self.steps:,} steps"
        )
        lines.append(f"BitOps of {training}, in units of one 32 x 32-bit MAC")
        lines.append(
            f"{self.relative_to_float32:.4f} of the BitOps of the same operations in float32"
        )
        lines.append(
            describe_float32(self.float32, not_intercepted=self.not_intercepted)
        )
        never_quantized = self.tally.never_quantized_share()
        if never_quantized and self.convention == "per_op":
            lines.append(
                f"{never_quantized:.1%} of the BitOps are of normalisation, gates and sums, which stay in float32"
            )
        paper, per_op = self.by_convention["paper"], self.by_convention["per_op"]
        if self.convention == "paper":
            lines.append(
                f"the total is by {PAPER_CONVENTION}; what runs takes {per_op:.5g} BitOps"
            )
        elif paper:
            lines.append(f"{paper:.5g} BitOps by {PAPER_CONVENTION}")
        if self.unpriced:
            missing = sum(self.unpriced.values())
            share = missing / (self.forward_macs + missing)
            lines.append(
                f"total is without {missing:,} MACs per step ({share:.1%} of the forward pass), which "
                f'"{self.convention}" does not price: {largest_layers(self.unpriced, ",", "unpriced")}'
            )
        return "\n".join(lines)


def count_bitops(
    model: nn.Module,
    inputs: ForwardInputs,
    schedule: Schedules | None = None,
    *,
    convention: str = "per_op",
    q_grad: int | None = None,
) -> BitOpsPlan:
    """Count the BitOps and other costs of training ``model`` with a schedule, before it runs.

    A copy runs once on the ``meta`` device, without data, and the model does not change. If the model needs data to run
    (detectors, layers of DGL), a copy runs on ``inputs``.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward for ONE optimizer step (the whole batch), in a tuple, or keyword arguments
            in a mapping; only shapes matter.
        schedule: as for ``PrecisionScheduler``; None counts one step at 32 bits.
        convention: "paper" or "per_op", see ``bitops.conventions``.
        q_grad: gradient bits; None takes the schedule's ``q_max``. In a layer with a format ladder, bits are its
            levels.

    A part of the model that is in eval mode is priced by the schedule, too, regardless of ``eval_bits``.

    Raises:
        ValueError: for an unknown convention, when nothing in the model can be counted, when it cannot be copied, or
            when it needs data and is on ``meta`` itself.

    Paper: section 4.1.
    Differs: "paper" prices the float32 layers (classifier, BatchNorm) at q bits, as the authors' scripts do.
    """
    check_types(count_bitops, {"model": model, "schedule": schedule}, parts=True)
    check_choice("convention", convention, CONVENTIONS)
    q_grad = None if q_grad is None else check_bits("q_grad", q_grad)
    step = run_step(model, inputs)
    formats = formats_per_layer(model, step.operations, schedule, q_grad)
    plan = price(step.operations, formats, convention)
    return replace(plan, not_intercepted=step.not_intercepted(model))


# --- operations of a step ---


class CountedStep(NamedTuple):
    """Work of one forward pass.

    Attributes:
        operations: intercepted operations.
        macs_not_intercepted: layer -> MACs of matmuls and convolutions that were not intercepted.
    """

    operations: list[Operation]
    macs_not_intercepted: Counter[str]

    def not_intercepted(self, model: nn.Module) -> NotIntercepted:
        """Return the work that was not intercepted."""
        matmuls = [o for o in self.operations if is_matmul(o) and not o.is_recomputed]
        total = sum(o.macs for o in matmuls) + self.macs_not_intercepted.total()
        shares = {
            layer: macs / total
            for layer, macs in self.macs_not_intercepted.items()
            if macs
        }
        active_layers = {o.layer for o in self.operations}.union(shares)
        weights = layer_weights(model)
        # layers may share a weight, whose operations belong to the first of them
        active_weights = {
            id(weight)
            for layer in active_layers.intersection(weights)
            for weight in weights[layer]
        }
        silent_layers = []
        for layer, layer_tensors in weights.items():
            is_shared = any(id(weight) in active_weights for weight in layer_tensors)
            if layer not in active_layers and not is_shared:
                silent_layers.append(layer)
        return NotIntercepted(shares, tuple(silent_layers))


def run_step(model: nn.Module, inputs: ForwardInputs) -> CountedStep:
    """Return the work of one forward pass."""
    inputs = check_inputs(inputs)
    try:
        step = _count(model, inputs, on_meta=True)
    except Exception as problem:
        tensors = (*model.parameters(), *model.buffers(), *tensors_in(inputs))
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                f"{type(model).__name__} does not run on shapes alone ({problem!r:.160}); give the model and its "
                "inputs real data, on a device that computes"
            ) from problem
        step = _count(model, inputs, on_meta=False)
    if not step.operations:
        raise ValueError(
            f"nothing to count in {type(model).__name__}: no matmul, convolution or normalisation ran"
        )
    return step


def _count(model: nn.Module, inputs: ForwardInputs, on_meta: bool) -> CountedStep:
    shadow = meta_copy(model, on_meta)
    operations: list[Operation] = []
    macs_not_intercepted: Counter[str] = Counter()
    forward_counter = extensions.load_optional("not_intercepted")
    reached = set[int]()  # operations whose gradient arrives

    def report(operation: Operation) -> Any:
        operations.append(operation)
        return partial(reached.add, len(operations) - 1)

    # a forward or hook that is a closure runs the model and not its copy, so both are counted and the model restored
    with (
        preserve_state(model, inputs),
        report_operations(model, report),
        report_operations(shadow, report),
    ):
        shadow_inputs = copy_inputs(inputs, on_meta, {})
        if forward_counter is None:
            outputs = list(tensors_in(run_forward(shadow, shadow_inputs)))
        else:
            with forward_counter.count_forward(shadow, macs_not_intercepted):
                outputs = list(tensors_in(run_forward(shadow, shadow_inputs)))
        num_forward = len(operations)
        # if the backward pass fails, every operation is assumed to have one
        with suppress(Exception):
            losses = [y.real.float().sum() for y in outputs if y.requires_grad]
            torch.autograd.backward(losses)
            for i, operation in enumerate(operations if outputs else ()):
                operations[i] = operation._replace(
                    error=operation.error and i in reached,
                    weight=operation.weight and i in reached,
                    is_recomputed=i >= num_forward,
                )
    return CountedStep(operations, macs_not_intercepted)


# --- prices ---

# layer -> formats -> number of steps; the key None stands for all other layers
FormatsByLayer = dict[str | None, Counter[Formats]]


def price(
    operations: Sequence[Operation],
    formats: Mapping[str, FormatsByLayer],
    convention: str,
) -> BitOpsPlan:
    """Return the plan of a run: the operations of one step, priced at the formats of all steps."""
    tallies = {name: Tally() for name in CONVENTIONS}
    macs: Counter[str] = Counter()
    unpriced: Counter[str] = Counter()
    for operation in operations:
        for name, by_layer in formats.items():
            steps_by_format = by_layer.get(operation.owner, by_layer[None])
            if operation.once:
                # computed once per pair of operand formats
                distinct = {(f.activation, f.weight): f for f in steps_by_format}
                steps_by_format = Counter(distinct.values())
            passes = priced_passes(operation, name)
            for layer_formats, num_steps in steps_by_format.items():
                tallies[name].add(operation, passes, layer_formats, num_steps)
        counts = macs if priced_passes(operation, convention) else unpriced
        counts[row_name(operation)] += operation.macs
    tally = tallies[convention]
    squared_bits = tally.squared_bits()
    totals = {name: tallies[name].total() for name in tallies}
    return BitOpsPlan(
        convention=convention,
        steps=formats[convention][None].total(),
        macs=dict(macs),
        bitops={layer: dict(passes) for layer, passes in squared_bits.items()},
        float32=tallies["per_op"].forward.float32_shares(),
        by_convention=totals,
        at_32_bits=float(tally.macs.total()),
        unpriced=dict(unpriced),
        tally=tally,
    )


def formats_per_layer(
    model: nn.Module,
    operations: Sequence[Operation],
    schedule: Schedules | None,
    q_grad: int | None,
) -> dict[str, FormatsByLayer]:
    """Return convention -> layer -> formats of its operands -> number of steps."""
    if schedule is None:
        return {name: {None: Counter([IN_FLOAT32])} for name in CONVENTIONS}
    is_converted = any(precision_of(m) is not None for m in model.modules())
    precisions = all_precisions(model) if is_converted else {}
    owners = dict.fromkeys(
        operation.owner for operation in operations if operation.owner is not None
    )
    # a module without weights needs bits where it runs a matmul
    layers_to_match = {
        name: None if name in owners else layer for name, layer in precisions.items()
    }
    layers_by_schedule: dict[tuple[int, AffineGrids], tuple[Schedule, list[str]]] = {}
    for s, layers in assign_schedules(
        schedule, layers_to_match or owners or {"": None}
    ).values():
        for name in layers:
            grids = precisions[name].grids if name in precisions else AFFINE_GRIDS
            layers_by_schedule.setdefault((id(s), grids), (s, []))[1].append(name)

    formats: FormatsByLayer = {}
    executed_formats: FormatsByLayer = {}
    formats_by_step: list[list[Formats]] = []
    for (_, grids), (s, names) in layers_by_schedule.items():
        schedule_formats = _formats_by_step(s, q_grad, grids.priced)
        steps_by_format = Counter(schedule_formats)
        formats |= {name: steps_by_format for name in names}
        formats_by_step.append(schedule_formats)
        executed = Counter(_formats_by_step(s, q_grad, grids.executed))
        executed_formats |= {name: executed for name in names}
    # operations outside of quantised layers have no formats: "paper" prices them at the widest of each step
    cached_widest = cache(widest)
    widest_by_step = [
        cached_widest(step_formats)
        for step_formats in zip(*formats_by_step, strict=True)
    ]
    in_float32 = Counter({IN_FLOAT32: len(widest_by_step)})
    per_op = executed_formats if is_converted else {}
    return {
        "paper": {**formats, None: Counter(widest_by_step)},
        "per_op": {**per_op, None: in_float32},
    }


def _formats_by_step(
    schedule: Schedule,
    q_grad: int | None,
    formats_of_levels: Callable[[RoleLevels], Formats],
) -> list[Formats]:
    """Return the formats of every step of a schedule."""
    levels_by_role = [levels.tolist() for levels in schedule.levels(q_grad)]
    cached_formats = cache(formats_of_levels)
    return [
        cached_formats(RoleLevels(*levels))
        for levels in zip(*levels_by_role, strict=True)
    ]
