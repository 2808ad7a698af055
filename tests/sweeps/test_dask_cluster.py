"""Sweeps on Dask clusters of this machine."""

import os
import signal
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import refused, specs_of

from bench.kill_sweep import check_store, claims, holder, row_numbers
from cpt_lab.sweeps import dask_cluster, progress, stores
from cpt_lab.sweeps.sweep import run_grid

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
    # Sockets of the cluster are closed a moment later.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STOPPED = "0 of {} missing runs done; the same command goes on from here"


@pytest.fixture
def store(tmp_path):
    yield tmp_path / "rows.jsonl"
    assert list(tmp_path.glob("*.sweep")) == []


@pytest.fixture
def signals(monkeypatch):
    """Return the Ctrl-C handlers, one of every sweep that has begun."""
    handlers, enter = [], progress.Signals.__enter__

    def note(self):
        handlers.append(self)
        return enter(self)

    monkeypatch.setattr(progress.Signals, "__enter__", note)
    return handlers


def local_cluster(n_workers=0, **options):
    """Return a cluster with workers in this process, unless asked otherwise."""
    options = {"processes": False, "threads_per_worker": 1, **options}
    quiet = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    return distributed.LocalCluster(n_workers=n_workers, **options, **quiet)


def run_on(cluster, specs, store, **options):
    """Run a sweep on an existing cluster."""
    options |= {"executor": "dask", "scheduler": cluster.scheduler_address}
    return run_grid(specs, store, **options)


def test_dask_cluster_equals_local_rows(store, calm, monkeypatch):
    """Start a local cluster that listens only on loopback, and only for HTTP status pages."""
    start_cluster, answers = distributed.LocalCluster, []

    def listening():
        connections = psutil.Process().net_connections("inet")
        return {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}

    def watched(**options):
        before = listening()
        cluster = start_cluster(**options)
        for host, port in listening() - before:
            url = f"http://{host}:{port}/health"
            with urllib.request.urlopen(url, timeout=20) as answer:
                answers.append((host, answer.read()))
        return cluster

    monkeypatch.setattr(distributed, "LocalCluster", watched)
    specs = calm.specs[:2]
    rows = run_grid(specs, store, executor="dask", workers=1, together=2)
    assert row_numbers(store) == {spec.key: calm.numbers[spec.key] for spec in specs}
    assert [row["provenance"]["beside"] for row in rows] == [1, 1]
    assert answers == [("127.0.0.1", b"ok")] * 2  # of the scheduler and of the worker


def test_dask_adaptive_cluster_gets_work_before_workers(store, capsys):
    """Submit runs at once, since batch systems start workers on demand."""
    with local_cluster() as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="200ms")
        rows = run_on(cluster, specs_of("CR", "ER"), store)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    address = cluster.scheduler_address
    text = f"2 runs wait for workers of the Dask scheduler at {address}: none yet\n"
    assert capsys.readouterr().err.count(text) == 1


def test_dask_sweep_stops_on_interrupt_while_waiting(store, monkeypatch, signals):
    def interrupt(*_):
        signals[0]._handle(signal.SIGINT, None)

    monkeypatch.setattr(dask_cluster.tqdm, "write", interrupt)
    with local_cluster() as cluster:
        message, error = STOPPED.format(1), KeyboardInterrupt
        refused(message, run_on, cluster, specs_of("CR"), store, error=error)


def test_dask_sweep_interrupt_waits_for_checkpoints(store, signals):
    specs = specs_of("CR", "ER", "LR", steps=20_000)  # do not end before the signal

    def interrupt():
        while sum(holder(claim) is not None for claim in claims(store)) < 2:
            time.sleep(0.05)
        signals[0]._handle(signal.SIGINT, None)

    threading.Thread(target=interrupt).start()
    options = {"executor": "dask", "workers": 2}
    message, error = STOPPED.format(3), KeyboardInterrupt
    refused(message, run_grid, specs, store, error=error, **options)
    assert len(list(store.with_name("rows.checkpoints").glob("*.pt"))) == 2
    assert [holder(claim) for claim in claims(store)] == [None, None]
    assert stores.load_rows(store) == []


def test_dask_killed_worker_resumes_from_checkpoint(store, tmp_path, monkeypatch):
    """Write a checkpoint when the worker is gone, and resume on the worker that its nanny starts."""
    (spec,) = specs_of("CR", steps=700)
    run_grid([spec], tmp_path / "calm.jsonl", workers=0)
    monkeypatch.setattr(progress.Signals, "__enter__", lambda self: self)
    checkpoint = stores.place(store, "checkpoints", spec.key)
    with local_cluster(1, processes=True, host="127.0.0.1") as cluster:
        thread = threading.Thread(
            target=run_on,
            args=(cluster, [spec], store),
            kwargs={"checkpoint_seconds": 0.2},
        )
        thread.start()
        deadline = time.monotonic() + 200
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        run = psutil.Process(holder(stores.place(store, "locks", spec.key)))
        worker = run.parent().parent()  # a run is forked by the server of its worker
        with distributed.Client(cluster) as client:
            assert worker.pid in client.run(os.getpid).values()
        worker.kill()
        thread.join()
    assert "goes on from step" in stores.place(store, "logs", spec.key).read_text()
    check_store(store, row_numbers(tmp_path / "calm.jsonl"))


def test_dask_lost_scheduler_is_reported(store, monkeypatch):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        local_cluster(protocol="tcp://", host="127.0.0.1") as cluster,
    ):
        monkeypatch.setattr(
            dask_cluster.tqdm,
            "write",
            lambda *_: threading.Timer(0.5, cluster.close).start(),
        )
        message = f"the Dask scheduler at {cluster.scheduler_address} is gone; its runs"
        error = ConnectionError
        refused(message, run_on, cluster, specs_of("CR"), store, error=error)
    assert stores.load_rows(store) == []


def test_dask_sweep_needs_data_and_shared_folder(store, monkeypatch):
    options = {"executor": "dask", "workers": 1}
    (good,) = specs_of("CR")
    bad = replace(good, recipe=replace(good.recipe, dataset="nowhere/"))
    error = FileNotFoundError
    refused("there is no folder", run_grid, [bad], store, error=error, **options)
    # As if the workers were on another machine.
    monkeypatch.setattr(Path, "write_text", lambda self, text, **_: None)
    message = r"does not see .*a file system that all workers share"
    refused(message, run_grid, [good], store, **options)
    assert stores.load_rows(store) == []


def test_dask_workers_check_data(store):
    """Compare the data of the workers with those of stored rows."""
    first, second = specs_of("CR", seeds=(0, 1))
    fields = {"status": "ok", "data_checksum": "that of other data"}
    stores.append_row(store, stores.describe(first) | fields)
    message = r"the data of 'digits' have changed: 1 rows in .*rows\.jsonl"
    refused(message, run_grid, [second], store, executor="dask", workers=1)
    assert len(stores.load_rows(store)) == 1


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://x"])
def test_dask_sweep_rejects_unreachable_scheduler(address, store, monkeypatch):
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 1)
    message = f"no Dask scheduler at '{address}'"
    options = {"executor": "dask", "scheduler": address}
    refused(message, run_grid, specs_of("CR"), store, **options)
