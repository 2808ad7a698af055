"""Ways in which models of other people are written, each of which once ran in float32, or crashed, without a word."""

import copy
from functools import partial

import pytest
import torch
from helpers import NAN, Does, refused
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.utils.checkpoint import checkpoint

from cpt_core.bitops.plan import count_bitops
from cpt_core.inspecting.check import check
from cpt_core.inspecting.summary import summary
from cpt_core.kernels import operators
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import StaticSchedule


class Attention(nn.Module):
    """Self-attention, perhaps with a checkpoint around a function of it."""

    def __init__(self, fused=False):
        super().__init__()
        self.qkv, self.out, self.fused, self.how = nn.Linear(8, 24), nn.Linear(8, 8), fused, HOW["none"]

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v

    def forward(self, x):
        return self.out(self.how(self.attend, *self.qkv(x).chunk(3, -1)))


class Checkpoint(torch.autograd.Function):
    """One of those that others have written."""

    @staticmethod
    def forward(state, run, *xs):
        state.function, state.xs = run, xs
        with torch.no_grad():
            return run(*xs)

    @staticmethod
    def backward(state, *gradients):
        xs = [x.detach().requires_grad_() for x in state.xs]
        with torch.enable_grad():
            y = state.function(*xs)
        return None, *torch.autograd.grad(y, xs, gradients)


HOW = {"none": lambda run, *xs: run(*xs), "own": Checkpoint.apply}
HOW |= {f"torch's, {r}": partial(checkpoint, use_reentrant=r) for r in (False, True)}
HOW["torch's, True in False"] = lambda run, *xs: HOW["torch's, False"](partial(HOW["torch's, True"], run), *xs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", [*HOW][1:])
def test_a_function_that_is_computed_again_is_quantised_again(fused, how):
    model, x = quantize_(Attention(fused)), torch.randn(2, 5, 8)
    found = []
    for way in ("none", how, how):
        model.how = HOW[way]
        model.zero_grad()
        with precision(model, 3, 32):
            y = model(x)
            y.square().sum().backward()
        found.append((y.detach(), model.qkv.weight.grad))
    for y, gradient in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("how", ["own", "torch's, False"])
def test_products_of_a_module_that_are_computed_again_are_priced_as_its_own(how):
    model, x = quantize_(Attention()), torch.randn(2, 5, 8)
    plain = count_bitops(model, (x,), StaticSchedule(2, 1))
    model.how = HOW[how]
    found, again = check(model, (x,)), count_bitops(model, (x,), StaticSchedule(2, 1))
    assert (found.ok, found.quantized_share, again.float32) == (True, 1, {})
    # both products once more; torch's stops where nothing more is wanted
    assert again.total == plain.total + (2 if how == "own" else 1) * 2 * 5 * 5 * 8 * 2 * 2 / 32**2


class Keeps(torch.autograd.Function):
    """No checkpoint: what it keeps runs in its backward pass alone."""

    @staticmethod
    def forward(ctx, x, w, back):
        ctx.back = back
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        assert ctx.back is torch.matmul
        return ctx.back(gradient, w.t()), ctx.back(x.t(), gradient), None


def test_functions_that_are_kept_for_the_backward_pass_alone_stay_as_they_are():
    model = quantize_(Does(lambda m, x: Keeps.apply(x, m.w, torch.matmul), w=nn.Parameter(torch.randn(4, 4))))
    x = torch.randn(3, 4, requires_grad=True)
    with precision(model, 2, 8):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4) @ model.w.t())


def outer(m, x):
    """Fast weights: keys times values, then read out."""
    q, k, v = m.qkv(x).chunk(3, -1)
    m.product = k.unsqueeze(-1) @ v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ m.product).squeeze(-2)


def outer_by_einsum(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return torch.einsum("bi,bij->bj", q, torch.einsum("bi,bj->bij", k, v))


@pytest.mark.parametrize("forward", [outer, outer_by_einsum])
def test_evaluation_without_gradients_is_of_the_model_that_was_trained(forward):
    model, x = quantize_(Does(forward, qkv=nn.Linear(8, 24))), torch.randn(4, 8)
    with precision(model, 2, 8):
        trained = model(x)
        with torch.no_grad():
            assert torch.equal(model(x), trained)


def test_vectors_across_the_sum_have_a_range():
    model = quantize_(Does(outer, qkv=nn.Linear(8, 24)))
    with precision(model, 1, 8):
        model(torch.randn(4, 8))
    assert max(len(sample.unique()) for sample in model.product) <= 4  # two values of either vector


def test_an_encoder_takes_padding_at_evaluation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = quantize_(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with precision(model, 20, 20), torch.no_grad():
        model(x)  # the first pass is watched
        y = model(x, src_key_padding_mask=padding)
        alone = model(x[1:, :2])
    torch.testing.assert_close(y[1:, :2], alone, rtol=1e-3, atol=1e-3)


def masked():
    """Attention of torch with what a test gives it."""
    return quantize_(Does(lambda _, q, k, v, **given: F.scaled_dot_product_attention(q, k, v, **given)))


def test_what_torch_does_not_read_is_not_read():
    """Scores of attention are added to nothing where there is no mask."""
    nothing, x = torch.full((2, 3, 3), NAN), torch.randn(2, 3, 4)
    model = quantize_(Does(lambda _, x: torch.baddbmm(nothing, x, x.mT, beta=0, alpha=0.5)))
    with precision(model, 20, 20):
        torch.testing.assert_close(model(x), 0.5 * x @ x.mT, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_token_that_sees_nothing_gets_nothing(kind):
    model, x = masked(), torch.randn(1, 3, 4, requires_grad=True)
    sees = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    mask = sees if kind == torch.bool else torch.zeros(3, 3).masked_fill(~sees, -torch.inf)
    with precision(model, 20, 20):
        y = model(x, x, x, attn_mask=mask)
    y.sum().backward()
    torch.testing.assert_close(y, F.scaled_dot_product_attention(x, x, x, attn_mask=mask), rtol=1e-3, atol=1e-3)
    assert not y[0, 1].any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [bias.causal_lower_right, bias.causal_upper_left])
def test_the_masks_of_torch_which_are_tensors_without_numbers_are_read(causal):
    model, q, x = masked(), torch.randn(1, 2, 4), torch.randn(1, 3, 4)
    mask = torch.ones(2, 3).tril(1 if causal is bias.causal_lower_right else 0).bool()
    for bits in (4, "float"):
        with precision(model, bits):
            assert torch.equal(model(q, x, x, attn_mask=causal(2, 3)), model(q, x, x, attn_mask=mask))


def test_heads_are_repeated_as_each_needs_and_two_masks_refused():
    model = masked()
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    with precision(model, 20, 20):
        same = model(q, k, v.expand(1, 2, 3, 8), enable_gqa=True)
        assert torch.equal(model(q, k, v, enable_gqa=True), same)
        with pytest.raises(RuntimeError, match="a mask or is_causal=True"):
            model(q, q, q, attn_mask=torch.zeros(3, 3), is_causal=True)


class Own(nn.Module):
    """A model with an attribute of its own."""

    def __init__(self, name, value):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        setattr(self, name, value)

    def forward(self, x):
        return x @ self.w


@pytest.mark.parametrize("name", ["precision", "lengths", "catching", "KIND", "run"])
@pytest.mark.parametrize("value", [2.0, nn.Parameter(torch.ones(4)), nn.ReLU()])
def test_names_of_the_model_are_not_taken_from_it(name, value):
    model = Own(name, value)
    before = copy.deepcopy(model.__dict__)
    refused(rf"Own\.{name} has a name that a quantised layer has for itself; rename it", quantize_, model)
    assert type(model) is Own
    assert model.__dict__.keys() == before.keys()
    layer = nn.Linear(2, 2)
    layer.precision = 3
    refused(r"Linear\.precision", quantize_, layer)


def test_a_method_of_the_model_is_not_hidden():
    kind = type("Checks", (Own,), {"check": lambda self, x: x})
    refused(r"Checks\.check", quantize_, kind("scale", 1.0))


@pytest.mark.parametrize("family", ["cpt", "cpt_reference"])
def test_a_backward_pass_under_autocast_is_named(family, monkeypatch):
    monkeypatch.setattr(operators, "active", getattr(torch.ops, family))
    model = quantize_(nn.Linear(4, 4))
    with precision(model, 4, 8), torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(2, 4)).float().sum()
        with pytest.warns(UserWarning, match="under autocast, which rounds quantised products once more"):
            loss.backward()


def test_tensors_in_the_place_of_parameters_round_as_these():
    model, x = quantize_(Own("scale", 1.0)), torch.randn(3, 4)
    with torch.no_grad():
        model.w[:, 1] *= 100
    given = {"w": model.w.detach().clone()}
    with precision(model, 4, 8):
        assert torch.equal(torch.func.functional_call(model, given, (x,)), model(x))
    assert not model.catching.given


def test_an_einsum_that_sums_over_nothing_is_no_product():
    outer = Does(lambda m, x: torch.einsum("bd,dn->bdn", x, m.w), w=nn.Parameter(torch.randn(4, 3)))
    model = quantize_(nn.Sequential(nn.Linear(4, 4), outer))
    with precision(model, 3):
        x = model[0](torch.randn(5, 4))
        assert torch.equal(model[1](x), x.unsqueeze(-1) * model[1].w)


class Owner(nn.Module):
    """Its ``parameters`` is a method of its own, as in loops that learn to learn."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return F.linear(x, self.w)

    def parameters(self):
        return [self.w]


def test_a_model_may_have_parameters_of_its_own():
    model = quantize_(Owner())
    assert check(model, (torch.randn(2, 8),)).quantized_share == 1
    assert "100" in str(summary(model, (torch.randn(2, 8),)))
