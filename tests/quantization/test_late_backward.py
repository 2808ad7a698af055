"""Delayed backward passes: gradients and recomputation use the bits of the forward pass."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from helpers import NEAREST, ForeignCheckpoint, identical
from torch import nn
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
REENTRANT = {"reentrant": True, "not reentrant": False}


def plain(run, *xs):
    """Run without a checkpoint."""
    return run(*xs)


def nested(run, *xs):
    """Run in a checkpoint of a checkpoint, which begins before any module does."""
    inner = partial(checkpoint, run, use_reentrant=False)
    return checkpoint(inner, *xs, use_reentrant=False)


def mixed(run, *xs):
    """Run in a reentrant checkpoint inside a non-reentrant one."""
    inner = partial(checkpoint, run, use_reentrant=True)
    return checkpoint(inner, *xs, use_reentrant=False)


def saved_on_cpu(run, *xs):
    """Run with saved-tensor hooks inside a checkpoint."""

    def inner(*xs):
        with torch.autograd.graph.save_on_cpu():
            return run(*xs)

    return checkpoint(inner, *xs, use_reentrant=False)


CHECKPOINTS = {
    name: partial(checkpoint, use_reentrant=how) for name, how in REENTRANT.items()
}
CHECKPOINTS |= {
    "custom": ForeignCheckpoint.apply,
    "nested": nested,
    "mixed": mixed,
    "saved on cpu": saved_on_cpu,
}


class Block(nn.Module):
    """Linear layers and attention; ``how`` runs one of its functions, ``inner`` one of its layers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.how, self.inner = (
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            plain,
            plain,
        )

    def attend(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    def forward(self, x):
        y = self.how(self.attend, *self.qkv(x).chunk(3, -1))
        return x + self.inner(self.out, y)


class Recurrent(nn.Module):
    """Recurrent layer that returns no state."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(8, 8)

    def forward(self, x):
        return self.layer(x)[0]


class Convolution(nn.Module):
    """Convolution over the tokens, with a batch norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x):
        return self.norm(self.conv(x.mT)).mT


class GraphLayers(nn.Module):
    """Two graph convolutions over all tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConv(8, 6), GraphConv(6, 8)
        self.graph = Graph.from_edges(
            torch.arange(60) % 20, torch.arange(60).mul(7) % 20, num_nodes=20
        )

    def forward(self, x):
        return self.second(
            self.graph, self.first(self.graph, x.flatten(0, 1)).relu()
        ).unflatten(0, x.shape[:2])


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


MODELS = {
    "mlp": mlp,
    "attention": lambda: nn.Sequential(Block(), Block()),
    "convolution": Convolution,
    "lstm": lambda: Recurrent(nn.LSTM),
    "graph": GraphLayers,
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
}


# --- programs: what happens between the forward and the backward pass -------------------------------------------------


def set_bits(model):
    """Set the bits of all layers outside of precision blocks."""
    for layer in all_precisions(model).values():
        layer.set_bits(8, 8)


def in_block(model, x, run):
    """Leave the precision block before the backward pass."""
    set_bits(model)
    with precision(model, 4, q_grad=3):
        y = run(model, x)
    return y.square().sum()


def in_block_of_itself(model, x, run):
    """Stay in the precision block, as the reference of ``in_block``."""
    set_bits(model)
    with precision(model, 4, q_grad=3):
        run(model, x).square().sum().backward()


def stepping(model, x, run):
    """Step the scheduler before the backward pass."""
    scheduler = PrecisionScheduler(model, RISING)
    y = run(model, x)
    for _ in range(15):
        scheduler.step()
    return y.square().sum()


def twice(model, x, run):
    """Run two forward passes at different bits before their backward passes."""
    scheduler, losses = PrecisionScheduler(model, RISING), []
    for _ in range(2):
        losses.append(run(model, x).square().sum())
        for _ in range(7):
            scheduler.step()
    losses[1].backward()
    return losses[0]


def evaluating(model, x, run):
    """Evaluate at evaluation bits before the backward pass."""
    scheduler = PrecisionScheduler(model, RISING, eval_bits=5)
    for _ in range(3):
        run(model, x)
        scheduler.step()
    y = run(model, x)
    with torch.no_grad():
        model.eval()(x + 3)
    return y.square().sum()


def evaluated(model, x, run):
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


def in_float32(model, x, run):
    """Run the forward pass in float32 and the backward pass at few bits."""
    with precision(model, "float"):
        y = run(model, x)
    for layer in all_precisions(model).values():
        layer.set_bits(3, 3)
    return y.square().sum()


def by_layer(model, x, run):
    """Step through a schedule for every layer."""
    names = [*layer_precisions(model)]
    fixed = make_schedule("STATIC", q_max=3, total_steps=20)
    scheduler = PrecisionScheduler(
        model, {names[0]: RISING, "*": fixed} if len(names) > 1 else RISING
    )
    y = run(model, x)
    for _ in range(12):
        scheduler.step()
    return y.square().sum()


PROGRAMS = [in_block, stepping, twice, evaluating, evaluated, in_float32, by_layer]


def results(make, program, run=plain, config=NEAREST, prepare=None):
    """Return the loss, the gradients and the state of the layers."""
    torch.manual_seed(0)
    model = quantize_(make(), config)
    if prepare is not None:
        prepare(model)
    x = torch.randn(4, 5, 8, requires_grad=True)
    loss = program(model, x, run)
    if loss is not None:
        loss.backward()
    states = [
        value
        for p in layer_precisions(model).values()
        for value in p.get_running().values()
    ]
    loss = [] if loss is None else [loss.detach()]
    return [x.grad, *(p.grad for p in model.parameters()), *states, *loss]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoint_recomputes_at_bits_of_forward(how, name, program):
    expected, found = (
        results(MODELS[name], program),
        results(MODELS[name], program, CHECKPOINTS[how]),
    )
    if (name, program) == (
        "lstm",
        in_float32,
    ):  # torch's own LSTM has other last digits without gradients
        assert all(
            torch.allclose(a, b, atol=1e-6)
            for a, b in zip(expected, found, strict=True)
        )
    else:
        assert identical(expected, found)


@pytest.mark.parametrize("name", MODELS)
def test_late_gradient_has_bits_of_forward(name):
    expected = results(MODELS[name], in_block_of_itself)
    late = results(MODELS[name], in_block)[:-1]
    assert identical(late, expected)


# --- where checkpoints are, and what else is quantised otherwise ------------------------------------------------------


def in_blocks(place, how):
    """Return a preparation that checkpoints a function or layer of every block."""

    def prepare(model):
        for block in model:
            setattr(block, place, CHECKPOINTS[how])

    return prepare


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("place", ["how", "inner"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoint_inside_module_recomputes_at_forward_bits(how, place, program):
    expected = results(MODELS["attention"], program)
    assert identical(
        expected, results(MODELS["attention"], program, prepare=in_blocks(place, how))
    )
    both = results(
        MODELS["attention"], program, CHECKPOINTS[how], prepare=in_blocks(place, how)
    )
    assert identical(expected, both)


CONFIGS = {
    "stochastic": QuantConfig(),
    "integer": replace(NEAREST, execution="integer"),
    "ladder": replace(
        NEAREST,
        ladder=FormatLadder(
            {q: "e4m3" if q > 4 else "mxfp4:partial=1" for q in range(2, 9)}
        ),
    ),
}


def with_roles(model, x, run):
    """Cycle the bits of all four roles, with separate input and weight gradients."""
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


@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("config", CONFIGS)
def test_checkpoint_recomputes_every_configuration(config, how):
    for program in (in_block, twice, in_float32):
        of_config = partial(
            results, MODELS["attention"], program, config=CONFIGS[config]
        )
        assert identical(of_config(), of_config(CHECKPOINTS[how]))


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_checkpoint_recomputes_bits_of_roles(how):
    for name in ("attention", "convolution"):
        expected = results(MODELS[name], with_roles)
        assert identical(expected, results(MODELS[name], with_roles, CHECKPOINTS[how]))


@pytest.fixture
def plain_kernels(monkeypatch):
    """Round by plain torch alone."""
    fake_quantize.load_kernels()  # else the first model would load them over what is put here
    former = fake_quantize.use_operators(fake_quantize.PlainOperators)
    monkeypatch.setattr("cpt_extras.kernels.operators.active", torch.ops.cpt_reference)
    yield
    fake_quantize.use_operators(former)


@pytest.mark.parametrize("name", MODELS)
def test_late_backward_of_plain_kernels(name, plain_kernels):
    assert identical(
        results(MODELS[name], in_block)[:-1], results(MODELS[name], in_block_of_itself)
    )
    for program in (stepping, twice):
        expected = results(MODELS[name], program)
        assert identical(
            expected, results(MODELS[name], program, CHECKPOINTS["not reentrant"])
        )


@pytest.mark.parametrize("config", ["integer", "ladder"])
@pytest.mark.parametrize("name", ["mlp", "attention", "convolution", "lstm", "graph"])
def test_late_gradient_has_forward_bits_per_configuration(config, name):
    of_config = partial(results, MODELS[name], config=CONFIGS[config])
    assert identical(of_config(in_block)[:-1], of_config(in_block_of_itself))


def test_split_gradient_has_bits_of_forward():
    levels, found = RoleLevels(4, 5, 3, 6), []
    for is_late in (False, True):
        torch.manual_seed(0)
        model, x = quantize_(mlp(), NEAREST), torch.randn(4, 8, requires_grad=True)
        for layer in layer_precisions(model).values():
            layer.set_levels(levels)
        loss = model(x).square().sum()
        if is_late:
            for layer in layer_precisions(model).values():
                layer.set_levels(RoleLevels(8, 8, 2, 2))
        loss.backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert identical(*found)
    assert {layer.bits for layer in layer_precisions(model).values()} == {8}


def test_checkpoint_recomputation_keeps_layer_state():
    model, x = quantize_(mlp(), NEAREST), torch.randn(4, 8, requires_grad=True)
    scheduler = PrecisionScheduler(model, RISING)
    y = CHECKPOINTS["not reentrant"](model, x)
    for _ in range(15):
        scheduler.step()
    layers = layer_precisions(model).values()
    before = [
        {name: value for name, value in vars(p).items() if name != "recomputes"}
        for p in layers
    ]
    y.sum().backward()  # which torch ends early
    for attributes, layer in zip(before, layers, strict=True):
        assert all(vars(layer)[name] is value for name, value in attributes.items())
        assert not layer.recomputes
        layer.eval()
        assert not layer.training


def test_checkpoint_recomputes_precision_block_within_function():
    """Set the bits of an inner precision block again while the scheduler stays put."""
    found = []
    for run in (plain, *CHECKPOINTS.values()):
        torch.manual_seed(0)
        model, x = quantize_(mlp(), NEAREST), torch.randn(4, 8, requires_grad=True)
        scheduler = PrecisionScheduler(model, RISING)

        def compute(x, model=model):
            with precision(model, 6):
                y = model(x)
            return y + model(x)

        y = run(compute, x)
        for _ in range(15):
            scheduler.step()
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(identical(found[0], other) for other in found[1:])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpoint_of_hugging_face_recomputes_forward_bits():
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    found = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        model = quantize_(transformers.BertModel(config), NEAREST)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        with precision(model, 4, q_grad=3):
            y = model(torch.arange(12).view(2, 6)).last_hidden_state
        y.square().sum().backward()
        found.append([p.grad for p in model.encoder.parameters()])
    assert all(identical(found[0], other) for other in found[1:])


def test_checkpoint_nested_around_layers_recomputes_inner():
    def compute(model, x, run):
        return model[2](run(model[0], x).relu())

    keep = CHECKPOINTS["not reentrant"]
    found = []
    for inner, outer in ((plain, plain), (keep, keep)):
        run = partial(outer, lambda model, x, inner=inner: compute(model, x, inner))
        found.append(results(mlp, in_block, run))
    assert identical(*found)
