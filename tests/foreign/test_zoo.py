"""Models that nobody here wrote: what is listed as quantised runs quantised, and what runs is priced.

Each is small, made from its library's own code without weights, and takes one training step at 2 bits.
"""

import warnings

import pytest
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

from cpt_core.bitops.copies import floating_in
from cpt_core.inspecting import check as checking
from cpt_core.inspecting.check import check
from cpt_core.inspecting.summary import summary
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.coverage import QuantizationWarning
from cpt_core.quantization.scheduler import precision

vision = torchvision.models
BLOCK = vision.convnext.CNBlockConfig
IMAGE = lambda: (torch.randn(2, 3, 32, 32),)  # noqa: E731
TOKENS = lambda: (torch.randint(1, 60, (2, 7)),)  # noqa: E731
ROWS = lambda: (torch.randn(9, 8),)  # noqa: E731
SEQUENCES = lambda: (torch.randn(3, 7, 8),)  # noqa: E731
WINDOWS = {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def hf(name, **sizes):
    def make():
        kind = getattr(transformers, name)
        return kind(kind.config_class(**{**SIZES, **sizes}))

    return make


class Past(nn.Module):
    """Uses a child's weight past the child's forward, as it is or standardised."""

    def __init__(self, read):
        super().__init__()
        self.read, self.a, self.b = read, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.a(x), self.read(self.b.weight))


class Tied(nn.Module):
    """An output layer with the weight of an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.hidden(self.embedding(x)))


class After(nn.Module):
    """A linear layer, then another module, of whose results the first counts."""

    def __init__(self, inner):
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), inner

    def forward(self, x):
        y = self.inner(self.linear(x))
        return y[0] if isinstance(y, tuple) else y


MODELS = {
    "conv1d": (lambda: After(nn.Conv1d(7, 4, 3, padding=1, padding_mode="circular")), SEQUENCES),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2)), lambda: (torch.randn(2, 3, 4, 4, 4),)),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2)), IMAGE),
    "lstm": (lambda: After(nn.LSTM(8, 5, 2, bidirectional=True)), SEQUENCES),
    "lstm_projection": (lambda: After(nn.LSTM(8, 5, proj_size=2)), SEQUENCES),
    "gru": (lambda: After(nn.GRU(8, 5)), SEQUENCES),
    "attention": (lambda: After(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), SEQUENCES),
    "weight_norm": (lambda: After(nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))), ROWS),
    "tied": (Tied, TOKENS),
    "past": (lambda: Past(lambda w: w), ROWS),
    "standardised": (lambda: Past(lambda w: (w - w.mean()) / w.std()), ROWS),
    "resnet18": (vision.resnet18, IMAGE),
    "mobilenet_v3": (vision.mobilenet_v3_small, IMAGE),
    "efficientnet": (vision.efficientnet_b0, IMAGE),
    "shufflenet": (vision.shufflenet_v2_x0_5, IMAGE),
    "squeezenet": (vision.squeezenet1_1, IMAGE),
    "convnext": (
        lambda: vision.ConvNeXt([BLOCK(8, 16, 1), BLOCK(16, None, 1)]),
        IMAGE,
    ),
    "densenet": (lambda: vision.DenseNet(8, (2, 2), 16), IMAGE),
    "swin": (lambda: vision.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4]), IMAGE),
    "vit": (lambda: vision.VisionTransformer(32, 8, 2, 2, 16, 32), IMAGE),
    "r3d_18": (vision.video.r3d_18, lambda: (torch.randn(2, 3, 4, 16, 16),)),
    "lraspp": (lambda: vision.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None), IMAGE),
    "bert": (hf("BertModel"), TOKENS),
    "roberta": (hf("RobertaModel"), TOKENS),
    "distilbert": (hf("DistilBertModel", dim=16, n_heads=2, n_layers=2, hidden_dim=32), TOKENS),
    "albert": (hf("AlbertModel", embedding_size=8), TOKENS),
    "hf_vit": (hf("ViTModel", image_size=32, patch_size=8), IMAGE),
    "gpt2": (hf("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0), TOKENS),
    "llama": (hf("LlamaModel"), TOKENS),
    "t5": (hf("T5EncoderModel", d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2), TOKENS),
    "deberta": (hf("DebertaV2Model", relative_attention=True, position_buckets=4, pos_att_type=["p2c"]), TOKENS),
    "llama_eager": (hf("LlamaModel", attn_implementation="eager"), TOKENS),
    "hf_swin": (lambda: transformers.SwinModel(transformers.SwinConfig(**WINDOWS)), IMAGE),
    "mamba": (hf("MambaModel", state_size=4), TOKENS),
    "mixtral": (hf("MixtralModel", num_local_experts=2, num_key_value_heads=2), TOKENS),
}

# what is in float32 by name: products of these modules
FLOAT32 = {}


class Levels(checking._Watch):
    """The same watch, which looks at the numbers too: what it takes for quantised holds four values at 2 bits."""

    def on_grid(self, operand):
        marked = super().on_grid(operand)
        if marked:
            columns = operand.mT.reshape(-1, operand.shape[-2])
            slices = (operand.reshape(1, -1), operand.reshape(-1, operand.shape[-1]), operand.flatten(1), columns)
            assert any((rows.sort(1).values.diff(dim=1) != 0).sum(1).max() < 4 for rows in slices)
        return marked


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_what_is_listed_as_quantised_runs_quantised(name, monkeypatch):
    monkeypatch.setattr(checking, "BITS", 2)
    monkeypatch.setattr(checking, "_Watch", Levels)
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", QuantizationWarning)
        quantize_(model)
        with precision(model, 2, 2):
            y = model(*x)
            sum(t.sum() for t in floating_in(y)).backward()
    assert not [w for w in seen if w.category is QuantizationWarning]

    found = check(model, x)
    assert found.ok, found
    assert {p.layer for p in found.float32} == set(FLOAT32.get(name, ())), found
    assert not found.unused
    assert {row.name for row in summary(model).quantized} >= {p.layer for p in found.products if p.quantized}
