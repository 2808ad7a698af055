"""Int8 matmuls in layers: as exact as the simulation, with its errors, memory layout and noise."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import FunctionModule, OpRecorder, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.roles import Quantizer
from cpt_extras.int8 import matmul as int8_matmul
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend, reference
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

NEAR = 1e-6
METHODS = {"fastest": nullcontext, "plain": reference}


def distance(y, exact):
    """Return the error relative to the summed magnitudes."""
    return float((y.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def first(model, x):
    return model.layer(x)[0]


def attention():
    """Attention of three heads, for 12 features."""
    config = BertConfig(
        attn_implementation="eager",
        hidden_size=12,
        num_attention_heads=3,
        attention_probs_dropout_prob=0.0,
    )
    return BertSelfAttention(config)


def values64(x):
    codes = x.codes.double() + x.code_offset.double()
    return codes * x.scale.double() + x.low.double()


KINDS = {
    "two-sided": lambda x: x,
    "one-sided": lambda x: x.relu(),
    "negative": lambda x: -x.abs() - 0.2,
    "far from 0": lambda x: x + 30,
    "constant": lambda x: x * 0 + 0.7,
    "one large": lambda x: x.abs() * 1e-3 + (x == x.max()),
}
SOME_KIND = st.sampled_from(sorted(KINDS))


def drawn(kind, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return KINDS[kind](torch.randn(shape, generator=generator))


# --- matmul -------------------------------------------------------------------------------------

GRANULARITY = st.sampled_from(["per_tensor", "per_row", "per_position"])


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30)
@given(
    batch=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40)),
    bits=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kinds=st.tuples(SOME_KIND, SOME_KIND),
    granularities=st.tuples(GRANULARITY, GRANULARITY),
)
def test_int8_matmul_equals_float64_of_values(
    method, batch, sizes, bits, kinds, granularities
):
    """Multiply two matrices or batches of matrices."""
    rows, terms, columns = sizes
    shapes = (*batch, rows, terms), (*batch, columns, terms)
    backend()
    a, b = (
        QuantizedTensor.quantize(
            drawn(kinds[i], *shape, seed=i), bits[i], granularities[i]
        )
        for i, shape in enumerate(shapes)
    )
    bias = drawn("two-sided", columns, seed=2)
    with METHODS[method]():
        y = int8_matmul.matmul(a, b.t(), bias)
    exact = values64(a) @ values64(b).mT + bias
    assert y.shape == exact.shape
    # where a sum cancels, its terms say how exact it can be
    magnitude = values64(a).abs() @ values64(b).abs().mT + bias.abs()
    assert float((y - exact).abs().max() / magnitude.max()) < NEAR


LONG = MAX_INT8_TERMS + 100


@pytest.mark.parametrize("shape", [(3, 8192), (3, LONG), (3, 3 * LONG), (2, 3, LONG)])
def test_int8_matmul_long_sums_do_not_overflow(shape):
    """Add the bias once to sums that are split into several int32 sums."""
    x, bias = torch.ones(shape), torch.full((3,), 1e4)
    x[..., 0, 0] = 0  # all codes but one at the end of their range
    a = QuantizedTensor.quantize(x, 8, "per_tensor")
    exact = values64(a) @ values64(a).mT
    assert distance(int8_matmul.matmul(a, a.t()), exact) < NEAR
    assert distance(int8_matmul.matmul(a, a.t(), bias), exact + bias) < NEAR


def test_int8_sum_values_of_many_rows():
    rows = 2 * int8_matmul.MAX_SUMMED_ROWS + 9
    codes = torch.full((rows, 1), -128, dtype=torch.int8)
    x = QuantizedTensor(codes, *map(torch.tensor, (-1.0, 1 / 255, 128.0)))
    assert float(int8_matmul.sum_values(x)) == pytest.approx(-rows)


def test_int8_matmul_rejects_scales_along_sum():
    a = QuantizedTensor.quantize(torch.randn(4, 6), 4, "per_row")
    message = r"scales differ along the sum: \(1, 4\)"
    refused(message, int8_matmul.matmul, a.t(), a)


@pytest.mark.parametrize(
    "granularity", ["per_tensor", "per_row", "per_channel", "per_position"]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("noise", [None, 7])
def test_int8_quantized_tensor_equals_simulation(granularity, layout, noise):
    x = torch.randn(3, 4, 5, 6).to(memory_format=layout)
    key = None if noise is None else torch.tensor(noise)
    low, width = operators.range_of(x, granularity)
    for bits in range(1, 9):
        settings = low, width, torch.tensor(2.0**bits - 1)
        tensor = QuantizedTensor.quantize_on(x, *settings, key, key is not None)
        assert tensor.codes.is_contiguous(memory_format=layout)
        grid = "per_tensor", key, key is not None
        simulated = operators.round_in_range(x, *settings, *grid)
        assert torch.equal(tensor.dequantize(), simulated)


# --- layers -------------------------------------------------------------------------------------


def is_not_projection(module, name):
    return name == "0" or not isinstance(module, nn.Linear)


def convert(layer, execution, shared=True):
    """Return a one-layer model; projections of attention stay in float32."""
    config = cpt.QuantConfig(execution=execution, attention="paper")
    config = config.with_shared_steps() if shared else config
    model = nn.Sequential(copy.deepcopy(layer))
    return cpt.quantize_(model, config, filter_fn=is_not_projection)


def both(layer, shared=True):
    return [convert(layer, execution, shared) for execution in ("integer", "simulated")]


def passes(model, x, *state, q=8, q_grad=8):
    """Return outputs, gradients of inputs and parameters, running ranges; and noise keys."""
    leaves = [t.clone().requires_grad_() for t in (x, *state)]
    inputs = (leaves[0], tuple(leaves[1:])) if state else leaves
    call = model[0] if state else model
    model.zero_grad()
    with cpt.precision(model, q, q_grad=q_grad):
        tensors = [y for y in tree_leaves(call(*inputs)) if torch.is_tensor(y)]
        outputs = [y for y in tensors if y.requires_grad]
        upstream = [torch.arange(y.numel()).cos().view_as(y) for y in outputs]
        torch.autograd.backward(outputs, upstream)
    gradients = [t.grad for t in (*leaves, *model.parameters()) if t.grad is not None]
    states = [p.get_running() for p in layer_precisions(model).values()]
    keys = [state.pop("noise_key") for state in states]
    ranges = [value for state in states for value in state.values()]
    return [*(y.detach() for y in outputs), *gradients, *ranges], keys


def compare(models, inputs, near=1e-5, **bits):
    """Check that int8 equals the simulation up to float32 sums, and draws as much noise."""
    results, keys = passes(models[0], *inputs, **bits)
    expected, expected_keys = passes(models[1], *inputs, **bits)
    assert keys == expected_keys
    for y, z in zip(results, expected, strict=True):
        assert y.shape == z.shape
        assert distance(y, z.double()) < near


def in_order(layer, x):
    lengths = torch.tensor([4, 7, 1, 7])
    return layer(pack_padded_sequence(x, lengths, enforce_sorted=False))


CONV, IMAGE = partial(nn.Conv2d, 5, 7), (4, 5, 9, 10)
LSTM, STEPS, STATE = partial(nn.LSTM, 12, 12), (7, 4, 12), (1, 4, 12)
LAYERS = {
    "linear": (lambda: nn.Linear(40, 24), (16, 40)),
    "sequence": (lambda: nn.Linear(40, 24, bias=False), (4, 9, 40)),
    "vector": (lambda: nn.Linear(40, 24), (40,)),
    "convolution": (lambda: CONV(3), IMAGE),
    "padded": (lambda: CONV(3, padding=1, bias=False), IMAGE),
    "strided": (lambda: CONV(3, padding=2, stride=2), IMAGE),
    "uneven": (lambda: CONV((3, 2), padding=(0, 1), stride=(1, 3)), IMAGE),
    "dilated": (lambda: CONV(3, padding=1, dilation=2), IMAGE),
    "1x1": (lambda: CONV(1, stride=2), IMAGE),
    "1x1, padded": (lambda: CONV(1, padding=1), (4, 5, 4, 4)),
    "one image": (lambda: CONV(3, padding=1), IMAGE[1:]),
    "circular": (lambda: CONV(3, padding=1, padding_mode="circular"), IMAGE),
    "subclass": (lambda: Doubled(12, 5), (4, 12)),
    "attention": (lambda: attention().requires_grad_(False), (3, 7, 12)),
    "a step of an LSTM": (LSTM, (1, 4, 12), STATE, STATE),
}
LSTMS = {
    "plain": (LSTM, STEPS),
    "no bias": (lambda: LSTM(bias=False), STEPS),
    "two layers": (lambda: LSTM(num_layers=2, bidirectional=True), STEPS),
    "packed": (
        lambda: FunctionModule(
            lambda m, x: in_order(m.layer, x), layer=LSTM(bidirectional=True)
        ),
        STEPS,
    ),
    "with a state": (LSTM, STEPS, STATE, STATE),
    "batch first": (lambda: LSTM(batch_first=True), (4, 7, 12)),
    "one sequence": (LSTM, (7, 12)),
    "used twice": (
        lambda: FunctionModule(lambda m, x: m.layer(m.layer(x)[0]), layer=LSTM()),
        STEPS,
    ),
}


class Doubled(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight, self.bias)


def make_layer(name):
    """Return the same new layer at every call."""
    torch.manual_seed(0)
    return (LAYERS | LSTMS)[name][0]()


def make_inputs(name, kind="two-sided"):
    shapes = (LAYERS | LSTMS)[name][1:]
    return [drawn(kind, *shape, seed=i) for i, shape in enumerate(shapes)]


BITS = {  # kind of numbers -> bits of operands and gradients
    "two-sided": ((2, 8), (4, "float")),
    "one-sided": ((3, 6), (4, 12), (8, 8)),
    "far from 0": ((8, 8),),
}
# Before an exponential, the last digits of large numbers count.
WITH_EXPONENTIALS = "attention", "a step of an LSTM"


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", LAYERS)
def test_int8_layers_equal_simulation(name, kind):
    if kind == "far from 0" and name in WITH_EXPONENTIALS:
        return
    shared = (list(LAYERS).index(name) + list(BITS).index(kind)) % 2 == 0
    with OpRecorder() as recorder:
        for q, q_grad in BITS[kind]:
            models = both(make_layer(name), shared)
            compare(models, make_inputs(name, kind), q=q, q_grad=q_grad)
    assert recorder.count("cpt::encode")


@pytest.mark.parametrize(
    ("q", "q_grad", "method"),
    [(4, 6, "plain"), (8, 8, "fastest"), (8, "float", "plain"), (6, 12, "fastest")],
)
@pytest.mark.parametrize("name", LSTMS)
def test_int8_lstm_equals_simulation(name, q, q_grad, method):
    shared = (list(LSTMS).index(name) + (q == 8)) % 2 == 0
    inputs = [x + 0.2 for x in make_inputs(name)]
    with METHODS[method]():  # a code that flips is a step of a grid
        compare(both(make_layer(name), shared), inputs, 0.02, q=q, q_grad=q_grad)


@pytest.mark.parametrize(("name", "near"), [("padded", 1e-5), ("two layers", 0.03)])
def test_int8_evaluation_uses_running_ranges_and_clips(name, near):
    models = both(make_layer(name))
    shape = make_inputs(name)[0].shape
    for seed in range(3):
        compare(models, [drawn("two-sided", *shape, seed=seed)], near)
    beyond = 4 * drawn("two-sided", *shape, seed=9)
    compare([model.eval() for model in models], [beyond], near)


LAYOUTS = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", ["padded", "strided", "1x1"])
def test_int8_results_have_simulated_memory_layout(name, shared, layout, weight_layout):
    x = drawn("two-sided", *IMAGE).to(memory_format=layout)
    layer = make_layer(name).to(memory_format=weight_layout)
    if name == "1x1" and weight_layout == torch.channels_last:
        return  # a weight of one pixel has both layouts
    upstream, strides = torch.ones_like(layer(x)).contiguous(), []
    for model in both(layer, shared):
        leaf = x.clone().requires_grad_()
        with cpt.precision(model, 8, q_grad=8):
            y = model(leaf)
        # ``leaf.grad`` would have the layout of ``leaf``
        (dx,) = torch.autograd.grad(y, leaf, upstream)
        strides.append((y.stride(), dx.stride()))
    assert strides[0] == strides[1]


# --- what runs on int8, and what the summary says ------------------------------------------------


def summary_row(model):
    (row,) = (row for row in cpt.summary(model).rows if row.quantized)
    return row


def names_of_operations(call):
    with torch.autograd.profiler.profile() as profile:
        call()
    return [event.name for event in profile.function_events]


@pytest.mark.parametrize(
    ("name", "run", "listed"),  # with the authors' steps: float matmuls
    [("linear", 1, 2), ("padded", 1, 1), ("one image", 1, 1), ("sequence", 2, 2)],
)
def test_int8_layers_run_no_supported_float_matmul(name, run, listed):
    """Run no float matmul with shared steps; with the authors' steps run those that ``summary`` lists."""
    layer, (x,) = make_layer(name), make_inputs(name)
    x = x if name == "one image" else torch.cat([x] * 4)

    def has_two_large(*operands):
        return sum(t.numel() >= layer.weight.numel() for t in operands) > 1

    matmuls = "mm", "addmm", "convolution", "convolution_backward"
    for shared in (True, False):
        model = convert(layer, "integer", shared)
        with OpRecorder() as recorder:
            passes(model, x)
        found = recorder.count(*matmuls, where=has_two_large)
        assert found == (0 if shared else run)
        # the summary does not know whether there are sequences
        assert len(summary_row(model).simulated) == (0 if shared else listed)


@pytest.mark.parametrize(
    ("execution", "shared", "simulated"),
    [
        ("integer", True, set()),
        ("integer", False, {"forward", "weight"}),
        ("auto", True, {"forward", "error", "weight"}),
    ],
)
def test_int8_attention_matmuls_run_as_in_summary(execution, shared, simulated):
    model = convert(make_layer("attention"), execution, shared)
    with OpRecorder() as recorder:
        passes(model, *make_inputs("attention"))
    assert recorder.count("bmm") == 2 * len(simulated)  # of scores and of context
    # for every sample and head; matrices of one column are sums
    matmuls = recorder.count("_int_mm", where=lambda a, b, *_: b.shape[1] > 1)
    assert matmuls == 3 * 3 * 2 * (3 - len(simulated))
    assert set(summary_row(model).simulated) == simulated


@pytest.mark.parametrize(
    ("shared", "matmuls", "simulated"),
    [(True, 2, {"weight"}), (False, 2 + 1 + 7, {"error", "weight"})],
)
def test_int8_lstm_matmuls_run_as_in_summary(shared, matmuls, simulated):
    """Simulate weight gradients; with ranges per row also input and hidden-state gradients."""
    model = convert(make_layer("plain"), "integer", shared)
    names = names_of_operations(lambda: passes(model, *make_inputs("plain")))
    assert names.count("aten::mm") + names.count("aten::addmm") == matmuls
    assert set(summary_row(model).simulated) == simulated


@pytest.mark.parametrize(
    ("quantizer", "max_terms", "reason"),
    [
        (Quantizer("per_row"), 1 << 15, "hidden states have several ranges"),
        (Quantizer("per_tensor"), 4 * 12 - 1, "sums over the gates"),
        (
            Quantizer("per_tensor", zero_point=True),
            1 << 15,
            "the grid of the hidden state has a zero point",
        ),
    ],
)
def test_int8_unsupported_lstm_is_simulated(quantizer, max_terms, reason, monkeypatch):
    monkeypatch.setattr("cpt_extras.int8.lstm.MAX_INT8_TERMS", max_terms)
    config = cpt.QuantConfig(execution="integer")
    quantizers = config.quantizers | {"lstm_hidden": quantizer}
    config = replace(config, quantizers=quantizers)
    model = cpt.quantize_(nn.Sequential(LSTM()), config)
    names = names_of_operations(lambda: passes(model, *make_inputs("plain")))
    assert "aten::_int_mm" not in names
    text = f"int8 matmuls: none (forward simulated: {reason}"
    assert text in str(cpt.summary(model))


class ComputedWeight(nn.Linear):
    """A layer without a bias that multiplies by a computed weight in a form of its own."""

    def __init__(self, multiply):
        super().__init__(6, 6, bias=False)
        self.multiply = multiply

    def forward(self, x):
        return self.multiply(x, 2 * self.weight)


def self_attention(x):
    return torch.softmax(x @ x.mT, -1) @ x


def linear_attention(x):
    return x @ (x.mT @ x)


def fused_attention(x):
    return nn.functional.scaled_dot_product_attention(x, x, x)


OTHER_ATTENTION = (self_attention, linear_attention, fused_attention)

UNSUPPORTED = {
    # with a square weight, the shapes do not show that it is transposed
    "computed weight": (ComputedWeight(lambda x, w: x @ w.T), (6, 6)),
    "computed weight first": (ComputedWeight(lambda x, w: (w @ x.T).T), (6, 6)),
    "computed weight of mm": (ComputedWeight(lambda x, w: x.mm(w.t())), (6, 6)),
    "computed weight of a batch": (
        ComputedWeight(lambda x, w: x @ w.T.expand(2, 6, 6)),
        (2, 6, 6),
    ),
    **{function.__name__: (function, (3, 7, 12)) for function in OTHER_ATTENTION},
    "outer product": (lambda x: x.flatten(0, 1)[:, :1] @ x[:1, 0], (3, 7, 12)),
    "broadcast": (lambda x: x @ x[0].mT.contiguous(), (3, 7, 12)),
    "vector": (lambda x: x @ x[0, 0], (3, 7, 12)),
    "transposed": (lambda x: x @ x.mT, (3, 7, 12)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 9, 8)),
    "padding in words": (nn.Conv2d(4, 6, 3, padding="same"), (3, 4, 9, 8)),
    "one dimension": (nn.Conv1d(4, 6, 3), (3, 4, 9)),
    "transposed convolution": (nn.ConvTranspose2d(4, 6, 3), (3, 4, 9, 8)),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_int8_unsupported_matmuls_are_simulated(name):
    """Give the simulated result bit for bit."""
    layer, shape = UNSUPPORTED[name]
    if not isinstance(layer, nn.Module):
        function = layer
        layer = FunctionModule(lambda _, x: function(x))
    models, x = both(layer), drawn("two-sided", *shape)
    with OpRecorder() as recorder:
        evaluated = []
        for model in models:
            with cpt.precision(model, 8):
                evaluated.append(model(x))
        results, expected = (passes(model, x)[0] for model in models)
    assert not recorder.count("cpt::encode")
    assert torch.equal(*evaluated)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("function", OTHER_ATTENTION)
def test_int8_other_attention_runs_as_in_summary(function):
    """Simulate attention other than the paper's, so that its gradients have gradients."""
    model = convert(FunctionModule(lambda _, x: function(x)), "integer")
    x = drawn("two-sided", 3, 7, 12).requires_grad_()
    with cpt.precision(model, 8, q_grad=8):
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    dx.sum().backward()
    assert set(summary_row(model).simulated) == {"forward", "error", "weight"}


def test_summary_lists_int8_fallbacks(golden):
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 8, 3),
        nn.Linear(8, 2),
        nn.LSTM(2, 2),
        nn.Conv1d(2, 2, 1),
    )
    config = cpt.QuantConfig(execution="integer")
    golden("int8_fallbacks.txt", str(cpt.summary(cpt.quantize_(model, config))))
    cpt.restore_(model)
    assert "int8" not in str(cpt.summary(cpt.quantize_(model)))


# --- memory and errors --------------------------------------------------------------------------


def kept(model, *inputs):
    """Return the tensors saved for the backward pass."""
    tensors = {}
    hooks = lambda t: tensors.setdefault(t.data_ptr(), t), lambda t: t
    with (
        cpt.precision(model, 8, q_grad=8),
        torch.autograd.graph.saved_tensors_hooks(*hooks),
    ):
        _ = model(*inputs)
    return list(tensors.values())


def kept_bytes(model, *inputs):
    return sum(t.numel() * t.element_size() for t in kept(model, *inputs))


def test_int8_saves_int8_tensors_for_backward():
    def shapes_of_codes(model, shape):
        tensors = kept(model, torch.randn(shape, requires_grad=True))
        return [tuple(t.shape) for t in tensors if t.dtype == torch.int8]

    layer = nn.Conv2d(16, 16, 3, padding=1)
    x = torch.randn(8, 16, 12, 12, requires_grad=True)
    int8_bytes, float_bytes = (kept_bytes(model, x) for model in both(layer))
    assert int8_bytes < 0.3 * float_bytes
    on_int8, simulated = both(make_layer("attention"))
    # queries, keys, probabilities and values
    assert len(shapes_of_codes(on_int8, (3, 7, 12))) == 4
    assert not shapes_of_codes(simulated, (3, 7, 12))
    shapes = shapes_of_codes(convert(LSTM(), "integer"), STEPS)
    assert shapes.count((7 * 4, 12)) == 2  # inputs and hidden states
    assert shapes.count((4 * 12, 12)) == 2  # both weights


# deprecated, some day
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning"
)
@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Conv2d(5, 3, 1)])
def test_int8_rejects_jit_trace_and_float64_weight(layer):
    model, simulated = both(layer)
    x, options = torch.randn(4, 5, 5, 5), {"error": RuntimeError}
    with cpt.precision(model, 8), cpt.precision(simulated.double(), 8):
        message = r"torch\.jit\.trace cannot record int8 matmuls"
        refused(message, torch.jit.trace, model, x, **options)
        message = r"weight is torch\.float64, its input is not: bring both"
        refused(message, model.double(), x, **options)
        refused("type", simulated, x, **options)
