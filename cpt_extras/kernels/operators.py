"""Registered operators ``torch.ops.cpt.*``: one node each for autograd, compilers, fake tensors and CUDA graphs.

It contains their schemas, shapes for fake tensors, gradients and plain implementations; C++ and Triton register theirs
in addition (``backend.py``). ``torch.ops.cpt_reference.*`` are the same operators, always in plain torch.

>>> fake_quantize(torch.tensor([0.0, 0.2, 1.0]), torch.tensor(1.0), "per_tensor")[0].tolist()
[0.0, 0.0, 1.0]

Gradients pass every rounding unchanged (straight-through estimator). Inductor decomposes the operators, so that
rounding fuses with its neighbours.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_core.quantization import fake_quantize as core
from cpt_core.quantization import rounding
from cpt_extras.kernels import gemm_backend, grids, integer_reference
from cpt_extras.operations import autocast_matmul


def _plain_range(x: Tensor, grid: str) -> rounding.Range:
    """Return the ranges of a tensor that is not empty, by the granularity of a grid string."""
    return rounding.range_of(x, grid.partition("|")[0])


SCHEMAS = {
    "range": "(Tensor x, str granularity) -> (Tensor, Tensor)",
    "round_to_grid": "(Tensor x, Tensor low, Tensor width, Tensor levels, Tensor? key, bool clip) -> Tensor",
    "fake_quantize": "(Tensor x, Tensor levels, str granularity, Tensor? key) -> (Tensor, Tensor, Tensor)",
    "round_in_range": "(Tensor x, Tensor low, Tensor width, Tensor levels, str grid, Tensor? key, bool clip) -> Tensor",
    "encode": "(Tensor x, Tensor low, Tensor width, Tensor levels, Tensor? key, bool clip, bool channels_last=False) "
    "-> Tensor",
    "affine_": "(Tensor(a!) product, Tensor row_codes, Tensor row_values, Tensor column_codes, Tensor column_values) "
    "-> ()",
    "track_": "(Tensor(a!) running, Tensor low, Tensor width) -> ()",
    "linear": gemm_backend.LINEAR_SCHEMA,
}
PLAIN = {
    "range": _plain_range,
    "round_to_grid": rounding.round_to_grid,
    "fake_quantize": grids.fake_quantize,
    "round_in_range": grids.round_in_range,
    "encode": integer_reference.encode,
    "affine_": integer_reference.dequantize_matmul_,
    "track_": rounding.track,
    "linear": gemm_backend.execute,
}
FAMILIES = ("cpt", "cpt_reference")
# operators that contain matmuls -> plain implementation, whose operations are counted and traced in their place
MATMUL_OPERATORS: dict[str, Any] = {
    f"{family}::linear": torch.nn.functional.linear for family in FAMILIES
}


def range_of(x: Tensor, granularity: str) -> rounding.Range:
    """Return the ranges of a tensor that is not empty, see ``rounding.RANGE_FUNCTIONS``."""
    return active.range(x, granularity)


def fake_quantize(
    x: Tensor, levels: Tensor, granularity: str, key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor that is not empty on its own range; return it with minimum and width of the range.

    ``granularity`` may be a grid string (``kernels.grids``), whose number format replaces ``levels``.
    """
    return active.fake_quantize(x, levels, granularity, key)


def round_in_range(
    x: Tensor,
    low: Tensor,
    width: Tensor,
    levels: Tensor,
    grid: str,
    key: Tensor | None = None,
    clip: bool = False,
) -> Tensor:
    """Round to the grid of a given range, with the arguments of ``grids.round_in_range``."""
    if grids.is_plain(grid):
        return active.round_to_grid(x, low, width, levels, key, clip)
    return active.round_in_range(x, low, width, levels, grid, key, clip)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the faster library on this processor, see ``gemm_backend``."""
    if torch.compiler.is_compiling() and not gemm_backend.uses_onednn(x, weight):
        return autocast_matmul.linear(x, weight, bias)
    return gemm_backend.linear(active, x, weight, bias)


def has_gradient_node(y: Tensor) -> bool:
    """Return whether C++ can quantise the gradient of this output, by ``torch.ops.cpt.quantize_gradient``."""
    return (
        y.is_cpu
        and active is torch.ops.cpt
        and has_cpp_gradient
        and not torch.compiler.is_compiling()
    )


def describe_device(device: torch.device) -> str:
    """Return the name of the backend of a device; the module ``backend`` replaces this function."""
    return "not loaded"


class KernelOperators:
    """Rounding functions of this package, which replace ``fake_quantize.PlainOperators``."""

    range = staticmethod(range_of)
    fake_quantize = staticmethod(fake_quantize)
    linear = staticmethod(linear)
    matmul = staticmethod(autocast_matmul.matmul)

    round_in_range = staticmethod(round_in_range)

    @staticmethod
    def track_(running: Tensor, low: Tensor, width: Tensor) -> None:
        """Update a running range in place."""
        active.track_(running, low, width)

    @staticmethod
    def quantize_gradient(
        y: Tensor, levels: Tensor, grid: str, key: Tensor | None
    ) -> Tensor:
        """Return ``y`` behind an autograd node that rounds its gradient, in C++ if possible."""
        if has_gradient_node(y):
            return torch.ops.cpt.quantize_gradient(y, levels, key, grid)
        return core.PlainOperators.quantize_gradient(y, levels, grid, key)

    @staticmethod
    def name_on(device: torch.device) -> str:
        """Return the name of the backend of a device."""
        return describe_device(device)


def use(family: str) -> None:
    """Select the family of operators, "cpt" or "cpt_reference", and make the core round with them."""
    global active
    active = getattr(torch.ops, family)
    core.use_operators(KernelOperators)


# --- registration -----------------------------------------------------------------------------------------------------


def _fake_round(x: Tensor, *_: Any) -> Tensor:
    _register_inductor_decompositions()
    return torch.empty_like(x)


def _fake_encode(x: Tensor, *rest: Any) -> Tensor:
    return integer_reference.empty_codes(x, channels_last=len(rest) > 5 and rest[5])


def _fake_in_range(
    x: Tensor, low: Tensor, width: Tensor, levels: Tensor, grid: str, *_: Any
) -> Tensor:
    _check(x, grid)
    return _fake_round(x)


def _check(x: Tensor, grid: str) -> None:
    format = grids.parse_grid(grid)[1]
    if format is not None:
        from cpt_extras.formats.format import check_blocks

        check_blocks(x.shape, format)


def _fake_quantize(
    x: Tensor, levels: Tensor, granularity: str, key: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _register_inductor_decompositions()
    _check(x, granularity)
    return torch.empty_like(x), *_plain_range(x, granularity)


def _gradient(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return gradient, *[None] * ctx.num_settings


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.num_settings = len(inputs) - 1
    ctx.set_materialize_grads(False)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def define(
    library: torch.library.Library,
    name: str,
    schema: str,
    plain: Any,
    fake: Any = None,
    backward: Any = None,
    setup: Any = None,
) -> None:
    """Define an operator in a family.

    Args:
        library: of the family.
        name: of the operator.
        schema: its arguments and results.
        plain: its plain implementation.
        fake: function that returns results of the right shapes for fake tensors.
        backward: its gradient.
        setup: function that saves what ``backward`` needs.
    """
    library.define(f"{name}{schema}")
    library.impl(name, plain, "CompositeExplicitAutograd")
    if fake is not None:
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(
            f"{library.ns}::{name}", backward, setup_context=setup, lib=library
        )


def _register(family: str) -> torch.library.Library:
    library = torch.library.Library(family, "DEF")
    fakes = {
        "range": _plain_range,
        "round_to_grid": _fake_round,
        "fake_quantize": _fake_quantize,
    }
    fakes |= {
        "encode": _fake_encode,
        "round_in_range": _fake_in_range,
        "linear": gemm_backend.fake_linear,
    }
    gradients = dict.fromkeys(
        ("round_to_grid", "fake_quantize", "round_in_range"), (_gradient, _setup)
    )
    gradients["linear"] = (
        partial(gemm_backend.linear_gradient, getattr(torch.ops, family)),
        gemm_backend.save_linear_operands,
    )
    for name, schema in SCHEMAS.items():
        define(
            library,
            name,
            schema,
            PLAIN[name],
            fakes.get(name, lambda *_: None),
            *gradients.get(name, ()),
        )
    return library


def _register_inductor_decompositions() -> None:
    """Register decompositions of the operators with Inductor, once; called while a model is traced."""
    if (
        _inductor_setup
        or "torch._inductor" not in sys.modules
        or not torch.compiler.is_compiling()
    ):
        return
    from torch._inductor import decomposition

    for ops in (getattr(torch.ops, family) for family in FAMILIES):
        for name in ("range", "round_to_grid", "fake_quantize", "round_in_range"):
            decomposition.decompositions[getattr(ops, name).default] = PLAIN[name]
    decomposition.fast_random_decomps.cache_clear()
    _inductor_setup.append(True)


_inductor_setup: list[bool] = []
LIBRARIES = {
    family: _register(family) for family in FAMILIES
}  # as long as these live, the operators exist
active: Any = torch.ops.cpt
has_cpp_gradient = False  # the C++ kernels bring it
