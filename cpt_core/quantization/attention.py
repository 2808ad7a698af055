"""Quantised self-attention for encoder models of transformers.  Paper: section 4.4 (multilingual BERT on XNLI).

Both products of attention get quantised operands; scaling, mask, softmax and dropout stay in float32. The linear layers
around them are ordinary ``QuantLinear`` layers.

    scores = q(Q) q(K')     P = dropout(softmax(scores / sqrt(d) + mask))     context = q(P) q(V)

With ``execution="integer"`` codes are kept between the passes, and products run on them where they have an integer
form: the gradients of queries and probabilities, and all six with shared steps. It saves memory, not time, so that
"auto" leaves them simulated.

transformers chooses the function that computes attention by name, from a model's configuration. A converted module is
given a configuration of its own that names the function here; "eager" and "sdpa" models are converted alike.

Imported by ``quantize_`` only when the program uses transformers itself.

Shapes: B batch, A heads, T tokens, D features of a head.
"""

from __future__ import annotations

import copy
import importlib
import sys
from contextlib import nullcontext
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt_core.kernels.traced import matmul
from cpt_core.quantization.integer import GradientRounding, first_order, product, saved_operands
from cpt_core.quantization.layers import PASSES, QuantizedLayer
from cpt_core.quantization.precision import LayerPrecision

NAME = "cpt_quantized"
CONVERTIBLE = ("eager", "sdpa")  # the others want other masks

# module of transformers -> its class of self-attention; all of these were tried
SELF_ATTENTION = {
    "bert": "BertSelfAttention",
    "roberta": "RobertaSelfAttention",
    "xlm_roberta": "XLMRobertaSelfAttention",
    "camembert": "CamembertSelfAttention",
    "electra": "ElectraSelfAttention",
    "distilbert": "DistilBertSelfAttention",
    "albert": "AlbertAttention",
    "vit": "ViTAttention",
}


def quantized_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend; called by transformers as its own attention functions are.

    Args:
        module: a converted self-attention module.
        query: (B, A, T, D), as ``key`` and ``value``.
        key: quantised after it is transposed: one range per head and feature, over the tokens.
        value: one range per token.
        attention_mask: added to the scores, or boolean with False for what is not seen, or None.
        scaling: None takes 1 / sqrt(D).
        dropout: share of the probabilities that is dropped, before they are quantised.
        kwargs: what other attention functions need.

    Returns:
        Context (B, T, A, D) and probabilities (B, A, T, T).

    Differs: the authors have a layer of their own; its numbers are the same (tested).
    """
    half = module.precision.half_dtype(query)
    if half is not None and module.precision.quantizes:
        query, key, value = query.float(), key.float(), value.float()
    with nullcontext() if half is None else torch.autocast(query.device.type, enabled=False):
        context, probabilities = _attend(module, query, key, value, attention_mask, scaling, dropout)
    return (context, probabilities) if half is None else (context.to(half), probabilities.to(half))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    p = module.precision
    scores = _multiply(p, ("query", "key"), query, key.transpose(2, 3))
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.dropout(scores.softmax(-1), dropout, module.training)
    context = _multiply(p, ("probabilities", "value"), probabilities, value)
    return context.transpose(1, 2).contiguous(), probabilities


def _multiply(p: LayerPrecision, roles: tuple[str, str], a: Tensor, b: Tensor) -> Tensor:
    if p.execution == "integer" and p.on_codes(a):
        return product_on_codes(p, roles, a, b)
    return p.multiplied(matmul, p.operand(roles[0], a), p.operand(roles[1], b))


@torch.compiler.disable
def product_on_codes(precision: LayerPrecision, roles: tuple[str, str], a: Tensor, b: Tensor) -> Tensor:
    """Return the products (..., M, N) of a (..., M, K) and b (..., K, N), both quantised, each in its role."""
    return _Product.apply(a, b, precision, roles)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, precision: LayerPrecision, roles: tuple[str, str]) -> Tensor:
        a_, b_ = (precision.encoded(role, x) for role, x in zip(roles, (a, b), strict=True))
        ctx.save_for_backward(*a_, *b_)
        ctx.gradient = GradientRounding(precision)
        return product(a_, b_)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved_operands(ctx)
        g = ctx.gradient(gradient)
        of_a, of_b = ctx.needs_input_grad[:2]
        return product(g, b.t()) if of_a else None, product(a.t(), g) if of_b else None, None, None


class _QuantAttention(QuantizedLayer):
    """Self-attention with both products quantised; no running ranges: the tensors at hand in evaluation too."""

    KIND = "attention"
    SPLITS = True
    SUMS: ClassVar = {"key": -2, "value": -2}
    config: Any
    float_config: Any

    @classmethod
    def why_not(cls, module: Any) -> str:
        """Only encoders: the range of a key over the tokens would tell a decoder about the future."""
        causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
        return "its attention is causal" if causal else ""

    @classmethod
    def check(cls, module: Any) -> None:
        """Refuse fused kinds of attention that cannot be replaced."""
        kind = module.config._attn_implementation
        if kind is not None and kind not in CONVERTIBLE:
            raise ValueError(
                f"the model computes attention with {kind!r}, which cannot be quantised; load it with "
                f"attn_implementation='eager' (or 'sdpa')"
            )

    @classmethod
    def from_float(cls, module: Any, *args: Any, **kwargs: Any) -> Self:
        """Convert in place, and let this module alone use ``quantized_attention``."""
        ALL_ATTENTION_FUNCTIONS.register(NAME, quantized_attention)
        config = copy.copy(module.config)  # first: what fails leaves the module as it was
        super().from_float(module, *args, **kwargs)
        module.float_config, module.config = module.config, config
        module.config._attn_implementation = NAME
        return module

    def simulated_products(self) -> dict[str, str]:
        """Return which products are simulated, with the reason; "weight" are the gradients of keys and values."""
        if self.precision.execution == "auto":
            return dict.fromkeys(PASSES, "many small products are no faster on codes")
        reasons = {
            "forward": {"key": "keys have a range per feature", "value": "values have one per token"},
            "weight": dict.fromkeys(("query", "probabilities", "grad"), "the tokens have ranges of their own"),
        }
        by_row = {r for r, q in self.precision.quantizers.items() if q.granularity in ("per_row", "per_position")}
        found = {k: [why for role, why in of.items() if role in by_row] for k, of in reasons.items()}
        return {k: ", ".join(dict.fromkeys(why)) for k, why in found.items() if why}

    def to_float(self) -> None:
        """Undo ``from_float``, in place."""
        self.config = self.float_config
        del self.float_config
        super().to_float()


def __getattr__(name: str) -> Any:
    """Make the quantised form of a class of ``SELF_ATTENTION`` when it is first asked for; unpickling asks, too."""
    for module, float_name in SELF_ATTENTION.items():
        if name == f"Quant{float_name}":
            kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), float_name)
            about = {"FLOAT": kind, "__module__": __name__, "__doc__": f"``{float_name}`` with quantised products."}
            globals()[name] = type(name, (_QuantAttention, kind), about)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def conversions() -> dict[type[nn.Module], type[QuantizedLayer]]:
    """Return what can be converted, of the models that the program has imported."""
    own = sys.modules[__name__]
    used = [m for m in SELF_ATTENTION if f"transformers.models.{m}.modeling_{m}" in sys.modules]
    made = [getattr(own, f"Quant{SELF_ATTENTION[module]}") for module in used]
    return {quantized.FLOAT: quantized for quantized in made}
