"""Stores: files of rows, and their folders of curves, checkpoints, locks and logs."""

import itertools
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
from helpers import refused, write_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec, key_of
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.row_format import (
    LineChecker,
    NotIntactWarning,
    canonical,
    digest,
    line_of,
)
from cpt_lab.sweeps.stores import StoreError

PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def named(name):
    """Return the key of the run of this name."""
    return key_of({"name": name})


def row(name, value=1, status="ok"):
    return {
        "schema": 1,
        "key": named(name),
        "value": value,
        "status": status,
        "spec": {"name": name},
    }


def test_store_newest_row_wins_unless_failed(tmp_path):
    store = tmp_path / "rows.jsonl"
    for r in (row("a", 1, "failed"), row("b"), row("a", 2, "failed"), row("a", 3)):
        assert stores.append_row(store, r) == r
    assert stores.append_row(store, row("a", 4)) == row(
        "a", 3
    )  # finished already: nothing is appended
    assert stores.append_row(store, row("b", 5, "failed")) == row("b")
    assert stores.load_rows(store) == [row("a", 3), row("b")]
    assert len(store.read_text().splitlines()) == 4
    assert stores.find_row(store, named("a")) == row("a", 3)
    assert stores.find_row(store, named("c")) is None
    assert stores.load_rows(tmp_path / "none.jsonl") == []
    assert list(stores.newest([row("a"), row("a", 2, "failed")]).values()) == [row("a")]


def from_tree(started, dirty=False, status="ok", value=1):
    return {
        **row("a", value, status),
        "provenance": {"started": started, "commit": "0" * 40, "dirty": dirty},
    }


# each counts before the next: finished, then clean, then late; a tree without a commit is not clean
RANKED = [
    from_tree("2026-11-22T10:00:00+00:00"),
    from_tree("2026-11-21T10:00:00+00:00", status="diverged"),
    from_tree("2026-11-21T09:00:00+00:00"),
    from_tree("2026-11-23T10:00:00+00:00", dirty=True),
    from_tree("2026-11-23T09:00:00+00:00", dirty=None),
    from_tree("2026-11-24T10:00:00+00:00", status="failed"),
    from_tree("2026-11-24T09:00:00+00:00", status="failed"),
    from_tree("2026-11-25T10:00:00+00:00", dirty=True, status="failed"),
    row("a", status="failed"),
]


@pytest.mark.filterwarnings("ignore:rows are in doubt")
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(RANKED, 2)))
def test_store_winner_is_independent_of_order(first, second, tmp_path):
    assert list(stores.newest([first, second]).values()) == [first]
    assert list(stores.newest([second, first]).values()) == [first]
    store = write_rows(tmp_path / "rows.jsonl", first, second)
    assert stores.load_rows(store) == [first]
    assert stores.find_row(store, named("a")) == first


def test_store_ties_are_broken_by_content():
    one, other = (
        {**from_tree("2026-11-22T10:00:00+00:00", value=v), "store": s}
        for v, s in ((1, "z"), (2, "a"))
    )
    assert (
        stores.newest([one, other])
        == stores.newest([other, one])
        == {named("a"): other}
    )


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (
            {"commit": "1234567890", "dirty": True},
            "tracked files differ from commit 1234567, and rows",
        ),
        ({"commit": None, "dirty": None}, "there is no commit to name, and rows"),
        ({}, "there is no commit to name"),
    ],
)
def test_store_rejects_irreproducible_rows_among_results(
    where, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr(stores, "results_dir", lambda: tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "runs").mkdir()
    kept = {**row("a"), "provenance": where}
    for place in ("results/x.jsonl", "runs/../results/x.jsonl"):
        with pytest.raises(
            StoreError,
            match=f"x.jsonl: {reason}.*; commit the changes, or take a store under",
        ):
            stores.append_row(tmp_path / place, kept)
    assert not list((tmp_path / "results").iterdir())
    assert stores.append_row(tmp_path / "x.jsonl", kept) == kept
    clean = from_tree("2026-11-22T10:00:00+00:00")
    assert stores.append_row(tmp_path / "results" / "x.jsonl", clean) == clean


LINE = line_of(row("b", "a \\ b"))


@pytest.mark.parametrize("zeros", [0, 3])
@pytest.mark.parametrize(
    "torn",
    [
        *(LINE[:n] for n in (0, 1, 2, 5, 8, 9, 10, 11, 50, len(LINE) - 2)),
        b'{"schema": 1, "k',
    ],
)
def test_store_truncated_last_line_is_removed(torn, zeros, tmp_path):
    """Also remove zeros that a power cut may leave at the end of a file."""
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("a"))
    with open(store, "ab") as f:
        f.write(torn + bytes(zeros))
    assert stores.load_rows(store) == [row("a")]
    stores.append_row(store, row("c"))
    assert stores.load_rows(store) == [row("a"), row("c")]


@pytest.mark.parametrize("after", [b"", b"\0\0", b" ", b"\r"])
def test_store_accepts_row_without_line_end(after, tmp_path):
    """Read rows after an editor or a merge removed the final newline."""
    store = tmp_path / "rows.jsonl"
    store.write_bytes(line_of(row("a")) + LINE.rstrip() + after)
    assert stores.find_row(store, named("b")) == row("b", "a \\ b")
    assert stores.load_rows(store) == [row("a"), row("b", "a \\ b")]
    assert stores.append_row(store, row("b")) == row("b", "a \\ b")
    stores.append_row(store, row("c"))
    assert stores.load_rows(store) == [row("a"), row("b", "a \\ b"), row("c")]


PIECES = st.sampled_from(
    [
        *(line_of(row(name)).rstrip() for name in "ab"),
        LINE[:30],
        LINE[30:],
        b"\r",
        b"\n",
        b"\r\n",
        b"\0",
        b" ",
        b"{",
        b'{"',
        b"{}",
        b"my notes",
        b"[1]",
        "\u00fc".encode(),
        b"\xff\xfe",
    ]
)


@given(st.lists(PIECES, max_size=8), st.sampled_from(["a", "b", "c"]))
@example([LINE.rstrip(), b"\r", LINE.rstrip(), b"\r"], "c")
@example([LINE.rstrip(), LINE.rstrip()], "c")
@example([LINE[:30], line_of(row("b")).rstrip()], "c")
@settings(max_examples=200, deadline=None)
def test_append_row_removes_only_truncated_row_start(pieces, name):
    """Either add no row, or change nothing but a truncated row at the end."""
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore", category=NotIntactWarning),
    ):
        store, before, mine = (
            Path(folder) / "rows.jsonl",
            b"".join(pieces),
            row(name, 2),
        )
        store.write_bytes(before)
        try:
            held = stores.append_row(store, mine)
        except ValueError:
            held = None
        after = store.read_bytes()
    if held != mine:  # refused, or there was one
        assert after == before
        return
    assert after.endswith(line_of(mine))
    kept = after.removesuffix(line_of(mine))
    kept = kept if before.startswith(kept) else kept.removesuffix(b"\n")
    assert before.startswith(kept)
    lost = before.removeprefix(kept).strip(b"\0\n")
    assert not lost or lost.startswith(b"{")
    assert not [one for one in ("a", "b") if line_of(row(one)).rstrip() in lost]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense\n", "line 1 is no JSON: 'nonsense'"),
        (b'{"schema": 99, "key": "a"}\n', "line 1: schema 99 is not 1"),
        (b"[1, 2]\n", "line 1: schema None is not 1"),
        (b'{"schema": 1, "key": "a"}\n', "line 1 has no spec, status"),
        (b"\n", "line 1 is no JSON"),
        (b"\xff\xfe\n", "line 1 is no JSON"),
        (b"[" * 100_000 + b"\n", "line 1 is no JSON"),
        (b'{"schema": true, "key": "a"}\n', "line 1: schema True is not 1"),
        (b'{"schema": 1, "key": "a", "x": NaN}\n', "line 1 is no JSON"),
        (b"{}", "line 1: schema None is not 1"),
        (
            b'{"a": 1}\r{"a": 2}\r',
            "which is no row and no beginning of one: a line of a store is one row, ended by a",
        ),
        ('{"a": "\u00fc'.encode(), "no row and no beginning of one"),
        (b"{my notes", "no row and no beginning of one"),
        (b'{"schema": 1, "k\n{"schema": 1}\n', "line 1 is no JSON"),
    ],
)
def test_load_rows_names_broken_lines_and_schemas(content, message, tmp_path):
    store = tmp_path / "rows.jsonl"
    store.write_bytes(content)
    refused(rf"rows\.jsonl.*{message}", stores.load_rows, store)
    assert store.read_bytes() == content


def results(number):
    """Return a finished row with numbers from a function of their names."""
    point = {"step": 4, "precision": "q_max", "bits": 8}
    numbers = {
        name: number(name)
        for name in ("relative_cost", "noise_exposure", "seconds", "peak_memory")
    }
    return (
        row("a")
        | numbers
        | {
            "steps": 4,
            "metrics": [
                {"name": "loss", "split": s, **point, "value": number(f"metric {s}")}
                for s in ("valid", "test")
            ],
            "bitops": {name: number(name) for name in ("paper", "per_op")},
            "loss": [number(f"loss {i}") for i in range(3)],
            "evaluations": [
                {**point, "test": {"loss": number(f"evaluation {i}")}} for i in range(2)
            ],
        }
    )


NUMBERS: list[str] = []
results(NUMBERS.append)  # their names


@pytest.mark.parametrize("status", stores.STATUSES)
@settings(max_examples=20, deadline=None)
@given(
    bad=st.dictionaries(
        st.sampled_from(NUMBERS),
        st.sampled_from([float(x) for x in ("nan", "inf", "-inf")]),
    )
)
def test_append_row_stores_non_finite_as_null(status, bad):
    """Store NaN and infinity as null, and mark the run as diverged."""
    given_row = results(lambda name: bad.get(name, 0.5)) | {"status": status}
    plain = json.dumps(given_row)  # which writes what is no JSON
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        kept = stores.append_row(store, given_row)
        assert [kept] == stores.load_rows(store)
        stored = json.loads(store.read_text(), parse_constant=pytest.fail)
    assert len(stored.pop("digest")) == 32
    seen_now = bool(bad) and status == "ok"
    assert stored["status"] == ("diverged" if seen_now else status)
    assert stored.get("error", "").startswith("diverged at step 4, in ") == seen_now
    expected = json.loads(plain, parse_constant=lambda _: None)
    assert {**stored, "status": status, "error": ""} == {**expected, "error": ""}


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs a limit on the size of files"
)
def test_append_row_restores_store_on_full_disk(tmp_path):
    """Simulate a full disk by a limit on file size: the kernel writes part of a row."""
    store, checkpoint = (
        tmp_path / "rows.jsonl",
        stores.place(tmp_path / "rows.jsonl", "checkpoints", named("b")),
    )
    stores.append_row(store, row("a"))
    before, limits = store.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    for left in ("the run has no checkpoint", "the run's last checkpoint is kept"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        try:
            refused(
                f"cannot write .*; {left}",
                stores.append_row,
                store,
                row("b", "x" * 5000),
                error=StoreError,
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.read_bytes() == before
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()


def test_store_reports_held_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "LOCK_SECONDS", 0.1)
    with FileLock(tmp_path / "rows.jsonl.lock"):
        with pytest.raises(
            StoreError, match=r"rows\.jsonl\.lock is held by another process"
        ):
            stores.check_writable(tmp_path / "rows.jsonl")
        refused(
            "cannot write",
            stores.append_row,
            tmp_path / "rows.jsonl",
            row("a"),
            error=StoreError,
        )


def test_check_writable_rejects_unwritable_store(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        StoreError,
        match=r"rows\.jsonl: (Not a directory|File exists); nothing was started",
    ):
        stores.check_writable(tmp_path / "file" / "rows.jsonl")
    refused(
        "it is a folder, not a file of rows",
        stores.check_writable,
        tmp_path,
        error=StoreError,
    )
    for kind in ("curves", "checkpoints", "locks", "logs"):
        (tmp_path / f"taken {kind}.{kind}").touch()
        with pytest.raises(
            StoreError,
            match=f"{kind} beside it is a file, not a folder of {kind}; nothing",
        ):
            stores.check_writable(tmp_path / f"taken {kind}.jsonl")
    nowhere = Path("/proc/nowhere/rows.jsonl")  # read-only for everybody, root too
    refused("cannot write /proc/", stores.check_writable, nowhere, error=StoreError)
    with (
        pytest.raises(StoreError, match="cannot write /proc/nowhere"),
        stores.claim(nowhere, "a"),
    ):
        pass
    monkeypatch.setattr(stores, "FREE_BYTES", 2**60)
    with pytest.raises(StoreError, match=r"only [\d]+ MB free beside .*; a run needs"):
        stores.check_writable(tmp_path / "rows.jsonl")


ROWS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(["ok", "failed"]), st.integers(0, 60)
    ),
    max_size=8,
)


@given(ROWS, st.booleans())
@settings(max_examples=50)
def test_find_row_equals_load_rows(rows, torn):
    rows = [row(name, "x" * n, status) for name, status, n in rows]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        store.write_text(
            "".join(f"{json.dumps(r)}\n" for r in rows) + ('{"schema"' if torn else "")
        )
        for key in map(named, "abc"):
            assert stores.find_row(store, key) == stores.newest(rows).get(key)


def test_append_row_keeps_row_written_meanwhile(tmp_path, monkeypatch):
    """Keep a result that arrives while the writer waits for the lock."""
    store, lock = tmp_path / "rows.jsonl", stores._lock

    def first_the_other(path):
        monkeypatch.setattr(stores, "_lock", lock)
        stores.append_row(store, row("a", 1))
        return lock(path)

    monkeypatch.setattr(stores, "_lock", first_the_other)
    assert stores.append_row(store, row("a", 2)) == row("a", 1)
    assert stores.load_rows(store) == [row("a", 1)]


def test_append_row_syncs_file_and_folder(tmp_path, monkeypatch):
    store, synced, fsync = tmp_path / "rows.jsonl", [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda n: synced.append((os.fstat(n).st_ino, store.stat().st_size)) or fsync(n),
    )
    stores.append_row(store, row("a"))
    size = store.stat().st_size
    assert synced == [
        (store.stat().st_ino, size),
        (tmp_path.stat().st_ino, size),
    ]  # the file, then its name
    stores.append_row(store, row("b"))
    assert synced[2:] == [(store.stat().st_ino, store.stat().st_size)]


# --- claims ---------------------------------------------------------------------------------------


def test_claim_is_exclusive_per_run(tmp_path):
    """Let one process claim a run at a time, and ignore unlocked lock files."""
    store = tmp_path / "folder" / "rows.jsonl"
    for _ in range(2):
        with (
            stores.claim(store, "a") as mine,
            stores.claim(store, "a") as second,
            stores.claim(store, "b") as other,
        ):
            assert (mine, second, other) == (True, False, True)
            with stores.claim(store, "a") as third:
                assert not third  # the second one's end gave nothing away
        files = stores.place(store, "locks", "a").parent
        assert {p.name: p.stat().st_size for p in files.iterdir()} == {
            "a.lock": 0,
            "b.lock": 0,
        }
    with pytest.raises(KeyError), stores.claim(store, "a"):
        raise KeyError  # a run that fails gives it back too
    with stores.claim(store, "a") as mine:
        assert mine


def test_claim_waits_until_free_or_cancelled(tmp_path):
    store, free, taken = tmp_path / "rows.jsonl", threading.Event(), threading.Event()

    def hold():
        with stores.claim(store, "a"):
            taken.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    asked = []
    with stores.claim(
        store, "a", 60, lambda: asked.append(True) or len(asked) == 3
    ) as mine:
        assert (mine, len(asked)) == (False, 3)
    with stores.claim(store, "a", 0.1) as mine:
        assert not mine
    threading.Timer(0.3, free.set).start()
    with stores.claim(store, "a", 60) as mine:
        assert mine
    thread.join()


def hold_and_sleep(store, ready):
    with stores.claim(store, "a"):
        child = os.fork()  # as the processes that read images are made
        if child == 0:
            time.sleep(60)
            os._exit(0)
        ready.put(child)
        time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_claim_ends_when_holder_is_killed(
    tmp_path,
):
    """Release the claim of a killed process although its children live."""
    store, ready = tmp_path / "rows.jsonl", PROCESSES.Queue()
    process = PROCESSES.Process(target=hold_and_sleep, args=(store, ready))
    process.start()
    child = ready.get()
    with stores.claim(store, "a") as mine:
        assert not mine
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    os.kill(child, 0)  # still there
    with stores.claim(store, "a") as mine:
        assert mine
    os.kill(child, signal.SIGKILL)


# --- curves and keys ------------------------------------------------------------------------------


def test_load_curve_has_every_step_and_evaluation(tmp_path):
    store = tmp_path / "rows.jsonl"
    history = {
        "step": [0, 1, 2],
        "loss": [0.5, 0.25, float("nan")],
        "bits": [3, 4, 8],
        "lr": [0.1, 0.1, 0.01],
        "evaluations": [
            {
                "step": 2,
                "precision": "q_max",
                "bits": 8,
                "valid": {"accuracy": 0.4},
                "test": {"accuracy": 0.3},
            },
            {
                "step": 3,
                "precision": "q_max",
                "bits": 8,
                "valid": {"accuracy": None},
                "test": {"accuracy": None},
            },
        ],
    }
    stores.write_curve(store, "abc", history)
    curve = stores.load_curve(store, "abc")
    assert curve.step.tolist() == [0, 1, 2]
    assert curve.bits.tolist() == [3, 4, 8]
    assert curve.loss.iloc[:2].tolist() == [0.5, 0.25]
    assert curve.test_accuracy_at_q_max.dropna().to_dict() == {
        1: 0.3
    }  # after the second step
    assert curve.valid_accuracy_at_q_max.dropna().to_dict() == {1: 0.4}
    assert [p.name for p in (tmp_path / "rows.curves").iterdir()] == ["abc.parquet"]
    pd.testing.assert_frame_equal(
        curve, pd.read_parquet(tmp_path / "rows.curves" / "abc.parquet")
    )
    refused("xyz", stores.load_curve, store, "xyz", error=FileNotFoundError)
    (tmp_path / "full.curves").write_text("a file where the folder goes")
    with pytest.raises(
        StoreError,
        match=r"cannot write .*abc\.parquet: .*exists; the run has no checkpoint",
    ):
        stores.write_curve(tmp_path / "full.jsonl", "abc", history)


def test_spec_keys_never_change():
    """Require a new SPEC_VERSION for any change of the key."""
    known = {
        ("demo", "digits", "mlp6", "CR"): "ce573962865680b4",
        ("demo", "cifar10", "resnet8_w8", "RTH"): "315242d418236be9",
        ("paper", "cifar10", "resnet74", "ETH"): "77ebfd94357d6854",
        ("paper", "imagenet", "resnet18", "LR"): "94b252cf7ef30638",
    }
    for (*where, arm), key in known.items():
        assert (
            designs.quality_cost(*where, schedules=[arm], static_bits=[], seeds=[0])[
                0
            ].key
            == key
        )


@pytest.mark.parametrize(
    "path", sorted(results_dir().glob("*.jsonl")), ids=lambda p: p.stem
)
def test_committed_rows_are_intact_and_reproducible(
    path,
):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    assert LineChecker(path).sidecar_digests == {
        digest(canonical(row)) for row in rows if "digest" not in row
    }  # and none is gone
    for row in rows:
        row.pop("digest", None)  # which is no part of what it certifies
    assert repr(stores.load_rows(path)) == repr(
        list(stores.newest(rows).values())
    )  # as the plain parser reads them
    for r in rows:
        assert RunSpec.from_dict(r["spec"]).key == key_of(r["spec"]) == r["key"]
        assert r["status"] in ("ok", "diverged")
        assert repr(stores.settled(r)) == repr(r)
        numbers = [
            r.get(name, []) for name in ("metrics", "evaluations", "loss", "bitops")
        ]
        assert r["status"] == "diverged" or "null" not in json.dumps(numbers), r["key"]
        where = r["provenance"]
        assert where["dirty"] is False, r["key"]
        assert where["commit"], r["key"]
        assert where["machine"], r["key"]


def write_many(store, worker):
    for i in range(20):
        stores.append_row(store, row(f"{worker}-{i}", "x" * 2000))
        if i % 5 == 0:
            stores.load_rows(store)  # a reader never sees a broken line


def test_append_row_with_many_writers(tmp_path):
    store = tmp_path / "rows.jsonl"
    workers = [PROCESSES.Process(target=write_many, args=(store, w)) for w in range(6)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert [w.exitcode for w in workers] == [0] * 6
    assert len(store.read_text().splitlines()) == 120
    assert {r["key"] for r in stores.load_rows(store)} == {
        named(f"{w}-{i}") for w in range(6) for i in range(20)
    }


def compete(store, log, stop):
    while not stop.is_set():
        with stores.claim(store, "a") as mine:
            if mine:
                with open(log, "a") as f:
                    f.write(f"{os.getpid()} in\n")
                time.sleep(0.005)
                with open(log, "a") as f:
                    f.write(f"{os.getpid()} out\n")


def test_claim_excludes_competing_processes(tmp_path):
    stop, log = PROCESSES.Event(), tmp_path / "log"
    crowd = [
        PROCESSES.Process(target=compete, args=(tmp_path / "rows.jsonl", log, stop))
        for _ in range(4)
    ]
    for process in crowd:
        process.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (
        not log.exists() or len(log.read_text().splitlines()) < 100
    ):
        time.sleep(0.05)
    stop.set()
    for process in crowd:
        process.join()
    events = [line.split() for line in log.read_text().splitlines()]
    assert len(events) >= 100
    for (entered, what), (left, then) in zip(events[::2], events[1::2], strict=True):
        assert (what, then) == ("in", "out")
        assert entered == left
