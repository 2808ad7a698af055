"""Quantised graph convolutions, made from those of ``cpt_core.graphs``.  Paper: section 4.3, equation 1.

FP-Agg keeps the sum over neighbours in float32; Q-Agg quantises what enters it, and the gradient behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.graphs import layers
from cpt_core.graphs.graph import Graph, as_graph
from cpt_core.graphs.layers import Features, GraphConv, SAGEConv, graph_convolution, sage_convolution
from cpt_core.kernels.graph import round_scale_round, scale_round, scale_round_add
from cpt_core.quantization.layers import QuantizedLayer, in_float32
from cpt_core.quantization.precision import HALF, LayerPrecision
from cpt_core.quantization.quantizers import Quantizer


class _ScaledAndBiased(torch.autograd.Function):
    """``scale_round_add`` of a product; its gradient is quantised behind the bias, and again behind the scaling."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, scale: Tensor | None, bias: Tensor, levels: Tensor, grad_levels: Tensor, key: Tensor | None
    ) -> Tensor:
        ctx.scale, ctx.levels, ctx.key = scale, grad_levels, key
        return scale_round_add(h, scale, bias, levels)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_product, of_bias = round_scale_round(gradient, ctx.scale, ctx.levels, ctx.key)
        if ctx.key is not None:
            ctx.key.add_(2)
        return of_product, None, of_bias, None, None, None


class GraphPrecision(LayerPrecision):
    """The precision of a graph convolution: scaling by degree, rounding and bias in one pass where that is the same."""

    def scaled_operand(self, role: str, x: Tensor, scale: Tensor | None) -> Tensor:
        """Return the operand made of ``x * scale``, see ``graphs.layers``."""
        if scale is None or not self._by_rows(role, x):
            return layers.scaled_operand(self, role, x, scale)
        return scale_round(x, scale, self.levels)

    def scaled_and_biased(self, h: Tensor, output: bool, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``h * scale + bias``, see ``graphs.layers``."""
        q = self.quantizers["grad"]
        whole = q.granularity in ("per_tensor", "per_position")  # the same for (N, F)
        if bias is None or not self._by_rows("input", h) or not whole:
            return layers.scaled_and_biased(self, h, output, scale, bias)
        terms = h, scale, self.operand("bias", bias), self.levels
        if not (output and self.quantizes_gradient and h.requires_grad):
            return self.gradient("grad", scale_round_add(*terms))
        key = self.noise_key if q.rounding == "stochastic" else None
        return _ScaledAndBiased.apply(*terms, self.grad_levels, key)

    def _by_rows(self, role: str, x: Tensor) -> bool:
        """Whether an operand is quantised here and now, with a range per row; compilers fuse the plain chain."""
        self.require_bits()
        if torch.compiler.is_compiling() or not self.quantizes or x.numel() == 0 or x.dtype in HALF:
            return False
        self.follow(x)
        return self.quantizers[role].granularity == "per_row"


class _QuantGraph(QuantizedLayer):
    """What the quantised graph convolutions share.

    Roles: "input" (one range per node), "weight", "bias", "grad", and with Q-Agg "aggregation".
    """

    KIND = "graph"
    PRECISION = GraphPrecision

    @classmethod
    def roles(cls, module: nn.Module, quantizers: Mapping[str, Quantizer], aggregation: str) -> dict[str, Quantizer]:
        """With FP-Agg nothing quantises the sum over neighbours."""
        roles = super().roles(module, quantizers, aggregation)
        return {role: q for role, q in roles.items() if role != "aggregation" or aggregation == "quantized"}

    @property
    def quantizes_aggregation(self) -> bool:
        """Whether the sum over neighbours is quantised (Q-Agg)."""
        return "aggregation" in self.precision.quantizers

    def _in_float32(self, convolution: Callable[..., Tensor], graph: Graph, features: Features, *rest: Any) -> Tensor:
        x = features[0] if isinstance(features, tuple) else features
        return in_float32(self.precision, x, convolution, self, self.precision, graph, features, *rest)


class _QuantGraphConv(_QuantGraph):
    def forward(
        self, graph: Any, feat: Features, weight: Tensor | None = None, edge_weight: Tensor | None = None
    ) -> Tensor:
        """(S, I) -> (D, O)."""
        if weight is not None or edge_weight is not None:
            raise ValueError("a quantised graph convolution takes neither edge weights nor a weight from outside")
        return self._in_float32(graph_convolution, as_graph(graph), feat, self.weight)  # type: ignore[attr-defined]

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """A layer without a weight of its own cannot be converted."""
        return "" if module.weight is not None else "it has no weight of its own"


class QuantGraphConv(_QuantGraphConv, GraphConv):
    """``GraphConv`` with quantised operands; the bias is added at q bits too, as the authors do."""

    FLOAT = GraphConv


class QuantSAGEConv(_QuantGraph, SAGEConv):
    """``SAGEConv`` with quantised operands of both products and of the bias addition."""

    FLOAT = SAGEConv
    WHOLE = True

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return self._in_float32(sage_convolution, as_graph(graph), features)


CONVERSIONS: dict[type[nn.Module], type[QuantizedLayer]] = {c.FLOAT: c for c in (QuantGraphConv, QuantSAGEConv)}
