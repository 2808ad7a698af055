"""Conversion by quantize_() and back by restore_(): layers, reasons, dtypes, devices."""

import copy
import itertools
import random
import re
import warnings
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    NEAREST,
    FunctionModule,
    identical,
    pictures,
    quantize_gradient,
    refused,
    reported_operations,
    running_ranges,
    small,
)
from torch import nn
from torch.nn.utils import parametrizations

from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import (
    QuantConfig,
    _excluded,
    layer_precisions,
    quantize_,
    restore_,
)
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import (
    PrecisionScheduler,
    _match_patterns,
    precision,
)
from cpt_core.schedules.schedule import RoleLevels, StaticSchedule
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels.backend import backend as active_kernels
from cpt_extras.kernels.backend import reference

BITS, Q_GRAD = 3, 5


def quantized_names(model):
    return [row.name for row in summary(model).quantized]


# --- a converted layer is "quantise, then call the original" ------------------------

IMAGES = (2, 4, 7, 7)


def conv(*sizes, **options):
    return lambda: nn.Conv2d(*sizes, **options)


LAYERS = {
    "plain": (conv(4, 6, 3, bias=False), IMAGES),
    "bias": (conv(4, 6, 3), IMAGES),
    "groups": (conv(4, 6, 3, groups=2), IMAGES),
    "depthwise": (conv(4, 4, 3, groups=4, stride=2, padding=1), IMAGES),
    "same": (conv(4, 6, 3, padding="same", dilation=2), IMAGES),
    "reflect": (conv(4, 6, 3, padding=(1, 2), padding_mode="reflect"), IMAGES),
    "circular": (conv(4, 6, 3, padding=1, padding_mode="circular"), IMAGES),
    "1x1": (conv(4, 6, 1), (2, 4, 1, 1)),
    "one image": (conv(4, 6, 3), (4, 7, 7)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 2, 4, 4, 4)),
    "linear": (lambda: nn.Linear(4, 6), (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), (5, 4)),
    "linear 3d": (lambda: nn.Linear(4, 6), (2, 3, 4)),
    "linear 1d": (lambda: nn.Linear(4, 6), (4,)),
    "no images": (conv(4, 6, 3), (0, 4, 7, 7)),
    "no sequences": (lambda: nn.Conv1d(4, 6, 3), (0, 4, 9)),
    "no rows": (lambda: nn.Linear(4, 6), (0, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_quantized_layer_equals_quantize_then_call(name, device):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    plain = make().to(device)
    layer = quantize_(copy.deepcopy(plain), NEAREST)
    x = torch.randn(shape, device=device).requires_grad_()
    x_plain = x.detach().clone().requires_grad_()

    role = "linear" if isinstance(plain, nn.Linear) else "conv"
    operands = {"weight": quantize(plain.weight, BITS, f"{role}_weight")}
    if plain.bias is not None:
        operands["bias"] = quantize(plain.bias, BITS, "bias")
    x_rounded = quantize(x_plain, BITS, f"{role}_input")
    expected = torch.func.functional_call(plain, operands, x_rounded)
    steps = torch.tensor(num_steps(Q_GRAD), device=device)
    quantizer = NEAREST.quantizers[f"{role}_grad"]
    upstream = torch.randn_like(expected)
    quantize_gradient(expected, steps, quantizer).backward(upstream)

    with precision(layer, BITS, q_grad=Q_GRAD):
        y = layer(x)
        y.backward(upstream)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, x_plain.grad)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert x.numel() == 0 or not torch.allclose(y, plain(x))


def test_quantize_keeps_parameters_and_restore_undoes_it():
    """Keep parameters, hooks and modes; test_refusals covers the rest."""
    model, x, calls = small().eval(), pictures(), []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    expected, parameters = model(x), dict(model.named_parameters())
    assert quantize_(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    # an optimizer stays valid
    assert all(after[name] is p for name, p in parameters.items())
    assert not any(m.training for m in model.modules())
    with precision(model, 2):
        assert not torch.equal(model(x), expected)
    assert restore_(model) is model
    assert torch.equal(model(x), expected)
    assert calls == ["hook"] * 3
    assert quantized_names(quantize_(model)) == ["0", "3", "5"]


# --- selected layers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("float32", "filter_fn", "names"),
    [
        (("3",), None, ["0", "5"]),
        (("[03]",), None, ["5"]),
        ((), lambda m, name: isinstance(m, nn.Linear), ["5"]),
        (("0",), lambda m, name: name != "5", ["3"]),
    ],
)
def test_quantize_selects_by_patterns_and_filter(float32, filter_fn, names):
    model = quantize_(small(), QuantConfig(float32=float32), filter_fn=filter_fn)
    assert quantized_names(model) == names


PARTS = {
    "0": nn.Identity(),
    "1": nn.ModuleDict({"a": nn.Identity(), "aa": nn.Identity()}),
}
NESTED = nn.ModuleDict({name: nn.ModuleDict(PARTS) for name in ("a", "b", "ab", "a1")})
NAMES = [name for name, _ in NESTED.named_modules() if name]
PATTERNS = [*NAMES, "*", "a*", "*.a", "?", "[ab]", "a?", "*.1", "a.*"]


def test_patterns_equal_one_by_one_matching():
    """Draw patterns of float32 modules, which cover descendants, and of schedules."""
    generator = random.Random(0)
    layer = SimpleNamespace(always_runs_matmul=False, holds_weights=False)
    layers = dict.fromkeys(NAMES, layer)
    for _ in range(20):
        patterns = generator.sample(PATTERNS, 4)
        first_match = {}
        for name in NAMES:
            matches = [p for p in patterns if fnmatchcase(name, p)]
            if matches:
                first_match[name] = matches[0]
        covered = {
            name
            for name in NAMES
            if any(f"{name}.".startswith(f"{match}.") for match in first_match)
        }
        assert _excluded(NESTED, tuple(patterns), {}) == covered
        assert _match_patterns(layers, patterns, "schedule") == first_match


class SamePadding(nn.Conv2d):
    """Convolution that pads as TensorFlow does, as model collections write it."""

    def forward(self, x):
        sizes = zip(x.shape[-2:], self.stride, self.kernel_size, strict=True)
        pad = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in sizes]
        x = F.pad(
            x, [pad[1] // 2, pad[1] - pad[1] // 2, pad[0] // 2, pad[0] - pad[0] // 2]
        )
        options = self.stride, 0, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *options)


PICTURES, SEQUENCES, STEPS = (2, 3, 8, 8), (2, 5, 4), (5, 4)
WITH_OWN_FORWARD = {  # name -> module, shape of inputs, layers of its matmuls
    "subclass": (lambda: SamePadding(3, 4, 3, stride=2), PICTURES, [""]),
    "transposed": (lambda: nn.ConvTranspose2d(3, 3, 2), PICTURES, [""]),
    "transposed in groups": (
        lambda: nn.ConvTranspose2d(3, 6, 2, groups=3),
        PICTURES,
        [""],
    ),
    "gru": (lambda: nn.GRU(4, 4, 2, bidirectional=True), SEQUENCES, [""]),
    "rnn": (
        lambda: nn.RNN(4, 4, nonlinearity="relu", batch_first=True, bias=False),
        SEQUENCES,
        [""],
    ),
    "projected": (lambda: nn.LSTM(4, 4, proj_size=2), SEQUENCES, [""]),
    "cell": (lambda: nn.GRUCell(4, 3), STEPS, [""]),
    "lstm cell": (lambda: nn.LSTMCell(4, 3), STEPS, [""]),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        SEQUENCES,
        ["linear1", "linear2", "self_attn", "self_attn.out_proj"],
    ),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        SEQUENCES,
        [""],
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        SEQUENCES,
        [""],
    ),
}


def flat_tensors(y):
    """Return the tensors in nested tuples."""
    if isinstance(y, torch.Tensor):
        return [y]
    return [tensor for part in y for tensor in flat_tensors(part)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("name", WITH_OWN_FORWARD)
def test_quantize_keeps_custom_forward_with_quantized_matmuls(name, is_training):
    make, shape, layers = WITH_OWN_FORWARD[name]
    torch.manual_seed(0)
    plain = make().train(is_training)
    model = quantize_(nn.ModuleDict({"other": copy.deepcopy(plain)}))
    other, x = model["other"], torch.randn(shape)

    def run(module):
        torch.manual_seed(1)  # of dropout
        return flat_tensors(module(x))

    expected = run(plain)
    with precision(model, "float"):
        torch.testing.assert_close(run(other), expected, rtol=1e-5, atol=1e-6)
    with precision(model, 16, "float"):
        torch.testing.assert_close(run(other), expected, rtol=0.01, atol=0.01)
    with precision(model, 4):
        operations = reported_operations(other, x)
    quantized = {op.layer for op in operations if op.precision is not None}
    assert quantized == {f"other.{name}".rstrip(".") for name in layers}
    # what computes a weight
    in_float32 = {op.layer for op in operations if op.precision is None}
    assert in_float32 <= {"other.parametrizations.weight.0"}
    restore_(model).eval()
    assert identical(run(other), run(plain.eval()))


@pytest.mark.parametrize("is_bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_quantize_recurrent_layers_take_packed_sequences(kind, is_bidirectional):
    torch.manual_seed(0)
    options = {"proj_size": 2} if kind == "LSTM" else {}
    plain = getattr(nn, kind)(4, 3, 2, bidirectional=is_bidirectional, **options)
    parts = [torch.randn(length, 4) for length in (2, 5, 3)]
    packed = nn.utils.rnn.pack_sequence(parts, enforce_sorted=False)
    expected, expected_state = plain(packed)
    model = quantize_(copy.deepcopy(plain))
    with precision(model, 20):
        y, state = model(packed)
    found = [y.data, *flat_tensors(state)]
    expected = [expected.data, *flat_tensors(expected_state)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def parametrised(container):
    """Return a subclass of a container that adds a position to its input, and runs its children."""

    class Parametrised(container):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.position = nn.Parameter(torch.ones(1, 3, 4))

        def forward(self, x):
            x = x + self.position
            for part in self.values() if container is nn.ModuleDict else self:
                x = part(x)
            return x

    return Parametrised


class PositionedSequential(nn.Sequential):
    """A sequence with a weight of its own that calls the forward of torch."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return super().forward(x @ self.weight)


def layers():
    return nn.Linear(4, 4), nn.Linear(4, 4)


CONTAINERS = {
    "sequential": lambda: parametrised(nn.Sequential)(*layers()),
    "list": lambda: parametrised(nn.ModuleList)(layers()),
    "dict": lambda: parametrised(nn.ModuleDict)(dict(zip("ab", layers(), strict=True))),
    "super": lambda: PositionedSequential(*layers()),
    "empty": PositionedSequential,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_quantize_container_with_weights_runs_own_children_only(name):
    torch.manual_seed(0)
    plain, x = CONTAINERS[name](), torch.randn(2, 3, 4)
    model = quantize_(nn.ModuleDict({"other": copy.deepcopy(plain)}))
    other = model["other"]
    children = [child for child, _ in plain.named_children()]
    assert [child for child, _ in other.named_children()] == children
    assert len(other) == len(plain)
    assert list(other.state_dict()) == list(plain.state_dict())
    expected = plain(x)
    with precision(model, "float"):
        assert torch.equal(other(x), expected)
    twin = copy.deepcopy(model)
    scheduler = PrecisionScheduler(model, StaticSchedule(8, 9), eval_bits=3)
    PrecisionScheduler(twin, StaticSchedule(8, 9))
    with precision(model, 8):
        y = other(x)
    assert not torch.equal(y, expected)
    assert identical([other(x), twin["other"](x)], [y, y])
    twin["other"].load_state_dict(other.state_dict())
    assert scheduler.get_last_bits() == [8]
    other.eval()(x)
    assert {p.bits for p in layer_precisions(model).values()} <= {3}
    if children:
        assert not torch.equal(other(x), y)
    restore_(model)
    assert torch.equal(model["other"](x), expected)


def test_quantize_names_module_that_runs_all_children():
    """Name a module whose forward would run its precision, and leave modules with named children alone."""

    def run_all(module, x):
        for child in module.children():
            x = child(x)
        return x @ module.weight

    weight = nn.Parameter(torch.randn(4, 4))
    inner = FunctionModule(run_all, weight=weight, layer=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with precision(quantize_(nn.Sequential(inner)), 8) as model:
        message = r"layer '0' holds weights and runs all of its children\(\)"
        refused(message, model, x, error=RuntimeError)
    listed = FunctionModule(
        lambda m, x: m.parts[0](x) @ m.weight,
        weight=weight,
        parts=nn.ModuleList([nn.Linear(4, 4)]),
    )
    with precision(quantize_(listed), 8):
        assert listed(x).shape == x.shape


class OwnParameters(nn.Module):
    """Module that overrides ``parameters``, as in meta-learning code."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return F.linear(x, self.w)

    def parameters(self):
        return [self.w]


def test_quantize_module_with_overridden_parameters_method():
    model = quantize_(OwnParameters())
    with precision(model, 4):
        operations = reported_operations(model, torch.randn(2, 8))
    assert [operation.layer for operation in operations] == [""]


# --- reports ------------------------------------------------------------------------


def test_summary_lists_unconverted_modules_with_reason():
    modules = {
        "a": nn.Embedding(4, 2),
        "b": nn.LazyLinear(3),
        "linear": nn.Linear(2, 2),
    }
    model = quantize_(nn.ModuleDict(modules), QuantConfig(float32=("b",)))
    table = summary(model)
    assert quantized_names(model) == ["linear"]
    assert [row.reason for row in table.float32] == [
        "no matmul or convolution found in its forward()",
        "lazy and without shapes: run the model once, then call quantize_",
    ]
    assert all(row.reason in str(table) for row in table.float32)


def linear_and(*others, size=4):
    return nn.Sequential(nn.Linear(4, size), *others)


def parameter_list():
    return nn.ParameterList([torch.ones(4, 4)])


SECOND = QuantConfig(float32=("1",))
HALF_IN_FLOAT32 = (
    r"^50% .* float32: 1 ParameterList "
    r"\(no matmul or convolution found in its forward\(\)\)"
)


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), None, None),
        (
            lambda: FunctionModule(lambda m, x: x @ m.w[0], w=parameter_list()),
            None,
            None,
        ),
        (lambda: linear_and(nn.LazyLinear(4)), SECOND, None),
        (lambda: linear_and(nn.PReLU(9)), None, None),
        (lambda: linear_and(nn.Linear(4, 8)), SECOND, None),
        (lambda: linear_and(nn.Embedding(9, 4), nn.LayerNorm(4)), None, None),
        (lambda: linear_and(parameter_list()), None, HALF_IN_FLOAT32),
        # less than a tenth
        (lambda: linear_and(parameter_list(), size=40), None, None),
    ],
)
def test_quantize_warns_of_weights_in_float32(make, config, message):
    model = make()
    with warnings.catch_warnings(record=True, action="always") as caught:
        quantize_(model, config)
    assert len(caught) == (message is not None)
    for warning in caught:
        assert re.match(message, str(warning.message))
        assert "\n" not in str(warning.message)
        assert warning.filename == __file__


ACTIVE_BITS = [  # execution, bits, gradient bits, their description
    ("simulated", 4, 6, "bits=4, q_grad=6, execution=simulated"),
    (
        "simulated",
        "float",
        "float",
        "bits=float32, q_grad=float32, execution=simulated",
    ),
    ("integer", 4, 12, "bits=4, q_grad=12, execution=integer"),
    (
        "integer",
        12,
        4,
        "bits=12, q_grad=4, execution=integer (simulated at these bits)",
    ),
    ("integer", "float", "float", "bits=float32, q_grad=float32, execution=integer"),
]


@pytest.mark.parametrize(("execution", "bits", "q_grad", "description"), ACTIVE_BITS)
def test_summary_and_repr_show_active_bits(execution, bits, q_grad, description):
    model = quantize_(small(), QuantConfig(execution=execution))
    layers = layer_precisions(model)

    def last_lines(n):
        return str(summary(model)).splitlines()[-n:]

    unset = f"active in {len(layers)} layers: bits=not set, execution={execution}"
    assert last_lines(1) == [unset]
    with precision(model, bits, q_grad):
        kernels = active_kernels().cpu
        shown = f"{description}, kernels={kernels}"
        for name in layers:
            assert f"({shown})" in repr(model.get_submodule(name))
        assert last_lines(1) == [f"active in {len(layers)} layers: {shown}"]
        with reference():
            assert f"{description}, kernels=reference" in repr(model)
        first, *others = layers.values()
        first.set_levels(RoleLevels(7, 3, 5, 5))
        roles = "activation=7, weight=3, error=5, weight_gradient=5"
        assert last_lines(2) == [
            f"active in 1 layer: {roles}, execution={execution}, kernels={kernels}",
            f"active in {len(others)} layers: {shown}",
        ]
    assert last_lines(1) == [unset]


# --- casts, devices, seeds ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double])
def test_precision_state_stays_float32_after_casts(dtype, device):
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))).to(device)
    with precision(model, 7, q_grad=16):
        model(torch.randn(3, 4, device=device)).sum().backward()
        model.to(dtype)
        for layer in model:
            ranges = {(x.dtype, x.device.type) for x in running_ranges(layer)}
            assert ranges == {(torch.float32, device.type)}
            assert layer.precision.num_steps == 2**7 - 1
            assert layer.precision.grad_num_steps == 2**16 - 1
        y = model(torch.randn(3, 4, device=device, dtype=dtype))
        model.zero_grad()
        y.sum().backward()
    assert y.dtype == model[0].weight.grad.dtype == dtype
    assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize_is_independent_of_default_dtype(dtype):
    """Convert and draw noise alike at every default dtype."""
    plain, x, results = nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4), []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            model = quantize_(copy.deepcopy(plain))
            with precision(model, 16, q_grad=3):
                y = model(x)
                y.cos().sum().backward()
                steps = model[0].precision.num_steps
            gradients = [p.grad for p in model.parameters()]
            results.append([y, *gradients, *running_ranges(model), steps])
        finally:
            torch.set_default_dtype(torch.float32)
    assert identical(*results)


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
        layers = [nn.Linear(2, 2) for _ in range(5)]
        model = quantize_(nn.Sequential(*layers), QuantConfig(seed=seed))
        return sorted(int(p.noise_key) for p in layer_precisions(model).values())

    first = keys(0)
    # calls before two layers have the same noise
    assert min(b - a for a, b in itertools.pairwise(first)) >= 2**20
    assert keys(0) == first
    assert not set(first) & set(keys(1))
