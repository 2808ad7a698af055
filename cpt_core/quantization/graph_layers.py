"""Quantised graph convolutions, made from those of ``cpt_core.graphs``.  Paper: section 4.3, equation 1.

FP-Agg keeps the sum over neighbours in float32; Q-Agg quantises what enters it, and the gradient behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import cpt_core.kernels.graph  # noqa: F401 - brings operators
from cpt_core.formats.quantizer import Quantizer
from cpt_core.graphs import layers
from cpt_core.graphs.graph import Graph, as_graph
from cpt_core.graphs.layers import Features, GraphConv, Keep, SAGEConv, Tail, graph_convolution, sage_convolution
from cpt_core.kernels import operators, products, traced
from cpt_core.quantization.layers import QuantizedLayer, in_float32, on_codes
from cpt_core.quantization.precision import HALF, LayerPrecision
from cpt_core.schedules.schedule import Levels

if TYPE_CHECKING:
    from cpt_core.quantization.convert import QuantConfig

WHOLE = ("per_tensor", "per_position")  # granularities that are the same for (N, F)
ONE_RANGE = (*WHOLE, "per_sample_mean")  # those of which (N, F) has one range


class _ScaledAndBiased(torch.autograd.Function):
    """``scale_round_add`` of a product; its gradient is quantised behind the bias, and again behind the scaling."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        scale: Tensor | None,
        bias: Tensor,
        levels: Tensor,
        granularity: str,
        grad_levels: Tensor,
        key: Tensor | None,
    ) -> Tensor:
        ctx.scale, ctx.levels, ctx.key = scale, grad_levels, key
        return operators.active.scale_round_add(h, scale, bias, levels, granularity)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_product, of_bias = operators.active.round_scale_round(gradient, ctx.scale, ctx.levels, ctx.key)
        if ctx.key is not None:
            ctx.key.add_(2)
        return of_product, None, of_bias, None, None, None, None


class GraphPrecision(LayerPrecision, layers.Precision):  # type: ignore[override]
    """The precision of a graph convolution: scaling by degree, rounding and bias in one pass where that is the same."""

    @property
    def forward_format(self) -> Any:
        """The format of activations; None for float32."""
        return self.now.formats.activation

    @property
    def keeps_by_bits(self) -> bool:
        """Whether the layer keeps sums of quantised features, or their codes, see ``Graph.set_constant``."""
        return "aggregation" in self.quantizers or self.now.on_codes

    def scaled_operand(self, role: str, x: Tensor, scale: Tensor | None) -> Tensor:
        """Return the operand made of ``x * scale``, in one pass over them."""
        if scale is None or not self._in_one_pass(role, x):
            return super().scaled_operand(role, x, scale)
        return operators.active.scale_round(x, scale, self.levels, self.quantizers[role].grid)

    def scaled_and_biased(self, h: Tensor, output: bool, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``h * scale + bias``, likewise."""
        q = self.quantizers["grad"]
        if bias is None or not self._in_one_pass("input", h) or q.grid not in WHOLE:
            return super().scaled_and_biased(h, output, scale, bias)
        terms = h, scale, self.operand("bias", bias), self.levels, self.quantizers["input"].grid
        if not (output and self.now.gradient and h.requires_grad):
            return self.gradient("grad", operators.active.scale_round_add(*terms))
        key = self.noise_key if q.rounding == "stochastic" else None
        return _ScaledAndBiased.apply(*terms, self.grad_levels, key)

    def product(
        self, x: Tensor, scale: Tensor | None, weight: Tensor, keep: Keep, linear: bool = False,
        tail: Tail | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``(x * scale) @ weight`` and what follows it, on codes if asked to."""
        if self.on_codes(x):
            return on_codes("graph", self, x, scale, weight, keep, linear, tail)
        return super().product(x, scale, weight, keep, linear, tail)

    def multiply(self, x: Tensor, weight: Tensor, linear: bool) -> Tensor:
        """Likewise, by the library that is faster on this processor."""
        if linear or products.in_onednn(x, weight.t()):
            return operators.linear(x, weight if linear else weight.t())
        return traced.matmul(x, weight)

    def neighbour_sum(
        self, graph: Graph, x: Tensor, scale: Tensor | None, reduce: str, tail: Tail | None = None
    ) -> Tensor:
        """Return the sum over neighbours and what follows it, likewise."""
        if self.on_codes(x):
            return on_codes("aggregation", self, graph, x, scale, reduce, tail)
        return super().neighbour_sum(graph, x, scale, reduce, tail)

    def _in_one_pass(self, role: str, x: Tensor) -> bool:
        """Whether an operand is quantised here and now, on its own range; compilers fuse the plain chain."""
        self.require_bits()
        apart = torch.compiler.is_compiling() or self.observed or x.dtype in HALF
        if apart or not self.now.activation or x.numel() == 0:
            return False
        self.follow(x)
        q = self.quantizers[role]
        return q.grid in ("per_row", *WHOLE) and not q.running


class _QuantGraph(QuantizedLayer):
    """What the quantised graph convolutions share.

    Roles: "input" (one range per node), "weight", "bias", "grad", and with Q-Agg "aggregation".
    """

    KIND = "graph"
    PRECISION = GraphPrecision
    ROOT: ClassVar = False  # whether the features of the destinations themselves are multiplied, too

    @classmethod
    def roles(cls, module: nn.Module, config: QuantConfig) -> dict[str, Quantizer]:
        """With FP-Agg nothing quantises the sum over neighbours."""
        roles = super().roles(module, config)
        return {role: q for role, q in roles.items() if role != "aggregation" or config.aggregation == "quantized"}

    @classmethod
    def lengths(cls, module: Any) -> Levels:
        """Features; what is added to the bias has those of the output."""
        inside, out = int(getattr(module, "_in_feats", 0) or module._in_src_feats), int(module._out_feats)
        return Levels((inside, out), (inside,), (out,), (out,))

    def not_on_codes(self) -> str:
        """Some product always has an integer form."""
        return ""

    @property
    def quantizes_aggregation(self) -> bool:
        """Whether the sum over neighbours is quantised (Q-Agg)."""
        return "aggregation" in self.precision.quantizers

    def _in_float32(self, convolution: Callable[..., Tensor], graph: Graph, features: Features, *rest: Any) -> Tensor:
        x = features[0] if isinstance(features, tuple) else features
        return in_float32(self.precision, x, convolution, self, self.precision, graph, features, *rest)


class _QuantGraphConv(_QuantGraph):
    SUMS: ClassVar = {"weight": -2}

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


class _QuantSAGEConv(_QuantGraph):
    WHOLE = ROOT = True


class QuantSAGEConv(_QuantSAGEConv, SAGEConv):
    """``SAGEConv`` with quantised operands of both products and of the bias addition."""

    FLOAT = SAGEConv

    def forward(self, graph: Any, features: Features) -> Tensor:
        """(S, I) -> (D, O)."""
        return self._in_float32(sage_convolution, as_graph(graph), features)
