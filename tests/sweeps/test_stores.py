"""Writing of stores: appended rows, concurrent writers, links, claims, curves and data reports."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock
from helpers import named_row, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_core.numerics import NUMERICS
from cpt_extras import files
from cpt_lab.data.report import DataReport
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.row_format import line_of
from cpt_lab.sweeps.stores import StoreError

PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
A, B = (named_row(name)["key"] for name in "ab")
FIRST, OTHER, THIRD, MINE = map(named_row, ("first", "other", "third", "mine"))


@pytest.fixture
def store(tmp_path):
    return tmp_path / "rows.jsonl"


def names_in(store):
    return [row["spec"]["name"] for row in stores.load_rows(store)]


def refuse_with(number):
    """Return a function that raises the system's error of a number."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


# --- appended rows --------------------------------------------------------------------------------


def test_append_row_keeps_finished_row(store):
    rows = [
        named_row("a", 1, "failed"),
        named_row("b"),
        named_row("a", 2, "failed"),
        named_row("a", 3),
    ]
    for row in rows:
        assert stores.append_row(store, row) == row
    assert stores.append_row(store, named_row("a", 4)) == rows[3]
    assert stores.append_row(store, named_row("b", 5, "failed")) == rows[1]
    assert stores.load_rows(store) == [rows[3], rows[1]]
    assert len(store.read_text().splitlines()) == 4
    assert stores.find_row(store, A) == rows[3]
    assert stores.find_row(store, "none") is None
    assert stores.load_rows(store.with_name("none.jsonl")) == []
    # A row of other numerics is no result of these.
    newer = named_row("a", 6, numerics=NUMERICS)
    assert stores.append_row(store, newer) == newer


@pytest.mark.parametrize(
    ("provenance", "reason"),
    [
        (
            {"commit": "1234567890", "dirty": True},
            "tracked files differ from commit 1234567, and rows",
        ),
        ({"commit": None, "dirty": None}, "there is no commit to name, and rows"),
        ({}, "there is no commit to name"),
    ],
)
def test_append_row_rejects_irreproducible_results(
    provenance, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(stores, "results_dir", lambda: tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "runs").mkdir()
    row = named_row("a", provenance=provenance)
    message = f"x.jsonl: {reason}.*; commit the changes, or take a store under"
    for place in ("results/x.jsonl", "runs/../results/x.jsonl"):
        refused(message, stores.append_row, tmp_path / place, row, error=StoreError)
    assert not list((tmp_path / "results").iterdir())
    assert stores.append_row(tmp_path / "x.jsonl", row) == row
    clean = named_row("a", provenance={"commit": "0" * 40, "dirty": False})
    assert stores.append_row(tmp_path / "results" / "x.jsonl", clean) == clean


def finished_row(number):
    """Return a finished row with numbers from a function of their names."""
    point = {"step": 4, "precision": "q_max", "bits": 8}
    names = ("relative_cost", "noise_exposure", "seconds", "peak_memory")
    metrics = [
        {"name": "loss", "split": split, **point, "value": number(f"metric {split}")}
        for split in ("valid", "test")
    ]
    evaluations = [
        {**point, "test": {"loss": number(f"evaluation {i}")}} for i in range(2)
    ]
    return named_row(
        "a",
        **{name: number(name) for name in names},
        steps=4,
        metrics=metrics,
        bitops={name: number(name) for name in ("paper", "per_op")},
        loss=[number(f"loss {i}") for i in range(3)],
        evaluations=evaluations,
    )


NUMBER_NAMES: list[str] = []
finished_row(NUMBER_NAMES.append)
NOT_FINITE = st.sampled_from([float(x) for x in ("nan", "inf", "-inf")])


@pytest.mark.parametrize("status", stores.STATUSES)
@given(bad=st.dictionaries(st.sampled_from(NUMBER_NAMES), NOT_FINITE))
@settings(max_examples=20)
def test_append_row_stores_non_finite_as_null(status, bad):
    """Store NaN and infinity as null, and mark the run as diverged."""
    row = finished_row(lambda name: bad.get(name, 0.5)) | {"status": status}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        stored_row = stores.append_row(store, row)
        assert [stored_row] == stores.load_rows(store)
        stored = json.loads(store.read_text(), parse_constant=pytest.fail)
    assert len(stored.pop("digest")) == 32
    has_diverged = bool(bad) and status == "ok"
    assert stored["status"] == ("diverged" if has_diverged else status)
    error = stored.pop("error", "")
    assert error.startswith("diverged at step 4, in ") == has_diverged
    expected = json.loads(json.dumps(row), parse_constant=lambda _: None)
    assert stored | {"status": status} == expected


# --- what the system says -------------------------------------------------------------------------


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs a limit on the size of files"
)
def test_append_row_restores_store_on_full_disk(store):
    """Simulate a full disk by a limit on file size: the kernel writes part of a row."""
    stores.append_row(store, FIRST)
    before, limits = store.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    large = named_row("b", "x" * 5000)
    checkpoint = stores.place(store, "checkpoints", B)
    for text in ("the run has no checkpoint", "the run's last checkpoint is kept"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        try:
            message = f"cannot write .*; {text}"
            refused(message, stores.append_row, store, large, error=StoreError)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.read_bytes() == before
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()


class ShortWrites:
    """File that takes a few bytes at a time, and fails after the first ones if an error number is given."""

    def __init__(self, file, most, number=None):
        self.file, self.most, self.number = file, most, number

    def write(self, text):
        if self.number is not None and not self.most:
            refuse_with(self.number)()
        count = self.file.write(text[: self.most])
        if self.number is not None:
            self.most = 0
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_append_row_continues_short_writes(tmp_path):
    with open(tmp_path / "file", "a+b", buffering=0) as file:
        stores._write_all(ShortWrites(file, 7), b"a row of some length\n")
        assert (tmp_path / "file").read_bytes() == b"a row of some length\n"
        failures = {"took a part of a row, and then nothing": ShortWrites(file, 0)}
        for number in (errno.EIO, errno.EDQUOT, errno.EFBIG):
            failures[os.strerror(number)] = ShortWrites(file, 7, number)
        for message, short in failures.items():
            refused(message, stores._write_all, short, b"a longer row\n", error=OSError)


def test_append_row_syncs_file_and_folder(store, monkeypatch):
    synced, fsync = [], os.fsync

    def note(number):
        synced.append((os.fstat(number).st_ino, store.stat().st_size))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    stores.append_row(store, FIRST)
    size = store.stat().st_size
    inodes = (store.stat().st_ino, store.parent.stat().st_ino)  # then its name
    assert synced == [(inode, size) for inode in inodes]
    stores.append_row(store, OTHER)
    assert synced[2:] == [(store.stat().st_ino, store.stat().st_size)]


@pytest.mark.parametrize("number", sorted(files.FSYNC_UNSUPPORTED))
def test_append_row_warns_once_without_fsync(number, store, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse_with(number))
    monkeypatch.setattr(files, "_warned", False)
    message = f"does not say when the disk has.*{os.strerror(number)}.*power cut"
    with pytest.warns(UserWarning, match=message) as warned:
        stores.append_row(store, FIRST)
    assert len(warned) == 1
    with warnings.catch_warnings(action="error"):
        stores.append_row(store, OTHER)
        files.write_text(store.with_name("text"), "also other files")
    assert names_in(store) == ["first", "other"]


def test_append_row_fails_if_fsync_fails(store, monkeypatch):
    stores.append_row(store, FIRST)
    monkeypatch.setattr(os, "fsync", refuse_with(errno.EIO))
    refused("Input/output error", stores.append_row, store, MINE, error=StoreError)
    assert names_in(store) == ["first"]


# --- check_writable -------------------------------------------------------------------------------


def test_check_writable_names_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    kinds = ("curves", "checkpoints", "locks", "logs")
    for kind in kinds:
        (tmp_path / f"taken {kind}.{kind}").touch()
    nowhere = Path("/proc/nowhere/rows.jsonl")  # read-only for everybody, root too
    reasons = {
        tmp_path
        / "file"
        / "rows.jsonl": r"rows\.jsonl: (Not a directory|File exists); nothing was started",
        tmp_path: "it is a folder, not a file of rows",
        nowhere: "cannot write /proc/",
    }
    for kind in kinds:
        reason = f"{kind} beside it is a file, not a folder of {kind}; nothing"
        reasons[tmp_path / f"taken {kind}.jsonl"] = reason
    for path, reason in reasons.items():
        refused(reason, stores.check_writable, path, error=StoreError)
    with (
        pytest.raises(StoreError, match="cannot write /proc/nowhere"),
        stores.claim(nowhere, "a"),
    ):
        pass
    monkeypatch.setattr(stores, "FREE_BYTES", 2**60)
    message = r"only [\d]+ MB free beside .*; a run needs"
    refused(message, stores.check_writable, tmp_path / "rows.jsonl", error=StoreError)


def test_store_reports_held_lock(store, monkeypatch):
    monkeypatch.setattr(stores, "LOCK_SECONDS", 0.1)
    with FileLock(f"{store}.lock"):
        message = r"rows\.jsonl\.lock is held by another process"
        refused(message, stores.check_writable, store, error=StoreError)
        refused("cannot write", stores.append_row, store, FIRST, error=StoreError)


def test_store_with_hard_links_warns(store):
    stores.append_row(store, FIRST)
    with warnings.catch_warnings(action="error"):
        stores.check_writable(store)
    os.link(store, store.with_name("other.jsonl"))
    message = r"rows\.jsonl has 2 names \(hard links\): .*use one name"
    with pytest.warns(UserWarning, match=message):
        stores.check_writable(store)


@pytest.mark.parametrize("kind", ["absolute", "twice", "relative", "to no file yet"])
def test_store_link_shares_locks_curves_and_checkpoints(kind, tmp_path):
    store, link = tmp_path / "there" / "rows.jsonl", tmp_path / "here" / "image.jsonl"
    store.parent.mkdir()
    link.parent.mkdir()
    if kind != "to no file yet":
        stores.append_row(store, FIRST)
    target = "../there/rows.jsonl" if kind == "relative" else store
    if kind == "twice":
        target = tmp_path / "between"
        target.symlink_to(store)
    link.symlink_to(target)
    stores.check_writable(link)
    for name in ("curves", "checkpoints", "locks", "logs"):
        assert stores.place(link, name, A) == stores.place(store, name, A)
    for first, second in ((store, link), (link, store)):
        with stores.claim(first, B) as is_mine, stores.claim(second, B) as is_second:
            assert (is_mine, is_second) == (True, False)
    stores.append_row(link, MINE)
    assert stores.find_row(store, MINE["key"]) == MINE
    assert link.is_symlink()
    assert sorted(path.name for path in link.parent.iterdir()) == ["image.jsonl"]


# --- writers that the lock does not exclude -------------------------------------------------------


def append_bytes(store, text):
    with open(store, "ab") as file:
        file.write(text)


@pytest.mark.parametrize(
    "parts",
    [
        [line_of(OTHER)],
        [line_of(OTHER) + line_of(THIRD)],
        [line_of(named_row("other", "x" * 20_000))],
        [line_of(OTHER) + line_of(THIRD)[:-20], line_of(THIRD)[-20:]],
    ],
    ids=["a row", "two rows", "a long row", "a row and a part"],
)
def test_append_row_keeps_rows_of_concurrent_writers(parts, store, monkeypatch):
    """Keep what another writer appends between the look at the store and the write."""
    names = ["first", "other", "third"][: 1 + b"".join(parts).count(b"\n")]
    stores.append_row(store, FIRST)
    look_up = stores.look_up

    def look_before_the_other(path, key):
        result = look_up(path, key)
        append_bytes(path, parts.pop(0) if parts else b"")
        return result

    monkeypatch.setattr(stores, "look_up", look_before_the_other)
    assert stores.append_row(store, MINE) == MINE
    assert names_in(store) == [*names, "mine"]


def test_append_row_keeps_row_being_written(store, monkeypatch):
    """Wait while the first half of a row is at the end of the file."""
    stores.append_row(store, FIRST)
    rest = [line_of(OTHER)[60:]]
    append_bytes(store, line_of(OTHER)[:60])

    def write_rest(_):
        append_bytes(store, rest.pop() if rest else b"")

    monkeypatch.setattr(stores.time, "sleep", write_rest)
    stores.append_row(store, MINE)
    assert names_in(store) == ["first", "other", "mine"]


def test_append_row_keeps_row_written_meanwhile(store, monkeypatch):
    """Keep a result that arrives while the writer waits for the lock."""
    lock = stores._lock

    def lock_after_the_other(path):
        monkeypatch.setattr(stores, "_lock", lock)
        stores.append_row(store, named_row("a", 1))
        return lock(path)

    monkeypatch.setattr(stores, "_lock", lock_after_the_other)
    assert stores.append_row(store, named_row("a", 2)) == named_row("a", 1)
    assert stores.load_rows(store) == [named_row("a", 1)]


@pytest.mark.parametrize("times", [1, 3, 99])
def test_append_row_rewrites_row_that_was_truncated(times, store, monkeypatch):
    write, names = stores._write_line, ["first"]
    stores.append_row(store, FIRST)

    def write_and_lose(path, end, *rest):
        start = write(path, end, *rest)
        if len(names) <= times:  # another writer had seen the end before our row came
            names.append(f"other {len(names)}")
            os.truncate(path, end)
            append_bytes(path, line_of(named_row(names[-1])))
        return start

    monkeypatch.setattr(stores, "_write_line", write_and_lose)
    if times == 99:
        message = "locks of this file system exclude nobody; .*CPT_RUNS_DIR"
        refused(message, stores.append_row, store, MINE, error=StoreError)
        assert len(names) == 1 + stores.MAX_TRIES
    else:
        stores.append_row(store, MINE)
        assert names_in(store) == [*names, "mine"]


def test_append_row_failing_keeps_concurrent_rows(store, monkeypatch):
    """Fail after half a row, when a second writer has appended."""
    stores.append_row(store, FIRST)

    def write_half(file, text):
        os.write(file.fileno(), text[: len(text) // 2])
        append_bytes(store, line_of(OTHER))
        refuse_with(errno.EIO)()

    monkeypatch.setattr(stores, "_write_all", write_half)
    refused("Input/output error", stores.append_row, store, MINE, error=StoreError)
    monkeypatch.undo()
    assert names_in(store) == ["first", "other"]
    stores.append_row(store, MINE)
    assert names_in(store) == ["first", "other", "mine"]


def write_many(store, worker):
    for i in range(20):
        stores.append_row(store, named_row(f"{worker}-{i}", "x" * 2000))
        if i % 5 == 0:
            stores.load_rows(store)  # a reader never sees a broken line


@pytest.mark.slow
def test_append_row_with_many_writers(store):
    workers = [PROCESSES.Process(target=write_many, args=(store, w)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(store.read_text().splitlines()) == 80
    assert set(names_in(store)) == {f"{w}-{i}" for w in range(4) for i in range(20)}


# --- claims ---------------------------------------------------------------------------------------


def test_claim_is_exclusive_per_run(tmp_path):
    """Let one process claim a run at a time, and ignore unlocked lock files."""
    store = tmp_path / "folder" / "rows.jsonl"
    for _ in range(2):
        with (
            stores.claim(store, "a") as is_mine,
            stores.claim(store, "a") as is_second,
            stores.claim(store, "b") as is_other,
        ):
            assert (is_mine, is_second, is_other) == (True, False, True)
            with stores.claim(store, "a") as is_third:
                assert not is_third  # the second one's end gave nothing away
        folder = stores.place(store, "locks", "a").parent
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert sizes == {"a.lock": 0, "b.lock": 0}
    with pytest.raises(KeyError), stores.claim(store, "a"):
        raise KeyError  # a run that fails gives it back too
    with stores.claim(store, "a") as is_mine:
        assert is_mine


@pytest.mark.slow
def test_claim_waits_until_free_or_cancelled(store):
    free, claimed, asked = threading.Event(), threading.Event(), []

    def hold():
        with stores.claim(store, "a"):
            claimed.set()
            free.wait()

    def should_stop():
        asked.append(True)
        return len(asked) == 3

    thread = threading.Thread(target=hold)
    thread.start()
    claimed.wait()
    with stores.claim(store, "a", 60, should_stop) as is_mine:
        assert (is_mine, len(asked)) == (False, 3)
    with stores.claim(store, "a", 0.1) as is_mine:
        assert not is_mine
    threading.Timer(0.3, free.set).start()
    with stores.claim(store, "a", 60) as is_mine:
        assert is_mine
    thread.join()


def hold_and_sleep(store, ready):
    with stores.claim(store, "a"):
        child = os.fork()  # as the processes that read images are made
        if child == 0:
            time.sleep(60)
            os._exit(0)
        ready.put(child)
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_claim_ends_when_holder_is_killed(store):
    """Release the claim of a killed process although its children live."""
    ready = PROCESSES.Queue()
    process = PROCESSES.Process(target=hold_and_sleep, args=(store, ready))
    process.start()
    child = ready.get()
    with stores.claim(store, "a") as is_mine:
        assert not is_mine
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    os.kill(child, 0)  # still there
    with stores.claim(store, "a") as is_mine:
        assert is_mine
    os.kill(child, signal.SIGKILL)


def compete(store, log, stop):
    while not stop.is_set():
        with stores.claim(store, "a") as is_mine:
            if is_mine:
                append_bytes(log, f"{os.getpid()} in\n".encode())
                time.sleep(0.005)
                append_bytes(log, f"{os.getpid()} out\n".encode())


@pytest.mark.slow
def test_claim_excludes_competing_processes(store):
    stop, log = PROCESSES.Event(), store.with_name("log")
    log.touch()
    workers = [
        PROCESSES.Process(target=compete, args=(store, log, stop)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and log.read_bytes().count(b"\n") < 60:
        time.sleep(0.05)
    stop.set()
    for worker in workers:
        worker.join()
    events = [line.split() for line in log.read_text().splitlines()]
    assert len(events) >= 60
    for entered, left in zip(events[::2], events[1::2], strict=True):
        assert (entered[1], left[1]) == ("in", "out")
        assert entered[0] == left[0]


# --- curves and data reports ----------------------------------------------------------------------


def test_load_curve_has_every_step_and_evaluation(store):
    point = {"precision": "q_max", "bits": 8}
    accuracies = [({"accuracy": 0.4}, {"accuracy": 0.3}), ({"accuracy": None},) * 2]
    history = {
        "step": [0, 1, 2],
        "loss": [0.5, 0.25, float("nan")],
        "bits": [3, 4, 8],
        "lr": [0.1, 0.1, 0.01],
        "evaluations": [
            {"step": step, **point, "valid": valid, "test": test}
            for step, (valid, test) in zip((2, 3), accuracies, strict=True)
        ],
    }
    stores.write_curve(store, "abc", history)
    curve = stores.load_curve(store, "abc")
    assert curve.step.tolist() == [0, 1, 2]
    assert curve.bits.tolist() == [3, 4, 8]
    assert curve.loss.iloc[:2].tolist() == [0.5, 0.25]
    # After the second step.
    assert curve.test_accuracy_at_q_max.dropna().to_dict() == {1: 0.3}
    assert curve.valid_accuracy_at_q_max.dropna().to_dict() == {1: 0.4}
    (file,) = store.with_name("rows.curves").iterdir()
    assert file.name == "abc.parquet"
    pd.testing.assert_frame_equal(curve, pd.read_parquet(file))
    refused("xyz", stores.load_curve, store, "xyz", error=FileNotFoundError)


def test_curves_and_data_reports_name_unwritable_folder(tmp_path):
    store = tmp_path / "full.jsonl"
    for kind in ("curves", "data"):
        (tmp_path / f"full.{kind}").write_text("a file where the folder goes")
    history = {name: [] for name in ("step", "loss", "bits", "lr", "evaluations")}
    message = r"cannot write .*abc\.parquet: .*exists; the run has no checkpoint"
    refused(message, stores.write_curve, store, "abc", history, error=StoreError)
    report = DataReport("x/", [("read", "ten files")])
    message = r"cannot write .*full\.data"
    refused(message, stores.write_data_report, store, report, error=StoreError)


def test_data_report_is_written_once_and_checked(store):
    report = DataReport("mine/", [("read", "ten files")])
    for _ in range(2):
        stores.write_data_report(store, report)
        path = stores.place(store, "data", report.digest)
        assert path == store.with_name("rows.data") / f"{report.digest}.json"
        os.utime(path, ns=(1, 1))
    stores.write_data_report(store, report)
    assert path.stat().st_mtime_ns == 1
    assert stores.load_data_report(store, report.digest).dataset == "mine/"

    text = path.read_text()
    path.write_text(text.replace("mine/", "yours/"))  # the name is no fact
    stores.load_data_report(store, report.digest)
    damages = {
        text.replace("ten", "two"): "was changed after it was written",
        "[]": "is no data report",
    }
    for damaged, message in damages.items():
        path.write_text(damaged)
        refused(message, stores.load_data_report, store, report.digest)
