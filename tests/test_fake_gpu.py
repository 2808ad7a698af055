"""Simulated GPU: its launches and waits match a real one, and quantised layers stay within launch budgets."""

import pytest
import torch
from fake_gpu import CUDA, MixedDevices, Phantom, PhantomTensor
from torch import nn

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision

TWO_ZEROS = torch.zeros(2, dtype=torch.int64)
# name -> what is done with x = [1, 2, 3] on the GPU, operations started, times that the host waits
CALLS = {
    "sum": (lambda x: x * 2 + x.sum(), 3, 0),
    "views": (lambda x: x.view(3, 1).t()[0][1:], 0, 0),
    "item": (lambda x: x[0].item(), 0, 1),
    "float": (lambda x: float(x.sum()), 1, 1),
    "if": (lambda x: 1 if x[0] else 2, 0, 1),
    "tolist": (lambda x: x.tolist(), 0, 1),
    "cpu": (lambda x: x.cpu(), 0, 1),
    "nonzero": (lambda x: x.nonzero(), 1, 1),
    "mask": (lambda x: x[x > 1], 2, 1),
    "rows": (lambda x: x[torch.zeros(2, dtype=torch.int64, device=CUDA)], 2, 0),
    "rows of the CPU": (lambda x: x[TWO_ZEROS], 1, 1),
    "repeat": (lambda x: x.repeat_interleave(x.long()), 3, 1),
    "repeat to size": (lambda x: x.repeat_interleave(x.long(), output_size=6), 3, 0),
    "list to device": (lambda x: torch.tensor([1.0, 2.0], device=CUDA), 1, 1),
    "copy": (lambda x: TWO_ZEROS.to(CUDA), 1, 1),
    "copy without waiting": (lambda x: TWO_ZEROS.to(CUDA, non_blocking=True), 1, 1),
    "pinned copy": (lambda x: TWO_ZEROS.pin_memory().to(CUDA), 1, 1),
    "pinned copy without waiting": (
        lambda x: TWO_ZEROS.pin_memory().to(CUDA, non_blocking=True),
        1,
        0,
    ),
    "0-d of the CPU": (lambda x: x + torch.tensor(1.0), 1, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_fake_gpu_counts_launches_and_waits(name):
    call, launches, waits = CALLS[name]
    with Phantom() as gpu:
        x = torch.tensor([1.0, 2.0, 3.0]).to(CUDA)
        gpu.clear()
        call(x)
    counts = gpu.launches.total(), gpu.waits.total()
    assert counts == (launches, waits), (gpu.launches, gpu.waits)


def test_fake_gpu_rejects_mixed_devices():
    """Raise on mixed devices, and compute the numbers of the CPU otherwise."""
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = layer(x).sum()
    (gradient,) = torch.autograd.grad(expected, layer.weight)
    with Phantom():
        with pytest.raises(MixedDevices, match="found cuda:0 and cpu"):
            x.to(CUDA) + x
        layer.to(CUDA)
        with pytest.raises(MixedDevices):
            layer(x)
        y = layer(x.to(CUDA)).sum()
        y.backward()
        assert (y.device, y.is_cuda, layer.weight.grad.device) == (CUDA, True, CUDA)
        assert float(y.detach()) == float(expected.detach())
        assert torch.equal(layer.weight.grad.cpu(), gradient)
    assert torch.ones(1).to("cpu").is_cpu
    assert not isinstance(torch.ones(1), PhantomTensor)


# What a quantised layer starts forward (a sum for the loss is in it) and backward. Every quantised operator counts as
# one, and the host never waits. A change that needs fewer lowers them for good.
BUDGETS = [
    (lambda: nn.Conv2d(4, 4, 3, bias=False), (2, 4, 6, 6), "fp", 5, 4),
    (lambda: nn.Conv2d(4, 4, 3), (2, 4, 6, 6), "fp", 6, 4),
    (lambda: nn.Linear(8, 8), (4, 8), "fp", 6, 6),
    (lambda: nn.Linear(8, 8), (4, 5, 8), "fp", 6, 6),
    (lambda: nn.LSTM(8, 8), (35, 2, 8), "fp", 449, 309),
    (lambda: GraphConv(8, 8), (50, 8), "fp", 14, 11),
    (lambda: GraphConv(8, 4), (50, 8), "fp", 14, 11),
    (lambda: GraphConv(8, 8), (50, 8), "quantized", 15, 13),
    (lambda: SAGEConv(8, 8), (50, 8), "fp", 14, 15),
]


@pytest.mark.parametrize(
    ("make", "shape", "aggregation", "forward_launches", "backward_launches"), BUDGETS
)
def test_layer_launches_stay_within_budget(
    make, shape, aggregation, forward_launches, backward_launches
):
    generator = torch.Generator().manual_seed(0)
    sources, destinations = torch.randint(0, 50, (2, 400), generator=generator)
    config = QuantConfig(aggregation=aggregation)
    with Phantom() as gpu:
        model = quantize_(nn.ModuleList([make()]), config).to(CUDA)
        inputs = [torch.randn(shape).to(CUDA).requires_grad_()]
        if isinstance(model[0], (GraphConv, SAGEConv)):
            inputs.insert(0, Graph.from_edges(sources, destinations, 50).to(CUDA))
        with precision(model, bits=6, q_grad=8):
            for _ in range(2):  # the first call makes what is cached
                model.zero_grad()
                inputs[-1].grad = None
                gpu.clear()
                y = model[0](*inputs)
                loss = (y[0] if isinstance(y, tuple) else y).sum()
                forward = gpu.launches.total()
                loss.backward()
    assert forward == forward_launches, gpu.launches
    assert gpu.launches.total() - forward == backward_launches, gpu.launches
    assert not gpu.waits
