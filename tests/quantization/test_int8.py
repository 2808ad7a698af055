"""Int8 matmuls in layers: as exact as the simulation, with its errors, memory layout and noise."""

import copy
from contextlib import nullcontext
from dataclasses import replace

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
from cpt_extras.int8 import matmul as integer
from cpt_extras.int8.matmul import matmul
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend, reference
from cpt_extras.kernels.gemm_backend import MAX_INT8_TERMS

NEAR = 1e-6


def distance(y, exact):
    """Return the error relative to the summed magnitudes."""
    return float((y.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def first(model, x):
    return model.layer(x)[0]


def attention():
    """Attention of three heads, for 12 features."""
    sizes = {
        "hidden_size": 12,
        "num_attention_heads": 3,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertSelfAttention(BertConfig(attn_implementation="eager", **sizes))


def values64(x):
    return (
        x.codes.double() + x.code_offset.double()
    ) * x.scale.double() + x.low.double()


def convert(layer, execution, shared=True, **kwargs):
    """Return a one-layer model; projections of attention stay in float32."""
    config = cpt.QuantConfig(execution=execution, **{"attention": "paper"} | kwargs)
    config = config.with_shared_steps() if shared else config
    whole = lambda module, name: name == "0" or not isinstance(module, nn.Linear)  # noqa: E731
    return cpt.quantize_(nn.Sequential(copy.deepcopy(layer)), config, filter_fn=whole)


def both(layer, shared=True):
    return [convert(layer, execution, shared) for execution in ("integer", "simulated")]


def passes(model, x, *state, q=8, q_grad=8):
    """Return outputs, gradients of inputs and parameters, running ranges and noise keys."""
    leaves = [t.clone().requires_grad_() for t in (x, *state)]
    model.zero_grad()
    with cpt.precision(model, q, q_grad=q_grad):
        outputs = model[0](leaves[0], tuple(leaves[1:])) if state else model[0](*leaves)
        outputs = [
            y
            for y in tree_leaves(outputs)
            if isinstance(y, torch.Tensor) and y.requires_grad
        ]
        torch.autograd.backward(
            outputs, [torch.arange(y.numel()).cos().view_as(y) for y in outputs]
        )
    found = [
        *(y.detach() for y in outputs),
        *(t.grad for t in (*leaves, *model.parameters()) if t.grad is not None),
    ]
    running = [p.get_running() for p in layer_precisions(model).values()]
    return found + [v for r in running for n, v in r.items() if n != "noise_key"], [
        r["noise_key"] for r in running
    ]


def compare(models, inputs, near=1e-5, **bits):
    """Check that int8 equals the simulation up to float32 sums, and draws as much noise."""
    (found, keys), (expected, expected_keys) = (
        passes(model, *inputs, **bits) for model in models
    )
    assert keys == expected_keys
    for y, z in zip(found, expected, strict=True):
        assert y.shape == z.shape
        assert distance(y, z.double()) < near


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
    return KINDS[kind](
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    outer=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40)),
    bits=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kinds=st.tuples(SOME_KIND, SOME_KIND),
    names=st.tuples(*[st.sampled_from(["per_tensor", "per_row", "per_position"])] * 2),
    plain=st.booleans(),
)
def test_int8_matmul_equals_float64_of_values(outer, sizes, bits, kinds, names, plain):
    """Multiply two matrices or batches of matrices."""
    M, K, N = sizes
    backend()
    a = QuantizedTensor.quantize(drawn(kinds[0], *outer, M, K), bits[0], names[0])
    b = QuantizedTensor.quantize(
        drawn(kinds[1], *outer, N, K, seed=1), bits[1], names[1]
    )
    bias = drawn("two-sided", N, seed=2)
    with reference() if plain else nullcontext():
        y = matmul(a, b.t(), bias)
    exact = values64(a) @ values64(b).mT + bias
    terms = (
        values64(a).abs() @ values64(b).abs().mT
    )  # where the sum cancels, its terms say how exact it can be
    assert y.shape == exact.shape
    assert float((y - exact).abs().max() / (terms + bias.abs()).max()) < NEAR


@pytest.mark.parametrize(
    "shape",
    [
        (3, 8192),
        (3, MAX_INT8_TERMS + 100),
        (3, 3 * MAX_INT8_TERMS),
        (2, 3, MAX_INT8_TERMS + 100),
    ],
)
def test_int8_matmul_long_sums_do_not_overflow(shape):
    """Add the bias once to sums that are split into several int32 sums."""
    x, bias = torch.ones(shape), torch.full((3,), 1e4)
    x[..., 0, 0] = 0  # all codes but one at the end of their range
    a = QuantizedTensor.quantize(x, 8, "per_tensor")
    exact = values64(a) @ values64(a).mT
    assert distance(matmul(a, a.t()), exact) < NEAR
    assert distance(matmul(a, a.t(), bias), exact + bias) < NEAR


def test_int8_sum_values_of_many_rows():
    rows = 2 * integer.MAX_SUMMED_ROWS + 9
    x = QuantizedTensor(
        torch.full((rows, 1), -128, dtype=torch.int8),
        *map(torch.tensor, (-1.0, 1 / 255, 128.0)),
    )
    assert float(integer.sum_values(x)) == pytest.approx(-rows)


def test_int8_matmul_rejects_scales_along_sum():
    a = QuantizedTensor.quantize(torch.randn(4, 6), 4, "per_row")
    refused(r"scales differ along the sum: \(1, 4\)", matmul, a.t(), a)


@pytest.mark.parametrize(
    "granularity", ["per_tensor", "per_row", "per_channel", "per_position"]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("noise", [None, 7])
def test_int8_quantized_tensor_equals_simulation(granularity, layout, noise):
    backend()
    x = torch.randn(3, 4, 5, 6).to(memory_format=layout)
    key = None if noise is None else torch.tensor(noise)
    for bits in range(1, 9):
        levels = torch.tensor(2.0**bits - 1)
        low, width = operators.range_of(x, granularity)
        there = QuantizedTensor.quantize_on(x, low, width, levels, key, key is not None)
        assert there.codes.is_contiguous(memory_format=layout)
        with reference():
            plain = QuantizedTensor.quantize_on(
                x, low, width, levels, key, key is not None
            )
        assert torch.equal(there.codes, plain.codes)
        simulated = operators.round_in_range(
            x, low, width, levels, "per_tensor", key, key is not None
        )
        assert torch.equal(there.dequantize(), simulated)


LAYERS = {
    "linear": (lambda: nn.Linear(40, 24), (16, 40)),
    "sequence": (lambda: nn.Linear(40, 24, bias=False), (4, 9, 40)),
    "vector": (lambda: nn.Linear(40, 24), (40,)),
    "convolution": (lambda: nn.Conv2d(5, 7, 3), (4, 5, 9, 10)),
    "padded": (lambda: nn.Conv2d(5, 7, 3, padding=1, bias=False), (4, 5, 9, 10)),
    "strided": (lambda: nn.Conv2d(5, 7, 3, padding=2, stride=2), (4, 5, 9, 10)),
    "uneven": (
        lambda: nn.Conv2d(5, 7, (3, 2), padding=(0, 1), stride=(1, 3)),
        (2, 5, 9, 10),
    ),
    "dilated": (lambda: nn.Conv2d(5, 7, 3, padding=1, dilation=2), (4, 5, 9, 10)),
    "1x1": (lambda: nn.Conv2d(5, 7, 1, stride=2), (4, 5, 9, 10)),
    "1x1, padded": (lambda: nn.Conv2d(5, 7, 1, padding=1), (4, 5, 4, 4)),
    "one image": (lambda: nn.Conv2d(5, 7, 3, padding=1), (5, 9, 10)),
    "attention": (lambda: attention().requires_grad_(False), (3, 7, 12)),
    "a step of an LSTM": (lambda: nn.LSTM(12, 12), (1, 4, 12), (1, 4, 12), (1, 4, 12)),
}


def made(table, name):
    """Return the same new layer at every call."""
    torch.manual_seed(0)
    return table[name][0]()


# the bits of numbers
NUMBERS = {
    "two-sided": ((2, 8), (4, "float")),
    "one-sided": ((3, 6), (4, 12), (8, 8)),
    "far from 0": ((8, 8),),
}
SCORES = (
    "attention",
    "a step of an LSTM",
)  # where large numbers meet an exponential, last digits count
CASES = [
    (name, kind, (i + j) % 2 == 0)
    for i, name in enumerate(LAYERS)
    for j, kind in enumerate(NUMBERS)
    if kind != "far from 0" or name not in SCORES
]


@pytest.mark.parametrize(("name", "kind", "shared"), CASES)
def test_int8_layers_equal_simulation(name, kind, shared):
    for q, q_grad in NUMBERS[kind]:
        inputs = [
            drawn(kind, *shape, seed=i) for i, shape in enumerate(LAYERS[name][1:])
        ]
        compare(both(made(LAYERS, name), shared), inputs, q=q, q_grad=q_grad)


LENGTHS = torch.tensor([4, 7, 1, 7])
LSTMS = {
    "plain": (lambda: nn.LSTM(12, 12), (7, 4, 12)),
    "no bias": (lambda: nn.LSTM(12, 12, bias=False), (7, 4, 12)),
    "two layers": (
        lambda: nn.LSTM(12, 12, num_layers=2, bidirectional=True),
        (7, 4, 12),
    ),
    "packed": (
        lambda: FunctionModule(
            lambda m, x: m.layer(
                pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
            ),
            layer=nn.LSTM(12, 12, bidirectional=True),
        ),
        (7, 4, 12),
    ),
    "with a state": (lambda: nn.LSTM(12, 12), (7, 4, 12), (1, 4, 12), (1, 4, 12)),
    "batch first": (lambda: nn.LSTM(12, 12, batch_first=True), (4, 7, 12)),
    "one sequence": (lambda: nn.LSTM(12, 12), (7, 12)),
    "used twice": (
        lambda: FunctionModule(
            lambda m, x: m.layer(m.layer(x)[0]), layer=nn.LSTM(12, 12)
        ),
        (7, 4, 12),
    ),
}
BITS = [
    (4, 6, reference),
    (8, 8, nullcontext),
    (8, "float", reference),
    (6, 12, nullcontext),
]
STEPS = [
    (kind, (i + j // 2) % 2 == 0, *bits)
    for i, kind in enumerate(LSTMS)
    for j, bits in enumerate(BITS)
]


@pytest.mark.parametrize(("kind", "shared", "q", "q_grad", "backend"), STEPS)
def test_int8_lstm_equals_simulation(kind, shared, q, q_grad, backend):
    inputs = [
        drawn("two-sided", *shape, seed=i) + 0.2
        for i, shape in enumerate(LSTMS[kind][1:])
    ]
    with backend():  # a code that flips is a step of a grid
        compare(both(made(LSTMS, kind), shared), inputs, 0.02, q=q, q_grad=q_grad)


@pytest.mark.parametrize(
    ("table", "name", "near"), [(LAYERS, "padded", 1e-5), (LSTMS, "two layers", 0.03)]
)
def test_int8_evaluation_uses_running_ranges_and_clips(table, name, near):
    models, shape = both(made(table, name)), table[name][1]
    for seed in range(3):
        compare(models, [drawn("two-sided", *shape, seed=seed)], near)
    compare(
        [model.eval() for model in models],
        [4 * drawn("two-sided", *shape, seed=9)],
        near,
    )  # beyond these


LAYOUTS = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize(
    "shared", [True, False], ids=["shared steps", "authors' steps"]
)
@pytest.mark.parametrize(
    ("layout", "of_weight"), [(a, b) for a in LAYOUTS for b in LAYOUTS]
)
def test_int8_results_have_simulated_memory_layout(shared, layout, of_weight):
    x = drawn("two-sided", 4, 5, 9, 10).to(memory_format=layout)
    for name in (
        ("padded", "strided", "1x1")
        if of_weight is LAYOUTS[0]
        else ("padded", "strided")
    ):
        layer = made(LAYERS, name).to(memory_format=of_weight)
        gradient = torch.ones_like(layer(x)).contiguous()
        strides = []
        for model in both(layer, shared):
            given = x.clone().requires_grad_()
            with cpt.precision(model, 8, q_grad=8):
                y = model(given)
            (dx,) = torch.autograd.grad(
                y, given, gradient
            )  # ``given.grad`` would lie as ``given`` does
            strides.append((y.stride(), dx.stride()))
        assert strides[0] == strides[1]


@pytest.mark.parametrize(
    ("name", "left", "named"),
    [("linear", 1, 2), ("padded", 1, 1), ("one image", 1, 1), ("sequence", 2, 2)],
)
def test_int8_layers_run_no_supported_float_matmul(name, left, named):
    """Run no float matmul with shared steps; with the authors' steps run those that ``summary`` lists."""
    layer, shape = made(LAYERS, name), LAYERS[name][1]
    x = torch.randn(shape).repeat(
        1 if name == "one image" else 4, *[1] * (len(shape) - 1)
    )
    num_weights = layer.weight.numel()
    for shared in (True, False):
        model = convert(layer, "integer", shared)
        with OpRecorder() as ran:
            passes(model, x)

        def large(*operands, size=num_weights):
            return sum(t.numel() >= size for t in operands) > 1

        products = ran.count(
            "mm", "addmm", "convolution", "convolution_backward", where=large
        )
        assert products == (0 if shared else left)
        row = next(r for r in cpt.summary(model).rows if r.name == "0")
        assert len(row.simulated) == (
            0 if shared else named
        )  # whether there are sequences is not known


@pytest.mark.parametrize(
    ("execution", "shared", "left"),
    [
        ("integer", True, ()),
        ("integer", False, ("forward", "weight")),
        ("auto", True, ("forward", "error", "weight")),
    ],
)
def test_int8_attention_matmuls_run_as_in_summary(execution, shared, left):
    model = convert(made(LAYERS, "attention"), execution, shared)
    with OpRecorder() as ran:
        passes(model, torch.randn(3, 7, 12))
    assert ran.count("bmm") == 2 * len(left)  # of scores and of context
    no_sums = ran.count("_int_mm", where=lambda a, b, *_: b.shape[1] > 1)
    assert no_sums == 3 * 3 * 2 * (3 - len(left))  # for every sample and head
    row = next(r for r in cpt.summary(model).rows if r.name == "0")
    assert set(row.simulated) == set(left)


@pytest.mark.parametrize(("shared", "left"), [(True, 2), (False, 2 + 1 + 7)])
def test_int8_lstm_matmuls_run_as_in_summary(shared, left):
    """Simulate weight gradients; with ranges per row also input and hidden-state gradients."""
    model = convert(nn.LSTM(12, 12), "integer", shared)
    with torch.autograd.profiler.profile() as profile:
        passes(model, torch.randn(7, 4, 12))
    assert (
        sum(
            event.name in ("aten::mm", "aten::addmm")
            for event in profile.function_events
        )
        == left
    )
    (row,) = (r for r in cpt.summary(model).rows if r.quantized)
    assert set(row.simulated) == ({"weight"} if shared else {"error", "weight"})


@pytest.mark.parametrize(
    ("granularity", "longest", "why"),
    [
        ("per_row", 1 << 15, "hidden states have several ranges"),
        ("per_tensor", 4 * 12 - 1, "sums over the gates"),
    ],
)
def test_int8_unsupported_lstm_is_simulated(granularity, longest, why, monkeypatch):
    monkeypatch.setattr("cpt_extras.int8.lstm.MAX_INT8_TERMS", longest)
    config = cpt.QuantConfig(execution="integer")
    config = replace(
        config, quantizers=config.quantizers | {"lstm_hidden": Quantizer(granularity)}
    )
    model = cpt.quantize_(nn.Sequential(nn.LSTM(12, 12)), config)
    with torch.autograd.profiler.profile() as profile:
        passes(model, torch.randn(7, 4, 12))
    assert not any(event.name == "aten::_int_mm" for event in profile.function_events)
    assert f"int8 matmuls: none (forward simulated: {why}" in str(cpt.summary(model))


OTHER_MATMULS = {
    "outer": lambda x: x.flatten(0, 1)[:, :1] @ x[:1, 0],
    "broadcast": lambda x: x @ x[0].mT.contiguous(),
    "vector": lambda x: x @ x[0, 0],
    "transposed": lambda x: x @ x.mT,
}


@pytest.mark.parametrize("name", OTHER_MATMULS)
def test_int8_unsupported_matmuls_are_simulated(name):
    x, found = drawn("two-sided", 3, 7, 12), []
    for execution in ("integer", "simulated"):
        model = convert(
            FunctionModule(lambda model, x: OTHER_MATMULS[name](x)), execution
        )
        with cpt.precision(model, 8), OpRecorder() as ran:
            found.append(model(x))
        assert not ran.count("cpt::encode")
    assert torch.equal(*found)


OTHER_CONVOLUTIONS = {
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "padding in words": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "one dimension": lambda: nn.Conv1d(4, 6, 3),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
}


@pytest.mark.parametrize("name", OTHER_CONVOLUTIONS)
def test_int8_unsupported_convolutions_are_simulated(name):
    """Give the simulated result bit for bit."""
    layer, x, found = OTHER_CONVOLUTIONS[name](), drawn("two-sided", 3, 4, 9, 8), []
    x = x[..., 0] if name == "one dimension" else x
    for execution in ("integer", "simulated"):
        model = convert(layer, execution)
        with OpRecorder() as ran:
            found += passes(model, x)[0]
        assert not ran.count("cpt::encode")
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))


class Doubled(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight, self.bias)


OTHER_CLASSES = {
    "circular padding": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        (3, 4, 9, 8),
    ),
    "subclass": (lambda: Doubled(12, 5), (4, 12)),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_int8_runs_in_custom_forwards(name):
    x = drawn("two-sided", *OTHER_CLASSES[name][1])
    with OpRecorder() as ran:
        compare(both(made(OTHER_CLASSES, name)), [x])
    assert ran.count("cpt::encode")


def test_summary_lists_int8_fallbacks():
    layers = (
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 8, 3),
        nn.Linear(8, 2),
        nn.LSTM(2, 2),
        nn.Conv1d(2, 2, 1),
    )
    model = nn.Sequential(*layers)
    text = str(cpt.summary(cpt.quantize_(model, cpt.QuantConfig(execution="integer"))))
    assert "forward simulated: convolution with 4 groups" in text
    assert (
        "int8 matmuls: forward, weight (error simulated: weights have a range per channel)"
        in text
    )
    assert (
        "int8 matmuls: forward (error simulated: weights have a range per row; weight simulated: gradients of"
        in text
    )
    assert (
        "int8 matmuls: forward (error simulated: weights have a range per row; weight simulated: every time step"
        in text
    )
    assert (
        "int8 matmuls: none (forward simulated: Conv1d has no int8 implementation"
        in text
    )
    cpt.restore_(model)
    assert "int8" not in str(cpt.summary(cpt.quantize_(model)))


@pytest.mark.parametrize("slice_name", ["row", "position", "channel"])
def test_summary_names_slices_of_int8_fallbacks_by_granularity(slice_name):
    quantizers = cpt.QuantConfig().quantizers | {
        "linear_weight": Quantizer(f"per_{slice_name}")
    }
    config = cpt.QuantConfig(execution="integer", quantizers=quantizers)
    layer = cpt.quantize_(nn.Sequential(nn.Linear(8, 2)), config)
    reason = f"error simulated: weights have a range per {slice_name};"
    assert reason in str(cpt.summary(layer))


def kept(model, *inputs):
    """Return the tensors saved for the backward pass."""
    held = {}
    keep = lambda t: held.setdefault(t.data_ptr(), t)  # noqa: E731
    with (
        cpt.precision(model, 8, q_grad=8),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        _ = model(*inputs)
    return list(held.values())


def kept_bytes(model, *inputs):
    return sum(t.numel() * t.element_size() for t in kept(model, *inputs))


def test_int8_saves_int8_tensors_for_backward():
    layer, x = (
        nn.Conv2d(16, 16, 3, padding=1),
        torch.randn(8, 16, 12, 12, requires_grad=True),
    )
    integer, simulated = (kept_bytes(model, x) for model in both(layer))
    assert integer < 0.3 * simulated
    for model, codes in zip(
        both(made(LAYERS, "attention")), (4, 0), strict=True
    ):  # queries, keys, probabilities, values
        assert (
            sum(
                t.dtype == torch.int8
                for t in kept(model, torch.randn(3, 7, 12, requires_grad=True))
            )
            == codes
        )
    of_lstm = kept(
        convert(nn.LSTM(12, 12), "integer"), torch.randn(7, 4, 12, requires_grad=True)
    )
    shapes = [tuple(t.shape) for t in of_lstm if t.dtype == torch.int8]
    assert shapes.count((7 * 4, 12)) == 2  # of inputs and hidden states
    assert shapes.count((4 * 12, 12)) == 2  # both weights


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning"
)  # deprecated, some day
@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Conv2d(5, 3, 1)])
def test_int8_rejects_jit_trace_and_float64_weight(layer):
    model, x = convert(layer, "integer"), torch.randn(4, 5, 5, 5)
    with cpt.precision(model, 8):
        refused(
            r"torch\.jit\.trace cannot record int8 matmuls",
            torch.jit.trace,
            model,
            x,
            error=RuntimeError,
        )
        with pytest.raises(
            RuntimeError,
            match=r"weight is torch\.float64, its input is not: bring both",
        ):
            model.double()(x)
    with (
        cpt.precision(convert(layer, "simulated").double(), 8) as simulated,
        pytest.raises(RuntimeError),
    ):
        simulated(x)
