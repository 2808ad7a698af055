"""Int8 execution combined with copies, compilation, autocast, BitOps counts and evaluation."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers import (
    FunctionModule,
    OnRing,
    OpRecorder,
    identical,
    losses_of,
    pictures,
    refused,
    running_ranges,
    small,
)
from quantization.test_int8 import attention, first
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_extras.int8.execution import runs_int8

STEPS = 6
EXECUTIONS = "integer", "simulated"


def config(execution="integer", **options):
    return cpt.QuantConfig(execution=execution, **options).with_shared_steps()


def quantised(execution="integer"):
    return cpt.quantize_(small(), config(execution))


def passes(model, x, call=None):
    """Return the output and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    y = (call or model)(x)
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad(y.square().sum(), leaves)
    return [y.detach().clone(), *gradients]


def train(model, call=None):
    """Train a few steps through ``call``; return losses, parameters, running ranges and noise keys."""
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)

    def loss(seed):
        return (call or model)(pictures(seed)).square().mean()

    losses = torch.tensor(losses_of(model, schedule, loss, STEPS))
    keys = [p.noise_key for p in layer_precisions(model).values()]
    return [losses, *model.parameters(), *running_ranges(model), *keys]


# --- devices ------------------------------------------------------------------------------------


@pytest.fixture
def set_fast_int8(monkeypatch):
    """Return a function that sets whether devices have instructions for int8 matmuls."""

    def set_(value):
        for module in ("execution", "fallback"):
            name = f"cpt_extras.int8.{module}.has_fast_int8"
            monkeypatch.setattr(name, lambda device: value)

    monkeypatch.setattr("cpt_extras.int8.execution._warned_devices", set())
    set_(False)
    return set_


def test_int8_warns_once_on_slow_device(set_fast_int8):
    model, again = quantised(), quantised()
    message = r"slower .* \(cpu\): .*'auto' would simulate"
    with cpt.precision(model, 8), pytest.warns(UserWarning, match=message):
        expected = passes(model, pictures())
    with cpt.precision(again, 8), warnings.catch_warnings(action="error"):
        assert identical(passes(again, pictures()), expected)
        assert "execution=integer, " in repr(again)
    x = torch.ones(1)  # there are no bits any more
    assert not any(runs_int8(p, x) for p in layer_precisions(model).values())


def test_auto_execution_simulates_on_slow_device(set_fast_int8):
    """Simulate int8 layers with execution "auto" on slow devices, and give the reason in the summary."""
    model, simulated = quantised("auto"), quantised("simulated")
    with cpt.precision(model, 4):
        assert "execution=auto (simulated on this device), " in repr(model)
        assert not runs_int8(model[0].precision, pictures())
    with warnings.catch_warnings(action="error"):
        assert identical(train(model), train(simulated))
    summary, reason = cpt.summary(model), FallbackReason.NO_FAST_INT8.describe()
    reasons = [list(row.simulated.values()) for row in summary.rows if row.quantized]
    assert reasons == [[reason] * 3] * 3
    assert f"forward simulated: {reason}" in str(summary)
    set_fast_int8(True)
    with cpt.precision(model, 4):
        assert "execution=auto, " in repr(model)
        assert runs_int8(model[0].precision, pictures())


# --- training and evaluation --------------------------------------------------------------------


def test_int8_training_equals_simulated_training():
    losses, expected = (train(quantised(execution))[0] for execution in EXECUTIONS)
    # a code that flips is a step of a 3-bit grid
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
    torch.testing.assert_close(losses[0], expected[0], rtol=1e-5, atol=0)


def test_int8_training_ignores_evaluation_between_steps():
    model = quantised()

    def evaluate_and_call(x):
        with torch.inference_mode(), cpt.precision(model.eval(), 8):
            model(3 * pictures(100))
        with torch.no_grad(), cpt.precision(model, "float"):
            model(pictures(100))
        return model.train()(x)

    assert identical(train(quantised()), train(model, evaluate_and_call))


@pytest.mark.parametrize("q_grad", [6, 12])
def test_int8_gradients_use_bits_of_forward_pass(q_grad):
    """Round gradients with the bits of the forward pass; 12 bits do not fit into int8."""
    gradients = []
    for execution in EXECUTIONS:
        model = quantised(execution)
        with cpt.precision(model, 8, q_grad=q_grad):
            y = model(pictures())
        with cpt.precision(model, 8, q_grad=8):
            y.square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    # a bias before BatchNorm has no gradient but noise
    largest = max(float(g.abs().max()) for g in gradients[1])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_int8_compiled_equals_eager_without_recompilation():
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, eager, counts = quantised(), quantised(), set()
    for each in (model, eager):
        layer_precisions(each)["3"].execution = "auto"
    compiled = torch.compile(model, backend=counter)
    for seed, bits in enumerate((3, 8, 4)):
        x = pictures(seed)
        with cpt.precision(model, bits, q_grad=8), cpt.precision(eager, bits, q_grad=8):
            assert identical(passes(model, x, compiled), passes(eager, x))
        counts.add(counter.frame_count)
    assert len(counts) == 1
    torch._dynamo.reset()


# --- layers -------------------------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "conv": (lambda: nn.Conv2d(6, 5, 3), (4, 6, 5, 5)),
    "lstm": (lambda: FunctionModule(first, layer=nn.LSTM(6, 5)), (4, 2, 6)),
    "attention": (lambda: FunctionModule(first, layer=attention()), (2, 5, 12)),
    "gcn": (lambda: OnRing(cpt.GraphConv(6, 5)), (6, 6)),
    "sage": (lambda: OnRing(cpt.SAGEConv(6, 5)), (6, 6)),
}


def make_model(name, execution="integer"):
    """Return a one-layer model and its input."""
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    options = config(execution, aggregation="quantized")
    model = cpt.quantize_(nn.Sequential(make()), options)
    return model, torch.randn(shape, requires_grad=True)


def count_encodings(model, x):
    """Return a model's output, and how many tensors became int8."""
    with OpRecorder() as recorder:
        y = model(x)
    return y, recorder.count("cpt::encode")


@pytest.mark.parametrize("name", LAYERS)
def test_int8_copies_match_and_wide_bits_simulate(name):
    model, x = make_model(name)
    with cpt.precision(model, 4, q_grad=8):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        expected = passes(model, x)
        assert count_encodings(model, x)[1]
        for other in copies:
            assert identical(passes(other, x), expected)
    for bits, dtype in ((12, torch.float32), (32, torch.float32), (4, torch.float64)):
        with cpt.precision(model.to(dtype), bits):
            y, encodings = count_encodings(model, x.to(dtype))
        assert y.isfinite().all()
        assert not encodings


@pytest.mark.parametrize("name", LAYERS)
def test_int8_autocast_rounds_results_only(name):
    outputs = []
    for execution in EXECUTIONS:
        model, x = make_model(name, execution)
        x = x.bfloat16() if name == "lstm" else x  # whose results have its type
        with cpt.precision(model, 8):
            in_float32 = model(x.float())
            with torch.autocast("cpu", torch.bfloat16):
                y, encodings = count_encodings(model, x)
        assert y.dtype == torch.bfloat16
        assert bool(encodings) == (execution == "integer")
        # attention has matmuls after its first ones
        assert name == "attention" or torch.equal(y, in_float32.bfloat16())
        outputs.append(y)
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", LAYERS)
def test_int8_bitops_equal_simulated_bitops(name):
    counts = []
    for execution in EXECUTIONS:
        model, x = make_model(name, execution)
        with cpt.precision(model, 8), cpt.BitOpsLedger(model) as ledger:
            passes(model, x)
        planned = cpt.count_bitops(model, (x,)).bitops
        counts.append((planned, ledger.by_layer("per_op")))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "options", [config(), config("simulated"), cpt.QuantConfig(execution="integer")]
)
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_int8_output_may_be_changed_in_place(name, options):
    make, shape = LAYERS[name]
    layer, x, gradients = make(), torch.randn(shape), []
    for inplace in (True, False):
        parts = copy.deepcopy(layer), nn.ReLU(inplace)
        model = cpt.quantize_(nn.Sequential(*parts), options)
        with cpt.precision(model, 8):
            model(x).square().sum().backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", LAYERS)
def test_int8_rejects_double_backward(name):
    model, x = make_model(name)
    message, options = r"gradients of gradients.*simulated", {"create_graph": True}
    with cpt.precision(model, 8):
        y = model(x).sum()
        refused(message, torch.autograd.grad, y, x, error=RuntimeError, **options)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 3, 2, 8), (1, 3, 1, 1)])
def test_int8_convolution_shape_error_equals_torch(shape):
    messages = []
    for execution in EXECUTIONS:
        model = cpt.quantize_(nn.Sequential(nn.Conv2d(3, 5, 3)), config(execution))
        with cpt.precision(model, 8), pytest.raises(RuntimeError) as error:
            model(torch.randn(shape))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
