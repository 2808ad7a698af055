"""Interception mode of a converted model: on only while it runs, and aware of the layer.

Covers parents that use a child's weight, graphs of torch.fx and torch.export, threads
and interrupts.
"""

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from helpers import (
    FunctionModule,
    identical,
    mode_of,
    normal,
    refused,
    reported_operations,
    save_and_load,
)
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)

import cpt_core as cpt
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.op_interception import HOOK, QuantizedOpsMode
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.tensor_rounding import quantize


def active_modes():
    """Return how many modes of converted models are on in this thread."""
    modes = _get_current_function_mode_stack()
    return sum(isinstance(mode, QuantizedOpsMode) for mode in modes)


def layers_of(model, *inputs):
    """Return the layer of every operation of a forward pass, None for float32."""
    return [
        op.layer if op.precision is not None else None
        for op in reported_operations(model, *inputs)
    ]


COPIES = {
    "the model": lambda m: m,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": save_and_load,
}


def two_layers(forward, **parts):
    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    return FunctionModule(forward, **layers, **parts)


# --- the layer of an operation ------------------------------------------------------


class WeightUser(nn.Module):
    """Module that uses a child's weight without calling the child, as Swin does."""

    def __init__(self, is_in_list=False):
        super().__init__()
        self.is_in_list, self.first = is_in_list, nn.Linear(4, 4)
        inner = nn.Linear(4, 4)
        self.inner = nn.ModuleList([inner]) if is_in_list else inner

    def forward(self, x):
        inner = self.inner[0] if self.is_in_list else self.inner
        return F.linear(self.first(x), inner.weight, inner.bias)


def test_model_has_one_mode_on_stack_of_torch():
    """Enable the mode once, so that no function is intercepted twice."""
    counts = []

    def count(m, x):
        counts.append(
            _get_current_function_mode_stack().count(vars(m.layer)[HOOK].mode)
        )
        return m.layer(x)

    inner = FunctionModule(count, layer=nn.Linear(4, 4))
    outer = FunctionModule(lambda m, x: m.inner(m.first(x)), first=nn.Linear(4, 4))
    outer.inner = inner
    with precision(quantize_(outer), 4):
        outer(torch.rand(2, 4))
    assert counts == [1]


TIED = {  # how a decoder takes the weight of its encoder
    "linear": lambda h, w: F.linear(h, w.T),
    "linear of a slice": lambda h, w: F.linear(h[..., :3], w.t()[:, :3]),
    "matmul": lambda h, w: h @ w,
    "transposed matmul": lambda h, w: (w.mT @ h.mT).mT,
    "addmm": lambda h, w: torch.addmm(w.mean(0), h, w),
    "einsum": lambda h, w: torch.einsum("bo,oi->bi", h, w),
    "convolution": lambda h, w: F.conv_transpose1d(h[None], w),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("num_outputs", [4, 6])
def test_tied_decoder_leaves_range_of_encoder(name, num_outputs):
    """Cover also a square weight, of which sizes do not tell the sides."""
    torch.manual_seed(0)
    layer = nn.Linear(4, num_outputs)
    if name == "convolution":
        layer = nn.Conv1d(num_outputs, num_outputs, 2)
    x = torch.rand(num_outputs if name == "convolution" else 5, 4)
    model = FunctionModule(
        lambda m, x: TIED[name](9 * m.layer(x), m.layer.weight), layer=layer
    )
    exact = model(x)
    quantize_(model)
    with precision(model, 8):
        layer(x)
        expected = layer.precision.running_input.clone()
        layer.precision.running_input.zero_()
        y = model(x)
        assert torch.equal(layer.precision.running_input, expected)
        # clipped to the range of the encoder's input it would be several times smaller
        for actual in (y, model.eval()(x)):
            assert (actual - exact).norm() < 0.05 * exact.norm()


def test_same_operation_shares_range_of_layer():
    """Cover spellings of what the layer computes, in the forward of its parent."""
    layer, x, ranges = nn.Linear(4, 4), torch.rand(5, 4), []
    model = quantize_(FunctionModule(None, layer=layer))
    for function in (
        lambda m, x: m.layer(x),
        lambda m, x: F.linear(x, m.layer.weight[:2]),
        lambda m, x: x @ m.layer.weight.T,
        lambda m, x: (m.layer.weight @ x.T).T,
        lambda m, x: torch.einsum("bi,oi->bo", x, m.layer.weight),
    ):
        model.function = function
        layer.precision.running_input.zero_()
        with precision(model, 8):
            model(x)
        ranges.append(layer.precision.running_input.clone())
    assert ranges[0].any()
    assert all(torch.equal(running, ranges[0]) for running in ranges)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    ("is_in_list", "name"), [(False, "1.inner"), (True, "1.inner.0")]
)
def test_parent_matmul_belongs_to_weight_owner(is_in_list, name, way):
    torch.manual_seed(0)
    model = quantize_(nn.Sequential(nn.Linear(4, 4), WeightUser(is_in_list)))
    model, x = COPIES[way](model), torch.randn(8, 4)
    layer = model.get_submodule(name)
    with precision(model, 2):
        expected = F.linear(
            quantize(model[1].first(x), 2, "linear_input"),
            quantize(layer.weight, 2, "linear_weight"),
            quantize(layer.bias, 2, "bias"),
        )
        assert torch.equal(model[1](x), expected)
        assert layers_of(model, x) == ["0", "1.first", name]
    assert layer.precision.running_input[2] > 0
    restore_(model)(x)


class ParameterUser(nn.Module):
    """Module that multiplies by its parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x @ self.w


def tied_weights():
    model = two_layers(lambda m, x: m.second(m.first(x)))
    model.second.weight = model.first.weight
    return model


def user_hook():
    model = two_layers(lambda m, x: m.first(x))
    model.first.register_forward_hook(lambda m, args, y: y @ m.weight)
    return model


def weight_container():
    part = nn.Module()
    part.w = nn.Parameter(torch.randn(4, 4))
    return FunctionModule(lambda m, x: x @ m.part.w, part=part)


def parameter_list():
    weights = nn.ParameterList([torch.ones(4, 4)])
    return FunctionModule(lambda m, x: x @ m.weights[0], weights=weights)


GLOBAL_WEIGHT = nn.Parameter(torch.randn(4, 4))
OWNERS = {  # name -> model, layers of its operations
    "tied weights": (tied_weights, ["first", "second"]),
    "tied weight, transposed": (
        lambda: two_layers(lambda m, x: m.first(x) @ m.first.weight),
        ["first", "first"],
    ),
    "slice of a weight": (
        lambda: two_layers(lambda m, x: F.linear(x, m.second.weight[:2])),
        ["second"],
    ),
    "shared module": (
        lambda: two_layers(lambda m, x: m.first(m.first(x))),
        ["first", "first"],
    ),
    "activations": (lambda: two_layers(lambda m, x: m.first(x) @ x.mT), ["first", ""]),
    "computed weight": (
        lambda: two_layers(lambda m, x: F.linear(x, 2 * m.first.weight)),
        [""],
    ),
    "weight of no module": (
        lambda: two_layers(lambda m, x: F.linear(x, GLOBAL_WEIGHT)),
        [""],
    ),
    "list of parameters": (parameter_list, [""]),
    "container of a weight": (weight_container, ["part"]),
    "forward called directly": (
        lambda: two_layers(lambda m, x: m.first.forward(x)),
        ["first"],
    ),
    "hook of a user": (user_hook, ["first", "first"]),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), [""]),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
        [""],
    ),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)).eval(), [""]),
}


@pytest.mark.parametrize("name", OWNERS)
def test_operation_belongs_to_weight_owner(name):
    make, expected = OWNERS[name]
    model = quantize_(make())
    with precision(model, 4):
        layers = layers_of(model, torch.randn(3, 4))
        assert layers_of(copy.deepcopy(model), torch.randn(3, 4)) == layers
    # what computes a weight runs in float32
    num_float32 = layers.count(None)
    assert layers == [None] * num_float32 + expected
    assert not num_float32 or parametrize.is_parametrized(model)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(
    ("excluded", "layers"), [("first", [None, "inner"]), ("inner", ["first", None])]
)
def test_excluded_module_stays_in_float32(excluded, layers, way):
    """Cover an excluded module whose weight a quantised parent uses."""
    model = COPIES[way](quantize_(WeightUser(), QuantConfig(float32=(excluded,))))
    x = torch.randn(5, 4)
    with precision(model, 2):
        assert layers_of(model, x) == layers
        layer = model.get_submodule(excluded)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def swin(block=SwinTransformerBlock, **options):
    torch.manual_seed(0)
    sizes = [4, 4], 16, [1, 1], [2, 4], [4, 4]
    return SwinTransformer(*sizes, num_classes=5, block=block, **options)


def swin_v2():
    return swin(SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


def attends():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return FunctionModule(lambda m, x: m.attention(x, x, x)[0], attention=attention)


def uses_weight(child, multiply):
    """Return a model that multiplies by the weight of a child it never calls."""
    return FunctionModule(
        lambda m, x: m.out(multiply(x, m.child.weight)),
        child=child,
        out=nn.Linear(8, 2),
    )


CHILDREN = {  # name -> model, shape of inputs, end of selected names, their number
    "Swin": (swin, (1, 3, 32, 32), "attn.qkv", 2),
    "Swin v2": (swin_v2, (1, 3, 32, 32), "attn.proj", 2),
    "multi-head attention": (attends, (2, 3, 8), "out_proj", 1),
    "convolution": (
        lambda: uses_weight(nn.Conv1d(2, 2, 1), F.conv1d),
        (3, 2, 8),
        "child",
        1,
    ),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_filter_selects_children_used_by_parent(name):
    make, shape, selected, num_layers = CHILDREN[name]
    model, x = make().eval(), normal(*shape)
    plain = copy.deepcopy(model)
    quantize_(model, filter_fn=lambda module, path: path.endswith(selected))
    names = list(layer_precisions(model))
    assert len(names) == num_layers
    with precision(model, 2), torch.no_grad():
        model.train()(x)
        model.eval()
        operations = reported_operations(model, x)
        assert not torch.allclose(plain(x), model(x), atol=1e-4)
    quantized = [op for op in operations if op.precision is not None]
    assert [op.layer for op in quantized] == names
    report = cpt.check(model, (x,))
    executed = [op for op in report.operations if op.quantized and not op.backward]
    assert {op.layer for op in executed} == set(names)
    costs = [
        cpt.count_bitops(model, (x,), StaticSchedule(bits, 1), q_grad=bits).total
        for bits in (2, 32)
    ]
    macs = sum(op.macs for op in quantized)
    assert costs[1] - costs[0] == pytest.approx(3 * macs * (1 - 4 / 1024), rel=0.35)


def test_check_names_child_with_computed_float32_weight():
    def model():
        return FunctionModule(
            lambda m, x: m.out(F.linear(x, F.normalize(m.head.weight))),
            head=nn.Linear(8, 8, bias=False),
            out=nn.Linear(8, 2),
        )

    layers_only = quantize_(
        model(), filter_fn=lambda module, path: isinstance(module, nn.Linear)
    )
    report = cpt.check(layers_only, (normal(3, 8),))
    assert report.bypassed == ("head",)
    assert "listed as quantised, but used in float32: head" in str(report)
    assert cpt.check(quantize_(model()), (normal(3, 8),)).bypassed == ()


def test_functional_call_equals_module_call():
    model = quantize_(
        two_layers(
            lambda m, x: m.own(m.first(x)) @ m.second.weight, own=ParameterUser()
        )
    )
    x = torch.randn(3, 4)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with precision(model, 3, 8):
        expected, layers = model(x), layers_of(model, x)
        assert torch.equal(torch.func.functional_call(model, values, (x,)), expected)
        around = FunctionModule(
            lambda m, x: torch.func.functional_call(m.model, values, (x,)), model=model
        )
        assert layers_of(around, x) == layers == ["first", "own", "second"]


def test_copied_submodule_does_not_hold_the_model():
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(1000, 1000)))
    with precision(model, 4):
        model[0](torch.randn(2, 4))
        assert len(pickle.dumps(model[0])) < 1e5
    copied = copy.deepcopy(model[0])
    with precision(copied, 2):
        assert layers_of(copied, torch.randn(2, 4)) == ["0"]
        assert mode_of(copied) is not mode_of(model)


@pytest.mark.slow
def test_interception_frees_parameters_made_in_forward():
    references = []

    def forward(m, x):
        weight = nn.Parameter(torch.randn(4, 4))
        references.append(weakref.ref(weight))
        return F.linear(x, weight)

    model = quantize_(two_layers(forward))
    with precision(model, 4):
        model(torch.randn(2, 4)).sum()
    gc.collect()
    assert references[0]() is None


class LateMatmul(nn.Module):
    """Module that gets a precision with its first matmul."""

    def forward(self, x):
        return x @ x.mT


def test_schedule_patterns_must_cover_late_modules():
    def model():
        return quantize_(
            nn.ModuleDict({"first": nn.Linear(6, 6), "late": LateMatmul()})
        )

    x, schedules = torch.randn(3, 6), {"first": StaticSchedule(3, 4)}
    covered, uncovered = model(), model()
    patterns = schedules | {"la*": StaticSchedule(5, 4)}
    assert PrecisionScheduler(covered, patterns).get_last_bits() == [3, 5]
    covered["late"](covered["first"](x))
    PrecisionScheduler(uncovered, schedules)
    message = r"layer 'late' matches none of the patterns of schedule, first; add '\*'"
    refused(message, uncovered["late"], x, error=RuntimeError)
    with precision(uncovered, {"fi*": 8, "la*": 8}):
        uncovered["late"](x)
    with precision(uncovered, {"fi*": 8}):
        refused(
            r"patterns of bits, fi\*; add", uncovered["late"], x, error=RuntimeError
        )
    refused(message, uncovered["late"], x, error=RuntimeError)
    unset = model()
    with precision(unset, {"fi*": 8}):
        pass
    refused("has no precision yet", unset["late"], x, error=RuntimeError)


def test_scheduler_state_fits_late_modules():
    """Load states from before and after the first matmul of a module."""

    def model(*others):
        torch.manual_seed(0)
        return quantize_(nn.Sequential(nn.Linear(4, 4), LateMatmul(), *others))

    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=2)
    first = model()
    scheduler = PrecisionScheduler(first, schedule)
    early = scheduler.state_dict()
    assert list(early["layers"]) == list(layer_precisions(first)) == ["0"]
    first(torch.randn(2, 4))
    late = scheduler.state_dict()
    assert list(late["layers"]) == list(layer_precisions(first)) == ["0", "1"]
    scheduler.load_state_dict(early)
    PrecisionScheduler(model(), schedule).load_state_dict(late)
    other = PrecisionScheduler(model(nn.Linear(4, 4)), schedule)
    refused("layers differ from the model's: 2", other.load_state_dict, late)


# --- graphs -------------------------------------------------------------------------


class ListUser(nn.Module):
    """Module that multiplies by a weight of a ParameterList."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weights = nn.ParameterList([torch.randn(4, 4)])

    def forward(self, x):
        return self.layer(x).relu() @ self.weights[0]


GRAPHS = {
    "plain": lambda model: model,
    "fx": fx.symbolic_trace,
    "export": lambda model: torch.export.export(model, (torch.ones(8, 4),)).module(),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_graph_module_is_quantized(graph):
    plain, x = ListUser(), torch.randn(8, 4)
    model = quantize_(GRAPHS[graph](copy.deepcopy(plain)))
    copied = copy.deepcopy(model)
    with precision(model, 3), precision(copied, 3):
        assert torch.equal(copied(x), model(x))
        assert not torch.equal(model(x), plain(x))
        assert None not in layers_of(model, x)
    assert torch.equal(restore_(copied)(x), plain(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class FirstElement(nn.Module):
    """Module that returns the first element of a layer's output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return torch.matmul(y, y.transpose(-1, -2))


LAYERS = {  # name -> module all of whose matmuls are in layers of torch, its input
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 8)), (3, 8)),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3)), (2, 2, 8)),
    "ConvTranspose1d": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3)), (2, 2, 8)),
    "nested": (lambda: FirstElement(nn.Sequential(nn.Linear(8, 4))), (3, 8)),
    "LSTM": (lambda: FirstElement(nn.LSTM(8, 4)), (3, 2, 8)),
    "GRU": (lambda: FirstElement(nn.GRU(8, 4)), (3, 2, 8)),
}
CODE = {
    "subclass": (lambda: nn.Sequential(Doubled(8, 8)), (3, 8)),
    "code": (Scores, (2, 3, 8)),
}


@pytest.mark.parametrize("name", [*LAYERS, *CODE])
def test_fx_graph_traced_before_conversion_is_quantized(name):
    make, shape = {**LAYERS, **CODE}[name]
    torch.manual_seed(0)
    model, x = make(), normal(*shape)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    with precision(quantize_(model), 3):
        expected = model(x)
    with precision(quantize_(traced), 3):
        assert None not in layers_of(traced, x)
        # the operation of a subclass is that of the graph, which is no nn.Linear
        assert torch.equal(traced(x), expected) or name == "subclass"
    with precision(traced, "float"):
        assert not torch.allclose(traced(x), expected, atol=1e-3)


@pytest.mark.parametrize("name", [*LAYERS, *CODE])
def test_fx_graph_traced_after_conversion_is_quantized_or_warns(name):
    make, shape = {**LAYERS, **CODE}[name]
    torch.manual_seed(0)
    model, x = quantize_(make()), normal(*shape)
    with precision(model, 3):
        expected, traced = model(x), fx.symbolic_trace(model)
    enter = precision(traced, 3).__enter__
    if name == "subclass":
        refused("the model has no quantised layers", enter)
    elif name == "code":
        message = "traced by torch.fx after quantize_"
        with pytest.warns(cpt.QuantizationWarning, match=message):
            enter()
    else:
        with precision(traced, 3):
            assert torch.equal(traced(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning",
    "ignore:.*torch.jit:DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
)
def test_traced_and_exported_programs_equal_the_model():
    model = quantize_(two_layers(lambda m, x: m.second(m.first(x) @ x.mT @ x))).eval()
    x = torch.randn(3, 4)
    with precision(model, 4), torch.no_grad():
        expected = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
        assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), expected)
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(exported(x), expected)
        assert model.to("meta")(x.to("meta")).is_meta
    assert active_modes() == 0


# --- arguments by name --------------------------------------------------------------

KEYWORDS = {  # layer -> shapes of its inputs by name
    "Linear": (lambda: nn.Linear(4, 3), {"input": (2, 4)}),
    "Conv2d": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        {"input": (1, 2, 5, 5)},
    ),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 3, 3), {"input": (1, 2, 5)}),
    "Bilinear": (lambda: nn.Bilinear(4, 3, 5), {"input1": (2, 4), "input2": (2, 3)}),
    "LSTM": (lambda: nn.LSTM(4, 3), {"input": (2, 1, 4)}),
    "GRU": (lambda: nn.GRU(4, 3), {"input": (2, 1, 4), "hx": (1, 1, 3)}),
    "RNNCell": (lambda: nn.RNNCell(4, 3), {"input": (2, 4), "hx": (2, 3)}),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(4, 2),
        {"query": (2, 1, 4), "key": (3, 1, 4), "value": (3, 1, 4)},
    ),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_layer_accepts_keyword_arguments(name):
    make, shapes = KEYWORDS[name]
    layer = make()
    model = quantize_(nn.Sequential(copy.deepcopy(layer)))
    inputs = {argument: normal(*shape) for argument, shape in shapes.items()}
    with precision(model, 3):
        y = model[0](**inputs)
        torch.testing.assert_close(y, model[0](*inputs.values()), atol=0, rtol=0)
    plain = layer(**inputs)
    if isinstance(y, tuple):
        y, plain = y[0], plain[0]
    assert not torch.allclose(y, plain, atol=1e-3)


# --- when the mode is on ------------------------------------------------------------


class Interruptible(nn.Module):
    """Module that calls a function between two layers."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def unchanged(model, x):
    return x


def raising(error):
    def between(model, x):
        raise error

    return between


@pytest.mark.parametrize(
    "error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit]
)
def test_interception_ends_after_failed_forward(error):
    """Leave later functions alone, though after an interrupt the mode stays on."""
    model, x = quantize_(nn.Sequential(Interruptible(raising(error)))), torch.ones(2, 4)
    cell, w = nn.GRUCell(4, 4), nn.Parameter(torch.randn(4, 4))
    expected = cell(x)
    with precision(model, 4):
        with pytest.raises(error):
            model(x)
        assert torch.equal(cell(x), expected)
    assert torch.equal(F.linear(x, w), x @ w.detach().T)
    model[0].between = unchanged
    with precision(model, 4):
        assert layers_of(model, x) == ["0.first", "0.last"]
    assert active_modes() == 0
    assert not mode_of(model).running.stack


def test_interception_interrupt_keeps_user_modes():
    model, x = quantize_(Interruptible(raising(KeyboardInterrupt))), torch.ones(2, 4)
    with precision(model, 4):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.between = unchanged
        with torch.device("meta"):
            model(x)
            assert active_modes() == 0
            assert torch.empty(1).is_meta


def test_interception_ends_after_failing_user_hook():
    model, x = quantize_(Interruptible(unchanged)), torch.randn(2, 4)
    handles = [
        model.last.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True),
        model.last.register_forward_hook(lambda *_: 1 / 0),
    ]
    with precision(model, 4):
        for handle in handles:
            refused("division by zero", model, x, error=ZeroDivisionError)
            handle.remove()
            assert active_modes() == 0
        assert layers_of(model, x) == ["first", "last"]


def test_interception_of_nested_converted_models():
    inner = quantize_(Interruptible(unchanged))
    num_modes = []

    def run(m, x):
        y = inner(x)
        num_modes.append(active_modes())
        return y @ y.mT

    outer = quantize_(FunctionModule(run, first=nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    with precision(inner, 4), precision(outer, 4):
        assert layers_of(outer, x) == [""]
        assert layers_of(inner, x) == ["first", "last"]
    assert num_modes == [1]
    assert active_modes() == 0


def frozen(teacher, x):
    with torch.no_grad():
        return teacher.eval()(x)


def failing(error):
    """Return a way to call a teacher whose second call fails in the middle of its forward."""

    def call(teacher, x):
        y, teacher.between = teacher(x), raising(error)
        with contextlib.suppress(error):
            teacher(x)
        teacher.between = unchanged
        return y

    return call


def beside_user_mode(teacher, x):
    with torch.device("cpu"):
        return teacher(x)


TEACHERS = {  # how a student calls a teacher
    "called": lambda teacher, x: teacher(x),
    "frozen": frozen,
    "layer by layer": lambda teacher, x: teacher.last(teacher.first(x)),
    "fails later": failing(RuntimeError),
    "interrupted later": failing(KeyboardInterrupt),
    "recomputed": lambda teacher, x: checkpoint(teacher, x, use_reentrant=False),
    "recomputed, reentrant": lambda teacher, x: checkpoint(
        teacher, x, use_reentrant=True
    ),
    "beside a mode of the user": beside_user_mode,
}


def squared(model, x):
    return x @ x.mT @ x


@pytest.mark.parametrize("teacher_bits", ["float", 3])
@pytest.mark.parametrize("name", TEACHERS)
def test_interception_of_teacher_inside_student(name, teacher_bits):
    """Cover operations of the student after it, and layers of the teacher in float32 and in the backward pass."""
    torch.manual_seed(0)
    nearest = QuantConfig().with_gradient_rounding("nearest")
    teacher = quantize_(Interruptible(unchanged), replace(nearest, float32=("first",)))
    student, call, outputs = quantize_(Interruptible(squared)), TEACHERS[name], []

    def between(model, x):
        outputs.append(call(teacher, x))
        return squared(model, x)

    def gradients():
        teacher.zero_grad()
        if outputs[-1].requires_grad:
            outputs[-1].sum().backward()
        return [p.grad for p in teacher.parameters() if p.grad is not None]

    x = normal(3, 4)
    with precision(teacher, teacher_bits), precision(student, 2):
        expected = student(x)
        outputs.append(call(teacher, student.first(x)))
        expected_gradients = gradients()
        student.between = between
        assert torch.equal(student(x), expected)
        assert identical([outputs[1], *gradients()], [outputs[0], *expected_gradients])
        # the mode of an interrupted forward stays on until the next one
        teacher(x)
    assert active_modes() == 0


def test_interception_of_student_layer_inside_teacher():
    """Cover a layer of the student that its teacher calls: it has the bits of the student."""
    torch.manual_seed(0)
    layer = FunctionModule(squared)
    teacher = quantize_(Interruptible(lambda m, x: layer(x)))
    student = quantize_(FunctionModule(lambda m, x: teacher(x), inner=layer))
    x = normal(3, 4)
    with precision(student, 2):
        with precision(teacher, "float"):
            expected = teacher.last(layer(teacher.first(x)))
            assert torch.equal(student(x), expected)
            assert torch.equal(teacher(x), expected)
        with precision(student, "float"), precision(teacher, 3):
            assert torch.equal(student(x), teacher.last(layer(teacher.first(x))))
    assert active_modes() == 0


def test_interception_of_recursive_model():
    def forward(m, x, depth=2):
        y = m.first(x)
        return m(y, depth - 1) @ y.mT if depth else y

    model = quantize_(FunctionModule(forward, first=nn.Linear(4, 4)))
    with precision(model, 4):
        assert layers_of(model, torch.randn(4, 4)) == ["first"] * 3 + ["", ""]
    assert active_modes() == 0


def test_interception_of_concurrent_threads():
    barrier = threading.Barrier(3, timeout=60)

    def between(model, x):
        barrier.wait()
        return x @ x.mT @ x

    model, inputs = quantize_(Interruptible(between)).eval(), torch.randn(3, 5, 4)

    def run(x):
        with torch.no_grad():
            y = model(x)
        return y, active_modes()

    with precision(model, 3):
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(run, inputs))
        barrier = threading.Barrier(1)
        for x, (y, num_modes) in zip(inputs, results, strict=True):
            assert torch.equal(run(x)[0], y)
            assert num_modes == 0


@pytest.mark.parametrize("is_computed", [False, True])
def test_data_parallel_replica_has_its_own_ranges(is_computed):
    """Cover a computed weight, which belongs to the running module."""
    model, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    if is_computed:
        model = FunctionModule(
            lambda m, x: F.linear(x, 2 * m.weight), weight=model.weight
        )
    quantize_(model)
    with precision(model, 3):
        # as ``DataParallel`` makes them
        replica = model._replicate_for_data_parallel()
        replica.weight, replica.bias = model.weight.detach().clone(), None
        replica._former_parameters = {"weight": replica.weight}
        replica._modules["precision"] = model.precision._replicate_for_data_parallel()
        ranges = {name: x.clone() for name, x in model.precision.ranges().items()}
        vars(replica.precision).update(ranges)
        y = replica(x)
        assert not any(running[2] for running in model.precision.ranges().values())
        assert any(running[2] for running in replica.precision.ranges().values())
        assert torch.equal(y, model(x))
