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
    small,
)
from quantization.test_int8 import attention, first
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_extras.int8.execution import runs_int8

STEPS = 6


def config(execution="integer", **kwargs):
    return cpt.QuantConfig(execution=execution, **kwargs).with_shared_steps()


def converted(execution="integer", seed=0):
    return cpt.quantize_(small(seed), config(execution))


def passes(model, x, call=None):
    """Return the output and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    y = (model if call is None else call)(x)
    return [
        y.detach().clone(),
        *torch.autograd.grad(y.square().sum(), [x, *model.parameters()]),
    ]


def trained(model, call=None):
    """Train a few steps through ``call``; return losses, parameters, running ranges and noise keys."""
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    losses = losses_of(
        model,
        schedule,
        lambda seed: (call or model)(pictures(seed)).square().mean(),
        STEPS,
    )
    ranges = [
        v for p in layer_precisions(model).values() for v in p.get_running().values()
    ]
    return [torch.tensor(losses), *(p.detach() for p in model.parameters()), *ranges]


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Simulate a machine without instructions for int8 matmuls."""
    monkeypatch.setattr("cpt_extras.int8.execution.has_fast_int8", lambda device: False)
    monkeypatch.setattr("cpt_extras.int8.fallback.has_fast_int8", lambda device: False)
    monkeypatch.setattr("cpt_extras.int8.execution._warned_devices", set())


def test_int8_warns_once_on_slow_device(slow):
    model, again = converted(), converted()
    with (
        cpt.precision(model, 8),
        pytest.warns(UserWarning, match=r"slower .* \(cpu\): .*'auto' would simulate"),
    ):
        found = passes(model, pictures())
    with cpt.precision(again, 8), warnings.catch_warnings(action="error"):
        assert identical(passes(again, pictures()), found)
        assert "execution=integer, " in repr(again)
    x = torch.ones(1)
    assert not any(
        runs_int8(p, x) for p in layer_precisions(model).values()
    )  # no bits, no integers


@pytest.mark.slow
def test_int8_compiled_warns_on_slow_device(slow):
    torch._dynamo.reset()
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3)), config())
    with (
        cpt.precision(model, 8),
        pytest.warns(UserWarning, match="int8 matmuls are slower than float32"),
    ):
        torch.compile(model, backend="eager")(torch.ones(2, 4))


def test_auto_execution_simulates_on_slow_device(slow, monkeypatch):
    """Simulate int8 layers with execution "auto" on slow devices, and give the reason in the summary."""
    model, simulated = converted("auto"), converted("simulated")
    with cpt.precision(model, 4):
        assert "execution=auto (simulated on this device), " in repr(model)
        assert not runs_int8(model[0].precision, pictures())
    with warnings.catch_warnings(action="error"):
        assert identical(trained(model), trained(simulated))
    rows = [row for row in cpt.summary(model).rows if row.quantized]
    reasons = {reason for row in rows for reason in row.simulated.values()}
    assert len(rows) == 3
    assert reasons == {FallbackReason.NO_FAST_INT8.describe()}
    assert all(len(row.simulated) == 3 for row in rows)
    assert f"forward simulated: {FallbackReason.NO_FAST_INT8.describe()}" in str(
        cpt.summary(model)
    )
    monkeypatch.setattr("cpt_extras.int8.execution.has_fast_int8", lambda device: True)
    with cpt.precision(model, 4):
        assert "execution=auto, " in repr(model)
        assert runs_int8(model[0].precision, pictures())


# --- training and evaluation ------------------------------------------------------------------------------------------


def test_int8_training_equals_simulated_training():
    on_codes, simulated = (
        trained(converted(execution))[0].tolist()
        for execution in ("integer", "simulated")
    )
    assert on_codes == pytest.approx(
        simulated, rel=0.02
    )  # a code that flips is a step of a 3-bit grid
    assert on_codes[0] == pytest.approx(simulated[0], rel=1e-5)


def test_int8_training_ignores_evaluation_between_steps():
    model = converted()

    def evaluated_before(x):
        with torch.inference_mode(), cpt.precision(model.eval(), 8):
            model(3 * pictures(100))
        with torch.no_grad(), cpt.precision(model, "float"):
            model(pictures(100))
        return model.train()(x)

    assert identical(trained(converted()), trained(model, evaluated_before))


@pytest.mark.parametrize("q_grad", [6, 12])
def test_int8_gradients_use_bits_at_backward_pass(
    q_grad,
):
    """Round gradients with the bits at backward time; 12 bits do not fit into int8."""
    found = []
    for execution in ("integer", "simulated"):
        model = converted(execution)
        with cpt.precision(model, 8, q_grad=8):
            y = model(pictures())
        with cpt.precision(model, 8, q_grad=q_grad):
            y.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    largest = max(
        float(b.abs().max()) for b in found[1]
    )  # a bias before BatchNorm has none but noise
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4 * largest)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch where a graph breaks
def test_int8_compiled_equals_eager_without_recompilation():
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, eager = converted(), converted()
    for one in (model, eager):
        layer_precisions(one)["3"].execution = "auto"
    compiled = torch.compile(model, backend=counter)
    frames = set()
    for seed, bits in enumerate((3, 8, 4)):
        with cpt.precision(model, bits, q_grad=8), cpt.precision(eager, bits, q_grad=8):
            assert identical(
                passes(model, pictures(seed), compiled), passes(eager, pictures(seed))
            )
        frames.add(counter.frame_count)
    assert len(frames) == 1
    torch._dynamo.reset()


# --- layers -----------------------------------------------------------------------------------------------------------


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "conv": (lambda: nn.Conv2d(6, 5, 3), (4, 6, 5, 5)),
    "lstm": (lambda: FunctionModule(first, layer=nn.LSTM(6, 5)), (4, 2, 6)),
    "attention": (lambda: FunctionModule(first, layer=attention()), (2, 5, 12)),
    "gcn": (lambda: OnRing(cpt.GraphConv(6, 5)), (6, 6)),
    "sage": (lambda: OnRing(cpt.SAGEConv(6, 5)), (6, 6)),
}


def layer_of(kind, execution="integer"):
    """Return a one-layer model and its input."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    model = cpt.quantize_(
        nn.Sequential(make()), config(execution, aggregation="quantized")
    )
    return model, torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_int8_copies_match_and_wide_bits_simulate(kind):
    model, x = layer_of(kind)
    with cpt.precision(model, 4, q_grad=8):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with OpRecorder() as ran:
            expected = passes(model, x)
        assert ran.count("cpt::encode")
        for other in copies:
            assert all(map(torch.equal, passes(other, x), expected))
    for bits, dtype in ((12, torch.float32), (32, torch.float32), (4, torch.float64)):
        with cpt.precision(model.to(dtype), bits), OpRecorder() as ran:
            assert model(x.to(dtype)).isfinite().all()
        assert not ran.count("cpt::encode")


@pytest.mark.parametrize("kind", LAYERS)
def test_int8_autocast_rounds_results_only(kind):
    found = []
    for execution in ("integer", "simulated"):
        model, x = layer_of(kind, execution)
        x = (
            x.bfloat16() if kind == "lstm" else x
        )  # the results of whose have the type of its input
        with cpt.precision(model, 8):
            full = model(x.float())
            with torch.autocast("cpu", torch.bfloat16), OpRecorder() as ran:
                half = model(x)
        assert half.dtype == torch.bfloat16
        assert bool(ran.count("cpt::encode")) is (execution == "integer")
        if kind != "attention":  # which has products after its first ones
            assert torch.equal(half, full.bfloat16())
        found.append(half)
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", LAYERS)
def test_int8_bitops_equal_simulated_bitops(kind):
    found = []
    for execution in ("integer", "simulated"):
        model, x = layer_of(kind, execution)
        with cpt.precision(model, 8), cpt.BitOpsLedger(model) as ledger:
            passes(model, x)
        found.append((cpt.count_bitops(model, (x,)).bitops, ledger.by_layer("per_op")))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "how", [config(), config("simulated"), cpt.QuantConfig(execution="integer")]
)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_int8_output_may_be_changed_in_place(kind, how):
    make, shape = LAYERS[kind]
    layer, x, found = make(), torch.randn(shape), []
    for inplace in (True, False):
        model = cpt.quantize_(
            nn.Sequential(copy.deepcopy(layer), nn.ReLU(inplace)), how
        )
        with cpt.precision(model, 8):
            model(x).square().sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", LAYERS)
def test_int8_rejects_double_backward(kind):
    model, x = layer_of(kind)
    with cpt.precision(model, 8):
        y = model(x)
        with pytest.raises(RuntimeError, match=r"gradients of gradients.*simulated"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "shape",
    [(1, 4, 8, 8), (1, 3, 2, 8), (1, 3, 1, 1)],
    ids=["channels", "height", "both"],
)
def test_int8_convolution_shape_error_equals_torch(shape):
    said = []
    for execution in ("simulated", "integer"):
        model = cpt.quantize_(nn.Sequential(nn.Conv2d(3, 5, 3)), config(execution))
        with cpt.precision(model, 8), pytest.raises(RuntimeError) as caught:
            model(torch.randn(shape))
        said.append(str(caught.value))
    assert said[0] == said[1]
