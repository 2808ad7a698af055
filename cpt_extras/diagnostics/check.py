"""Look before training: which operations of a step run quantised, and what low precision breaks.

``summary`` lists what was converted; it does not see what a program does with a weight. ``check`` runs one step, and
compares the operations that were intercepted with those that torch executed, in both passes, see ``not_intercepted``.
Then it asks whether outputs that float32 keeps stay at low precision, too, see ``invariances``.

>>> from cpt_core.quantization.convert import QuantConfig, quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> found = check(model, (torch.ones(5, 4),))
>>> found.ok, f"{found.quantized_share:.0%}", [executed.layer for executed in found.float32]
(True, '67%', ['1'])
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpt_core import extensions
from cpt_core.bitops.conventions import PRODUCTS
from cpt_core.bitops.counting import copy_inputs, report_operations, tensors_in
from cpt_core.bitops.shadow import preserve_state
from cpt_core.bitops.tally import ForwardMacs
from cpt_core.quantization.convert import all_precisions, layer_precisions
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.scheduler import precision
from cpt_core.validation import check_inputs, check_types
from cpt_extras.diagnostics.invariances import (
    BROKEN,
    NOT_APPLICABLE,
    Invariance,
    find_invariances,
)
from cpt_extras.diagnostics.not_intercepted import NotIntercepted
from cpt_extras.diagnostics.repeated_runs import simulated

BITS = 8  # any number would do
NOT_INTERCEPTED = FallbackReason.NOT_INTERCEPTED.describe()


@dataclass(frozen=True)
class Executed:
    """The operations of one kind that a layer executed in one step.

    Attributes:
        layer: the layer that they belong to; the innermost running module where nothing intercepted them.
        operation: its name, such as "linear" or "conv2d"; torch's own where nothing intercepted it.
        backward: an input or weight gradient.
        quantized: both operands were rounded.
        intercepted: whether the mode of the model saw it; else it cannot be quantised, nor is it priced.
        macs: multiply-accumulates of a step.
    """

    layer: str
    operation: str
    backward: bool
    quantized: bool
    intercepted: bool
    macs: int


@dataclass(frozen=True)
class Check:
    """What ran in one step, and which invariances hold; ``print`` it.

    Attributes:
        operations: all matmuls and convolutions, forward and backward, in the order in which they first ran.
        bypassed: quantised layers none of whose operations was intercepted, although their weights got a gradient in a
            step with operations that nothing intercepted, or that a module around them ran in float32.
        unused: quantised layers that took no part in the step.
        no_gradient: parameters need gradients, and no backward pass was seen.
        invariances: the answers of ``invariances``; empty where nobody asked.
        filled: layers whose running ranges were empty, and were filled from the inputs to ask for invariances.
        has_details: whether ``print`` shows every operation, as ``details()`` does.
    """

    operations: tuple[Executed, ...]
    bypassed: tuple[str, ...]
    unused: tuple[str, ...]
    no_gradient: bool = False
    invariances: tuple[Invariance, ...] = ()
    filled: tuple[str, ...] = ()
    has_details: bool = False

    @property
    def ok(self) -> bool:
        """Whether both passes were seen, all of their operations intercepted, and no invariance is broken."""
        return (
            not self.no_gradient
            and all(e.intercepted for e in self.operations)
            and not self.broken
        )

    @property
    def broken(self) -> list[Invariance]:
        """The invariances that float32 has and the quantised model has not."""
        return [answer for answer in self.invariances if answer.status == BROKEN]

    @property
    def float32(self) -> list[Executed]:
        """The operations of the forward pass that ran unquantised, the largest first."""
        plain = [e for e in self.operations if not e.backward and not e.quantized]
        return sorted(plain, key=lambda e: -e.macs)

    @property
    def forward(self) -> ForwardMacs:
        """The MACs of the forward pass, of which shares are."""
        forward = ForwardMacs()
        for e in self.operations:
            if not e.backward:
                forward.add(e.layer, e.macs, e.quantized)
        return forward

    @property
    def quantized_share(self) -> float:
        """MACs of the matmuls and convolutions of the forward pass that ran quantised, of all."""
        return self.forward.quantized_share

    def details(self) -> str:
        """Return a table of all operations."""
        rows = [("layer", "operation", "pass", "MACs", "precision")]
        for e in self.operations:
            note = "" if e.intercepted else f" ({NOT_INTERCEPTED})"
            kind = "quantised" if e.quantized else "float32"
            pass_ = "backward" if e.backward else "forward"
            rows.append(
                (e.layer or "(model)", e.operation, pass_, f"{e.macs:,}", kind + note)
            )
        return _table(rows, numbers=(3,))

    def _layers(self) -> str:
        """Return a table of the layers."""
        rows = [("layer", "operations", "forward MACs", "backward MACs", "precision")]
        for layer in dict.fromkeys(e.layer for e in self.operations):
            executed = [e for e in self.operations if e.layer == layer]
            names = ", ".join(dict.fromkeys(e.operation for e in executed))
            macs = [
                sum(e.macs for e in executed if e.backward == backward)
                for backward in (False, True)
            ]
            rows.append(
                (
                    layer or "(model)",
                    names,
                    f"{macs[0]:,}",
                    f"{macs[1]:,}",
                    _precision_of(executed),
                )
            )
        return _table(rows, numbers=(2, 3))

    def __str__(self) -> str:
        lines = [self.details() if self.has_details else self._layers()]
        macs = self.forward.total
        lines.append(
            f"quantised: {self.quantized_share:.1%} of the {macs:,} MACs of a forward pass"
        )
        for what, names in (
            (FallbackReason.BYPASSED.describe(), self.bypassed),
            ("took no part in the step", self.unused),
        ):
            if names:
                lines.append(
                    f"{what}: {', '.join(name or '(model)' for name in names)}"
                )
        if self.no_gradient:
            lines.append(
                "no parameter got a gradient: no backward pass was seen from the tensors that forward returns"
            )
        if self.invariances:
            lines += ["", *self._answers()]
        return "\n".join(lines)

    def _answers(self) -> list[str]:
        """Return the invariances in words; those that are not applicable in one line."""
        asked = [
            answer for answer in self.invariances if answer.status != NOT_APPLICABLE
        ]
        rows = [("invariance", "")]
        lines = _table(
            rows + [(answer.name, str(answer)) for answer in asked]
        ).splitlines()
        others = [
            answer.name
            for answer in self.invariances
            if answer.status == NOT_APPLICABLE
        ]
        if others:
            lines.append(f"not applicable: {'; '.join(others)}")
        if self.filled and asked:
            layers = f"{len(self.filled)} layer{'s' * (len(self.filled) > 1)}"
            lines += [
                f"{layers} had no running ranges yet: they were filled from these inputs, to ask. Until training or a",
                "checkpoint fills them, evaluation rounds on the batch at hand, and samples move each other",
            ]
        return lines


def _table(rows: Sequence[tuple[str, ...]], numbers: Collection[int] = ()) -> str:
    """Write rows in columns, ``numbers`` of which are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in numbers else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _precision_of(executed: Sequence[Executed]) -> str:
    """Return in words what ran quantised of the forward operations of a layer, and what nothing intercepted."""
    forward = [e for e in executed if not e.backward] or executed
    share = sum(e.macs for e in forward if e.quantized) / max(
        1, sum(e.macs for e in forward)
    )
    missed = dict.fromkeys(e.operation for e in executed if not e.intercepted)
    words = {1.0: "quantised", 0.0: "float32"}.get(share, f"{share:.0%} quantised")
    return f"{words} ({NOT_INTERCEPTED}: {', '.join(missed)})" if missed else words


def check(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    invariances: bool = True,
    details: bool = False,
) -> Check:
    """Run a converted model and tell what of it is quantised, and whether low precision breaks an invariance.

    A forward pass at 8 bits in the mode the model is in, and the backward pass of the sum of its outputs, both eager.
    Parameters, gradients, statistics, ranges, bits and random numbers are afterwards what they were, and so is the
    graph that inputs may hang on. Other number formats and 8-bit integers are checked as the paper's simulation, which
    has the same operations; ``summary`` says which matmuls run on integers.

    Then the model is evaluated at 4 bits, or the next that its formats have, some 10 to 40 times: see ``invariances``.

    Args:
        model: converted by ``quantize_``; on the device of the inputs.
        inputs: the arguments of its forward; real data of any batch size. Invariances want two samples or more; a few
            short ones take less time.
        invariances: whether to ask for invariances.
        details: whether the printout has a line for every operation instead of one for every layer.

    Raises:
        ValueError: when nothing in the model is quantised, or it is sharded.
        RuntimeError: of torch, for a checkpoint without ``use_reentrant=False``.
    """
    check_inputs(inputs)
    check_types(check, {"invariances": invariances, "details": details})
    layer_precisions(model)
    inputs = _copy(inputs)
    extensions.services("processes").check_unsharded(model, "check it")
    macs: Counter[tuple[str, str, bool, bool, bool]] = Counter()

    def report(operation: Operation) -> Callable[[], None] | None:
        layer, function = operation.layer, operation.function
        if (
            operation.part not in ("", PRODUCTS) or not operation.macs
        ):  # an expert may have no token
            return None
        is_quantized = operation.precision is not None
        macs[layer, function, False, is_quantized, True] += operation.macs

        def on_gradient() -> None:
            if gradients := operation.error + operation.weight:
                macs[layer, function, True, is_quantized, True] += (
                    gradients * operation.macs
                )

        return on_gradient

    not_intercepted = NotIntercepted(model, macs)
    with (
        preserve_state(model, inputs),
        simulated(all_precisions(model)),
        precision(model, BITS, BITS),
    ):
        with (
            warnings.catch_warnings(),
            report_operations(model, report),
            not_intercepted,
        ):
            warnings.simplefilter("ignore")
            trained = _run_step(model, inputs)
    operations = tuple(Executed(*key, n) for key, n in macs.items())
    used = {e.layer for e in operations if e.intercepted}
    silent = [name for name in layer_precisions(model) if name not in used]
    with_gradient = {parameter.rpartition(".")[0] for parameter in trained}
    is_complete = all(e.intercepted for e in operations)
    in_float32 = {e.layer for e in operations if not e.quantized}
    bypassed = tuple(
        name
        for name in silent
        if name in with_gradient and (not is_complete or _is_below(name, in_float32))
    )
    unused = tuple(name for name in silent if name not in with_gradient)
    needs_gradient = any(p.requires_grad for p in model.parameters())
    no_gradient = (
        needs_gradient and not trained and not any(e.backward for e in operations)
    )
    answers, filled = _ask(model, inputs) if invariances else ((), ())
    return Check(operations, bypassed, unused, no_gradient, answers, filled, details)


def _ask(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[tuple[Invariance, ...], tuple[str, ...]]:
    """Return the answers of ``find_invariances``; the model is afterwards what it was."""
    with preserve_state(model, inputs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answers, filled = find_invariances(model, inputs)
    return tuple(answers), tuple(filled)


def _copy(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs without the graphs that they hang on; parameters stay parameters."""
    parameters: dict[int, Any] = {
        id(x): x for x in tensors_in(inputs) if isinstance(x, nn.Parameter)
    }
    copied: tuple[Any, ...] = copy_inputs(inputs, False, parameters)
    return copied


def _is_below(name: str, layers: Collection[str]) -> bool:
    """Return whether a layer is inside of one of others."""
    return any(
        layer != name and f"{name}.".startswith(layer and f"{layer}.")
        for layer in layers
    )


def _run_step(model: nn.Module, inputs: tuple[Any, ...]) -> set[str]:
    """Run forward and backward; return the names of the parameters that got a gradient."""
    sums = [y.real.float().sum() for y in tensors_in(model(*inputs)) if y.requires_grad]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sources = [
        *parameters.values(),
        *(x for x in tensors_in(inputs) if x.requires_grad),
    ]
    if not sums or not sources:
        return set()
    with torch.autocast(
        sums[0].device.type, enabled=False
    ):  # as in training: the block is around the forward pass
        gradients = torch.autograd.grad(sums, sources, allow_unused=True)
    return {
        name
        for name, gradient in zip(parameters, gradients, strict=False)
        if gradient is not None
    }
