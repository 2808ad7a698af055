"""Unsupported weights, inputs and tools: one-sentence errors that name the remedy."""

import pytest
import torch
from helpers import normal, refused
from torch import distributed, nn
from torch.nn import functional
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import QuantConfig, precision_of, quantize_, restore_
from cpt_core.quantization.scheduler import precision


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


# --- lazy modules -----------------------------------------------------------------------------------------------------


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
        return functional.linear(x, self.weight)


LAZY = {
    "LazyLinear": (lambda: nn.LazyLinear(3), (2, 8)),
    "LazyConv2d": (lambda: nn.LazyConv2d(3, 1), (2, 4, 5, 5)),
    "LazyConvTranspose1d": (lambda: nn.LazyConvTranspose1d(3, 1), (2, 4, 5)),
    "OwnLazy": (OwnLazy, (2, 8)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "among others"])
@pytest.mark.parametrize("name", list(LAZY))
def test_quantize_rejects_lazy_module_before_first_run(name, others):
    make, shape = LAZY[name]
    model = nn.Sequential(
        *[nn.Linear(shape[-1], shape[-1]) for _ in range(others)], make()
    )
    refused(
        f"module '{others}' is a lazy {name} without weights: run the model once",
        quantize_,
        model,
    )
    if others:
        quantize_(model, QuantConfig(float32=(str(others),)))
        assert precision_of(model[-1]) is None
        restore_(model)
    model(torch.ones(shape))
    quantize_(model)
    assert [row.name for row in summary(model, (torch.ones(shape),)).quantized][
        -1
    ] == str(others)
    x = normal(*shape)
    with precision(model, 2):
        quantized = model(x)
    with precision(model, "float"):
        assert not torch.allclose(model(x), quantized, atol=1e-3)


def test_quantize_accepts_lazy_normalisation():
    model = quantize_(nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()))
    with precision(model, 4):
        assert model(torch.ones(2, 8)).shape == (2, 8)


# --- nested tensors ---------------------------------------------------------------------------------------------------


class Projected(nn.Module):
    """Module that multiplies by its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return torch.matmul(x, self.weight)


class Scored(nn.Module):
    """Module that attends without weights."""

    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("make", [net, Projected, Scored])
def test_quantized_layers_reject_nested_tensors(make, layout):
    size = (2, 3, 8) if make is Scored else (3, 8)
    x = torch.nested.nested_tensor([torch.ones(size), torch.ones(size)], layout=layout)
    model = quantize_(make())
    with precision(model, 4):
        refused("layer '0?' is given a nested tensor, .*to_padded_tensor", model, x)
        assert model(torch.nested.to_padded_tensor(x, 0.0)).shape == (2, *size)
    if layout is torch.jagged:  # torch multiplies few strided ones
        with precision(model, "float"):
            assert model(x).is_nested


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_pass_float32_layers():
    model = quantize_(net(), QuantConfig(float32=("0",)))
    x = torch.nested.nested_tensor(
        [torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged
    )
    with precision(model, 4):
        refused("layer '2' is given a nested tensor", model, x)


# --- weights that are no plain tensors --------------------------------------------------------------------------------


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
        if function is functional.linear:
            return functional.linear(args[0], args[1].data_, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_)
        raise NotImplementedError(
            f"{cls.__name__} dispatch: attempting to run unimplemented operator {function}"
        )


class Opaque(Packed):
    """Packed weight that compilers cannot take apart."""

    __tensor_flatten__ = None


def packed(kind, weight):
    return nn.Parameter(kind(weight.detach()), requires_grad=False)


def test_quantize_rejects_weight_of_foreign_tensor_class():
    model = net()
    model[0].weight = packed(Packed, model[0].weight)
    x = torch.ones(3, 8)
    expected = model(x)
    refused(
        "weight 'weight' of module '0' is a Packed, which is no plain tensor",
        quantize_,
        model,
    )
    assert torch.equal(model(x), expected)
    quantize_(model, QuantConfig(float32=("0",)))
    with precision(model, "float"):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", [Packed, Opaque])
def test_quantized_layer_rejects_foreign_weight_set_later(kind, place):
    model = quantize_(net())
    model[place].weight = packed(kind, model[place].weight)
    with precision(model, 4):
        message = (
            f"layer '{place}' multiplies a .*{kind.__name__}, which is no plain tensor"
        )
        refused(message, model, torch.ones(3, 8), error=TypeError)
        model[place].weight = nn.Parameter(torch.eye(8))
        assert model(torch.ones(3, 8)).shape == (3, 8)  # the error left nothing behind


def test_quantized_layer_keeps_errors_of_plain_tensors():
    model = quantize_(net())
    with precision(model, 4):
        refused(
            "shapes cannot be multiplied|size mismatch|must match",
            model,
            torch.ones(3, 7),
            error=RuntimeError,
        )


@pytest.fixture
def mesh():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_tensor_parallelism_is_rejected_after_conversion(style, mesh):
    from torch.distributed.tensor import parallel

    model = quantize_(net())
    weights = dict(model.named_parameters())
    message = "parameter 'weight' of layer '2' is to be sharded by tensor parallelism"
    refused(
        message,
        parallel.parallelize_module,
        model,
        mesh,
        {"2": getattr(parallel, style)()},
    )
    assert all(
        dict(model.named_parameters())[name] is weight
        for name, weight in weights.items()
    )
    parallel.parallelize_module(
        restore_(model), mesh, {"2": getattr(parallel, style)()}
    )
    refused("parameter '2.weight' is sharded already", quantize_, model)


# --- modules that quantise by themselves, scripts ---------------------------------------------------------------------


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
    refused(
        f"module '1', a {type(model[1]).__name__} of torch.ao.*, quantises by itself",
        quantize_,
        model,
    )
    quantize_(model, QuantConfig(float32=("1",)))
    assert precision_of(model[0]) is not None


class WithBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize(
    "make", [net, WithBranch, lambda: nn.Conv1d(3, 3, 1), lambda: nn.LSTM(8, 8)]
)
def test_jit_script_rejects_converted_model(make):
    model = quantize_(make())
    refused(
        "torch.jit.script cannot compile a model that quantize_ converted",
        torch.jit.script,
        model,
        error=RuntimeError,
    )
    assert isinstance(torch.jit.script(restore_(model)), torch.jit.ScriptModule)
