"""Quantised LSTM, stepwise and fused, against a plain loop; test_lstm_kernels covers the backends."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import NEAREST, quantize_gradient, refused
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

from cpt_core.quantization import fake_quantize, lstm
from cpt_core.quantization.convert import QuantConfig, quantize_
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
SIZES = 12, 32
LENGTHS = [7, 7, 5, 3]


def use(form):
    register_handler(functions_named("lstm"), form, "input hx")


@pytest.fixture(autouse=True, params=FORMS)
def form(request, monkeypatch):
    """Run a test with each implementation of the LSTM."""
    for function in functions_named("lstm"):  # they are put back
        monkeypatch.setitem(OP_HANDLERS, function, OP_HANDLERS[function])
    use(FORMS[request.param])
    return request.param


def lstm_of(*sizes, config=NEAREST, **options):
    torch.manual_seed(0)
    return quantize_(nn.LSTM(*sizes, **options), config)


class PlainLSTM:
    """A loop over layers, directions and steps that quantises every operand at its use, and notes its range.

    ``rounded(x, role, cell)`` quantises an input or a hidden state. Inputs are lists of steps; of packed sequences
    later steps have fewer rows.
    """

    def __init__(self, module, config, bits, q_grad, rounded=None):
        self.module, self.grad_steps = module, num_steps(q_grad)
        self.bits = 32 if bits == "float" else bits
        self.quantizers = config.quantizers
        self.rounded = rounded or self.on_its_own_range
        self.ranges = {}  # role -> (minimum, maximum) of every step

    def on_its_own_range(self, x, role, cell):
        return quantize(x, self.bits, self.quantizers[f"lstm_{role}"])

    def matmul(self, x, role, cell):
        suffix = {"input": f"ih_{cell}", "hidden": f"hh_{cell}"}[role]
        weight = getattr(self.module, f"weight_{suffix}")
        bias = getattr(self.module, f"bias_{suffix}", None)
        self.ranges.setdefault(f"{role}_{cell}", []).append((x.min(), x.max()))
        y = nn.functional.linear(
            self.rounded(x, role, cell),
            quantize(weight, self.bits, "lstm_weight"),
            None if bias is None else quantize(bias, self.bits, "bias"),
        )
        steps = torch.tensor(self.grad_steps)
        return quantize_gradient(y, steps, self.quantizers["lstm_grad"])

    def direction(self, xs, h, c, cell):
        outputs = [None] * len(xs)
        is_reverse = cell.endswith("reverse")
        for t in sorted(range(len(xs)), reverse=is_reverse):
            n = len(xs[t])
            gates = self.matmul(xs[t], "input", cell) + self.matmul(
                h[:n], "hidden", cell
            )
            i, f, g, o = gates.chunk(4, 1)
            c_t = torch.sigmoid(f) * c[:n] + torch.sigmoid(i) * torch.tanh(g)
            outputs[t] = torch.sigmoid(o) * torch.tanh(c_t)
            h, c = torch.cat([outputs[t], h[n:]]), torch.cat([c_t, c[n:]])
        return outputs, h, c

    def __call__(self, xs, h, c):
        """Return the outputs of all steps as rows, and the last states."""
        module, last_h, last_c = self.module, [], []
        directions = ("", "_reverse") if module.bidirectional else ("",)
        for layer in range(module.num_layers):
            parts = []
            for direction in directions:
                k = len(last_h)
                part, *state = self.direction(xs, h[k], c[k], f"l{layer}{direction}")
                parts.append(part)
                last_h.append(state[0])
                last_c.append(state[1])
            xs = [torch.cat(step, -1) for step in zip(*parts, strict=True)]
        return torch.cat(xs), torch.stack(last_h), torch.stack(last_c)

    def running_ranges(self):
        """Return what running ranges become, one update per step in the order of visits."""
        running = {}
        for role, ends in self.ranges.items():
            state = torch.zeros(3)
            for low, high in ends:
                state = 0.9 * state + 0.1 * torch.stack(
                    [low, high - low, torch.ones(())]
                )
            running[role] = state.detach()
        return running


def same(a, b):
    """Return whether tensors are equal up to the last digit, which vectorised sigmoid may change."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-6)


def loss_of(y, h, c):
    return (y * y.detach().sin()).sum() + 2 * h.sum() - c.cos().sum()


def gradients(module, loss, *inputs):
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values(), *inputs])
    return dict(zip([*parameters, *range(len(inputs))], found, strict=True))


def close(a, b, atol=2e-5):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-4, atol=atol), name


def running_ranges(module):
    """Return the running ranges by their cells, such as "input_l0"."""
    ranges = module.precision.ranges()
    return {name.removeprefix("running_"): r.clone() for name, r in ranges.items()}


def granularity_of(name):
    changed = {
        "lstm_input": Quantizer(name),
        "lstm_hidden": Quantizer(name),
        "lstm_grad": Quantizer("per_tensor"),
    }
    return QuantConfig(quantizers={**QUANTIZERS, **changed})


GRANULARITIES = ["per_row", "per_channel", "per_position", "per_sample_mean"]
# bits, options of the layer, lengths of packed sequences, config
SAMPLES = {
    "2 bits": (2, {}, None, NEAREST),
    "8 bits": (8, {}, None, NEAREST),
    "no bias": (5, {"bias": False}, None, NEAREST),
    "deep": (4, {"num_layers": 2, "bidirectional": True}, None, NEAREST),
    "packed": (3, {}, LENGTHS, NEAREST),
    "packed, deep": (4, {"num_layers": 2, "bidirectional": True}, LENGTHS, NEAREST),
    "zero start": (4, {}, None, replace(NEAREST, running_start="zero")),
    "gradients alone": ("float", {}, None, NEAREST),
    **{name: (3, {}, None, granularity_of(name)) for name in GRANULARITIES},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_lstm_equals_plain_loop(name):
    """Compare outputs, gradients, running ranges, and the evaluation on them."""
    bits, options, lengths, config = SAMPLES[name]
    module = lstm_of(*SIZES, config=config, **options)
    x = torch.randn(7, 4, SIZES[0], requires_grad=True)
    states = module.num_layers * (2 if module.bidirectional else 1), 4, SIZES[1]
    h, c = (torch.randn(states, requires_grad=True) for _ in range(2))
    given = pack_padded_sequence(x, lengths) if lengths else x
    alive = [sum(n > t for n in lengths) for t in range(7)] if lengths else [4] * 7

    def run(call):
        y, *state = call()
        return (y, *state), gradients(module, loss_of(y, *state), x, h, c)

    def of_module():
        y, (h_n, c_n) = module(given, (h, c))
        assert isinstance(y, PackedSequence) == bool(lengths)
        return y.data if lengths else y.flatten(0, 1), h_n, c_n

    def steps():
        return [x[t, :n] for t, n in enumerate(alive)]

    with precision(module, bits, q_grad=6):
        outputs, grads = run(of_module)
        plain = PlainLSTM(module, config, bits, 6)
        expected, expected_grads = run(lambda: plain(steps(), h, c))
    for ours, theirs in zip(outputs, expected, strict=True):
        assert same(ours, theirs)
    if not options and not lengths:
        assert all(map(torch.equal, outputs, expected))
    close(grads, expected_grads)
    if bits == "float":  # it moves no range
        return
    stored = running_ranges(module)
    expected = plain.running_ranges()
    close(stored, {cell: expected[cell] for cell in stored}, atol=1e-6)

    def on_stored_range(x, role, cell):
        low, width, _ = module.precision.stored_range(f"{role}_{cell}")
        return fake_quantize.operators.round_in_range(
            x, low, width, module.precision.num_steps, "per_tensor", clip=True
        )

    if stored:
        with precision(module.eval(), bits), torch.no_grad():
            loop = PlainLSTM(module, config, bits, 6, on_stored_range)
            assert all(map(same, of_module(), loop(steps(), h, c)))
        close(running_ranges(module), stored, atol=0)


def test_lstm_unsorted_sequences_keep_state_order():
    module = lstm_of(5, 4)
    parts = [torch.randn(n, 5) for n in (3, 7, 5)]
    h, c = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    order = [1, 2, 0]
    sorted_parts = pack_sequence([parts[k] for k in order])
    with precision(module, 8):
        y, state = module(pack_sequence(parts, enforce_sorted=False), (h, c))
        y2, state2 = module(sorted_parts, (h[:, order], c[:, order]))
    assert torch.equal(y.data, y2.data)
    for ours, theirs in zip(state, state2, strict=True):
        assert torch.equal(ours[:, order], theirs)


def test_lstm_batch_first_and_unbatched_input():
    module = lstm_of(5, 4)
    first = copy.deepcopy(module)
    first.batch_first = True
    x, h, c = torch.randn(6, 3, 5), torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    with precision(module, 4), precision(first, 4):
        y, state = module(x, (h, c))
        y2, state2 = first(x.transpose(0, 1), (h, c))
        assert all(map(same, (y, *state), (y2.transpose(0, 1), *state2)))
        one, (h1, _) = module(x[:, :1], (h[:, :1], c[:, :1]))
        for layer in (module, first):
            alone, (h2, _) = layer(x[:, 0], (h[:, 0], c[:, 0]))
            assert same(alone, one[:, 0])
            assert same(h2, h1[:, 0])


def test_lstm_in_float32_equals_torch():
    theirs = nn.LSTM(5, 4, num_layers=2)
    ours, x = quantize_(copy.deepcopy(theirs)), torch.randn(6, 3, 5)
    for bits in ("float", 24):
        with precision(ours, bits, q_grad=bits):
            assert torch.equal(ours(x)[0], theirs(x)[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_fused_gradient_passes_gradcheck(reverse):
    torch.manual_seed(0)
    input_range = None, "per_tensor", None, None, None, True
    hidden_range = None, "per_row", None, False
    shapes = (5, 12), (12, 3), (12,), (2, 3), (2, 3)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def run(*tensors):
        rest = 3, (2, 2, 1), reverse, *input_range, *hidden_range
        return recurrence(ForwardArgs(*tensors, *rest))[:3]

    assert torch.autograd.gradcheck(run, inputs)


def test_lstm_running_ranges_skip_non_finite_steps():
    module, other = lstm_of(5, 4), lstm_of(5, 4)
    x = torch.randn(4, 3, 5)
    broken = torch.cat([x[:2], torch.full((1, 3, 5), float("nan")), x[2:]])
    with precision(module, 8), precision(other, 8):
        module(x), other(broken)
    ranges = [m.precision.running_input_l0 for m in (module, other)]
    assert torch.allclose(*ranges)
    assert other.precision.running_hidden_l0.isfinite().all()


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
    module, state = lstm_of(5, 4), torch.zeros(1, 2, 4)
    refused("no precision yet", module, torch.randn(6, 3, 5), error=RuntimeError)
    size = r"input.size\(-1\) must be equal to input_size"
    with precision(module, 4):
        for shape, message in (
            ((5,), "2D or 3D"),
            ((0, 3, 5), "at least one step"),
            ((6, 3, 7), size),
        ):
            refused(
                message, module, torch.randn(*shape), error=(ValueError, RuntimeError)
            )
        x = torch.randn(6, 3, 5)
        refused("Expected hidden", module, x, (state, state), error=RuntimeError)


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"dropout": 0.5}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("form", ["by steps"], indirect=True)
def test_lstm_equals_packed_sequence_form(options):
    """Compare every bit of outputs, gradients, running ranges and noise."""
    module = lstm_of(5, 4, num_layers=2, config=QuantConfig(), **options)
    x, results = torch.randn(6, 3, 5), []
    for handler in (lstm.lstm, lstm_handler(run_by_steps)):
        copied = copy.deepcopy(module)
        use(handler)
        torch.manual_seed(1)
        with precision(copied, 4, q_grad=5):
            y, (h, c) = copied(x)
            tensors = gradients(copied, loss_of(y, h, c))
        ranges = copied.precision.get_running()
        results.append({**tensors, "y": y, "h": h, "c": c, **ranges})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


LOADING = """
import sys, torch
model, x = torch.load(sys.argv[1], weights_only=False)
torch.save(model(x)[0], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused"], indirect=True)
def test_lstm_stored_model_runs_in_separate_process(tmp_path):
    module, x = quantize_(nn.Sequential(nn.LSTM(5, 4))), torch.randn(3, 2, 5)
    module[0].precision.set_bits(3, 8)
    files = tmp_path / "model.pt", tmp_path / "y.pt"
    torch.save((module, x), files[0])
    subprocess.run([sys.executable, "-c", LOADING, *files], check=True)
    assert torch.equal(torch.load(files[1]), module(x)[0])
