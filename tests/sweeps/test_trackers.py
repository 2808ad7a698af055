"""Rows sent to trackers: each once, without costing a run; ``tests/trackers`` covers real clients."""

import copy
import shutil
import sys
from types import SimpleNamespace

import pytest
from helpers import refused

from cpt_lab.sweeps import sweep, trackers
from cpt_lab.sweeps.stores import claim, load_rows
from cpt_lab.sweeps.trackers import TRACKERS, Sender, TrackedRun

WORDS = "run digits/mlp6 --scale smoke --arms CR LR --seeds 0 --workers 0 --steps 10 --n-cycles 2"


@pytest.fixture
def store(calm, tmp_path, monkeypatch):
    """Return a copy of the calm sweep, as the store that commands use."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    (tmp_path / "smoke").mkdir()
    shutil.copytree(
        calm.store.with_name("rows.curves"), tmp_path / "smoke/image.curves"
    )
    return shutil.copy(calm.store, tmp_path / "smoke" / "image.jsonl")


@pytest.fixture
def tracked(monkeypatch):
    """Return the runs of a tracker named ``memory``; it raises the first of ``errors``."""
    memory = SimpleNamespace(runs=list[TrackedRun](), errors=list[BaseException]())

    def send(client, run):
        (run.folder / "begun").touch()
        if memory.errors:
            raise memory.errors[0]
        memory.runs.append(run)

    monkeypatch.setitem(TRACKERS, "memory", ("json", send))
    return memory


@pytest.fixture
def log(command):
    """Return a function that runs the sweep's command with a tracker."""
    return lambda tracker="memory": command(*WORDS.split(), "--log", tracker)


def test_sender_sends_rows_and_curves_once(store, tracked, log):
    assert log()[0] == 0
    rows = {row["key"]: row for row in load_rows(store)}
    assert [run.name for run in tracked.runs] == ["LR, seed 0", "CR, seed 0"]
    for run in tracked.runs:
        row = rows[run.params["key"]]
        assert (run.params["dataset"], run.params["q_max"]) == ("digits", "8")
        assert run.final["cost"] == row["relative_cost"]
        values = {metric["value"] for metric in row["metrics"]}
        assert run.final["accuracy_at_q_max"] in values
        assert len(run.curve) == row["spec"]["recipe"]["steps"]
        assert {"loss"} < set(run.curve[0][1])
    assert "rows sent: 0" in log()[1]
    assert len(tracked.runs) == 2


@pytest.mark.parametrize("message", ["no server\nat all", ""])
def test_sender_warns_once_of_failing_client(message, store, tracked, log):
    tracked.errors.append(OSError(message))
    status, out, error = log()
    reason = message.partition("\n")[0] or "OSError"
    expected = f"memory rejected LR, seed 0: {reason}; all rows are kept"
    (warning,) = (line for line in error.splitlines() if line.startswith("warning: "))
    assert warning.startswith(f"warning: {expected}")
    assert status == 1
    assert "2 ok" in out
    tracked.errors.clear()
    assert "rows sent: 2" in log()[1]


def test_sender_failure_stops_no_later_run(store, tracked, command, monkeypatch):
    """Run all grids of a question, each with its store."""
    rows, names = load_rows(store), []

    def run_grid(specs, store, options):
        names.append(store.name)
        return rows

    monkeypatch.setattr(sweep, "run_grid", run_grid)
    tracked.errors.append(OSError("no server"))
    status, out, error = command("run", "h4", "--log", "memory")
    assert (status, names) == (1, ["language_model.jsonl", "graph.jsonl"])
    assert out.count("rows sent: 0") == 2
    assert error.count("rejected") == 1


def test_sender_repeats_interrupted_sending(store, tracked):
    def is_partial():
        folders = store.with_name("image.memory").iterdir()
        return [path.name.endswith(".part") for path in folders]

    rows = load_rows(store)
    tracked.errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Sender("memory")(store, rows)
    assert is_partial() == [True]
    tracked.errors.clear()
    assert Sender("memory")(store, rows) == 3
    assert is_partial() == [False] * 3


def test_sender_sends_rerun_row_again(store, tracked):
    rows = load_rows(store)
    assert Sender("memory")(store, rows) == 3
    again = copy.deepcopy(rows[1])
    again["provenance"]["started"] = "2031-01-01T00:00:00+00:00"
    again["relative_cost"] = 0.5
    assert Sender("memory")(store, [rows[0], again, rows[2]]) == 1
    assert tracked.runs[-1].final["cost"] == 0.5
    assert Sender("memory")(store, [again]) == 0
    folders = sorted(path.name for path in store.with_name("image.memory").iterdir())
    assert folders == sorted(row["key"] for row in rows)


def test_sender_skips_rows_claimed_by_second_process(store, tracked):
    rows = load_rows(store)
    with claim(store, f"{rows[0]['key']}.memory"):
        assert Sender("memory")(store, rows) == 2
    assert Sender("memory")(store, rows) == 1


def test_sender_sends_run_without_curve(store, tracked, log):
    rows = load_rows(store)[:2]
    missing, damaged = (
        store.with_name("image.curves") / f"{row['key']}.parquet" for row in rows
    )
    missing.unlink()
    damaged.write_bytes(b"no parquet")
    status, out, _ = log()
    assert status == 0
    assert "rows sent: 2, 2 of them without a curve" in out
    assert [run.curve for run in tracked.runs] == [[], []]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        *(
            (name, f"get it with: pip install {name}")
            for name in ("mlflow", "wandb", "trackio")
        ),
        ("broken", "broken cannot be imported (an old protobuf)"),
        ("comet", "unknown log 'comet'; choose from"),
    ],
)
def test_sender_rejects_missing_tracker_before_runs(
    tracker, message, tmp_path, monkeypatch, log
):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, tracker, None)
    if tracker == "broken":
        monkeypatch.delitem(sys.modules, tracker)
        (tmp_path / "broken.py").write_text("raise TypeError('an old protobuf')")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(TRACKERS, "broken", ("broken", trackers.to_wandb))
    assert message in log(tracker)[2]
    assert not (tmp_path / "smoke").exists()
    refused("unknown log ''", Sender, "")
