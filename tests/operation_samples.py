"""Samples of operations: modules with matmuls, their inputs, MACs and ranges.

``OPERATIONS`` are torch functions in a module of a user, ``MODELS`` whole models. A
property that all matmuls have is one test over such a list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
import transformers.integrations.moe  # which registers an operator
from helpers import FunctionModule
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_core.models.lstm_lm import LanguageModel
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.roles import Quantizer
from cpt_extras.formats.tensor_rounding import quantize

Dims = tuple[int, ...]
ALONG = Quantizer("per_row", zero_point=True)


def round_along(x: Tensor, dims: Dims, bits: int) -> Tensor:
    """Return a tensor in float64, rounded with one range for all elements along dims.

    The gradient passes straight through.
    """
    dims = tuple(dim % x.dim() for dim in dims)
    order = [dim for dim in range(x.dim()) if dim not in dims] + [*dims]
    values = x.detach().float().permute(order)
    rows = values.flatten(x.dim() - len(dims))
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    rounded = quantize(rows, bits, ALONG).reshape(values.shape).permute(inverse)
    return x.double() + (rounded.double() - x.double()).detach()


@dataclass(frozen=True)
class OperationSample:
    """A function of a module with the parameters ``w`` and ``b``, and of inputs.

    Attributes:
        function: (module, *inputs) -> output.
        weight: shape of ``w``.
        inputs: shapes of the inputs.
        macs: MACs of every matmul of the forward pass, in their order.
        ranges: dimensions along which elements of ``w`` and of every input share a
            range; None for what is not rounded.
        formula: (bits, module, *inputs) -> output in float64, where intermediate
            results are rounded too; None for ``function`` of rounded operands.
        bias: number of elements of ``b``; None for those of the last dimension of
            ``w``.
        has_flops: whether torch's FlopCounterMode counts all matmuls.
    """

    function: Callable[..., Tensor]
    weight: Dims
    inputs: list[Dims]
    macs: list[int]
    ranges: list[Dims | None]
    formula: Callable[..., Tensor] | None = None
    bias: int | None = None
    has_flops: bool = True

    def build(self, config: Any = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """Return the converted module, a child of a converted model, and its inputs."""
        torch.manual_seed(0)
        size = self.weight[-1] if self.bias is None else self.bias
        parameters = {
            "w": nn.Parameter(torch.randn(self.weight)),
            "b": nn.Parameter(torch.randn(size)),
        }
        inputs = tuple(torch.randn(size, requires_grad=True) for size in self.inputs)
        model = nn.Sequential(FunctionModule(self.function, **parameters))
        return quantize_(model, config)[0], inputs

    def expected(self, module: nn.Module, inputs: tuple[Tensor, ...], bits: int):
        """Return the output in float64 of operands that are rounded to bits."""
        if self.formula is not None:
            return self.formula(bits, module, *inputs)
        weight, *others = (
            x.double() if dims is None else round_along(x, dims, bits)
            for x, dims in zip((module.w, *inputs), self.ranges, strict=True)
        )
        bias = round_along(module.b, (0,), bits)
        rounded = FunctionModule(self.function)
        rounded.w, rounded.b = weight, bias
        return self.function(rounded, *others)


def attend(bits, query, key, value, scale=None, mask=0.0):
    """Return attention in float64 with rounded operands and probabilities."""
    query, key, value = (round_along(x, (-1,), bits) for x in (query, key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return round_along((scores + mask).softmax(-1), (-1,), bits) @ value


def chain_of_three(bits, m, x, y):
    first = round_along(x, (1,), bits) @ round_along(m.w, (0,), bits)
    return round_along(first, (1,), bits) @ round_along(y, (1,), bits)


def einsum_of_three(bits, m, x, y):
    first = round_along(x, (1,), bits) @ round_along(m.w, (0,), bits)
    return (round_along(first, (1,), bits) * round_along(y, (1,), bits)).sum(1)


def grouped_by_expert(bits, m, x):
    """Return the first four rows times one expert, the others times the next."""
    x, w = round_along(x, (1,), bits), round_along(m.w, (1,), bits)
    return torch.cat([x[:4] @ w[0], x[4:] @ w[1]])


def offsets():
    """Return where the rows of both experts end."""
    return torch.tensor([4, 8], dtype=torch.int32)


def lower(n):
    """Return a causal mask that is added to scores."""
    return torch.full((n, n), -torch.inf).triu(1)


sdpa = F.scaled_dot_product_attention
X, Y = (5, 6), (2, 3, 6)  # (rows, features), (batch, tokens, features)
NO_WEIGHT = (1, 1)
LAST, FIRST, WHOLE = (-1,), (0,), (0, 1, 2)
SCORES = [None, LAST, LAST]

OPERATIONS = {
    "matmul": OperationSample(lambda m, x: x @ m.w, (6, 4), [Y], [144], [FIRST, LAST]),
    "weight first": OperationSample(
        lambda m, x: m.w @ x, (4, 5), [X], [120], [LAST, FIRST]
    ),
    "weight transposed": OperationSample(
        lambda m, x: x.matmul(m.w.t()), (4, 6), [X], [120], [LAST, LAST]
    ),
    "two inputs": OperationSample(
        lambda m, x, y: x @ y, NO_WEIGHT, [Y, (2, 6, 3)], [108], SCORES
    ),
    "keys": OperationSample(lambda m, x, y: x @ y.mT, NO_WEIGHT, [Y, Y], [108], SCORES),
    "mm": OperationSample(
        lambda m, x: torch.mm(x, m.w), (6, 4), [X], [120], [FIRST, LAST]
    ),
    "bmm": OperationSample(
        lambda m, x, y: x.bmm(y.transpose(1, 2)), NO_WEIGHT, [Y, Y], [108], SCORES
    ),
    "mv": OperationSample(
        lambda m, x: torch.mv(m.w, x),
        (4, 6),
        [(6,)],
        [24],
        [LAST, LAST],
        has_flops=False,
    ),
    "dot": OperationSample(
        lambda m, x: torch.dot(x, m.w), (6,), [(6,)], [6], [LAST, LAST], has_flops=False
    ),
    "addmv": OperationSample(
        lambda m, x: torch.addmv(m.b, m.w, x),
        (4, 6),
        [(6,)],
        [24],
        [LAST, LAST],
        bias=4,
        has_flops=False,
    ),
    "addmm": OperationSample(
        lambda m, x: torch.addmm(m.b, x, m.w), (6, 4), [X], [120], [FIRST, LAST]
    ),
    "addmm, scaled": OperationSample(
        lambda m, x: torch.addmm(m.b, x, m.w, beta=2, alpha=0.5),
        (6, 4),
        [X],
        [120],
        [FIRST, LAST],
    ),
    "baddbmm": OperationSample(
        lambda m, x, y, z: torch.baddbmm(z, x, y.mT, alpha=0.5),
        NO_WEIGHT,
        [Y, Y, (2, 3, 3)],
        [108],
        [None, LAST, LAST, None],
    ),
    "linear": OperationSample(
        lambda m, x: F.linear(x, m.w, m.b), (4, 6), [Y], [144], [LAST, LAST], bias=4
    ),
    "linear, computed weight": OperationSample(
        lambda m, x: F.linear(x, 2 * m.w, m.b),
        (4, 6),
        [Y],
        [144],
        [LAST, WHOLE],
        bias=4,
    ),
    "conv1d": OperationSample(
        lambda m, x: F.conv1d(x, m.w, padding=1), (4, 3, 3), [Y], [432], [(1, 2), (1,)]
    ),
    "conv2d, one image": OperationSample(
        lambda m, x: F.conv2d(x, m.w), (4, 2, 2, 2), [Y], [320], [(1, 2, 3), FIRST]
    ),
    "conv2d in groups": OperationSample(
        lambda m, x: F.conv2d(x, m.w, groups=2, stride=2),
        (4, 1, 2, 2),
        [(3, 2, 5, 5)],
        [192],
        [(1, 2, 3), (1,)],
    ),
    "conv_transpose2d": OperationSample(
        lambda m, x: F.conv_transpose2d(x, m.w, stride=2),
        (2, 4, 2, 2),
        [(3, 2, 5, 5)],
        [2400],
        [(0, 2, 3), (1,)],
    ),
    "bilinear": OperationSample(
        lambda m, x, y: F.bilinear(x, y, m.w),
        (4, 6, 6),
        [X, X],
        [840],
        [(1, 2), LAST, LAST],
        has_flops=False,
    ),
    "einsum, scores": OperationSample(
        lambda m, x, y: torch.einsum("btd,bsd->bts", x, y),
        NO_WEIGHT,
        [Y, Y],
        [108],
        SCORES,
    ),
    "einsum, weight": OperationSample(
        lambda m, x: torch.einsum("btd,dhk->bthk", x, m.w),
        (6, 2, 3),
        [Y],
        [216],
        [FIRST, LAST],
    ),
    "einsum, weight first": OperationSample(
        lambda m, x: torch.einsum("hkd,btd->bthk", m.w, x),
        (2, 3, 6),
        [Y],
        [216],
        [LAST, LAST],
    ),
    "einsum, three": OperationSample(
        lambda m, x, y: torch.einsum("bd,de,be->b", x, m.w, y),
        (6, 6),
        [X, X],
        [180, 30],
        [FIRST, LAST, LAST],
        einsum_of_three,
    ),
    "einsum, dots summed": OperationSample(
        lambda m, x, y: torch.einsum("b...,b...->b", x, y),
        NO_WEIGHT,
        [Y, Y],
        [36],
        [None, (1, 2), (1, 2)],
    ),
    "einsum, implicit": OperationSample(
        lambda m, x: torch.einsum("...d,dk", x, m.w), (6, 4), [Y], [144], [FIRST, LAST]
    ),
    "einsum, heads summed": OperationSample(
        lambda m, x: torch.einsum("bthk,hkd->btd", x, m.w),
        (2, 3, 6),
        [(2, 5, 2, 3)],
        [360],
        [(0, 1), (2, 3)],
    ),
    "tensordot": OperationSample(
        lambda m, x: torch.tensordot(x, m.w, ([1, 2], [1, 0])),
        (6, 3, 4),
        [Y],
        [144],
        [(0, 1), (1, 2)],
    ),
    "inner": OperationSample(
        lambda m, x: torch.inner(x, m.w), (4, 6), [X], [120], [LAST, LAST]
    ),
    "multi_dot": OperationSample(
        lambda m, x, y: torch.linalg.multi_dot([x, m.w, y]),
        (6, 5),
        [X, X],
        [150, 150],
        [FIRST, LAST, LAST],
        chain_of_three,
    ),
    "attention": OperationSample(
        lambda m, x: sdpa(x, x, x),
        NO_WEIGHT,
        [(2, 2, 5, 6)],
        [600, 600],
        [None, LAST],
        lambda bits, m, x: attend(bits, x, x, x),
    ),
    "attention, three inputs": OperationSample(
        lambda m, x, y, z: sdpa(x, y, z),
        NO_WEIGHT,
        [Y, Y, Y],
        [108, 108],
        [None, LAST, LAST, LAST],
        lambda bits, m, x, y, z: attend(bits, x, y, z),
    ),
    "attention, causal": OperationSample(
        lambda m, x: sdpa(x, x, x, is_causal=True, scale=2.0),
        NO_WEIGHT,
        [Y],
        [108, 108],
        [None, LAST],
        lambda bits, m, x: attend(bits, x, x, x, 2.0, lower(3)),
    ),
    "attention, masked": OperationSample(
        lambda m, x: sdpa(x, x, x, x.new_ones(3, 3).tril().bool()),
        NO_WEIGHT,
        [Y],
        [108, 108],
        [None, LAST],
        lambda bits, m, x: attend(bits, x, x, x, None, lower(3)),
    ),
    "attention, added mask": OperationSample(
        lambda m, x, y: sdpa(x, x, x, y),
        NO_WEIGHT,
        [Y, (3, 3)],
        [108, 108],
        [None, LAST, None],
        lambda bits, m, x, y: attend(bits, x, x, x, None, y),
    ),
    "attention, grouped queries": OperationSample(
        lambda m, x, y, z: sdpa(x, y, z, enable_gqa=True),
        NO_WEIGHT,
        [(2, 4, 5, 6), (2, 2, 5, 6), (2, 1, 5, 6)],
        [1200, 1200],
        [None, LAST, LAST, LAST],
        lambda bits, m, x, y, z: attend(
            bits, x, y.repeat_interleave(2, 1), z.repeat_interleave(4, 1)
        ),
    ),
    "experts": OperationSample(
        lambda m, x: torch._grouped_mm(x, m.w, offs=offsets()),
        (2, 16, 8),
        [(8, 16)],
        [1024],
        [(1,), LAST],
        grouped_by_expert,
        has_flops=False,
    ),
    "experts, transformers": OperationSample(
        lambda m, x: torch.ops.transformers.grouped_mm_fallback(x, m.w, offs=offsets()),
        (2, 16, 8),
        [(8, 16)],
        [1024],
        [(1,), LAST],
        grouped_by_expert,
        has_flops=False,
    ),
    "linear by name": OperationSample(
        lambda m, x: F.linear(input=x, weight=m.w), (4, 6), [Y], [144], [LAST, LAST]
    ),
    "matmul by name": OperationSample(
        lambda m, x: torch.matmul(x, other=m.w), (6, 4), [Y], [144], [FIRST, LAST]
    ),
    "mm by name": OperationSample(
        lambda m, x: torch.mm(input=x, mat2=m.w), (6, 4), [X], [120], [FIRST, LAST]
    ),
    "baddbmm by name": OperationSample(
        lambda m, x, y: torch.baddbmm(m.w, batch1=x, batch2=y.mT, beta=0.5, alpha=2),
        (1, 1, 1),
        [Y, Y],
        [108],
        [WHOLE, LAST, LAST],
    ),
    "bilinear by name": OperationSample(
        lambda m, x, y: F.bilinear(x, input2=y, weight=m.w),
        (4, 6, 6),
        [X, X],
        [840],
        [(1, 2), LAST, LAST],
        has_flops=False,
    ),
    "attention by name": OperationSample(
        lambda m, x: sdpa(query=x, value=x, key=x),
        NO_WEIGHT,
        [Y],
        [108, 108],
        [None, LAST],
        lambda bits, m, x: attend(bits, x, x, x),
    ),
}


@dataclass(frozen=True)
class ModelSample:
    """A layer of torch or a whole model.

    Attributes:
        make: returns the float model.
        inputs: returns its positional inputs.
        macs: MACs of all matmuls of a forward pass; None: torch's FlopCounterMode
            counts them.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    macs: int | None = None

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the float model and its inputs."""
        torch.manual_seed(0)
        return self.make(), self.inputs()


BERT_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
}


def sequences():
    return (torch.randn(2, 5, 8),)


def tokens():
    return (torch.ones(2, 7, dtype=torch.int64),)


def random(*shapes: Dims) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that returns random tensors of some shapes."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def after_layer(function, *shape):
    """Return a model that applies a function to a layer's output and a parameter."""
    parts = {"layer": nn.Linear(8, 8), "weight": nn.Parameter(torch.randn(shape))}
    return FunctionModule(lambda m, x: function(m.layer(x), m.weight), **parts)


def parent_of_weights():
    """Return a model that multiplies by a child's weight, as Swin does."""

    def forward(m, x):
        q, k, v = F.linear(x, m.attn.qkv.weight, m.attn.qkv.bias).chunk(3, -1)
        return m.out(sdpa(q, k, v))

    attention = FunctionModule(None, qkv=nn.Linear(8, 24))
    return FunctionModule(forward, attn=attention, out=nn.Linear(8, 3))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def bert(implementation="eager", **options):
    config = hf.BertConfig(**{**BERT_SIZES, **options})
    return hf.BertForSequenceClassification._from_config(
        config, attn_implementation=implementation
    )


def unknown_attention():
    """Return a model configured for FlashAttention 2, which need not be installed."""
    model = bert()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def gpt2():
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
    )


def llama():
    sizes = BERT_SIZES | {"num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2))


def mixtral():
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**BERT_SIZES, num_key_value_heads=2, num_local_experts=4)
    )


# per token: four layers of attention, a router, two experts of three layers
MIXTRAL_LAYERS = 14 * (4 * 16 * 16 + 4 * 16 + 2 * 3 * 16 * 24)
MIXTRAL_ATTENTION = 2 * 2 * 7 * 7 * 16
MIXTRAL_VOCABULARY = 14 * 16 * 50

MODELS = {
    "functions after a layer": ModelSample(
        lambda: after_layer(lambda x, w: sdpa(x @ w, x, x), 8, 8), sequences
    ),
    "matmul with a vector": ModelSample(
        lambda: after_layer(torch.matmul, 8), sequences, 10 * 8 * 8 + 10 * 8
    ),
    "weight of a child": ModelSample(parent_of_weights, sequences),
    "Bilinear": ModelSample(
        lambda: nn.Bilinear(8, 8, 3),
        random((2, 5, 8), (2, 5, 8)),
        10 * (3 * 8 * 8 + 3 * 8),
    ),
    "ConvTranspose2d": ModelSample(
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), random((2, 3, 6, 6))
    ),
    "ConvTranspose1d in groups": ModelSample(
        lambda: nn.ConvTranspose1d(6, 4, 3, groups=2), random((2, 6, 5))
    ),
    "GRU": ModelSample(
        lambda: nn.GRU(8, 6, num_layers=2, bidirectional=True), sequences
    ),
    "RNN": ModelSample(lambda: nn.RNN(8, 6, batch_first=True), sequences),
    "LSTM with projections": ModelSample(
        lambda: nn.LSTM(8, 6, proj_size=2, num_layers=3, bidirectional=True), sequences
    ),
    "GRUCell": ModelSample(lambda: nn.GRUCell(8, 6), random((5, 8))),
    "LSTMCell": ModelSample(lambda: nn.LSTMCell(8, 6), random((5, 8))),
    "MultiheadAttention": ModelSample(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        random((5, 2, 8), (3, 2, 6), (3, 2, 4)),
        2 * (5 * 8 * 8 + 3 * 6 * 8 + 3 * 4 * 8 + 2 * 5 * 3 * 8 + 5 * 8 * 8),
    ),
    "TransformerEncoder": ModelSample(encoder, sequences),
    "language model": ModelSample(
        lambda: LanguageModel(11, 6, 8),
        lambda: (*tokens(), None),
        14 * (4 * 8 * (6 + 8) + 8 * 11),
    ),
    "BERT": ModelSample(bert, tokens),
    "BERT, fused": ModelSample(lambda: bert("sdpa"), tokens),
    "DeBERTa": ModelSample(
        lambda: hf.DebertaV2Model(hf.DebertaV2Config(**BERT_SIZES, **DISENTANGLED)),
        tokens,
    ),
    "GPT-2": ModelSample(gpt2, tokens),
    "Llama": ModelSample(llama, tokens),
    "Mixtral": ModelSample(
        mixtral, tokens, MIXTRAL_LAYERS + MIXTRAL_ATTENTION + MIXTRAL_VOCABULARY
    ),
}
