"""What is listed as quantised runs quantised, or a warning names it."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cpt_core.bitops.plan import count_bitops
from cpt_core.quantization.convert import QuantConfig, quantize_, restore_
from cpt_core.quantization.coverage import QuantizationWarning
from cpt_core.quantization.precision import HALF
from cpt_core.quantization.scheduler import precision
from cpt_core.quantization.summary import summary


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
def test_a_layer_that_its_parent_does_not_call_is_named_once(place, name, copied):
    model = copied(quantize_(nn.Sequential(nn.Linear(4, 4), Past(place))))
    assert name in [row.name for row in summary(model).quantized]
    with precision(model, 4), pytest.warns(QuantizationWarning, match=rf"Past did not call .* {name}:"):
        model(torch.ones(2, 4))
    assert [row.name for row in summary(model).quantized] == ["0", "1.first"]
    assert "converted, but its parent ran without calling it" in str(summary(model))
    with precision(model, 4):
        model(torch.ones(2, 4))  # a warning would be an error here
    assert not any(m._forward_hooks for m in model.modules())
    restore_(model)(torch.ones(2, 4))


class Many(nn.Module):
    """Twelve modules that pass their layers by, some of them twice, one after the other; ``fails``: not at first."""

    def __init__(self):
        super().__init__()
        self.fails, self.parts = False, nn.ModuleList([Past("child") for _ in range(6)] + [Past("list")] * 2)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        if self.fails:
            raise RuntimeError("not yet")
        return x


def test_one_warning_with_a_count_for_one_model():
    model = quantize_(nn.Sequential(nn.Linear(4, 4), Many()))
    model[1].fails = True
    said = "^Past did not call 7 quantised layers 1.parts.0.inner, 1.parts.1.inner, 1.parts.2.inner and 4 more: "
    with precision(model, 4):
        with pytest.warns(QuantizationWarning, match=said) as seen, pytest.raises(RuntimeError, match="not yet"):
            model(torch.ones(2, 4))
        assert len(seen) == 1
        model[1].fails = False
        model(torch.ones(2, 4))  # a warning would be an error here
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_parts_that_run_by_themselves_are_named_by_themselves():
    model = quantize_(Many())
    with precision(model, 4):
        for part in list(model.parts)[:2]:
            with pytest.warns(QuantizationWarning, match="Past did not call 1 quantised layer "):
                part(torch.ones(2, 4))
        with pytest.warns(QuantizationWarning, match="Past did not call 5 quantised layers "):
            model(torch.ones(2, 4))


def test_a_layer_that_its_parent_calls_the_second_time_is_not_named():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.times = nn.Linear(4, 4), 0

        def forward(self, x):
            self.times += 1
            return self.layer(x) if self.times % 2 == 0 else x

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Sometimes()

        def forward(self, x):
            return self.part(self.part(x))

    model = quantize_(Twice())
    with precision(model, 4):
        model(torch.ones(2, 4))
    assert [row.name for row in summary(model).quantized] == ["part.layer"]


def test_what_is_called_is_not_named():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))})
            self.unused = nn.Sequential(nn.Linear(4, 4))  # a branch of its own that is not taken

        def forward(self, x):
            return self.layers["b"](self.layers["a"](x))[0]

    for bits in (4, "float"):
        model = quantize_(Calls())
        with precision(model, bits):
            model(torch.ones(2, 4))
        assert len(summary(model).quantized) == 4


def test_counting_leaves_the_word_to_training():
    model = quantize_(Past("child"))
    assert count_bitops(model, (torch.ones(2, 4),), convention="paper").forward_macs == 32
    assert count_bitops(model, (torch.ones(2, 4),)).forward_macs == 64  # that past the layer runs, too
    with precision(model, 4), pytest.warns(QuantizationWarning, match="did not call"):
        model(torch.ones(2, 4))


def test_restoring_takes_the_watch_away():
    assert not any(m._forward_hooks for m in restore_(quantize_(Past("child"))).modules())


def wrapped(module):
    """What accelerate's hooks do: a forward of the instance around that of the class."""
    module.forward = functools.partial(type(module).forward, module)
    return module


def test_a_forward_of_the_instance_is_refused_where_it_would_hide_the_quantised_one():
    model = nn.Sequential(nn.Linear(4, 4), wrapped(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="layer '1' has a forward of its own"):
        quantize_(model)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    model = quantize_(model, QuantConfig(float32=("1",)))
    assert [row.name for row in summary(model).quantized] == ["0"]
    model = quantize_(wrapped(nn.Sequential(nn.Linear(4, 4))))  # a parent's is no harm
    with precision(model, 2):
        assert not torch.equal(model(x := torch.randn(5, 4)), restore_(copy.deepcopy(model))(x))
    wrapped(model[0])  # afterwards it wraps the quantised forward
    with precision(model, 2):
        assert not torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))


class Own(nn.Module):
    """A product with a weight in a module of an unknown class, as GPT-2's Conv1D."""

    def __init__(self, width):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(width, 4))

    def forward(self, x):
        return x @ self.kernel.T


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            nn.Sequential(nn.Linear(4, 4), Own(2)),
            None,
            r"^33% of the weights stay in float32: 1 Own \(no quantised form",
        ),
        (nn.Sequential(nn.Linear(4, 30), Own(3)), None, ""),  # less than a tenth
        (nn.Sequential(nn.Linear(4, 4), Own(2)), QuantConfig(float32=("1",)), ""),  # as asked for
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)), QuantConfig(float32=("1",)), ""),
        (nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4), nn.LayerNorm(4)), None, ""),  # no products
    ],
)
def test_quantize_says_what_it_left_in_float32(model, config, message):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quantize_(model, config)
    if message:
        assert len(seen) == 1
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(str(seen[0].message))
        assert "\n" not in str(seen[0].message)
        assert seen[0].filename == __file__
    else:
        assert not seen


def test_where_nothing_can_be_converted_the_error_says_why():
    with pytest.raises(ValueError, match=r"2 Linear .inside nn.TransformerEncoderLayer, whose fused path bypasses it"):
        quantize_(nn.TransformerEncoderLayer(4, 2, 8))


# --- half precision -------------------------------------------------------------------------------


def values_of_products(run, bits):
    """The number of different values of both operands of every product of a pass, at most 2**bits if they survive."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name in ("aten::mm", "aten::bmm", "aten::convolution", "aten::addmm"):
                operands = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 1]
                seen.append((name, *(o.unique().numel() for o in operands), *(o.dtype for o in operands)))
            return func(*args, **(kwargs or {}))

    seen = []
    with Watch():
        run()
    return seen


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

    def step():
        with torch.autocast("cpu", dtype, enabled=way == "autocast"), precision(model, 8):
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            assert y.dtype == (torch.float32 if kind == "lstm" and way == "autocast" else dtype)
        y.float().square().sum().backward()

    products = values_of_products(step, 8)
    assert products
    assert all(d == torch.float32 for _, *rest in products for d in rest if isinstance(d, torch.dtype))
    _, *values = products[0]
    expected = min(256, exact.unique().numel())
    assert max(v for v in values if isinstance(v, int)) > 0.9 * expected
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


def test_autocast_gives_the_float32_result_rounded_once():
    torch.manual_seed(0)
    model, x = quantize_(nn.Sequential(nn.Linear(30, 20, bias=False))), torch.rand(64, 30) + 10
    with precision(model, 8, q_grad=8):
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(x), expected.bfloat16())
    with precision(model, "float"), torch.autocast("cpu", torch.bfloat16):  # nothing to protect: as the user wants it
        assert torch.equal(model(x), F.linear(x, model[0].weight))
