"""The LSTM on codes: what the simulation computes, for every shape, direction and range."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from quantization.test_integer import distance, kept
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.backend import reference
from cpt_core.quantization.convert import layer_precisions

STEPS, BATCH, WIDTH = 7, 4, 12


def lstm(execution, shared=True, **options):
    torch.manual_seed(0)
    config = cpt.QuantConfig(execution=execution)
    return cpt.quantize_(nn.LSTM(WIDTH, WIDTH, **options), config.with_shared_steps() if shared else config)


def given(seed=1, steps=STEPS):
    return torch.randn(steps, BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)) + 0.2


def passes(module, x, state=None, q=8, q_grad=8, run=None):
    """Outputs and last states, and the gradients of all that there is."""
    leaves = [t.clone().requires_grad_() for t in (x, *(state or ()))]
    module.zero_grad()
    with cpt.precision(module, q, q_grad=q_grad):
        y, (h, c) = (run or module)(leaves[0], tuple(leaves[1:]) or None)
        y = y if isinstance(y, torch.Tensor) else y.data
        (y * y.detach().sin() + y).sum().add(h.cos().sum()).sub(c.square().sum()).backward()
    return [t.detach() for t in (y, h, c)] + [t.grad for t in (*leaves, *module.parameters())]


def packed(module):
    lengths = torch.tensor([4, 7, 1, 7])
    return lambda x, state: module(pack_padded_sequence(x, lengths, enforce_sorted=False), state)


KINDS = {
    "plain": {},
    "no bias": {"bias": False},
    "both directions, two layers": {"num_layers": 2, "bidirectional": True},
    "packed": {"bidirectional": True},
    "with a state": {},
    "batch first": {"batch_first": True},
}


STATE = tuple(torch.randn(1, BATCH, WIDTH, generator=torch.Generator().manual_seed(s)) for s in (2, 3))


BITS = [(4, 6, reference), (8, 8, nullcontext), (8, "float", reference), (6, 12, nullcontext)]
CASES = [(kind, (i + j // 2) % 2 == 0, *bits) for i, kind in enumerate(KINDS) for j, bits in enumerate(BITS)]


@pytest.mark.parametrize(("kind", "shared", "q", "q_grad", "backend"), CASES)
def test_the_lstm_computes_what_the_simulation_does(kind, shared, q, q_grad, backend):
    found = []
    for execution in ("integer", "simulated"):
        module = lstm(execution, shared, **KINDS[kind])
        run = packed(module) if kind == "packed" else None
        with backend():
            found.append(passes(module, given(), STATE if kind == "with a state" else None, q, q_grad, run))
        found[-1].append(torch.cat([b.flatten() for b in layer_precisions_of(module).buffers()]))
    for y, z in zip(*found, strict=True):
        assert y.shape == z.shape
        assert distance(y, z) < 0.02  # a code that flips is a step of a grid


def layer_precisions_of(module):
    (p,) = layer_precisions(module).values()
    return p


@pytest.mark.parametrize("shared", [True, False], ids=["shared steps", "authors' steps"])
@pytest.mark.parametrize("q", [2, 5, 8])
def test_a_step_is_exact(shared, q):
    """Nothing is rounded after the first step's products: float32 sums are all that differs."""
    on_codes, simulated = (passes(lstm(e, shared), given(steps=1), STATE, q) for e in ("integer", "simulated"))
    for y, z in zip(on_codes[:3], simulated[:3], strict=True):
        assert distance(y, z) < 1e-6
    for y, z in zip(on_codes[3:], simulated[3:], strict=True):
        assert distance(y, z) < 1e-5


@pytest.mark.parametrize(("shared", "left"), [(True, 2), (False, 2 + 1 + STEPS)])
def test_products_run_where_the_summary_says(shared, left):
    """Left are the gradients of both weights; with ranges per row also those of the input and every hidden state."""
    module = lstm("integer", shared)
    with torch.autograd.profiler.profile() as profile:
        passes(module, given())
    assert sum(event.name in ("aten::mm", "aten::addmm") for event in profile.function_events) == left
    (row,) = (r for r in cpt.summary(module).rows if r.quantized)
    assert set(row.simulated) == ({"weight"} if shared else {"error", "weight"})


@pytest.mark.parametrize(
    ("granularity", "longest", "why"),
    [("per_row", 1 << 15, "hidden states have several ranges"), ("per_tensor", 4 * WIDTH - 1, "sums over the gates")],
)
def test_what_has_no_integer_form_stays_simulated(granularity, longest, why, monkeypatch):
    monkeypatch.setattr("cpt_core.quantization.lstm.LONGEST", longest)
    config = cpt.QuantConfig(execution="integer")
    roles = config.quantizers | {"lstm_hidden": Quantizer(granularity)}
    module = cpt.quantize_(nn.LSTM(WIDTH, WIDTH), replace(config, quantizers=roles))
    with torch.autograd.profiler.profile() as profile:
        passes(module, given())
    assert not any(event.name == "aten::_int_mm" for event in profile.function_events)
    assert f"on codes: none (forward simulated: {why}" in str(cpt.summary(module))


def test_hidden_states_are_kept_as_codes():
    kinds = [(t.dtype, tuple(t.shape)) for t in kept(passes, lstm("integer"), given())]
    assert kinds.count((torch.int8, (STEPS * BATCH, WIDTH))) == 2  # of inputs and hidden states
    assert kinds.count((torch.int8, (4 * WIDTH, WIDTH))) == 2  # both weights


def test_evaluation_uses_running_ranges_and_clips():
    models = [lstm(e, num_layers=2) for e in ("integer", "simulated")]
    outputs = []
    for model in models:
        for seed in range(3):
            passes(model, given(seed))
        model.eval()
        outputs.append(passes(model, 4 * given(9)))  # beyond what training has seen
    a, b = (layer_precisions_of(m).get_running() for m in models)
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[k].float(), b[k].float(), rtol=0.01) for k in a)
    assert all(distance(y, z) < 0.03 for y, z in zip(*outputs, strict=True))


def test_checkpoints_and_a_layer_used_twice():
    def twice(module):
        return lambda x, state: module(module(x)[0])

    def again(module):
        return lambda x, state: checkpoint(module, x, use_reentrant=False)

    on_codes, simulated = (passes(m, given(), run=twice(m)) for m in (lstm("integer"), lstm("simulated")))
    assert all(distance(y, z) < 0.02 for y, z in zip(on_codes, simulated, strict=True))
    module, other = lstm("integer"), lstm("integer")
    assert all(map(torch.equal, passes(module, given()), passes(other, given(), run=again(other))))
    for a, b in zip(*(layer_precisions_of(m).buffers() for m in (module, other)), strict=True):
        assert torch.equal(a, b)


def test_half_precision_and_other_types():
    found = []
    for execution in ("integer", "simulated"):
        module = lstm(execution)
        with cpt.precision(module, 8, q_grad=8), torch.autocast("cpu", torch.bfloat16):
            found.append(module(given().bfloat16())[0])
        with cpt.precision(module.double(), 8, q_grad=8):
            assert module(given().double())[0].dtype == torch.float64
    assert found[0].dtype == torch.bfloat16
    assert torch.allclose(found[0].float(), found[1].float(), atol=0.01)
    module = lstm("integer")
    with cpt.precision(module, 8), torch.no_grad():
        assert torch.equal(module(given()[:, 0])[0], module(given()[:, :1])[0][:, 0])  # a sequence without a batch
