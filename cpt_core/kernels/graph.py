"""Operators of graph convolutions: roundings together with the scaling by degree and the bias beside them.

Each stands for a chain of plain operations and gives the same bits; on a CPU, C++ runs it in one pass over the rows
(``graph.h``), as long as a row is in the cache.

>>> x, degrees, bias = torch.tensor([[0.0, 0.2, 1.0]]), torch.tensor([[2.0]]), torch.tensor([1.0, 1.0, 1.0])
>>> scale_round_add(x, degrees, bias, torch.tensor(1.0), "per_row").tolist()
[[1.0, 1.0, 3.0]]

Shapes: N nodes, F features; scales (N, 1), bias (F,), all float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_core.kernels import operators


def scale_round(x: Tensor, scale: Tensor, levels: Tensor, granularity: str) -> Tensor:
    """Return ``x * scale``, rounded; (N, F) as x."""
    return operators.active.scale_round(x, scale, levels, granularity)


def scale_round_add(x: Tensor, scale: Tensor | None, bias: Tensor, levels: Tensor, granularity: str) -> Tensor:
    """Return ``bias`` plus ``x * scale``, that rounded; (N, F)."""
    return operators.active.scale_round_add(x, scale, bias, levels, granularity)


def round_scale_round(
    gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantise a gradient twice, with the scaling between: what comes back through ``scale_round_add``.

    Both roundings have one range for the whole tensor; their noise has ``key`` and ``key + 1``.

    Returns:
        the gradient of ``x``, rounded the second time, (N, F), and that of the bias, (F,).
    """
    return operators.active.round_scale_round(gradient, scale, levels, key)


SCHEMAS = {
    "scale_round": "(Tensor x, Tensor scale, Tensor levels, str granularity) -> Tensor",
    "scale_round_add": "(Tensor x, Tensor? scale, Tensor bias, Tensor levels, str granularity) -> Tensor",
    "round_scale_round": "(Tensor gradient, Tensor? scale, Tensor levels, Tensor? key) -> (Tensor, Tensor)",
}
ON_GRID = ("scale_round", "round_scale_round")  # those whose (first) result lies on a grid


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


def _define(family: str) -> None:
    """Add the operators to a family, plain: made of its own ``fake_quantize``, whatever that runs on."""
    ops, library = getattr(torch.ops, family), operators.LIBRARIES[family]

    def plain_scale_round(x: Tensor, scale: Tensor | None, levels: Tensor, granularity: str) -> Tensor:
        return ops.fake_quantize(_scaled(x, scale), levels, granularity, None)[0]

    def plain_scale_round_add(
        x: Tensor, scale: Tensor | None, bias: Tensor, levels: Tensor, granularity: str
    ) -> Tensor:
        return plain_scale_round(x, scale, levels, granularity) + bias

    def plain_round_scale_round(
        gradient: Tensor, scale: Tensor | None, levels: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        once = ops.fake_quantize(gradient, levels, "per_tensor", key)[0]
        key = None if key is None else key + 1
        return ops.fake_quantize(_scaled(once, scale), levels, "per_tensor", key)[0], once.sum(0)

    plain = (plain_scale_round, plain_scale_round_add, plain_round_scale_round)
    for (name, schema), run in zip(SCHEMAS.items(), plain, strict=True):
        operators.define(library, name, schema, run, _FAKES[name], _BACKWARD[name], _keep_scale)


# --- without numbers, and gradients: a rounding passes them unchanged -------------------------------------------------


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, None, None


def _back_add(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(gradient, *ctx.saved_tensors), None, gradient.sum(0), None, None


def _back_twice(ctx: Any, of_first: Tensor, of_sum: Tensor) -> tuple[Tensor | None, ...]:
    return _scaled(of_first, *ctx.saved_tensors) + of_sum, None, None, None


_FAKES: dict[str, Any] = {
    "scale_round": lambda x, *_: torch.empty_like(x),
    "scale_round_add": lambda x, *_: torch.empty_like(x),
    "round_scale_round": lambda g, *_: (torch.empty_like(g), g.new_empty(g.shape[1:])),
}
_BACKWARD: dict[str, Any] = {"scale_round": _back, "scale_round_add": _back_add, "round_scale_round": _back_twice}
for _family in operators.FAMILIES:
    _define(_family)
