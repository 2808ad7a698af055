"""Where runs are kept: a file of result rows and, beside it, the curves, checkpoints, locks and logs of its runs.

A store is a file of JSON lines such as ``runs/demo/image.jsonl``; a row holds the spec of a run, its status, metrics,
costs and where it came from. Rows are appended, never edited, and any number of processes may append, also from
several machines on a shared file system. ``image.curves/``, ``image.checkpoints/``, ``image.locks/`` and
``image.logs/`` stand beside it. Needs no torch.

>>> place(Path("runs/demo/image.jsonl"), "curves", "0123").as_posix()
'runs/demo/image.curves/0123.parquet'
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from cpt_core.checks import write_atomically
from cpt_core.experiments.spec import RunSpec
from cpt_core.paths import CHECKOUT, runs_dir
from cpt_core.schedules import cost

SCHEMA_VERSION = 1
Row = dict[str, Any]
STATUSES = ("ok", "diverged", "failed")
LOCK_SECONDS = 60.0  # appending takes milliseconds: after this long something is wrong with the file system
FREE_BYTES = 200 * 2**20  # a run is not started with less room on the disk than this
_ENDINGS = {"curves": ".parquet", "checkpoints": ".pt", "locks": ".lock", "logs": ".log"}


class StoreError(OSError):
    """A store cannot be written; the message says why and what is safe."""


def store_path(scale: str, task: str) -> Path:
    """Return the store that the notebooks and the command line use for a scale and a task."""
    return runs_dir() / scale / f"{task}.jsonl"


def place(store: Path, kind: str, key: str) -> Path:
    """Return the file of one run: ``kind`` is "curves", "checkpoints", "locks" or "logs"."""
    return store.parent / f"{store.stem}.{kind}" / f"{key}{_ENDINGS[kind]}"


# --- who may do what ------------------------------------------------------------------------------
def _lock(store: Path) -> FileLock:
    """Return the lock of a store. It is the operating system's, so it ends with its holder, however that ends."""
    return FileLock(store.with_name(store.name + ".lock"), timeout=LOCK_SECONDS)


@contextmanager
def claim(store: Path, key: str, seconds: float = 0.0, should_stop: Callable[[], bool] | None = None) -> Iterator[bool]:
    """Claim a run for a ``with`` block: True for the one process that may do it, False for everybody else meanwhile.

    The claim is a lock of the operating system's on an empty file of the run's. It is free at once when its holder
    ends, also by ``kill -9``; a holder on another machine that hangs keeps it until its process or its machine is
    ended. The file stays, for ever: that it is there says nothing, and to remove one that another process has just
    opened would let two of them hold "the" lock.

    Args:
        store: where the run's row goes.
        key: of the run.
        seconds: how long to wait for another holder.
        should_stop: asked while waiting; True ends it.

    Raises:
        StoreError: when the file cannot be written.
    """
    path = place(store, "locks", key)
    lock, mine = FileLock(path), True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=seconds, poll_interval=0.2, cancel_check=should_stop)
    except Timeout:
        mine = False
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}; checkpoints are kept") from error
    try:
        yield mine
    finally:
        lock.release()  # of one that is not held it does nothing


# --- rows -----------------------------------------------------------------------------------------
def append_row(store: Path, row: Row) -> Row:
    """Append a row as one line and return the row that counts.

    A finished row of the same run stays: then nothing is appended, and that row is returned. A torn last line of an
    interrupted writer is cut off first.

    Raises:
        StoreError: when it cannot be written; the file is then as it was before.
        ValueError: for a row with a number that is not finite.
    """
    line = (json.dumps(row, sort_keys=True, allow_nan=False) + "\n").encode()
    try:
        with _lock(store), open(store, "a+b", buffering=0) as f:
            f.seek(0)
            content = f.read()
            end = _end(store, content)
            held = newest(_parse(store, content[:end])).get(row["key"])
            if held is not None and held["status"] != "failed":
                return held
            if end < len(content):
                f.truncate(end)
            try:
                if f.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(f.fileno())
            except OSError:
                f.truncate(end)
                raise
    except OSError as error:
        raise StoreError(f"cannot write {store}: {error.strerror or error}; the run's checkpoint is kept") from error
    return row


def load_rows(store: Path) -> list[Row]:
    """Return the newest row of every key, in the order the keys first appeared; a torn last line is left out.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    if not Path(store).exists():
        return []
    content = Path(store).read_bytes()
    return list(newest(_parse(store, content[: _end(store, content)])).values())


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the row of every key that counts: the last one, but no failure where there is a result."""
    out: dict[str, Row] = {}
    for row in rows:
        held = out.get(row["key"])
        if held is None or row["status"] != "failed" or held["status"] == "failed":
            out[row["key"]] = row
    return out


def _end(store: Path, content: bytes) -> int:
    """Where the whole lines end. What follows was torn off a row; anything else is no store, and not ours to cut."""
    end = content.rfind(b"\n") + 1
    if not content[end:].startswith((b"{", b"\0")) and end < len(content):
        raise ValueError(f"{store} is no file of rows: it ends with {content[end:][:60].decode(errors='replace')!r}")
    return end


def _parse(store: Path, content: bytes) -> list[Row]:
    rows = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{store}, line {number} is no JSON: {line[:60].decode(errors='replace')!r}; remove "
                "that line to use the rest"
            ) from error
        if not isinstance(row, dict) or row.get("schema") != SCHEMA_VERSION:
            schema = row.get("schema") if isinstance(row, dict) else None
            raise ValueError(f"{store}, line {number}: schema {schema!r} is not {SCHEMA_VERSION}")
        missing = [name for name in ("key", "spec", "status") if name not in row]
        if missing:
            raise ValueError(f"{store}, line {number} has no {', '.join(missing)}")
        rows.append(row)
    return rows


def find_row(store: Path, key: str) -> Row | None:
    """Return the newest row of one run."""
    return next((row for row in load_rows(store) if row["key"] == key), None)


def check_writable(store: Path) -> None:
    """Try whether rows can be appended, before work is put into them; StoreError says why not."""
    store = Path(store)
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        if store.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file of rows")
        with open(store, "ab"), _lock(store):
            pass
    except Timeout as error:
        raise StoreError(f"cannot write {store}: {error.lock_file} is held by another process") from error
    except OSError as error:
        raise StoreError(f"cannot write {store}: {error.strerror or error}; nothing was started") from error
    check_free(store)


def check_free(store: Path) -> None:
    """Raise StoreError when there is little room left beside a store."""
    free = shutil.disk_usage(store.parent).free
    if free < FREE_BYTES:
        raise StoreError(f"only {free / 2**20:.0f} MB free beside {store}; a run needs {FREE_BYTES / 2**20:.0f} MB")


# --- curves ---------------------------------------------------------------------------------------
def write_curve(store: Path, key: str, history: dict[str, list[Any]]) -> None:
    """Store what happened at every step of a run as Parquet, replacing an older file in one go.

    Columns: ``step`` (0-based), ``loss``, ``bits``, ``lr``, and ``<split>_<metric>_at_<q_max|current>``, which is NaN
    except after the steps that were followed by an evaluation.
    """
    types = {"step": "int32", "loss": "float32", "bits": "int8", "lr": "float64"}  # the loss is a float32 number
    frame = pd.DataFrame({name: history[name] for name in types}).astype(types)
    for e in history["evaluations"]:
        for split in ("valid", "test"):
            for name, value in e.get(split, {}).items():
                column = f"{split}_{name}_at_{e['precision']}"
                if column not in frame:
                    frame[column] = float("nan")
                frame.loc[frame["step"] == e["step"] - 1, column] = value
    path = place(store, "curves", key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: frame.to_parquet(temporary, index=False, compression="zstd"))
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}; the run's checkpoint is kept") from error


def clean(store: Path, key: str) -> None:
    """Remove what writers of this run left half written when they were killed. Only its holder may call this."""
    for kind in ("checkpoints", "curves"):
        for path in place(store, kind, key).parent.glob(f"{key}.*.tmp"):
            path.unlink(missing_ok=True)


def load_curve(store: Path | str, key: str) -> pd.DataFrame:
    """Return the curve of one run; FileNotFoundError when there is none."""
    path = place(Path(store), "curves", key)
    if not path.exists():
        raise FileNotFoundError(f"no curve of run {key} beside {store}")
    return pd.read_parquet(path)


# --- what is known before a run -------------------------------------------------------------------
def describe(spec: RunSpec) -> Row:
    """Return the part of a row that is known before the run: the spec, its costs and its provenance."""
    bits = spec.schedule.bits()
    return {
        "schema": SCHEMA_VERSION,
        "key": spec.key,
        "spec": spec.to_dict(),
        "relative_cost": cost.relative_cost(bits, spec.q_max, spec.q_grad),
        "noise_exposure": cost.noise_exposure(bits, spec.q_max),
        "share_at_q_min": spec.schedule.share_at(spec.schedule.q_min),
        "provenance": {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: _version(name) for name in ("cpt-core", "torch", "numpy", "torchvision")},
            "python": platform.python_version(),
            **commit(),
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> dict[str, Any]:
    """Return the commit of the checkout and whether tracked files differ from it; None without a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True).stdout

    if CHECKOUT is None or not (CHECKOUT / ".git").exists():  # git would look for one in the folders above
        return {"commit": None, "dirty": None}
    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain", "-uno").strip())}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
