import copy
import pickle

import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, BertLMHeadModel
from transformers.models.bert.modeling_bert import eager_attention_forward

from cpt_core.formats.quantizer import Quantizer
from cpt_core.inspecting.summary import summary
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_, restore_
from cpt_core.quantization.fake_quantize import levels_of, quantize, quantize_gradient
from cpt_core.quantization.scheduler import precision

TINY = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=32, num_labels=3,
)  # fmt: skip


def bert(implementation="eager", seed=0, **options):
    torch.manual_seed(seed)
    return BertForSequenceClassification._from_config(
        BertConfig(**{**TINY, **options}), attn_implementation=implementation
    )


def batch(padded=True):
    ids = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
        mask[2, 7:] = 0
    return ids, mask


def plain_attention(module, x, mask, bits, q_grad):
    """The products one by one, in the order of the authors: (B, T, C) -> (B, T, C)."""
    levels, grad = torch.tensor(levels_of(q_grad)), Quantizer("per_position")
    heads, size = module.num_attention_heads, module.attention_head_size

    def linear(layer):
        y = torch.nn.functional.linear(
            quantize(x, bits, "linear_input"),
            quantize(layer.weight, bits, "linear_weight"),
            quantize(layer.bias, bits, "bias"),
        )
        return quantize_gradient(y, levels, grad).unflatten(-1, (heads, size)).transpose(1, 2)

    q, k, v = (linear(getattr(module, name)) for name in ("query", "key", "value"))
    scores = quantize_gradient(
        quantize(q, bits, "attention_query") @ quantize(k.transpose(-1, -2), bits, "attention_key"), levels, grad
    )
    probabilities = (scores / size**0.5 + mask).softmax(-1)
    context = quantize(probabilities, bits, "attention_probabilities") @ quantize(v, bits, "attention_value")
    return quantize_gradient(context, levels, grad).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_attention_is_the_plain_composition(bits, on_device):
    bits, q_grad = (bits, 5) if on_device.type == "cpu" else (16, 16)
    model = quantize_(bert().eval(), QuantConfig().with_gradient_rounding("nearest"))
    module = model.bert.encoder.layer[0].attention.self
    x = torch.randn(3, 9, 16, requires_grad=True)
    mask = torch.zeros(3, 1, 1, 9)
    mask[1, ..., 5:] = torch.finfo(torch.float32).min
    upstream = torch.randn(3, 9, 16)
    found = []
    with precision(model, bits, q_grad=q_grad):
        for y in (module(x, mask)[0], plain_attention(module, x, mask, bits, q_grad)):
            parameters = [x, *module.parameters()]
            found.append([y, *torch.autograd.grad(y, parameters, upstream)])
    assert len(found[0]) == 8
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 if on_device.type == "cpu" else 2e-3)


@pytest.mark.parametrize("scaling", [None, 0.1, 2.0])
def test_scores_have_the_scaling_that_is_asked_for(scaling):
    module = quantize_(bert().eval()).bert.encoder.layer[0].attention.self
    query, key, value = torch.randn(3, 2, 2, 9, 8)
    with precision(module, 4):
        with module.catching:
            context, probabilities = eager_attention_forward(module, query, key, value, None, scaling)
    scores = quantize(query, 4, "attention_query") @ quantize(key.transpose(-1, -2), 4, "attention_key")
    expected = (scores * (8**-0.5 if scaling is None else scaling)).softmax(-1)
    assert torch.allclose(probabilities, expected, atol=1e-6)
    assert context.shape == (2, 9, 2, 8)


def test_both_products_are_quantised_and_the_rest_is_not():
    model = bert().eval()
    ids, mask = batch()
    quantize_(model, filter_fn=lambda module, name: name.endswith("attention.self"))
    assert list(layer_precisions(model)) == [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)]
    seen = {}
    for name in ("query", "key", "probabilities", "value"):
        p = model.bert.encoder.layer[0].attention.self.precision
        assert p.quantizers[name].granularity == "per_row"
    operand = p.operand
    p.operand = lambda role, x: seen.setdefault(role, operand(role, x))
    with precision(model, 2), torch.no_grad():
        model(ids, mask)
    assert {role: tuple(x.shape) for role, x in seen.items()} == {
        "query": (3, 2, 9, 8), "key": (3, 2, 8, 9), "probabilities": (3, 2, 9, 9), "value": (3, 2, 9, 8),
    }  # fmt: skip
    for x in seen.values():
        assert max(len(row.unique()) for row in x.flatten(0, 2)) <= 4  # 2 bits


def test_eager_and_sdpa_models_convert_to_the_same():
    ids, mask = batch()
    results = []
    for implementation in ("eager", "sdpa"):
        for padded in (True, False):
            model = quantize_(bert(implementation).eval())
            with precision(model, 4), torch.no_grad():
                results.append(model(ids, mask if padded else None).logits)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.allclose(results[0], results[1])


def test_padding_is_not_seen():
    ids, mask = batch()
    model = quantize_(bert("sdpa").eval())
    with precision(model, "float"), torch.no_grad():
        whole = model(ids, mask).logits
        short = model(ids[1:2, :5], mask[1:2, :5]).logits
    assert torch.allclose(whole[1:2], short, atol=1e-5)


def test_float_is_the_original():
    ids, mask = batch()
    for implementation in ("eager", "sdpa"):
        model = bert(implementation).eval()
        expected = model(ids, mask).logits
        quantize_(model)
        with precision(model, "float"):
            assert torch.allclose(model(ids, mask).logits, expected, atol=1e-6)


CONFIGS = {
    "distilbert": dict(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, num_labels=3
    ),
    "electra": {**TINY, "embedding_size": 16},
    "albert": {**TINY, "embedding_size": 16},
    "vit": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8,
                patch_size=4, num_labels=3),
}  # fmt: skip
PREFIX = {
    "bert": "Bert", "roberta": "Roberta", "xlm_roberta": "XLMRoberta", "camembert": "Camembert", "electra": "Electra",
    "distilbert": "DistilBert", "albert": "Albert", "vit": "ViT",
}  # fmt: skip


@pytest.mark.parametrize("name", PREFIX)
def test_every_model_that_is_listed(name):
    config = getattr(transformers, f"{PREFIX[name]}Config")(**CONFIGS.get(name, TINY))
    kind = "ForImageClassification" if name == "vit" else "ForSequenceClassification"
    torch.manual_seed(0)
    model = getattr(transformers, f"{PREFIX[name]}{kind}")(config).eval()
    inputs = (torch.randn(2, 3, 8, 8),) if name == "vit" else (torch.randint(3, 50, (3, 9)),)
    keys, expected = list(model.state_dict()), model(*inputs).logits
    quantize_(model)
    assert list(model.state_dict()) == keys
    layers = [p for n, p in layer_precisions(model).items() if "query" in p.quantizers]
    assert len(layers) == (1 if name == "albert" else 2)  # ALBERT shares one layer
    with precision(model, 8):
        near = model(*inputs).logits
        near.sum().backward()
    with precision(model, 2):
        far = model(*inputs).logits
        for layer in layers:
            layer.set_bits(None, None)
        linear_only = model(*inputs).logits
    assert (near - expected).abs().max() < (far - expected).abs().max()
    assert not torch.allclose(far, linear_only)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.numel() > 1)
    restore_(model)
    assert torch.equal(model(*inputs).logits, expected)


def test_conversion_leaves_no_trace_in_configuration_or_files(tmp_path):
    model = bert("sdpa").eval()
    module, config = model.bert.encoder.layer[0].attention.self, model.config
    before = config.to_dict()
    quantize_(model)
    assert type(module).__name__ == "QuantBertSelfAttention"
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    ids, mask = batch()
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with precision(model, 3), precision(clone, 3), precision(quantize_(loaded), 3):
        expected = model(ids, mask).logits
        assert torch.equal(clone(ids, mask).logits, expected)
        assert torch.equal(loaded(ids, mask).logits, expected)
    restore_(model)
    assert type(module).__name__ == "BertSelfAttention"


def test_summary_lists_attention():
    model = bert()
    name = "bert.encoder.layer.0.attention.self"
    quantize_(model, QuantConfig(float32=("bert.encoder.layer.0.attention.self",)))
    rows = {r.name: r for r in summary(model).rows}
    assert rows[name].reason == "left out"  # with the linear layers inside
    assert rows[f"{name}.query"].reason == "left out"
    assert rows[name.replace("0", "1")].quantized
    assert rows[name].parameters == 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_decoders_do_not_see_the_future(implementation):
    torch.manual_seed(0)
    decoder = BertLMHeadModel._from_config(
        BertConfig(**TINY, is_decoder=True, use_cache=False, initializer_range=1.0), attn_implementation=implementation
    )
    quantize_(decoder)
    ids, others = torch.randint(1, 50, (2, 8, 9), generator=torch.Generator().manual_seed(0))
    later = torch.cat([ids[:, :3], others[:, 3:]], 1)
    with precision(decoder, 2), torch.no_grad():
        decoder(ids)  # fills the running ranges
        decoder.eval()
        a, b = decoder(ids).logits, decoder(later).logits
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.equal(a[:, 3:], b[:, 3:])


def test_fused_kinds_are_refused():
    model = bert()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attention with 'flash_attention_2'.*attn_implementation='eager'"):
        quantize_(model)
    assert not any(r.quantized for r in summary(model).rows)
    quantize_(model, QuantConfig(float32=("*.attention.self",)))  # the way out


def test_half_precision():
    ids, mask = batch()
    whole, half = quantize_(bert().eval()), quantize_(bert().eval().bfloat16())
    with precision(whole, 8), precision(half, 8):
        logits = half(ids, mask).logits
        logits.sum().backward()
        assert logits.dtype == torch.bfloat16
        assert torch.allclose(logits.float(), whole(ids, mask).logits, atol=0.1)
