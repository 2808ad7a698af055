"""Conversion by quantize_() and back by restore_(): selected layers, reasons, dtypes, devices and seeds."""

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NEAREST,
    FunctionModule,
    identical,
    pictures,
    quantize_gradient,
    reported_operations,
    running_ranges,
    small,
)
from torch import nn
from torch.nn.utils import parametrizations

from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import (
    QuantConfig,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.roles import QUANTIZERS
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels.backend import backend as kernels_in_force
from cpt_extras.kernels.backend import reference

BITS, Q_GRAD = 3, 5


def quantized_names(model):
    return [row.name for row in summary(model).quantized]


# --- a converted layer is "quantise, then call the original" --------------------------------------

LAYERS = {
    "plain": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 7, 7)),
    "bias": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 7)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 7)),
    "depthwise": (
        lambda: nn.Conv2d(4, 4, 3, groups=4, stride=2, padding=1),
        (2, 4, 7, 7),
    ),
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 7)),
    "reflect": (
        lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"),
        (2, 4, 7, 7),
    ),
    "circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        (2, 4, 7, 7),
    ),
    "1x1": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 1, 1)),
    "one picture": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 7)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 4, 4)),
    "linear": (lambda: nn.Linear(4, 6), (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (5, 4)),
    "linear 3d": (lambda: nn.Linear(4, 6), (2, 3, 4)),
    "linear 1d": (lambda: nn.Linear(4, 6), (4,)),
    "no pictures": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 7, 7)),
    "no sequences": (lambda: nn.Conv1d(4, 6, 3), (0, 4, 9)),
    "no rows": (lambda: nn.Linear(4, 6), (0, 4)),
}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_quantized_layer_equals_quantize_then_call(kind, device):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    plain = make().to(device)
    layer = quantize_(copy.deepcopy(plain), NEAREST)
    x, twin = (torch.randn(shape, device=device).requires_grad_() for _ in range(2))
    twin.data.copy_(x.data)

    role = "linear" if isinstance(plain, nn.Linear) else "conv"
    operands = {"weight": quantize(plain.weight, BITS, f"{role}_weight")}
    if plain.bias is not None:
        operands["bias"] = quantize(plain.bias, BITS, "bias")
    y = torch.func.functional_call(
        plain, operands, quantize(twin, BITS, f"{role}_input")
    )
    grad_levels = torch.tensor(num_steps(Q_GRAD), device=device)
    y = quantize_gradient(y, grad_levels, NEAREST.quantizers[f"{role}_grad"])

    with precision(layer, BITS, q_grad=Q_GRAD):
        z = layer(x)
        upstream = torch.randn_like(z)
        z.backward(upstream)
    y.backward(upstream)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(x.grad, twin.grad)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert x.numel() == 0 or not torch.allclose(z, plain(x))


def test_quantize_keeps_parameters_and_restore_undoes_it():
    """Keep parameters, hooks and modes; test_refusals covers the rest."""
    model, x, calls = small().eval(), pictures(), []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    expected, parameters = model(x), dict(model.named_parameters())
    assert quantize_(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(
        after[name] is parameter for name, parameter in parameters.items()
    )  # an optimizer stays valid
    assert not any(m.training for m in model.modules())
    with precision(model, 2):
        assert not torch.equal(model(x), expected)
    assert restore_(model) is model
    assert torch.equal(model(x), expected)
    assert calls == ["hook"] * 3
    quantize_(model)  # and it can be converted again
    assert quantized_names(model) == ["0", "3", "5"]


def test_quantize_keeps_shared_modules_and_parameters():
    shared = nn.Linear(4, 4)
    model = nn.ModuleList([shared, shared, nn.Linear(4, 4)])
    model[2].weight = shared.weight
    quantize_(model)
    assert model[0] is model[1]
    assert model[2].weight is model[0].weight
    assert isinstance(restore_(model)[0], nn.Linear)


# --- what is chosen -------------------------------------------------------------------------------


def test_quantize_selects_by_patterns_and_filter():
    assert quantized_names(quantize_(small(), QuantConfig(float32=("3",)))) == [
        "0",
        "5",
    ]
    assert quantized_names(quantize_(small(), QuantConfig(float32=("[03]",)))) == ["5"]
    assert quantized_names(
        quantize_(small(), filter_fn=lambda m, name: isinstance(m, nn.Linear))
    ) == ["5"]
    both = quantize_(
        small(), QuantConfig(float32=("0",)), filter_fn=lambda m, name: name != "5"
    )
    assert quantized_names(both) == ["3"]


def test_quantize_pattern_covers_descendants():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2)
    )
    assert quantized_names(
        quantize_(copy.deepcopy(model), QuantConfig(float32=("0",)))
    ) == ["1"]
    assert quantized_names(
        quantize_(copy.deepcopy(model), QuantConfig(float32=("0.1",)))
    ) == ["0.0", "1"]


class SamePadding(nn.Conv2d):
    """Convolution that pads as TensorFlow does, as model collections write it."""

    def forward(self, x):
        pad = [
            max((-(-n // s) - 1) * s + k - n, 0)
            for n, s, k in zip(x.shape[-2:], self.stride, self.kernel_size, strict=True)
        ]
        x = F.pad(
            x, [pad[1] // 2, pad[1] - pad[1] // 2, pad[0] // 2, pad[0] - pad[0] // 2]
        )
        return F.conv2d(
            x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )


IMAGES, SEQUENCES = (2, 3, 8, 8), (2, 5, 4)
CAUGHT = {
    "subclass": (lambda: SamePadding(3, 4, 3, stride=2), IMAGES, [""]),
    "transposed": (lambda: nn.ConvTranspose2d(3, 3, 2), IMAGES, [""]),
    "transposed in groups": (
        lambda: nn.ConvTranspose2d(3, 6, 2, groups=3),
        IMAGES,
        [""],
    ),
    "gru": (lambda: nn.GRU(4, 4, 2, bidirectional=True), SEQUENCES, [""]),
    "rnn": (
        lambda: nn.RNN(4, 4, nonlinearity="relu", batch_first=True, bias=False),
        SEQUENCES,
        [""],
    ),
    "projected": (lambda: nn.LSTM(4, 4, proj_size=2), SEQUENCES, [""]),
    "cell": (lambda: nn.GRUCell(4, 3), SEQUENCES[1:], [""]),
    "lstm cell": (lambda: nn.LSTMCell(4, 3), SEQUENCES[1:], [""]),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        SEQUENCES,
        ["linear1", "linear2", "self_attn", "self_attn.out_proj"],
    ),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        SEQUENCES,
        [""],
    ),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        SEQUENCES,
        [""],
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", CAUGHT)
def test_quantize_keeps_custom_forward_with_quantized_matmuls(kind, mode):
    make, size, names = CAUGHT[kind]
    torch.manual_seed(0)
    plain = make().train(mode == "train")
    model, x = (
        quantize_(nn.ModuleDict({"other": copy.deepcopy(plain)})),
        torch.randn(size),
    )
    other = model["other"]
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    with precision(model, "float"):
        y = other(x)
    torch.manual_seed(1)
    with precision(model, 16, "float"):
        near = other(x)
    for a, b, c in zip(*map(tensors, (expected, y, near)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(c, a, rtol=0.01, atol=0.01)
    with precision(model, 4):
        operations = reported_operations(other, x)
    layers = [f"other.{name}".rstrip(".") for name in names]
    assert {
        operation.layer for operation in operations if operation.precision is not None
    } == set(layers)
    makers = {"other.parametrizations.weight.0"}  # what makes a weight
    assert {
        operation.layer for operation in operations if operation.precision is None
    } <= makers
    assert torch.equal(
        tensors(restore_(model)["other"].eval()(x))[0], tensors(plain.eval()(x))[0]
    )


def tensors(y):
    return [
        t
        for part in (y if isinstance(y, tuple) else (y,))
        for t in (part if isinstance(part, tuple) else (part,))
    ]


@pytest.mark.parametrize("both", [False, True])
def test_quantize_recurrent_layers_take_packed_sequences(both):
    torch.manual_seed(0)
    for plain in (
        nn.GRU(4, 3, 2, bidirectional=both),
        nn.LSTM(4, 3, 2, bidirectional=both, proj_size=2),
    ):
        parts = [torch.randn(n, 4) for n in (2, 5, 3)]
        packed = nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
        expected, state = plain(packed)
        model = quantize_(copy.deepcopy(plain))
        with precision(model, 20):
            y, end = model(packed)
        torch.testing.assert_close(y.data, expected.data, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(tensors(end), tensors(state), rtol=1e-3, atol=1e-4)


def test_summary_lists_unconverted_modules_with_reason():
    model = nn.ModuleDict(
        {"a": nn.Embedding(4, 2), "b": nn.LazyLinear(3), "linear": nn.Linear(2, 2)}
    )
    quantize_(model, QuantConfig(float32=("b",)))
    table = summary(model)
    assert quantized_names(model) == ["linear"]
    assert [row.reason for row in table.float32] == [
        "no matmul or convolution found in its forward()",
        "lazy and without shapes: run the model once, then call quantize_",
    ]
    assert all(row.reason in str(table) for row in table.float32)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (parametrizations.weight_norm(nn.Linear(4, 4)), None, ""),
        (
            FunctionModule(
                lambda m, x: x @ m.held[0], held=nn.ParameterList([torch.ones(4, 4)])
            ),
            None,
            "",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)),
            QuantConfig(float32=("1",)),
            "",
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU(9)), None, ""),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)),
            QuantConfig(float32=("1",)),
            "",
        ),  # as asked for
        (nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4), nn.LayerNorm(4)), None, ""),
        (
            nn.Sequential(nn.Linear(4, 4), nn.ParameterList([torch.ones(4, 4)])),
            None,
            r"^50% .* float32: 1 ParameterList \(no matmul or convolution found in its forward\(\)\)",
        ),
        (
            nn.Sequential(nn.Linear(4, 40), nn.ParameterList([torch.ones(4, 4)])),
            None,
            "",
        ),  # less than a tenth
    ],
)
def test_quantize_warns_of_weights_in_float32(model, config, message):
    with warnings.catch_warnings(record=True, action="always") as seen:
        quantize_(model, config)
    assert len(seen) == bool(message)
    for warning in seen:
        assert re.match(message, str(warning.message))
        assert "\n" not in str(warning.message)
        assert warning.filename == __file__


class Owner(nn.Module):
    """Module that overrides ``parameters``, as in meta-learning code."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return F.linear(x, self.w)

    def parameters(self):
        return [self.w]


def test_quantize_module_with_overridden_parameters_method():
    model = quantize_(Owner())
    with precision(model, 4):
        assert [
            operation.layer
            for operation in reported_operations(model, torch.randn(2, 8))
        ] == [""]


@pytest.mark.parametrize(
    ("execution", "bits", "q_grad", "said"),
    [
        ("simulated", 4, 6, "bits=4, q_grad=6, execution=simulated, kernels={}"),
        (
            "simulated",
            "float",
            "float",
            "bits=float32, q_grad=float32, execution=simulated, kernels={}",
        ),
        ("integer", 4, 12, "bits=4, q_grad=12, execution=integer, kernels={}"),
        (
            "integer",
            12,
            4,
            "bits=12, q_grad=4, execution=integer (simulated at these bits), kernels={}",
        ),
        (
            "integer",
            "float",
            "float",
            "bits=float32, q_grad=float32, execution=integer, kernels={}",
        ),
    ],
)
def test_summary_and_repr_show_active_bits(execution, bits, q_grad, said):
    model = quantize_(small(), QuantConfig(execution=execution))
    layers = layer_precisions(model)
    before = f"in force in {len(layers)} layers: bits=not set, execution={execution}"
    assert str(summary(model)).splitlines()[-1] == before
    with precision(model, bits, q_grad):
        kernels = kernels_in_force().cpu
        for name in layers:
            assert f"({said.format(kernels)})" in repr(model.get_submodule(name))
        assert (
            str(summary(model)).splitlines()[-1]
            == f"in force in {len(layers)} layers: {said.format(kernels)}"
        )
        with reference():
            assert said.format("reference") in repr(model)
        first, *others = layers.values()
        first.set_levels(RoleLevels(7, 3, 5, 5))
        roles = "activation=7, weight=3, error=5, weight_gradient=5"
        assert str(summary(model)).splitlines()[-2:] == [
            f"in force in 1 layer: {roles}, execution={execution}, kernels={kernels}",
            f"in force in {len(others)} layers: {said.format(kernels)}",
        ]
    assert str(summary(model)).splitlines()[-1] == before


# --- copies, casts and devices --------------------------------------------------------------------


@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.double,
        lambda m: m.to(torch.bfloat16),
    ],
)
def test_precision_state_stays_float32_after_casts(cast, device):
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(device)
    with precision(model, 7, q_grad=16):
        model(torch.randn(3, 4, device=device)).sum().backward()
        cast(model)
        wanted = model[0].weight.dtype
        assert wanted != torch.float32
        for layer in model:
            assert {x.dtype for x in running_ranges(layer)} == {torch.float32}
            assert (layer.precision.num_steps, layer.precision.grad_num_steps) == (
                2**7 - 1,
                2**16 - 1,
            )
            assert {x.device.type for x in running_ranges(layer)} == {device.type}
        y = model(torch.randn(3, 4, device=device, dtype=wanted))
        model.zero_grad()
        y.sum().backward()
    assert y.dtype == model[0].weight.grad.dtype == wanted
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize_is_independent_of_default_dtype(dtype):
    """Convert and draw noise alike at every default dtype."""
    plain, x, found = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4), []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            model = quantize_(copy.deepcopy(plain))
            with precision(model, 16, q_grad=3):
                y = model(x)
                y.cos().sum().backward()
                found.append(
                    [
                        y,
                        *(p.grad for p in model.parameters()),
                        *running_ranges(model),
                        model[0].precision.num_steps,
                    ]
                )
        finally:
            torch.set_default_dtype(torch.float32)
    assert identical(*found)


def test_quantize_is_independent_of_default_device():
    model = nn.Sequential(nn.Linear(4, 2))
    with torch.device("meta"):  # like torch.set_default_device
        quantize_(model)
        empty = quantize_(nn.Sequential(nn.Linear(4, 2)))
    assert {x.device.type for x in running_ranges(model)} == {"cpu"}
    assert {x.device.type for x in running_ranges(empty)} == {"meta"}
    with precision(empty.eval(), 4):
        assert empty(torch.empty(3, 4, device="meta")).shape == (3, 2)
    with precision(model, 4), torch.device("meta"):
        model(torch.ones(3, 4, device="cpu")).sum().backward()
    assert model[0].weight.grad.isfinite().all()


def test_quantize_gives_layers_distinct_noise_keys():
    def keys(seed):
        model = quantize_(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), QuantConfig(seed=seed)
        )
        return [int(p.noise_key) for p in layer_precisions(model).values()]

    first = sorted(keys(0))
    assert (
        min(b - a for a, b in itertools.pairwise(first)) >= 2**20
    )  # calls before two layers have the same noise
    assert keys(0) == keys(0)
    assert not set(first) & set(keys(1))


def test_quant_config_selects_gradient_rounding():
    config = QuantConfig().with_gradient_rounding("nearest")
    assert {
        q.rounding for k, q in config.quantizers.items() if k.endswith("_grad")
    } == {"nearest"}
    assert {k: q for k, q in config.quantizers.items() if not k.endswith("_grad")} == {
        k: q for k, q in QUANTIZERS.items() if not k.endswith("_grad")
    }
    assert config.with_gradient_rounding("stochastic") == QuantConfig()
