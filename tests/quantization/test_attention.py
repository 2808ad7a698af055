"""Attention after quantize_(): masks and heads of torch's function, Hugging Face models."""

import copy
import pickle

import pytest
import torch
import transformers as hf
from helpers import FunctionModule, refused
from operation_samples import BERT_SIZES, bert, unknown_attention
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import bias

from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.scheduler import precision

# --- torch's function ---------------------------------------------------------------


def attention():
    """Return a converted module that passes all arguments to torch's function."""
    return quantize_(
        FunctionModule(
            lambda _, *qkv, **options: F.scaled_dot_product_attention(*qkv, **options)
        )
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_of_fully_masked_token_is_zero(dtype):
    model, x = attention(), torch.randn(1, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, True], [False] * 3, [True, False, True]])
    if dtype == torch.float32:
        mask = torch.zeros(3, 3).masked_fill(~mask, -torch.inf)
    with precision(model, 20, 20):
        y = model(x, x, x, attn_mask=mask)
    y.sum().backward()
    expected = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
    assert not y[0, 1].any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("mask_class", "diagonal"),
    [(bias.causal_lower_right, 1), (bias.causal_upper_left, 0)],
)
def test_attention_reads_causal_bias_masks(mask_class, diagonal):
    model, q, x = attention(), torch.randn(1, 2, 4), torch.randn(1, 3, 4)
    mask = torch.ones(2, 3).tril(diagonal).bool()
    for bits in (4, "float"):
        with precision(model, bits):
            y = model(q, x, x, attn_mask=mask_class(2, 3))
            assert torch.equal(y, model(q, x, x, attn_mask=mask))


def test_attention_rejects_mask_with_is_causal():
    model, q = attention(), torch.randn(1, 4, 3, 8)
    with precision(model, 20, 20):
        options = {"attn_mask": torch.zeros(3, 3), "is_causal": True}
        refused(
            "a mask or is_causal=True", model, q, q, q, error=RuntimeError, **options
        )


def test_encoder_ignores_padding_at_evaluation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = quantize_(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with precision(model, 20, 20), torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
        alone = model(x[1:, :2])
    torch.testing.assert_close(y[1:, :2], alone, rtol=1e-3, atol=1e-3)


# --- Hugging Face -------------------------------------------------------------------

SIZES = {**BERT_SIZES, "num_hidden_layers": 2, "num_labels": 3}


def bert_of_two_layers(implementation="eager"):
    torch.manual_seed(0)
    return bert(implementation, **SIZES)


def batch():
    """Return token ids and a mask with padding."""
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask[2, 7:] = 0
    return ids, mask


def test_bert_eager_and_sdpa_match_when_quantized(device):
    ids, mask = batch()
    results = []
    for implementation in ("eager", "sdpa"):
        model = bert_of_two_layers(implementation).eval()
        expected = model(ids, mask).logits
        quantize_(model)
        with precision(model, "float"), torch.no_grad():
            y = model(ids, mask).logits
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
            without_padding = model(ids[1:2, :5], mask[1:2, :5]).logits
            torch.testing.assert_close(
                without_padding, expected[1:2], rtol=0, atol=1e-5
            )
        with precision(model, 4), torch.no_grad():
            results.append((model(ids, mask).logits, model(ids).logits))
    (eager, eager_unmasked), (sdpa, sdpa_unmasked) = results
    assert torch.equal(eager, sdpa)
    assert torch.equal(eager_unmasked, sdpa_unmasked)
    assert not torch.allclose(eager, eager_unmasked)
    with precision(model, 16), torch.no_grad():
        expected = model(ids, mask).logits
        y = model.to(device)(ids.to(device), mask.to(device)).logits
    torch.testing.assert_close(y.cpu(), expected, rtol=0, atol=2e-3)


DISTILBERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
VIT = {"image_size": 8, "patch_size": 4}
FAMILIES = {  # model type -> options besides SIZES, number of attention layers
    "bert": ({}, 2),
    "roberta": ({}, 2),
    "xlm-roberta": ({}, 2),
    "camembert": ({}, 2),
    "electra": ({"embedding_size": 16}, 2),
    "distilbert": (DISTILBERT, 2),
    "albert": ({"embedding_size": 16}, 1),  # both layers are the same module
    "vit": (VIT, 2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_of_model_family_is_quantized(name):
    options, num_layers = FAMILIES[name]
    sizes = {"num_labels": 3, "vocab_size": 50} if name == "distilbert" else SIZES
    config = hf.AutoConfig.for_model(name, **sizes, **options)
    torch.manual_seed(0)
    if name == "vit":
        model = hf.AutoModelForImageClassification.from_config(config)
        x = torch.randn(2, 3, 8, 8)
    else:
        model = hf.AutoModelForSequenceClassification.from_config(config)
        x = torch.randint(3, 50, (3, 9))
    model.eval()
    keys, expected = list(model.state_dict()), model(x).logits
    quantize_(model)
    assert list(model.state_dict()) == keys

    with precision(model, 8):
        fine = model(x).logits
        fine.sum().backward()
    layers = [p for p in layer_precisions(model).values() if p.kind == "attention"]
    assert len(layers) == num_layers
    with precision(model, 2):
        coarse = model(x).logits
        for layer in layers:
            layer.set_bits(None, None)
        without_attention = model(x).logits
    assert (fine - expected).abs().max() < (coarse - expected).abs().max()
    assert not torch.allclose(coarse, without_attention)
    trained = [p for p in model.parameters() if p.requires_grad and p.numel() > 1]
    assert all(p.grad is not None for p in trained)
    restore_(model)
    assert torch.equal(model(x).logits, expected)


@pytest.mark.slow
def test_quantized_bert_keeps_config_and_files(tmp_path):
    model = bert_of_two_layers("sdpa").eval()
    module, config = model.bert.encoder.layer[0].attention.self, model.config
    before = config.to_dict()
    quantize_(model)
    assert type(module).__name__ == "BertSelfAttention"
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    ids, mask = batch()
    with precision(model, 3), precision(clone, 3), precision(quantize_(loaded), 3):
        expected = model(ids, mask).logits
        assert torch.equal(clone(ids, mask).logits, expected)
        assert torch.equal(loaded(ids, mask).logits, expected)


def test_fused_attention_can_stay_in_float32():
    model = unknown_attention()
    quantize_(model, QuantConfig(float32=("*.attention.self",)))
    reasons = {r.reason for r in summary(model).rows if ".attention.self" in r.name}
    assert reasons == {"not selected by quantize_"}
