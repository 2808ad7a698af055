"""What else a training does, with products on codes: nothing else may notice that they are."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers import OnRing, identical, losses_of, pictures, small
from torch import nn
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from cpt_core.quantization import precision as precisions
from cpt_core.quantization.convert import layer_precisions

STEPS = 6


def config(execution="integer", **kwargs):
    return cpt.QuantConfig(execution=execution, **kwargs).with_shared_steps()


def converted(execution="integer", seed=0):
    return cpt.quantize_(small(seed), config(execution))


def step(model, seed=0, call=None):
    """Forward and backward: the output and all gradients."""
    model.zero_grad()
    y = (call or model)(pictures(seed))
    y.square().mean().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def trained(model, call=None):
    """Train a few steps, through ``call``: losses, parameters, running ranges and keys of the noise."""
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    losses = losses_of(model, schedule, lambda seed: (call or model)(pictures(seed)).square().mean(), STEPS)
    ranges = [v for p in layer_precisions(model).values() for v in p.get_running().values()]
    return [torch.tensor(losses), *(p.detach() for p in model.parameters()), *ranges]


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """A machine without instructions for products of 8-bit integers."""
    monkeypatch.setattr(precisions, "multiplies_codes", lambda device: False)
    monkeypatch.setattr("cpt_core.inspecting.summary.multiplies_codes", lambda device: False)
    monkeypatch.setattr(precisions, "_warned", set())


def test_where_integers_are_slow_it_is_said_once(slow):
    model, again = converted(), converted()
    with cpt.precision(model, 8), pytest.warns(UserWarning, match=r"slower .* \(cpu\): .*'auto' would simulate"):
        found = step(model)
    with cpt.precision(again, 8), warnings.catch_warnings(action="error"):
        assert identical(step(again), found)
    assert all(p.on_codes(torch.ones(1)) is False for p in layer_precisions(model).values())  # no bits, no codes


@pytest.mark.slow
def test_where_integers_are_slow_compiled_code_says_so_too(slow):
    torch._dynamo.reset()
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3)), config())
    with cpt.precision(model, 8), pytest.warns(UserWarning, match="products of 8-bit integers are slower than float32"):
        torch.compile(model, backend="eager")(torch.ones(2, 4))


def test_auto_simulates_where_integers_are_slow(slow):
    model, simulated = converted("auto"), converted("simulated")
    with warnings.catch_warnings(action="error"):
        assert identical(trained(model), trained(simulated))
    rows = [row for row in cpt.summary(model).rows if row.quantized]
    reasons = {reason for row in rows for reason in row.simulated.values()}
    assert len(rows) == 3
    assert reasons == {"auto: this device does not multiply codes"}
    assert all(len(row.simulated) == 3 for row in rows)
    assert "forward simulated: auto: this device does not multiply codes" in str(cpt.summary(model))


# --- training and evaluation ------------------------------------------------------------------------------------------


def test_training_is_that_of_the_simulation():
    on_codes, simulated = (trained(converted(execution))[0].tolist() for execution in ("integer", "simulated"))
    assert on_codes == pytest.approx(simulated, rel=0.02)  # a code that flips is a step of a 3-bit grid
    assert on_codes[0] == pytest.approx(simulated[0], rel=1e-5)


def test_evaluation_uses_running_ranges():
    models = [converted(), converted("simulated")]
    trained(models[0])
    models[1].load_state_dict(models[0].state_dict())
    for a, b in zip(*(layer_precisions(m).values() for m in models), strict=True):
        b.set_running(a.get_running())
    outputs = []
    for model in models:
        with cpt.precision(model.eval(), 8):
            outputs.append(model(3 * pictures()))  # beyond what training has seen
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-4)


def test_storage_and_other_precisions():
    model, x = converted(), pictures()
    with cpt.precision(model, 4, q_grad=8):
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    for bits in (12, 32):  # too wide for codes: simulated
        with cpt.precision(model, bits):
            assert not layer_precisions(model)["0"].on_codes(x)
            assert model(x).isfinite().all()


# --- bits and modes ---------------------------------------------------------------------------------------------------


def test_evaluation_between_steps_leaves_no_trace():
    model = converted()

    def evaluated_before(x):
        with torch.inference_mode(), cpt.precision(model.eval(), 8):
            model(3 * pictures(100))
        with torch.no_grad(), cpt.precision(model, "float"):
            model(pictures(100))
        return model.train()(x)

    assert identical(trained(converted()), trained(model, evaluated_before))


@pytest.mark.parametrize("q_grad", [6, 12])
def test_gradients_are_rounded_as_the_simulation_does_whatever_bits_were_set_between(q_grad):
    """The levels are those at the time of the backward pass: codes of 8 bits do not hold those of 12."""
    found = []
    for execution in ("integer", "simulated"):
        model = converted(execution)
        with cpt.precision(model, 8, q_grad=8):
            y = model(pictures())
        with cpt.precision(model, 8, q_grad=q_grad):
            y.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    largest = max(float(b.abs().max()) for b in found[1])  # a bias before BatchNorm has none but noise
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * largest)


def test_restoring_gives_the_plain_model_back_and_another_execution_can_follow():
    model, plain = converted(), small()
    trained(model)
    plain.load_state_dict(model.state_dict())
    cpt.restore_(model)
    assert identical(step(model), step(plain))
    model, plain = cpt.quantize_(model, config("simulated")), cpt.quantize_(plain, config("simulated"))
    with cpt.precision(model, 5), cpt.precision(plain, 5):
        assert identical(step(model), step(plain))


def test_a_copy_made_in_the_middle_trains_on_as_the_model_does():
    model = converted()
    trained(model)
    other = copy.deepcopy(model)
    assert identical(trained(model), trained(other))


# --- what torch does with a model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    model = converted()
    found = trained(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant))
    assert identical(found, trained(converted()))


def test_autocast_rounds_results_and_nothing_before():
    model, x = cpt.quantize_(nn.Sequential(nn.Linear(8, 4)), config()), torch.randn(3, 8)
    with cpt.precision(model, 8):
        full = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = model(x)
            assert layer_precisions(model)["0"].on_codes(x)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, full.bfloat16())
    found = []
    for execution in ("integer", "simulated"):
        model = converted(execution)
        with cpt.precision(model, 8), torch.autocast("cpu", torch.bfloat16):
            found.append(step(model)[0])
    assert torch.allclose(*found, rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch where a graph breaks
def test_compiled_it_computes_the_same_and_a_change_of_bits_compiles_nothing_anew():
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
            assert identical(step(model, seed, compiled), step(eager, seed))
        frames.add(counter.frame_count)
    assert len(frames) == 1
    torch._dynamo.reset()


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "conv": (lambda: nn.Conv2d(6, 5, 3), (4, 6, 5, 5)),
    "lstm": (lambda: nn.LSTM(6, 5), (4, 2, 6)),
    "graph": (lambda: OnRing(cpt.GraphConv(6, 5)), (6, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_bitops_are_those_of_the_simulation(kind):
    make, shape = LAYERS[kind]
    on_codes, simulated = (cpt.quantize_(nn.Sequential(make()), config(e)) for e in ("integer", "simulated"))
    x = (torch.randn(shape),)
    assert cpt.count_bitops(on_codes, x).bitops == cpt.count_bitops(simulated, x).bitops


@pytest.mark.parametrize("how", [config(), config("simulated"), cpt.QuantConfig(execution="integer")])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_output_may_be_changed_in_place(kind, how):
    make, shape = LAYERS[kind]
    layer, x, found = make(), torch.randn(shape), []
    for inplace in (True, False):
        model = cpt.quantize_(nn.Sequential(copy.deepcopy(layer), nn.ReLU(inplace)), how)
        with cpt.precision(model, 8):
            model(x).square().sum().backward()
        found.append(model[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_gradients_are_refused_and_not_left_out(kind):
    make, shape = LAYERS[kind]
    model, x = cpt.quantize_(nn.Sequential(make()), config()), torch.randn(shape, requires_grad=True)
    with cpt.precision(model, 8):
        y = model(x)[0] if kind == "lstm" else model(x)
        with pytest.raises(RuntimeError, match=r"gradients of gradients.*simulated"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (1, 3, 2, 8), (1, 3, 1, 1)], ids=["channels", "height", "both"])
def test_a_convolution_says_what_torch_says_of_a_wrong_shape(shape):
    said = []
    for execution in ("simulated", "integer"):
        model = cpt.quantize_(nn.Sequential(nn.Conv2d(3, 5, 3)), config(execution))
        with cpt.precision(model, 8), pytest.raises(RuntimeError) as caught:
            model(torch.randn(shape))
        said.append(str(caught.value))
    assert said[0] == said[1]
