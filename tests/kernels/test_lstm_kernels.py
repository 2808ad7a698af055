"""LSTM recurrence in C++ against the plain loop, bit for bit: shapes, ranges and gradients."""

from itertools import repeat

import pytest
import torch
from helpers import INF, NAN, identical

import cpt_extras.kernels.lstm  # noqa: F401 - brings the operators of the recurrence
from cpt_extras.int8.matmul import column_tables
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import grids, operators

STEPS = {  # name -> number of steps, sizes of a packed batch, sequences
    "one step": (1, (), 3),
    "one sequence": (9, (), 1),
    "equal": (5, (), 4),
    "packed": (6, (5, 5, 3, 2, 2, 1), 5),
    "packed, one left": (3, (2, 1, 1), 2),
    "none": (4, (), 0),
}
PER_SAMPLE = {"granularity": "per_sample_mean", "grad_granularity": "per_sample_mean"}
OPTIONS = {
    "as trained": {},
    "reverse": {"reverse": True},
    "no bias": {"bias": False},
    "nothing quantised": {"levels": None, "grad_levels": None, "key": None},
    "hidden state alone": {"grad_levels": None, "key": None},
    "gradient alone": {"levels": None},
    "nearest": {"key": None},
    "stored": {"stored": (-0.2, 0.3, None)},
    "stored, not yet filled": {"stored": (NAN, NAN, 0.0)},
    "stored, filled since": {"stored": (-0.2, 0.3, 1.0), "reverse": True},
    "per row": {"granularity": "per_row"},
    "per sample": PER_SAMPLE,
    "gradient per tensor": {"grad_granularity": "per_tensor"},
    "gradient per position": {"grad_granularity": "per_position", "key": None},
    "a NaN": {"broken": NAN},
    "infinity": {"broken": INF},
    "float64": {"dtype": torch.float64},
    "gaps": {"gaps": True},
}
families = pytest.mark.parametrize("family", operators.FAMILIES)


@pytest.fixture
def both(cpp_kernels):
    """Return the operators that run in C++, and the plain ones."""
    return torch.ops.cpt, torch.ops.cpt_reference


def make_tensors(
    steps, width, *, bias=True, dtype=torch.float32, broken=None, gaps=False, **_
):
    """Return the gates' inputs, weight, bias, hidden and cell state."""
    count, sizes, batch = steps
    rows = sum(sizes) or count * batch
    generator = torch.Generator().manual_seed(rows + width)
    four, state = 4 * width, (batch, width)
    shapes = (rows, four), (four, width), (four,), state, state
    tensors = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    if broken is not None and rows:
        tensors[0][rows // 2, 1] = broken
    if gaps:
        tensors[3:] = [t.repeat_interleave(2, -1)[..., ::2] for t in tensors[3:]]
    x, weight, own_bias, *states = (t.requires_grad_() for t in tensors)
    return [x, weight, own_bias if bias else None, *states]


def make_settings(
    steps,
    *,
    reverse=False,
    levels=7.0,
    granularity="per_tensor",
    stored=(None, None, None),
    save=True,
    grad_levels=255.0,
    grad_granularity="per_row",
    key=4,
    advance=True,
    **_,
):
    """Return the arguments of the forward operator behind its tensors."""

    def number(value, dtype=torch.float32):
        return None if value is None else torch.tensor(value, dtype=dtype)

    hidden = number(levels), granularity, *map(number, stored), save
    gradient = number(grad_levels), grad_granularity, number(key, torch.int64)
    return [*steps[:2], reverse, *hidden, *gradient, advance]


def run(ops, steps, width, options):
    """Return all results of the operators, gradients, and the noise key afterwards."""
    tensors, settings = (
        make_tensors(steps, width, **options),
        make_settings(steps, **options),
    )
    results = ops.lstm_forward(*tensors, *settings)
    y, h, c = results[:3]
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    loss = (y * weights).sum() + h.cos().sum() - (c * c).sum()
    leaves = [t for t in tensors if t is not None]
    key = [] if settings[-2] is None else [settings[-2]]
    return [*results, *torch.autograd.grad(loss, leaves), *key]


def check(found, expected):
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert identical(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", STEPS)
def test_cpp_lstm_is_bit_identical(both, steps, options):
    widths = ((1, 16), (5, 37))[list(OPTIONS).index(options) % 2]
    for width in widths:
        check(*(run(ops, STEPS[steps], width, OPTIONS[options]) for ops in both))


def test_cpp_lstm_is_bit_identical_with_threads(both, threaded):
    threaded(2)
    check(*(run(ops, (2, (), 120), 300, {}) for ops in both))


@pytest.mark.parametrize(
    "grid",
    [
        "per_tensor|e4m3",
        "per_row|mxfp4",
        "per_tensor|e2m1",
        "per_tensor+zero",
        "per_row+zero",
    ],
)
@pytest.mark.parametrize("stored", [(), (-0.25, 0.5)])
def test_lstm_operator_rounds_to_grid(both, grid, stored):
    steps, levels, cpp = (4, (), 3), torch.tensor(7.0), both[0]
    options = {"granularity": grid, "grad_granularity": "per_row|e5m2"}
    given = options | ({"stored": (*stored, None)} if stored else {})
    found, expected = (run(ops, steps, 32, given) for ops in both)
    check(found, expected)
    y, _, _, ranges, _, operands, *_ = found
    assert ranges.shape == (2, 4 if grid.startswith("per_tensor") and not stored else 0)

    # every step takes in the hidden state before it
    states = torch.cat([make_tensors(steps, 32)[3], y]).detach()[: len(operands)]
    stored_range = [torch.tensor(value) for value in stored]
    for state, operand in zip(states.split(3), operands.split(3), strict=True):
        if stored:
            rounded = grids.round_in_range(
                state, *stored_range, levels, grid, None, True
            )
        else:
            rounded = grids.fake_quantize(state, levels, grid, None)[0]
        assert torch.equal(operand, rounded)
    if stored and "mx" not in grid:
        half_step = 0.5 / 7 / 2 + 1e-6 if "+zero" in grid else 0  # 0 is on the grid
        assert float(operands.abs().max()) <= 0.25 + half_step

    # ranges that are not yet filled leave every step its own
    unfilled = run(cpp, steps, 32, options | {"stored": (-9.0, 18.0, 0.0)})
    assert torch.equal(unfilled[5], run(cpp, steps, 32, options)[5])

    one_step = run(cpp, (1, (), 3), 32, given)
    operand, input_grad, weight_grad = one_step[5], one_step[8], one_step[9]
    key = torch.tensor(4)
    rounded = grids.fake_quantize(input_grad, levels, "per_row|e5m2", key)[0]
    torch.testing.assert_close(weight_grad, rounded.T @ operand)


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [("as trained", False), ("per row", True), ("float64", True)],
)
def test_lstm_operator_selects_backend(both, options, is_plain):
    with torch.autograd.profiler.profile() as profile:
        run(both[0], STEPS["packed"], 5, OPTIONS[options])
    names = {event.name for event in profile.function_events}
    assert ("cpt_reference::lstm_forward" in names) == is_plain


@families
def test_lstm_noise_differs_per_step(family):
    """Advance the noise key once per step, or leave it unchanged as compiled code does."""
    ops = getattr(torch.ops, family)
    *results, key = run(ops, STEPS["packed"], 5, {})
    *unadvanced, unchanged = run(ops, STEPS["packed"], 5, {"advance": False})
    assert (int(key), int(unchanged)) == (4 + 6, 4)
    check(results, unadvanced)
    other = run(ops, STEPS["packed"], 5, {"key": 5})
    check(results[:8], other[:8])
    assert not torch.equal(results[9], other[9])  # the weight gradient


@families
def test_lstm_backward_advances_key_per_step(family):
    ops, levels = getattr(torch.ops, family), torch.tensor(3.0)
    tensors = [t.detach() for t in make_tensors((2, (), 3), 5)]
    results = ops.lstm_forward(*tensors, *make_settings((2, (), 3)))
    y, h, c, _, gates, _, before, tanh_c = results

    def backward(rows, dh, dc, steps, key):
        saved = [t[rows] for t in (gates, before, tanh_c)]
        settings = steps, (), False, levels, "per_row", torch.tensor(key)
        return ops.lstm_backward(y[rows], dh, dc, tensors[1], *saved, *settings)

    whole = backward(slice(0, 6), h, c, 2, 4)
    last = backward(slice(3, 6), h, c, 1, 4)
    first = backward(slice(0, 3), *last[2:], 1, 5)
    joined = [torch.cat(pair) for pair in zip(first[:2], last[:2], strict=True)]
    check(whole, [*joined, *first[2:]])


@families
def test_lstm_forward_saves_only_for_backward(family):
    forward, steps = getattr(torch.ops, family).lstm_forward, STEPS["packed"]
    unsaved = forward(*make_tensors(steps, 5), *make_settings(steps, save=False))
    saved = forward(*make_tensors(steps, 5), *make_settings(steps))
    assert [t.numel() for t in unsaved[4:]] == [0] * 4
    check(unsaved[:4], saved[:4])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", ["as trained", "stored", "nothing quantised"])
def test_lstm_operators_pass_torch_opcheck(options):
    steps, options = STEPS["packed"], OPTIONS[options] | {"advance": False}
    tensors, settings = (
        make_tensors(steps, 5, **options),
        make_settings(steps, **options),
    )
    # test_compiled.py compiles them
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    ops, opcheck = torch.ops.cpt, torch.library.opcheck
    opcheck(ops.lstm_forward.default, (*tensors, *settings), test_utils=checks)
    tensors = [t.detach() for t in tensors]
    y, h, c, _, gates, _, before, tanh_c = ops.lstm_forward(*tensors, *settings)
    saved = y, h, c, tensors[1], gates, before, tanh_c
    settings = *settings[:3], *settings[-4:-1]
    opcheck(ops.lstm_backward.default, (*saved, *settings), test_utils=checks)


@families
def test_lstm_rejects_second_derivative(family):
    tensors, settings = make_tensors(STEPS["equal"], 5), make_settings(STEPS["equal"])
    y = getattr(torch.ops, family).lstm_forward(*tensors, *settings)[0]
    (gradient,) = torch.autograd.grad((y**3).sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


INT8_OPTIONS = (
    "as trained",
    "reverse",
    "nearest",
    "stored",
    "stored, not yet filled",
    "stored, filled since",
    "gradient per tensor",
    "gradient per position",
    "a NaN",
)


def run_int8(ops, steps, width, options):
    """Return all results of the operators on an int8 weight."""
    tensors = make_tensors(steps, width, **options)
    x, weight, bias, h, c = (t.detach() for t in tensors)
    u = QuantizedTensor.quantize(weight, 5, "per_tensor")
    *settings, levels, granularity, key, _ = make_settings(steps, **options)
    tables = column_tables(u.t(), bias)
    results = ops.lstm_forward(
        x, u.codes, None, h, c, *settings, None, "", None, False, *tables
    )
    y, h_n, c_n, ranges, gates, operands, before, tanh_c = results
    assert operands.dtype == torch.int8
    assert ranges.shape[1] == steps[0]
    saved = y, h_n, c_n, u.codes, gates, before, tanh_c
    rounding = *settings[:3], levels, granularity, key
    return [*results, *ops.lstm_backward(*saved, *rounding, *column_tables(u))]


@pytest.mark.parametrize("options", INT8_OPTIONS)
@pytest.mark.parametrize("steps", ["one step", "equal", "packed"])
def test_cpp_int8_lstm_is_bit_identical(both, steps, options):
    for width in (1, 5, 37):
        args = STEPS[steps], width, OPTIONS[options]
        check(*map(run_int8, both, *map(repeat, args)))
