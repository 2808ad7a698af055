"""Compiled code computes what eager code does, bit for bit: in float32 under autocast, and with the same noise."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import OnRing, Ran, identical
from torch import nn

from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import precision

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
PRODUCTS += ("cpt::lstm_forward", "cpt::lstm_backward")
LADDERS = {"activation": {6: "affine6:hadamard=8"}, "weight": {6: "affine6:hadamard=8"}, "gradient": None}
STOCHASTIC = QuantConfig(aggregation="quantized")
needs_order = pytest.mark.skipif(
    not fake_quantize.COMPILED_KEYS_COUNT, reason="compilers of this release take other noise"
)


class First(nn.Module):
    """A module whose result is the first of another's."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def attention():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=16, num_attention_heads=2, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "eager"
    return First(BertSelfAttention(config))


KINDS = {
    "linear": (lambda: nn.Linear(8, 6), (5, 8)),
    "sequences": (lambda: nn.Linear(8, 6, bias=False), (2, 5, 8)),
    "rotated": (lambda: nn.Linear(8, 6), (5, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 4, 3, groups=2), (2, 2, 7, 7)),
    "lstm": (lambda: First(nn.LSTM(5, 4, bidirectional=True)), (3, 3, 5)),
    "attention": (attention, (2, 6, 16)),
    "gcn": (lambda: OnRing(GraphConv(4, 3), "csr"), (6, 4)),  # eager code counts its degrees: else torch compiles twice
    "sage": (lambda: OnRing(SAGEConv(3, 4), "csr"), (6, 3)),
    "called twice": (Twice, (5, 8)),
}
HALF = torch.bfloat16  # the type is a parameter of the same code


class Side(nn.Module):
    """Layers of several kinds beside each other: they are compiled at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict()
        for kind in KINDS:
            config = replace(STOCHASTIC, ladder=LADDERS) if kind == "rotated" else STOCHASTIC
            self.parts[kind] = quantize_(nn.Sequential(KINDS[kind][0]()), config)

    def forward(self, inputs):
        return {kind: part(inputs[kind]) for kind, part in self.parts.items()}


@pytest.fixture
def compiled():
    from torch._dynamo import config, reset  # slow to import

    reset()
    with config.patch(allow_rnn=True):
        yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    reset()


def left_by_a_step(model, call, seed):
    """Return what it leaves of every kind of layer, and the types of what its backward pass multiplies."""
    model.zero_grad()
    torch.manual_seed(seed)
    inputs = {kind: torch.randn(shape, requires_grad=True) for kind, (_, shape) in KINDS.items()}
    with torch.autocast("cpu", HALF):
        outputs = call(inputs)
    with Ran() as ran:
        sum(y.float().cos().sum() for y in outputs.values()).backward()
    return {
        kind: [
            outputs[kind].detach(), inputs[kind].grad, *(p.grad for p in part.parameters()),
            *(p.noise_key.clone() for p in layer_precisions(part).values()),
        ]
        for kind, part in model.parts.items()
    }, {t.dtype for name, given in ran.calls if name in PRODUCTS for t in given if t.is_floating_point()}  # fmt: skip


@pytest.mark.slow
@needs_order
def test_under_autocast_both_passes_are_those_of_eager_code(compiled):
    eager = Side()
    other = copy.deepcopy(eager)
    call = compiled(other)
    with precision(eager, 6, q_grad=4), precision(other, 6, q_grad=4):
        for step in range(2):
            expected, _ = left_by_a_step(eager, eager, step)
            found, types = left_by_a_step(other, call, step)
            assert types == {torch.float32}
            assert found["linear"][0].dtype == HALF
            for kind, tensors in found.items():
                assert identical(tensors, expected[kind]), (kind, step)


@needs_order
def test_backward_passes_that_wait_for_each_other_draw_what_those_of_eager_code_do(compiled):
    eager = quantize_(nn.Sequential(nn.Linear(8, 8)))
    other = copy.deepcopy(eager)
    for model, call in ((eager, eager), (other, compiled(other))):
        with precision(model, 8, q_grad=2):
            (call(torch.linspace(0, 1, 8)).cos().sum() + call(torch.linspace(-1, 2, 8)).cos().sum()).backward()
    assert identical([p.grad for p in eager.parameters()], [p.grad for p in other.parameters()])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_older_compilers_draw_in_the_forward_pass(rounding, compiled, monkeypatch):
    monkeypatch.setattr(fake_quantize, "COMPILED_KEYS_COUNT", False)
    model = quantize_(nn.Linear(8, 8), QuantConfig().with_gradient_rounding(rounding))
    key = int(model.precision.noise_key)
    with precision(model, 8, q_grad=2):
        y = compiled(model)(torch.linspace(0, 1, 8))
        assert int(model.precision.noise_key) == key + (rounding == "stochastic")
        y.cos().sum().backward()
        assert int(model.precision.noise_key) == key + (rounding == "stochastic")
