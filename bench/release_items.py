"""Recorder of a release's files: rows, a checkpoint, states, a program, a pickle. ``bench.release_corpus`` runs it.

This file runs inside the checkout of any release, old ones too, so it imports the package alone, from wherever the
release has its modules:

    PYTHONPATH=CHECKOUT python bench/release_items.py RELEASE FOLDER
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import lzma
import shutil
import sys
import tempfile
import types
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

RUNS = (("digits", "CR"), ("digits-graph", "RR"), ("pydoc", "CR"))
INTERRUPTED = RUNS[1]
STEPS, STOP_AT = 20, 8
STATE_AT = 6  # steps before a scheduler's state is stored; as many follow


def find(*places: str) -> Any:
    """Return the first of these objects that can be imported.

    Raises:
        ImportError: if none can.
    """
    for place in places:
        module, _, name = place.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(places)} is there")


def name_release(release: str) -> None:
    """Make rows name the release of the checkout, not the installed version."""
    installed = metadata.version
    metadata.version = lambda name: release if name == "cpt-core" else installed(name)  # type: ignore[assignment]


def stand_in_for_orjson() -> None:
    """Let releases that read rows with orjson do so where it is not installed."""
    if importlib.util.find_spec("orjson") is not None:
        return
    module: Any = types.ModuleType("orjson")
    module.loads, module.JSONDecodeError, module.OPT_SORT_KEYS = (
        json.loads,
        json.JSONDecodeError,
        1,
    )
    module.dumps = lambda value, option=0: json.dumps(
        value, sort_keys=True, separators=(",", ":")
    ).encode()
    sys.modules["orjson"] = module


def tiny_spec(dataset: str, arm: str) -> Any:
    """Return a run of a few steps on embedded data."""
    recipe = find(
        "cpt_lab.experiments.registry.recipe",
        "cpt_core.experiments.recipes.recipe",
        "cpt_core.recipes.recipe",
    )
    run_spec = find(
        "cpt_lab.experiments.spec.run_spec",
        "cpt_core.experiments.spec.run_spec",
        "cpt_core.specs.run_spec",
    )
    changes: dict[str, Any] = {"steps": STEPS, "n_cycles": 2, "evaluate_every": 0}
    if dataset == "pydoc":
        changes["train_tokens"] = 4000
    if dataset == "digits-graph":
        changes["hidden"] = 8
    return run_spec(
        replace(recipe("smoke", dataset), **changes),
        arm,
        q_max=8,
        seed=0,
        scale="smoke",
    )


def task_class_of(spec: Any) -> Any:
    """Return the task of a spec."""
    try:
        return find(
            "cpt_lab.tasks.base.load_task_class",
            "cpt_lab.tasks.base.task_of",
            "cpt_lab.training.session.task_of",
            "cpt_core.training.session.task_of",
        )(spec)
    except ImportError:
        return find("cpt_core.tasks.TASKS")[spec.recipe.task]


def record_rows(folder: Path) -> None:
    """Store the rows of some runs."""
    run_grid = find(
        "cpt_lab.sweeps.sweep.run_grid",
        "cpt_core.sweeps.sweep.run_grid",
        "cpt_core.runs.run_grid",
    )
    with tempfile.TemporaryDirectory() as place:
        store = Path(place) / "rows.jsonl"
        run_grid([tiny_spec(*run) for run in RUNS], store, workers=0, progress=False)
        shutil.copy(store, folder)


def record_checkpoint(folder: Path) -> None:
    """Store the checkpoint of a run that is stopped midway."""
    train = find(
        "cpt_lab.training.train.train",
        "cpt_core.training.train.train",
        "cpt_core.train.train",
    )
    stopped = find(
        "cpt_lab.training.train.Stopped",
        "cpt_core.training.train.Stopped",
        "cpt_core.train.Stopped",
    )
    spec, steps = tiny_spec(*INTERRUPTED), []

    def note(*_: Any) -> None:
        steps.append(1)

    path = folder / "checkpoint.pt"
    try:
        train(
            task_class_of(spec),
            spec,
            checkpoint=path,
            on_step=note,
            should_stop=lambda: len(steps) >= STOP_AT - 1,
        )
    except stopped:
        return
    raise RuntimeError("the run was not stopped")


def make_model() -> nn.Sequential:
    """Return a small float32 model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def make_batch(step: int) -> torch.Tensor:
    """Return the inputs of a step, which are equal on every processor."""
    count = torch.arange(4 * 6, dtype=torch.int64) + 24 * step
    return ((count * 40_503) % 65_536 - 32_768).float().view(4, 6) / 16_384


def train_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range
) -> list[float]:
    """Train some steps; return their losses."""
    losses = []
    for step in steps:
        loss = model(make_batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def make_trainer(cpt: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a converted model, its optimizer and its scheduler."""
    model = cpt.quantize_(make_model())
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=24, n_cycles=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, cpt.PrecisionScheduler(model, schedule)


def record_training(folder: Path) -> None:
    """Store the states of a training loop, the losses that follow them, an exported program and a pickle."""
    cpt = importlib.import_module("cpt_core")
    model, optimizer, scheduler = make_trainer(cpt)
    train_on(model, optimizer, scheduler, range(STATE_AT))
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(states, folder / "states.pt")
    losses = train_on(model, optimizer, scheduler, range(STATE_AT, 2 * STATE_AT))
    expected: dict[str, Any] = {"losses": losses}
    torch.save(model, folder / "model.pickle")
    if hasattr(cpt, "export"):
        x = make_batch(100)
        program = io.BytesIO()
        torch.export.save(cpt.export(model.eval(), (x,)), program)
        (folder / "program.pt2.xz").write_bytes(lzma.compress(program.getvalue()))
        with torch.no_grad(), cpt.precision(model, 8):
            expected["outputs"] = model(x).tolist()
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")


def main(release: str, place: str) -> None:
    """Record everything of a release in a folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name_release(release)
    stand_in_for_orjson()
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    record_rows(folder)
    record_training(folder)
    record_checkpoint(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
