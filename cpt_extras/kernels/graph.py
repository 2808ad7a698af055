"""Fused operators of graph convolutions: rounding with the scaling by degree before it and the bias after it.

Each replaces a chain of plain operations and gives the same bits; on a CPU, C++ runs it in one pass over the rows
(``graph.h``), while a row is in the cache.

>>> x, degrees, bias = torch.tensor([[0.0, 0.2, 1.0]]), torch.tensor([[2.0]]), torch.tensor([1.0, 1.0, 1.0])
>>> operators.active.scale_round_add(x, degrees, bias, torch.tensor(1.0), "per_row").tolist()
[[1.0, 1.0, 3.0]]

The plain chains call ``ops``, a family of operators. Gradients pass a rounding unchanged.

Shapes: N nodes, F features; scales (N, 1), bias (F,), all float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cpt_extras.kernels import operators


def scale_round(
    ops: Any, x: Tensor, scale: Tensor | None, levels: Tensor, granularity: str
) -> Tensor:
    """Return ``x * scale``, rounded, (N, F)."""
    return ops.fake_quantize(_scaled(x, scale), levels, granularity, None)[0]


def scale_round_add(
    ops: Any,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    levels: Tensor,
    granularity: str,
) -> Tensor:
    """Return ``bias`` plus the rounded ``x * scale``, (N, F)."""
    return scale_round(ops, x, scale, levels, granularity) + bias


def round_scale_round(
    ops: Any, gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round a gradient, scale it, and round it again: the backward pass of ``scale_round_add``.

    Both roundings have one range for the whole tensor, and the noise keys ``key`` and ``key + 1``.

    Returns:
        The gradient of ``x``, rounded twice, (N, F), and that of the bias, (F,).
    """
    rounded = ops.fake_quantize(gradient, levels, "per_tensor", key)[0]
    key = None if key is None else key + 1
    scaled = _scaled(rounded, scale)
    rounded_twice = ops.fake_quantize(scaled, levels, "per_tensor", key)[0]
    return rounded_twice, rounded.sum(0)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _scale_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, None, None


def _scale_and_sum_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, gradient.sum(0), None, None


def _round_scale_round_gradient(
    ctx: Any, rounded_grad: Tensor, sum_grad: Tensor
) -> tuple[Tensor | None, ...]:
    return _scaled(rounded_grad, *ctx.saved_tensors) + sum_grad, None, None, None


# name -> schema, plain implementation, its shapes for fake tensors, its gradient
GRAPH_OPERATORS: dict[str, tuple[str, Any, Any, Any]] = {
    "scale_round": (
        "(Tensor x, Tensor scale, Tensor levels, str granularity) -> Tensor",
        scale_round,
        lambda x, *_: torch.empty_like(x),
        _scale_gradient,
    ),
    "scale_round_add": (
        "(Tensor x, Tensor? scale, Tensor bias, Tensor levels, str granularity) -> Tensor",
        scale_round_add,
        lambda x, *_: torch.empty_like(x),
        _scale_and_sum_gradient,
    ),
    "round_scale_round": (
        "(Tensor gradient, Tensor? scale, Tensor levels, Tensor? key) -> (Tensor, Tensor)",
        round_scale_round,
        lambda g, *_: (torch.empty_like(g), g.new_empty(g.shape[1:])),
        _round_scale_round_gradient,
    ),
}
for _family, _library in operators.LIBRARIES.items():
    for _name, (_schema, _plain, _fake, _backward) in GRAPH_OPERATORS.items():
        _run = partial(_plain, getattr(torch.ops, _family))
        operators.define(_library, _name, _schema, _run, _fake, _backward, _keep_scale)
