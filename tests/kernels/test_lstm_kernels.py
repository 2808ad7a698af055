"""LSTM recurrence in C++ against the plain loop, bit for bit: shapes, ranges and gradients."""

import pytest
import torch
from helpers import INF, NAN, identical

import cpt_extras.kernels.lstm  # noqa: F401 - brings the operators of the recurrence
from cpt_extras.int8.matmul import column_tables
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import grids, operators

STEPS = {
    "one step": (1, (), 3),
    "one sequence": (9, (), 1),
    "equal": (5, (), 4),
    "packed": (6, (5, 5, 3, 2, 2, 1), 5),
    "packed, one left": (3, (2, 1, 1), 2),
    "none": (4, (), 0),
}
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
    "per sample": {
        "granularity": "per_sample_mean",
        "grad_granularity": "per_sample_mean",
    },
    "gradient per tensor": {"grad_granularity": "per_tensor"},
    "gradient per position": {"grad_granularity": "per_position", "key": None},
    "a NaN": {"broken": NAN},
    "infinity": {"broken": INF},
    "float64": {"dtype": torch.float64},
    "gaps": {"gaps": True},
}


def tensors(
    steps, width, *, bias=True, dtype=torch.float32, broken=None, gaps=False, **_
):
    count, sizes, batch = steps
    rows = sum(sizes) or count * batch
    generator = torch.Generator().manual_seed(rows + width)
    shapes = {
        "x": (rows, 4 * width),
        "w": (4 * width, width),
        "b": (4 * width,),
        "h": (batch, width),
    }
    found = {
        k: torch.randn(s, generator=generator, dtype=dtype)
        for k, s in (shapes | {"c": shapes["h"]}).items()
    }
    if broken is not None and rows:
        found["x"][rows // 2, 1] = broken
    if gaps:
        found = {
            k: t.repeat_interleave(2, -1)[..., ::2] if k in "hc" else t
            for k, t in found.items()
        }
    return [t.requires_grad_() if k != "b" or bias else None for k, t in found.items()]


def arguments(
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
    def number(value, dtype=torch.float32):
        return None if value is None else torch.tensor(value, dtype=dtype)

    return [
        *steps[:2],
        reverse,
        number(levels),
        granularity,
        *map(number, stored),
        save,
        number(grad_levels),
        grad_granularity,
        number(key, torch.int64),
        advance,
    ]


def run(ops, steps, width, options):
    """Return all results of the operators, and the noise key afterwards."""
    inputs, rest = tensors(steps, width, **options), arguments(steps, **options)
    results = ops.lstm_forward(*inputs, *rest)
    y, h, c = results[:3]
    loss = (
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
        + h.cos().sum()
        - (c * c).sum()
    )
    found = torch.autograd.grad(loss, [t for t in inputs if t is not None])
    return [*results, *found, *([] if rest[-2] is None else [rest[-2]])]


def check(found, expected):
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert identical(found, expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("steps", STEPS)
def test_cpp_lstm_is_bit_identical(compiled, steps, options):
    for width in ((1, 16), (5, 37))[list(OPTIONS).index(options) % 2]:
        check(
            *(
                run(ops, STEPS[steps], width, OPTIONS[options])
                for ops in (compiled, torch.ops.cpt_reference)
            )
        )


def test_cpp_lstm_is_bit_identical_with_threads(compiled, threaded):
    threaded(2)
    check(
        *(
            run(ops, (2, (), 120), 300, {})
            for ops in (compiled, torch.ops.cpt_reference)
        )
    )


@pytest.mark.parametrize(
    "grid", ["per_tensor|e4m3", "per_row|mxfp4", "per_tensor|e2m1"]
)
@pytest.mark.parametrize("stored", [(), (-0.25, 0.5)])
def test_lstm_operator_rounds_to_formats(compiled, grid, stored):
    steps, options = (
        (4, (), 3),
        {"granularity": grid, "grad_granularity": "per_row|e5m2"},
    )
    given = options | ({"stored": (*stored, None)} if stored else {})
    found, expected = (
        run(ops, steps, 32, given) for ops in (compiled, torch.ops.cpt_reference)
    )
    check(found, expected)
    ranges, operands, levels = found[3], found[5], torch.tensor(7.0)
    assert ranges.shape == (2, 4 if grid.startswith("per_tensor") and not stored else 0)
    hidden = torch.cat([tensors(steps, 32)[3], found[0]]).detach()[
        : len(operands)
    ]  # what every step took in
    for step, operand in zip(hidden.split(3), operands.split(3), strict=True):
        low_and_width = map(torch.tensor, stored)
        rounded = (
            grids.round_in_range(step, *low_and_width, levels, grid, None, True)
            if stored
            else None
        )
        assert torch.equal(
            operand,
            grids.fake_quantize(step, levels, grid, None)[0]
            if rounded is None
            else rounded,
        )
    assert not stored or "mx" in grid or float(operands.abs().max()) <= 0.25
    later = run(compiled, steps, 32, options | {"stored": (-9.0, 18.0, 0.0)})
    assert torch.equal(
        later[5], run(compiled, steps, 32, options)[5]
    )  # not filled: own ranges
    _, _, _, _, _, operand, _, _, of_x, of_weight, *_ = run(
        compiled, (1, (), 3), 32, given
    )
    gradient = grids.fake_quantize(of_x, levels, "per_row|e5m2", torch.tensor(4))[0]
    torch.testing.assert_close(of_weight, gradient.T @ operand)


@pytest.mark.parametrize(
    ("options", "plain"), [("as trained", False), ("per row", True), ("float64", True)]
)
def test_lstm_operator_selects_backend(compiled, options, plain):
    with torch.autograd.profiler.profile() as profile:
        run(compiled, STEPS["packed"], 5, OPTIONS[options])
    assert (
        any(
            event.name == "cpt_reference::lstm_forward"
            for event in profile.function_events
        )
        == plain
    )


@pytest.mark.parametrize("family", operators.FAMILIES)
def test_lstm_noise_differs_per_step(family):
    """Advance the noise key once per step, or leave it unchanged as compiled code does."""
    ops = getattr(torch.ops, family)
    *_, key = first = run(ops, STEPS["packed"], 5, {})
    assert int(key) == 4 + 6
    *_, key = again = run(ops, STEPS["packed"], 5, {"advance": False})
    assert int(key) == 4
    check(first[:-1], again[:-1])
    other = run(ops, STEPS["packed"], 5, {"key": 5})
    check(first[:8], other[:8])
    assert not torch.equal(first[9], other[9])  # the gradient of the weight


@pytest.mark.parametrize("family", operators.FAMILIES)
def test_lstm_backward_advances_key_per_step(family):
    ops, levels = getattr(torch.ops, family), torch.tensor(3.0)
    inputs = [t.detach() for t in tensors((2, (), 3), 5)]
    out, h, c, _, gates, _, before, tanh_c = ops.lstm_forward(
        *inputs, *arguments((2, (), 3))
    )

    def backward(rows, h, c, steps, key):
        parts = (t[rows] for t in (gates, before, tanh_c))
        return ops.lstm_backward(
            out[rows],
            h,
            c,
            inputs[1],
            *parts,
            steps,
            (),
            False,
            levels,
            "per_row",
            torch.tensor(key),
        )

    whole = backward(slice(0, 6), h, c, 2, 4)
    last = backward(slice(3, 6), h, c, 1, 4)
    first = backward(slice(0, 3), *last[2:], 1, 5)
    check(
        whole,
        [
            *(torch.cat(pair) for pair in zip(first[:2], last[:2], strict=True)),
            *first[2:],
        ],
    )


@pytest.mark.parametrize("family", operators.FAMILIES)
def test_lstm_forward_saves_only_for_backward(family):
    results = getattr(torch.ops, family).lstm_forward(
        *tensors(STEPS["packed"], 5), *arguments(STEPS["packed"], save=False)
    )
    kept = getattr(torch.ops, family).lstm_forward(
        *tensors(STEPS["packed"], 5), *arguments(STEPS["packed"])
    )
    assert [t.numel() for t in results[4:]] == [0] * 4
    check(results[:4], kept[:4])


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck reads it
@pytest.mark.parametrize("options", ["as trained", "stored", "nothing quantised"])
def test_lstm_operators_pass_torch_opcheck(options):
    chosen = OPTIONS[options] | {"advance": False}
    inputs, rest = (
        tensors(STEPS["packed"], 5, **chosen),
        arguments(STEPS["packed"], **chosen),
    )
    rules = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
    )  # compiled: test_compiled.py
    torch.library.opcheck(
        torch.ops.cpt.lstm_forward.default, (*inputs, *rest), test_utils=rules
    )
    inputs = [t.detach() for t in inputs]
    hidden, h, c, _, gates, _, before, tanh_c = torch.ops.cpt.lstm_forward(
        *inputs, *rest
    )
    given = hidden, h, c, inputs[1], gates, before, tanh_c, *rest[:3], *rest[-4:-1]
    torch.library.opcheck(torch.ops.cpt.lstm_backward.default, given, test_utils=rules)


@pytest.mark.parametrize("family", operators.FAMILIES)
def test_lstm_rejects_second_derivative(family):
    inputs = tensors(STEPS["equal"], 5)
    y = getattr(torch.ops, family).lstm_forward(*inputs, *arguments(STEPS["equal"]))[0]
    (first,) = torch.autograd.grad((y**3).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.square().sum().backward()


ON_CODES = (
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


@pytest.mark.parametrize("options", ON_CODES)
@pytest.mark.parametrize("steps", ["one step", "equal", "packed"])
def test_cpp_int8_lstm_is_bit_identical(compiled, steps, options):
    options = OPTIONS[options]
    for width in (1, 5, 37):
        found = []
        x, weight, bias, h, c = (
            t.detach() for t in tensors(STEPS[steps], width, **options)
        )
        u = QuantizedTensor.quantize(weight, 5, "per_tensor")
        *rest, levels, granularity, key, _ = arguments(STEPS[steps], **options)
        for ops in (compiled, torch.ops.cpt_reference):
            tables = column_tables(u.t(), bias)
            results = ops.lstm_forward(
                x, u.codes, None, h, c, *rest, None, "", None, False, *tables
            )
            hidden, h_n, c_n, ranges, gates, operands, before, tanh_c = results
            assert operands.dtype == torch.int8
            assert ranges.shape[1] == rest[0]
            kept = hidden, h_n, c_n, u.codes, gates, before, tanh_c
            found.append(
                [
                    *results,
                    *ops.lstm_backward(
                        *kept, *rest[:3], levels, granularity, key, *column_tables(u)
                    ),
                ]
            )
        check(*found)
