"""Examination of one layer or function: float mode, matmuls, copies and ``restore_``.

The subject runs beside a linear layer, so that every model has something to quantise. ``Row.faults`` names what is
wrong; a row without faults keeps all promises:

- in float mode outputs and gradients are those of plain torch, bit for bit;
- what computes no matmul is unchanged at 3 bits;
- what computes one is quantised, or ``check`` names it as float32;
- keys of the state dict and parameters stay, copies and pickles compute the same, ``restore_`` gives the original back.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

import cpt_core as cpt
from bench.zoo import FUSED, NEAREST, OPERANDS, Watcher
from cpt_core.bitops.counting import tensors_in

LOW_BITS = 3
NOISE = 1e-5  # of sums in another order, relative to the largest number
WATCHED_BITS = 2
# besides those of torch's own counter
MORE_MATMULS = {
    *OPERANDS,
    *FUSED,
    "_cdist_forward",
    "_euclidean_dist",
    "conv_tbc",
    "_sparse_addmm",
}
MATMULS = (
    "none",
    "quantised",
    "two numbers per range",
    "named float32",
    "claimed, but exact",
)
SKIPPED = ("fails in plain torch", "not deterministic")


@dataclass
class Row:
    """Results of one case.

    Attributes:
        name: of the layer or function.
        case: form and number of the sample.
        skipped: why it could not be examined, one of ``SKIPPED``; "" otherwise.
        matmuls: what happened to its matmuls, one of ``MATMULS``.
        has_backward: whether gradients were compared.
        faults: what is wrong.
    """

    name: str
    case: str
    skipped: str = ""
    matmuls: str = "none"
    has_backward: bool = False
    faults: list[str] = field(default_factory=list)


class Subject(nn.Module):
    """A model of a linear layer and the layer or function under examination."""

    def __init__(self, layer: nn.Module | Callable[..., Any]) -> None:
        super().__init__()
        self.anchor = nn.Linear(3, 3)
        self.layer = layer

    def forward(self, anchor_input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of both; what changes its inputs gets copies."""
        args, kwargs = tree_map(cloned, (args, kwargs))
        return self.anchor(anchor_input), self.layer(*args, **kwargs)


def cloned(x: Any) -> Any:
    """Return a copy of a floating-point tensor that preserves its strides; other values as they are."""
    return x.clone() if isinstance(x, Tensor) and x.is_floating_point() else x


class Products(TorchDispatchMode):
    """Recorder of the matmuls and convolutions that torch executes, with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if func._overloadpacket in flop_registry or name in MORE_MATMULS:
            operands = [x for x in args if isinstance(x, Tensor)]
            if all(x.numel() for x in operands):
                self.calls.append((name, [x.detach().clone() for x in operands]))
        return output


NOTHING = Products()


@dataclass
class Outcome:
    """Outputs and gradients of one run, and the matmuls of both passes."""

    outputs: list[Tensor]
    gradients: list[Tensor | None] | None
    forward_matmuls: list[tuple[str, list[Tensor]]]
    backward_matmuls: list[tuple[str, list[Tensor]]]

    def equals(self, other: Outcome) -> bool:
        """Return whether outputs and gradients are bit-identical."""
        if not all_equal(self.outputs, other.outputs):
            return False
        if self.gradients is None or other.gradients is None:
            return self.gradients is other.gradients
        return all_equal(self.gradients, other.gradients)


def all_equal(first: list[Any], second: list[Any]) -> bool:
    """Return whether two lists hold equal tensors; NaN equals NaN, None equals None."""
    if len(first) != len(second):
        return False
    return all(equal(x, y) for x, y in zip(first, second, strict=True))


def largest_change(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the largest number.

    0 means equal bits.
    """
    changes = [0.0]
    for x, y in zip(first, second, strict=True):
        if not equal(x, y):
            x, y = (
                z.detach().to_dense().to(torch.complex128).nan_to_num() for z in (x, y)
            )
            changes.append(
                float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
                or NOISE / 10
            )
    return max(changes)


def equal(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return bool(
        torch.equal(x, y) or torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
    )


class Runner:
    """Runner of one model with fixed inputs, state and random numbers."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.state = {name: x.clone() for name, x in model.state_dict().items()}
        self.args, self.kwargs = args, kwargs
        self.anchor_input = torch.linspace(-1, 1, 6).reshape(2, 3)

    def inputs(self) -> tuple[Any, Any]:
        """Return new inputs of which gradients can be taken."""
        args, kwargs = tree_map(as_leaf, (self.args, self.kwargs))
        return (self.anchor_input, *args), kwargs

    def run(
        self, model: nn.Module, has_backward: bool = True, watches: bool = False
    ) -> Outcome:
        """Return the outcome of a forward pass and, if there is one, of a backward pass.

        ``watches``: record matmuls; torch then avoids its fused kernels, which changes the last digits.
        """
        model.load_state_dict(self.state)
        args, kwargs = self.inputs()
        torch.manual_seed(1)
        with Products() if watches else nullcontext(NOTHING) as forward:
            outputs = model(*args, **kwargs)
        tensors = list(tensors_in(outputs))
        values = [x.detach().clone() for x in tensors]
        matmuls = forward.calls[1:]  # the anchor's is the first
        if not has_backward:
            return Outcome(values, None, matmuls, [])
        leaves = [
            x
            for x in tree_flatten((args, kwargs))[0]
            if isinstance(x, Tensor) and x.requires_grad
        ]
        sources = [*(p for p in model.parameters() if p.requires_grad), *leaves]
        with Products() if watches else nullcontext(NOTHING) as backward:
            gradients = torch.autograd.grad(
                total(tensors[1:]), sources, allow_unused=True
            )
        return Outcome(values, list(gradients), matmuls, backward.calls)


def as_leaf(x: Any) -> Any:
    """Return a copy of a tensor that requires a gradient if its type allows it."""
    if not isinstance(x, Tensor):
        return x
    copied = x.detach().clone()
    return (
        copied.requires_grad_()
        if copied.is_floating_point() or copied.is_complex()
        else copied
    )


def total(outputs: list[Tensor]) -> Tensor:
    """Return the sum of all outputs that gradients can be taken of."""
    parts = [x for x in outputs if x.requires_grad]
    if not parts:
        raise RuntimeError("no output has a gradient")
    return sum(
        torch.view_as_real(x).sum() if x.is_complex() else x.sum() for x in parts
    )  # type: ignore[return-value]


def examine(row: Row, plain: nn.Module, args: Any, kwargs: Any) -> Row:
    """Examine one model and complete its row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = Runner(plain, args, kwargs)
        try:
            model = copy.deepcopy(
                plain
            )  # not of sparse parameters, before anything is converted
            reference = plain_outcome(runner, plain)
            row.has_backward = reference.gradients is not None
            if not reference.equals(runner.run(plain, row.has_backward)):
                row.skipped = "not deterministic"
                return row
        except Exception:
            row.skipped = "fails in plain torch"
            return row
        try:
            _examine_converted(row, runner, plain, model, reference)
        except Exception as problem:
            row.faults.append(
                f"error: {type(problem).__name__}: {' '.join(str(problem).split())}"[
                    :160
                ]
            )
    return row


def plain_outcome(runner: Runner, plain: nn.Module) -> Outcome:
    """Return the outcome of plain torch, with gradients if there are any."""
    try:
        return runner.run(plain)
    except Exception:
        return runner.run(plain, has_backward=False)


def _examine_converted(
    row: Row, runner: Runner, plain: nn.Module, model: nn.Module, reference: Outcome
) -> None:
    parameters, described = dict(model.named_parameters()), description(model)
    cpt.quantize_(model, NEAREST)
    with cpt.precision(model, "float"):
        note(
            row,
            "float mode differs",
            reference.equals(runner.run(model, row.has_backward)),
        )
    note(
        row,
        "keys of the state dict changed",
        list(model.state_dict()) == list(plain.state_dict()),
    )
    same_parameters = all(parameters[name] is p for name, p in model.named_parameters())
    note(
        row,
        "parameters are other objects",
        same_parameters and len(parameters) == len(dict(model.named_parameters())),
    )
    with cpt.precision(model, LOW_BITS, LOW_BITS):
        twin = copy.deepcopy(model)
        low = runner.run(model, row.has_backward)
        note(
            row,
            "a copy computes something else",
            low.equals(runner.run(twin, row.has_backward)),
        )
    changed = largest_change(reference.outputs[1:], low.outputs[1:])
    _judge_matmuls(
        row, runner, model, runner.run(plain, row.has_backward, watches=True), changed
    )
    model.load_state_dict(runner.state)
    cpt.restore_(model)
    note(row, "restore_ leaves a trace", description(model) == described)
    note(
        row,
        "restored outputs differ",
        reference.equals(runner.run(model, row.has_backward)),
    )


def examine_pickle(row: Row, plain: nn.Module, args: Any, kwargs: Any) -> None:
    """Add a fault if a pickled model computes something else than its original."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner = Runner(plain, args, kwargs)
        model = cpt.quantize_(copy.deepcopy(plain), NEAREST)
        with cpt.precision(model, LOW_BITS, LOW_BITS):
            pickled = pickle.dumps(model)
            expected = runner.run(model, row.has_backward)
            actual = runner.run(pickle.loads(pickled), row.has_backward)
        note(row, "a pickle computes something else", expected.equals(actual))


def note(row: Row, fault: str, holds: bool) -> None:
    """Add a fault to a row unless the promise holds."""
    if not holds:
        row.faults.append(fault)


def description(model: nn.Module) -> list[tuple[str, type, tuple[str, ...], int]]:
    """Return name, class, attributes and number of hooks of all modules."""
    return [
        (
            name,
            type(m),
            tuple(sorted(vars(m))),
            len(m._forward_hooks) + len(m._forward_pre_hooks),
        )
        for name, m in model.named_modules()
    ]


def _judge_matmuls(
    row: Row, runner: Runner, model: nn.Module, plain: Outcome, changed: float
) -> None:
    """Set ``row.matmuls``, and add faults of the subject's matmuls.

    Args:
        row: the row to complete.
        runner: the runner of the model.
        model: the converted model.
        plain: the outcome of plain torch.
        changed: largest relative change of the outputs at 3 bits.
    """
    if not changed and not plain.forward_matmuls and not plain.backward_matmuls:
        return
    checked = operations(runner, model)
    forward = [e for e in checked if not e.backward]
    is_claimed = any(e.quantized for e in forward)
    if not plain.forward_matmuls and not (changed and is_claimed):
        note(row, "changed at 3 bits without a matmul", changed == 0)
        is_listed = any(e.backward for e in checked)
        note(
            row,
            "matmuls of the backward pass are not listed",
            is_listed or not plain.backward_matmuls,
        )
    elif any(not e.quantized for e in forward):
        row.matmuls = "named float32"
        note(row, "named as float32, yet changed", changed <= NOISE or is_claimed)
    elif changed > NOISE:
        row.matmuls = "quantised"
        for matmul in float32_seen(runner, model, plain):
            row.faults.append(
                f"float32 operands of {matmul}, which check calls quantised"
            )
    else:
        _judge_unchanged(row, runner, model)


def _judge_unchanged(row: Row, runner: Runner, model: nn.Module) -> None:
    """Distinguish ranges of two numbers, which any grid holds exactly, from operands that were not rounded."""
    with cpt.precision(model, 1, 1):
        coarse = runner.run(model, has_backward=False, watches=True)
    is_pair = summed_elements(coarse.forward_matmuls) == 2
    row.matmuls = "two numbers per range" if is_pair else "claimed, but exact"
    note(row, "exact, but check calls it quantised", is_pair)


def summed_elements(matmuls: list[tuple[str, list[Tensor]]]) -> int:
    """Return the smallest number of elements over which the matmuls sum."""
    numbers = [
        xs[OPERANDS[name][0]].shape[-1]
        for name, xs in matmuls
        if name in OPERANDS and xs[0].dim()
    ]
    return min(numbers, default=1)


class WithOptions(nn.Module):
    """Wrapper that passes fixed keyword arguments to a model."""

    def __init__(self, model: nn.Module, options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, *args: Any) -> Any:
        """Call the model with the keyword arguments."""
        return self.model(*args, **self.options)


def operations(runner: Runner, model: nn.Module) -> list[Any]:
    """Return the operations of the subject that ``check`` lists."""
    model.load_state_dict(runner.state)
    args, kwargs = runner.inputs()
    torch.manual_seed(1)
    report = (
        cpt.check(WithOptions(model, kwargs), args)
        if kwargs
        else cpt.check(model, args)
    )
    return [e for e in report.operations if not e.layer.endswith("anchor")]


def float32_seen(runner: Runner, model: nn.Module, plain: Outcome) -> set[str]:
    """Return the matmuls with an operand that is certainly not on a 2-bit grid.

    A convolution may have a range per position, over few channels; it counts only if its operands equal those of plain
    torch.
    """
    twin = copy.deepcopy(model)
    twin.load_state_dict(runner.state)
    args, kwargs = runner.inputs()
    watcher = Watcher(twin)
    torch.manual_seed(1)
    with cpt.precision(twin, WATCHED_BITS, WATCHED_BITS), watcher, torch.no_grad():
        twin(*args, **kwargs)
    matmuls = {
        matmul
        for (module, matmul, on_grid) in watcher.macs
        if on_grid is False and module != "anchor"
    }
    if "convolution" in matmuls:
        with cpt.precision(model, WATCHED_BITS, WATCHED_BITS):
            low = runner.run(model, has_backward=False, watches=True)
        plain_operands = [
            x
            for name, operands in plain.forward_matmuls
            for x in operands[:2]
            if name == "convolution"
        ]
        low_operands = [
            x
            for name, operands in low.forward_matmuls
            for x in operands[:2]
            if name == "convolution"
        ]
        if not any(equal(x, y) for x in low_operands for y in plain_operands):
            matmuls.remove("convolution")
    return matmuls


def count(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of cases by result."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts["cases"] += 1
        if row.skipped:
            counts[row.skipped] += 1
            continue
        counts["examined"] += 1
        counts["gradients compared"] += row.has_backward
        counts["without a fault"] += not row.faults
        counts[f"matmuls: {row.matmuls}"] += 1
        counts.update(f"fault: {fault}" for fault in row.faults)
    return dict(counts)
