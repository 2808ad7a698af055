"""Delayed backward passes and checkpoints: both use the bits of the forward pass."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from helpers import NEAREST, ForeignCheckpoint, FunctionModule, identical
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cpt_core import (
    PrecisionScheduler,
    QuantConfig,
    make_schedule,
    precision,
    quantize_,
)
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import all_precisions, layer_precisions
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.search.role_schedules import RoleSchedules

# reentrant checkpoints in others, where gradients are off
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
RISING = make_schedule("CR", q_min=2, q_max=8, total_steps=20, n_cycles=1)


# --- ways to run, models, programs --------------------------------------------------


def plain(run, *xs):
    """Run without a checkpoint."""
    return run(*xs)


def recompute(run, *xs):
    """Run in a checkpoint of torch that is not reentrant."""
    return checkpoint(run, *xs, use_reentrant=False)


def reentrant(run, *xs):
    return checkpoint(run, *xs, use_reentrant=True)


def nested(run, *xs):
    """Run in a checkpoint of a checkpoint, which begins before any module does."""
    return recompute(partial(recompute, run), *xs)


def mixed(run, *xs):
    """Run in a reentrant checkpoint inside one that is not reentrant."""
    return recompute(partial(reentrant, run), *xs)


def saved_on_cpu(run, *xs):
    """Run with saved-tensor hooks inside a checkpoint."""

    def inner(*xs):
        with torch.autograd.graph.save_on_cpu():
            return run(*xs)

    return recompute(inner, *xs)


def foreign(run, *xs):
    """Run in a checkpoint as other libraries have it."""
    return ForeignCheckpoint.apply(run, *xs)


CHECKPOINTS = [recompute, reentrant, nested, mixed, saved_on_cpu, foreign]


class Block(nn.Module):
    """Linear layers and attention, with a way to run the attention and a layer."""

    def __init__(self, is_fused=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.run_function, self.run_layer = plain, plain
        self.is_fused = is_fused

    def attend(self, q, k, v):
        if self.is_fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x):
        y = self.run_function(self.attend, *self.qkv(x).chunk(3, -1))
        return x + self.run_layer(self.out, y)


def first_output(layer):
    """Return a recurrent layer that returns no state."""
    return FunctionModule(lambda m, x: m.layer(x)[0], layer=layer)


def convolution():
    """Return a convolution over the tokens, with a normalisation."""
    return FunctionModule(
        lambda m, x: m.norm(m.conv(x.mT)).mT,
        conv=nn.Conv1d(8, 8, 3, padding=1),
        norm=nn.GroupNorm(2, 8),
    )


def graph_layers():
    """Return two graph convolutions over all tokens."""
    places = torch.arange(60)
    graph = Graph.from_edges(places % 20, places.mul(7) % 20, num_nodes=20)

    def forward(m, x):
        hidden = m.first(graph, x.flatten(0, 1)).relu()
        return m.second(graph, hidden).unflatten(0, x.shape[:2])

    return FunctionModule(forward, first=GraphConv(8, 6), second=GraphConv(6, 8))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


MODELS = {
    "mlp": mlp,
    "attention": lambda: nn.Sequential(Block(), Block()),
    "fused attention": lambda: nn.Sequential(Block(True), Block(True)),
    "convolution": convolution,
    "lstm": lambda: first_output(nn.LSTM(8, 8)),
    "graph": graph_layers,
    "gru": lambda: first_output(nn.GRU(8, 8)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
}


def set_bits(model, bits):
    """Set the bits of all layers outside of precision blocks."""
    for layer in all_precisions(model).values():
        layer.set_bits(bits, bits)


def in_block(model, x, run):
    """Leave the precision block before the backward pass."""
    set_bits(model, 8)
    with precision(model, 4, q_grad=3):
        y = run(model, x)
    return y.square().sum()


def stay_in_block(model, x, run):
    """Stay in the precision block, as the reference of ``in_block``."""
    set_bits(model, 8)
    with precision(model, 4, q_grad=3):
        run(model, x).square().sum().backward()


def step_before_backward(model, x, run):
    """Step the scheduler before the backward pass."""
    scheduler = PrecisionScheduler(model, RISING)
    y = run(model, x)
    for _ in range(15):
        scheduler.step()
    return y.square().sum()


def two_forward_passes(model, x, run):
    """Run two forward passes at different bits before their backward passes."""
    scheduler, losses = PrecisionScheduler(model, RISING), []
    for _ in range(2):
        losses.append(run(model, x).square().sum())
        for _ in range(7):
            scheduler.step()
    losses[1].backward()
    return losses[0]


def evaluate_before_backward(model, x, run):
    """Evaluate at evaluation bits before the backward pass."""
    scheduler = PrecisionScheduler(model, RISING, eval_bits=5)
    for _ in range(3):
        run(model, x)
        scheduler.step()
    y = run(model, x)
    with torch.no_grad():
        model.eval()(x + 3)
    return y.square().sum()


def gradient_of_evaluation(model, x, run):
    """Take gradients of an evaluation after training has resumed."""
    scheduler = PrecisionScheduler(model, RISING, eval_bits=5)
    for _ in range(3):
        model(x)
    y = run(model.eval(), x)
    scheduler.step()
    model.train()
    for _ in range(3):
        model(2 * x)
    return y.square().sum()


def forward_in_float32(model, x, run):
    """Run the forward pass in float32 and the backward pass at few bits."""
    with precision(model, "float"):
        y = run(model, x)
    set_bits(model, 3)
    return y.square().sum()


def schedule_per_layer(model, x, run):
    names = [*layer_precisions(model)]
    static = make_schedule("STATIC", q_max=3, total_steps=20)
    schedules = {names[0]: RISING, "*": static} if len(names) > 1 else RISING
    scheduler = PrecisionScheduler(model, schedules)
    y = run(model, x)
    for _ in range(12):
        scheduler.step()
    return y.square().sum()


def schedule_per_role(model, x, run):
    """Cycle the bits of all roles, with separate input and weight gradients."""
    cycle = partial(make_schedule, "CR", total_steps=20, n_cycles=1)
    roles = RoleSchedules(
        weight=cycle(q_min=3, q_max=8),
        activation=cycle(q_min=2, q_max=7),
        error=cycle(q_min=2, q_max=6),
        weight_gradient=cycle(q_min=3, q_max=5),
    )
    scheduler = PrecisionScheduler(model, roles)
    y = run(model, x)
    for _ in range(13):
        scheduler.step()
    return y.square().sum()


PROGRAMS = [
    in_block,
    step_before_backward,
    two_forward_passes,
    evaluate_before_backward,
    gradient_of_evaluation,
    forward_in_float32,
    schedule_per_layer,
    schedule_per_role,
]


def results(make, program, run=plain, config=NEAREST, prepare=None):
    """Return the gradients, the state of the layers and the loss if there is one."""
    torch.manual_seed(0)
    model = quantize_(make(), config)
    if prepare is not None:
        prepare(model)
    x = torch.randn(4, 5, 8, requires_grad=True)
    loss = program(model, x, run)
    if loss is not None:
        loss.backward()
    layers = layer_precisions(model).values()
    states = [value for p in layers for value in p.get_running().values()]
    losses = [] if loss is None else [loss.detach()]
    return [x.grad, *(p.grad for p in model.parameters()), *states, *losses]


# --- late gradients -----------------------------------------------------------------

CONFIGS = {
    "nearest": NEAREST,
    "stochastic": QuantConfig(),
    "integer": replace(NEAREST, execution="integer"),
    "ladder": replace(
        NEAREST,
        ladder=FormatLadder(
            {q: "e4m3" if q > 4 else "mxfp4:partial=1" for q in range(2, 9)}
        ),
    ),
}


@pytest.mark.parametrize("config", ["nearest", "integer", "ladder"])
@pytest.mark.parametrize("name", MODELS)
def test_late_gradient_has_bits_of_forward(name, config):
    late = results(MODELS[name], in_block, config=CONFIGS[config])[:-1]
    expected = results(MODELS[name], stay_in_block, config=CONFIGS[config])
    assert identical(late, expected)


@pytest.fixture
def plain_kernels(monkeypatch):
    """Round by plain torch alone."""
    fake_quantize.load_kernels()  # or the first model would load them again
    former = fake_quantize.use_operators(fake_quantize.PlainOperators)
    monkeypatch.setattr("cpt_extras.kernels.operators.active", torch.ops.cpt_reference)
    yield
    fake_quantize.use_operators(former)


@pytest.mark.parametrize("name", MODELS)
def test_late_backward_of_plain_kernels(name, plain_kernels):
    late = results(MODELS[name], in_block)[:-1]
    assert identical(late, results(MODELS[name], stay_in_block))
    expected = results(MODELS[name], two_forward_passes)
    assert identical(expected, results(MODELS[name], two_forward_passes, recompute))


def test_late_split_gradient_has_bits_of_forward():
    gradients = []
    for is_late in (False, True):
        torch.manual_seed(0)
        model, x = quantize_(mlp(), NEAREST), torch.randn(4, 8, requires_grad=True)
        layers = layer_precisions(model).values()
        for layer in layers:
            layer.set_levels(RoleLevels(4, 5, 3, 6))
        loss = model(x).square().sum()
        if is_late:
            for layer in layers:
                layer.set_levels(RoleLevels(8, 8, 2, 2))
        loss.backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert identical(*gradients)
    assert {layer.bits for layer in layers} == {8}


# --- checkpoints --------------------------------------------------------------------


def pairwise_cases():
    """Return (checkpoint, model, program) that cover every pair of values."""
    by_program = [(recompute, name, p) for name in MODELS for p in PROGRAMS]
    by_checkpoint = [(how, "attention", p) for how in CHECKPOINTS for p in PROGRAMS]
    by_model = [
        (how, name, step_before_backward) for how in CHECKPOINTS for name in MODELS
    ]
    cases = dict.fromkeys([*by_program, *by_checkpoint, *by_model])
    # these layers round their output gradient once for both matmuls
    for name in ("lstm", "graph"):
        del cases[recompute, name, schedule_per_role]
    return cases


@pytest.mark.parametrize(("how", "name", "program"), pairwise_cases())
def test_checkpoint_recomputes_at_bits_of_forward(how, name, program):
    expected = results(MODELS[name], program)
    found = results(MODELS[name], program, how)
    if (name, program) == ("lstm", forward_in_float32):
        # torch's own LSTM has other last digits without gradients
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert identical(expected, found)


@pytest.mark.parametrize("place", ["run_function", "run_layer"])
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("name", ["attention", "fused attention"])
def test_checkpoint_inside_module_recomputes_at_forward_bits(name, how, place):
    """Checkpoint a function or a layer of every block, and the model around it."""

    def prepare(model):
        for block in model:
            setattr(block, place, how)

    program = evaluate_before_backward if how is recompute else two_forward_passes
    expected = results(MODELS[name], program)
    for run in (plain, how):
        found = results(MODELS[name], program, run, prepare=prepare)
        assert identical(expected, found)


class Attend:
    """A callable object that is no module."""

    def __call__(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


CHECKPOINTED = {  # q, k, v -> function, and tensors that it gets
    "attention": lambda q, k, v: (F.scaled_dot_product_attention, q, k, v),
    "attention with options": lambda q, k, v: (
        partial(F.scaled_dot_product_attention, scale=0.7),
        q,
        k,
        v,
    ),
    "matmul": lambda q, k, v: (torch.matmul, q, k.mT),
    "method": lambda q, k, v: (torch.Tensor.matmul, q, k.mT),
    "linear": lambda q, k, v: (F.linear, q, k[0]),
    "operator": lambda q, k, v: (torch.ops.aten.matmul, q, k.mT),
    "object": lambda q, k, v: (Attend(), q, k, v),
    "keys transposed outside": lambda q, k, v: (
        lambda q, k, v: (q @ k).softmax(-1) @ v,
        q,
        k.mT,
        v,
    ),
    "keys scaled inside": lambda q, k, v: (
        lambda q, k, v: (q @ (0.5 * k)).softmax(-1) @ v,
        q,
        k.mT,
        v,
    ),
    "state": lambda q, k, v: (lambda q, k, v: q @ (k @ v), q, k.mT, v),
    "probabilities from outside": lambda q, k, v: (
        lambda p, v: p @ v,
        (q @ k.mT).softmax(-1),
        v,
    ),
}


@pytest.mark.parametrize("how", [recompute, reentrant, foreign])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoint_of_function_recomputes_rounding(name, how):
    """Cover functions of torch without Python code, and operands made outside."""
    gradients = []
    for run in (plain, how):
        torch.manual_seed(0)
        model = FunctionModule(
            lambda m, x, y: run(*CHECKPOINTED[name](m.q(x), m.k(y), m.v(y))),  # noqa: B023
            **{role: nn.Linear(4, 4) for role in "qkv"},
        )
        quantize_(model, NEAREST)
        x, y = torch.randn(2, 4, 4), torch.randn(2, 9, 4)
        with precision(model, 3):
            loss = model(x, y).square().sum()
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("config", ["stochastic", "integer", "ladder"])
def test_checkpoint_recomputes_every_configuration(config, how):
    compute = partial(results, MODELS["attention"], config=CONFIGS[config])
    for program in (two_forward_passes, forward_in_float32):
        assert identical(compute(program), compute(program, how))


def test_checkpoint_recomputation_keeps_layer_state():
    model, x = quantize_(mlp(), NEAREST), torch.randn(4, 8, requires_grad=True)
    scheduler = PrecisionScheduler(model, RISING)
    y = recompute(model, x)
    for _ in range(15):
        scheduler.step()
    layers = layer_precisions(model).values()
    before = [
        {name: value for name, value in vars(p).items() if name != "recomputes"}
        for p in layers
    ]
    y.sum().backward()  # torch ends its recomputation early
    for attributes, layer in zip(before, layers, strict=True):
        assert all(vars(layer)[name] is value for name, value in attributes.items())
        assert not layer.recomputes
        layer.eval()
        assert not layer.training


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoint_recomputes_precision_block_within_function(how):
    """Set the bits of an inner precision block again, but not those of a scheduler."""

    def program(model, x, run):
        def compute(x):
            with precision(model, 6):
                y = model(x)
            return y + model(x)

        return step_before_backward(model, x, lambda model, x: run(compute, x))

    assert identical(results(mlp, program), results(mlp, program, how))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_hugging_face_recomputes_forward_bits(use_reentrant):
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = quantize_(transformers.BertModel(config), NEAREST)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model.train()
        with precision(model, 4, q_grad=3):
            y = model(torch.arange(12).view(2, 6)).last_hidden_state
        y.square().sum().backward()
        gradients.append([p.grad for p in model.encoder.parameters()])
    assert identical(*gradients)


def test_checkpoint_nested_around_layers_recomputes_inner():
    def compute(model, x, run):
        return model[2](run(model[0], x).relu())

    found = []
    for inner, outer in ((plain, plain), (recompute, recompute)):
        run = partial(outer, lambda model, x, inner=inner: compute(model, x, inner))
        found.append(results(mlp, in_block, run))
    assert identical(*found)


class SavedFunction(torch.autograd.Function):
    """Function that calls a saved function in its backward pass, not as a checkpoint."""

    @staticmethod
    def forward(ctx, x, w, multiply):
        ctx.multiply = multiply
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        multiply = ctx.multiply
        return multiply(gradient, w.t()), multiply(x.t(), gradient), None


def test_functions_saved_for_backward_stay_in_float32():
    model = quantize_(
        FunctionModule(
            lambda m, x: SavedFunction.apply(x, m.w, torch.matmul),
            w=nn.Parameter(torch.randn(4, 4)),
        )
    )
    x = torch.randn(3, 4, requires_grad=True)
    with precision(model, 2, 8):
        model(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4) @ model.w.t())
