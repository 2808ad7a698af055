"""Which modules may multiply in their own forward: those whose code names a product.

>>> names_a_product(nn.Bilinear(2, 2, 2)), names_a_product(nn.LayerNorm(2))
(True, False)
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

# functions of torch that multiply and have a rule in ``operations``, and of libraries that do so; those that have none
NAMES = frozenset(
    "__matmul__ __rmatmul__ _grouped_mm _transformer_encoder_layer_fwd addmm addmv baddbmm bilinear bmm chain_matmul "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot einsum grouped_mm grouped_mm_fallback "
    "gru gru_cell inner linalg_matmul linalg_multi_dot linear lstm lstm_cell matmul mm multi_head_attention_forward mv "
    "rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention tensordot vdot".split()
)
UNRULED = ("addbmm", "addbmm_", "addmm_", "addmv_", "baddbmm_")


def names_a_product(module: nn.Module) -> bool:
    """Whether the forward of a module, or a function, method or object that it calls by name, names a product of torch.

    What its child modules do in forwards of their own is theirs. A product that is found in no name, such as one in a
    table of functions, is not known here; the first forward pass tells of it.
    """
    seen: set[CodeType] = set()
    own = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    left: list[Any] = [vars(kind)["forward"] for kind in own if "forward" in vars(kind)]  # some call those above them
    while left:
        function = left.pop()
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        for code in _with_inner(function.__code__):
            for name, of_self in _names(code):
                if of_self:
                    held = vars(module).get(name)  # a function, or an object that is called; no child
                    if name in NAMES and callable(held):
                        return True
                    found = getattr(type(module), name, held)
                    if not isinstance(found, FunctionType | MethodType):
                        found = vars(type(found)).get("__call__")
                else:
                    if name in NAMES or name == "@":
                        return True
                    found = function.__globals__.get(name)
                if isinstance(found, FunctionType | MethodType):
                    left.append(found)
    return False


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the names that a code uses, each with whether it is one of ``self``; "@" stands for the operator."""
    before = None
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(value), before == "self"
        elif kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            yield str(value), False
        elif kind == "BINARY_OP" and instruction.argrepr.startswith("@"):
            yield "@", False
        if kind != "CACHE":
            last = value[-1] if isinstance(value, tuple) and value else value
            before = last if kind.startswith("LOAD_FAST") else None
