"""Dry runs of a training step: the model, its inputs and all random generators stay unchanged."""

import copy
import random
from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import FunctionModule, identical, refused
from IPython.core.formatters import PlainTextFormatter
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import QuantConfig, all_precisions, quantize_
from cpt_core.quantization.scheduler import (
    PrecisionScheduler,
    SavedBits,
    precision,
)
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.uncounted import uncounted_functions

DRY_RUNS = pytest.mark.parametrize(
    "dry_run", [check, count_bitops, summary, uncounted_functions]
)


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "record"


class Cache:
    """Object that holds the state of a model, like the caches of language models."""

    def __init__(self, x):
        self.layers, self.owner = [{"keys": x}], self


INPUTS = {  # kind -> how an input is made from an image, and how a model reads it
    "tensor": (lambda x: x, lambda value: value),
    "nested": (lambda x: {"a": [None, (x,)]}, lambda value: value["a"][1][0]),
    "dataclass": (Record, lambda value: value.x),
    "user dict": (lambda x: UserDict(x=x), lambda value: value["x"]),
    "object": (Cache, lambda value: value.owner.layers[0]["keys"]),
    "packed": (lambda x: pack_sequence([x[:2], x[2:]]), lambda value: value.data),
}


def generated_image():
    """Return a generator and an image that it generated, with autograd history."""
    generator = nn.Linear(4, 4)
    return generator, generator(torch.randn(3, 4)).tanh()


def discriminator(read, writes=False):
    def forward(m, value):
        x = read(value)
        return m.layer(x.mul_(2) if writes else x)

    return quantize_(FunctionModule(forward, layer=nn.Linear(4, 2)))


@DRY_RUNS
@pytest.mark.parametrize("kind", INPUTS)
def test_dry_run_preserves_graph_of_inputs(kind, dry_run):
    make, read = INPUTS[kind]
    generator, x = generated_image()
    value, model = make(x), discriminator(read)
    dry_run(model, (value,))
    read(value).sum().backward()
    gradient = generator.weight.grad.clone()
    assert gradient.abs().sum() > 0
    dry_run(model, (value,))  # its graph is freed now
    assert torch.equal(generator.weight.grad, gradient)


@DRY_RUNS
@pytest.mark.parametrize("kind", INPUTS)
def test_dry_run_copies_mutated_inputs(kind, dry_run):
    make, read = INPUTS[kind]
    value = make(torch.randn(3, 4))
    before = read(value).clone()
    dry_run(discriminator(read, writes=True), (value,))
    assert torch.equal(read(value), before)


@DRY_RUNS
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dry_run_accepts_hidden_state_inputs(kind, dry_run):
    model = quantize_(FunctionModule(lambda m, x, h: m.rnn(x, h), rnn=kind(4, 4)))
    x = torch.randn(5, 2, 4)
    with precision(model, 8):
        y, hidden = model(x, None)
        dry_run(model, (x, hidden))
        y.sum().backward()
        dry_run(model, (x, hidden))


def test_dry_run_counts_gradient_of_generated_input():
    """Count the input gradient only where the graph of an input needs it."""
    _, x = generated_image()
    model = quantize_(nn.Sequential(nn.Linear(4, 2)))
    for value, gradients in ((x, 2), (x.detach(), 1)):
        operations = check(model, (value,)).operations
        assert sum(e.macs for e in operations if e.backward) == gradients * 24
        assert len(count_bitops(model, (value,)).bitops["0"]) == 1 + gradients


@pytest.mark.parametrize("dry_run", [check, count_bitops, summary])
def test_dry_run_requires_tuple_of_inputs(dry_run):
    message = "inputs must be a tuple of the arguments of forward, or a mapping .*, got a Tensor"
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    refused(message, dry_run, model, torch.randn(1, 4))
    refused("got a dict", dry_run, model, {0: torch.randn(1, 4)})


@DRY_RUNS
@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_dry_run_takes_keyword_arguments(dry_run, mapping):
    """Give the same result for keyword arguments in a mapping, as tokenizers return them, as for a tuple."""
    model = quantize_(
        FunctionModule(
            lambda m, x, *, scale=2.0: m.layer(torch.relu(m.layer(x) * scale)),
            layer=nn.Linear(4, 4),
        )
    )
    x = torch.randn(3, 4)
    expected = dry_run(model, (x,))
    assert str(dry_run(model, mapping(x=x))) == str(expected)
    assert str(dry_run(model, mapping(scale=2.0, x=x))) == str(expected)


@pytest.mark.parametrize("dry_run", [check, count_bitops, summary])
def test_notebook_shows_text_of_result(dry_run):
    result = dry_run(quantize_(nn.Sequential(nn.Linear(4, 3))), (torch.randn(2, 4),))
    assert PlainTextFormatter()(result) == str(result)


class Busy(nn.Module):
    """Model that changes its state and draws random numbers in every pass."""

    def __init__(self, trouble):
        super().__init__()
        self.trouble = trouble
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
        self.frozen_norm = nn.BatchNorm1d(4)
        self.layer, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 4)
        self.offset = nn.Parameter(torch.randn(2, 1, 4), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y = self.frozen_norm(self.drop(self.norm(x)))
        y = self.layer(y) + self.mean + random.random() + np.random.rand()  # noqa: NPY002
        if self.trouble == "writes parameters":
            with torch.no_grad():
                self.offset[0].mul_(0.9).add_(y.mean(0))
                torch.mul(self.layer.weight, 2, out=self.layer.weight)
        if self.trouble == "fails" or (self.trouble == "fails alone" and len(x) == 1):
            raise KeyError("broken")
        return y * self.offset, self.rnn(y[None])


def state_of(model, scheduler, x):
    """Return copies of all tensors of a training, and everything else that it has."""
    precisions = list(all_precisions(model).values())
    tensors = [*model.parameters(), *model.buffers(), x, torch.get_rng_state()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for p in precisions:
        tensors += [*p.ranges().values(), p.noise_key, p.num_steps]
    modules = [
        (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]
    flags = [
        (p.training, p.filled_roles, p.is_fixed, p.zeros_unchecked) for p in precisions
    ]
    active = [
        (p.execution, p.grids, p.quantizers, SavedBits.current(p)) for p in precisions
    ]
    gradients = [p.grad is None for p in (*model.parameters(), x)]
    numpy_state = str(np.random.get_state())  # noqa: NPY002
    others = modules, flags, active, gradients, numpy_state, random.getstate()
    return copy.deepcopy(tensors), (*others, scheduler.get_last_bits())


@pytest.mark.parametrize("dry_run", [check, count_bitops])
@pytest.mark.parametrize(
    ("training", "execution"), [(True, "integer"), (False, "simulated")]
)
@pytest.mark.parametrize(
    "trouble", ["", "writes parameters", "fails", "fails alone", "runs a closure"]
)
def test_dry_run_leaves_model_unchanged(dry_run, training, execution, trouble):
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    model = quantize_(Busy(trouble), QuantConfig(execution=execution))
    scheduler = PrecisionScheduler(model, StaticSchedule(5, 8), eval_bits=6)
    if trouble == "runs a closure":  # over the model itself, not over its copy
        inner = model.forward
        model.forward = lambda x: inner(x)
    if trouble != "fails":
        model(torch.randn(3, 4))[0].sum().backward()
        model.train(training)
        model(x)  # layers notice their mode when they run
    model.frozen_norm.eval()

    tensors, others = state_of(model, scheduler, x)
    if trouble == "fails":
        refused("broken", dry_run, model, (2 * x,), error=KeyError)
    else:
        dry_run(model, (2 * x,))
    tensors_after, others_after = state_of(model, scheduler, x)
    assert identical(tensors_after, tensors)
    assert others_after == others


@pytest.mark.parametrize("eval_bits", ["current", 6])
def test_dry_run_leaves_no_former_scheduler(eval_bits):
    """Keep the bits of a scheduler that replaces another after the check, also after an evaluation."""
    model, x = quantize_(nn.Sequential(nn.Linear(4, 4))), torch.randn(3, 4)
    PrecisionScheduler(model, StaticSchedule(3, 8), eval_bits=eval_bits)
    check(model, (x,))
    scheduler = PrecisionScheduler(model, StaticSchedule(8, 8), eval_bits=eval_bits)
    with precision(model.eval(), 8):
        model(x)
    model.train()
    assert model[0].precision.owning_scheduler is scheduler
    assert model[0].precision.bits == 8
