"""Check of a converted model before training: the operations that run quantised, and broken invariances.

``summary`` lists what was converted; it does not see what a program does with a weight. ``check`` runs one step, and
compares the operations that were intercepted with those that torch executed, in both passes, see ``not_intercepted``.
Then it tests whether outputs that do not change in float32 do not change at low precision either, see ``invariances``.

>>> from cpt_core.quantization.convert import QuantConfig, quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> result = check(model, (torch.ones(5, 4),))
>>> result.ok, f"{result.quantized_share:.0%}", [executed.layer for executed in result.float32]
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
from cpt_core.bitops.conventions import MATMULS
from cpt_core.bitops.counting import copy_inputs, report_operations, tensors_in
from cpt_core.bitops.shadow import preserve_state
from cpt_core.bitops.tally import ForwardMacs
from cpt_core.quantization.convert import all_precisions, layer_precisions
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.scheduler import precision
from cpt_core.text_repr import show_text
from cpt_core.validation import (
    ForwardInputs,
    check_inputs,
    check_types,
    run_forward,
)
from cpt_extras.diagnostics.invariances import (
    BROKEN,
    NOT_APPLICABLE,
    Invariance,
    find_invariances,
)
from cpt_extras.diagnostics.not_intercepted import NotInterceptedCounter
from cpt_extras.diagnostics.repeated_runs import simulated

CHECK_BITS = 8  # arbitrary: the operations do not depend on the bits
NOT_INTERCEPTED = FallbackReason.NOT_INTERCEPTED.describe()


@dataclass(frozen=True)
class Executed:
    """The operations of one kind that a layer executed in one step.

    Attributes:
        layer: name of the layer; of the innermost running module where nothing intercepted the operations.
        operation: name such as "linear" or "conv2d"; torch's own name where nothing intercepted the operations.
        backward: whether they compute an input or weight gradient.
        quantized: whether both operands were rounded.
        intercepted: whether the mode of the model intercepted them; others can be neither quantised nor priced.
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
    """Result of ``check``: the operations of one step, and the invariances; ``print`` it.

    Attributes:
        operations: all matmuls and convolutions, forward and backward, in the order in which they first ran.
        bypassed: names of quantised layers without an intercepted operation, although their weights got a gradient in
            a step with operations that nothing intercepted, or that a module around them ran in float32.
        unused: names of quantised layers that took no part in the step.
        no_gradient: whether parameters need gradients, but no backward pass ran.
        invariances: results of the tests of invariances; empty when not requested.
        filled: names of layers whose running ranges were empty, and were filled from the inputs for these tests.
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
        """Whether both passes ran, all of their operations were intercepted, and no invariance is broken."""
        all_intercepted = all(e.intercepted for e in self.operations)
        return not self.no_gradient and all_intercepted and not self.broken

    @property
    def broken(self) -> list[Invariance]:
        """The invariances that hold in float32, but not in the quantised model."""
        return [result for result in self.invariances if result.status == BROKEN]

    @property
    def float32(self) -> list[Executed]:
        """The operations of the forward pass that ran unquantised, the largest first."""
        unquantized = [e for e in self.operations if not e.backward and not e.quantized]
        return sorted(unquantized, key=lambda e: -e.macs)

    @property
    def forward(self) -> ForwardMacs:
        """The MACs of the forward pass, from which shares are computed."""
        forward = ForwardMacs()
        for e in self.operations:
            if not e.backward:
                forward.add(e.layer, e.macs, e.quantized)
        return forward

    @property
    def quantized_share(self) -> float:
        """Share of the MACs of the forward pass that ran quantised."""
        return self.forward.quantized_share

    def details(self) -> str:
        """Return a table of all operations."""
        rows = [("layer", "operation", "pass", "MACs", "precision")]
        for e in self.operations:
            precision_text = "quantised" if e.quantized else "float32"
            if not e.intercepted:
                precision_text += f" ({NOT_INTERCEPTED})"
            rows.append(
                (
                    e.layer or "(model)",
                    e.operation,
                    "backward" if e.backward else "forward",
                    f"{e.macs:,}",
                    precision_text,
                )
            )
        return _table(rows, numbers=(3,))

    def _layers(self) -> str:
        """Return a table of the layers."""
        rows = [("layer", "operations", "forward MACs", "backward MACs", "precision")]
        for layer in dict.fromkeys(e.layer for e in self.operations):
            executed = [e for e in self.operations if e.layer == layer]
            names = ", ".join(dict.fromkeys(e.operation for e in executed))
            forward_macs = sum(e.macs for e in executed if not e.backward)
            backward_macs = sum(e.macs for e in executed if e.backward)
            rows.append(
                (
                    layer or "(model)",
                    names,
                    f"{forward_macs:,}",
                    f"{backward_macs:,}",
                    _precision_text(executed),
                )
            )
        return _table(rows, numbers=(2, 3))

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        lines = [self.details() if self.has_details else self._layers()]
        macs = self.forward.total
        lines.append(
            f"quantised: {self.quantized_share:.1%} of the {macs:,} MACs of a forward pass"
        )
        for problem, names in (
            (FallbackReason.BYPASSED.describe(), self.bypassed),
            ("took no part in the step", self.unused),
        ):
            if names:
                shown_names = ", ".join(name or "(model)" for name in names)
                lines.append(f"{problem}: {shown_names}")
        if self.no_gradient:
            lines.append(
                "no parameter got a gradient: no backward pass was seen from the tensors that forward returns"
            )
        if self.invariances:
            lines += ["", *self._invariance_lines()]
        return "\n".join(lines)

    def _invariance_lines(self) -> list[str]:
        """Return the invariances in words; those that are not applicable in one line."""
        rows = [("invariance", "")]
        not_applicable = []
        for result in self.invariances:
            if result.status == NOT_APPLICABLE:
                not_applicable.append(result.name)
            else:
                rows.append((result.name, str(result)))

        lines = _table(rows).splitlines()
        if not_applicable:
            lines.append(f"not applicable: {'; '.join(not_applicable)}")
        if self.filled and len(rows) > 1:
            n = len(self.filled)
            layers = f"{n} layers" if n > 1 else f"{n} layer"
            lines += [
                f"{layers} had no running ranges yet: they were filled from these inputs, to ask. Until training or a",
                "checkpoint fills them, evaluation rounds on the batch at hand, and samples move each other",
            ]
        return lines


def _table(rows: Sequence[tuple[str, ...]], numbers: Collection[int] = ()) -> str:
    """Return rows as aligned columns; the columns in ``numbers`` are aligned to the right."""
    aligned_columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(len(cell) for cell in column)
        if i in numbers:
            aligned_columns.append([cell.rjust(width) for cell in column])
        else:
            aligned_columns.append([cell.ljust(width) for cell in column])
    lines = ["  ".join(row).rstrip() for row in zip(*aligned_columns, strict=True)]
    return "\n".join(lines)


def _precision_text(executed: Sequence[Executed]) -> str:
    """Return the precision of a layer's forward operations in words, and the operations that nothing intercepted."""
    forward = [e for e in executed if not e.backward] or executed
    quantized_macs = sum(e.macs for e in forward if e.quantized)
    share = quantized_macs / max(1, sum(e.macs for e in forward))
    if share == 1:
        text = "quantised"
    elif share == 0:
        text = "float32"
    else:
        text = f"{share:.0%} quantised"

    missed = dict.fromkeys(e.operation for e in executed if not e.intercepted)
    return f"{text} ({NOT_INTERCEPTED}: {', '.join(missed)})" if missed else text


def check(
    model: nn.Module,
    inputs: ForwardInputs,
    *,
    invariances: bool = True,
    details: bool = False,
) -> Check:
    """Run a converted model; return the operations that ran quantised, and the invariances that low precision breaks.

    It runs a forward pass at 8 bits in the current mode of the model, and the backward pass of the sum of its outputs,
    both eager. Parameters, gradients, statistics, ranges, bits and random numbers are restored afterwards, and the
    autograd graph of the inputs does not change. Other number formats and 8-bit integers are checked as the paper's
    simulation, which has the same operations; ``summary`` says which matmuls run on integers.

    Then the model is evaluated at 4 bits, or the next level of its formats, some 10 to 40 times: see ``invariances``.
    Where no level of its formats fits all layers, it is evaluated on the paper's grids, and the results note so.

    Args:
        model: converted by ``quantize_``; on the device of the inputs.
        inputs: the arguments of its forward in a tuple, or keyword arguments in a mapping, such as the batch of a
            tokenizer; real data of any batch size. Invariances need two samples or more; a few short ones take less
            time.
        invariances: whether to test invariances.
        details: whether the printout has a line for every operation instead of one for every layer.

    Raises:
        ValueError: when nothing in the model is quantised, or it is sharded.
        RuntimeError: of torch, for a checkpoint without ``use_reentrant=False``.
    """
    check_types(check, {"invariances": invariances, "details": details})
    layer_precisions(model)
    inputs = _detach(check_inputs(inputs))
    extensions.services("processes").check_unsharded(model, "check it")
    macs: Counter[tuple[str, str, bool, bool, bool]] = Counter()

    def report(operation: Operation) -> Callable[[], None] | None:
        layer, function = operation.layer, operation.function
        is_counted_here = operation.part in ("", MATMULS)
        if not is_counted_here or not operation.macs:  # an expert may have no token
            return None
        is_quantized = operation.precision is not None
        macs[layer, function, False, is_quantized, True] += operation.macs

        def on_gradient() -> None:
            gradients = operation.error + operation.weight
            if gradients:
                backward_macs = gradients * operation.macs
                macs[layer, function, True, is_quantized, True] += backward_macs

        return on_gradient

    not_intercepted = NotInterceptedCounter(model, macs)
    with (
        preserve_state(model, inputs),
        simulated(all_precisions(model)),
        precision(model, CHECK_BITS, CHECK_BITS),
    ):
        with (
            warnings.catch_warnings(),
            report_operations(model, report),
            not_intercepted,
        ):
            warnings.simplefilter("ignore")
            trained = _run_step(model, inputs)

    operations = tuple(Executed(*key, n) for key, n in macs.items())
    bypassed, unused = _silent_layers(model, operations, trained)
    needs_gradient = any(p.requires_grad for p in model.parameters())
    has_backward = bool(trained) or any(e.backward for e in operations)
    results: tuple[Invariance, ...] = ()
    filled: tuple[str, ...] = ()
    if invariances:
        results, filled = _test_invariances(model, inputs)
    return Check(
        operations,
        bypassed,
        unused,
        needs_gradient and not has_backward,
        results,
        filled,
        details,
    )


def _silent_layers(
    model: nn.Module, operations: Sequence[Executed], trained: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the quantised layers without an intercepted operation: the bypassed ones, and the unused ones.

    Args:
        model: the converted model.
        operations: of a step.
        trained: names of the parameters that got a gradient.
    """
    used = {e.layer for e in operations if e.intercepted}
    in_float32 = {e.layer for e in operations if not e.quantized}
    all_intercepted = all(e.intercepted for e in operations)
    with_gradient = {parameter.rpartition(".")[0] for parameter in trained}

    bypassed, unused = [], []
    for name in layer_precisions(model):
        if name in used:
            continue
        if name not in with_gradient:
            unused.append(name)
        elif not all_intercepted or _is_below(name, in_float32):
            bypassed.append(name)
    return tuple(bypassed), tuple(unused)


def _test_invariances(
    model: nn.Module, inputs: ForwardInputs
) -> tuple[tuple[Invariance, ...], tuple[str, ...]]:
    """Return the results of ``find_invariances``, and restore the model."""
    with preserve_state(model, inputs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results, filled = find_invariances(model, inputs)
    return tuple(results), tuple(filled)


def _detach(inputs: ForwardInputs) -> ForwardInputs:
    """Return copies of inputs without their autograd graphs; parameters stay parameters."""
    parameters: dict[int, Any] = {
        id(x): x for x in tensors_in(inputs) if isinstance(x, nn.Parameter)
    }
    copies: ForwardInputs = copy_inputs(inputs, False, parameters)
    return copies


def _is_below(name: str, layers: Collection[str]) -> bool:
    """Return whether a layer is inside one of ``layers``."""
    for layer in layers:
        prefix = f"{layer}." if layer else ""
        if layer != name and f"{name}.".startswith(prefix):
            return True
    return False


def _run_step(model: nn.Module, inputs: ForwardInputs) -> set[str]:
    """Run forward and backward; return the names of the parameters that got a gradient."""
    sums = [
        y.real.float().sum()
        for y in tensors_in(run_forward(model, inputs))
        if y.requires_grad
    ]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sources = [
        *parameters.values(),
        *(x for x in tensors_in(inputs) if x.requires_grad),
    ]
    if not sums or not sources:
        return set()
    # in a training the autocast block is around the forward pass alone
    with torch.autocast(sums[0].device.type, enabled=False):
        gradients = torch.autograd.grad(sums, sources, allow_unused=True)
    return {
        name
        for name, gradient in zip(parameters, gradients, strict=False)
        if gradient is not None
    }
