"""Torch's own databases of layers and functions, ``module_db`` and ``op_db``, as cases for ``examination``.

Torch's own tests use them. They are part of torch, but import ``expecttest``, which torch does not install: it compares
printed texts, and nothing here calls it.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bench.third_party.examination import Row, Subject, examine, examine_pickle

MAX_INPUTS = 8  # of a layer
MAX_SAMPLES = 3  # of a function
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
SEED = 0


@contextmanager
def importing_internals() -> Iterator[None]:
    """Make torch's databases importable without ``expecttest`` and without freezing the backend flags."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    flag = "__allow_nonbracketed_mutation_flag"  # importing them forbids the whole process to set flags
    names = torch.backends.disable_global_flags.__globals__
    before = names[flag]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    names[flag] = before


@cache
def module_database() -> list[Any]:
    """Return torch's list of layers."""
    with importing_internals():
        from torch.testing._internal.common_modules import module_db
    return list(module_db)


@cache
def function_database() -> list[Any]:
    """Return torch's list of functions."""
    with importing_internals():
        from torch.testing._internal.common_methods_invocations import op_db
    return [
        info
        for info in op_db
        if torch.float32 in info.supported_dtypes("cpu")
        and info.name not in UNINITIALISED
    ]


# --- layers -----------------------------------------------------------------------------------------------------------


def module_rows(info: Any) -> Iterator[Row]:
    """Examine one layer of the database, in training and in evaluation."""
    for is_training in (True, False):
        mode = "training" if is_training else "evaluation"
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = info.module_inputs_func(
                info,
                device="cpu",
                dtype=torch.float32,
                requires_grad=False,
                training=is_training,
            )
        for number, module_input in enumerate(inputs[:MAX_INPUTS]):
            if module_input.forward_input is not None:
                yield module_row(
                    Row(info.name, f"{mode}, input {number}"),
                    info,
                    module_input,
                    is_training,
                )


def module_row(row: Row, info: Any, module_input: Any, is_training: bool) -> Row:
    """Examine a layer with one of its inputs."""
    torch.manual_seed(SEED)
    args, kwargs = module_input.forward_input.args, module_input.forward_input.kwargs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = info.module_cls(
                *module_input.constructor_input.args,
                **module_input.constructor_input.kwargs,
            )
            if info.is_lazy:  # it has no parameters before it ran
                layer(*args, **kwargs)
    except Exception:
        row.skipped = "fails in plain torch"
        return row
    subject = Subject(layer).train(is_training)
    examine(row, subject, args, kwargs)
    if not row.skipped and not row.faults:
        examine_pickle(row, subject, args, kwargs)
    return row


# --- functions --------------------------------------------------------------------------------------------------------

FORMS = (
    "function",
    "second operand a weight",
    "first operand a weight",
    "method",
    "in place",
)


class Call(nn.Module):
    """A module that calls a torch function, optionally with one argument as its weight.

    Args:
        function: the function.
        leaves: all arguments, flat; the tensors among them are inputs.
        structure: structure of the arguments for ``tree_unflatten``.
        weight: index of the leaf that is a parameter; None without one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        structure: Any,
        weight: int | None,
    ) -> None:
        super().__init__()
        self.function, self.structure, self.place = function, structure, weight
        self.constants = [None if isinstance(x, Tensor) else x for x in leaves]
        self.tensors = [
            i for i, x in enumerate(leaves) if isinstance(x, Tensor) and i != weight
        ]
        if weight is not None:
            self.weight = nn.Parameter(leaves[weight].detach().clone())

    def forward(self, *tensors: Tensor) -> Any:
        """Call the function with the tensors in their places."""
        leaves = list(self.constants)
        for place, x in zip(self.tensors, tensors, strict=True):
            leaves[place] = x
        if self.place is not None:
            leaves[self.place] = self.weight
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)


def function_rows(info: Any, forms: tuple[str, ...] = FORMS) -> Iterator[Row]:
    """Examine one function of the database in every form of call."""
    name = info.full_name if info.variant_test_name else info.name
    torch.manual_seed(SEED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(first_samples(info))
    except Exception:
        yield Row(name, "samples", skipped="fails in plain torch")
        return
    for number, sample in enumerate(samples):
        for form in forms:
            function = callable_of(info, form)
            leaves, structure = tree_flatten(
                ((sample.input, *sample.args), sample.kwargs)
            )
            weight = weight_place(leaves, form)
            if function is not None and (
                weight is not None or not form.endswith("weight")
            ):
                row = Row(name, f"{form}, sample {number}")
                torch.manual_seed(SEED)
                call = Call(function, leaves, structure, weight)
                yield examine(row, Subject(call), [leaves[i] for i in call.tensors], {})


def first_samples(info: Any) -> Iterator[Any]:
    """Return the first samples of a function."""
    for number, sample in enumerate(
        info.sample_inputs("cpu", torch.float32, requires_grad=False)
    ):
        if number == MAX_SAMPLES:
            return
        yield sample


def callable_of(info: Any, form: str) -> Callable[..., Any] | None:
    """Return the callable of a form; None if torch has no such form."""
    if form == "method":
        return info.method_variant
    if form == "in place":
        return info.inplace_variant
    return info.op


def weight_place(leaves: list[Any], form: str) -> int | None:
    """Return the index of the argument that is the weight in a form; None without one."""
    floating = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    if form == "first operand a weight" and len(floating) > 1:
        return floating[0]
    if form == "second operand a weight" and len(floating) > 1:
        return floating[1]
    return None
