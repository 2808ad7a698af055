"""Invariances of evaluation: if float32 outputs do not change, quantised outputs must not.

A model trains for three passes at 8 bits, so that its running ranges are there. In evaluation it answers a question
twice: a batch and one of its samples, a sequence and its prefix, with padding and without. ``Case.questions`` returns
pairs of tensors that are equal in exact arithmetic. Float32 decides whether a question applies.

Float32 adds up in another order when a shape changes, and a difference in the last digit can flip a rounding. Pairs
that differ are therefore asked for again in float64: what holds there is a property of the ranges and grids, and the
outcome is "holds in float64".
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import cpt_core as cpt
from bench.third_party.results import OUTCOMES
from cpt_core.bitops.counting import tensors_in

BITS = (4, 8)
TRAINED_AT = 8
TRAINING_PASSES = 3
TOLERANCE = 1e-6  # relative to the largest number of the output
FLOAT64_TOLERANCE = 1e-9

Pairs = Iterable[tuple[Tensor, Tensor]]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A model with the invariances to check.

    Attributes:
        family: such as "decoder"; counts are given per family.
        name: of the model.
        make: returns the model, in float32.
        train: runs one training pass and returns the outputs.
        questions: name -> what runs the model twice and returns pairs of tensors.
    """

    family: str
    name: str
    make: Callable[[], nn.Module]
    train: Callable[[Run], Any]
    questions: Mapping[str, Callable[[Run], Pairs]]


@dataclass(frozen=True)
class Answer:
    """The outcome of one question.

    Attributes:
        family: of the case.
        model: name of the model.
        question: name of the question.
        outcome: one of ``OUTCOMES``.
        moved: largest relative difference by precision: "float32", 4, 8, and "float64" where it was asked for.
        error: of a question that crashed.
    """

    family: str
    model: str
    question: str
    outcome: str
    moved: Mapping[str, float]
    error: str = ""


def answers(case: Case) -> list[Answer]:
    """Train and convert a model, and answer its questions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = trained(case)
        except Exception as problem:
            crash = Answer(
                case.family, case.name, "all", "crashed", {}, describe(problem)
            )
            return [crash]
        return [answer(case, question, model) for question in case.questions]


def trained(case: Case) -> nn.Module:
    """Return a converted model after some training passes, in evaluation mode."""
    torch.manual_seed(0)
    model = case.make()
    cpt.quantize_(model)
    model.train()
    with cpt.precision(model, TRAINED_AT, TRAINED_AT):
        for _ in range(TRAINING_PASSES):
            outputs = [y for y in tensors_in(case.train(model)) if y.requires_grad]
            torch.stack([y.float().mean() for y in outputs]).sum().backward()
    return model.eval()


def answer(case: Case, question: str, model: nn.Module) -> Answer:
    """Ask one question at every precision."""
    ask = case.questions[question]
    moved: dict[str, float] = {}
    try:
        moved["float32"] = largest_difference(ask, model, "float")
        if not moved["float32"] <= TOLERANCE:  # NaN: there was nothing to compare
            return Answer(case.family, case.name, question, "does not apply", moved)
        for bits in BITS:
            moved[str(bits)] = largest_difference(ask, model, bits)
        if max(moved.values()) <= TOLERANCE:
            return Answer(case.family, case.name, question, "holds", moved)
        twin = float64_copy(model)
        moved["float64"] = max(largest_difference(ask, twin, bits) for bits in BITS)
    except Exception as problem:
        return Answer(
            case.family, case.name, question, "crashed", moved, describe(problem)
        )
    outcome = "holds in float64" if moved["float64"] <= FLOAT64_TOLERANCE else "broken"
    return Answer(case.family, case.name, question, outcome, moved)


def float64_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(
        twin, "set_experts_implementation"
    ):  # torch multiplies experts at once in float32 alone
        twin.set_experts_implementation("eager")
    return twin


def describe(problem: Exception) -> str:
    """Return an error in one short line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]


def largest_difference(
    ask: Callable[[Run], Pairs], model: nn.Module, bits: int | str
) -> float:
    """Return the largest relative difference of the pairs at a precision."""
    parameter = next(model.parameters())
    is_double = parameter.dtype == torch.float64

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(args, parameter.dtype), cast(kwargs, parameter.dtype)
        with in_float64() if is_double else nullcontext():
            return model(*args, **kwargs)

    torch.manual_seed(1)
    with cpt.precision(model, bits), torch.no_grad():
        return max(
            (relative_difference(first, second) for first, second in ask(run)),
            default=float("nan"),
        )


def relative_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference relative to the largest number; infinity if shapes or NaN differ.

    Raises:
        ArithmeticError: if no number is finite, so that nothing is compared.
    """
    if not bool(first.isfinite().any() or second.isfinite().any()):
        raise ArithmeticError("the outputs are not finite")
    if first.shape != second.shape:
        return float("inf")
    if not bool((first.isnan() == second.isnan()).all()):
        return float("inf")

    first = first.double().nan_to_num()
    second = second.double().nan_to_num()
    largest = max(float(first.abs().max()), float(second.abs().max()), 1e-30)
    return float((first - second).abs().max()) / largest


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return arguments with floating-point tensors converted to a type."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: cast(value, dtype) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(cast(value, dtype) for value in values)
    return values


class _InFloat64(TorchFunctionMode):
    """Mode that computes in float64 what a model requests in float32, such as its softmax."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {
            key: torch.float64 if x is torch.float32 else x
            for key, x in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in float64 inside the block, even where a model asks for float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def count(answers: Iterable[Answer]) -> dict[str, dict[str, int]]:
    """Return the number of models by "family: question" and outcome."""
    counts_by_question: dict[str, Counter[str]] = {}
    for item in answers:
        counts_by_question.setdefault(f"{item.family}: {item.question}", Counter())[
            item.outcome
        ] += 1
    return {
        row: {outcome: n for outcome in OUTCOMES if (n := counts[outcome])}
        for row, counts in counts_by_question.items()
    }
