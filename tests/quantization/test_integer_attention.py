"""Products of attention on codes: those of the simulation, and what is kept and said."""

import pytest
import torch
from helpers import Ran
from quantization.test_integer import kept
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import eager_attention_forward

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions

SIZE = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 30}


def bert(execution, shared, seed=0):
    torch.manual_seed(seed)
    config = cpt.QuantConfig(execution=execution)
    model = BertModel(BertConfig(**SIZE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return cpt.quantize_(model, config.with_shared_steps() if shared else config)


def attend(execution, shared, q=8, q_grad=8, half=None, mask=None):
    """Context, probabilities, the gradients of queries, keys and values, and how often noise was drawn."""
    module = next(m for n, m in bert(execution, shared).named_modules() if n.endswith("attention.self"))
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3, 7, 4, 8, generator=g).to(half).transpose(1, 2) for _ in range(3)]
    inputs = [x.requires_grad_() for x in inputs]
    with cpt.precision(module, q, q_grad=q_grad):
        with module.catching:
            context, probabilities = eager_attention_forward(module, *inputs, mask)
        context.backward(torch.randn(context.shape, generator=g).to(half))
    drawn = torch.stack([torch.tensor(1), layer_precisions(module)[""].noise_key % 2**20]).float()
    return [context.detach(), probabilities.detach(), *(x.grad for x in inputs), drawn]


MASK = torch.zeros(3, 1, 1, 7).masked_fill(torch.arange(7) > 4, torch.finfo().min)


@pytest.mark.parametrize(
    ("shared", "q", "q_grad", "mask"),
    [(True, 2, 8, None), (False, 5, 6, MASK), (True, 8, 8, MASK), (False, 8, 8, None), (False, 4, "float", MASK),
     (True, 4, 12, None), (True, 12, 8, MASK)],
)  # fmt: skip
def test_attention_computes_what_the_simulation_does(shared, q, q_grad, mask):
    on_codes, simulated = (attend(e, shared, q, q_grad, mask=mask) for e in ("integer", "simulated"))
    for y, z in zip(on_codes, simulated, strict=True):
        assert y.shape == z.shape
        assert float((y - z).norm() / z.norm()) < 1e-5


def test_half_precision_is_computed_in_float32():
    on_codes, simulated = (attend(e, True, half=torch.bfloat16) for e in ("integer", "simulated"))
    for y, z in zip(on_codes[:-1], simulated[:-1], strict=True):
        assert y.dtype == z.dtype == torch.bfloat16
        assert torch.allclose(y.float(), z.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("execution", "shared", "left"),
    [("integer", True, ()), ("integer", False, ("forward", "weight")), ("auto", True, ("forward", "error", "weight"))],
)
def test_products_run_where_the_summary_says(execution, shared, left):
    with Ran() as ran:
        attend(execution, shared)
    assert ran.count("bmm") == 2 * len(left)  # of scores and of context
    no_sums = ran.count("_int_mm", where=lambda a, b, *_: b.shape[1] > 1)
    assert no_sums == 3 * 4 * 2 * (3 - len(left))  # for every sample and head
    row = next(r for r in cpt.summary(bert(execution, shared)).rows if r.name.endswith("0.attention.self"))
    assert set(row.simulated) == set(left)


def test_probabilities_are_kept_as_codes():
    for execution, codes in (("simulated", 0), ("integer", 4)):  # queries, keys, probabilities, values
        assert sum(t.dtype == torch.int8 for t in kept(attend, execution, True)) == codes
