"""Growth of the work of public functions with the size n of their input: at n, and at 4 n.

    python -m bench.scaling

It prints processor seconds; ``tests/test_scaling.py`` counts the work of the same calls. A call whose work grows with
the square of n takes 16 times as much, one whose work grows with n four times.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import cpt_core as cpt

MAX_RATIO = 6.5  # 4 is linear, 16 quadratic
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A call with an input of variable size.

    Attributes:
        covers: public names, as in ``book.public_names``, that the call runs.
        grows: name of the size n, such as "layers".
        n: size at which work is counted.
        make: returns the call for (n, folder); its preparations are not counted.
        more: factor of n for measuring seconds.
    """

    covers: str
    grows: str
    n: int
    make: Callable[[int, Path], Call]
    more: int = 8


# --- models -------------------------------------------------------------------------------------------------------
X = torch.ones(2, 4)


def chain(n: int) -> nn.Sequential:
    """Return a chain of n linear layers."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))


def quantized(n: int) -> nn.Module:
    """Return a chain of n quantised layers with a scheduler."""
    model = cpt.quantize_(chain(n))
    cpt.PrecisionScheduler(model, cyclic(64))
    return model


def mostly_float32(n: int) -> nn.Module:
    """Return n layers that stay in float32, and one quantised layer."""
    model = nn.Sequential(chain(n), nn.LayerNorm(4), nn.Linear(4, 4))
    cpt.quantize_(model, cpt.QuantConfig(float32=tuple(f"0.{i}" for i in range(n))))
    cpt.PrecisionScheduler(model, cyclic(64))
    return model


def cyclic(steps: int, n_cycles: int = 2) -> Any:
    """Return a cyclic schedule."""
    return cpt.make_schedule(
        "CR", q_min=3, q_max=8, total_steps=steps, n_cycles=n_cycles
    )


def deficits(n: int) -> Any:
    """Return a schedule with n windows of low precision."""
    return cpt.DeficitSchedule(3, 8, tuple((4 * i, 4 * i + 2) for i in range(n)), 4 * n)


def step(model: nn.Module) -> None:
    """Run a forward and a backward pass."""
    model(X).sum().backward()


def in_ledger(make: Callable[[int], nn.Module], n: int, folder: Path) -> Call:
    """Return a training step inside a ledger that has counted one step before."""
    ledger = cpt.BitOpsLedger(model := make(n))
    ledger.__enter__()
    step(model)
    return partial(step, model)


def layer_by_layer(n: int, folder: Path) -> Call:
    """Return a step inside a ledger, with a training loop that calls the layers one by one."""
    model = mostly_float32(n)
    cpt.BitOpsLedger(model).__enter__()

    def call() -> None:
        x = X
        for layer in model[0]:  # type: ignore[index]
            x = layer(x)
        x.sum().backward()

    return call


def ledger_results(n: int, folder: Path) -> Call:
    """Return a call that enters a ledger and reads its results."""
    ledger = cpt.BitOpsLedger(model := quantized(n))
    with ledger:
        step(model)

    def call() -> None:
        with ledger:
            (
                ledger.total(),
                ledger.by_layer(),
                ledger.costs(),
                ledger.float32,
                ledger.table(),
            )

    return call


def scheduler_step(layers: int, steps: int) -> Call:
    """Return the step method of a scheduler."""
    return cpt.PrecisionScheduler(cpt.quantize_(chain(layers)), cyclic(steps)).step


def scheduler_state(n: int, folder: Path) -> Call:
    """Return a call that saves and loads the state of a scheduler."""
    scheduler = cpt.PrecisionScheduler(cpt.quantize_(chain(n)), cyclic(64))
    return lambda: scheduler.load_state_dict(scheduler.state_dict())


def in_precision(n: int, folder: Path) -> Call:
    """Return a forward pass with bits given for every layer."""
    model = cpt.quantize_(chain(n))
    bits = {f"{i}": 4 + i % 4 for i in range(n)}

    def call() -> None:
        with cpt.precision(model, bits):
            model(X)

    return call


def layered(n: int, folder: Path) -> Call:
    """Return a call that makes a schedule with a group per layer, computes its cost and steps it."""
    model = cpt.quantize_(chain(n))

    def call() -> None:
        schedule = cpt.LayeredSchedule(
            tuple(((f"{i}",), cyclic(64), 16) for i in range(n))
        )
        schedule.relative_cost()
        cpt.PrecisionScheduler(model, schedule).step()

    return call


def recorded_step(n: int, folder: Path) -> Call:
    """Return a training step under ``diagnostics.record``."""
    model = quantized(n)
    recording = cpt.diagnostics.record(model, every=1)
    recording.__enter__()

    def call() -> None:
        step(model)
        recording.step += 1

    call()
    return call


def recorded_steps(n: int, folder: Path) -> Call:
    """Return a call that records many steps and tabulates them."""
    model = quantized(2)

    def call() -> None:
        with cpt.diagnostics.record(model, every=1) as recording:
            for number in range(n):
                recording.step = number
                step(model)
        recording.table()

    return call


def copied_ranges(n: int, folder: Path) -> Call:
    """Return a call that copies all running ranges."""
    source, target = quantized(n), quantized(n)
    return lambda: cpt.quantization.copy_ranges(source, target)


def layers(
    call: Callable[[nn.Module], Any], make: Callable[[int], nn.Module] = quantized
) -> Any:
    """Return a ``Case.make`` for a call on a model of n layers."""
    return lambda n, folder: partial(call, make(n))


# --- searches ---------------------------------------------------------------------------------------------------------
def training(depth: int) -> dict[str, Any]:
    """Return a model, its optimizer and a training step."""
    model = chain(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return {
        "model": model,
        "train_step": train_step,
        "optimizer": optimizer,
        "seeds": (0, 1),
        "progress": False,
    }


def search_call(search: Callable[..., Any], depth: int, **more: Any) -> Call:
    """Return a call of a search on a small training."""
    return partial(search, **training(depth) | more)


def precision_search(n: int, folder: Path) -> Call:
    """Return a call of ``try_precision`` on trainings that do nothing."""
    idle = {"train_step": lambda number: torch.ones(()), "evaluate": lambda: 1.0}
    return search_call(cpt.search.try_precision, 1, steps=n, **idle | {"seeds": 1})


def allocation(n: int, folder: Path) -> Call:
    """Return a call that allocates bits over n windows and n groups."""
    rng = np.random.default_rng(0)
    windows = tuple((100 * i, 100 * i + 100) for i in range(n))
    groups = tuple((f"{i}",) for i in range(n))

    def random_responses() -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(1 + rng.random(n)) for _ in range(2))

    measured = cpt.search.Sensitivity(
        "a model",
        "loss",
        4,
        100 * n,
        windows,
        groups,
        (16,) * n,
        (0, 1),
        (1.0, 1.1),
        random_responses(),
        random_responses(),
    )
    return lambda: cpt.search.allocate(measured, 0.7, q_min=3, q_max=8, over="time")


# --- graphs -----------------------------------------------------------------------------------------------------------
def edges(n: int) -> tuple[Tensor, Tensor]:
    """Return 8 n edges of n nodes."""
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(n, (2, 8 * n), generator=generator)
    return source, target


def graph(n: int) -> Any:
    """Return a graph of n nodes and 8 n edges."""
    return cpt.Graph.from_edges(*edges(n), n)


def graph_layer(layer: Callable[[int, int], nn.Module], n: int, folder: Path) -> Call:
    """Return a forward and backward pass of a quantised graph layer."""
    model, layer_graph, x = cpt.quantize_(layer(4, 4)), graph(n), torch.ones(n, 4)
    cpt.PrecisionScheduler(model, cyclic(64))
    return lambda: model(layer_graph, x).sum().backward()


# --- rows -------------------------------------------------------------------------------------------------------------
def write_store(n: int, folder: Path) -> Path:
    """Write a store of n runs."""
    from cpt_lab.experiments.grids import grid_specs
    from cpt_lab.paths import results_dir
    from cpt_lab.sweeps.row_format import line_of, load_rows

    template = load_rows(results_dir() / "image_digits.jsonl")[0]
    specs = grid_specs(
        "digits/mlp6",
        "demo",
        list(range(-(-n // 4))),
        schedules=["CR", "RR"],
        static_bits=[4, 8],
    )
    rows = [{**template, "key": spec.key, "spec": spec.to_dict()} for spec in specs[:n]]
    store = folder / f"image_{n}.jsonl"
    store.write_bytes(b"".join(line_of(row) for row in rows))
    assert len(rows) == n
    return store


def append_rows(n: int, folder: Path) -> Call:
    """Return a call that appends 8 rows to a store of n rows."""
    from cpt_lab.sweeps.row_format import load_rows
    from cpt_lab.sweeps.stores import append_row

    more = load_rows(write_store(n + 9, folder))[n:]
    store = write_store(n, folder)
    append_row(store, more[0])
    return lambda: [append_row(store, row) for row in more[1:]]


def read_rows(n: int, folder: Path) -> Call:
    """Return a call that reads a store."""
    from cpt_lab.sweeps.row_format import load_rows

    return partial(load_rows, write_store(n, folder))


def tabulate(n: int, folder: Path) -> Call:
    """Return a call that reads a store into a table, summarises and writes it."""
    from cpt_lab.analysis.row_tables import by_arm
    from cpt_lab.analysis.run_table import load
    from cpt_lab.analysis.spreadsheets import write_csv
    from cpt_lab.experiments.spec import RunSpec
    from cpt_lab.sweeps.row_format import load_rows

    store = write_store(n, folder)
    recipes = {
        row["key"]: RunSpec.from_dict(row["spec"]).recipe for row in load_rows(store)
    }

    def call() -> None:
        frame = load(store)
        by_arm(frame, recipes)
        write_csv(frame.drop(columns="evaluations"), folder / "rows.csv")

    return call


def judge_runs(n: int, folder: Path) -> Call:
    """Return a call that judges claims of the paper by a table of runs."""
    from cpt_lab.analysis.claims import judge_claims
    from cpt_lab.analysis.run_table import load

    frame = load(write_store(n, folder))
    return partial(
        judge_claims, frame, only=("cost_order", "gradients_stabilize", "cpt_improves")
    )


def collect_notebooks(n: int, folder: Path) -> Call:
    """Return a call that collects the notebooks of n students."""
    import json

    from cpt_lessons.submissions import read_submissions

    output = "".join(f"exercise 1.{i}: correct\n" for i in range(4))
    cell = {"cell_type": "code", "source": ["a"], "outputs": [{"text": [output]}]}
    for i in range(n):
        path = folder / f"class{n}" / f"student{i}" / "03.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"cells": [cell] * 4}))
    return partial(read_submissions, folder / f"class{n}")


# --- data of users ----------------------------------------------------------------------------------------------------
def read_text(n: int, folder: Path) -> Call:
    """Return a call that reads a text of about 100 n words."""
    from cpt_lab.data.text import load_text
    from cpt_lab.experiments.registry import recipe

    for split, part in (("train", n), ("valid", n // 4), ("test", n // 4)):
        (folder / f"{split}.txt").write_text(
            "\n".join(
                f"word{i % 50} follows the words of {split} here\n"
                for i in range(20 * part)
            )
        )
    text_recipe = recipe("smoke", str(folder), task="language_model")
    return partial(load_text, replace(text_recipe, batch=2))


def read_graph(n: int, folder: Path) -> Call:
    """Return a call that reads a graph of n nodes and 8 n edges."""
    from cpt_lab.data.graphs import load_graph
    from cpt_lab.experiments.registry import recipe

    parts = {
        "train_idx": np.arange(n // 2),
        "valid_idx": np.arange(n // 2, n // 2 + 9),
        "test_idx": np.arange(n - 9, n),
    }
    features = np.random.default_rng(0).random((n, 3), dtype=np.float32)
    pairs = torch.stack(edges(n)).numpy()
    np.savez(
        folder / "graph.npz",
        edge_index=pairs,
        features=features,
        labels=np.arange(n) % 3,
        **parts,
    )
    return partial(load_graph, recipe("smoke", str(folder / "graph.npz"), task="graph"))


def read_images(n: int, folder: Path) -> Call:
    """Return a call that reads a folder of n images."""
    from PIL import Image

    from cpt_lab.data.images import load_images
    from cpt_lab.experiments.registry import recipe

    rng = np.random.default_rng(0)
    for i in range(n):
        path = folder / "pictures" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(path)
    image_recipe = recipe("smoke", str(folder / "pictures"), task="image")
    return partial(
        load_images, replace(image_recipe, size=12, valid_images=0, train_images=None)
    )


# Public names without an input that grows, or that only the library constructs.
CONSTANT = {
    **dict.fromkeys(
        (
            "quantization.QUANTIZERS",
            "schedules.PROFILES",
            "FORMATS",
            "SUITE",
            "recipes",
            "formats.COSTS",
        ),
        "a table",
    ),
    **dict.fromkeys(("QuantizationWarning", "search.RangeTestWarning"), "a warning"),
    **dict.fromkeys(
        (
            "bitops.BitOpsPlan",
            "search.PrecisionRange",
            "search.PrecisionSearchResult",
            "kernels.Backend",
            "diagnostics.Recording",
        ),
        "a result, made by a function of the list",
    ),
    **dict.fromkeys(
        (
            "quantization.Quantizer",
            "QuantConfig",
            "Format",
            "FormatLadder",
            "formats.Cost",
            "formats.Operands",
            "schedules.Cosine",
            "schedules.Exponential",
            "schedules.Linear",
            "schedules.Rex",
            "search.Warped",
            "StaticSchedule",
        ),
        "a value of few fields",
    ),
    "backend": "it takes nothing",
    "export": "its work is that of torch.export",
}

CASES = {
    "ledger": Case("BitOpsLedger", "layers", 48, partial(in_ledger, quantized)),
    "ledger, float32 layers": Case(
        "BitOpsLedger", "layers", 48, partial(in_ledger, mostly_float32)
    ),
    "ledger, model not converted": Case(
        "BitOpsLedger", "layers", 48, partial(in_ledger, chain)
    ),
    "ledger, layer by layer": Case("BitOpsLedger", "layers", 48, layer_by_layer),
    "ledger, results": Case("BitOpsLedger", "layers", 48, ledger_results),
    "count_bitops": Case(
        "count_bitops",
        "layers",
        16,
        layers(lambda m: cpt.count_bitops(m, (X,), cyclic(64))),
        4,
    ),
    "count_bitops, steps": Case(
        "count_bitops",
        "steps",
        20_000,
        lambda n, folder: partial(cpt.count_bitops, quantized(1), (X,), cyclic(n)),
    ),
    "uncounted_functions": Case(
        "diagnostics.uncounted_functions",
        "layers",
        16,
        layers(lambda m: cpt.diagnostics.uncounted_functions(m, (X,))),
        4,
    ),
    "check": Case(
        "check", "layers", 8, layers(lambda m: cpt.check(m, (X,)).details()), 4
    ),
    "summary": Case(
        "summary", "layers", 16, layers(lambda m: str(cpt.summary(m, (X,))))
    ),
    "record": Case("diagnostics.record", "layers", 16, recorded_step),
    "record, steps": Case("diagnostics.record", "steps", 16, recorded_steps, 2),
    "quantize_": Case("quantize_", "layers", 32, layers(cpt.quantize_, chain)),
    "quantize_, layers by name": Case(
        "quantize_", "layers and names", 160, lambda n, f: partial(mostly_float32, n)
    ),
    "restore_": Case("restore_", "layers", 256, layers(cpt.restore_)),
    "copy_ranges": Case("quantization.copy_ranges", "layers", 32, copied_ranges),
    "precision": Case("precision", "layers, each with its bits", 24, in_precision),
    "PrecisionScheduler": Case(
        "PrecisionScheduler",
        "layers",
        32,
        lambda n, folder: partial(
            cpt.PrecisionScheduler, cpt.quantize_(chain(n)), cyclic(64)
        ),
    ),
    "PrecisionScheduler, steps": Case(
        "PrecisionScheduler",
        "steps",
        50_000,
        lambda n, folder: partial(
            cpt.PrecisionScheduler, cpt.quantize_(chain(1)), cyclic(n)
        ),
    ),
    "PrecisionScheduler.step": Case(
        "PrecisionScheduler", "layers", 32, lambda n, folder: scheduler_step(n, 64)
    ),
    "PrecisionScheduler.step, steps": Case(
        "PrecisionScheduler", "steps", 50_000, lambda n, f: scheduler_step(1, n)
    ),
    "PrecisionScheduler, its state": Case(
        "PrecisionScheduler", "layers", 32, scheduler_state
    ),
    "LayeredSchedule": Case("LayeredSchedule", "groups", 12, layered),
    "make_schedule": Case(
        "make_schedule",
        "steps",
        50_000,
        lambda n, folder: lambda: cyclic(n).relative_cost(),
    ),
    "make_schedule, cycles": Case(
        "make_schedule CyclicSchedule",
        "cycles",
        256,
        lambda n, folder: lambda: cyclic(16 * n, n).bits(),
    ),
    "DelayedSchedule": Case(
        "DelayedSchedule",
        "steps",
        50_000,
        lambda n, folder: lambda: cpt.DelayedSchedule(cyclic(n), n // 4, 32).bits(),
    ),
    "RoleSchedules": Case(
        "RoleSchedules",
        "steps",
        50_000,
        lambda n, folder: (
            lambda: cpt.RoleSchedules(
                weight=cyclic(n), activation=8, gradient=8
            ).relative_cost()
        ),
    ),
    "DeficitSchedule": Case(
        "DeficitSchedule",
        "windows",
        256,
        lambda n, folder: lambda: deficits(n).relative_cost(),
    ),
    "TableSchedule": Case(
        "schedules.TableSchedule schedule_from_dict",
        "entries",
        256,
        lambda n, folder: (
            lambda: cpt.schedule_from_dict(
                cpt.schedules.TableSchedule(
                    tuple((3 + i % 5, 4) for i in range(n))
                ).to_dict()
            ).relative_cost()
        ),
    ),
    "FunctionSchedule": Case(
        "FunctionSchedule",
        "steps",
        4096,
        lambda n, folder: (
            lambda: cpt.FunctionSchedule(lambda u: 3 + 5 * u, n).relative_cost()
        ),
    ),
    "solve_schedule": Case(
        "solve_schedule",
        "steps",
        4096,
        lambda n, folder: partial(cpt.solve_schedule, 0.7, 3, 8, n, 2),
    ),
    "quantize": Case(
        "quantize",
        "numbers",
        10_000,
        lambda n, folder: partial(cpt.quantize, torch.linspace(0, 1, n), 4),
    ),
    "sensitivity": Case(
        "search.sensitivity search.Sensitivity",
        "layers",
        2,
        lambda n, f: search_call(
            cpt.search.sensitivity, n, windows=1, layers=1, steps=2, estimate=False
        ),
        2,
    ),
    "sensitivity, steps": Case(
        "search.sensitivity",
        "steps",
        4,
        lambda n, f: search_call(
            cpt.search.sensitivity, 1, windows=1, layers=1, steps=n, estimate=True
        ),
        2,
    ),
    "allocate": Case("search.allocate", "windows and groups", 8, allocation, 2),
    "precision_range_test": Case(
        "search.precision_range_test",
        "steps",
        4,
        lambda n, folder: search_call(
            cpt.search.precision_range_test, 1, q_max=5, dwell=n
        ),
    ),
    "try_precision": Case("search.try_precision", "steps", 32, precision_search, 4),
    "Graph": Case(
        "Graph",
        "edges",
        512,
        lambda n, folder: lambda: cpt.Graph(graph(n).indptr, graph(n).indices, n),
    ),
    "GraphConv": Case(
        "GraphConv", "nodes and edges", 512, partial(graph_layer, cpt.GraphConv)
    ),
    "SAGEConv": Case(
        "SAGEConv", "nodes and edges", 512, partial(graph_layer, cpt.SAGEConv)
    ),
    "rows: load_rows": Case("", "rows", 64, read_rows),
    "rows: append_row": Case("", "rows in the store", 64, append_rows),
    "rows: load, by_arm, write_csv": Case("", "rows", 64, tabulate),
    "rows: claims": Case("", "rows", 32, judge_runs, 4),
    "data: text": Case("", "words", 64, read_text),
    "data: graph": Case("", "nodes and edges", 256, read_graph),
    "data: images": Case("", "pictures", 24, read_images),
    "notebooks: collect": Case("", "students", 32, collect_notebooks),
}


def make_call(case: Case, n: int, folder: Path) -> Call:
    """Return the call of a case at size n, with a new folder for its files."""
    case_folder = folder / str(n)
    case_folder.mkdir(parents=True)
    return case.make(n, case_folder)


def seconds(case: Case, n: int, folder: Path) -> float:
    """Return the processor seconds of a call: the minimum of three."""
    measured = []
    for repetition in range(3):
        call = make_call(case, n, folder / str(repetition))
        began = time.process_time()
        call()
        measured.append(time.process_time() - began)
    return min(measured)


def main() -> int:
    """Print the growth of every case; return 1 if one grows faster than allowed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    slow = []
    print(f"{'':32}{'n':>26}{'seconds at n':>14}{'at 4 n':>9}{'ratio':>7}")
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            n = case.n * case.more
            make_call(case, case.n, Path(folder, "first"))()  # imports, caches, kernels
            small, large = (
                seconds(case, size, Path(folder, str(size))) for size in (n, 4 * n)
            )
        print(
            f"{name:32}{n:>10,} {case.grows:15.15}{small:14.4f}{large:9.4f}{large / small:7.1f}",
            flush=True,
        )
        slow += [name] if large / small > MAX_RATIO and large > 0.02 else []
    print(f"more than {MAX_RATIO} times as much at 4 n: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
