"""The default price of a model, against an independent watcher that inspects operand values."""

import pytest
import torch
from helpers import FunctionModule, Standardised
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import cpt_core as cpt
from bench.zoo import BITS, on_grid

pytestmark = pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")


class Video(nn.Conv3d):
    """Subclass without a forward method, as in the video models of torchvision."""


def linear():
    return nn.Sequential(
        nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 12)
    )


def attend(_, x):
    return (x @ x.mT).softmax(-1) @ x


def rows():
    return torch.randn(24, 40)


def images():
    return torch.randn(4, 3, 8, 8)


# name -> (model, input, what stays in float32 by its user's wish)
MODELS = {
    "all quantised": (linear, rows, ()),
    "left out by the user": (linear, rows, ("0", "4")),
    "convolutions like NFNet's": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.ReLU(),
            Standardised(8, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3),
        ),
        images,
        (),
    ),
    "convolutions like r3d's": (
        lambda: nn.Sequential(Video(2, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 5, 3)),
        lambda: torch.randn(3, 2, 5, 6, 6),
        (),
    ),
    "layers like GPT-2's": (
        lambda: nn.Sequential(Conv1D(60, 40), nn.ReLU(), nn.Linear(60, 20)),
        rows,
        (),
    ),
    "a plain function": (
        lambda: nn.Sequential(
            nn.Linear(40, 64),
            nn.Unflatten(1, (8, 8)),
            FunctionModule(attend),
            nn.Flatten(),
            nn.Linear(64, 9),
        ),
        rows,
        (),
    ),
}


class Watcher(TorchDispatchMode):
    """Dispatch mode that prices every matmul by the values of its operands: few grid values, or float32."""

    def __init__(self):
        super().__init__()
        self.bitops = self.at_32_bits = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for macs, *operands in self.products(str(func), args, out):
            bits = [BITS if on_grid(x) is True else 32 for x in operands]
            self.bitops += macs * bits[0] * bits[1] / 32**2
            self.at_32_bits += macs
        return out

    @staticmethod
    def products(name, args, out):
        if name.startswith(("aten.mm.", "aten.bmm.", "aten.addmm.")):
            a, b = args[-2:]
            return [(a.numel() * b.shape[-1], a, b)]
        if name.startswith("aten.convolution."):
            return [(out[:, :1].numel() * args[1].numel(), *args[:2])]
        if name.startswith("aten.convolution_backward."):
            gradient, x, weight, asked = *args[:3], args[-1]
            macs = gradient[:, :1].numel() * weight.numel()
            return [
                (macs, gradient, other)
                for other, wanted in zip((weight, x), asked, strict=False)
                if wanted
            ]
        return []


@pytest.mark.parametrize("name", MODELS)
def test_ledger_total_matches_value_based_watcher(name):
    make, given, left_out = MODELS[name]
    torch.manual_seed(0)
    model, x, schedule = make(), given(), cpt.StaticSchedule(BITS, 1)
    cpt.quantize_(model, cpt.QuantConfig(float32=left_out))
    cpt.PrecisionScheduler(model, schedule)
    with Watcher() as seen:
        model(x).square().sum().backward()
    with cpt.BitOpsLedger(model) as ledger:
        model(x).square().sum().backward()

    plan = cpt.count_bitops(model, (x,), schedule)
    assert plan.total == ledger.total() == seen.bitops
    assert plan.relative_to_float32 == seen.bitops / seen.at_32_bits
    assert plan.at_32_bits == cpt.count_bitops(model, (x,)).total == seen.at_32_bits
    assert plan.float32 == ledger.float32
    assert plan.by_convention == {
        c: cpt.count_bitops(model, (x,), schedule, convention=c).total
        for c in ("per_op", "paper")
    }
    said = f"{sum(plan.float32.values()):.1%} of the forward MACs of matmuls and convolutions run in float32: "
    assert (
        "all matmuls and convolutions run quantised" if not left_out else said
    ) in str(plan)
    assert (
        bool(plan.float32)
        == bool(left_out)
        == (plan.by_convention["paper"] < plan.total / 5)
    )
