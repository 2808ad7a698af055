"""Models, weights, inputs and tools that are rejected: nothing changes, errors help."""

import functools

import pytest
import torch
from helpers import (
    FunctionModule,
    normal,
    pictures,
    refused,
    reported_operations,
    small,
)
from operation_samples import bert, unknown_attention
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrizations, parametrize

from cpt_core.bitops.summary import summary
from cpt_core.quantization import convert
from cpt_core.quantization.convert import QuantConfig, precision_of, quantize_, restore_
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics import float32_weights
from cpt_extras.diagnostics.float32_weights import QuantizationWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        return x


def net():
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4)
    lstm.flatten_parameters()
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    layers = {"conv": nn.Conv2d(3, 4, 3), "mlp": mlp, "own": Own(), "lstm": lstm}
    return nn.ModuleDict(layers)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def snapshot(model):
    """Return all that conversion could change: classes, attributes, hooks, tensors."""
    modules = {}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = {}
        for key, value in vars(module).items():
            if isinstance(value, dict):
                value = list(value)
            is_plain = isinstance(value, list | int | float | str | None)
            attributes[key] = value if is_plain else id(value)
        modules[name] = type(module), attributes
    return modules, {name: id(p) for name, p in model.named_parameters()}


# --- models that are not converted --------------------------------------------------


def with_precision_attribute(value):
    """Return a model with an attribute that conversion would hide."""
    model = net()
    model["own"].precision = value
    return model


def failing_filter(module, name):
    if name == "lstm":
        raise KeyError("lstm")
    return True


def converted_part():
    return nn.Sequential(quantize_(nn.Linear(2, 2)), nn.Linear(2, 2))


def list_only():
    return nn.Sequential(nn.ParameterList([torch.ones(4, 4)]))


ALREADY = r"converted already; call restore_\(model\) first"
NOTHING = "nothing to quantise: no module of {} that runs a matmul was selected"
NAME_TAKEN = r"Own\.precision has a name .* rename it"
REFUSED = {  # name -> model, arguments, error
    "unknown preset": (
        net,
        ["cifr"],
        "unknown preset 'cifr'; choose from all, cifar, imagenet",
    ),
    "pattern without a match": (
        net,
        [QuantConfig(float32=("own", "head*"))],
        r"pattern 'head\*' matches no module; similar names: ",
    ),
    "pattern of a model without parts": (
        lambda: nn.Linear(4, 4),
        [QuantConfig(float32=("own",))],
        "matches no module; similar names: none, as it has",
    ),
    "converted already": (lambda: quantize_(net()), [], ALREADY),
    "converted in part": (converted_part, [], ALREADY),
    "nothing selected": (
        net,
        [None, lambda module, name: False],
        f"{NOTHING.format('ModuleDict')} by filter_fn",
    ),
    "nothing left": (
        net,
        [QuantConfig(float32=("*",))],
        f"{NOTHING.format('ModuleDict')}$",
    ),
    "nothing to convert": (nn.ReLU, [], f"^{NOTHING.format('ReLU')}$"),
    "list of parameters": (
        list_only,
        [],
        f"^{NOTHING.format('Sequential')}; 1 Param",
    ),
    "failing filter": (net, [None, failing_filter], "lstm"),
    "attribute": (lambda: with_precision_attribute(2.0), [], NAME_TAKEN),
    "parameter": (
        lambda: with_precision_attribute(nn.Parameter(torch.ones(4))),
        [],
        NAME_TAKEN,
    ),
    "module": (lambda: with_precision_attribute(nn.ReLU()), [], NAME_TAKEN),
    "unknown config": (
        net,
        [3],
        "config must be QuantConfig or a string or None, got 3",
    ),
    "unknown attention": (
        unknown_attention,
        [],
        r"attention with 'flash_attention_2'.*attn_implementation='eager'",
    ),
    "script": (
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))),
        [],
        "nothing to quantise",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")
def test_quantize_rejects_model_without_changing_it(name):
    make, args, message = REFUSED[name]
    model = make()
    before = snapshot(model)
    refused(message, quantize_, model, *args, error=(ValueError, KeyError))
    assert snapshot(model) == before


@pytest.mark.parametrize("stage", ["precision", "hooks", "interrupt", "warning"])
@pytest.mark.parametrize("make", [net, bert])
def test_quantize_failing_midway_restores_the_model(make, stage, monkeypatch):
    """Cover a warning that is an error, as all warnings of these tests are."""
    model, calls = make(), []
    before = snapshot(model)
    error = KeyboardInterrupt if stage == "interrupt" else RuntimeError

    def fail_at_third_call(function):
        def wrapper(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise error("midway")
            return function(*args, **kwargs)

        return wrapper

    if stage == "warning":
        monkeypatch.setattr(float32_weights, "MIN_NOTABLE_SHARE", -1.0)
    else:
        name = "Interception" if stage == "hooks" else "_add_precision"
        function = getattr(convert, name)
        monkeypatch.setattr(convert, name, fail_at_third_call(function))
    with pytest.raises((RuntimeError, KeyboardInterrupt, QuantizationWarning)):
        quantize_(model)
    assert snapshot(model) == before
    monkeypatch.undo()
    assert snapshot(restore_(quantize_(model))) == before


@pytest.mark.parametrize("is_traced", [False, True], ids=["script", "trace"])
def test_quantize_leaves_scripted_children_unchanged(is_traced):
    torch.manual_seed(0)
    child = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    if is_traced:
        script = torch.jit.trace(child, torch.ones(1, 4))
    else:
        script = torch.jit.script(child)
    inner = nn.Sequential(script, nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), script, inner)
    before, expected = snapshot(model), model(torch.ones(2, 4))
    message = "33% of the weights stay in float32: 1 "
    with pytest.warns(QuantizationWarning, match=message):
        quantize_(model)
    assert None not in (precision_of(model[0]), precision_of(model[2][1]))
    assert model[1] is script
    with precision(model, 16):
        torch.testing.assert_close(model(torch.ones(2, 4)), expected, atol=1e-3, rtol=0)
    assert snapshot(restore_(model)) == before
    assert torch.equal(model(torch.ones(2, 4)), expected)


# --- layers that others change ------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class LinearSubclass(nn.Linear):
    pass


class ConvSubclass(nn.Conv2d):
    pass


def put_subclass(layer):
    is_linear = isinstance(layer, nn.Linear)
    layer.__class__ = LinearSubclass if is_linear else ConvSubclass


def remove_subclass(layer):
    layer.__class__ = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d


def put_doubled(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())


def remove_parametrisation(layer):
    parametrize.remove_parametrizations(layer, "weight")


def bind_forward(layer):
    layer.forward = functools.partial(type(layer).forward, layer)


CHANGES = {  # name -> change of a layer, its opposite
    "parametrisation": (put_doubled, remove_parametrisation),
    "weight norm": (parametrizations.weight_norm, remove_parametrisation),
    "spectral norm": (
        lambda m: parametrizations.spectral_norm(m).eval(),
        remove_parametrisation,
    ),
    "subclass": (put_subclass, remove_subclass),
    "forward of the instance": (bind_forward, lambda m: delattr(m, "forward")),
    # implemented as hooks
    "weight norm of old torch": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral norm of old torch": (
        nn.utils.spectral_norm,
        nn.utils.remove_spectral_norm,
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("time", ["before", "after", "after, undone before restore_"])
def test_quantize_handles_layers_changed_around_conversion(name, time, place):
    change, undo = CHANGES[name]
    plain, model = small().eval(), small().eval()
    change(plain[place])
    if time == "before":
        change(model[place])
    quantize_(model)
    if time != "before":
        change(model[place])
    plain.load_state_dict(model.state_dict())
    expected = plain(pictures())
    with precision(model, "float"):
        assert torch.equal(model(pictures()), expected)
    with precision(model, 4):
        operations = reported_operations(model, pictures())
        layers = [op.layer for op in operations if op.precision is not None]
        assert layers == ["0", "3", "5"]
        y = model(pictures())
        assert not torch.equal(y, expected)
        y.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in plain.named_parameters()}
    if time.endswith("restore_"):
        undo(model[place])
        undo(plain[place])
    assert torch.equal(restore_(model)(pictures()), plain(pictures()))
    for module, original in zip(model.modules(), plain.modules(), strict=True):
        assert type(module).__name__ == type(original).__name__
        assert len(module._forward_hooks) == len(original._forward_hooks)
        assert len(module._forward_pre_hooks) == len(original._forward_pre_hooks)


# --- lazy modules -------------------------------------------------------------------


class OwnLazy(LazyModuleMixin, nn.Module):
    """Lazy layer that keeps its class after its first run."""

    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()

    def initialize_parameters(self, x):
        if self.has_uninitialized_params():
            self.weight.materialize((3, x.shape[-1]))
            nn.init.ones_(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight)


LAZY = {
    "LazyLinear": (lambda: nn.LazyLinear(3), (2, 8)),
    "LazyConv2d": (lambda: nn.LazyConv2d(3, 1), (2, 4, 5, 5)),
    "LazyConvTranspose1d": (lambda: nn.LazyConvTranspose1d(3, 1), (2, 4, 5)),
    "OwnLazy": (OwnLazy, (2, 8)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("has_other", [False, True], ids=["alone", "among others"])
@pytest.mark.parametrize("name", LAZY)
def test_quantize_rejects_lazy_module_before_first_run(name, has_other):
    make, shape = LAZY[name]
    others = [nn.Linear(shape[-1], shape[-1])] if has_other else []
    model, place = nn.Sequential(*others, make()), str(len(others))
    message = f"module '{place}' is a lazy {name} without weights: run the model once"
    refused(message, quantize_, model)
    if has_other:
        quantize_(model, QuantConfig(float32=(place,)))
        assert precision_of(model[-1]) is None
        restore_(model)
    model(torch.ones(shape))
    quantize_(model)
    rows = summary(model, (torch.ones(shape),)).quantized
    assert rows[-1].name == place
    x = normal(*shape)
    with precision(model, 2):
        quantized = model(x)
    with precision(model, "float"):
        assert not torch.allclose(model(x), quantized, atol=1e-3)


def test_quantize_accepts_lazy_normalisation():
    model = quantize_(nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()))
    with precision(model, 4):
        assert model(torch.ones(2, 8)).shape == (2, 8)


# --- nested tensors -----------------------------------------------------------------


def projection():
    return FunctionModule(
        lambda m, x: torch.matmul(x, m.weight), weight=nn.Parameter(torch.eye(8))
    )


def attention():
    return FunctionModule(lambda m, x: F.scaled_dot_product_attention(x, x, x))


NESTED = {  # name -> model, shape of a sequence
    "layers": (two_layers, (3, 8)),
    "projection": (projection, (3, 8)),
    "attention": (attention, (2, 3, 8)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("name", NESTED)
def test_quantized_layer_rejects_nested_tensor(name, layout):
    make, shape = NESTED[name]
    x = torch.nested.nested_tensor([torch.ones(shape)] * 2, layout=layout)
    model = quantize_(make())
    with precision(model, 4):
        refused("layer '0?' is given a nested tensor, .*to_padded_tensor", model, x)
        assert model(torch.nested.to_padded_tensor(x, 0.0)).shape == (2, *shape)
    if layout is torch.jagged:  # torch multiplies few strided ones
        with precision(model, "float"):
            assert model(x).is_nested


# --- weights of other tensor classes ------------------------------------------------


class Packed(torch.Tensor):
    """Quantised weight as in other libraries: a wrapper that supports few operators."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.data_ = data

    def __tensor_flatten__(self):
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(tensors, meta, size, stride):
        return Packed(tensors["data_"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            return F.linear(args[0], args[1].data_, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_)
        raise NotImplementedError(f"unimplemented operator {function}")


class Opaque(Packed):
    """Packed weight that compilers cannot take apart."""

    __tensor_flatten__ = None


def pack(kind, weight):
    return nn.Parameter(kind(weight.detach()), requires_grad=False)


def test_quantize_rejects_weight_of_foreign_tensor_class():
    model, x = two_layers(), torch.ones(3, 8)
    model[0].weight = pack(Packed, model[0].weight)
    expected = model(x)
    message = "weight 'weight' of module '0' is a Packed, which is no plain tensor"
    refused(message, quantize_, model)
    assert torch.equal(model(x), expected)
    quantize_(model, QuantConfig(float32=("0",)))
    with precision(model, "float"):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", [Packed, Opaque])
def test_quantized_layer_rejects_foreign_weight_set_later(kind, place):
    model, x = quantize_(two_layers()), torch.ones(3, 8)
    model[place].weight = pack(kind, model[place].weight)
    message = f"layer '{place}' multiplies a .*{kind.__name__}, which is no plain"
    with precision(model, 4):
        refused(message, model, x, error=TypeError)
        model[place].weight = nn.Parameter(torch.eye(8))
        assert model(x).shape == (3, 8)


def test_quantized_layer_keeps_errors_of_plain_tensors():
    message = "shapes cannot be multiplied|size mismatch|must match"
    model = quantize_(two_layers())
    with precision(model, 4):
        refused(message, model, torch.ones(3, 7), error=RuntimeError)


# --- tools --------------------------------------------------------------------------


@pytest.fixture
def mesh():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_tensor_parallelism_is_rejected_after_conversion(style, mesh):
    from torch.distributed.tensor import parallel

    model = quantize_(two_layers())
    weights = dict(model.named_parameters())
    message = "parameter 'weight' of layer '2' is to be sharded by tensor parallelism"
    styles = {"2": getattr(parallel, style)()}
    refused(message, parallel.parallelize_module, model, mesh, styles)
    after = dict(model.named_parameters())
    assert all(after[name] is weight for name, weight in weights.items())
    parallel.parallelize_module(restore_(model), mesh, styles)
    refused("parameter '2.weight' is sharded already", quantize_, model)


def qat_linear():
    from torch.ao import quantization
    from torch.ao.nn import qat

    return qat.Linear(8, 8, qconfig=quantization.get_default_qat_qconfig("x86"))


def qat_conv_bn():
    from torch.ao import quantization
    from torch.ao.nn.intrinsic import qat

    return qat.ConvBn1d(3, 3, 1, qconfig=quantization.get_default_qat_qconfig("x86"))


def fake_quantize():
    from torch.ao import quantization

    return quantization.FakeQuantize()


def dynamic_linear():
    from torch.ao.nn.quantized import dynamic

    return dynamic.Linear(8, 8)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:Please use quant_min|torch.quantize_per:UserWarning",
)
@pytest.mark.parametrize(
    "make", [qat_linear, qat_conv_bn, fake_quantize, dynamic_linear]
)
def test_quantize_rejects_torch_ao_modules(make):
    model = nn.Sequential(nn.Linear(8, 8), make())
    name = type(model[1]).__name__
    message = f"module '1', a {name} of torch.ao.*, quantises by itself"
    refused(message, quantize_, model)
    quantize_(model, QuantConfig(float32=("1",)))
    assert precision_of(model[0]) is not None


class WithRecurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize(
    "make",
    [two_layers, WithRecurrence, lambda: nn.Conv1d(3, 3, 1), lambda: nn.LSTM(8, 8)],
)
def test_jit_script_rejects_converted_model(make):
    model = quantize_(make())
    message = "torch.jit.script cannot compile a model that quantize_ converted"
    refused(message, torch.jit.script, model, error=RuntimeError)
    assert isinstance(torch.jit.script(restore_(model)), torch.jit.ScriptModule)
