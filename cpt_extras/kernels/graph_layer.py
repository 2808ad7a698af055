"""Fused graph convolutions: scaling by degree, rounding and bias in one operator, with fewer passes over the nodes.

The handlers here replace those of ``quantization.graph_handlers`` when the module is imported, and give the same bits;
the operators are in ``kernels.graph``. Compiled code and recorded steps keep the plain handlers: compilers fuse the
plain chain themselves, and recordings must see every rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cpt_extras.kernels.graph  # noqa: F401 - defines the operators
from cpt_core.graphs.functional import degree_scale
from cpt_core.graphs.graph import Graph
from cpt_core.quantization.fake_quantize import forward_steps, recorded_steps
from cpt_core.quantization.graph_handlers import GraphHandlers
from cpt_core.quantization.op_interception import QuantizedOpsMode
from cpt_core.quantization.precision import HALF, LayerPrecision
from cpt_extras.kernels import gemm_backend, operators

FUSIBLE_GRANULARITIES = (
    "per_tensor",
    "per_position",
)  # granularities with one range for a matrix (N, F)
UNROUNDED = "_before_gradient_rounding"  # attribute of an output: the same tensor before its gradient is rounded


class _ScaleAndAddBias(torch.autograd.Function):
    """``scale_round_add`` of a matmul result, whose gradient is rounded before and after the scaling."""

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
        ctx.filled = recorded_steps(grad_levels)
        return operators.active.scale_round_add(h, scale, bias, levels, granularity)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        levels = forward_steps(ctx.levels, ctx.filled)
        product_grad, bias_grad = operators.active.round_scale_round(
            gradient, ctx.scale, levels, ctx.key
        )
        if ctx.key is not None:
            ctx.key.add_(2)
        return product_grad, None, bias_grad, None, None, None, None


class FusedGraphHandlers(GraphHandlers):
    """Handlers of graph convolutions that use fused operators where these give the same bits."""

    def scaled_operand(
        self,
        precision: LayerPrecision | None,
        role: str,
        x: Tensor,
        scale: Tensor | None,
    ) -> tuple[Tensor, str | None]:
        """Return the rounded ``x * scale``, and the role in which it is still to be rounded: None."""
        if precision is None or scale is None or precision.execution != "simulated":
            return super().scaled_operand(precision, role, x, scale)
        if not _is_fusible(precision, precision.layer_role(role), x):
            return super().scaled_operand(precision, role, x, scale)
        granularity = precision.quantizers[precision.layer_role(role)].grid
        return operators.active.scale_round(
            x, scale, precision.num_steps, granularity
        ), None

    def multiply(self, x: Tensor, weight: Tensor, is_transposed: bool) -> Tensor:
        """Multiply x (N, I) by a weight, with the faster library on this processor."""
        if not is_transposed and gemm_backend.uses_onednn(x, weight.t()):
            return operators.linear(x, weight.t())
        return super().multiply(x, weight, is_transposed)

    def run(self, mode: QuantizedOpsMode, *args: Any, **options: Any) -> Tensor:
        """Run an operation, and attach to its result the tensor before its gradient is rounded."""
        # recordings wait for the gradient of the result itself
        if torch.compiler.is_compiling() or mode.on_operation is not None:
            return super().run(mode, *args, **options)
        layer, name, compute, *rest = args
        computed = []

        def remember(*operands: Any) -> Tensor:
            computed.append(compute(*operands))
            return computed[0]

        y = super().run(mode, layer, name, remember, *rest, **options)
        if computed and y is not computed[0]:
            setattr(y, UNROUNDED, computed[0])
        return y

    def scale_and_add_bias(
        self,
        mode: QuantizedOpsMode,
        function: Any,
        graph: Graph,
        h: Tensor,
        in_exponent: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Scale, round and add the bias in one pass, with the gradient rounding of ``h`` if that is a matmul result."""
        layer = mode.running.stack[-1].interception
        precision = layer.precision
        if (
            precision is None
            or layer.kind != "graph"
            or bias is None
            or not _is_fusible(precision, "input", h)
        ):
            return super().scale_and_add_bias(
                mode, function, graph, h, in_exponent, bias
            )
        quantizer = precision.quantizers["grad"]
        if quantizer.grid not in FUSIBLE_GRANULARITIES:
            return super().scale_and_add_bias(
                mode, function, graph, h, in_exponent, bias
            )
        scale = degree_scale(graph, "in", in_exponent, h)
        rounded_bias = precision.quantize_operand("bias", bias)
        granularity = precision.quantizers["input"].grid
        product = getattr(h, UNROUNDED, None)
        if (
            product is None
            or not precision.active_bits.gradient
            or not product.requires_grad
        ):
            total = operators.active.scale_round_add(
                h, scale, rounded_bias, precision.num_steps, granularity
            )
            return precision.gradient("grad", total)
        key = precision.noise_key if quantizer.rounding == "stochastic" else None
        levels = precision.num_steps, granularity, precision.grad_num_steps, key
        return _ScaleAndAddBias.apply(product, scale, rounded_bias, *levels)


def _is_fusible(precision: LayerPrecision, role: str, x: Tensor) -> bool:
    """Return whether fused operators can round an operand: it is rounded now, on a range of its own."""
    precision.require_bits()
    if torch.compiler.is_compiling() or precision.is_observed or x.dtype in HALF:
        return False
    if not precision.active_bits.activation or x.numel() == 0:
        return False
    precision.follow(x)
    quantizer = precision.quantizers[role]
    return (
        quantizer.grid in ("per_row", *FUSIBLE_GRANULARITIES) and not quantizer.running
    )


FusedGraphHandlers().register()
