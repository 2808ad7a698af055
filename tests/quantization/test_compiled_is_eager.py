"""Compiled code computes what eager code does, bit for bit: in float32 under autocast, and with the same noise."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.formats.format import Format
from cpt_core.formats.ladder import FormatLadder
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.scheduler import precision

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "lstm_forward", "lstm_backward")
ROTATED = FormatLadder({6: Format.affine(6, hadamard=8)})


class OnRing(nn.Module):
    """A graph convolution on a ring of six nodes."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.graph = layer, Graph.from_edges(torch.arange(6), torch.arange(6).roll(1), 6, backend="csr")

    def forward(self, x):
        return self.layer(self.graph, x)


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


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3, bias=False)), (5, 8)),
    "sequences": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3, bias=False)), (2, 5, 8)),
    "rotated": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), (5, 8)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 3, 3)), (2, 2, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2)), (2, 2, 7, 7)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 1, 2)), (2, 2, 4, 4, 4)),
    "lstm": (lambda: First(nn.LSTM(5, 4, num_layers=2, bidirectional=True)), (6, 3, 5)),
    "attention": (attention, (2, 6, 16)),
    "graph": (lambda: nn.Sequential(OnRing(GraphConv(4, 3)), nn.Tanh(), OnRing(SAGEConv(3, 2))), (6, 4)),
    "called twice": (Twice, (5, 8)),
}


class Operands(TorchDispatchMode):
    """Notes the types of what products multiply."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            self.types |= {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        return func(*args, **(kwargs or {}))


def made(kind, config):
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    if kind == "rotated":
        config = QuantConfig(quantizers=config.quantizers, ladder={"activation": ROTATED, "weight": ROTATED, "gradient": None})
    return quantize_(make(), config), shape


@pytest.fixture
def compiled():
    from torch._dynamo import config, reset  # slow to import

    reset()
    with config.patch(allow_rnn=True):
        yield lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    reset()


def trained(model, call, shape, half=None, steps=2):
    """Return what every step leaves: outputs, gradients, keys; and the types of what the backward pass multiplies."""
    found, seen = [], set()
    with precision(model, 6, q_grad=4):
        for step in range(steps):
            model.zero_grad()
            x = torch.randn(shape, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with nullcontext() if half is None else torch.autocast("cpu", half):
                y = call(x)
            with Operands() as operands:
                y.float().cos().sum().backward()
            seen |= operands.types
            keys = [p.noise_key.clone() for p in layer_precisions(model).values()]
            found.append([y.detach(), x.grad, *(p.grad for p in model.parameters()), *keys])
    return found, seen


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("kind", list(MODELS))
def test_under_autocast_both_passes_are_float32(kind, half, compiled):
    eager, shape = made(kind, QuantConfig().with_gradient_rounding("nearest"))
    other = copy.deepcopy(eager)
    expected, _ = trained(eager, eager, shape, HALF[half])
    found, types = trained(other, compiled(other), shape, HALF[half])
    assert types == {torch.float32}
    for step in range(len(expected)):
        assert all(map(torch.equal, found[step], expected[step])), step
    assert found[0][0].dtype == HALF[half]
