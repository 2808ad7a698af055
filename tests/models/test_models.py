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
    torch.manual_seed(0)
    channels, size = (1, 8) if name.startswith("mlp") else (3, 32)
    classes, count = PARAMETERS.get(name, (7, None))
    model = MODELS[name](channels, size, classes)
    assert count in (None, sum(p.numel() for p in model.parameters()))
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, classes)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "preset", "kept"),
    [
        ("resnet74", "cifar", ["fc"]),
        ("mobilenetv2", "cifar", ["fc"]),
        (
            "resnet18",
            "imagenet",
            ["conv1", *(f"layer{i}.0.downsample.0" for i in (2, 3, 4)), "fc"],
        ),
    ],
)
def test_model_presets_keep_layers_in_float32(name, preset, kept):
    rows = summary(quantize_(MODELS[name](3, 32, 10), preset)).float32
    assert [r.name for r in rows if r.kind in ("Conv2d", "Linear")] == kept


def test_model_initialisation_has_expected_variance():
    torch.manual_seed(0)
    model = MODELS["resnet74"](3, 32, 10)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    for conv in (m for m in convolutions if m.weight.numel() > 5_000):
        k, out = conv.kernel_size[0], conv.out_channels
        assert conv.weight.std().item() == pytest.approx(
            math.sqrt(2 / (k * k * out)), rel=0.05
        )
    assert model.fc.weight.std().item() == pytest.approx(
        math.sqrt(2 / (64 * 10)), rel=0.1
    )
    assert not model.fc.bias.any()
    assert all(m.bias is None for m in convolutions)
