"""Simulated GPU: its launches and waits match a real one, and quantised layers stay within launch budgets."""

import pytest
import torch
from fake_gpu import CUDA, MixedDevices, Phantom, PhantomTensor
from torch import nn

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision

# what is done with x = [1, 2, 3] on the GPU -> operations started, times that the host waits
DONE = {
    "sum": (lambda x: x * 2 + x.sum(), 3, 0),
    "views": (lambda x: x.view(3, 1).t()[0][1:], 0, 0),
    "item": (lambda x: x[0].item(), 0, 1),
    "float": (lambda x: float(x.sum()), 1, 1),
    "if": (lambda x: 1 if x[0] else 2, 0, 1),
    "tolist": (lambda x: x.tolist(), 0, 1),
    "cpu": (lambda x: x.cpu(), 0, 1),
    "nonzero": (lambda x: x.nonzero(), 1, 1),
    "mask": (lambda x: x[x > 1], 2, 1),
    "numbers of rows": (
        lambda x: x[torch.zeros(2, dtype=torch.int64, device=CUDA)],
        2,
        0,
    ),
    "rows on the CPU": (lambda x: x[torch.zeros(2, dtype=torch.int64)], 1, 1),
    "repeated": (lambda x: x.repeat_interleave(x.long()), 3, 1),
    "repeated, size known": (
        lambda x: x.repeat_interleave(x.long(), output_size=6),
        3,
        0,
    ),
    "list to device": (lambda x: torch.tensor([1.0, 2.0], device=CUDA), 1, 1),
    "copy": (lambda x: torch.ones(3).to(CUDA), 1, 1),
    "copy of what is not pinned": (
        lambda x: torch.ones(3).to(CUDA, non_blocking=True),
        1,
        1,
    ),
    "pinned copy": (lambda x: torch.ones(3).pin_memory().to(CUDA), 1, 1),
    "pinned copy that nobody waits for": (
        lambda x: torch.ones(3).pin_memory().to(CUDA, non_blocking=True),
        1,
        0,
    ),
    "0-d of the CPU": (lambda x: x + torch.tensor(1.0), 1, 0),
}


@pytest.mark.parametrize("what", DONE)
def test_fake_gpu_counts_launches_and_waits(what):
    do, launches, waits = DONE[what]
    with Phantom() as gpu:
        x = torch.tensor([1.0, 2.0, 3.0]).to(CUDA)
        gpu.clear()
        do(x)
    assert (gpu.launches.total(), gpu.waits.total()) == (launches, waits), (
        gpu.launches,
        gpu.waits,
    )


def test_fake_gpu_rejects_mixed_devices():
    """Raise on mixed devices, and compute the numbers of the CPU otherwise."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    wanted = layer(x).sum()
    wanted.backward()
    gradient = layer.weight.grad.clone()
    layer.zero_grad()
    with Phantom():
        with pytest.raises(MixedDevices, match="found cuda:0 and cpu"):
            x.to(CUDA) + x
        layer.to(CUDA)
        with pytest.raises(MixedDevices):
            layer(x)
        y = layer(x.to(CUDA)).sum()
        y.backward()
        assert (y.device, y.is_cuda, layer.weight.grad.device) == (CUDA, True, CUDA)
        assert float(y.detach()) == float(wanted.detach())
        assert torch.equal(layer.weight.grad.cpu(), gradient)
    assert torch.ones(1).to("cpu").is_cpu
    assert not isinstance(torch.ones(1), PhantomTensor)


def graph():
    edges = torch.randint(0, 50, (2, 400), generator=torch.Generator().manual_seed(0))
    return Graph.from_edges(edges[0], edges[1], 50).to(CUDA)


# What a quantised layer starts forward (a sum for the loss is in it) and backward, and how often the host waits. Every
# quantised operator counts as one. A change that needs fewer lowers them for good.
BUDGET = {
    "conv": (lambda: nn.Conv2d(4, 4, 3, bias=False), (2, 4, 6, 6), {}, (5, 4, 0)),
    "conv with bias": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 6, 6), {}, (6, 4, 0)),
    "linear": (lambda: nn.Linear(8, 8), (4, 8), {}, (6, 6, 0)),
    "linear on sequences": (lambda: nn.Linear(8, 8), (4, 5, 8), {}, (6, 6, 0)),
    "LSTM of 35 steps": (lambda: nn.LSTM(8, 8), (35, 2, 8), {}, (449, 309, 0)),
    "GraphConv": (lambda: GraphConv(8, 8), (50, 8), {}, (14, 11, 0)),
    "GraphConv that narrows": (lambda: GraphConv(8, 4), (50, 8), {}, (14, 11, 0)),
    "GraphConv, Q-Agg": (
        lambda: GraphConv(8, 8),
        (50, 8),
        {"aggregation": "quantized"},
        (15, 13, 0),
    ),
    "SAGEConv": (lambda: SAGEConv(8, 8), (50, 8), {}, (14, 15, 0)),
}


@pytest.mark.parametrize("name", BUDGET)
def test_layer_launches_stay_within_budget(name):
    make, shape, config, budget = BUDGET[name]
    with Phantom() as gpu:
        model = quantize_(nn.ModuleList([make()]), QuantConfig(**config)).to(CUDA)
        x = torch.randn(shape).to(CUDA).requires_grad_()
        given = (graph(), x) if isinstance(model[0], (GraphConv, SAGEConv)) else (x,)
        with precision(model, bits=6, q_grad=8):
            for _ in range(2):  # the first call makes what is kept
                model.zero_grad()
                x.grad = None
                gpu.clear()
                y = model[0](*given)
                loss = (y[0] if isinstance(y, tuple) else y).sum()
                forward = gpu.launches.total()
                loss.backward()
                backward = gpu.launches.total() - forward
    assert (forward, backward, gpu.waits.total()) == budget, (gpu.launches, gpu.waits)
