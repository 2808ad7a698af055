"""The MACs of well-known models at full size, against those that torchvision publishes, and against formulas."""

import pytest
import torch
import torchvision
import transformers

from cpt_core.bitops.trace import trace
from cpt_core.models.resnet import CifarResNet

# one of every kind of product: plain, grouped and depthwise convolutions, linear layers, attention in windows and whole
PUBLISHED = "alexnet mobilenet_v3_large resnet18 resnext50_32x4d shufflenet_v2_x1_0 swin_t vit_b_16".split()
ELEMENTWISE = {"BatchNorm2d", "LayerNorm", "LayerNorm2d", "LlamaRMSNorm"}


def macs_of(make, *inputs):
    """Count the products of one forward pass, on ``meta``: nothing is computed."""
    with torch.device("meta"):
        model, given = make(), tuple(make_input() for make_input in inputs)
    return sum(call.macs for call in trace(model.eval(), given)[0] if call.kind not in ELEMENTWISE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvision(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    counted = macs_of(lambda: torchvision.models.get_model(name), lambda: torch.rand(1, 3, 224, 224))
    assert round(counted / 1e9, 3) == published["_ops"]


def test_residual_networks_of_cifar():
    blocks, macs = (56 - 2) // 6, 32 * 32 * 9 * 3 * 16
    for width, side in ((16, 32), (32, 16), (64, 8)):
        macs += side * side * 9 * width * width * 2 * blocks
        if width > 16:  # the first convolution and the shortcut come from half the width
            macs += side * side * (-9 * width * width // 2 + width * width // 2)
    counted = macs_of(lambda: CifarResNet(blocks, 10), lambda: torch.rand(1, 3, 32, 32))
    assert counted == macs + 64 * 10


def tokens(count):
    return lambda: torch.zeros(1, count, dtype=torch.int64)


def test_bert_base():
    t, d = 128, 768
    model = lambda: transformers.BertModel(transformers.BertConfig())  # noqa: E731
    assert macs_of(model, tokens(t)) == 12 * (4 * t * d * d + 2 * t * t * d + 8 * t * d * d) + d * d


def test_gpt_2_small():
    t, d = 1024, 768
    model = lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config())  # noqa: E731
    assert macs_of(model, tokens(t)) == 12 * (12 * t * d * d + 2 * t * t * d) + t * d * 50257


def test_a_block_of_llama():
    t, d, heads, groups, inner = 64, 512, 8, 2, 1376
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=d, num_hidden_layers=3, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=inner,
    )  # fmt: skip
    block = t * d * (2 * d + 2 * d * groups // heads + 3 * inner) + 2 * t * t * d
    assert macs_of(lambda: transformers.LlamaModel(config), tokens(t)) == 3 * block
