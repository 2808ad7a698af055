"""Rows sent to trackers: each once, without costing a run; ``tests/trackers`` covers real clients."""

import shutil
import sys
from types import SimpleNamespace

import pytest
from helpers import TRACKED_RUNS, train_tracked_runs
from typer.testing import CliRunner

from cpt_lab.commands import app
from cpt_lab.sweeps import sweep, trackers
from cpt_lab.sweeps.stores import claim, load_rows
from cpt_lab.sweeps.trackers import TRACKERS, Sender, TrackedRun


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_tracked_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """Provide a folder of two runs with no row sent."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def tracked(monkeypatch):
    """Return the runs of a tracker named ``memory``; it raises the exceptions in ``fails``."""
    memory = SimpleNamespace(runs=list[TrackedRun](), fails=list[BaseException]())

    def send(client, run):
        (run.folder / "begun").touch()
        if memory.fails:
            raise memory.fails[0]
        memory.runs.append(run)

    monkeypatch.setitem(TRACKERS, "memory", ("json", send))
    return memory


def run(*words):
    shown = CliRunner().invoke(app, [*TRACKED_RUNS, "--log", "memory", *words])
    return shown.exit_code, shown.output


def test_sender_sends_rows_and_curves_once(runs, tracked):
    assert run()[0] == 0
    rows = {row["key"]: row for row in load_rows(runs / "smoke" / "image.jsonl")}
    assert [one.name for one in tracked.runs] == ["CR, seed 0", "RR, seed 0"]
    for one in tracked.runs:
        row = rows[one.params["key"]]
        assert (one.params["dataset"], one.params["q_max"]) == ("digits", "8")
        assert one.final["cost"] == row["relative_cost"]
        assert one.final["accuracy_at_q_max"] in {m["value"] for m in row["metrics"]}
        assert len(one.curve) == row["spec"]["recipe"]["steps"]
        assert {"loss"} < set(one.curve[0][1])
    assert "rows sent: 0" in run()[1]
    assert len(tracked.runs) == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError("no server\nat all"),
        RuntimeError(),
        AttributeError("log"),
        ValueError("x"),
    ],
)
def test_sender_warns_once_of_failing_client(error, runs, tracked):
    tracked.fails.append(error)
    status, output = run()
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    (warning,) = [line for line in output.splitlines() if line.startswith("warning: ")]
    assert warning.startswith(
        f"warning: memory rejected CR, seed 0: {reason}; all rows are kept"
    )
    assert status == 1
    assert "2 ok" in output
    tracked.fails.clear()
    assert "rows sent: 2" in run()[1]


def test_sender_failure_stops_no_later_run(runs, tracked, monkeypatch):
    """Run all grids of a question, each with its store."""
    rows, stores = load_rows(runs / "smoke" / "image.jsonl"), []
    monkeypatch.setattr(
        sweep,
        "run_grid",
        lambda specs, store, options: stores.append(store.name) or rows,
    )
    tracked.fails.append(OSError("no server"))
    shown = CliRunner().invoke(app, ["run", "h4", "--log", "memory"])
    assert (shown.exit_code, stores) == (1, ["language_model.jsonl", "graph.jsonl"])
    assert shown.output.count("rows sent: 0") == 2
    assert shown.output.count("rejected") == 1


def test_sender_repeats_interrupted_sending(runs, tracked):
    tracked.fails.append(KeyboardInterrupt())
    assert run()[0] != 0
    assert [
        path.name.endswith(".part")
        for path in (runs / "smoke" / "image.memory").iterdir()
    ] == [True]
    tracked.fails.clear()
    assert "rows sent: 2" in run()[1]
    assert [
        path.name.endswith(".part")
        for path in (runs / "smoke" / "image.memory").iterdir()
    ] == [False, False]


def test_sender_skips_rows_claimed_by_second_process(runs, tracked):
    store = runs / "smoke" / "image.jsonl"
    rows = load_rows(store)
    with claim(store, f"{rows[0]['key']}.memory"):
        assert Sender("memory")(store, rows) == 1
    assert Sender("memory")(store, rows) == 1


def test_sender_sends_run_without_curve(runs, tracked):
    curves = sorted((runs / "smoke" / "image.curves").iterdir())
    curves[0].unlink()
    curves[1].write_bytes(b"no parquet")
    status, output = run()
    assert status == 0
    assert "rows sent: 2, 2 of them without a curve" in output
    assert [one.curve for one in tracked.runs] == [[], []]


def test_sender_rejects_missing_tracker_before_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    for tracker in ("mlflow", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, tracker, None)
    (tmp_path / "broken_client.py").write_text("raise TypeError('an old protobuf')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(
        trackers.TRACKERS, "broken", ("broken_client", trackers.to_wandb)
    )
    expected = {
        name: f"get it with: pip install {name}"
        for name in ("mlflow", "wandb", "trackio")
    }
    expected |= {
        "broken": "broken cannot be imported (an old protobuf)",
        "comet": "unknown log 'comet'; choose from",
    }
    for tracker, said in expected.items():
        shown = CliRunner().invoke(app, [*TRACKED_RUNS, "--log", tracker])
        assert said in str(shown.exception)
        assert not (tmp_path / "smoke").exists()
    with pytest.raises(ValueError, match="unknown log ''"):
        Sender("")
