"""Stages: what each found is a row, whatever becomes of the others; the next call goes on with those that are left."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cpt_extras.files import write_text
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.provenance import commit

TRIES = 2  # a stage that ended its process this often is not tried again


@dataclass(frozen=True)
class Options:
    """What a call is told.

    Attributes:
        part: its name.
        device: where to measure.
        dry: small sizes, few steps.
        seconds: no stage is started after so many.
        workers: of the part "evidence"; None takes the best number of the part "packing".
        folder: of rows and summaries.
    """

    part: str
    device: str
    dry: bool
    seconds: float
    workers: int | None
    folder: Path

    @property
    def rows(self) -> Path:
        """The file of rows."""
        return self.folder / f"{self.part}.jsonl"


class LeftOutError(Exception):
    """A stage that cannot be done here; the message says why."""


Stage = Callable[[], dict[str, Any]]  # returns what it found


def where(device: str) -> dict[str, Any]:
    """What a measurement depends on besides the code."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        **commit(),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; of a torn last line, nothing."""
    lines = (
        path.read_text(encoding="utf-8").splitlines(keepends=True)
        if path.exists()
        else []
    )
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row to the disk, behind those that are whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        file.write((json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def ended(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the last row of every stage that needs no further try."""
    found = {row["stage"]: row for row in rows if row["status"] != "started"}
    begun = Counter(row["stage"] for row in rows if row["status"] == "started")
    for stage, count in begun.items():
        if stage not in found and count >= TRIES:
            found[stage] = {
                "stage": stage,
                "status": "failed",
                "error": f"it ended its process {count} times",
            }
    return found


def run_stages(
    stages: dict[str, Stage], options: Options, here: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Run what is left, as long as there is time, and return the rows of all stages that ended."""
    began = time.monotonic()
    done = ended(read(options.rows))
    for name, stage in stages.items():
        if name in done:
            continue
        if time.monotonic() - began > options.seconds:
            break
        append(options.rows, {"stage": name, "status": "started", "where": here})
        row = {"stage": name, **attempt(stage), "where": here}
        append(options.rows, row)
        done[name] = row
        print(line(row), flush=True)
        if options.device == "cuda" and "CUDA error" in row.get(
            "error", ""
        ):  # no kernel runs in this process any more
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-m", "bench.gpu", *sys.argv[1:]])
        gc.collect()  # what a stage made may stand in circles
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return {name: done[name] for name in stages if name in done}


def attempt(stage: Stage) -> dict[str, Any]:
    """Run a stage; whatever it raises is part of the answer."""
    began = time.monotonic()
    try:
        values = stage()
        failed = values.pop("failed", "")
        row: dict[str, Any] = (
            {"status": "failed", "error": failed} if failed else {"status": "ok"}
        )
        row["values"] = values
    except (LeftOutError, ImportError, DataNotFoundError) as reason:
        row = {"status": "left out", "reason": str(reason)}
    except Exception as error:
        row = {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    return {**row, "seconds": round(time.monotonic() - began, 2)}


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    told = row.get("reason") or row.get("error", "").partition("\n")[0]
    numbers = (
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
        for k, v in row.get("values", {}).items()
    )
    return f"{row['stage']:<44} {row['status']:<8} {told} {'  '.join(numbers)}".rstrip()


def summary(
    options: Options,
    names: list[str],
    done: dict[str, dict[str, Any]],
    here: dict[str, Any],
) -> int:
    """Write and print the summary; return the exit status."""
    by = {
        status: [n for n, row in done.items() if row["status"] == status]
        for status in ("ok", "failed", "left out")
    }
    left = [
        name
        for name in names
        if name not in done or done[name].get("values", {}).get("left")
    ]
    told = {
        "part": options.part,
        "dry": options.dry,
        "where": here,
        "ok": len(by["ok"]),
        "failed": {
            name: done[name]["error"].partition("\n")[0] for name in by["failed"]
        },
        "left out": {name: done[name]["reason"] for name in by["left out"]},
        "left": left,
        "values": {
            name: done[name]["values"] for name in done if "values" in done[name]
        },
    }
    write_text(options.rows.with_suffix(".json"), json.dumps(told, indent=1) + "\n")
    print(
        f"{len(by['ok'])} ok, {len(by['failed'])} failed, {len(by['left out'])} left out, {len(left)} left: "
        f"{options.rows.with_suffix('.json')}"
    )
    return 1 if by["failed"] else 3 if left else 0


def forget_failures(path: Path) -> None:
    """Let the stages that failed be tried again."""
    kept: Iterator[dict[str, Any]] = (
        row for row in read(path) if row["status"] in ("ok", "left out")
    )
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
