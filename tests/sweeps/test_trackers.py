"""Rows in a tracker.  Clients are stand-ins here; those of mlflow, tensorboard and trackio were tried by hand."""

import contextlib
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from cpt_lab.commands import app
from cpt_lab.sweeps.stores import load_rows
from cpt_lab.sweeps.trackers import TRACKERS, sender

RUN = "run digits/mlp6 --scale smoke --arms CR RR --seeds 0 --workers 0".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPT_RUNS_DIR", str(folder))
        assert CliRunner().invoke(app, RUN).exit_code == 0
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A folder of two runs, of which nothing was sent."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def client(said):
    """Whatever is called is noted, with what it was given; with statements work."""

    class Client(ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)

            def call(*given, **named):
                said.append((name, *given, *named.values()))
                return contextlib.nullcontext(self) if name in ("SummaryWriter", "start_run") else SimpleNamespace()

            return call

    return Client("client")


@pytest.mark.parametrize(
    ("tracker", "module", "of_step", "of_run"),
    [
        ("tensorboard", "torch.utils.tensorboard", "add_scalar", "add_hparams"),
        ("mlflow", "mlflow", "log_metrics", "log_params"),
        ("trackio", "trackio", "log", "init"),
    ],
)
def test_rows_and_curves_are_sent_once(tracker, module, of_step, of_run, runs, monkeypatch):
    said = []
    monkeypatch.setitem(sys.modules, module, client(said))
    shown = CliRunner().invoke(app, [*RUN, "--log", tracker])
    assert shown.exit_code == 0, shown.output
    assert "rows sent: 2" in shown.output
    rows = load_rows(runs / "smoke" / "image.jsonl")
    assert sum(x[0] == of_run for x in said) == 2
    steps = rows[0]["spec"]["recipe"]["steps"]
    each = 3 if tracker == "tensorboard" else 1  # loss, bits, learning rate
    assert sum(x[0] == of_step and isinstance(x[-1], int) for x in said) >= 2 * each * steps
    first = next(x for x in said if x[0] == of_run)
    params = next(x for x in first if isinstance(x, dict))
    assert (params["dataset"], params["q_max"], params["arm"] in ("CR", "RR")) == ("digits", "8", True)
    finals = [x for call in said for x in call if isinstance(x, dict) and "cost" in x]
    assert sorted(x["cost"] for x in finals) == sorted(row["relative_cost"] for row in rows)
    assert {x["accuracy_at_q_max"] for x in finals} <= {m["value"] for row in rows for m in row["metrics"]}
    said.clear()
    assert "rows sent: 0" in CliRunner().invoke(app, [*RUN, "--log", tracker]).output
    assert not [x for x in said if x[0] in (of_step, of_run)]


@pytest.mark.usefixtures("runs")
def test_what_a_tracker_does_not_take_is_sent_by_the_next_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())  # which has nothing that is asked for
    shown = CliRunner().invoke(app, [*RUN, "--log", "mlflow"])
    assert isinstance(shown.exception, OSError)
    assert "mlflow did not take CR, seed 0: " in str(shown.exception)
    assert "the rows are kept, try again" in str(shown.exception)
    monkeypatch.setitem(sys.modules, "mlflow", client([]))
    assert "rows sent: 2" in CliRunner().invoke(app, [*RUN, "--log", "mlflow"]).output


def test_a_tracker_that_is_not_there_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for tracker, said in (("mlflow", "pip install mlflow"), ("wandb", "unknown log 'wandb'; choose from")):
        shown = CliRunner().invoke(app, [*RUN, "--log", tracker])
        assert said in str(shown.exception)
        assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="unknown log ''"):
        sender("")
    assert set(TRACKERS) == {"tensorboard", "mlflow", "trackio"}
