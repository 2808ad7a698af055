"""Stores: a file of result rows and, beside it, the curves, checkpoints, locks and logs of its runs.

A store is a file of JSON lines such as ``runs/demo/image.jsonl``; a row holds the spec of a run, its status, metrics,
costs and where it came from. Rows are appended, never edited, and any number of processes may append, also from
several machines on a shared file system. ``image.curves/``, ``image.checkpoints/``, ``image.locks/``,
``image.logs/`` and the data reports in ``image.data/`` stand beside it. Needs no torch.

>>> place(Path("runs/demo/image.jsonl"), "curves", "0123").as_posix()
'runs/demo/image.curves/0123.parquet'
"""

import errno
import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from cpt_core.numerics import NUMERICS
from cpt_extras.files import nan_to_none, sync, sync_open_file, write_atomically
from cpt_lab.data.report import DataReport
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import numerics_of
from cpt_lab.paths import results_dir, runs_dir
from cpt_lab.provenance import source
from cpt_lab.sweeps.result_row import STATUSES as STATUSES
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import (
    SCHEMA_VERSION,
    TORN,
    line_of,
    linked_file,
    look_up,
)
from cpt_lab.sweeps.row_format import find_row as find_row
from cpt_lab.sweeps.row_format import load_rows as load_rows
from cpt_lab.sweeps.row_format import newest as newest

LOCK_SECONDS = 60.0  # longest wait for the lock; appending takes milliseconds
# An incomplete row is left over from an interrupted writer after this time: writing one takes microseconds.
TORN_SECONDS = 0.05
MAX_TRIES = 5  # attempts to append a row that other writers overwrite or cut off
FREE_BYTES = 200 * 2**20  # free disk space that a run needs to start
_ENDINGS = {
    "curves": ".parquet",
    "checkpoints": ".pt",
    "locks": ".lock",
    "logs": ".log",
    "data": ".json",
}


class StoreError(OSError):
    """A store cannot be written; the message says why and what is safe."""


def store_path(scale: str, task: str) -> Path:
    """Return the store that the notebooks and the command line use for a scale and a task."""
    return runs_dir() / scale / f"{task}.jsonl"


def place(store: Path, kind: str, key: str) -> Path:
    """Return the file of one run: ``kind`` is "curves", "checkpoints", "locks", "logs"; a tracker's is a folder."""
    store = linked_file(store)
    return store.parent / f"{store.stem}.{kind}" / f"{key}{_ENDINGS.get(kind, '')}"


# --- who may do what ------------------------------------------------------------------------------
def _lock(store: Path) -> FileLock:
    """Return the lock of a store. It is the operating system's, so it ends with its holder, however that ends."""
    store = linked_file(store)
    return FileLock(store.with_name(store.name + ".lock"), timeout=LOCK_SECONDS)


@contextmanager
def claim(
    store: Path,
    key: str,
    seconds: float = 0.0,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[bool]:
    """Claim a run for a ``with`` block: True for the one process that may do it, False for everybody else meanwhile.

    The claim is a lock of the operating system's on an empty file of the run's. It is free at once when its holder
    ends, also by ``kill -9``; a holder on another machine that hangs keeps it until its process or its machine is
    ended. The file stays, for ever: that it is there says nothing, and to remove one that another process has just
    opened would let two of them hold "the" lock.

    Another holder is waited for as many seconds, until ``should_stop`` says True. StoreError when the file cannot be
    written.
    """
    path = place(store, "locks", key)
    lock = FileLock(path)
    is_mine = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=seconds, poll_interval=0.2, cancel_check=should_stop)
    except Timeout:
        is_mine = False
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; checkpoints are kept"
        ) from error
    try:
        yield is_mine
    finally:
        lock.release()  # of one that is not held it does nothing


# --- rows -----------------------------------------------------------------------------------------
def append_row(store: Path, row: ResultRow) -> ResultRow:
    """Append a row as one line and return the row that counts.

    A finished row of the same run and numerics stays: then nothing is appended, and that row is returned. The torn
    beginning of a row that an interrupted writer left is cut off first, nothing else ever is; a whole row that lacks
    its line's end gets it. The line is read again after it was written: on a file system whose locks do not exclude
    every writer it may be gone, and is appended anew.

    JSON has no number that is not finite: it is stored as null, and a finished row with any is that of a run that
    diverged, see ``settled``.

    Raises:
        StoreError: when it cannot be written; the file is then as it was before.
        ValueError: for a row with the key of another spec, and for a file that ends with what no writer of ours leaves.
    """
    row = settled(row)
    store = linked_file(store)
    check_source(store, row.get("provenance", {}))
    key, line = row["key"], line_of(row)
    try:
        with _lock(store):
            for _ in range(MAX_TRIES):
                stored_row, end, is_terminated = look_up(store, key)
                if (
                    stored_row is not None
                    and stored_row["status"] != "failed"
                    and numerics_of(stored_row) == numerics_of(row)
                ):
                    return stored_row
                start = _write_line(store, end, is_terminated, line)
                if start is None:
                    time.sleep(random.uniform(0.5, 1.5) * TORN_SECONDS)
                elif _read_at(store, start, len(line)) == line:
                    return row
    except OSError as error:
        raise StoreError(
            f"cannot write {store}: {error.strerror or error}; {_describe_checkpoint(store, key)}"
        ) from error
    raise StoreError(
        f"cannot write {store}: other writers overwrote the row {MAX_TRIES} times, so the locks of this file system "
        f"exclude nobody; name a folder on another one with CPT_RUNS_DIR; {_describe_checkpoint(store, key)}"
    )


def _write_line(store: Path, end: int, is_terminated: bool, line: bytes) -> int | None:
    """Append a line and return where it begins; None when another writer is in the middle of one.

    Args:
        store: the file.
        end: bytes of the complete rows in it.
        is_terminated: the last complete row ends with a line feed.
        line: the new line.
    """
    with open(store, "a+b", buffering=0) as file:
        rest = _read_at(store, end)
        if TORN.fullmatch(rest):
            time.sleep(random.uniform(0.5, 1.5) * TORN_SECONDS)
            if _read_at(store, end) != rest:
                return None
            file.truncate(end)
        elif rest:  # rows that came since ``end`` was seen, from a writer that our lock does not exclude
            if not rest.endswith(b"\n"):
                return None
            is_terminated = True
        before = os.fstat(file.fileno()).st_size
        text = line if is_terminated else b"\n" + line
        try:
            _write_all(file, text)
            start = file.tell() - len(line)
            sync_open_file(file.fileno(), store)
        except OSError:
            _take_back(store, before, text)
            raise
    if before == 0:
        sync(store.parent)
    return start


def _read_at(store: Path, start: int, size: int = -1) -> bytes:
    with open(store, "rb") as file:
        file.seek(start)
        return file.read(size)


def _write_all(file: Any, text: bytes) -> None:
    """Write a text to the end of a file: the system may take it in parts, and says why it takes no more."""
    rest = text
    while rest:
        before = os.fstat(file.fileno()).st_size
        count = file.write(rest)
        if not count:
            raise OSError(
                errno.EIO, "the file system took a part of a row, and then nothing"
            )
        rest = rest[count:]
        if rest and file.tell() != before + count:
            raise OSError(errno.EIO, "another program wrote into the middle of a row")


def _take_back(store: Path, before: int, text: bytes) -> None:
    """Remove what is there of a text that could not be written whole; rows that others appended stay."""
    with open(store, "r+b", buffering=0) as file:
        file.seek(before)
        tail = file.read()
        matches = [a == b for a, b in zip(tail, text, strict=False)]
        ours = matches.index(False) if False in matches else len(matches)
        if ours == len(tail):
            file.truncate(before)
        elif tail[ours:].startswith(b"{"):
            # The row of another writer follows; JSON allows blanks before it.
            file.seek(before)
            file.write(b" " * ours)


def settled(row: ResultRow) -> ResultRow:
    """Return a row as it is stored: a number that is not finite is null, and its run diverged unless it failed."""
    not_finite: list[str] = []
    row = nan_to_none(row, not_finite)
    if not_finite and row["status"] == "ok":
        row |= {
            "status": "diverged",
            "error": f"diverged at step {row.get('steps')}, in {', '.join(not_finite[:3])}",
        }
    return row


def _describe_checkpoint(store: Path, key: str) -> str:
    """Return whether a run has a checkpoint, in words: on a full disk it may be missing too."""
    if place(store, "checkpoints", key).exists():
        return "the run's last checkpoint is kept"
    return "the run has no checkpoint"


def check_writable(store: Path) -> None:
    """Check that a store and the folders beside it can be written, before any run starts.

    A store that does not exist is not created: a sweep that is refused leaves no file.

    Raises:
        StoreError: names the reason.
    """
    store = linked_file(store)
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        if store.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file of rows")
        for kind in _ENDINGS:
            folder = place(store, kind, "").parent
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(
                    errno.ENOTDIR,
                    f"{folder.name} beside it is a file, not a folder of {kind}",
                )
        with _lock(store):  # makes a file in that folder
            if store.exists():
                open(store, "ab").close()
                _warn_of_names(store)
    except Timeout as error:
        raise StoreError(
            f"cannot write {store}: {error.lock_file} is held by another process"
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot write {store}: {error.strerror or error}; nothing was started"
        ) from error
    check_free(store)


def _warn_of_names(store: Path) -> None:
    """Warn of a file with several names (hard links): nothing tells which of them other sweeps use."""
    names = store.stat().st_nlink
    if names > 1:
        warnings.warn(
            f"{store} has {names} names (hard links): locks, curves and checkpoints are those of this name alone, so "
            "use one name in all sweeps, or a symbolic link",
            stacklevel=4,
        )


def check_source(store: Path, where: dict[str, Any]) -> None:
    """Refuse to keep rows under ``data/results`` that no commit gives again; other stores take any.

    StoreError names what to do. ``where``: the "commit" and "dirty" of the tree that the rows come from.
    """
    if where.get("dirty") is False or not Path(store).resolve().is_relative_to(
        results_dir().resolve()
    ):
        return
    commit = where.get("commit")
    reason = (
        f"tracked files differ from commit {commit[:7]}"
        if commit
        else "there is no commit to name"
    )
    raise StoreError(
        f"cannot write {store}: {reason}, and rows that are kept must come from one; commit the changes, or take a "
        f"store under {runs_dir()}"
    )


def check_free(store: Path) -> None:
    """Check the free disk space of a store; raise StoreError when there is too little."""
    free = shutil.disk_usage(store.parent).free
    if free < FREE_BYTES:
        raise StoreError(
            f"only {free / 2**20:.0f} MB free beside {store}; a run needs {FREE_BYTES / 2**20:.0f} MB"
        )


def check_same_data(
    store: Path, rows: Iterable[ResultRow], spec: RunSpec, checksum: str
) -> None:
    """Check that stored rows of a recipe were trained on these data; raise ValueError for changed data."""
    recipe = spec.to_dict()["recipe"]
    checksums = [
        row["data_checksum"]
        for row in rows
        if "data_checksum" in row and row["spec"]["recipe"] == recipe
    ]
    if other := sorted(set(checksums) - {checksum}):
        count = len(checksums) - checksums.count(checksum)
        raise ValueError(
            f"the data of {recipe['dataset']!r} have changed: {count} rows in {store} are of checksum "
            f"{' and '.join(other)}, what is there now has {checksum}; put those data back, or keep the new rows "
            "apart: set CPT_RUNS_DIR to another folder, or give the data another name"
        )


# --- data reports ---------------------------------------------------------------------------------
def write_data_report(store: Path, report: DataReport) -> None:
    """Write a data report beside a store, unless its file exists.

    Raises:
        StoreError: when it cannot be written.
    """
    path = place(store, "data", report.digest)
    if path.exists():
        return
    content = json.dumps(report.to_dict(), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, lambda temporary: temporary.write_text(content, encoding="utf-8")
        )
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; checkpoints are kept"
        ) from error


def load_data_report(store: Path | str, digest: str) -> DataReport:
    """Return the data report with the digest of a row; FileNotFoundError when there is none.

    Raises:
        ValueError: when the file is damaged, or is not the report with that digest.
    """
    path = place(Path(store), "data", digest)
    try:
        report = DataReport.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no data report: {error}") from error
    if report.digest != digest:
        raise ValueError(
            f"{path} was changed after it was written: its digest is {report.digest}"
        )
    return report


# --- curves ---------------------------------------------------------------------------------------
def write_curve(store: Path, key: str, history: dict[str, list[Any]]) -> None:
    """Store what happened at every step of a run as Parquet, replacing an older file in one go.

    Columns: ``step`` (0-based), ``loss``, ``bits``, ``lr``, and ``<split>_<metric>_at_<q_max|current>``, which is NaN
    except after the steps that were followed by an evaluation.
    """
    types = {
        "step": "int32",
        "loss": "float32",
        "bits": "int8",
        "lr": "float64",
    }  # the loss is a float32 number
    frame = pd.DataFrame({name: history[name] for name in types}).astype(types)
    for e in history["evaluations"]:
        for split in ("valid", "test"):
            for name, value in e.get(split, {}).items():
                column = f"{split}_{name}_at_{e['precision']}"
                if column not in frame:
                    frame[column] = float("nan")
                frame.loc[frame["step"] == e["step"] - 1, column] = (
                    float("nan") if value is None else value
                )
    path = place(store, "curves", key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path,
            lambda temporary: frame.to_parquet(
                temporary, index=False, compression="zstd"
            ),
        )
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; {_describe_checkpoint(store, key)}"
        ) from error


def clean(store: Path, key: str) -> None:
    """Remove what writers of this run left half written when they were killed. Only its holder may call this."""
    for kind in ("checkpoints", "curves"):
        for path in place(store, kind, key).parent.glob(f"{key}.*.tmp"):
            path.unlink(missing_ok=True)


def remove_checkpoints(store: Path, keys: Collection[str]) -> None:
    """Remove all checkpoints of finished runs: the newest, the one before, and those that were set aside."""
    for path in place(store, "checkpoints", "").parent.glob("*"):
        if path.name.partition(".")[0] in keys:
            path.unlink(missing_ok=True)


def load_curve(store: Path | str, key: str) -> pd.DataFrame:
    """Return the curve of one run; FileNotFoundError when there is none."""
    return pd.read_parquet(place(Path(store), "curves", key))


# --- what is known before a run -------------------------------------------------------------------
def describe(spec: RunSpec) -> ResultRow:
    """Return the part of a row that is known before the run: the spec, its costs and where it comes from."""
    noise_exposure = None
    if spec.recipe.ladder == "affine":
        noise_exposure = spec.schedule.noise_exposure(spec.q_max)

    return {
        "schema": SCHEMA_VERSION,
        "key": spec.key,
        "numerics": NUMERICS,
        "spec": spec.to_dict(),
        "relative_cost": spec.relative_cost,
        "noise_exposure": noise_exposure,
        "share_at_q_min": spec.schedule.share_at(spec.schedule.q_min),
        "provenance": source(),
    }
