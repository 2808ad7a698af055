"""What several rooms' tests make: schedules of one size, small networks, written-and-read copies, rows."""

import io
import json
import subprocess
import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.graphs.graph import Graph
from cpt_core.numerics import NUMERICS
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.convert import QuantConfig, all_precisions
from cpt_core.quantization.op_interception import COUNTED_FUNCTIONS, HOOK
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule, schedule_from_dict
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import EXPERIMENTS, recipe
from cpt_lab.experiments.schema import SCALES
from cpt_lab.experiments.spec import key_of, run_spec
from cpt_lab.sweeps.forecast import total_bitops
from cpt_lab.sweeps.result_row import ResultRow

WITH_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NAN, INF = float("nan"), float("inf")
NEAREST = QuantConfig().with_gradient_rounding("nearest")
RECIPES = {  # scale -> "dataset/model" -> recipe
    scale: {
        f"{d.name}/{r.model}": r
        for e in EXPERIMENTS.values()
        for d in e.datasets
        for r in d.recipes.get(scale, ())
    }
    for scale in SCALES
}
PROVENANCE = {
    "started": "2026-01-01",
    "commit": "0" * 40,
    "dirty": False,
    "versions": {},
}


def save_and_load(value):
    """Return what torch.load makes of a file that torch.save wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def run_command(*words, **options):
    """Return what a command that ends well writes to stdout."""
    process = subprocess.run(
        [*map(str, words)], capture_output=True, text=True, **options
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def normal(*shape):
    """Return normal numbers, the same for a shape in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# Numbers at which a grid is easily got wrong.
EDGES = {
    "infinity": torch.tensor([[1.0, INF], [2.0, 3.0]]),
    "-infinity": torch.tensor([[1.0, -INF], [2.0, 3.0]]),
    "constant": torch.full((4, 5), 3.3),
    "zeros": torch.zeros(4, 5),
    "tiny": normal(4, 5) * 1e-12,
    "huge": normal(4, 5) * 1e38,
}


def quantize_gradient(y, steps, quantizer, key=None):
    """Return ``y``, whose gradient is rounded as that of an operation."""
    key = key if quantizer.rounding == "stochastic" else None
    return fake_quantize.operators.quantize_gradient(y, steps, quantizer.grid, key)


def identical(actual, expected):
    """Whether tensors agree in shape, type and every bit, NaN with NaN."""
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        for a, b in zip(actual, expected, strict=True)
    )


class OpRecorder(TorchDispatchMode):
    """What runs inside the block: pairs of a name, such as "mm" or "cpt::encode", and the tensors that it was given."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").replace(
            "cpt_reference::", "cpt::"
        )
        self.calls.append((name, [a for a in args if isinstance(a, torch.Tensor)]))
        return func(*args, **(kwargs or {}))

    def count(self, *names, where=lambda *tensors: True):
        return sum(name in names and where(*tensors) for name, tensors in self.calls)


class FunctionModule(nn.Module):
    """A model whose forward pass is a function of it and its inputs, with children and parameters by name."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **options):
        return self.function(self, *inputs, **options)


def reported_operations(model, *inputs):
    """Return the matmuls and convolutions that the mode of a converted model reports of a forward pass."""
    mode, operations = mode_of(model), []
    mode.on_operation = lambda operation, output: operations.append(operation)
    try:
        with patch.dict(
            COUNTED_FUNCTIONS, clear=True
        ):  # what counting adds is not what a handler reports
            model(*inputs)
    finally:
        mode.on_operation = None
    return [operation for operation in operations if not operation.part]


def mode_of(model):
    """Return the mode of a converted model."""
    return next(
        getattr(module, HOOK).mode
        for module in model.modules()
        if hasattr(module, HOOK)
    )


class Standardised(nn.Conv2d):
    """A convolution that standardises its weight in a forward of its own, as NFNets and BiT have it."""

    def forward(self, x):
        return nn.functional.conv2d(
            x, self.weight - self.weight.mean((1, 2, 3), True), self.bias
        )


RING = Graph.from_edges(torch.arange(6), torch.arange(6).roll(1), 6)


class OnRing(nn.Module):
    """A graph convolution on a ring of six nodes, one graph for all: its degrees are counted once."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(RING, x)


def to_dgl(graph):
    """Return a graph, or a block where there are more sources than destinations, as DGL's."""
    import dgl

    parts = "csc", (graph.indptr, graph.indices, [])
    if graph.num_src == graph.num_dst:
        return dgl.graph(parts, num_nodes=graph.num_dst)
    return dgl.create_block(
        parts, num_src_nodes=graph.num_src, num_dst_nodes=graph.num_dst
    )


def losses_of(model, schedule, loss, steps, **sgd):
    """Train by SGD, a step of the schedule after each of the optimizer's; return what ``loss`` gave of every step."""
    optimizer, scheduler = (
        torch.optim.SGD(model.parameters(), **{"lr": 0.1} | sgd),
        PrecisionScheduler(model, schedule),
    )
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


def make(name="CR", **changes):
    """Return a schedule of the suite, 8 cycles in 1,600 steps between 3 and 8 bits but for the changes."""
    return make_schedule(
        name, **{"q_min": 3, "q_max": 8, "total_steps": 1600, "n_cycles": 8} | changes
    )


def quietly(call, *args, **kwargs):
    """Call without the warning of cycles that are too short."""
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        return call(*args, **kwargs)


def refused(message, call, /, *args, error=ValueError, **options):
    """Assert that a call is refused with a message."""
    with pytest.raises(error, match=message):
        call(*args, **options)


def errors_text(cases, error=ValueError):
    """Return the errors of calls, pairs of a function and keyword arguments, for a golden file."""
    lines = []
    for function, given in cases:
        with pytest.raises(error) as raised:
            quietly(function, **given)
        words = ", ".join(
            f"{name}={value!r}"
            for name, value in given.items()
            if len(repr(value)) < 60
        )
        named = getattr(function, "func", function)
        name = getattr(named, "__qualname__", type(named).__name__)
        lines.append(f"{name}({words})\n    {raised.value}\n")
    return "".join(lines)


def price(bits, q_max=8):
    """Return the mean of q**2 + 2 q q_max, relative to that of static q_max."""
    return sum(q * q + 2 * q * q_max for q in bits) / len(bits) / (3 * q_max * q_max)


def written_and_read(schedule):
    """Return what JSON makes of a schedule."""
    return quietly(schedule_from_dict, json.loads(json.dumps(schedule.to_dict())))


def small(seed=0):
    """Return a network with two convolutions, BatchNorm and a linear layer, for pictures of 6 x 6."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def pictures(seed=0, n=4):
    """Return random inputs of ``small``."""
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def row_of(spec, value, metric="accuracy", status="ok") -> ResultRow:
    """Return a row with one metric and the schedule's BitOps of one matmul."""
    bits = spec.schedule.bits()
    point = {"split": "test", "when": "final", "precision": "q_max"}
    curve = [
        {"step": t, "test": {metric: value * t / spec.recipe.steps}}
        for t in (0, spec.recipe.steps)
    ]
    return {
        "key": spec.key,
        "numerics": NUMERICS,
        "spec": spec.to_dict(),
        "provenance": PROVENANCE,
        "status": status,
        "title": "made up",
        "relative_cost": cost.relative_cost(bits, spec.q_max, spec.q_grad),
        "noise_exposure": cost.noise_exposure(bits, spec.q_max),
        "share_at_q_min": spec.schedule.share_at(spec.schedule.q_min),
        "metrics": [{"name": metric, "value": value, **point}]
        if status == "ok"
        else [],
        "evaluations": curve,
        "bitops": {"paper": total_bitops(1, bits, spec.q_grad or spec.q_max)}
        if status == "ok"
        else {},
        "steps": len(bits),
    }


def stored_row(spec, value, **changes) -> ResultRow:
    """Return a row with all fields that stores and readers need."""
    return {
        **row_of(spec, value),
        "schema": 1,
        "seconds": 1.0,
        "device": "cpu",
        **changes,
    }


def write_rows(path, *rows):
    """Write rows into a file as JSON, one a line, without digests; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def state_of(model):
    """Return parameters, buffers and the running ranges of a quantised model."""
    ranges = running_ranges(model)
    assert ranges
    return [*model.state_dict().values(), *ranges]


def running_ranges(model):
    """Return the running ranges of all layers of a model."""
    return [
        running
        for p in all_precisions(model).values()
        for running in p.ranges().values()
    ]


def same_parameters(a, b):
    """Whether two models have the same parameters, bit for bit."""
    return all(
        torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


def smoke_spec(dataset, /, arm="static 8", seed=0, model=None, **changes):
    """Return a run of a data set's smoke recipe with some fields changed."""
    return run_spec(
        replace(recipe("smoke", dataset, model), **changes),
        arm,
        q_max=8,
        seed=seed,
        scale="smoke",
    )


def specs_of(*arms, seeds=(0,), **changes):
    """Return short smoke runs of the digits, an arm and a seed each."""
    settings = {"steps": 10, "n_cycles": 2, **changes}
    return designs.quality_cost(
        "smoke", schedules=arms, static_bits=[], seeds=seeds, **settings
    )


class ForeignCheckpoint(torch.autograd.Function):
    """A checkpoint as other libraries have it."""

    @staticmethod
    def forward(state, run, *xs):
        state.function, state.xs = run, xs
        with torch.no_grad():
            return run(*xs)

    @staticmethod
    def backward(state, *gradients):
        xs = [x.detach().requires_grad_() for x in state.xs]
        with torch.enable_grad():
            y = state.function(*xs)
        torch.autograd.backward(y, gradients)
        return None, *(x.grad for x in xs)


TRACKED_RUNS = (
    "run digits/mlp6 --scale smoke --arms CR RR --seeds 0 --workers 0".split()
)


def train_tracked_runs(folder):
    """Train the two runs that are sent to trackers, with their rows in a folder; return it."""
    from typer.testing import CliRunner

    from cpt_lab.commands import app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPT_RUNS_DIR", str(folder))
        assert CliRunner().invoke(app, TRACKED_RUNS).exit_code == 0
    return folder


def named_row(name, value=1, status="ok", **fields):
    """Return the smallest row that a store takes, of the run of a name."""
    spec = {"name": name}
    head = {"schema": 1, "key": key_of(spec), "spec": spec, "status": status}
    return {**head, "value": value, **fields}
