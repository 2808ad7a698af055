"""Gradient matmuls that ``check`` lists and the "per_op" convention prices, against those that run."""

import importlib

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.ledger import BitOpsLedger

# transposed convolutions and attention that was left out stay in float32, which is what they are here for
pytestmark = pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")


def backward_macs(found, layer):
    return sum(e.macs for e in found.operations if e.backward and e.layer == layer)


def priced(model, inputs, layer):
    """Return the MACs of both gradient matmuls, from bit operations at 32 bits."""
    bitops = count_bitops(model, inputs, convention="per_op").bitops[layer]
    return (bitops.get("error", 0) + bitops.get("weight", 0)) / 32**2


# --- convolutions -----------------------------------------------------------------------------------


def as_matrices(conv, x):
    """Compute the convolution as matmuls per group, whose gradients torch computes and counts."""
    g, options = (
        conv.groups,
        {"dilation": conv.dilation, "padding": conv.padding, "stride": conv.stride},
    )
    w = conv.weight.reshape(g, len(conv.weight) // g, -1)
    if not conv.transposed:
        columns = F.unfold(x, conv.kernel_size, **options)
        return (w @ columns.reshape(len(x), g, w.shape[2], -1)).flatten(1, 2)
    columns = w.mT @ x.reshape(len(x), g, w.shape[1], -1)
    return F.fold(columns.flatten(1, 2), conv(x).shape[2:], conv.kernel_size, **options)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("frozen", ["nothing", "input", "weight"])
def test_conv_gradient_macs_match_matmuls(kind, frozen):
    for groups, stride, dilation in ((1, 1, 2), (2, 2, 1), (4, 2, 2)):
        conv = kind(
            4, 8, (3, 2), stride, 1, dilation=dilation, groups=groups, bias=False
        )
        conv.weight.requires_grad_(frozen != "weight")
        x = torch.randn(2, 4, 7, 6, requires_grad=frozen != "input")
        y = as_matrices(conv, x)
        torch.testing.assert_close(y.flatten(), conv(x).flatten())
        with FlopCounterMode(display=False) as flops:
            y.sum().backward()
        expected = flops.get_total_flops() // 2

        model = quantize_(nn.Sequential(nn.Conv2d(3, 4, 1), conv))
        model[0].requires_grad_(frozen != "input")
        inputs = (torch.randn(2, 3, 7, 6),)
        layer = "1" if kind is nn.Conv2d else "1 (products)"
        assert (
            backward_macs(check(model, inputs), "1")
            == priced(model, inputs, layer)
            == expected
        )


def test_bias_gradient_has_no_matmul():
    model = quantize_(nn.Sequential(nn.Conv2d(3, 4, 1)))
    model[0].weight.requires_grad_(False)
    found = check(model, (torch.randn(2, 3, 5, 5),))
    assert [e.backward for e in found.operations] == [False]


# --- attention --------------------------------------------------------------------------------------


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


def adapted(layer):
    """Return a frozen layer with a small trained branch, as in LoRA."""
    parts = {
        "base": layer.requires_grad_(False),
        "down": nn.Linear(8, 2),
        "up": nn.Linear(2, 8),
    }
    return FunctionModule(lambda m, x: m.base(x) + m.up(m.down(x)), **parts)


class Attends(nn.Module):
    def __init__(self, module, implementation):
        super().__init__()
        config = AutoConfig.for_model(
            module.replace("_", "-") if module == "xlm_roberta" else module
        )
        for name, value in {
            "hidden_size": 8,
            "num_attention_heads": 2,
            "dim": 8,
            "n_heads": 2,
        }.items():
            if hasattr(config, name):
                setattr(config, name, value)
        config._attn_implementation = implementation
        kind = getattr(
            importlib.import_module(f"transformers.models.{module}.modeling_{module}"),
            SELF_ATTENTION[module],
        )
        self.attention = kind(config)

    def forward(self, x):
        y = self.attention(x)
        return y[0] if isinstance(y, tuple) else y

    def parts(self):
        return {
            name[0]: (name, part)
            for name, part in self.attention.named_children()
            if name[0] in "qkv"
        }


@pytest.mark.parametrize(
    ("module", "runs", "trained", "which"),
    [
        ("bert", "simulated", "layers", "q k v kv"),
        ("bert", "fused", "layers", "q k v kv"),
        ("bert", "integer", "layers", "q kv"),
        ("bert", "float32", "layers", "k v"),
        ("bert", "simulated", "adapters", "k v"),
        ("bert", "fused", "adapters", "q kv"),
        *(
            (name, "simulated", "layers", "kv")
            for name in SELF_ATTENTION
            if name != "bert"
        ),
    ],
)
def test_attention_gradient_macs_match_trained_parts(module, runs, trained, which):
    """Count the gradient matmuls that run, whichever of queries, keys and values are trained."""
    implementation = "sdpa" if runs == "fused" else "eager"
    for chosen in which.split():
        torch.manual_seed(0)
        model, x = (
            Attends(module, implementation).eval().requires_grad_(False),
            torch.randn(2, 5, 8),
        )
        for part in chosen:
            name, layer = model.parts()[part]
            layer.requires_grad_(True)
            if trained == "adapters":
                setattr(model.attention, name, adapted(layer))
        whole = QuantConfig(
            execution="integer" if runs == "integer" else "simulated"
        ).with_shared_steps()
        quantize_(
            model,
            whole,
            lambda m, name: runs in ("simulated", "integer") or name != "attention",
        )

        ran = backward_macs(check(model, (x,)), "attention")
        of_each = 2 * 5 * 5 * 8
        scores = ("q" in chosen or "k" in chosen) + ("q" in chosen) + ("k" in chosen)
        assert ran == (scores + ("v" in chosen)) * of_each
        assert priced(model, (x,), "attention (products)") == ran
        model.train()
        with (
            precision(model, 8, 8) if runs == "integer" else precision(model, "float"),
            BitOpsLedger(model) as ledger,
        ):
            model(x).sum().backward()
        bits = (8 if runs == "integer" else 32) ** 2
        backward = ledger.bitops("per_op")["attention (products)"]
        assert (backward["error"] + backward["weight"]) / bits == ran
