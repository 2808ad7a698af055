"""A weight is quantised once per optimizer step, however often its layer is used, and never after it has changed."""

import copy
import pickle

import pytest
import torch
from helpers import make
from torch import nn

import cpt_core as cpt
from cpt_core.kernels import operators
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.reuse import Reuse
from cpt_core.quantization.scheduler import PrecisionScheduler, precision


class Shared(nn.Module):
    """One layer, used three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return x


@pytest.fixture
def model():
    return quantize_(Shared())


@pytest.fixture
def count(monkeypatch):
    """How often weights of six rows were rounded on a range per row."""
    calls, real = [], operators.fake_quantize

    def counted(x, levels, granularity, key=None):
        calls.append(granularity)
        return real(x, levels, granularity, key)

    monkeypatch.setattr("cpt_core.quantization.precision.fake_quantize", counted)
    return lambda: calls.count("per_row")


def x():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def test_shared_layers_and_accumulated_gradients(model, count):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = PrecisionScheduler(model, make())
    for step in range(1, 4):
        for _ in range(3):
            model(x()).square().sum().backward()
        assert count() == step
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def test_results_are_those_of_quantising_every_time(model):
    again = copy.deepcopy(model)
    again.layer.precision.reuse.__class__ = type("Never", (Reuse,), {"__call__": lambda self, w, bits, f: f()})
    found = []
    for m in (model, again):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        with precision(m, 4):
            for _ in range(5):
                m(x()).square().sum().backward()
                m(x() + 1).square().sum().backward()
                optimizer.step()
        found.append([p.detach() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def changed(model):
    with torch.no_grad():
        model.layer.weight.mul_(2)


def changed_through_data(model):
    model.layer.weight.data.mul_(2)
    model.eval()
    model.train()


def replaced(model):
    model.layer.weight.data = model.layer.weight.data * 2


def stepped(model):
    model.layer.weight.grad = -model.layer.weight.detach()
    optimizer = torch.optim.SGD([model.layer.weight], lr=1.0)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.add_(p.grad, alpha=-1)  # as optimizers do that torch knows nothing of
            p.grad = None
    optimizer.step()


@pytest.mark.parametrize("change", [changed, changed_through_data, replaced, stepped])
def test_a_weight_that_has_changed_is_quantised_anew(model, count, change):
    with precision(model, 4):
        model(x())
        before = model.layer.precision.operand("weight", model.layer.weight)
        assert count() == 1
        change(model)
        after = model.layer.precision.operand("weight", model.layer.weight)
    torch.testing.assert_close(after, 2 * before)


def test_other_bits_are_other_weights(model):
    reuse, weight = Reuse(), torch.zeros(1)
    assert [reuse(weight, bits, lambda bits=bits: weight + bits).item() for bits in (8, 8, 4)] == [8, 8, 4]
    outputs = []
    with precision(model, 8):
        outputs.append(model(x()))
        with precision(model, 2):
            outputs.append(model(x()))
        outputs.append(model(x()))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("end", ["step", "precision", "train"])
def test_nothing_is_held_after_the_step(model, end):
    scheduler = PrecisionScheduler(model, make())
    held = model.layer.precision.reuse._held
    with precision(model, 5):
        model(x())
        assert len(held) == 1
        if end == "train":
            model.train()
    if end == "step":
        model(x())
        assert len(held) == 1
        scheduler.step()
    assert not held


def test_evaluation_in_inference_mode_leaves_nothing_behind_for_training(model):
    with precision(model, 4):
        with torch.inference_mode():
            model(x())
        model(x()).sum().backward()
    assert model.layer.weight.grad.isfinite().all()


def test_copies_hold_nothing(model):
    with precision(model, 4):
        model(x())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not twin.layer.precision.reuse._held
            assert twin.layer.precision.reuse is not model.layer.precision.reuse


def test_gradients_of_gradients(model):
    with precision(model, 4, q_grad="float"):
        a, b = (model.layer(x()).square().sum() for _ in range(2))
    first, second = (torch.autograd.grad(y, model.layer.weight, create_graph=True)[0] for y in (a, b))
    assert torch.equal(*(torch.autograd.grad(g.square().sum(), model.layer.weight)[0] for g in (first, second)))


def test_a_check_sees_every_product(model):
    found = cpt.check(model, (x(),))
    assert found.ok
    assert found.quantized_share == 1


def test_a_weight_with_a_running_range_is_tracked():
    config = cpt.QuantConfig(quantizers={**cpt.QUANTIZERS, "linear_weight": cpt.Quantizer("per_tensor", running=True)})
    model = quantize_(Shared(), config)
    with precision(model, 4):
        model(x())
    assert model.layer.precision.running_weight[2] > 0
