"""Operators of graph convolutions: roundings together with the scaling by degree and the bias beside them.

Each stands for a chain of plain operations and gives the same bits; on a CPU, C++ runs it in one pass over the rows
(``graph.h``), as long as a row is in the cache.

>>> x, degrees, bias = torch.tensor([[0.0, 0.2, 1.0]]), torch.tensor([[2.0]]), torch.tensor([1.0, 1.0, 1.0])
>>> operators.active.scale_round_add(x, degrees, bias, torch.tensor(1.0), "per_row").tolist()
[[1.0, 1.0, 3.0]]

The plain chains are made of ``ops``, a family of operators. A rounding passes gradients unchanged.

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
    """Return ``x * scale``, rounded; (N, F) as x."""
    return ops.fake_quantize(_scaled(x, scale), levels, granularity, None)[0]


def scale_round_add(
    ops: Any,
    x: Tensor,
    scale: Tensor | None,
    bias: Tensor,
    levels: Tensor,
    granularity: str,
) -> Tensor:
    """Return ``bias`` plus ``x * scale``, that rounded; (N, F)."""
    return scale_round(ops, x, scale, levels, granularity) + bias


def round_scale_round(
    ops: Any, gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantise a gradient twice, with the scaling between: what comes back through ``scale_round_add``.

    Both roundings have one range for the whole tensor; their noise has ``key`` and ``key + 1``.

    Returns:
        the gradient of ``x``, rounded the second time, (N, F), and that of the bias, (F,).
    """
    once = ops.fake_quantize(gradient, levels, "per_tensor", key)[0]
    key = None if key is None else key + 1
    return ops.fake_quantize(_scaled(once, scale), levels, "per_tensor", key)[
        0
    ], once.sum(0)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _scale_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, None, None


def _scale_and_sum_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, gradient.sum(0), None, None


def _round_scale_round_gradient(
    ctx: Any, of_first: Tensor, of_sum: Tensor
) -> tuple[Tensor | None, ...]:
    return _scaled(of_first, *ctx.saved_tensors) + of_sum, None, None, None


GRAPH_OPERATORS: dict[
    str, tuple[str, Any, Any, Any]
] = {  # schema, what it does with and without numbers, its gradient
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
QUANTIZED_OUTPUT_OPERATORS = (
    "scale_round",
    "round_scale_round",
)  # those whose (first) result lies on a grid
for _family, _library in operators.LIBRARIES.items():
    for _name, (_schema, _plain, _fake, _backward) in GRAPH_OPERATORS.items():
        _run = partial(_plain, getattr(torch.ops, _family))
        operators.define(_library, _name, _schema, _run, _fake, _backward, _keep_scale)
