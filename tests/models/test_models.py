"""Networks of the paper: parameters, layers in float32, initialisation."""

import math

import pytest
import torch
from torch import nn

from cpt_core.bitops.summary import summary
from cpt_core.models import MODELS
from cpt_core.quantization.convert import quantize_

PARAMETERS = {  # name -> classes, parameters
    "resnet74": (10, 1_147_418),
    "resnet152": (10, 2_411_226),
    "mobilenetv2": (10, 2_296_922),
    "resnet18": (1000, 11_689_512),
    "resnet34": (1000, 21_797_672),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_paper_parameters_and_train(name):
    """Train two images, of a smaller size for the deep networks."""
    torch.manual_seed(0)
    channels, size = (1, 8) if name.startswith("mlp") else (3, 16)
    num_classes, num_parameters = PARAMETERS.get(name, (7, None))
    model = MODELS[name](channels, size, num_classes)
    if num_parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == num_parameters
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, num_classes)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


SHORTCUTS = [f"layer{i}.0.downsample.0" for i in (2, 3, 4)]


@pytest.mark.parametrize(
    ("name", "preset", "names"),
    [
        ("resnet74", "cifar", ["fc"]),
        ("mobilenetv2", "cifar", ["fc"]),
        ("resnet18", "imagenet", ["conv1", *SHORTCUTS, "fc"]),
    ],
)
def test_model_presets_keep_layers_in_float32(name, preset, names):
    with torch.device("meta"):
        model = quantize_(MODELS[name](3, 32, 10), preset)
    rows = summary(model).float32
    assert [row.name for row in rows if row.kind in ("Conv2d", "Linear")] == names


def test_model_initialisation_has_expected_variance():
    torch.manual_seed(0)
    model = MODELS["resnet74"](3, 32, 10)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    for conv in convolutions:
        if conv.weight.numel() > 5_000:
            fan_out = conv.kernel_size[0] ** 2 * conv.out_channels
            std = math.sqrt(2 / fan_out)
            assert conv.weight.std().item() == pytest.approx(std, rel=0.05)
    std = math.sqrt(2 / (64 * 10))
    assert model.fc.weight.std().item() == pytest.approx(std, rel=0.1)
    assert not model.fc.bias.any()
    assert all(m.bias is None for m in convolutions)
