"""Activation checkpointing runs forward passes a second time: nothing may notice."""

import pytest
import torch
from helpers import pictures, small
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import precision


class Language(nn.Module):
    """An LSTM of two directions and attention, for what ``small`` takes."""

    def __init__(self):
        super().__init__()
        self.lstm, self.attention = nn.LSTM(6, 4, bidirectional=True), nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.lstm(x.flatten(0, 1))[0]
        return self.head(self.attention(y, y, y)[0])


def nested(model, x, **how):
    return checkpoint(lambda x: checkpoint(model, x, **how).mul(1), x, **how)


WAYS = {
    "whole": checkpoint,
    "nested": nested,
    "segments": lambda model, x, **how: checkpoint_sequential(model, 3, x, **how),
}


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    ("make", "way"),
    [(small, "whole"), (small, "nested"), (small, "segments"), (Language, "whole"), (Language, "nested")],
)
def test_recomputation_changes_nothing(make, way, use_reentrant):
    found = []
    for call in (lambda model, x, **_: model(x), WAYS[way]):
        torch.manual_seed(0)
        model, seen = quantize_(make()), []
        layers = layer_precisions(model)
        first = model.get_submodule(next(iter(layers)))
        first.register_forward_pre_hook(lambda m, _, seen=seen: seen.append(m.precision.bits))
        results = []
        with precision(model, 3, q_grad=4):
            for seed in range(3):  # the noise of later steps depends on how much was drawn before
                model.zero_grad()
                x = pictures(seed).requires_grad_()
                y = call(model, x, use_reentrant=use_reentrant)
                y.square().sum().backward()
                results += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        results += [getattr(layer, n) for layer in layers.values() for n in layer.get_running()]
        found.append((results, seen))
    (plain, once), (again, twice) = found
    assert once == [3] * 3
    assert len(twice) >= 6
    assert set(twice) == {3}
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
