"""Stages of ``bench.gpu``: run each in turn and append its result, or its failure, to a file of rows.

A further call continues with the stages that are left.
"""

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

from bench import PACKAGES
from cpt_extras.files import write_text
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.provenance import commit

TRIES = 2  # a stage that ended its process this often is not tried again


@dataclass(frozen=True)
class Options:
    """Options of one call of ``bench.gpu``.

    Attributes:
        part: name of the part.
        device: device to measure on.
        dry: whether to use small sizes and few steps.
        seconds: time after which no further stage starts.
        workers: runs at a time in the part "evidence"; None takes the best number of the part "packing".
        folder: folder of rows and summaries.
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
    """A stage that cannot run on this machine; the message gives the reason."""


Stage = Callable[[], dict[str, Any]]  # returns what it found


def describe_environment(device: str) -> dict[str, Any]:
    """Return the device and versions that a measurement depends on."""
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file without an incomplete last line."""
    lines = (
        path.read_text(encoding="utf-8").splitlines(keepends=True)
        if path.exists()
        else []
    )
    return [json.loads(line) for line in lines if line.endswith("\n")]


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row after the complete ones, and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        file.write((json.dumps(row) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def finished_rows(
    rows: list[dict[str, Any]], environment: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the last row of every stage that finished in an environment: this commit, torch and device."""
    rows = [row for row in rows if row["where"] == environment]
    last_rows = {row["stage"]: row for row in rows if row["status"] != "started"}
    start_counts = Counter(row["stage"] for row in rows if row["status"] == "started")
    for stage, count in start_counts.items():
        if stage not in last_rows and count >= TRIES:
            last_rows[stage] = {
                "stage": stage,
                "status": "failed",
                "error": f"it ended its process {count} times",
            }
    return last_rows


def run_stages(
    stages: dict[str, Stage], options: Options, environment: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Run the unfinished stages while there is time; return the rows of all finished ones."""
    began = time.monotonic()
    rows = finished_rows(read_rows(options.rows), environment)
    for name, stage in stages.items():
        if name in rows:
            continue
        if time.monotonic() - began > options.seconds:
            break
        append_row(
            options.rows, {"stage": name, "status": "started", "where": environment}
        )
        row = {"stage": name, **run_stage(stage), "where": environment}
        append_row(options.rows, row)
        rows[name] = row
        print(format_row(row), flush=True)
        if options.device == "cuda" and "CUDA error" in row.get(
            "error", ""
        ):  # no kernel runs in this process any more
            sys.stdout.flush()
            os.execv(sys.executable, [sys.executable, "-m", "bench.gpu", *sys.argv[1:]])
        gc.collect()  # what a stage made may stand in circles
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return {name: rows[name] for name in stages if name in rows}


def run_stage(stage: Stage) -> dict[str, Any]:
    """Run a stage; return its status, values or error, and seconds."""
    began = time.monotonic()
    try:
        values = stage()
        failed = values.pop("failed", "")
        row: dict[str, Any] = (
            {"status": "failed", "error": failed} if failed else {"status": "ok"}
        )
        row["values"] = values
    except (LeftOutError, DataNotFoundError) as reason:
        row = {"status": "left out", "reason": str(reason)}
    except Exception as error:
        if _names_missing_library(error):
            row = {"status": "left out", "reason": str(error)}
        else:
            row = {
                "status": "failed",
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
    return {**row, "seconds": round(time.monotonic() - began, 2)}


def _names_missing_library(error: BaseException | None) -> bool:
    """Return whether an error, or the one behind it, says that a library of others is not installed.

    ``cpt_extras.optional_libraries`` raises an ImportError with advice from the ModuleNotFoundError.
    """
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return bool(package) and package not in ("bench", *PACKAGES)
    return isinstance(error, ImportError) and _names_missing_library(error.__cause__)


def format_row(row: dict[str, Any]) -> str:
    """Return a row as the line that is printed."""
    reason = row.get("reason") or row.get("error", "").partition("\n")[0]
    numbers = []
    for name, value in row.get("values", {}).items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        numbers.append(f"{name} {text}")
    line = f"{row['stage']:<44} {row['status']:<8} {reason} {'  '.join(numbers)}"
    return line.rstrip()


def summary(
    options: Options,
    names: list[str],
    rows: dict[str, dict[str, Any]],
    environment: dict[str, Any],
) -> int:
    """Write and print the summary; return the exit status."""
    names_by_status = {
        status: [n for n, row in rows.items() if row["status"] == status]
        for status in ("ok", "failed", "left out")
    }
    names_left = [
        name
        for name in names
        if name not in rows or rows[name].get("values", {}).get("left")
    ]
    content = {
        "part": options.part,
        "dry": options.dry,
        "where": environment,
        "ok": len(names_by_status["ok"]),
        "failed": {
            name: rows[name]["error"].partition("\n")[0]
            for name in names_by_status["failed"]
        },
        "left out": {
            name: rows[name]["reason"] for name in names_by_status["left out"]
        },
        "left": names_left,
        "values": {
            name: rows[name]["values"] for name in rows if "values" in rows[name]
        },
    }
    write_text(options.rows.with_suffix(".json"), json.dumps(content, indent=1) + "\n")
    counts = {status: len(names) for status, names in names_by_status.items()}
    print(
        f"{counts['ok']} ok, {counts['failed']} failed, {counts['left out']} left out, "
        f"{len(names_left)} left: {options.rows.with_suffix('.json')}"
    )
    if names_by_status["failed"]:
        return 1
    return 3 if names_left else 0


def forget_failures(path: Path) -> None:
    """Remove the rows of failed stages, so that they run again."""
    rows_to_keep: Iterator[dict[str, Any]] = (
        row for row in read_rows(path) if row["status"] in ("ok", "left out")
    )
    if path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows_to_keep))
