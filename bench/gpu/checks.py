"""Comparison of a GPU with the CPU: quantisers bit for bit, layers and losses up to the last digits."""

from __future__ import annotations

import copy
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.rounding import RANGE_FUNCTIONS
from cpt_core.quantization.scheduler import precision
from cpt_extras.formats.quantizer import Quantizer
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels.backend import backend
from cpt_extras.kernels.operators import fake_quantize
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session
from cpt_lab.training.train import Stopped, train

BITS = (2, 8, 16)
STEPS, STOP = 8, 3
MAX_DIFFERENCE = 0.02  # of a layer, relative to the largest number


def versions(device: str) -> dict[str, Any]:
    """Return driver, memory and kernels, on which the numbers depend."""
    details: dict[str, Any] = {
        "tf32": [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        details |= {
            "total_gb": total / 2**30,
            "free_gb": free / 2**30,
            "capability": torch.cuda.get_device_capability(),
        }
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,compute_mode,mig.mode.current",
            "--format=csv,noheader",
        ]
        details["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.strip()
    return details | {"kernels": str(backend())}


def quantisers(device: str) -> dict[str, Any]:
    """Count the numbers that a device rounds differently, by granularity and bits.

    A mean over samples may differ in its last digit.
    """
    x = torch.randn(64, 32, 16, 16, generator=torch.Generator().manual_seed(0))
    differences: dict[str, Any] = {}
    for name in RANGE_FUNCTIONS:
        for q in BITS:
            on_cpu, on_device = (
                quantize(x, q, Quantizer(name)),
                quantize(x.to(device), q, Quantizer(name)).cpu(),
            )
            differences[f"{name} q={q}"] = int((on_cpu != on_device).sum())
        key, steps = torch.tensor(7), torch.tensor(255.0)
        on_cpu = fake_quantize(x, steps, name, key)[0]
        on_device = fake_quantize(
            *(t.to(device) for t in (x, steps)), name, key.to(device)
        )[0].cpu()
        differences[f"{name}, stochastic"] = int((on_cpu != on_device).sum())
    inexact = [
        name for name, count in differences.items() if count and "mean" not in name
    ]
    return differences | (
        {"failed": f"not bit for bit: {', '.join(inexact)}"} if inexact else {}
    )


def _graph() -> Graph:
    source, target = torch.randint(
        0, 200, (2, 2000), generator=torch.Generator().manual_seed(0)
    )
    return Graph.from_edges(source, target, 200)


class _OnGraph(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.graph = layer, _graph()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.graph.to(x.device), x)


class _First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _relative_difference(expected: Tensor, actual: Tensor) -> float:
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(1e-9))


def largest(values: Sequence[float]) -> float:
    """Return the largest number; NaN if one is NaN, which Python's ``max`` may pass over."""
    return float(torch.tensor(values, dtype=torch.float64).max())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)),
        (16, 8, 16, 16),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(64, 64)), (16, 32, 64)),
    "LSTM": (lambda: _First(nn.LSTM(32, 32)), (20, 8, 32)),
    "GraphConv": (lambda: _OnGraph(GraphConv(32, 64)), (200, 32)),
    "SAGEConv": (lambda: _OnGraph(SAGEConv(32, 64)), (200, 32)),
}


def layer(name: str, device: str, on_codes: bool = False) -> dict[str, Any]:
    """Return the largest differences of output and gradients at 8 bits, relative to the largest number.

    Rounding is to nearest. With ``on_codes`` and shared steps, all matmuls that support int8 run in it on both devices.

    A number near the middle between two grid points may round to the other one if a sum is added up in another order:
    one step is 1/255 of a range.
    """
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    config = (
        QuantConfig(execution="integer").with_shared_steps()
        if on_codes
        else QuantConfig()
    )
    model = quantize_(make(), config.with_gradient_rounding("nearest"))
    results = []
    for place in ("cpu", device):
        placed = copy.deepcopy(model).to(place)
        inputs = x.to(place).detach().requires_grad_()
        with precision(placed, 8):
            y = placed(inputs)
            y.square().sum().backward()
        results.append(
            [
                y,
                inputs.grad,
                *(p.grad for p in placed.parameters() if p.grad is not None),
            ]
        )
    differences = [
        _relative_difference(a.detach().cpu(), b.detach().cpu())
        for a, b in zip(*results, strict=True)
    ]
    differences_by_part: dict[str, Any] = {
        "output": differences[0],
        "gradients": largest(differences[1:]),
    }
    if not largest(differences) <= MAX_DIFFERENCE:
        distance = f"{largest(differences):.2g}"
        differences_by_part["failed"] = f"{distance} of the largest number apart"
    return differences_by_part


TASKS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "multilayer perceptron": ("digits", "mlp6", {}),
    "residual network": ("digits", "resnet8_w8", {"crop": 1, "flip": True}),
    "GCN": ("digits-graph", "gcn", {}),
    "GCN, Q-Agg": ("digits-graph", "gcn", {"aggregation": "quantized"}),
    "GraphSAGE": ("digits-graph", "sage", {}),
    "GraphSAGE, exact": ("digits-graph", "sage", {"inference": "exact"}),
    "LSTM": ("pydoc", "lstm", {}),
    "BERT": ("templates", "bert_small", {}),
    "BERT, one length": ("templates", "bert_small", {"padding": "max"}),
    "detection": ("digit-scenes", "retinanet_small", {}),
}


def task(name: str, device: str) -> dict[str, Any]:
    """Train, stop and resume a run; return how far its losses are from an uninterrupted run and from the CPU.

    A resumed run may differ by as much as two runs do. The first loss is compared with the CPU at 16 bits: at few bits
    a difference in the last digit may move a loss by a third.
    """
    dataset, model, changes = TASKS[name]
    base = replace(
        recipe("smoke", dataset, model),
        steps=STEPS,
        n_cycles=1,
        evaluate_every=4,
        **changes,
    )
    spec = run_spec(base, "CR", q_max=8, seed=0, scale="smoke")
    kind = load_task_class(spec)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        uninterrupted, second_run = (train(kind, spec, device=device) for _ in range(2))
        cpu_difference = abs(_first_loss(base, device) - _first_loss(base, "cpu"))
        with tempfile.TemporaryDirectory() as folder:
            file, steps_done = Path(folder) / "run.pt", iter(range(STEPS))
            try:
                train(
                    kind,
                    spec,
                    device=device,
                    checkpoint=file,
                    should_stop=lambda: next(steps_done) == STOP,
                )
            except Stopped:
                pass
            resumed = train(kind, spec, device=device, checkpoint=file)

    def largest_difference(other: Any) -> float:
        pairs = zip(losses, other.history["loss"], strict=True)
        return largest([abs(x - y) for x, y in pairs])

    losses = uninterrupted.history["loss"]
    repeat_difference = largest_difference(second_run)
    resumed_difference = largest_difference(resumed)
    details: dict[str, Any] = {
        "first_to_cpu": cpu_difference,
        "repeat": repeat_difference,
        "resumed": resumed_difference,
        "captured": uninterrupted.captured,
        "why_not_captured": uninterrupted.uncaptured_reason,
    }
    faults = []
    if not cpu_difference <= 1e-3:
        faults.append(f"the first loss is {cpu_difference:.2g} from the CPU's")
    if not resumed_difference <= 1e-5 + 3 * repeat_difference:
        faults.append(f"the resumed run is {resumed_difference:.2g} from the whole one")
    if faults:
        details["failed"] = "; ".join(faults)
    return details


def _first_loss(base: Recipe, device: str) -> float:
    """Return the loss of a first batch at 16 bits, without dropout and neighbour sampling, which differ by device."""
    without_randomness = {
        name: value
        for name, value in {"dropout": 0.0, "fanout": 10_000}.items()
        if hasattr(base, name)
    }
    deterministic = replace(base, **without_randomness)
    spec = run_spec(deterministic, "static 16", q_max=16, seed=0, scale="smoke")
    session = Session(load_task_class(spec), spec, device)
    return float(session.step(next(session.task.batches(0)), 0.0))
