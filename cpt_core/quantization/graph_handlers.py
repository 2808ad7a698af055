"""Handlers of the functions of graph convolutions: operands, roles and MACs of each.  Paper: section 4.3, equation 1.

The layers are those of ``cpt_core.graphs``, and others that are registered in ``GRAPH_LAYERS``. Roles: "graph_input"
(one range per node), "graph_weight", "bias", "graph_grad", and with Q-Agg "graph_aggregation". FP-Agg keeps the sum
over neighbours in float32; Q-Agg rounds its operand and its output gradient. Features scaled by the degrees are rounded
again before the bias is added, as the authors do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from cpt_core.graphs import functional
from cpt_core.graphs.functional import degree_scale, is_constant, scale_rows
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization import fake_quantize, op_handlers
from cpt_core.quantization.op_interception import (
    COMPOSITE_OPS,
    OP_HANDLERS,
    QuantizedOpsMode,
)
from cpt_core.quantization.precision import LayerPrecision, in_float32


class GraphLayer(NamedTuple):
    """Conversion of a class of graph convolutions.

    Attributes:
        has_parts: whether its child modules are parts of it and not converted separately.
        float32_reason: module -> why it is not converted as a graph convolution, or "".
        forward: ``forward(module, *args)``, which replaces the module's forward while it is converted; None keeps it.
    """

    has_parts: bool = False
    float32_reason: Callable[[Any], str] = lambda module: ""
    forward: Callable[..., Tensor] | None = None

    def replace_forward(self, module: nn.Module) -> None:
        """Install the quantised forward of a graph convolution of another library."""
        if self.forward is not None:
            vars(module)["forward"] = partial(self.forward, module)

    def restore_forward(self, module: nn.Module) -> None:
        """Undo ``replace_forward``."""
        if self.forward is not None:
            vars(module).pop("forward", None)


GRAPH_LAYERS: dict[type[nn.Module], GraphLayer] = {
    GraphConv: GraphLayer(),
    SAGEConv: GraphLayer(has_parts=True),
}


def graph_layer_of(module: nn.Module, is_convertible: bool = True) -> GraphLayer | None:
    """Return the conversion of a graph convolution; None for other modules.

    With ``is_convertible``, also None for a graph convolution that cannot be converted.
    """
    kinds = [
        kind
        for kind in type(module).__mro__
        if kind in GRAPH_LAYERS and type(module).forward is kind.forward
    ]
    layer = GRAPH_LAYERS[kinds[0]] if kinds else None
    if layer is None:
        return None
    replacement = vars(module).get("forward")
    if (
        replacement is not None
        and getattr(replacement, "func", None) is not layer.forward
    ):
        return None
    if is_convertible and layer.float32_reason(module):
        return None
    return layer


class GraphOperand(NamedTuple):
    """Options of an operation of a graph convolution, for executors.

    Attributes:
        graph: graph with the edges and degrees.
        x: operand before it was scaled by degrees, perhaps constant features.
        out_exponent: exponent of the out-degrees in the scale.
        is_transposed: whether the weight of a projection is (O, I).
        reduce: "sum" or "mean", for a sum over neighbours.
    """

    graph: Graph
    x: Tensor
    out_exponent: float
    is_transposed: bool = False
    reduce: str = "sum"


class GraphHandlers:
    """Handlers of ``project``, ``neighbour_sum`` and ``scale_and_add_bias``; a subclass may fuse their roundings."""

    def project(
        self,
        mode: QuantizedOpsMode,
        function: Any,
        graph: Graph,
        x: Tensor,
        weight: Tensor,
        out_exponent: float = 0.0,
        is_transposed: bool = False,
    ) -> Tensor:
        """Return a quantised projection: one range per node, one per row of the weight."""
        layer = mode.running.stack[-1].interception
        scale = degree_scale(graph, "out", out_exponent, x)
        if layer.kind != "graph":
            multiply: Any = op_handlers.linear if is_transposed else op_handlers.matmul
            return multiply(mode, function, scale_rows(x, scale), weight)

        def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.multiply(x, weight, is_transposed)

        def macs(x: Tensor, weight: Tensor, y: Tensor) -> int:
            return len(x) * weight.numel()

        scaled, role = self.scaled_operand(layer.precision, "graph_input", x, scale)
        operands, roles = (scaled, weight, None), (role, "graph_weight")
        along = None, -1 if is_transposed else -2
        options = GraphOperand(graph, x, out_exponent, is_transposed=is_transposed)
        return self.run(
            mode,
            layer,
            "graph_linear",
            compute,
            operands,
            roles,
            macs,
            "graph_grad",
            along=along,
            options=options,
        )

    def neighbour_sum(
        self,
        mode: QuantizedOpsMode,
        function: Any,
        graph: Graph,
        x: Tensor,
        out_exponent: float = 0.0,
        reduce: str = "sum",
    ) -> Tensor:
        """Return a sum over neighbours, quantised in Q-Agg; sums of constant features are cached per bit width."""
        layer = mode.running.stack[-1].interception
        precision = layer.precision
        if (
            precision is None
            or layer.kind != "graph"
            or "aggregation" not in precision.quantizers
        ):
            layer, precision = layer._replace(precision=None), None

        def compute(x: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
            if precision is None:
                return function(graph, x, out_exponent, reduce)
            return graph.aggregate(x, reduce)  # x is scaled already

        def macs(x: Tensor, indices: Tensor, output: Tensor) -> int:
            return indices.numel() * x.shape[1]

        def run(operand: Tensor, role: str | None = "graph_aggregation") -> Tensor:
            operands, roles = (operand, graph.indices, None), (role, None)
            options = GraphOperand(graph, x, out_exponent, reduce=reduce)
            return self.run(
                mode,
                layer,
                "aggregation",
                compute,
                operands,
                roles,
                macs,
                "graph_grad",
                options=options,
            )

        def run_quantized() -> Tensor:
            scale = degree_scale(graph, "out", out_exponent, x)
            return run(*self.scaled_operand(precision, "graph_aggregation", x, scale))

        if precision is None:
            return run(x)
        if not is_constant(graph, x):
            return run_quantized()
        active = (
            precision.quantizers["aggregation"],
            precision.active_bits.formats.activation,
            precision.execution,
        )
        return graph.keep(x, (out_exponent, reduce, *active), run_quantized)

    def scale_and_add_bias(
        self,
        mode: QuantizedOpsMode,
        function: Any,
        graph: Graph,
        h: Tensor,
        in_exponent: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return features plus bias, both quantised, with a quantised output gradient."""
        layer = mode.running.stack[-1].interception
        precision = layer.precision
        if precision is None or layer.kind != "graph" or bias is None:
            return function(graph, h, in_exponent, bias)
        scaled = scale_rows(h, degree_scale(graph, "in", in_exponent, h))
        rounded = precision.quantize_operand("input", scaled)
        rounded_bias = precision.quantize_operand("bias", bias)
        return precision.gradient("grad", rounded + rounded_bias)

    def scaled_operand(
        self,
        precision: LayerPrecision | None,
        role: str,
        x: Tensor,
        scale: Tensor | None,
    ) -> tuple[Tensor, str | None]:
        """Return ``x * scale`` and its role; a subclass that rounds it returns the role None."""
        return scale_rows(x, scale), role

    def multiply(self, x: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
        """Return x (N, I) times a weight."""
        operators = fake_quantize.operators
        multiply = operators.linear if is_transposed else operators.matmul
        return multiply(x, weight)

    def run(self, mode: QuantizedOpsMode, *args: Any, **options: Any) -> Tensor:
        """Return the result of ``mode.run``; a subclass may change its arguments."""
        return mode.run(*args, **options)

    def register(self) -> None:
        """Register these handlers for the functions of graph convolutions."""
        OP_HANDLERS[functional.project] = self.project
        OP_HANDLERS[functional.neighbour_sum] = self.neighbour_sum
        OP_HANDLERS[functional.scale_and_add_bias] = self.scale_and_add_bias


def _in_float32(function: Any) -> Callable[..., Tensor]:
    """Return a handler of a whole layer that runs in float32 between the quantised operations."""

    def layer(
        mode: QuantizedOpsMode, graph: Graph, features: Any, *rest: Any, **more: Any
    ) -> Tensor:
        precision = mode.running.stack[-1].interception.precision
        x = features[0] if isinstance(features, tuple) else features
        compute = partial(function.__wrapped__, **more)
        return in_float32(precision, x, compute, graph, features, *rest)

    return layer


GraphHandlers().register()
COMPOSITE_OPS[functional.graph_conv] = _in_float32(functional.graph_conv)
COMPOSITE_OPS[functional.sage_conv] = _in_float32(functional.sage_conv)
