"""What must be the same on a GPU and on the CPU: quantisers bit for bit, layers and losses but for the last digits."""

from __future__ import annotations

import copy
import subprocess
import tempfile
from collections.abc import Callable
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


def versions(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    found: dict[str, Any] = {
        "tf32": [torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32]
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "total_gb": total / 2**30,
            "free_gb": free / 2**30,
            "capability": torch.cuda.get_device_capability(),
        }
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,compute_mode,mig.mode.current",
            "--format=csv,noheader",
        ]
        found["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.strip()
    return found | {"kernels": str(backend())}


def quantisers(device: str) -> dict[str, Any]:
    """Numbers that differ, by granularity and bits; a mean over samples may differ in its last digit."""
    x = torch.randn(64, 32, 16, 16, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {}
    for name in RANGE_FUNCTIONS:
        for q in BITS:
            here, there = (
                quantize(x, q, Quantizer(name)),
                quantize(x.to(device), q, Quantizer(name)).cpu(),
            )
            found[f"{name} q={q}"] = int((here != there).sum())
        key, levels = torch.tensor(7), torch.tensor(255.0)
        here = fake_quantize(x, levels, name, key)[0]
        there = fake_quantize(
            *(t.to(device) for t in (x, levels)), name, key.to(device)
        )[0].cpu()
        found[f"{name}, stochastic"] = int((here != there).sum())
    wrong = [name for name, count in found.items() if count and "mean" not in name]
    return found | ({"failed": f"not bit for bit: {', '.join(wrong)}"} if wrong else {})


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


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-9))


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
    """Largest difference of output and gradients, relative to the largest number, at 8 bits, rounded to nearest.

    On codes, with shared steps, so that all products that can be are computed on them on both devices.

    A number near the middle between two levels may fall to the other side when a sum is added up in another order:
    one level is 1/255 of a range.
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
    for where in ("cpu", device):
        there = copy.deepcopy(model).to(where)
        given = x.to(where).detach().requires_grad_()
        with precision(there, 8):
            y = there(given)
            y.square().sum().backward()
        results.append(
            [y, given.grad, *(p.grad for p in there.parameters() if p.grad is not None)]
        )
    far = [
        _apart(a.detach().cpu(), b.detach().cpu())
        for a, b in zip(*results, strict=True)
    ]
    found: dict[str, Any] = {"output": far[0], "gradients": max(far[1:])}
    return found | (
        {"failed": f"{max(far):.2g} of the largest number apart"}
        if max(far) > 0.02
        else {}
    )


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
    """Train, stop and resume: the losses of the resumed run must be those of the whole one, as near as two runs are.

    And the first loss that of the CPU, at 16 bits: at few bits a last digit that differs may move a loss by a third.
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
        whole, again = (train(kind, spec, device=device) for _ in range(2))
        near = abs(_first_loss(base, device) - _first_loss(base, "cpu"))
        with tempfile.TemporaryDirectory() as folder:
            file, asked = Path(folder) / "run.pt", iter(range(STEPS))
            try:
                train(
                    kind,
                    spec,
                    device=device,
                    checkpoint=file,
                    should_stop=lambda: next(asked) == STOP,
                )
            except Stopped:
                pass
            resumed = train(kind, spec, device=device, checkpoint=file)

    def apart(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    losses = whole.history["loss"]
    repeat, far = (
        apart(losses, again.history["loss"]),
        apart(losses, resumed.history["loss"]),
    )
    found: dict[str, Any] = {
        "first_to_cpu": near,
        "repeat": repeat,
        "resumed": far,
        "captured": whole.captured,
        "why_not_captured": whole.uncaptured_reason,
    }
    wrong = [
        f"the first loss is {near:.2g} from the CPU's" if near > 1e-3 else "",
        f"the resumed run is {far:.2g} from the whole one"
        if far > 1e-5 + 3 * repeat
        else "",
    ]
    return found | ({"failed": "; ".join(filter(None, wrong))} if any(wrong) else {})


def _first_loss(base: Recipe, device: str) -> float:
    """Return the loss of a first batch at 16 bits, without what every device draws for itself: dropout, neighbours."""
    off = {
        name: value
        for name, value in {"dropout": 0.0, "fanout": 10_000}.items()
        if hasattr(base, name)
    }
    still = replace(base, **off)
    spec = run_spec(still, "static 16", q_max=16, seed=0, scale="smoke")
    session = Session(load_task_class(spec), spec, device)
    return float(session.step(next(session.task.batches(0)), 0.0))
