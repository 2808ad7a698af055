"""Inputs from a training loop: dry runs leave their autograd graphs and values unchanged."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.summary import summary
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.uncounted import uncounted_functions


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "record"


class Cache:
    """Object that holds the state of a model, like the caches of language models."""

    def __init__(self, x):
        self.layers, self.owner = [{"keys": x}], self


KINDS = {  # of input -> its makers, from a picture, and how a model reads it
    "tensor": (lambda x: x, lambda value: value),
    "nested": (lambda x: {"a": [None, (x,)]}, lambda value: value["a"][1][0]),
    "dataclass": (Record, lambda value: value.x),
    "user dict": (lambda x: UserDict(x=x), lambda value: value["x"]),
    "object": (Cache, lambda value: value.owner.layers[0]["keys"]),
    "packed": (lambda x: pack_sequence([x[:2], x[2:]]), lambda value: value.data),
}
RUNS = [check, count_bitops, summary, uncounted_functions]


def picture():
    """Return a generator and an image that it generated, with autograd history."""
    generator = nn.Linear(4, 4)
    return generator, generator(torch.randn(3, 4)).tanh()


def discriminator(read):
    def forward(m, value):
        x = read(value)
        return m.layer(x.mul_(2) if m.writes else x)

    return quantize_(FunctionModule(forward, layer=nn.Linear(4, 2), writes=False))


@pytest.mark.parametrize("function", RUNS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_preserves_graph_of_inputs(kind, function):
    make, read = KINDS[kind]
    generator, x = picture()
    value, model = make(x), discriminator(read)
    function(model, (value,))  # it would free the graph of the generator
    read(value).sum().backward()
    gradient = generator.weight.grad.clone()
    assert gradient.abs().sum() > 0
    function(model, (value,))  # the graph is freed now
    assert torch.equal(generator.weight.grad, gradient)


@pytest.mark.parametrize("function", RUNS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_dry_run_copies_mutated_inputs(kind, function):
    make, read = KINDS[kind]
    value = make(torch.randn(3, 4))
    before, model = read(value).clone(), discriminator(read)
    model.writes = True
    function(model, (value,))
    assert torch.equal(read(value), before)


@pytest.mark.parametrize("function", RUNS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dry_run_accepts_hidden_state_inputs(kind, function):
    model = quantize_(FunctionModule(lambda m, x, h: m.rnn(x, h), rnn=kind(4, 4)))
    x = torch.randn(5, 2, 4)
    with precision(model, 8):
        y, hidden = model(x, None)
        function(model, (x, hidden))
        y.sum().backward()  # the graph of the loop's step was not freed
        function(model, (x, hidden))  # and is now
    found = check(model, (x, hidden))
    assert (found.ok, found.float32) == (True, [])


def test_check_counts_gradient_of_generated_input():
    _, x = picture()
    model = quantize_(nn.Sequential(nn.Linear(4, 2)))
    for value, gradients in (
        (x, 2),
        (x.detach(), 1),
    ):  # dx = dy w only where someone waits for it
        assert (
            sum(e.macs for e in check(model, (value,)).operations if e.backward)
            == gradients * 24
        )
        assert len(count_bitops(model, (value,)).bitops["0"]) == 1 + gradients


def test_check_counts_input_parameter_as_weight():
    model = quantize_(
        FunctionModule(
            lambda m, x, w: m.layer(x) @ w,
            layer=nn.Linear(4, 4),
            w=nn.Parameter(torch.randn(4, 4)),
        )
    )
    assert [
        e.layer
        for e in check(model, (torch.randn(3, 4), model.w)).operations
        if not e.backward
    ] == ["layer", ""]
    assert check(model, (torch.randn(3, 4), model.w)).unused == ()
