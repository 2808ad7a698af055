"""Handlers of the functions of graph convolutions: operands, roles and MACs of each.  Paper: section 4.3, equation 1.

The layers are those of ``cpt_core.graphs``, and others that are registered in ``GRAPH_LAYERS``. Roles: "graph_input"
(one range per node), "graph_weight", "bias", "graph_grad", and with Q-Agg "graph_aggregation". FP-Agg keeps the sum
over neighbours in float32; Q-Agg rounds what enters it, and the gradient behind it. What the degrees have scaled is
rounded once more before the bias is added, as the authors do.
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
    """How a class of graph convolutions is converted.

    Attributes:
        has_parts: whether its child modules are parts of it, never converted by themselves.
        float32_reason: module -> why it is not converted as a graph convolution, or "".
        forward: ``forward(module, *args)``, which runs instead of its own while it is converted; None for its own.
    """

    has_parts: bool = False
    float32_reason: Callable[[Any], str] = lambda module: ""
    forward: Callable[..., Tensor] | None = None

    def replace_forward(self, module: nn.Module) -> None:
        """Let a graph convolution of another library run its quantised forward."""
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
    """Return how a graph convolution is converted; None for others and, where it must be, for one that cannot be."""
    kinds = [
        kind
        for kind in type(module).__mro__
        if kind in GRAPH_LAYERS and type(module).forward is kind.forward
    ]
    layer = GRAPH_LAYERS[kinds[0]] if kinds else None
    replaced = vars(module).get("forward")
    if layer is None or (
        replaced is not None and getattr(replaced, "func", None) is not layer.forward
    ):
        return None
    return None if is_convertible and layer.float32_reason(module) else layer


class GraphOperand(NamedTuple):
    """The operation of a graph convolution that runs, for executors.

    Attributes:
        graph: whose edges or degrees it uses.
        x: the operand before it was scaled: constant features, perhaps.
        out_exponent: of the out-degrees that have scaled it.
        is_transposed: of a projection, whether the weight is (O, I).
        reduce: of a sum over neighbours.
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
        """Quantise a projection: a range per node, and one per row of the weight."""
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
        """Quantise a sum over neighbours in Q-Agg; what is computed of constant features is cached per bit width."""
        layer = mode.running.stack[-1].interception
        precision = layer.precision
        if (
            precision is None
            or layer.kind != "graph"
            or "aggregation" not in precision.quantizers
        ):
            layer, precision = layer._replace(precision=None), None

        def compute(x: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
            return (
                function(graph, x, out_exponent, reduce)
                if precision is None
                else graph.aggregate(x, reduce)
            )

        def macs(x: Tensor, indices: Tensor, output: Tensor) -> int:
            return indices.numel() * x.shape[1]

        def run(x: Tensor, role: str | None = "graph_aggregation") -> Tensor:
            operands, roles = (x, graph.indices, None), (role, None)
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
        """Quantise both terms of the addition of a bias, and the gradient behind it."""
        layer = mode.running.stack[-1].interception
        precision = layer.precision
        if precision is None or layer.kind != "graph" or bias is None:
            return function(graph, h, in_exponent, bias)
        scaled = scale_rows(h, degree_scale(graph, "in", in_exponent, h))
        total = precision.quantize_operand(
            "input", scaled
        ) + precision.quantize_operand("bias", bias)
        return precision.gradient("grad", total)

    def scaled_operand(
        self,
        precision: LayerPrecision | None,
        role: str,
        x: Tensor,
        scale: Tensor | None,
    ) -> tuple[Tensor, str | None]:
        """Return ``x * scale``, and the role in which it is still to be rounded."""
        return scale_rows(x, scale), role

    def multiply(self, x: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
        """Return x (N, I) times a weight."""
        operators = fake_quantize.operators
        return (
            operators.linear(x, weight)
            if is_transposed
            else operators.matmul(x, weight)
        )

    def run(self, mode: QuantizedOpsMode, *args: Any, **options: Any) -> Tensor:
        """Run an operation by ``mode.run``, with its arguments."""
        return mode.run(*args, **options)

    def register(self) -> None:
        """Let these handlers run instead of the functions."""
        OP_HANDLERS[functional.project] = self.project
        OP_HANDLERS[functional.neighbour_sum] = self.neighbour_sum
        OP_HANDLERS[functional.scale_and_add_bias] = self.scale_and_add_bias


def _in_float32(function: Any) -> Callable[..., Tensor]:
    """Return the handler of a layer: float32 between its operations."""

    def layer(
        mode: QuantizedOpsMode, graph: Graph, features: Any, *rest: Any, **more: Any
    ) -> Tensor:
        precision = mode.running.stack[-1].interception.precision
        x = features[0] if isinstance(features, tuple) else features
        return in_float32(
            precision,
            x,
            lambda *inputs: function.__wrapped__(*inputs, **more),
            graph,
            features,
            *rest,
        )

    return layer


GraphHandlers().register()
COMPOSITE_OPS[functional.graph_conv] = _in_float32(functional.graph_conv)
COMPOSITE_OPS[functional.sage_conv] = _in_float32(functional.sage_conv)
