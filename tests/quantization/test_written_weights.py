"""A product uses the weight that is there: whoever wrote it, in whatever way, and whenever."""

import itertools

import pytest
import torch
from torch import nn

from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision

NEAREST = QuantConfig().with_gradient_rounding("nearest")


class Net(nn.Module):
    """A convolution, a linear layer that is used three times, with a call of ``between`` after each, and an LSTM."""

    def __init__(self, recurrent):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.shared = nn.Conv1d(2, 6, 3), nn.Linear(6, 6)
        self.last = nn.LSTM(6, 6) if recurrent else nn.Linear(6, 6)
        self.between = lambda: None

    def forward(self, x):
        x = self.conv(x).transpose(1, 2)
        for _ in range(3):
            x = self.shared(x).tanh()
            self.between()
        x = self.last(x)
        return x[0] if isinstance(x, tuple) else x


def x():
    return torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))


def each(write):
    """Return what writes every parameter of a model, one by one."""
    return lambda model: [write(parameter) for parameter in model.parameters()]


def replaced(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(-2 * p.detach()))


def stepped(model):
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = 3 * p.detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad


WAYS = {
    "no_grad": torch.no_grad()(each(lambda p: p.mul_(-2))),
    "inference_mode": torch.inference_mode()(each(lambda p: p.mul_(-2))),
    ".data in place": each(lambda p: p.data.mul_(-2)),
    ".data assigned": each(lambda p: setattr(p, "data", p.data * -2)),
    "a view of detach()": each(lambda p: p.detach().view(-1).mul_(-2)),
    "numpy": each(lambda p: p.detach().numpy().__imul__(-2)),
    "a new Parameter": replaced,
    "an optimizer": stepped,
}


def anew(model):
    """Return a model converted anew, with the weights of another, in the same mode."""
    twin = quantize_(Net(isinstance(model.last, nn.LSTM)), NEAREST)
    twin.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return twin.train(model.training)


def results(model, run):
    """Return the output, and the gradients where there are any."""
    model.zero_grad()
    y = run(x())
    if y.requires_grad:
        y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(model, run):
    fresh = anew(model)
    with precision(fresh, 3):
        for found, wanted in zip(results(model, run), results(fresh, fresh), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "way"),
    [*itertools.product(["train", "eval", "no_grad"], WAYS), ("compile", ".data in place")],
)
def test_a_weight_is_rounded_as_it_is(when, way):
    model = quantize_(Net(recurrent=when != "compile"), NEAREST).train(when not in ("eval", "no_grad"))
    run = torch.compile(model, backend="eager") if when == "compile" else model
    with precision(model, 3), torch.set_grad_enabled(when != "no_grad"):
        before = results(model, run)[0]
        WAYS[way](model)
        compare(model, run)
        assert not torch.equal(run(x()).detach(), before)
    if when == "compile":
        torch._dynamo.reset()


@pytest.mark.parametrize("way", [".data in place", "numpy"])
def test_a_weight_that_is_written_inside_a_forward_pass_counts_from_then_on(way):
    model, plain = quantize_(Net(recurrent=False), NEAREST), Net(recurrent=False)
    for m in (model, plain):
        m.between = lambda m=m: WAYS[way](m.shared)
    with precision(model, 16), torch.no_grad():  # fine enough to be the float32 model's
        torch.testing.assert_close(model(x()), plain(x()), rtol=0, atol=1e-3)
    assert not torch.allclose(plain(x()), Net(recurrent=False)(x()), atol=0.1)
