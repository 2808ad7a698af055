"""What is listed as quantised runs quantised, or a warning names it."""

import copy
import functools
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from cpt_core.quantization.coverage import FirstPass, QuantizationWarning
from helpers import Ran, refused
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.overrides import _get_current_function_mode_stack

from cpt_core.bitops.plan import count_bitops
from cpt_core.inspecting.check import check
from cpt_core.inspecting.summary import summary
from cpt_core.quantization.convert import QuantConfig, quantize_, restore_
from cpt_core.quantization.fake_quantize import quantize
from cpt_core.quantization.precision import HALF
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import StaticSchedule


class Past(nn.Module):
    """Uses the weight of a child past its forward, as Swin's attention does; a list of children does not hide that."""

    def __init__(self, place):
        super().__init__()
        self.place, self.first = place, nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4) if place == "child" else nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        inner = self.inner if self.place == "child" else self.inner[0]
        return F.linear(self.first(x), inner.weight, inner.bias)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize(("place", "name"), [("child", "1.inner"), ("list", "1.inner.0")])
def test_a_weight_that_is_used_past_its_layer_is_quantised_there(place, name, copied):
    torch.manual_seed(0)
    model, x = copied(quantize_(nn.Sequential(nn.Linear(4, 4), Past(place)))), torch.randn(8, 4)
    layer = model.get_submodule(name)
    with precision(model, 2):
        y = model[1](x)
        expected = F.linear(
            quantize(model[1].first(x), 2, "attention_query"),  # a range per row
            quantize(layer.weight, 2, "linear_weight"),
            quantize(layer.bias, 2, "bias"),
        )
        assert torch.equal(y, expected)
        model(x)
    assert [row.name for row in summary(model).quantized] == ["0", "1", "1.first"]
    assert "converted, but its parent ran without calling it" in str(summary(model))
    assert check(model, (x,)).ok
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    restore_(model)(x)


TABLE = {"product": F.linear, "pairs": torch.matmul}


class Hidden(nn.Module):
    """Multiplies by functions that its code does not name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return TABLE["product"](x, self.weight)


class Many(nn.Module):
    """Five modules of which nobody could know that they multiply, some of them run twice; ``fails``: not at first."""

    def __init__(self):
        super().__init__()
        self.fails, self.first = False, nn.Linear(4, 40)
        self.second, self.parts = nn.Linear(40, 4), nn.ModuleList([Hidden() for _ in range(5)])

    def forward(self, x):
        x = self.second(self.first(x))
        for part in [*self.parts, *self.parts]:
            x = part(x)
        if self.fails:
            raise RuntimeError("not yet")
        return x


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_products_that_nothing_caught_are_named_once(copied):
    with pytest.warns(QuantizationWarning, match="^20% of the weights stay in float32: 5 Hidden"):
        model = copied(quantize_(nn.Sequential(Many())))
    model[0].fails = True
    said = "^products in float32 that nobody asked for: linear in 0.parts.0, linear in 0.parts.1, linear in 0.parts.2 "
    with precision(model, 4):
        refused("not yet", model, torch.ones(2, 4), error=RuntimeError)
        model[0].fails = False
        with pytest.warns(QuantizationWarning, match=f"{said}and 2 more; check") as seen:
            model(torch.ones(2, 4))
        assert len(seen) == 1
        model(torch.ones(2, 4))  # a warning would be an error here
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    found = {p.layer for p in check(model, (torch.ones(2, 4),)).float32}
    assert found == {f"0.parts.{i}" for i in range(5)}


class Stopped(nn.Module):
    """Calls something before it multiplies."""

    def __init__(self, before):
        super().__init__()
        self.linear, self.before = nn.Linear(4, 4), before

    def forward(self, x):
        self.before(self, x)
        return self.linear(x)


def interrupted(model, x):
    raise KeyboardInterrupt


def on_this_thread():
    return sum(isinstance(mode, FirstPass) for mode in _get_current_function_mode_stack())


def test_what_an_interrupted_first_pass_left_on_is_put_off_by_the_next():
    x, models = torch.ones(2, 4), [quantize_(Stopped(interrupted)) for _ in range(2)]
    for model in models:
        with precision(model, 4), pytest.raises(KeyboardInterrupt):
            model(x)
    assert on_this_thread() == 1  # the second has put off that of the first
    models[1].before = lambda model, x: None
    with precision(models[1], 4):
        models[1](x)
    assert on_this_thread() == 0
    assert not models[1]._forward_hooks


def test_first_passes_inside_each_other_and_beside_each_other_end():
    def again(model, x):
        model.before = lambda model, x: None
        model(x)

    inner = quantize_(Stopped(again))
    outer = quantize_(Stopped(lambda model, x: (held[0](x), seen.append(on_this_thread()))))
    held, seen, meeting = [inner], [], Barrier(3, timeout=60)
    with precision(inner, 4), precision(outer, 4):
        outer(torch.ones(2, 4))
    assert seen == [1]  # that of the outer model; both of the inner one have ended
    assert on_this_thread() == 0

    def served(_):
        model(torch.ones(2, 4))
        return on_this_thread()

    model = quantize_(Stopped(lambda model, x: meeting.wait())).eval()
    with precision(model, 4), ThreadPoolExecutor(3) as pool:
        assert list(pool.map(served, range(3))) == [0, 0, 0]
    for module in (inner, outer, model):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_what_was_asked_for_is_not_named():
    model = quantize_(nn.Sequential(Many()), QuantConfig(float32=("0.parts.*", "0.second")))
    with precision(model, 4):
        model(torch.ones(2, 4))


def test_what_stays_in_float32_inside_a_module_that_multiplies():
    torch.manual_seed(0)
    model = nn.ModuleDict({"all": nn.MultiheadAttention(4, 2, batch_first=True), "past": Past("child")})
    expected, x = copy.deepcopy(model["past"].first), torch.randn(5, 4)
    quantize_(model, QuantConfig(float32=("past.first",)))
    assert type(model["past"].first).__name__ == "Linear"
    assert isinstance(model["past"].first, nn.Linear)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with precision(twin, 2):
            twin["past"](x)
            assert torch.equal(twin["past"].first(x), expected(x))
        assert {p.layer for p in check(twin["past"], (x,)).float32} == {"first"}
    assert next(r.reason for r in summary(model).rows if r.name == "past.first") == "left out"
    restore_(model)
    assert type(model["past"].first) is nn.Linear


def test_counting_leaves_the_word_to_training():
    with pytest.warns(QuantizationWarning, match="of the weights"):
        model = quantize_(Many())
    plan = count_bitops(model, (torch.ones(2, 4),), StaticSchedule(4, 1))
    assert plan.float32.keys() == {f"parts.{i} (products)" for i in range(5)}
    with precision(model, 4), pytest.warns(QuantizationWarning, match="nobody asked for"):
        model(torch.ones(2, 4))


def wrapped(module):
    """What accelerate's hooks do: a forward of the instance around that of the class."""
    module.forward = functools.partial(type(module).forward, module)
    return module


def test_a_forward_of_the_instance_is_refused_where_it_would_hide_the_quantised_one():
    model = nn.Sequential(nn.Linear(4, 4), wrapped(nn.Linear(4, 4)))
    refused("layer '1' has a forward of its own", quantize_, model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    model = quantize_(model, QuantConfig(float32=("1",)))
    assert [row.name for row in summary(model).quantized] == ["0"]
    model = quantize_(wrapped(nn.Sequential(nn.Linear(4, 4))))  # a parent's is no harm
    with precision(model, 2):
        assert not torch.equal(model(x := torch.randn(5, 4)), restore_(copy.deepcopy(model))(x))
    wrapped(model[0])  # afterwards it wraps the quantised forward
    with precision(model, 2):
        assert not torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))


class Listed(nn.Module):
    """Multiplies by weights that a list of parameters holds."""

    def __init__(self):
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), nn.ParameterList([torch.randn(4, 4)])

    def forward(self, x):
        return self.layer(x).relu() @ self.held[0]


TRACED = [fx.symbolic_trace, lambda model: torch.export.export(model, (torch.ones(8, 4),)).module()]


@pytest.mark.parametrize("traced", [lambda model: model, *TRACED], ids=["plain", "fx", "export"])
def test_weights_that_only_lie_in_a_module_are_those_of_the_one_that_multiplies_by_them(traced):
    plain, x = Listed(), torch.randn(8, 4)
    model = quantize_(traced(copy.deepcopy(plain)))
    copied = copy.deepcopy(model)
    with precision(model, 3), precision(copied, 3):
        assert torch.equal(copied(x), model(x))
        assert not torch.equal(model(x), plain(x))
    assert not summary(model).float32
    assert check(model, (x,)).ok
    assert count_bitops(model, (x,), StaticSchedule(3, total_steps=1)).relative_to_float32 < 0.1
    if isinstance(model, fx.GraphModule):
        refused("before its graph is compiled again", model.recompile)
    assert torch.equal(restore_(copied)(x), plain(x))
    refused("'held' matches part of 'the model'", quantize_, plain, QuantConfig(float32=("held",)))


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (Listed(), None, ""),
        (parametrizations.weight_norm(nn.Linear(4, 4)), None, ""),
        (nn.Sequential(nn.Linear(4, 4), Hidden()), None, r"^50% .* float32: 1 Hidden \(its forward names no product\)"),
        (nn.Sequential(nn.Linear(4, 40), Hidden()), None, ""),  # less than a tenth
        (nn.Sequential(nn.Linear(4, 4), Hidden()), QuantConfig(float32=("1",)), ""),  # as asked for
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), QuantConfig(float32=("1",)), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4), nn.LayerNorm(4)), None, ""),  # no products
    ],
)
def test_quantize_says_what_it_left_in_float32(model, config, message):
    with warnings.catch_warnings(record=True, action="always") as seen:
        quantize_(model, config)
    assert len(seen) == bool(message)
    for warning in seen:
        assert re.match(message, str(warning.message))
        assert "\n" not in str(warning.message)
        assert warning.filename == __file__


# --- half precision -------------------------------------------------------------------------------


HALF_MODELS = {
    "linear": (lambda: nn.Linear(300, 1, bias=False), lambda: torch.rand(64, 300) + 10),
    "conv": (lambda: nn.Conv2d(3, 1, 3, bias=False), lambda: torch.rand(4, 3, 20, 20) + 10),
    "lstm": (lambda: nn.LSTM(300, 1, bias=False), lambda: torch.rand(1, 64, 300) + 10),
}


@pytest.mark.parametrize("kind", HALF_MODELS)
@pytest.mark.parametrize("way", ["autocast", "model"])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_leaves_operands_on_their_grid(kind, way, dtype):
    """Inputs between 10 and 11, where bfloat16 has 17 values: the 256 of 8 bits reach the product all the same."""
    if kind == "lstm" and dtype == torch.float16 and way == "model":
        pytest.skip("torch has no such LSTM on the CPU")
    torch.manual_seed(0)
    make, inputs = HALF_MODELS[kind]
    model, x = quantize_(make()), inputs()
    exact = x if way == "autocast" else x.to(dtype).float()
    if way == "model":
        model, x = model.to(dtype), x.to(dtype)

    with Ran() as ran:
        with torch.autocast("cpu", dtype, enabled=way == "autocast"), precision(model, 8):
            y, *state = model(x) if kind == "lstm" else (model(x), ())
            types = {t.dtype for t in (y, *state[0])}
            assert types == {torch.float32 if kind == "lstm" and way == "autocast" else dtype}
        y.float().square().sum().backward()
    names = ("mm", "bmm", "convolution", "addmm")
    products = [[t for t in operands if t.dim() > 1] for name, operands in ran.calls if name in names]
    assert all(t.dtype == torch.float32 for operands in products for t in operands)
    assert max(t.unique().numel() for t in products[0]) > 0.9 * min(256, exact.unique().numel())
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


def test_autocast_is_torch_s_own_where_nothing_is_quantised():
    """What is quantised gives the float32 result, rounded once: test_integer_interplay."""
    model, x = quantize_(nn.Sequential(nn.Linear(30, 20, bias=False))), torch.rand(64, 30) + 10
    with precision(model, "float"), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), F.linear(x, model[0].weight))
