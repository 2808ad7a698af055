"""Rows in real trackers, sent by their clients without a network; ``make trackers`` installs the clients.

What is read back is read by the tracker's own reader; only Weights & Biases has none for its files of offline runs.
"""

import math
import os
import shutil
import socket
import sqlite3
import struct
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import TRACKED_RUNS, train_tracked_runs
from typer.testing import CliRunner

from cpt_lab.commands import app
from cpt_lab.sweeps.stores import load_curve, load_rows

pytestmark = pytest.mark.filterwarnings("default")  # those of the clients are their own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tracked_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """Return a folder of two unsent runs, with a separate home and without a network.

    One of the runs diverged: its curve has a number that is missing, and one that is infinite.
    """
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    connect = socket.socket.connect

    def local_alone(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), (
            f"asks for {address}"
        )
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_alone)
    return shutil.copytree(trained, tmp_path / "runs")


@pytest.fixture
def rows(runs):
    """Return the rows by their names in a tracker."""
    return {
        f"{row['spec']['arm']}, seed 0": row
        for row in load_rows(runs / "smoke" / "image.jsonl")
    }


@pytest.fixture
def curves(runs, rows):
    """Return name -> metric -> {step: value}, for a tracker; the curve of CR ends in infinity and NaN."""
    store = runs / "smoke" / "image.jsonl"
    path = store.parent / "image.curves" / f"{rows['CR, seed 0']['key']}.parquet"
    frame = pd.read_parquet(path)
    frame.loc[frame.index[-2:], "loss"] = [math.inf, math.nan]
    frame.to_parquet(path)
    tables = {
        name: load_curve(store, row["key"]).set_index("step")
        for name, row in rows.items()
    }
    return {
        name: {metric: table[metric].dropna().to_dict() for metric in table}
        for name, table in tables.items()
    }


def log(tracker):
    shown = CliRunner().invoke(app, [*TRACKED_RUNS, "--log", tracker])
    assert shown.exit_code == 0, shown.output
    return next(
        line for line in shown.output.splitlines() if line.startswith("rows sent: ")
    )


def check(row, curve, params, final, metrics):
    """Compare a tracker's copy of a run with its row and its curve: texts, floats, steps."""
    assert (
        params.items()
        >= {
            "key": row["key"],
            "dataset": "digits",
            "arm": row["spec"]["arm"],
            "q_max": "8",
        }.items()
    )
    accuracy = next(
        m for m in row["metrics"] if (m["split"], m["when"]) == ("test", "final")
    )
    expected = {
        "cost": row["relative_cost"],
        f"accuracy_at_{accuracy['precision']}": accuracy["value"],
    }
    assert {name: final[name] for name in expected} == pytest.approx(expected)
    assert metrics.keys() >= {"loss", "bits"}
    for metric, values in metrics.items():
        assert values == pytest.approx(curve[metric])


@pytest.mark.slow
def test_tensorboard_shows_rows_and_curves(runs, rows, curves):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert log("tensorboard") == "rows sent: 2"
    for name, row in rows.items():
        found = EventAccumulator(
            str(runs / "smoke" / "image.tensorboard" / row["key"]), {"scalars": 0}
        ).Reload()
        scalars = {
            tag: {e.step: e.value for e in found.Scalars(tag)}
            for tag in found.Tags()["scalars"]
        }
        metrics = {tag: scalars.pop(tag) for tag in curves[name]}
        data = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        hparams = HParamsPluginData.FromString(data).session_start_info.hparams
        final = {tag: values[0] for tag, values in scalars.items()}
        check(
            row,
            curves[name],
            {key: value.string_value for key, value in hparams.items()},
            final,
            metrics,
        )
    assert log("tensorboard") == "rows sent: 0"


def _from_sql(value):
    """Return the number given to MLflow, which stores infinity as the largest float."""
    return math.inf if value == sys.float_info.max else value


@pytest.mark.slow
def test_mlflow_shows_rows_and_curves(rows, curves, monkeypatch, tmp_path):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient, set_tracking_uri

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    set_tracking_uri(uri)
    assert log("mlflow") == "rows sent: 2"
    client = MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("cpt").experiment_id])
    assert {one.info.run_name: one.info.status for one in found} == dict.fromkeys(
        rows, "FINISHED"
    )
    for one in found:
        curve = curves[one.info.run_name]
        history = {
            name: client.get_metric_history(one.info.run_id, name) for name in curve
        }
        metrics = {
            name: {m.step: _from_sql(m.value) for m in values}
            for name, values in history.items()
        }
        check(
            rows[one.info.run_name], curve, one.data.params, one.data.metrics, metrics
        )
    assert log("mlflow") == "rows sent: 0"
    assert len(client.search_runs([found[0].info.experiment_id])) == 2


@pytest.mark.slow
def test_mlflow_without_server_costs_no_run(runs, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        mlflow.set_tracking_uri(uri)
        shown = CliRunner().invoke(app, [*TRACKED_RUNS, "--log", "mlflow"])
    assert (shown.exit_code, shown.output.count("mlflow rejected")) == (1, 1)
    assert "2 ok" in shown.output
    mlflow.set_tracking_uri(f"sqlite:///{runs / 'mlflow.db'}")
    assert log("mlflow") == "rows sent: 2"


def test_trackio_shows_rows_and_curves(rows, curves, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    assert log("trackio") == "rows sent: 2"
    (database,) = (tmp_path / "trackio").glob("*.db")
    storage = sqlite_storage.SQLiteStorage
    assert sorted(storage.get_runs("cpt")) == sorted(rows)
    for name, row in rows.items():
        lines = storage.get_logs("cpt", name)
        *steps, last = lines
        metrics = {
            metric: {x["step"]: float(x[metric]) for x in steps if metric in x}
            for metric in curves[name]
        }
        check(row, curves[name], storage.get_run_config("cpt", name), last, metrics)
    assert log("trackio") == "rows sent: 0"
    with sqlite3.connect(database) as read:
        assert read.execute(
            "select count(distinct run_id) from metrics"
        ).fetchone() == (2,)


def wandb_records(path: Path):
    """Yield the records of an offline run: LevelDB's log format, 32 KiB blocks of parts with 7-byte headers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def test_wandb_keeps_rows_and_curves_offline(runs, rows, curves):
    pytest.importorskip("wandb")
    from json import loads

    assert log("wandb") == "rows sent: 2"
    for name, row in rows.items():
        folder = runs / "smoke" / "image.wandb" / row["key"]
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        records = list(wandb_records(path))
        config, final, names = {}, {}, []
        metrics = {metric: {} for metric in curves[name]}
        for record in records:
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.append(record.run.display_name)
                config |= {x.key: loads(x.value_json) for x in record.run.config.update}
            if kind == "summary":
                final |= {x.key: loads(x.value_json) for x in record.summary.update}
            if kind == "history":
                items = {
                    (x.key or x.nested_key[0]): loads(x.value_json)
                    for x in record.history.item
                }
                for metric in metrics.keys() & items.keys():
                    metrics[metric][items["_step"]] = float(items[metric])
        assert set(names) == {name}
        check(row, curves[name], config, final, metrics)
    assert log("wandb") == "rows sent: 0"


def test_tracker_clients_are_all_installed():
    """Require all tracker clients under ``make trackers``, so that no test is skipped."""
    if not os.environ.get("CPT_TRACKERS"):
        pytest.skip("make trackers installs them")
    assert {"mlflow", "tensorboard", "trackio", "wandb"} <= {
        m.partition(".")[0] for m in sys.modules
    }
