"""Sweeps: stored runs are skipped, failures stay isolated, runs share processes, and several sweeps share a store."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dataset_layouts import image_archives, write
from helpers import refused, specs_of

from bench.kill_sweep import claims, row_numbers
from cpt_lab.analysis.run_table import table
from cpt_lab.data import loading
from cpt_lab.experiments import designs
from cpt_lab.sweeps import stores, sweep, worker
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import supervise
from cpt_lab.sweeps.progress import Live
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.stores import StoreError
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.sweeps.worker import Job, Outcome, run_all

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture
def trained(monkeypatch):
    """Return the arms that were trained; runs take no steps, and those of RR fail."""
    arms = []

    def train(job, should_stop):
        yield from ()
        arms.append(job.spec.arm)
        row = stores.describe(job.spec)
        if job.spec.arm == "RR":
            return {**row, "status": "failed", "error": "boom"}
        return {**row, "status": "ok", "metrics": [], "steps": 10, "seconds": 1.0}

    monkeypatch.setattr(worker, "_trained_row", train)
    return arms


# --- which runs are trained -----------------------------------------------------------------------


def test_run_grid_skips_stored_runs(trained, store, monkeypatch):
    run_grid(specs_of("CR"), store, workers=0)
    wanted = specs_of("CR", "LR", "CR")  # one of them twice
    rows = run_grid((spec for spec in wanted), store, workers=0)
    assert trained == ["CR", "LR"]
    assert [row["spec"]["arm"] for row in rows] == ["CR", "LR", "CR"]
    assert len(store.read_text().splitlines()) == 2
    monkeypatch.setattr(sweep, "supervise", None)  # nothing to do starts nothing
    assert len(run_grid(specs_of("CR"), store, workers=2)) == 1


def test_run_grid_retries_failures_on_demand(trained, store):
    """Retry failed runs only with ``retry_failed``; accept options as an object and as overrides."""
    options, specs = SweepOptions(workers=0), specs_of("RR", "CR")
    rows = run_grid(specs, store, options)
    assert [row["status"] for row in rows] == ["failed", "ok"]
    run_grid(specs, store, options)
    assert trained == ["RR", "CR"]
    run_grid(specs, store, options, retry_failed=True)
    assert trained == ["RR", "CR", "RR"]
    assert len(store.read_text().splitlines()) == 3  # appended, not edited


NEVER_BEGUN = "the process of the run ended with status 1 and no result"


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (NEVER_BEGUN, True),
        (f"{NEVER_BEGUN}\n{NEVER_BEGUN}\n", True),
        (f"{NEVER_BEGUN}\n12:00 abc: CR seed 0, cpu\n", False),  # its log has begun
        ("the process of the run ended with status 7 and no result\n", False),
        ("the process of the run was ended by SIGKILL", False),
        ("", False),
    ],
)
def test_run_grid_retries_runs_that_never_began(error, is_retried, trained, store):
    (spec,) = specs_of("CR")
    failed = stores.describe(spec) | {"status": "failed", "error": error}
    stores.append_row(store, failed)
    run_grid([spec], store, workers=0)
    assert trained == ["CR"] * is_retried


def test_run_grid_removes_leftover_files(trained, store):
    """Remove temporary files and checkpoints of finished runs; keep checkpoints of failed runs and files of others."""
    good, bad, other = specs_of("CR", "RR", "LR")
    folder = store.with_name("rows.checkpoints")
    folder.mkdir()
    endings = (".pt", ".previous.pt", ".pt.123.tmp")
    kept = {f"{bad.key}.pt", f"{bad.key}.previous.pt"}
    kept |= {f"{other.key}{ending}" for ending in endings}
    # After a run has ended, and after one was killed between its row and its checkpoint.
    for is_second in (False, True):
        for spec in (good, bad, other):
            for ending in endings[: 3 - is_second]:
                (folder / f"{spec.key}{ending}").touch()
        run_grid([good, bad], store, workers=0, retry_failed=is_second)
        assert {path.name for path in folder.iterdir()} == kept
    assert trained == ["CR", "RR", "RR"]


def test_run_grid_requires_clean_tree_for_results(trained, store, monkeypatch):
    monkeypatch.setattr(stores, "results_dir", lambda: store.parent)
    tree = {"commit": "1234567890", "dirty": True}
    monkeypatch.setattr(sweep, "commit", lambda: tree)
    monkeypatch.setattr("cpt_lab.provenance.commit", lambda: tree)
    message = r"rows\.jsonl: tracked files differ from commit 1234567"
    refused(message, run_grid, specs_of("CR"), store, workers=0, error=StoreError)
    assert (trained, store.exists()) == ([], False)
    for dirty in (False, True):  # stored rows may be asked for
        tree["dirty"] = dirty
        assert len(run_grid(specs_of("CR"), store, workers=0)) == 1
    assert trained == ["CR"]


# --- rows -----------------------------------------------------------------------------------------


def test_run_grid_rows_are_complete(calm):
    for row in calm.rows:
        assert (row["status"], row["device"]) == ("ok", "cpu")
        # Fields of files, failures, CUDA and tables.
        others = {"digest", "error", "captured", "store"}
        assert set(row) == ResultRow.__annotations__.keys() - others
        assert row["bitops"].keys() == {"paper", "per_op"}
        assert row["peak_memory"] > 10**8
        names = "commit dirty versions started python machine kernels products"
        assert set(row["provenance"]) == set(names.split())
        versions = set(row["provenance"]["versions"])
        assert {"torch", "numpy", "scikit-learn", "cpt-core"} <= versions
        assert str(calm.store.parent) not in json.dumps(row)
        assert len(stores.load_curve(calm.store, row["key"])) == 10
    lines = [json.loads(line) for line in calm.store.read_text().splitlines()]
    assert [len(line.pop("digest")) for line in lines] == [32] * 3
    assert lines == calm.rows


@pytest.mark.slow
def test_run_grid_marks_diverged_runs(store):
    """Detect divergence in the evaluation or the next loss."""
    settings = ((1, 1e20), (5, 1e20), (5, 1e15), (5, 0.01))
    specs = [
        specs_of("CR", evaluate_every=every, clip=None, lr=lr)[0]
        for every, lr in settings
    ]
    rows = run_grid(specs, store, workers=0)
    assert [row["status"] for row in rows] == ["diverged"] * 3 + ["ok"]
    assert all(row["error"].startswith("diverged at step ") for row in rows[:3])
    assert "in the evaluation" in rows[0]["error"]
    assert "in the training loss" in rows[1]["error"]
    frame = table(rows)
    assert frame["diverged"].tolist() == [True, True, True, False]
    assert frame["accuracy"].tolist()[:3] == [0.1, 0.1, 0.1]  # the worst value


def test_row_curve_has_twenty_finite_points():
    assert worker._spaced_evaluations(list(range(3))) == [0, 1, 2]
    assert worker._spaced_evaluations(list(range(50))) == list(range(1, 50, 3))
    nan, inf = float("nan"), float("inf")
    assert worker._mean_losses([1.0, 2.0, nan, inf, 3.0, -inf]) == [1.0, 2.0, 3.0]
    losses = [float(i) for i in range(40)]
    assert worker._mean_losses(losses) == [0.5 + 2 * i for i in range(20)]


# --- failures -------------------------------------------------------------------------------------


def fail_at_the_end(session):
    raise RuntimeError("the last evaluation failed")


def test_run_grid_resumes_failed_run_from_checkpoint(store, calm, monkeypatch, caplog):
    """Store the traceback of a run that raises, and go back to the checkpoint before a damaged one."""
    (spec, *_) = calm.specs
    options = {"workers": 0, "checkpoint_seconds": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr("cpt_lab.training.train.run_bitops", fail_at_the_end)
        (row,) = run_grid([spec], store, **options)
    assert row["error"].startswith("Traceback")
    assert row["error"].endswith("RuntimeError: the last evaluation failed\n")
    folder = store.with_name("rows.checkpoints")
    names = {f"{spec.key}.pt", f"{spec.key}.previous.pt"}
    assert {path.name for path in folder.iterdir()} == names

    (folder / f"{spec.key}.pt").write_bytes(b"half of it")
    caplog.set_level("INFO")
    run_grid([spec], store, retry_failed=True, **options)
    assert row_numbers(store) == {spec.key: calm.numbers[spec.key]}
    assert "goes on from step 9 of 10" in caplog.text
    assert list(folder.iterdir()) == []  # the damaged one too


@pytest.fixture
def first_process(monkeypatch):
    """Return a function that sets the work of the first process, and returns all jobs."""

    def set_work(work):
        jobs = []

        def supervise_once(job, **options):
            jobs.append(job)
            is_first = job is jobs[0]
            return supervise(job, work=work if is_first else run_all, **options)

        monkeypatch.setattr(sweep, "supervise", supervise_once)
        return jobs

    return set_work


def no_room(job, stop, on_start):
    raise StoreError("no room, said the process of the run")


@pytest.mark.slow
def test_run_grid_stops_on_full_disk(store, monkeypatch, first_process):
    monkeypatch.setattr(stores, "check_writable", lambda store: None)  # fills up later
    monkeypatch.setattr(stores, "FREE_BYTES", 2**60)
    specs = specs_of("CR", "ER", "LR", "LT", seeds=range(5))
    message = r"only \d+ MB free"
    refused(message, run_grid, specs[:3], store, workers=0, error=StoreError)
    jobs = first_process(no_room)
    message = "no room, said the process of the run"
    refused(message, run_grid, specs, store, workers=2, error=StoreError)
    assert len(jobs) < 10  # and nothing more was started


def vanish(job, stop, on_start):
    os._exit(7)


def train_after_sigterm(job, stop, on_start):
    os.kill(os.getpid(), signal.SIGTERM)
    return run_all(job, stop, on_start)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "run_count", "beside"),
    [
        (vanish, 2, [1, 0, 0]),
        (train_after_sigterm, 2, [1, 0, 0]),
        (train_after_sigterm, 1, [0, 0]),
    ],
)
def test_run_grid_restarts_runs_of_dead_process(
    work, run_count, beside, store, first_process, calm
):
    """Train each run of a process that died or was ended alone."""
    jobs, specs = first_process(work), calm.specs[:run_count]
    run_grid(specs, store, workers=1, together=2)
    assert row_numbers(store) == {spec.key: calm.numbers[spec.key] for spec in specs}
    assert [len(job.beside) for job in jobs] == beside


# --- processes ------------------------------------------------------------------------------------


# Fields of rows that differ between two runs of one spec.
OF_THE_PROCESS = {"seconds", "peak_memory", "provenance"}


@pytest.mark.slow
def test_run_grid_processes_equal_in_process_rows(store, calm):
    """Give equal rows and curves in worker processes, one of them with two runs."""
    rows = run_grid(calm.specs, store, workers=2, together=2)
    for row, expected in zip(rows, calm.rows, strict=True):
        assert row.keys() == expected.keys()
        fields = row.keys() - OF_THE_PROCESS
        assert {name: row[name] for name in fields} == {
            name: expected[name] for name in fields
        }
    assert row_numbers(store) == calm.numbers
    beside = [row["provenance"].get("beside", 0) for row in rows]
    assert sorted(beside) == [0, 1, 1]
    for kind, count in (("curves", 3), ("logs", 3), ("checkpoints", 0), ("locks", 3)):
        assert len(list(store.with_name(f"rows.{kind}").glob("*"))) == count, kind
    assert [path.stat().st_size for path in claims(store)] == [0, 0, 0]

    first, _, third = (
        stores.place(store, "logs", spec.key).read_text() for spec in calm.specs
    )
    keys = [spec.key for spec in calm.specs]
    assert third == f"trains beside {keys[0]}, whose log is of both\n"
    assert "ok after" in first
    assert keys[0] in first
    assert keys[2] in first


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
def test_jobs_share_processes_evenly(changes, options, sizes, store):
    all_specs = specs_of("CR", "ER", "LR", "LT", seeds=(0, 1))
    specs = [replace(spec, **changes) for spec in all_specs]
    jobs = sweep._jobs(specs, store, SweepOptions(**options))
    assert [1 + len(job.beside) for job in jobs] == sizes
    keys = [single.spec.key for job in jobs for single in job.each()]
    assert sorted(keys) == sorted(spec.key for spec in specs)
    for job in jobs:
        assert len({(one.spec.recipe, one.spec.seed) for one in job.each()}) == 1


def test_jobs_of_gpu_do_not_share_processes(store, monkeypatch):
    monkeypatch.setattr(sweep, "choose_device", lambda device, spec: "cuda")
    message = "together=2 is for the CPU; a GPU replays the steps of every run"
    options = SweepOptions(together=2)
    refused(message, sweep._jobs, specs_of("CR", "ER"), store, options)


def test_run_processes_share_cores(store, monkeypatch):
    def share(job, **_):
        return [Outcome(job.spec.key, "ran", {"sharing": job.sharing})]

    monkeypatch.setattr(sweep, "supervise", share)
    jobs = [Job(spec, store) for spec in specs_of("CR", "RR")]
    signals = SimpleNamespace(stop=threading.Event(), kill=threading.Event())
    live = Live(2, False)
    outcomes = sweep._in_processes(jobs, signals, live, slots=[None] * 3)
    assert [outcome.row["sharing"] for outcome in outcomes] == [3, 3]


def test_gpu_slots_are_round_robin_by_memory(monkeypatch):
    gigabyte = 2**30
    memory = [10 * gigabyte] * 2
    peaks = {"mlp6": 2 * gigabyte, "mlp4": 3 * gigabyte}
    hosts = dict.fromkeys(peaks, gigabyte)

    def properties(index):
        return SimpleNamespace(total_memory=memory[index])

    def measure(spec, device):
        model = spec.recipe.model
        return SimpleNamespace(peak_memory=peaks[model], host_memory=hosts[model])

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr(sweep, "usable_cores", lambda: 16)
    monkeypatch.setattr(sweep, "usable_memory", lambda: 64 * gigabyte)
    monkeypatch.setattr(sweep, "cached_timing", lambda *_: None)
    monkeypatch.setattr(sweep, "measure", measure)
    small = designs.quality_cost("demo", schedules=["CR"], static_bits=[], seeds=[0])
    recipes = [replace(spec.recipe, model="mlp4") for spec in small]
    large = [replace(small[0], recipe=recipe) for recipe in recipes]

    def slots(specs, device="cuda", **options):
        return sweep._slots(specs, SweepOptions(device=device, **options))

    assert slots(small, per_gpu=2) == [0, 1, 0, 1]
    assert slots(small, workers=3, per_gpu=2) == [0, 1, 0]
    assert slots(small, workers=4) == [0, 1, 0, 1]
    assert slots(small, threads=4, device="cpu") == [None] * 4
    assert slots(specs_of("CR"), workers=2) == [None, None]  # smoke scale
    assert slots(small, "auto", workers=2) == [None, None]  # demo scale
    assert slots(small) == [0, 1] * 3  # 3 x (2 GB + its context) in 9 of 10 GB
    assert slots([*small, *large]) == [0, 1] * 2  # whichever of them meet on a GPU
    memory[1] = 80 * gigabyte
    assert slots(small) == [0, 1] * 3  # the smaller of the two
    memory.reverse()
    assert slots(small) == [0, 1] * 3
    hosts["mlp6"] = 12 * gigabyte  # two in the GPU's half of the machine's memory
    assert slots(small) == [0, 1] * 2


# --- other sweeps, and changed data ---------------------------------------------------------------


@pytest.mark.slow
def test_run_grid_waits_for_concurrent_sweep(store, capsys):
    spec, other = specs_of("CR", "ER")
    rows = []
    thread = threading.Thread(
        target=lambda: rows.extend(run_grid([spec, other], store, workers=1))
    )
    with stores.claim(store, spec.key) as is_mine:
        assert is_mine
        assert run_all(Job(spec, store))[0].status == "busy"
        thread.start()
        deadline = time.monotonic() + 120
        while stores.find_row(store, other.key) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stores.find_row(store, spec.key) is None
        fields = {"status": "ok", "metrics": [], "by": "the other sweep"}
        stores.append_row(store, stores.describe(spec) | fields)
    thread.join()
    assert [row.get("by") for row in rows] == ["the other sweep", None]
    assert len(store.read_text().splitlines()) == 2
    lock = stores.place(store, "locks", spec.key)
    text = f"runs of another sweep, or of processes that somebody ended: 1; waiting for {lock}"
    assert capsys.readouterr().err.count(text) == 1


@pytest.fixture
def own_specs(data_folder):
    """Return runs of two seeds on images of the user."""
    write_images(data_folder, seed=0)
    sizes = {"train_images": None, "valid_images": 0, "test_images": None}
    (spec,) = specs_of("CR", size=8, batch=8, crop=0, **sizes)
    recipe = replace(spec.recipe, dataset="mine/")
    return [replace(spec, recipe=recipe, seed=seed) for seed in (0, 1)]


def write_images(folder, seed):
    write(folder / "mine", image_archives(seed=seed))
    loading._last.clear()  # as in another process


@pytest.mark.slow
def test_run_grid_rejects_rows_of_changed_data(own_specs, store, tmp_path):
    first, second = own_specs
    (row,) = run_grid([first], store, workers=0)
    assert run_grid([first], store, workers=0) == [row]
    write_images(tmp_path, seed=1)
    message = (
        r"the data of 'mine/' have changed: 1 rows in .*rows\.jsonl are of checksum"
    )
    for specs in ([first], [second], [first, second]):
        refused(message, run_grid, specs, store, workers=0)
    assert stores.load_rows(store) == [row]
    write_images(tmp_path, seed=0)
    assert len(run_grid([first, second], store, workers=0)) == 2
    shutil.rmtree(tmp_path / "mine")
    loading._last.clear()
    assert run_grid([first], store, workers=0) == [row]  # rows need no data


# --- options --------------------------------------------------------------------------------------

RANGE = "must be a whole number of at least {} and at most 1024, got {}"
INVALID = [
    ({"executor": "cloud"}, "unknown executor 'cloud'; choose from local, dask"),
    ({"device": "tpu"}, "unknown device 'tpu'; choose from auto, cpu, cuda"),
    ({"workers": -1}, "workers " + RANGE.format(0, -1)),
    ({"workers": 1.5}, r"workers must be an integer or None, got 1\.5"),
    ({"threads": 0}, "threads " + RANGE.format(1, 0)),
    ({"threads": 10**6}, "threads " + RANGE.format(1, 10**6)),
    ({"per_gpu": 0}, "per_gpu " + RANGE.format(1, 0)),
    ({"together": 0}, "together must be a whole number of at least 1"),
    ({"timeout": 0}, "timeout must be more than 0 seconds; got 0"),
    ({"timeout": float("nan")}, "timeout must be more than 0 seconds; got nan"),
    (
        {"timeout": 5.0, "together": 2},
        r"timeout=5.0 is of a run alone in its process; got together=2",
    ),
    (
        {"options": SweepOptions(workers=0), "timeout": 5},
        "timeout=5 needs runs in processes of their own",
    ),
    ({"workers": 0, "executor": "dask"}, "executor 'dask' needs at least 1"),
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
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_run_grid_rejects_invalid_options_first(options, message, store):
    refused(message, run_grid, specs_of("CR"), store, **options)
    assert not store.exists()


def test_run_grid_rejects_other_arguments_first(store):
    spec = specs_of("CR")[0]
    nowhere = replace(spec, recipe=replace(spec.recipe, dataset="nowhere/"))
    cases = [
        (["CR"], {}, TypeError, r"specs must be a list of RunSpec.*got 'CR' in it"),
        ([spec], {"worker": 2}, TypeError, "unexpected keyword argument 'worker'"),
        ([spec, nowhere], {}, FileNotFoundError, "there is no file or folder"),
    ]
    if not torch.cuda.is_available():
        message = "device 'cuda' was asked for"
        cases.append(([spec], {"device": "cuda"}, ValueError, message))
    for specs, options, error, message in cases:
        refused(message, run_grid, specs, store, error=error, **options)
    assert not store.exists()


# --- progress -------------------------------------------------------------------------------------


def test_progress_bar_shows_run_counts_and_time(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])

    def shown(call, *arguments):
        """Return what a call draws, ten seconds after the last one."""
        capsys.readouterr()
        now[0] += 10
        call(*arguments)
        return capsys.readouterr().err.split("\r")[-1]

    with Live(4, progress=True) as live:
        live.start("a")
        live.start("b")
        live.note = "a remark"
        text = shown(live.finish, Outcome("a", "ran", {"status": "ok"}))
        assert "1/4 [00:10<00:30" in text
        assert "1 running, 0 failed, a remark]" in text
        # Another sweep has it: not done.
        assert "1/4 [00:20<01:00" in shown(live.finish, Outcome("b", "busy"))
        text = shown(live.finish, Outcome("c", "ran", {"status": "failed"}))
        assert "2/4 [00:30<00:30" in text
        assert "0 running, 1 failed" in text
        # No run has ended, but the time goes on.
        assert "2/4 [00:40<00:40" in shown(live.refresh)
        live.concurrent_runs = 8
        assert "2 running, 1 failed" in shown(live.refresh)  # no more than there are
        assert live.summary() == "1 of 4 missing runs done, 1 failed"
        live.concurrent_runs = 0
        # It waits for another sweep, and does no steps.
        assert "step" not in shown(live.count_step, 8)
        live.start("d")
        live.count_step(8)
        text = shown(live.count_step, 8)
        assert "1 running, 1 failed, step 2 of 8, a remark]" in text
        live.finish(Outcome("d", "ran", {"status": "ok"}))
        live.start("e")
        assert "1 running, 1 failed, a remark]" in shown(live.refresh)


@pytest.mark.slow
def test_progress_bar_moves_with_in_process_steps(store, monkeypatch):
    seen = []

    def note(live, finished=0):
        seen.append((live.finished_runs, live.steps, live.total_steps))

    monkeypatch.setattr(Live, "refresh", note)
    run_grid(specs_of("CR", "RR", steps=8, n_cycles=1), store, workers=0)
    steps = [(done, step, 8) for done in range(2) for step in range(1, 9)]
    assert [shown for shown in seen if shown[1]] == steps
