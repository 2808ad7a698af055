"""Quantised LSTM, stepwise and fused, against plain loops; test_lstm_kernels covers the backends."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers import NEAREST, quantize_gradient, refused, reported_operations
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

from cpt_core.quantization import fake_quantize, lstm
from cpt_core.quantization.convert import QuantConfig, quantize_, restore_
from cpt_core.quantization.op_handlers import functions_named, register_handler
from cpt_core.quantization.op_interception import OP_HANDLERS
from cpt_core.quantization.roles import QUANTIZERS, Quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import precision
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels import lstm_layer
from cpt_extras.kernels.lstm import ForwardArgs, recurrence
from cpt_extras.operations.recurrences import lstm_handler, run_by_steps

FORMS = {"by steps": lstm.lstm, "fused": lstm_handler(lstm_layer.run_fused)}
NEAREST_GRAD = NEAREST.quantizers["lstm_grad"]


@pytest.fixture(autouse=True, params=FORMS)
def form(request, monkeypatch):
    """Run a test with each implementation of the LSTM."""
    for function in functions_named("lstm"):
        monkeypatch.setitem(
            OP_HANDLERS, function, OP_HANDLERS[function]
        )  # it is put back
    register_handler(functions_named("lstm"), FORMS[request.param], "input hx")
    return request.param


def lstm_of(*sizes, config=NEAREST, seed=0, **options):
    torch.manual_seed(seed)
    return quantize_(nn.LSTM(*sizes, **options), config)


def plain(
    module,
    x,
    h,
    c,
    bits,
    q_grad,
    cell="l0",
    reverse=False,
    rounded=None,
    grad=NEAREST_GRAD,
):
    """Run one direction of one layer step by step, quantising every operand at its use; x is (T, B, I).

    ``rounded``: what quantises an "input" or a "hidden" state; on a range of its own if None.
    """
    rounded = rounded or (lambda x, role: quantize(x, bits, f"lstm_{role}"))
    w_ih, w_hh, b_ih, b_hh = (
        getattr(module, f"{n}_{cell}", None)
        for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    levels = torch.tensor(num_steps(q_grad))

    def product(x, role, weight, bias):
        bias = None if bias is None else quantize(bias, bits, "bias")
        y = nn.functional.linear(
            rounded(x, role), quantize(weight, bits, "lstm_weight"), bias
        )
        return quantize_gradient(y, levels, grad)

    out = []
    for x_t in reversed(x) if reverse else x:
        i, f, g, o = (
            product(x_t, "input", w_ih, b_ih) + product(h, "hidden", w_hh, b_hh)
        ).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        out.append(h)
    return torch.stack(out[::-1] if reverse else out), h, c


def same(a, b):
    """Return whether tensors are equal up to the last digit, which vectorised sigmoid may change."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-6)


def gradients(module, loss, *inputs):
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        loss, [*parameters.values(), *inputs], allow_unused=True
    )
    return dict(zip([*parameters, *range(len(inputs))], found, strict=True))


def close(a, b, atol=2e-5):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=atol), name


@pytest.mark.parametrize("bits", [2, 5, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_equals_plain_loop(bits, bias):
    module = lstm_of(12, 32, bias=bias)
    x, h, c = (
        torch.randn(9, 6, 12, requires_grad=True),
        torch.randn(6, 32, requires_grad=True),
        torch.randn(6, 32),
    )
    c.requires_grad_()
    with precision(module, bits, q_grad=6):
        y, (h_n, c_n) = module(x, (h[None], c[None]))
        found = gradients(
            module,
            (y * y.detach().sin()).sum() + 2 * h_n.sum() - c_n.cos().sum(),
            x,
            h,
            c,
        )
    y2, h2, c2 = plain(module, x, h, c, bits, 6)
    for ours, theirs in ((y, y2), (h_n[0], h2), (c_n[0], c2)):
        assert torch.equal(ours, theirs)
    close(
        found,
        gradients(
            module,
            (y2 * y2.detach().sin()).sum() + 2 * h2.sum() - c2.cos().sum(),
            x,
            h,
            c,
        ),
    )


def test_lstm_layers_and_directions():
    module = lstm_of(5, 4, num_layers=2, bidirectional=True)
    x, h, c = (
        torch.randn(6, 3, 5, requires_grad=True),
        torch.randn(4, 3, 4),
        torch.randn(4, 3, 4),
    )
    with precision(module, 4, q_grad=8):
        y, (h_n, c_n) = module(x, (h, c))
        found = gradients(module, y.square().sum() + h_n.sum() + c_n.sum(), x)
    below, ends = x, []
    for layer in (0, 1):
        parts = []
        for d, cell in enumerate((f"l{layer}", f"l{layer}_reverse")):
            part, *end = plain(
                module,
                below,
                h[2 * layer + d],
                c[2 * layer + d],
                4,
                8,
                cell,
                reverse=d == 1,
            )
            parts.append(part)
            ends.append(end)
        below = torch.cat(parts, -1)
    assert same(y, below)
    h2, c2 = (torch.stack(part) for part in zip(*ends, strict=True))
    assert same(h_n, h2)
    assert same(c_n, c2)
    close(found, gradients(module, below.square().sum() + h2.sum() + c2.sum(), x))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_packed_sequences(bidirectional):
    """Run only unfinished sequences at every step, and keep padding out of the ranges."""
    module = lstm_of(5, 4, bidirectional=bidirectional)
    lengths = [3, 7, 5, 7]
    parts = [torch.randn(n, 5) for n in lengths]
    with precision(module, 3, q_grad=8):
        y, (h_n, _) = module(pack_sequence(parts, enforce_sorted=False))
    assert isinstance(y, PackedSequence)
    found, counts = pad_packed_sequence(y)
    assert counts.tolist() == lengths
    assert found.shape == (7, 4, 8 if bidirectional else 4)
    # forward direction by hand: the same loop over the sequences that are left
    order = sorted(range(4), key=lambda k: -lengths[k])
    h, c = torch.zeros(4, 4), torch.zeros(4, 4)
    for t in range(7):
        alive = [k for k in order if lengths[k] > t]
        _, h1, c1 = plain(
            module,
            torch.stack([parts[k][t] for k in alive])[None],
            h[alive],
            c[alive],
            3,
            8,
        )
        h[alive], c[alive] = h1.detach(), c1.detach()
        assert same(found[t, alive, :4], h[alive])
    assert same(h_n[0], h)
    if bidirectional:
        last = [k for k in order if lengths[k] == 7]
        x = torch.stack([parts[k][6] for k in last])[None]
        _, h1, _ = plain(
            module, x, torch.zeros(2, 4), torch.zeros(2, 4), 3, 8, "l0_reverse"
        )
        assert same(found[6, last, 4:], h1)


def test_lstm_unsorted_sequences_keep_state_order():
    module = lstm_of(5, 4)
    parts = [torch.randn(n, 5) for n in (3, 7, 5)]
    h, c = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    order = [1, 2, 0]
    with precision(module, 8):
        y, state = module(pack_sequence(parts, enforce_sorted=False), (h, c))
        y2, state2 = module(
            pack_sequence([parts[k] for k in order]), (h[:, order], c[:, order])
        )
    assert torch.equal(y.data, y2.data)
    for ours, theirs in zip(state, state2, strict=True):
        assert torch.equal(ours[:, order], theirs)


def test_lstm_packed_gradients_equal_padded_gradients():
    module = lstm_of(5, 4, num_layers=2)
    x = torch.randn(6, 3, 5)
    with precision(module, 4, q_grad=5):
        whole = gradients(module, module(x)[0].square().sum())
        packed = gradients(
            module, module(pack_padded_sequence(x, [6, 6, 6]))[0].data.square().sum()
        )
    close(packed, whole, atol=0)


def test_lstm_batch_first_and_unbatched_input():
    module = lstm_of(5, 4)
    first = copy.deepcopy(module)
    first.batch_first = True
    x, h, c = torch.randn(6, 3, 5), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    with precision(module, 4), precision(first, 4):
        y, (h_n, c_n) = module(x, (h, c))
        y2, (h2, c2) = first(x.transpose(0, 1), (h, c))
        assert same(y, y2.transpose(0, 1))
        assert same(h_n, h2)
        assert same(c_n, c2)
        one = module(x[:, :1], (h[:, :1], c[:, :1]))
        for layer in (module, first):
            alone = layer(x[:, 0], (h[:, 0], c[:, 0]))
            assert alone[0].shape == (6, 4)
            assert same(alone[0], one[0][:, 0])
            assert same(alone[1][0], one[1][0][:, 0])


def test_lstm_in_float32_equals_torch():
    torch.manual_seed(0)
    theirs = nn.LSTM(5, 4, num_layers=2)
    ours, x = quantize_(copy.deepcopy(theirs)), torch.randn(6, 3, 5)
    for bits in ("float", 24):
        with precision(ours, bits, q_grad=bits):
            assert torch.equal(ours(x)[0], theirs(x)[0])


@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_fused_gradient_passes_gradcheck():
    torch.manual_seed(0)
    sizes = (2, 2, 1)
    unquantized = (
        None,
        "per_tensor",
        None,
        None,
        None,
        True,
        None,
        "per_row",
        None,
        False,
    )
    shapes = ((5, 12), (12, 3), (12,), (2, 3), (2, 3))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    for reverse in (False, True):
        assert torch.autograd.gradcheck(
            lambda *a, r=reverse: recurrence(
                ForwardArgs(*a, 3, sizes, r, *unquantized)
            )[:3],
            inputs,
        )


def test_lstm_quantizes_gradients_only():
    """Run the forward pass in float32 and round only gradients."""
    module, x, zero = lstm_of(5, 4), torch.randn(6, 3, 5), torch.zeros(3, 4)
    module.precision.set_bits(None, 2)
    y, expected = module(x)[0], plain(module, x, zero, zero, 32, 2)[0]
    assert torch.allclose(y, expected, atol=1e-6)
    close(
        gradients(module, y.square().sum()), gradients(module, expected.square().sum())
    )


@pytest.mark.parametrize(
    "granularity", ["per_row", "per_channel", "per_position", "per_sample_mean"]
)
def test_lstm_granularities_apply_per_step(granularity):
    changed = {
        "lstm_input": Quantizer(granularity),
        "lstm_hidden": Quantizer(granularity),
    }
    changed["lstm_grad"] = Quantizer("per_tensor")
    module = lstm_of(5, 4, config=QuantConfig(quantizers={**QUANTIZERS, **changed}))
    x, zero = torch.randn(6, 3, 5), torch.zeros(3, 4)
    with precision(module, 3, q_grad=4):
        y = module(x)[0]
        found = gradients(module, y.square().sum())
    rounded = lambda x, role: quantize(x, 3, Quantizer(granularity))  # noqa: E731
    expected = plain(
        module, x, zero, zero, 3, 4, rounded=rounded, grad=Quantizer("per_tensor")
    )[0]
    assert same(y, expected)
    close(found, gradients(module, expected.square().sum()))


# --- running ranges -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["corrected", "zero"])
def test_lstm_running_ranges_update_once_per_step(start):
    """Update running ranges in the order in which a direction visits the steps."""
    module = lstm_of(5, 4, bidirectional=True, config=QuantConfig(running_start=start))
    x, zero = torch.randn(6, 3, 5), torch.zeros(1, 3, 4)
    with precision(module, 8):
        forth, back = module(x)[0].detach().split(4, -1)
    seen = {"input_l0": x, "hidden_l0": torch.cat([zero, forth[:-1]])}
    seen |= {
        "input_l0_reverse": x.flip(0),
        "hidden_l0_reverse": torch.cat([zero, back.flip(0)[:-1]]),
    }
    for role, steps in seen.items():
        low, width, weight = torch.zeros(3)
        for value in steps:
            low = 0.9 * low + 0.1 * value.min()
            width = 0.9 * width + 0.1 * (value.max() - value.min())
            weight = 0.9 * weight + 0.1
        found = module.precision.range_tensor(role)
        assert torch.allclose(found, torch.stack([low, width, weight]), atol=1e-6)


def test_lstm_running_ranges_skip_non_finite_steps():
    module, other = lstm_of(5, 4), lstm_of(5, 4)
    x = torch.randn(4, 3, 5)
    broken = torch.cat([x[:2], torch.full((1, 3, 5), float("nan")), x[2:]])
    with precision(module, 8), precision(other, 8):
        module(x), other(broken)
    assert torch.allclose(
        module.precision.running_input_l0, other.precision.running_input_l0
    )
    assert other.precision.running_hidden_l0.isfinite().all()


def test_lstm_evaluation_uses_running_ranges():
    module = lstm_of(5, 4)
    x = torch.randn(8, 3, 5)
    with precision(module, 3):
        module(x)
        module.eval()
        low, width, weight = module.precision.running_input_l0
        expected = module(x.clamp(float(low / weight), float((low + width) / weight)))[
            0
        ]
        assert same(module(x)[0], expected)
        p, before, zero = (
            module.precision,
            module.precision.get_running(),
            torch.zeros(3, 4),
        )

        def stored(x, role):
            low, width, _ = p.stored_range(f"{role}_l0")
            return fake_quantize.operators.round_in_range(
                x, low, width, p.num_steps, "per_tensor", clip=True
            )

        assert same(module(x)[0], plain(module, x, zero, zero, 3, 8, rounded=stored)[0])
        module(10 * x)
    assert all(
        torch.equal(v, before[k]) for k, v in module.precision.get_running().items()
    )


# --- as a module ----------------------------------------------------------------------------------


def test_lstm_dropout_between_layers():
    module = lstm_of(5, 40, num_layers=2, dropout=0.5)
    x = torch.randn(6, 3, 5)
    with precision(module, 8):
        torch.manual_seed(1)
        a = module(x)[0]
        torch.manual_seed(1)
        assert torch.equal(module(x)[0], a)
        assert not torch.equal(module(x)[0], a)
        assert (a != 0).all()  # none behind the last layer
        module.eval()
        assert torch.equal(module(x)[0], module(x)[0])


def test_lstm_rejects_invalid_input():
    module = lstm_of(5, 4)
    refused("no precision yet", module, torch.randn(6, 3, 5), error=RuntimeError)
    with precision(module, 4):
        refused("2D or 3D", module, torch.randn(5))
        refused("at least one step", module, torch.randn(0, 3, 5))
        refused(
            r"input.size\(-1\) must be equal to input_size",
            module,
            torch.randn(6, 3, 7),
            error=RuntimeError,
        )
        with pytest.raises(RuntimeError, match="Expected hidden"):
            module(torch.randn(6, 3, 5), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))


def test_lstm_frozen_weights_get_no_gradient():
    module = lstm_of(5, 4)
    module.weight_hh_l0.requires_grad_(False)
    module.bias_hh_l0.requires_grad_(False)
    with precision(module, 4):
        module(torch.randn(6, 3, 5))[0].sum().backward()
    assert module.weight_hh_l0.grad is None
    assert module.bias_hh_l0.grad is None
    assert module.weight_ih_l0.grad is not None


@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True}], ids=["one way", "both ways"]
)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_fused_equals_stepwise_form(options, packed):
    """Compare outputs, running ranges, gradients rounded to nearest, and evaluation."""
    module = lstm_of(5, 4, num_layers=2, **options)
    parts = [torch.randn(n, 5) for n in (6, 6, 3)]
    x = pack_sequence(parts) if packed else torch.randn(6, 3, 5)
    results = []
    for handler in FORMS.values():
        copied = copy.deepcopy(module)
        register_handler(functions_named("lstm"), handler, "input hx")
        with precision(copied, 4, q_grad=5):
            y, (h, c) = copied(x)
            y = y.data if packed else y
            found = gradients(
                copied, (y * y.detach().sin()).sum() + h.sum() - c.cos().sum()
            )
            evaluated = copied.eval()(x)[0]
            evaluated = evaluated.data if packed else evaluated
        results.append(((y, h, c), found, evaluated, copied.precision.get_running()))
    (outputs, grads, evaluated, running), (outputs2, grads2, evaluated2, running2) = (
        results
    )
    for ours, theirs in zip(
        (*outputs, evaluated), (*outputs2, evaluated2), strict=True
    ):
        assert same(ours, theirs)
    close(grads, grads2, atol=1e-6)
    close(running, running2, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"dropout": 0.5}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("form", ["by steps"], indirect=True)
def test_lstm_equals_packed_sequence_form(options):
    """Compare every bit of outputs, gradients, running ranges and noise."""
    module = lstm_of(5, 4, num_layers=2, config=QuantConfig(), **options)
    x = torch.randn(6, 3, 5)
    results = []
    for handler in (lstm.lstm, lstm_handler(run_by_steps)):
        copied = copy.deepcopy(module)
        register_handler(functions_named("lstm"), handler, "input hx")
        torch.manual_seed(1)
        with precision(copied, 4, q_grad=5):
            y, (h, c) = copied(x)
            found = gradients(
                copied, (y * y.detach().sin()).sum() + h.sum() - c.cos().sum()
            )
        results.append(
            {**found, "y": y, "h": h, "c": c, **copied.precision.get_running()}
        )
    first, second = results
    for name in first:
        assert torch.equal(first[name], second[name]), name


# --- conversion -----------------------------------------------------------------------------------


def test_lstm_keeps_class_and_checkpoint_names():
    module = lstm_of(5, 4, bidirectional=True)
    assert type(module) is nn.LSTM
    directions = ("l0", "l0_reverse")
    expected = {
        "noise_key",
        *(f"running_{role}_{d}" for role in ("input", "hidden") for d in directions),
    }
    assert set(module.precision.get_running()) == expected
    assert not hasattr(restore_(module), "precision")


class CallsLSTM(nn.LSTM):
    """LSTM subclass that runs by linear operations, since its forward may differ."""


@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_subclass_and_projection_use_linear_operations():
    for module in (CallsLSTM(5, 4), nn.LSTM(5, 4, proj_size=3)):
        quantize_(module)
        with precision(module, 4):
            operations = reported_operations(module, torch.randn(3, 2, 5))
        assert {operation.function for operation in operations} == {"linear"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_stored_model_runs_in_separate_process(tmp_path):
    module, x = quantize_(nn.Sequential(nn.LSTM(5, 4))), torch.randn(3, 2, 5)
    module[0].precision.set_bits(3, 8)
    torch.save((module, x), tmp_path / "model.pt")
    run = "import sys, torch; m, x = torch.load(sys.argv[1], weights_only=False); torch.save(m(x)[0], sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", run, tmp_path / "model.pt", tmp_path / "y.pt"],
        check=True,
    )
    assert torch.equal(torch.load(tmp_path / "y.pt"), module(x)[0])
