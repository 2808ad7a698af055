"""Time and memory of graphs of OGB's sizes, on random ones: ``python -m bench.large_graph products|arxiv``.

The graph has as many nodes, edges, features and classes as OGBN-Products or OGBN-Arxiv and is read through the real
loader from an ``.npz`` archive, which the first call makes (1.5 GB for products). Run it under ``/usr/bin/time -v`` for
the peak memory of the whole process.  Times are of this machine; the float32 step stands beside them.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision
from cpt_lab.experiments.recipes import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.paths import runs_dir
from cpt_lab.tasks.graph import GraphTask

# nodes, undirected edges, features, classes, share of training and validation nodes
SIZES = {
    "products": (2_449_029, 61_859_140, 100, 47, 0.08, 0.016),
    "arxiv": (169_343, 1_166_243, 128, 40, 0.54, 0.18),
}


def make(name: str, path: Path) -> None:
    """Write a random graph as an archive of the documented layout."""
    nodes, edges, features, classes, train, valid = SIZES[name]
    rng = np.random.default_rng(0)
    # squaring makes some nodes popular, as in real graphs
    index = (rng.random((2, edges), dtype=np.float32) ** 2 * nodes).astype(np.int32).clip(0, nodes - 1)
    order = rng.permutation(nodes)
    parts = np.split(order, [int(train * nodes), int((train + valid) * nodes)])
    np.savez(
        path,
        edge_index=index,
        features=rng.standard_normal((nodes, features), dtype=np.float32),
        labels=rng.integers(0, classes, nodes),
        **{f"{n}_idx": part for n, part in zip(("train", "valid", "test"), parts, strict=True)},
    )


def memory() -> float:
    """Peak memory of this process so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Load, train some steps, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("graph", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--evaluate", action="store_true", help="also exact inference on all nodes, in float32")
    args = parser.parse_args()
    path = runs_dir() / f"random-{args.graph}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make(args.graph, path)
    model_name = {"products": "sage", "arxiv": "gcn"}[args.graph]
    r = replace(recipe("paper", str(path), model_name, task="graph"), steps=10_000, inference="exact")
    started = time.monotonic()
    task = GraphTask(run_spec(r, "static 8", q_max=8, seed=0, scale="paper"), torch.device("cpu"))
    print(f"{task.graph}: loaded in {time.monotonic() - started:.0f} s, peak {memory():.1f} GB", flush=True)
    for name in ("float32", "fp", "quantized"):
        torch.manual_seed(0)
        model = quantize_(task.model(), QuantConfig(aggregation=name if name != "float32" else "fp"))
        optimizer, _ = task.optimizer(model)
        batches = task.batches(0)
        with precision(model, "float" if name == "float32" else 8):
            times = []
            for _ in range(args.steps + 1):
                started = time.monotonic()
                loss, _ = task.loss(model, next(batches), None)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                times.append(time.monotonic() - started)
        del batches
        per_step = sum(times[1:]) / args.steps
        print(
            f"{name:<10} {1000 * per_step:8.1f} s per 1,000 steps, first {times[0]:.1f} s, median "
            f"{sorted(times[1:])[args.steps // 2]:.3f} s, peak {memory():.1f} GB",
            flush=True,
        )
    if args.evaluate:
        started = time.monotonic()
        model.eval()
        with precision(model, 8):
            task.evaluate(model)
        print(f"exact inference: {time.monotonic() - started:.0f} s, peak {memory():.1f} GB")


if __name__ == "__main__":
    main()
