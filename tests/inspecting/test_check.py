"""What ``check`` says of a model is what runs in it."""

import copy
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from helpers import Does, identical, make, pictures, refused, small
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from cpt_core.bitops.macs import MACS
from cpt_core.bitops.plan import count_bitops
from cpt_core.inspecting.check import check
from cpt_core.inspecting.summary import summary
from cpt_core.kernels.lstm import recurrence
from cpt_core.quantization import lstm
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.convert import QuantizationWarning
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule

TABLE = {"product": F.linear}


def hidden(m, x):
    """Use the weight of a converted child past its forward, in a function that no code names."""
    return TABLE["product"](m.called(x), m.read(m.passed.weight))


def past(m, x):
    """The same by a function that the code names."""
    return F.linear(m.called(x), m.read(m.passed.weight))


def using(forward, read=lambda w: w):
    """A model with such a forward; ``read`` says how it takes the weight."""
    return Does(forward, called=nn.Linear(4, 4), passed=nn.Linear(4, 4, bias=False), read=read)


@pytest.mark.parametrize("read", [lambda w: w, lambda w: w - w.mean(), lambda w: w.T])
def test_a_weight_that_is_used_past_its_layer_is_quantised_there(read):
    model = quantize_(nn.Sequential(nn.Linear(4, 4), using(past, read)))
    found = check(model, (torch.ones(3, 4),))
    assert (found.ok, found.bypassed, found.unused, found.float32) == (True, {}, (), [])
    assert [p.layer for p in found.products if not p.backward] == ["0", "1.called", "1"]


@pytest.mark.parametrize(
    ("read", "by"),
    [(lambda w: w, "1"), (lambda w: w - w.mean(), "?"), (lambda w: w.clone(), "?"), (lambda w: w.T, "1")],
    ids=["as it is", "standardised", "cloned", "transposed"],
)
def test_a_weight_that_is_used_past_its_layer_is_found(read, by):
    model = quantize_(nn.Sequential(nn.Linear(4, 4), using(hidden, read)))
    found = check(model, (torch.ones(3, 4),))
    assert not found.ok
    assert found.bypassed == {"1.passed": by}
    assert [p.layer for p in found.float32] == ["1"]
    assert found.quantized_share == pytest.approx(2 / 3)
    assert "listed as quantised, but used in float32: 1.passed" in str(found)
    assert [row.name for row in summary(model).quantized] == ["0", "1.called"]


def test_a_layer_that_runs_quantised_and_not_is_found():
    model = quantize_(using(lambda m, x: m.passed(hidden(m, x))))
    assert check(model, (torch.ones(3, 4),)).bypassed == {"passed": ""}


def test_a_layer_that_is_not_used_is_not_called_bypassed():
    model = Does(lambda m, x: m.first(x), first=nn.Linear(4, 4), other=nn.Linear(4, 4))
    found = check(quantize_(model), (torch.ones(3, 4),))
    assert (found.ok, found.bypassed, found.unused) == (True, {}, ("other",))
    assert "took no part in the step: other" in str(found)


def test_every_product_is_listed_with_its_precision_and_its_macs():
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",)))
    found = check(model, (torch.ones(5, 4),))
    rows = [(p.layer, p.operation, p.backward, p.quantized, p.reads, p.macs) for p in found.products]
    assert rows == [
        ("0", "addmm", False, True, (), 60),
        ("1", "addmm", False, False, ("1.weight",), 30),
        ("1", "mm", True, False, ("1.weight",), 30),  # dx = dy w
        ("1", "mm", True, False, (), 30),  # dw = x dy
        ("0", "mm", True, True, (), 60),  # dw alone: the input needs no gradient
    ]


def test_what_a_hook_of_a_module_computes_is_the_module_s():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_forward_pre_hook(lambda module, inputs: inputs[0] @ torch.eye(4))
    assert [p.layer for p in check(quantize_(model), (torch.ones(3, 4),)).float32] == ["1"]


@pytest.mark.parametrize("q_grad", ["kept", "lost"])
def test_gradients_that_are_not_quantised_are_found(monkeypatch, q_grad):
    if q_grad == "lost":
        monkeypatch.setattr(LayerPrecision, "gradient", lambda self, role, y: y)
    found = check(quantize_(small()), (pictures(),))
    assert found.ok == (q_grad == "kept")
    assert all(p.quantized == (q_grad == "kept") for p in found.products if p.backward)


def overwritten(self, role, x):
    y = OPERAND(self, role, x)
    with torch.no_grad():
        return y.sigmoid_()


OPERAND = LayerPrecision.operand
UNDONE = {"written over": overwritten, "added to": lambda self, role, x: OPERAND(self, role, x) + 0 * x}


@pytest.mark.parametrize("how", UNDONE)
def test_rounding_that_is_undone_is_found(monkeypatch, how):
    monkeypatch.setattr(LayerPrecision, "operand", UNDONE[how])
    found = check(quantize_(small()), (pictures(),))
    assert not any(p.quantized for p in found.products if not p.backward)
    assert set(found.bypassed) == {"0", "3", "5"}


def test_a_plan_that_prices_other_products_than_run_is_found(monkeypatch):
    monkeypatch.setitem(MACS, nn.Linear, lambda module, inputs, y: y.numel())
    found = check(quantize_(small()), (pictures(),))
    n, in_both = len(pictures()), sum(p.macs for p in found.products if p.backward)
    assert found.mispriced == {"5": (n * 64 * 5, n * 5), "(backward)": (in_both, in_both - 2 * n * 63 * 5)}
    assert not found.ok
    assert "executed and priced MACs differ: 5: " in str(found)


def backward_of(found):
    return [(p.layer, p.operation, p.quantized, p.macs) for p in found.products if p.backward]


def test_complex_products_are_in_float32():
    model = Does(lambda m, x: torch.einsum("nd,de->ne", m.layer(x) + 0j, m.w).real, layer=nn.Linear(4, 4))
    model.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    found = check(quantize_(model), (torch.randn(3, 4),))
    assert (found.ok, found.bypassed) == (False, {"": ""})
    assert [p.quantized for p in found.products if p.layer == ""] == [False] * 3


EDGES = torch.eye(4).to_sparse()
UNRULED = {  # a function -> what it computes of a weight and of four rows of four numbers, and its MACs
    "addbmm": (lambda m, y: torch.addbmm(m.w, y[None], y[None]), 64),
    "addmm_": (lambda m, y: y.clone().addmm_(y, m.w), 64),
    "baddbmm_": (lambda m, y: y[None].clone().baddbmm_(y[None], m.w[None]), 64),
    "cdist": (lambda m, y: torch.cdist(y, m.w), 64),
    "cdist of many": (lambda m, y: torch.cdist(y.repeat(10, 1), m.w), 640),
    "cdist by absolute values": (lambda m, y: torch.cdist(y, m.w, 1.0), 64),
    "conv_tbc": (lambda m, y: torch.conv_tbc(y[:, None], m.w[None], y.new_zeros(4)), 64),
    "matrix_exp": (lambda m, y: y + torch.matrix_exp(m.w)[0], 5 * 64),
    "cov": (lambda m, y: torch.cov(y), 64),
    "corrcoef": (lambda m, y: torch.corrcoef(y), 64),
    "linalg_matrix_power": (lambda m, y: torch.linalg.matrix_power(y, 2), 64),
    "_sparse_mm": (lambda m, y: torch.sparse.mm(EDGES, y), 4 * 4),
    "_sparse_addmm": (lambda m, y: torch.sparse.addmm(y, EDGES, y), 4 * 4),
}


@pytest.mark.filterwarnings("ignore:.* of the weights stay in float32", "ignore:.* does not run on shapes alone")
@pytest.mark.parametrize("name", UNRULED)
def test_products_that_no_rule_knows_are_named_listed_and_priced(name):
    function, macs = UNRULED[name]
    model = Does(lambda m, x: function(m, m.layer(x)), layer=nn.Linear(4, 4), w=nn.Parameter(torch.randn(4, 4)))
    x = torch.randn(4, 4)
    said = f"nobody asked for: {name.partition(' ')[0]} in the model;"
    with precision(quantize_(model), 4), pytest.warns(QuantizationWarning, match=said):
        model(x)
    found = check(model, (x,))
    assert [(p.layer, p.macs) for p in found.float32] == [("", macs)]
    assert count_bitops(model, (x,)).macs["(products)"] == macs
    # 2n x 2n matrices and more: that of the exponential is more than is priced, which is said
    assert found.mispriced.keys() == ({"(backward)"} if name == "matrix_exp" else set())


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    def __init__(self, loss):
        self.loss = loss


WRAPPED = {
    "dataclass": (Output, True),
    "dict": (lambda y: {"y": [y]}, True),
    "complex": (lambda y: y + 0j, True),
    "object": (Opaque, False),
    "detached": (lambda y: y.detach(), False),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_backward_pass_is_seen_or_missed_aloud(kind):
    wrap, seen = WRAPPED[kind]
    found = check(quantize_(Does(lambda m, x: wrap(m.layer(x)), layer=nn.Linear(4, 4))), (torch.randn(3, 4),))
    assert len(backward_of(found)) == seen
    assert (found.ok, found.no_gradient, "no parameter got a gradient" in str(found)) == (seen, not seen, not seen)


def test_an_input_that_needs_a_gradient_gets_one():
    x = torch.randn(3, 4, requires_grad=True)
    for frozen, macs in ((True, 48), (False, 96)):
        found = check(quantize_(nn.Linear(4, 4).requires_grad_(not frozen)), (x,))
        assert found.ok, found.mispriced
        assert backward_of(found) == [("", "mm", True, macs)]
    assert x.grad is None


def test_the_backward_pass_runs_outside_of_an_autocast_block():
    with torch.autocast("cpu", torch.bfloat16):
        found = check(quantize_(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert backward_of(found) == [("", "mm", True, 48)]


@pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")
def test_parameters_that_forward_writes_to_are_put_back():
    def forward(m, x):
        y = m.layer(x)
        with torch.no_grad():
            m.mean[0].mul_(0.9).add_(y.mean(0))
            torch.mul(m.layer.weight, 2, out=m.layer.weight)
        return y * m.mean

    model = Does(forward, layer=nn.Linear(4, 4), mean=nn.Parameter(torch.randn(2, 1, 4), requires_grad=False))
    before = copy.deepcopy(model.state_dict())
    check(quantize_(model), (torch.randn(3, 4),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


@pytest.mark.parametrize("reentrant", [True, False])
def test_products_that_a_checkpoint_computes_again_are_priced(reentrant):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Does(
        lambda m, x: checkpoint(m.block, m.first(x), use_reentrant=reentrant), first=nn.Linear(4, 4), block=block
    )
    x = torch.randn(3, 4)
    if reentrant:
        refused("give it use_reentrant=False", check, quantize_(model), (x,))
        return
    found = check(quantize_(model), (x,))
    assert found.ok, found.mispriced
    plan = count_bitops(model, (x,), convention="paper")
    assert plan.forward_macs == 3 * 48  # the paper knows of no second time
    assert plan.unpriced == {"block.0": 48}
    assert count_bitops(model, (x,)).macs == {"first": 48, "block.0": 96, "block.2": 48}


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU], ids=lambda k: k.__name__)
def test_a_forward_that_is_called_directly_is_its_module_s(kind):
    x = torch.randn(4, 3, 8)
    found = []
    for call in (lambda m, x: m.inner(x), lambda m, x: m.inner.forward(x)):
        model = quantize_(Does(call, inner=kind(8, 8)))
        if found:
            model.inner.register_forward_hook(lambda *_: 1 / 0)  # which torch does not call either
        checked, plan = check(model, (x,)), count_bitops(model, (x,), StaticSchedule(2, 1))
        assert (checked.ok, checked.quantized_share) == (True, 1)
        found.append((checked.products, plan.bitops))
        assert "forward" not in vars(model.inner)
    assert found[0] == found[1]
    model.inner._forward_hooks.clear()
    model.forward = own = partial(type(model).forward, model)
    assert check(model, (x,)).ok
    assert model.forward is own


def test_a_model_that_multiplies_at_random_is_priced_as_it_ran():
    def forward(m, x):
        for layer in m.layers:
            x = layer(x) if random.random() < 0.5 and np.random.rand() < 0.9 else x  # noqa: NPY002
        return m.last(x)

    model = quantize_(Does(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), last=nn.Linear(4, 4)))
    random.seed(0)
    assert all(check(model, (torch.randn(3, 4),)).ok for _ in range(3))
    first = random.random()
    random.seed(0)
    assert random.random() == first


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:.* does not run on shapes alone")
def test_attention_that_no_mode_sees_is_named_and_priced():
    def forward(m, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in m.qkv(x).chunk(3, -1))
        return m.out(flex_attention(q, k, v).transpose(1, 2).flatten(2))

    attention = Does(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)).requires_grad_(False)
    model, x = quantize_(nn.Sequential(attention, nn.Linear(8, 4))), torch.randn(2, 5, 8)
    said = r"nobody asked for: flex_attention \(if it runs\) in 0;"
    with pytest.warns(QuantizationWarning, match=said), precision(model, 4):
        model(x)
    found = check(model, (x,))
    assert (found.ok, [(p.layer, p.macs) for p in found.float32]) == (True, [("0", 2 * 2 * 2 * 5 * 5 * 4)])
    assert "no quantised form of flex_attention" in str(summary(model, (x,)))


def test_what_no_gradient_reaches_has_no_backward_price():
    model = Does(lambda m, x: m.head(m.encoder(x).detach()), encoder=nn.Linear(4, 4), head=nn.Linear(4, 2))
    x = torch.randn(3, 4)
    assert count_bitops(model, (x,)).bitops["encoder"] == {"forward": 48 * 32**2}
    found = check(quantize_(model), (x,))
    assert (found.ok, backward_of(found)) == (True, [("head", "mm", True, 24)])


@pytest.mark.filterwarnings("ignore:.* does not run on shapes alone")
def test_gradients_and_buffers_are_kept_where_a_closure_runs_the_model_and_not_its_copy():
    def forward(m, x):
        m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
        return m.layer(m.norm(x)) + m.mean

    model = quantize_(Does(forward, layer=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)))
    model.register_buffer("mean", torch.zeros(4))
    inner, x = model.forward, torch.randn(3, 4)
    model.forward = lambda x: inner(x)
    scheduler = PrecisionScheduler(model, StaticSchedule(4, 1))
    model(x).sum().backward()
    before = {**{n: p.grad.clone() for n, p in model.named_parameters()}, **dict(model.named_buffers())}
    held = {name: value.clone() for name, value in before.items()}
    check(model, (2 * x,))
    count_bitops(model, (2 * x,))
    after = {**{n: p.grad for n, p in model.named_parameters()}, **dict(model.named_buffers())}
    assert all(torch.equal(after[name], value) for name, value in held.items()), scheduler


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The .grad attribute")
def test_a_script_module_inside_a_model_is_counted_on_data():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="param must be a Parameter"):
        assert sum(count_bitops(model, (torch.randn(3, 4),)).macs.values()) == 2 * 3 * 4 * 4


def test_what_another_thread_left_behind_prices_nothing():
    model = quantize_(
        Does(lambda m, x: torch.cdist(m.layer(x) @ m.w, m.w), layer=nn.Linear(4, 4), w=nn.Parameter(torch.randn(4, 4)))
    )
    before = count_bitops(model, (torch.randn(3, 4),), StaticSchedule(4, 1)).total
    model.catching.multiplying = model.catching.on_codes = True
    assert count_bitops(model, (torch.randn(3, 4),), StaticSchedule(4, 1)).total == before


@pytest.mark.parametrize("training", [True, False])
def test_check_leaves_the_model_as_it_was(training):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8)]
    model = quantize_(nn.Sequential(*layers), QuantConfig(execution="integer"))
    schedule = make("CR", total_steps=40, n_cycles=2)
    twins = model, copy.deepcopy(model)
    drivers = [(PrecisionScheduler(m, schedule), torch.optim.SGD(m.parameters(), lr=0.1)) for m in twins]

    def train(model, scheduler, optimizer):
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(6, 2, 4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    for twin, driver in zip(twins, drivers, strict=True):
        train(twin, *driver)
        twin[4](torch.randn(2, 64)).sum().backward()  # some gradients are there, others are None
        twin.train(training)
        twin[1].eval()  # frozen statistics
    before = [m.training for m in model.modules()]
    inputs, random_state = (torch.randn(6, 2, 4, 4),), torch.get_rng_state()
    check(model, inputs)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [m.training for m in model.modules()] == before
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in twins[1].parameters()]
    assert identical(*([*m.parameters(), *m.buffers()] for m in twins))
    assert identical([model[4].weight.grad], [twins[1][4].weight.grad])
    for twin, driver in zip(twins, drivers, strict=True):
        train(twin, *driver)
    assert identical(*(m.parameters() for m in twins))


@pytest.mark.parametrize("function", [check, count_bitops, summary])
def test_inputs_must_be_a_tuple(function):
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    refused("inputs must be a tuple of the arguments of forward, got a Tensor", function, model, torch.randn(1, 4))


def test_the_model_is_left_as_it_was_when_it_fails():
    class Fails(nn.Sequential):
        def forward(self, x):
            super().forward(x)
            raise KeyError("broken")

    model = quantize_(Fails(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before, hooks = copy.deepcopy(model[1].running_mean), [len(m._forward_pre_hooks) for m in model.modules()]
    refused("broken", check, model, (torch.randn(3, 4),), error=KeyError)
    assert torch.equal(model[1].running_mean, before)
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert model[0].precision.in_force is None


def test_a_compiled_model_is_checked_in_eager_mode():
    model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    found = check(torch.compile(model, backend="aot_eager"), (torch.ones(2, 4),))
    assert found.ok
    assert [p.layer for p in found.products if not p.backward] == ["_orig_mod.0"]


class Recurrent(nn.LSTM):
    """Runs its own forward, step by step."""


def experts():
    """The first has no token."""
    return Does(lambda m, x: torch.cat([m.first(x[:0]), m.second(x)]), first=nn.Linear(4, 4), second=nn.Linear(4, 4))


@pytest.mark.parametrize("kind", [partial(Recurrent, 4, 3), partial(nn.LSTM, 4, 3), experts])
def test_products_without_numbers_are_none_and_a_first_step_has_no_gradient_of_its_state(kind):
    model = quantize_(kind())
    assert check(model, (torch.randn(5, 4),)).ok
    if isinstance(model, nn.LSTM):
        assert check(model, (torch.randn(5, 0, 4),)).mispriced == {}


@pytest.mark.parametrize("hidden", ["quantised", "float32"])
def test_the_products_inside_the_steps_of_an_lstm_are_seen(monkeypatch, hidden):
    if hidden == "float32":
        monkeypatch.setattr(lstm, "recurrence", lambda given: recurrence(given._replace(levels=None)))
    found = check(quantize_(nn.LSTM(4, 3)), (torch.ones(5, 2, 4),))
    rows = {(p.operation, p.backward, p.quantized): p.macs for p in found.products}
    first, second = 10 * 12 * 4, 10 * 12 * 3  # rows, gates, inputs or hidden
    if hidden == "quantised":
        forward = {("addmm", False, True): first, ("linear", False, True): second}
        # of the input's gradient there is none; those of the steps, and that of the hidden weight, are mm and linear
        assert rows == forward | {("mm", True, True): first + second, ("linear", True, True): second}
        assert found.ok
    else:
        assert rows[("linear", False, False)] == second
        assert set(found.bypassed) == {""}


@pytest.mark.parametrize("make", [
    lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)), torch.randn(2, 3, 6, 6)),
    lambda: (nn.LSTM(4, 3), torch.randn(5, 2, 4)),
])  # fmt: skip
def test_what_is_computed_on_codes_is_checked_as_its_simulation(make):
    torch.manual_seed(0)
    model, x = make()
    wanted = check(quantize_(copy.deepcopy(model)), (x,))
    model = quantize_(model, QuantConfig(execution="integer").with_shared_steps())
    with precision(model, 5, 8):
        before = model(x)
        found = check(model, (x,))
        assert found.ok
        assert (found.products, found.quantized_share) == (wanted.products, 1)
        layers = [m for m in model.modules() if isinstance(m, LayerPrecision)]
        assert all((p.execution, p.now.on_codes, p.gradient_on_codes) == ("integer", True, True) for p in layers)
        after = model(x)
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (before, after)), strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


class ByHand(torch.autograd.Function):
    """A linear layer as torch's documentation writes one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w.t())

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.mm(w), gradient.t().mm(x)


def test_float32_products_of_a_backward_pass_that_the_model_writes_are_not_ok():
    own = Does(lambda m, x: ByHand.apply(x, m.w) @ m.w, w=nn.Parameter(torch.randn(4, 4)))
    model = quantize_(nn.Sequential(nn.Linear(4, 4), own))
    found = check(model, (torch.randn(5, 4),))
    assert (found.ok, found.backward_alone) == (False, ("",))
    assert "float32 products in the backward pass alone, as of an autograd.Function: (model)" in str(found)
