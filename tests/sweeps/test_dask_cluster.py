"""Sweeps on Dask clusters of worker processes on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import refused, specs_of

from bench.kill_sweep import claims, holder
from cpt_lab.paths import ROOT
from cpt_lab.sweeps import progress, stores
from cpt_lab.sweeps.sweep import run_grid

distributed = pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning"
    ),  # sockets of the cluster, closed a moment later
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


QUIET = {
    "threads_per_worker": 1,
    "dashboard_address": "127.0.0.1:0",
    "silence_logs": 50,
}


@pytest.fixture
def signals(monkeypatch):
    """Return the Ctrl-C handlers, one of every sweep that has begun."""
    found, enter = [], progress.Signals.__enter__
    monkeypatch.setattr(
        progress.Signals, "__enter__", lambda self: found.append(self) or enter(self)
    )
    return found


def numbers(rows):
    return [(r["key"], r["status"], r["metrics"], r["bitops"]) for r in rows]


def test_dask_cluster_equals_local_rows(tmp_path, monkeypatch):
    """Start a local cluster that listens only on loopback, and only for HTTP status pages."""
    local, answers = distributed.LocalCluster, []

    def listening():
        return {
            c.laddr
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }

    def watched(**how):
        before = listening()
        found = local(**how)
        for host, port in listening() - before:
            with urllib.request.urlopen(
                f"http://{host}:{port}/health", timeout=20
            ) as answer:
                answers.append((host, answer.read()))
        return found

    monkeypatch.setattr(distributed, "LocalCluster", watched)
    specs = specs_of("CR", "ER")
    here = run_grid(specs, tmp_path / "a.jsonl", workers=0)
    there = run_grid(
        specs, tmp_path / "b.jsonl", executor="dask", workers=1, together=2
    )
    assert numbers(there) == numbers(here)
    assert [row["provenance"]["beside"] for row in there] == [1, 1]
    assert answers == [("127.0.0.1", b"ok")] * 2  # of the scheduler and of the worker
    assert list(tmp_path.glob("*.sweep")) == []


def test_dask_adaptive_cluster_gets_work_before_workers(tmp_path, capsys):
    """Submit runs at once, since batch systems start workers on demand."""
    specs = specs_of("CR", "ER")
    with distributed.LocalCluster(n_workers=0, processes=False, **QUIET) as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="200ms")
        rows = run_grid(
            specs,
            tmp_path / "rows.jsonl",
            executor="dask",
            scheduler=cluster.scheduler_address,
        )
    assert [row["status"] for row in rows] == ["ok", "ok"]
    said = f"2 runs wait for workers of the Dask scheduler at {cluster.scheduler_address}: none yet\n"
    assert capsys.readouterr().err.count(said) == 1


def test_dask_sweep_stops_on_interrupt_while_waiting(tmp_path, monkeypatch, signals):
    monkeypatch.setattr(
        "cpt_lab.sweeps.dask_cluster.tqdm.write",
        lambda *_: signals[0]._handle(signal.SIGINT, None),
    )
    with (
        distributed.LocalCluster(n_workers=0, processes=False, **QUIET) as cluster,
        pytest.raises(
            KeyboardInterrupt,
            match="0 of 1 missing runs done; the same command goes on from here",
        ),
    ):
        run_grid(
            specs_of("CR"),
            tmp_path / "rows.jsonl",
            executor="dask",
            scheduler=cluster.scheduler_address,
        )
    assert list(tmp_path.glob("*.sweep")) == []


def test_dask_killed_worker_resumes_from_checkpoint(tmp_path, monkeypatch):
    """Write a checkpoint when the worker is gone, and resume on a second worker."""
    specs, store, rows = specs_of("CR", steps=700), tmp_path / "rows.jsonl", []
    monkeypatch.setattr(progress.Signals, "__enter__", lambda self: self)
    with distributed.LocalCluster(n_workers=2, host="127.0.0.1", **QUIET) as cluster:
        how = {
            "executor": "dask",
            "scheduler": cluster.scheduler_address,
            "checkpoint_seconds": 0.2,
        }
        thread = threading.Thread(
            target=lambda: rows.extend(run_grid(specs, store, **how))
        )
        thread.start()
        checkpoint = stores.place(store, "checkpoints", specs[0].key)
        deadline = time.monotonic() + 200
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        run = holder(stores.place(store, "locks", specs[0].key))
        worker = (
            psutil.Process(run).parent().parent()
        )  # the run was forked by the server of its worker
        with distributed.Client(cluster) as client:
            assert worker.pid in client.run(os.getpid).values()
        os.kill(worker.pid, signal.SIGKILL)
        thread.join()
    log = stores.place(store, "logs", specs[0].key).read_text()
    assert "goes on from step" in log
    assert len(store.read_text().splitlines()) == 1
    assert numbers(rows) == numbers(run_grid(specs, tmp_path / "calm.jsonl", workers=0))


def test_dask_lost_scheduler_is_reported_last(tmp_path):
    """Use separate processes as users start them, not threads of this one."""
    settings = {
        "PYTHONPATH": str(ROOT),
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
    }  # else it hopes for 30 s
    here, surroundings = {"cwd": tmp_path, "text": True}, os.environ | settings
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "env": surroundings,
        **here,
    }
    dask, file = [sys.executable, "-m", "dask"], tmp_path / "scheduler.json"
    places = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dashboard-address",
        "127.0.0.1:0",
    ]
    scheduler = subprocess.Popen(
        [*dask, "scheduler", *places, "--scheduler-file", str(file)], **quiet
    )
    while not file.exists() or not file.read_text():
        time.sleep(0.1)
    address = json.loads(file.read_text())["address"]
    worker = subprocess.Popen(
        [*dask, "worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny"],
        **quiet,
    )
    grid = [
        "run",
        "digits/mlp6",
        "--scale",
        "demo",
        "--executor",
        "dask",
        "--scheduler",
        address,
    ]
    command, surroundings = (
        [sys.executable, "-m", "cpt_lab", *grid],
        surroundings | {"CPT_RUNS_DIR": str(tmp_path)},
    )
    run = subprocess.Popen(
        command,
        env=surroundings,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        **here,
    )
    try:
        while (
            not any(map(holder, claims(tmp_path / "demo" / "image.jsonl")))
            and run.poll() is None
        ):
            time.sleep(0.1)
        scheduler.kill()
        said = run.communicate(timeout=120)[1]
    finally:
        for process in (scheduler, worker, run):
            process.kill()
            process.wait()
    gone = (
        f"the Dask scheduler at {address} is gone; its runs write checkpoints, "
        "and the same command goes on from there"
    )
    assert (
        said.splitlines()[-1] == f"error: {gone}"
    )  # above it Dask may have said something of its own
    assert run.returncode == 2
    assert list(tmp_path.glob("demo/*.sweep")) == []


def test_dask_sweep_needs_data_and_shared_folder(tmp_path):
    how = {"executor": "dask", "workers": 1}
    (good,) = specs_of("CR")
    bad = replace(good, recipe=replace(good.recipe, dataset="nowhere/"))
    refused(
        "there is no folder",
        run_grid,
        [bad],
        tmp_path / "rows.jsonl",
        **how,
        error=FileNotFoundError,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Path, "write_text", lambda self, text, **how: None
        )  # as if the workers were on another machine
        with pytest.raises(
            ValueError, match=r"does not see .*a file system that all workers share"
        ):
            run_grid([good], tmp_path / "rows.jsonl", **how)
    assert stores.load_rows(tmp_path / "rows.jsonl") == []


def test_dask_sweep_interrupt_waits_for_checkpoints(tmp_path, signals):
    specs = specs_of(
        "CR", "ER", "LR", steps=20_000
    )  # too many to end before the signal
    store = tmp_path / "rows.jsonl"

    def press():
        while sum(holder(claim) is not None for claim in claims(store)) < 2:
            time.sleep(0.05)
        signals[0]._handle(signal.SIGINT, None)

    threading.Thread(target=press).start()
    with pytest.raises(
        KeyboardInterrupt,
        match="0 of 3 missing runs done; the same command goes on from here",
    ):
        run_grid(specs, store, executor="dask", workers=2)
    assert len(list((tmp_path / "rows.checkpoints").glob("*.pt"))) == 2
    assert [holder(claim) for claim in claims(store)] == [None, None]
    assert stores.load_rows(store) == []


def test_dask_sweep_rejects_unreachable_scheduler(tmp_path, monkeypatch):
    monkeypatch.setattr("cpt_lab.sweeps.dask_cluster.CONNECT_SECONDS", 1)
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with pytest.raises(ValueError, match=f"no Dask scheduler at '{address}'"):
            run_grid(
                specs_of("CR"),
                tmp_path / "rows.jsonl",
                executor="dask",
                scheduler=address,
            )
