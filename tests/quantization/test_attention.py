"""Attention modules of Hugging Face models after quantize_()."""

import copy
import pickle

import pytest
import torch
import transformers as hf

from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.scheduler import precision

TINY = dict(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
    num_labels=3,
)


def bert(implementation="eager", seed=0, **options):
    torch.manual_seed(seed)
    return hf.BertForSequenceClassification._from_config(
        hf.BertConfig(**{**TINY, **options}), attn_implementation=implementation
    )


def unknown_attention():
    """Return a model configured for FlashAttention 2, which need not be installed."""
    model = bert()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def batch():
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    mask[2, 7:] = 0
    return ids, mask


def test_attention_eager_and_sdpa_match_when_quantized(device):
    """Match the float model at "float", and quantise eager and SDPA attention alike."""
    ids, mask = batch()
    results = []
    for implementation in ("eager", "sdpa"):
        model = bert(implementation).eval()
        expected = model(ids, mask).logits
        quantize_(model)
        with precision(model, "float"), torch.no_grad():
            torch.testing.assert_close(
                model(ids, mask).logits, expected, rtol=0, atol=1e-6
            )
            short = model(ids[1:2, :5], mask[1:2, :5]).logits
            torch.testing.assert_close(
                short, expected[1:2], rtol=0, atol=1e-5
            )  # padding is not seen
        with precision(model, 4), torch.no_grad():
            results.append((model(ids, mask).logits, model(ids).logits))
    (eager, whole), (sdpa, whole_sdpa) = results
    assert torch.equal(eager, sdpa)
    assert torch.equal(whole, whole_sdpa)
    assert not torch.allclose(eager, whole)
    with precision(model, 16), torch.no_grad():
        expected = model(ids, mask).logits
        there = model.to(device)(ids.to(device), mask.to(device)).logits
    torch.testing.assert_close(there.cpu(), expected, rtol=0, atol=2e-3)


CONFIGS = {
    "distilbert": dict(
        vocab_size=50,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=32,
        num_labels=3,
    ),
    "electra": {**TINY, "embedding_size": 16},
    "albert": {**TINY, "embedding_size": 16},
    "vit": dict(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
    ),
}
NAMES = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
    "distilbert",
    "albert",
    "vit",
)


@pytest.mark.parametrize("name", NAMES)
def test_attention_conversion_of_listed_models(name):
    config = hf.AutoConfig.for_model(name, **CONFIGS.get(name, TINY))
    kind = (
        hf.AutoModelForImageClassification
        if name == "vit"
        else hf.AutoModelForSequenceClassification
    )
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    inputs = (
        (torch.randn(2, 3, 8, 8),) if name == "vit" else (torch.randint(3, 50, (3, 9)),)
    )
    keys, expected = list(model.state_dict()), model(*inputs).logits
    quantize_(model)
    assert list(model.state_dict()) == keys
    with precision(model, 8):
        near = model(*inputs).logits
        near.sum().backward()
    layers = [p for p in layer_precisions(model).values() if p.kind == "attention"]
    assert len(layers) == (1 if name == "albert" else 2)  # ALBERT shares one layer
    with precision(model, 2):
        far = model(*inputs).logits
        for layer in layers:
            layer.set_bits(None, None)
        linear_only = model(*inputs).logits
    assert (near - expected).abs().max() < (far - expected).abs().max()
    assert not torch.allclose(far, linear_only)
    assert all(
        p.grad is not None
        for p in model.parameters()
        if p.requires_grad and p.numel() > 1
    )
    restore_(model)
    assert torch.equal(model(*inputs).logits, expected)


def test_attention_conversion_leaves_config_and_files_unchanged(tmp_path):
    model = bert("sdpa").eval()
    module, config = model.bert.encoder.layer[0].attention.self, model.config
    before = config.to_dict()
    quantize_(model)
    assert type(module).__name__ == "BertSelfAttention"
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, mask = batch()
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with precision(model, 3), precision(clone, 3), precision(quantize_(loaded), 3):
        expected = model(ids, mask).logits
        assert torch.equal(clone(ids, mask).logits, expected)
        assert torch.equal(loaded(ids, mask).logits, expected)
    restore_(model)
    assert type(module).__name__ == "BertSelfAttention"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_causal_mask_hides_later_tokens(implementation):
    """Keep earlier outputs of a decoder independent of later tokens."""
    torch.manual_seed(0)
    decoder = hf.BertLMHeadModel._from_config(
        hf.BertConfig(**TINY, is_decoder=True, use_cache=False, initializer_range=1.0),
        attn_implementation=implementation,
    )
    quantize_(decoder)
    ids, others = torch.randint(
        1, 50, (2, 8, 9), generator=torch.Generator().manual_seed(0)
    )
    later = torch.cat([ids[:, :3], others[:, 3:]], 1)
    with precision(decoder, 2), torch.no_grad():
        decoder(ids)  # fills the running ranges
        decoder.eval()
        a, b = decoder(ids).logits, decoder(later).logits
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.equal(a[:, 3:], b[:, 3:])


def test_attention_fused_module_left_in_float32():
    model = unknown_attention()
    quantize_(model, QuantConfig(float32=("*.attention.self",)))
    assert {r.reason for r in summary(model).rows if ".attention.self" in r.name} == {
        "not selected by quantize_"
    }
