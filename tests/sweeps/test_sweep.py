"""Sweeps: finished runs are skipped, failures stay isolated, interrupted sweeps resume."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest
import torch
from dataset_layouts import image_archives, write
from helpers import refused, specs_of

from bench.kill_sweep import KINDS, claims, holder, torture
from cpt_lab.analysis.run_table import table
from cpt_lab.data import loading
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.resources import usable_cores
from cpt_lab.sweeps import progress, stores, worker
from cpt_lab.sweeps import sweep as sweep_module
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import _context, supervise
from cpt_lab.sweeps.progress import Live
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.stores import StoreError
from cpt_lab.sweeps.sweep import _slots, run_grid
from cpt_lab.sweeps.worker import Job, Outcome, run_all

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.fixture
def quick(monkeypatch):
    """Count the runs and make them cheap, with real storing and resuming."""
    ran = []

    def fake(job, should_stop):
        yield from ()  # it asks for no steps
        ran.append(job.spec.arm)
        row = stores.describe(job.spec)
        if job.spec.arm == "RR":
            return {**row, "status": "failed", "error": "boom"}
        return {**row, "status": "ok", "metrics": [], "steps": 10, "seconds": 1.0}

    monkeypatch.setattr("cpt_lab.sweeps.worker._trained_row", fake)
    return ran


def files_of(store, spec):
    return [stores.place(store, kind, spec.key) for kind in ("checkpoints", "curves")]


def touch(*paths):
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.touch()


class TestStore:
    def test_run_grid_skips_finished_runs(self, quick, tmp_path, monkeypatch):
        store = tmp_path / "rows.jsonl"
        run_grid(specs_of("CR"), store, workers=0)
        rows = run_grid(
            specs_of("CR", "LR", "CR"), store, workers=0
        )  # one of them twice
        assert quick == ["CR", "LR"]
        assert [r["spec"]["arm"] for r in rows] == ["CR", "LR", "CR"]
        assert len(store.read_text().splitlines()) == 2
        monkeypatch.setattr(sweep_module, "supervise", None)
        assert (
            len(run_grid(specs_of("CR"), store, workers=2)) == 1
        )  # nothing to do starts nothing

    def test_run_grid_retries_failures_on_demand(self, quick, tmp_path):
        """Retry failed runs only with ``retry_failed``; accept options as an object and as overrides."""
        store, options = tmp_path / "rows.jsonl", SweepOptions(workers=0)
        rows = run_grid(specs_of("RR", "CR"), store, options)
        assert [r["status"] for r in rows] == ["failed", "ok"]
        run_grid(specs_of("RR", "CR"), store, options)
        assert quick == ["RR", "CR"]
        run_grid(specs_of("RR", "CR"), store, options, retry_failed=True)
        assert quick == ["RR", "CR", "RR"]
        assert len(store.read_text().splitlines()) == 3  # appended, not edited

    def test_run_grid_removes_temporary_files_first(self, quick, tmp_path):
        """Remove temporary files that a killed process left for the same run only."""
        store, (spec, other) = tmp_path / "rows.jsonl", specs_of("CR", "LR")
        left, kept = (
            [place.with_name(f"{place.name}.123.tmp") for place in files_of(store, s)]
            for s in (spec, other)  # the other's may be a living sweep's
        )
        touch(*left, *kept)
        run_grid([spec], store, workers=0)
        assert [path.exists() for path in (*left, *kept)] == [False] * 2 + [True] * 2

    def test_run_grid_removes_checkpoints_of_finished_runs(self, quick, tmp_path):
        """Remove checkpoints when the row is stored, but keep those of failed runs."""
        store, (good, bad), other = (
            tmp_path / "rows.jsonl",
            specs_of("CR", "RR"),
            "0123456789abcdef",
        )
        folder = tmp_path / "rows.checkpoints"
        for retry in (
            False,
            True,
        ):  # a run that has just ended, and one that was killed between row and checkpoint
            touch(
                *(
                    folder / f"{key}{end}"
                    for key in (good.key, bad.key, other)
                    for end in (".pt", ".previous.pt")
                )
            )
            run_grid([good, bad], store, workers=0, retry_failed=retry)
            assert {path.name.partition(".")[0] for path in folder.iterdir()} == {
                bad.key,
                other,
            }
        assert quick == ["CR", "RR", "RR"]

    def test_run_grid_requires_clean_tree_for_results(
        self, quick, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(stores, "results_dir", lambda: tmp_path)
        tree = {"commit": "1234567890", "dirty": True}
        monkeypatch.setattr(sweep_module, "commit", lambda: tree)
        with pytest.raises(
            StoreError, match=r"rows\.jsonl: tracked files differ from commit 1234567"
        ):
            run_grid(specs_of("CR"), tmp_path / "rows.jsonl", workers=0)
        assert quick == []
        assert not (tmp_path / "rows.jsonl").exists()
        tree["dirty"] = False
        monkeypatch.setattr("cpt_lab.provenance.commit", lambda: tree)
        assert len(run_grid(specs_of("CR"), tmp_path / "rows.jsonl", workers=0)) == 1
        tree["dirty"] = True  # what is there may be asked for
        assert len(run_grid(specs_of("CR"), tmp_path / "rows.jsonl", workers=0)) == 1
        assert quick == ["CR"]


@pytest.mark.slow
def test_run_grid_marks_diverged_runs(tmp_path):
    """Detect divergence in the evaluation or the next loss, in-process and in workers."""
    settings = ((1, 1e20), (5, 1e20), (5, 1e15), (5, 0.01))
    specs = [
        specs_of("CR", evaluate_every=every, clip=None, lr=lr)[0]
        for every, lr in settings
    ]
    here, apart = (
        run_grid(specs, tmp_path / f"{n}.jsonl", workers=n, progress=False)
        for n in (0, 2)
    )
    assert [row["status"] for row in here] == ["diverged", "diverged", "diverged", "ok"]
    assert all(row["error"].startswith("diverged at step ") for row in here[:3])
    assert "in the evaluation" in here[0]["error"]
    assert "in the training loss" in here[1]["error"]
    lines = table(here)
    assert lines["diverged"].tolist() == [True, True, True, False]
    assert lines["accuracy"].tolist()[:3] == [0.1, 0.1, 0.1]  # the worst value
    for name in ("status", "error", "metrics", "evaluations", "steps"):
        assert [row.get(name) for row in apart] == [row.get(name) for row in here]


def test_run_grid_rows_are_complete(tmp_path):
    store = tmp_path / "rows.jsonl"
    (row,) = run_grid(specs_of("CR", steps=20), store, workers=0)
    assert (row["status"], row["device"]) == ("ok", "cpu")
    of_other_rows = {
        "digest",
        "error",
        "captured",
        "store",
    }  # files, failures, CUDA, tables
    assert set(row) == ResultRow.__annotations__.keys() - of_other_rows
    assert row["bitops"].keys() == {"paper", "per_op"}
    assert row["peak_memory"] > 10**8
    of_run = {"versions", "started", "python", "machine", "kernels", "products"}
    assert {"commit", "dirty", *of_run} == set(row["provenance"])
    assert {"torch", "numpy", "scikit-learn", "cpt-core"} <= set(
        row["provenance"]["versions"]
    )
    (line,) = map(json.loads, store.read_text().splitlines())
    assert len(line.pop("digest")) == 32
    assert line == row
    assert str(tmp_path) not in json.dumps(row)
    assert len(stores.load_curve(store, row["key"])) == 20


OF_THE_PROCESS = ("seconds", "peak_memory", "provenance")


@pytest.mark.slow
def test_run_grid_processes_equal_in_process_rows(
    tmp_path,
):
    """Give equal rows in this process, in worker processes, and with several runs per process."""
    specs = specs_of("CR", "ER", "LR", steps=20)
    stored, beside, curves = [], [], []
    for name, workers, together in (("a", 0, 1), ("b", 2, 1), ("c", 2, 2)):
        rows = run_grid(
            specs, tmp_path / f"{name}.jsonl", workers=workers, together=together
        )
        stored.append(
            [{k: v for k, v in row.items() if k not in OF_THE_PROCESS} for row in rows]
        )
        beside.append(sorted(row["provenance"].get("beside", 0) for row in rows))
        curves.append(
            [
                stores.load_curve(tmp_path / f"{name}.jsonl", spec.key).to_json()
                for spec in specs
            ]
        )
    assert stored[0] == stored[1] == stored[2]
    assert curves[0] == curves[1] == curves[2]
    assert beside == [[0, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert [row["key"] for row in stored[0]] == [spec.key for spec in specs]
    for kind, count in (("curves", 3), ("logs", 3), ("checkpoints", 0), ("locks", 3)):
        assert len(list((tmp_path / f"b.{kind}").glob("*"))) == count, kind
    assert [p.stat().st_size for p in claims(tmp_path / "b.jsonl")] == [0, 0, 0]
    assert (
        "ok after"
        in stores.place(tmp_path / "b.jsonl", "logs", specs[0].key).read_text()
    )
    one, _, other = specs
    first, third = (
        stores.place(tmp_path / "c.jsonl", "logs", spec.key).read_text()
        for spec in (one, other)
    )
    assert third == f"trains beside {one.key}, whose log is of both\n"
    assert one.key in first
    assert other.key in first
    assert {path.suffix for path in (tmp_path / "c.logs").iterdir()} == {".log"}


def test_run_process_gets_environment_gpu_and_cores(tmp_path, monkeypatch):
    """Pass the current environment, since the fork server has an older one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cores = usable_cores()
    assert told(tmp_path, gpu=1) == {
        "word": None,
        "visible": "1",
        "threads": 1,
        "cores": cores,
        "sharing": 1,
    }
    monkeypatch.setenv("CPT_TEST_WORD", "reached")
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "4,GPU-7"
    )  # what a cluster gave to this job
    found = told(tmp_path, gpu=1, sharing=2, options=SweepOptions(threads=2))
    assert found == {
        "word": "reached",
        "visible": "GPU-7",
        "threads": 2,
        "cores": max(1, cores // 2),
        "sharing": 2,
    }
    tasks = {f"cpt_lab.tasks.{name}" for name in EXPERIMENTS}
    assert tasks < set(forkserver._forkserver._preload_modules)  # seconds a run


def told(folder, **job):
    """Return what the process of a run reports about itself."""
    return supervise(Job(specs_of("CR")[0], folder / "rows.jsonl", **job), work=tell)[
        0
    ].row


def tell(job, stop, on_start):
    threads, cores = torch.get_num_threads(), usable_cores()
    words = {
        "word": os.environ.get("CPT_TEST_WORD"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    return [
        Outcome(
            job.spec.key,
            "ran",
            {"threads": threads, "cores": cores, "sharing": job.sharing, **words},
        )
    ]


# --- what fails -----------------------------------------------------------------------------------


def fail_at_the_end(session):
    raise RuntimeError("the last evaluation failed")


def test_run_grid_resumes_failed_run_from_checkpoint(tmp_path, monkeypatch, caplog):
    (spec,), store, how = (
        specs_of("CR", steps=20),
        tmp_path / "rows.jsonl",
        {"workers": 0, "checkpoint_seconds": 0.0},
    )
    (calm,) = run_grid([spec], tmp_path / "calm.jsonl", workers=0)
    with monkeypatch.context() as patch:
        patch.setattr("cpt_lab.training.train.run_bitops", fail_at_the_end)
        (row,) = run_grid([spec], store, **how)
    assert row["error"].startswith("Traceback")
    assert row["error"].endswith("RuntimeError: the last evaluation failed\n")
    folder = tmp_path / "rows.checkpoints"
    assert {p.name for p in folder.iterdir()} == {
        f"{spec.key}.pt",
        f"{spec.key}.previous.pt",
    }
    (folder / f"{spec.key}.pt").write_bytes(b"half of it")
    caplog.set_level("INFO")
    (row,) = run_grid([spec], store, retry_failed=True, **how)
    assert [row[name] for name in ("status", "metrics", "loss")] == [
        calm[n] for n in ("status", "metrics", "loss")
    ]
    assert "goes on from step 19 of 20" in caplog.text
    assert (
        list(folder.iterdir()) == []
    )  # the damaged one too, now that the row is there


def end_by(number, job, stop, on_start):
    os.kill(os.getpid(), number)


def vanish(job, stop, on_start):
    os._exit(7)


def hang(job, stop, on_start):
    on_start(job.spec.key)
    print("no step ever ends", flush=True)
    time.sleep(60)


def ended_by_somebody(job, stop, on_start):
    os.kill(os.getpid(), signal.SIGTERM)
    return run_all(job, stop, on_start)


def append_and_die(job, stop, on_start):
    run_all(job, stop, on_start)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            partial(end_by, signal.SIGSEGV),
            ["ended by SIGSEGV", "Fatal Python error", "in end_by"],
        ),
        (vanish, ["ended with status 7 and no result"]),
        (
            partial(end_by, signal.SIGKILL),
            ["ended by SIGKILL (the system may have run out of memory)"],
        ),
    ],
)
def test_supervise_stores_failure_of_dead_process(work, words, tmp_path):
    job = Job(specs_of("CR")[0], tmp_path / "rows.jsonl")
    (outcome,) = supervise(job, work=work)
    assert outcome.row["status"] == "failed"
    assert [w for w in words if w not in outcome.row["error"]] == []
    assert stores.load_rows(job.store) == [outcome.row]


def test_supervise_fails_hanging_run_at_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt_lab.sweeps.process.GRACE_SECONDS", 0.5)
    job = Job(specs_of("CR")[0], tmp_path / "rows.jsonl", SweepOptions(timeout=0.5))
    (outcome,) = supervise(job, work=hang)
    assert outcome.row["error"].startswith("took longer than 0.5 s")
    assert "no step ever ends" in outcome.row["error"]
    log = stores.place(job.store, "logs", job.spec.key)
    assert log.read_text().endswith("took longer than 0.5 s\n")


@pytest.mark.slow
def test_run_grid_resumes_timed_out_run(tmp_path):
    (spec,) = specs_of("CR", steps=1000)
    store = tmp_path / "rows.jsonl"
    (row,) = run_grid([spec], store, workers=1, timeout=0.5)
    assert (row["status"], row["error"].splitlines()[0]) == (
        "failed",
        "took longer than 0.5 s",
    )
    assert stores.place(store, "checkpoints", spec.key).exists()
    (row,) = run_grid([spec], store, workers=1, retry_failed=True)
    assert (row["status"], row["steps"]) == ("ok", 1000)
    assert "goes on from step" in stores.place(store, "logs", spec.key).read_text()


def test_supervise_accepts_process_dying_after_row(tmp_path):
    job = Job(specs_of("CR", steps=20)[0], tmp_path / "rows.jsonl")
    assert supervise(job, work=append_and_die)[0].row["status"] == "ok"
    assert len(job.store.read_text().splitlines()) == 1


@pytest.fixture
def first_process(monkeypatch):
    """Return a function that sets the first process's work, and returns the jobs tried afterwards."""

    def does(work):
        tried = []

        def once(job, **rest):
            tried.append(job)
            return supervise(job, work=work if job is tried[0] else run_all, **rest)

        monkeypatch.setattr(sweep_module, "supervise", once)
        return tried

    return does


def test_run_grid_stops_on_full_disk(tmp_path, monkeypatch, first_process):
    monkeypatch.setattr(
        stores, "check_writable", lambda store: store.parent.mkdir(exist_ok=True)
    )  # fills up later
    monkeypatch.setattr(stores, "FREE_BYTES", 2**60)
    specs = specs_of("CR", "ER", "LR", "LT", seeds=range(5), steps=20)
    refused(
        r"only \d+ MB free",
        run_grid,
        specs[:3],
        tmp_path / "rows.jsonl",
        workers=0,
        error=StoreError,
    )
    tried = first_process(no_room)
    with pytest.raises(StoreError, match="no room, said the process of the run"):
        run_grid(specs, tmp_path / "rows.jsonl", workers=2)
    assert len(tried) < 10  # and nothing more was started


def no_room(job, stop, on_start):
    raise StoreError("no room, said the process of the run")


# --- side by side ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "arms", "beside"),
    [
        (vanish, ["CR", "ER"], [1, 0, 0]),
        (ended_by_somebody, ["CR", "ER"], [1, 0, 0]),
        (ended_by_somebody, ["CR"], [0, 0]),
    ],
)
def test_run_grid_restarts_runs_of_dead_process(
    work, arms, beside, tmp_path, first_process
):
    tried = first_process(work)
    rows = run_grid(
        specs_of(*arms, steps=20), tmp_path / "rows.jsonl", workers=1, together=2
    )
    assert [row["status"] for row in rows] == ["ok"] * len(arms)
    assert [len(job.beside) for job in tried] == beside


@pytest.mark.parametrize(
    ("changes", "options", "sizes"),
    [
        ({}, {"workers": 1}, [4, 4]),
        ({}, {"workers": 4}, [2, 2, 2, 2]),
        ({}, {"workers": 1, "together": 3}, [2, 2, 2, 2]),
        ({}, {"workers": 1, "together": 1}, [1] * 8),
        ({}, {"workers": 0}, [1] * 8),
        ({}, {"workers": 0, "together": 4}, [4, 4]),
        ({}, {"workers": 1, "timeout": 60.0}, [1] * 8),
        ({}, {"executor": "dask"}, [1] * 8),
        ({"scale": "paper"}, {"workers": 1, "device": "cpu"}, [1] * 8),
    ],
)
def test_jobs_share_processes_evenly(changes, options, sizes, tmp_path):
    specs = [
        replace(spec, **changes)
        for spec in specs_of("CR", "ER", "LR", "LT", seeds=(0, 1), steps=20)
    ]
    jobs = sweep_module._jobs(specs, tmp_path / "rows.jsonl", SweepOptions(**options))
    assert [1 + len(job.beside) for job in jobs] == sizes
    assert sorted(one.spec.key for job in jobs for one in job.each()) == sorted(
        spec.key for spec in specs
    )
    assert all(
        len({(one.spec.recipe, one.spec.seed) for one in job.each()}) == 1
        for job in jobs
    )


def test_together_is_rejected_with_timeout_or_gpu(tmp_path, monkeypatch):
    refused(
        r"timeout=5.0 is of a run alone in its process; got together=2",
        SweepOptions,
        timeout=5.0,
        together=2,
    )
    refused("together must be a whole number of at least 1", SweepOptions, together=0)
    monkeypatch.setattr(sweep_module, "choose_device", lambda device, spec: "cuda")
    with pytest.raises(
        ValueError,
        match="together=2 is for the CPU; a GPU replays the steps of every run",
    ):
        sweep_module._jobs(
            specs_of("CR", "ER"), tmp_path / "rows.jsonl", SweepOptions(together=2)
        )


# --- who else is there ----------------------------------------------------------------------------


def test_run_grid_waits_for_concurrent_sweep(tmp_path, capsys):
    spec, other = specs_of("CR", "ER", steps=20)
    store = tmp_path / "rows.jsonl"
    with stores.claim(store, spec.key) as mine:
        assert mine
        assert run_all(Job(spec, store))[0].status == "busy"
        done = []
        sweep = threading.Thread(
            target=lambda: done.extend(run_grid([spec, other], store, workers=1))
        )
        sweep.start()
        deadline = time.monotonic() + 120
        while stores.find_row(store, other.key) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stores.find_row(store, spec.key) is None
        stores.append_row(
            store,
            {
                **stores.describe(spec),
                "status": "ok",
                "metrics": [],
                "by": "the other sweep",
            },
        )
    sweep.join()
    assert [row.get("by") for row in done] == ["the other sweep", None]
    assert len(store.read_text().splitlines()) == 2
    where = stores.place(store, "locks", spec.key)
    said = f"runs of another sweep, or of processes that somebody ended: 1; waiting for {where}"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="process groups and /proc")
def test_sweep_survives_killed_processes():
    """Sample ``python -m bench.kill_sweep`` over runs of one seed."""
    done = torture(
        len(KINDS) - 1,
        seed=random.randrange(10**6),
        seeds=(0,),
        steps=30,
        report=lambda text: None,
    )
    assert all(done[kind] == KINDS[:-1].count(kind) for kind in KINDS)


WORDS = [
    "run",
    "digits/mlp6",
    "--scale",
    "demo",
    "--arms",
    "CR",
    "--seeds",
    "0",
    "1",
    "--workers",
    "1",
]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_run_command_resumes_after_interrupt(tmp_path, monkeypatch, command):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    child = [sys.executable, "-c", "from cpt_lab.commands import main; main()", *WORDS]
    sweep = subprocess.Popen(
        child, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    store = tmp_path / "demo" / "image.jsonl"
    deadline = time.monotonic() + 120
    pids = []
    while not pids and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = [pid for pid in map(holder, claims(store)) if pid]
    os.killpg(sweep.pid, signal.SIGINT)
    _, said = sweep.communicate()
    assert sweep.returncode == 130
    assert "stopping: the runs write their checkpoints" in said
    assert "0 of 2 missing runs done; the same command goes on from here" in said
    assert len(list((tmp_path / "demo" / "image.checkpoints").glob("*.pt"))) == 1
    assert [holder(claim) for claim in claims(store)] == [
        None
    ]  # and no other was begun
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    status, out, said = command(*WORDS)
    assert (status, said) == (0, "")  # quiet: nobody is looking
    assert "2 ok" in out


def test_signals_count_repeated_interrupt_once(capsys):
    with progress.Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.stop.is_set()
        assert not signals.kill.is_set()
        signals._stop_time -= 1
        refused(
            "stopped at once",
            signals._handle,
            signal.SIGINT,
            None,
            error=KeyboardInterrupt,
        )
        assert signals.kill.is_set()
    assert capsys.readouterr().err.count("stopping") == 1


# --- values ---------------------------------------------------------------------------------------


def test_run_grid_stops_before_runs_without_data(tmp_path):
    good = specs_of("CR", steps=20)[0]
    bad = replace(good, recipe=replace(good.recipe, dataset="nowhere/"))
    refused(
        "there is no file or folder",
        run_grid,
        [good, bad],
        tmp_path / "rows.jsonl",
        error=FileNotFoundError,
    )
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.fixture
def own_specs(data_folder):
    """Return runs of two seeds on user images made by ``own_images``."""
    own_images(data_folder, seed=0)
    changes = {
        "size": 8,
        "train_images": None,
        "valid_images": 0,
        "test_images": None,
        "batch": 8,
        "crop": 0,
    }
    (spec,) = specs_of("CR", **changes)
    return [
        replace(spec, recipe=replace(spec.recipe, dataset="mine/"), seed=seed)
        for seed in (0, 1)
    ]


def own_images(folder, seed):
    write(folder / "mine", image_archives(seed=seed))
    loading._last.clear()  # as in another process


CHANGED = r"the data of 'mine/' have changed: 1 rows in .*rows\.jsonl are of checksum"


def test_run_grid_rejects_rows_of_changed_data(own_specs, tmp_path):
    store, (first, second) = tmp_path / "rows.jsonl", own_specs
    (row,) = run_grid([first], store, workers=0)
    assert run_grid([first], store, workers=0) == [row]
    own_images(tmp_path, seed=1)
    for specs in ([first], [second], [first, second]):
        refused(CHANGED, run_grid, specs, store, workers=0)
    assert stores.load_rows(store) == [row]
    own_images(tmp_path, seed=0)  # put back
    assert len(run_grid([first, second], store, workers=0)) == 2
    shutil.rmtree(tmp_path / "mine")
    loading._last.clear()
    assert run_grid([first], store, workers=0) == [
        row
    ]  # rows can be read where the data are not


@pytest.mark.slow
def test_dask_workers_check_data(quick, own_specs, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(
        sweep_module, "_check_data", lambda *_: None
    )  # as where the data are on the workers alone
    store, (first, second) = tmp_path / "rows.jsonl", own_specs
    stores.append_row(
        store,
        {
            **stores.describe(first),
            "status": "ok",
            "data_checksum": "that of other data",
        },
    )
    refused(CHANGED, run_grid, [second], store, executor="dask", workers=1)
    assert quick == []


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"executor": "cloud"}, "unknown executor 'cloud'; choose from local, dask"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose from auto, cpu, cuda"),
        (
            {"workers": -1},
            "workers must be a whole number of at least 0 and at most 1024, got -1",
        ),
        ({"workers": 1.5}, r"workers must be an integer or None, got 1\.5"),
        (
            {"threads": 0},
            "threads must be a whole number of at least 1 and at most 1024, got 0",
        ),
        (
            {"threads": 10**6},
            "threads must be a whole number of at least 1 and at most 1024, got 1000000",
        ),
        (
            {"per_gpu": 0},
            "per_gpu must be a whole number of at least 1 and at most 1024, got 0",
        ),
        (
            {"options": SweepOptions(workers=0), "timeout": 5},
            "timeout=5 needs runs in processes of their own",
        ),
        ({"workers": 0, "executor": "dask"}, "executor 'dask' needs at least 1"),
        ({"timeout": 0}, "timeout must be more than 0 seconds; got 0"),
        ({"timeout": float("nan")}, "timeout must be more than 0 seconds; got nan"),
        ({"checkpoint_seconds": None}, "checkpoint_seconds must be a number, got None"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds must be 0 or more; got -1"),
        (
            {"scheduler": "tcp://x:1"},
            "scheduler='tcp://x:1' is for executor 'dask', not 'local'",
        ),
        (
            {"scheduler": "tcp://x:1", "executor": "dask", "workers": 2},
            "the cluster at tcp://x:1 has its own",
        ),
    ],
)
def test_run_grid_rejects_invalid_options_first(choices, message, tmp_path):
    refused(
        message, run_grid, specs_of("CR", steps=20), tmp_path / "rows.jsonl", **choices
    )
    assert not (tmp_path / "rows.jsonl").exists()


def test_run_grid_accepts_iterators_of_specs_only(quick, tmp_path):
    run_grid(
        (spec for spec in specs_of("LR", "CR")), tmp_path / "rows.jsonl", workers=0
    )
    assert quick == ["LR", "CR"]
    with pytest.raises(
        TypeError, match=r"specs must be a list of RunSpec.*got 'CR' in it"
    ):
        run_grid(["CR"], tmp_path / "other.jsonl", workers=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        run_grid(specs_of("CR"), tmp_path / "other.jsonl", worker=2)


def test_row_curve_has_twenty_finite_points():
    assert worker._spaced_evaluations(list(range(3))) == [0, 1, 2]
    assert worker._spaced_evaluations(list(range(50))) == list(range(1, 50, 3))
    assert worker._mean_losses(
        [1.0, 2.0, float("nan"), float("inf"), 3.0, -float("inf")]
    ) == [1.0, 2.0, 3.0]
    assert worker._mean_losses([float(i) for i in range(40)]) == [
        0.5 + 2 * i for i in range(20)
    ]


# --- what people see, and GPUs --------------------------------------------------------------------


def test_progress_bar_shows_run_counts_and_time(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def shown(call, *given):
        """Return the output drawn by a call, ten seconds after the last one."""
        capsys.readouterr()
        now[0] += 10
        call(*given)
        return capsys.readouterr().err.split("\r")[-1]

    with Live(4, progress=True) as live:
        live.start("a")
        live.start("b")
        live.note = "a remark"
        said = shown(live.finish, Outcome("a", "ran", {"status": "ok"}))
        assert "1/4 [00:10<00:30" in said
        assert "1 running, 0 failed, a remark]" in said
        assert "1/4 [00:20<01:00" in shown(
            live.finish, Outcome("b", "busy")
        )  # another sweep has it: not done
        said = shown(live.finish, Outcome("c", "ran", {"status": "failed"}))
        assert "2/4 [00:30<00:30" in said
        assert "0 running, 1 failed" in said
        assert "2/4 [00:40<00:40" in shown(
            live.refresh
        )  # no run has ended, but the time goes on
        live.concurrent_runs = 8
        assert "2 running, 1 failed" in shown(live.refresh)  # no more than there are
        assert live.summary() == "1 of 4 missing runs done, 1 failed"
        live.concurrent_runs = 0
        assert "step" not in shown(
            live.count_step, 8
        )  # it waits for another sweep, and does none
        live.start("d")
        live.count_step(8)
        assert "1 running, 1 failed, step 2 of 8, a remark]" in shown(
            live.count_step, 8
        )
        live.finish(Outcome("d", "ran", {"status": "ok"}))
        live.start("e")
        assert "1 running, 1 failed, a remark]" in shown(live.refresh)


def test_progress_bar_moves_with_in_process_steps(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Live,
        "refresh",
        lambda self, finished=0: seen.append(
            (self.finished_runs, self.steps, self.total_steps)
        ),
    )
    run_grid(specs_of("CR", "RR", steps=8, n_cycles=1), tmp_path / "x.jsonl", workers=0)
    steps = [(done, step, 8) for done in range(2) for step in range(1, 9)]
    assert [shown for shown in seen if shown[1]] == steps


def test_gpu_slots_are_round_robin_by_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(sweep_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(sweep_module, "usable_memory", lambda: 64 * 2**30)
    specs = designs.quality_cost("demo", schedules=["CR"], static_bits=[], seeds=[0])

    def slots(specs, device="cuda", **changes):
        return _slots(specs, SweepOptions(device=device, **changes))

    assert slots(specs, per_gpu=2) == [0, 1, 0, 1]
    assert slots(specs, workers=3, per_gpu=2) == [0, 1, 0]
    assert slots(specs, threads=4, device="cpu") == [None] * 4
    assert slots(specs_of("CR"), workers=2) == [None, None]  # smoke scale
    assert slots(specs, "auto", workers=2) == [None, None]  # demo scale
    memory, peaks = [10 * 2**30] * 2, {"mlp6": 2 * 2**30, "mlp4": 3 * 2**30}
    hosts = dict.fromkeys(peaks, 2**30)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda i: SimpleNamespace(total_memory=memory[i]),
    )

    def measured(spec, device):
        return SimpleNamespace(
            peak_memory=peaks[spec.recipe.model], host_memory=hosts[spec.recipe.model]
        )

    monkeypatch.setattr(sweep_module, "cached_timing", lambda *given: None)
    monkeypatch.setattr(sweep_module, "measure", measured)
    assert slots(specs, workers=4) == [
        0,
        1,
        0,
        1,
    ]  # nothing to measure when the number is given
    assert (
        slots(specs) == [0, 1] * 3
    )  # 3 x (2 GB + its context) in nine tenths of 10 GB
    larger = [
        replace(spec, recipe=replace(spec.recipe, model="mlp4")) for spec in specs
    ]
    assert slots([*specs, *larger]) == [0, 1] * 2  # whichever of them meet on a GPU
    memory[1] = 80 * 2**30
    assert slots(specs) == [0, 1] * 3  # the smaller of the two
    memory.reverse()
    assert slots(specs) == [0, 1] * 3
    hosts["mlp6"] = 12 * 2**30  # two of them in the GPU's half of the machine's memory
    assert slots(specs) == [0, 1] * 2


def test_run_processes_share_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "supervise", partial(supervise, work=tell))
    jobs = [Job(spec, tmp_path / "rows.jsonl") for spec in specs_of("CR", "RR")]
    signals, live = (
        SimpleNamespace(stop=threading.Event(), kill=threading.Event()),
        Live(2, False),
    )
    shares = [
        o.row["sharing"]
        for o in sweep_module._in_processes(jobs, signals, live, slots=[None] * 3)
    ]
    assert shares == [3, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_fork_server_ignores_interrupts():
    _context()
    with open(f"/proc/{forkserver._forkserver._forkserver_pid}/status") as file:
        status = file.read()
    blocked, ignored = (
        int(status.split(name)[1].split()[0], 16) for name in ("SigBlk:", "SigIgn:")
    )
    assert (blocked | ignored) >> 1 & 1  # SIGINT is number 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_run_grid_rejects_missing_cuda(tmp_path):
    refused(
        "device 'cuda' was asked for",
        run_grid,
        specs_of("CR"),
        tmp_path / "rows.jsonl",
        device="cuda",
    )
