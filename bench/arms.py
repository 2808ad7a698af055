"""What a sweep gains at most if its runs train as one batched model: ``python -m bench.arms [RECIPE ...]``.

Runs of one seed differ in their bits alone, so that R of them could be one model whose operands have a leading
dimension. That saves launches and Python, not arithmetic. Here the forward and backward pass of a step are recorded as
torch's operations, and timed three ways, medians of CPU time on one thread, the first two interleaved:

- ``step``: as training does it, with optimizer and schedule;
- ``bare``: the same operations called by Python one after the other, with no module, autograd or schedule around them.
  So a run keeps its numbers. (Called from C++, those of a small network take less.)
- ``R=11``, per run: every operation at once for R runs where torch has it (products as ``bmm``, convolutions in
  groups, ranges per run, all that goes element by element), the others R times. Their sums have another order. These
  are sums of times of single operations, which is a bit too good: ``R=1`` says by how much.

A ratio is ``step`` over the column. Writes ``data/results/arms.json``.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from cpt_core.checks import write_text
from cpt_lab.experiments.recipes import EXPERIMENTS
from cpt_lab.experiments.spec import run_spec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.tasks.base import task_of
from cpt_lab.training.session import Session

ARMS, REPEATS = (1, 2, 11, 26), 15
RECIPES = {
    f"{r.dataset}/{r.model}": r
    for experiment in EXPERIMENTS.values()
    for data in experiment.datasets
    for r in data.recipes.get("demo", ())
}
EMBEDDED = ("digits/mlp6", "digits/resnet8_w8", "digits-graph/gcn", "pydoc/lstm", "templates/bert_small")
VIEWS = "alias view t transpose detach expand select slice unbind permute unsqueeze squeeze reshape _unsafe_view split"
ELEMENTWISE = (
    "relu threshold_backward mul add sub div gelu gelu_backward tanh tanh_backward sigmoid pow clamp_min _softmax "
    "_softmax_backward_data _log_softmax _log_softmax_backward_data where masked_fill"
)
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def recorded(session: Session) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the operations of a step's forward and backward pass, and the tensors of a batch that they start from."""
    for _ in range(2):
        session.step(next(session.task.batches(0)), 0.01)
    batch, parameters = next(session.task.batches(0)), [p for p in session.model.parameters() if p.requires_grad]
    inputs: list[Tensor] = []
    tree_map_only(Tensor, inputs.append, batch)

    def work(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        loss, _ = session.task.loss(session.model, tree_map_only(Tensor, lambda _: next(rest), batch), session.carry)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return make_fx(work)(*inputs), inputs


def calls_of(graph: fx.GraphModule, inputs: Iterable[Tensor]) -> list[Call]:
    """Run the operations once; return each with its operands."""
    values: dict[fx.Node, Any] = {}
    calls: list[Call] = []
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(graph)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            if node.target is not operator.getitem:
                calls.append((getattr(node.target, "_op", node.target), args, dict(kwargs)))
                calls[-1][2]["of"] = str(node.target).split(".")[1]
    return calls


def together(call: Call, runs: int) -> tuple[Callable[[], Any], int]:
    """Return an operation of so many runs at once, or that of one and how often it is to be called."""
    function, args, kwargs = call
    kwargs = {name: value for name, value in kwargs.items() if name != "of"}
    of = call[2]["of"]

    def stacked(x: Tensor) -> Tensor:
        return torch.stack([x] * runs)

    def wide(x: Tensor) -> Tensor:  # (N, C, ...) -> (N, R C, ...)
        return torch.cat([x] * runs, 1)

    def tall(x: Tensor) -> Tensor:  # (C, ...) -> (R C, ...)
        return torch.cat([x] * runs)

    if of in VIEWS.split():
        return lambda: function(*args, **kwargs), 1
    if of == "mm":
        a, b = map(stacked, args)
        return lambda: torch.bmm(a, b), 1
    if of == "addmm":
        bias, a, b = stacked(args[0]).unsqueeze(1), stacked(args[1]), stacked(args[2])
        return lambda: torch.baddbmm(bias, a, b), 1
    if of == "bmm":
        a, b = map(tall, args)
        return lambda: torch.bmm(a, b), 1
    if of == "convolution":
        x, w, b, *rest, groups = args
        more = wide(x), tall(w), None if b is None else tall(b), *rest, groups * runs
        return lambda: function(*more), 1
    if of == "convolution_backward":
        dy, x, w, sizes, *rest, groups, mask = args
        more = wide(dy), wide(x), tall(w), sizes and [sizes[0] * runs], *rest, groups * runs, mask
        return lambda: function(*more), 1
    if of in ("native_batch_norm", "native_batch_norm_backward"):
        more = tuple((wide if x.dim() > 1 else tall)(x) if isinstance(x, Tensor) else x for x in args)
        return lambda: function(*more), 1
    if of == "fake_quantize":
        x, levels, grid, key = args
        own = tall(x) if grid == "per_channel" else stacked(x)
        grid = {"per_tensor": "per_channel"}.get(grid, grid)
        return lambda: function(own, levels, grid, key), 1
    if of in ELEMENTWISE.split():
        most = max(x.dim() for x in args if isinstance(x, Tensor))
        many = [stacked(x.reshape((1,) * (most - x.dim()) + x.shape)) if isinstance(x, Tensor) else x for x in args]
        if "softmax" in of:  # the number after its tensors is the dimension
            place = next(i for i, x in enumerate(many) if isinstance(x, int))
            many[place] += many[place] >= 0
        return lambda: function(*many, **kwargs), 1
    return lambda: function(*args, **kwargs), runs


def seconds(*timed: Callable[[], Any], repeats: int = REPEATS) -> list[float]:
    """Return the median time of each, interleaved."""
    taken: list[list[float]] = [[] for _ in timed]
    for _ in range(repeats + 2):
        for run, of in zip(timed, taken, strict=True):
            start = time.process_time()
            run()
            of.append(time.process_time() - start)
    return [statistics.median(of[2:]) for of in taken]


def measured(name: str) -> list[float]:
    """Return seconds of a step, of its bare operations, and of those of R runs, per run."""
    spec = run_spec(RECIPES[name], "CR", q_max=8, seed=0, scale="demo")
    session = Session(task_of(spec), spec)
    graph, inputs = recorded(session)
    batches = session.task.batches(0)

    def step() -> None:
        session.step(next(batches), 0.01)
        session.scheduler.step()

    calls = calls_of(graph, inputs)
    bare = [(function, args, {k: v for k, v in kwargs.items() if k != "of"}) for function, args, kwargs in calls]

    def operations() -> None:
        with torch.inference_mode():
            for function, args, kwargs in bare:
                function(*args, **kwargs)

    whole = seconds(step, operations)
    many = []
    with torch.inference_mode():
        for runs in ARMS:
            parts = [together(call, runs) for call in calls]
            many.append(sum(seconds(run, repeats=5)[0] * count for run, count in parts) / runs)
    return [*whole, *many]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    columns, found = ["bare", *(f"R={r}" for r in ARMS)], {}
    for name in names or EMBEDDED:
        step, *rest = measured(name)
        ratios = {column: round(step / x, 2) for column, x in zip(columns, rest, strict=True)}
        found[name] = {"step_ms": round(1e3 * step, 2), **ratios}
        print(name, found[name], flush=True)
    where = {**source(), "machine": machine(), "versions": versions()}
    kept = {"command": "python -m bench.arms", "recipes": found, "provenance": where}
    write_text(results_dir() / "arms.json", json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
