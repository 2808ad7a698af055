"""Experiment trackers: rows and curves are copied to TensorBoard, MLflow, Trackio or Weights & Biases.

``Sender`` sends the rows of a store that it has not sent before; ``TRACKERS`` has one function per tracker, which sends
one run through the client of the tracker. A folder beside the store marks a run as sent, and holds when it started: a
run that was made again is sent again. A client that fails ends the sending, not the runs: the store remains complete.
"""

import io
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from cpt_core.validation import check_choice
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.stores import claim, load_curve, place

PROJECT = "cpt"
MLFLOW_BATCH = 1000  # metrics in one request, the most that MLflow takes
SENT_FILE = "started.txt"  # of the run that was sent


class TrackedRun(NamedTuple):
    """One run in the form that trackers take.

    Attributes:
        name: for people, such as "CR, seed 0".
        params: the spec and its recipe, as texts, and the key of the row.
        final: the last test metrics, and the relative cost.
        curve: (step, metrics) of the training, in order; empty where it has none any more.
        folder: for what the client writes to the disk.
    """

    name: str
    params: dict[str, str]
    final: dict[str, float]
    curve: list[tuple[int, dict[str, float]]]
    folder: Path


def to_tensorboard(client: Any, run: TrackedRun) -> None:
    """Write the files that ``tensorboard --logdir`` shows, into the folder."""
    with client.SummaryWriter(run.folder) as writer:
        for step, values in run.curve:
            for metric, value in values.items():
                writer.add_scalar(metric, value, step)
        writer.add_hparams(run.params, run.final, run_name=".")


def to_mlflow(client: Any, run: TrackedRun) -> None:
    """Send to the server or the file that ``MLFLOW_TRACKING_URI`` names."""
    client.set_experiment(PROJECT)
    timestamp = int(time.time() * 1000)
    metrics = [
        client.entities.Metric(name, value, timestamp, step)
        for step, values in run.curve
        for name, value in values.items()
    ]
    with client.start_run(run_name=run.name) as active:
        client.log_params(run.params)
        client.log_metrics(run.final)
        for start in range(0, len(metrics), MLFLOW_BATCH):
            batch = metrics[start : start + MLFLOW_BATCH]
            client.MlflowClient().log_batch(active.info.run_id, metrics=batch)


def to_trackio(client: Any, run: TrackedRun) -> None:
    """Write what ``trackio show`` shows."""
    with redirect_stdout(io.StringIO()):  # it has several lines for every run
        client.init(project=PROJECT, name=run.name, config=run.params)
        for step, values in run.curve:
            client.log(values, step=step)
        client.log(run.final)
        client.finish()


def to_wandb(client: Any, run: TrackedRun) -> None:
    """Write what ``wandb sync`` sends, into the folder; send it at once where ``WANDB_MODE`` is "online"."""
    settings = client.Settings(
        silent=True, console="off", disable_git=True, x_disable_stats=True
    )
    mode = os.environ.get("WANDB_MODE", "offline")
    run_settings: Any = {
        "project": PROJECT,
        "name": run.name,
        "config": run.params,
        "dir": run.folder,
        "mode": mode,
    }
    with client.init(settings=settings, **run_settings) as active:
        for step, values in run.curve:
            active.log(values, step=step)
        active.summary.update(run.final)


# name -> module of its client, function that sends a run with it
TRACKERS: dict[str, tuple[str, Callable[[Any, TrackedRun], None]]] = {
    "tensorboard": ("torch.utils.tensorboard", to_tensorboard),
    "mlflow": ("mlflow", to_mlflow),
    "trackio": ("trackio", to_trackio),
    "wandb": ("wandb", to_wandb),
}


class Sender:
    """Sends rows of stores to a tracker, those that it did not send before.

    What was sent has a folder ``<store>.<tracker>/<key>``; of TensorBoard and Weights & Biases it holds the files. A
    row that was made again (``cpt run --rerun-old``) takes the folder of the former one; trackers with a store of
    their own show both.

    Attributes:
        tracker: its name.
        failure: why it sends no more, in a sentence; empty as long as the client takes what it gets.
        without_curve: how many runs were sent without their curve, which is not there or cannot be read.

    Raises:
        ValueError: for an unknown tracker.
        ImportError: where its client cannot be imported.
    """

    def __init__(self, tracker: str) -> None:
        module, self._send = TRACKERS[check_choice("log", tracker, TRACKERS)]
        self.tracker, self.failure, self.without_curve = tracker, "", 0
        try:
            self._client = import_module(module)
        except Exception as error:  # clients fail to import in many ways
            reason = f"{tracker} cannot be imported ({error}); get it with: pip install {tracker}"
            raise ImportError(reason) from error

    def __call__(self, store: Path, rows: Iterable[ResultRow]) -> int:
        """Send new rows until the client refuses one; return how many were sent."""
        sent = 0
        for row in rows:
            if row["status"] == "failed" or self.failure:
                continue
            try:
                sent += self._send_once(store, row)
            except (
                Exception
            ) as error:  # whatever a client raises: the runs are worth more
                reason = next(iter(str(error).splitlines()), "") or type(error).__name__
                self.failure = (
                    f"{self.tracker} rejected {_name(row)}: {reason}; all rows are kept, and the same command "
                    "sends what is missing"
                )
        return sent

    def _send_once(self, store: Path, row: ResultRow) -> bool:
        """Send a row unless it was sent before, or another process is sending it; return whether it was sent."""
        folder = place(store, self.tracker, row["key"])
        started = row["provenance"].get("started", "")
        with claim(store, f"{row['key']}.{self.tracker}") as is_mine:
            if not is_mine or _started_of_sent(folder) == started:
                return False
            partial = folder.with_name(
                f"{folder.name}.part"
            )  # what was cut off is sent again
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._send(self._client, self._tracked_run(store, row, partial))
            (partial / SENT_FILE).write_text(started)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        return True

    def _tracked_run(self, store: Path, row: ResultRow, folder: Path) -> TrackedRun:
        spec = row["spec"]
        params = {
            name: str(value)
            for name, value in {**spec["recipe"], **spec}.items()
            if name != "recipe"
        }
        metrics = [
            m for m in row["metrics"] if m["split"] == "test" and m["when"] == "final"
        ]
        final = {
            f"{m['name']}_at_{m['precision']}": m["value"]
            for m in metrics
            if m["value"] is not None
        }
        try:
            lines = load_curve(store, row["key"]).set_index("step").iterrows()
            curve = [(int(step), line.dropna().to_dict()) for step, line in lines]
        except (OSError, ValueError):
            curve, self.without_curve = [], self.without_curve + 1
        params["key"], final["cost"] = row["key"], row["relative_cost"]
        return TrackedRun(_name(row), params, final, curve, folder)


def _started_of_sent(folder: Path) -> str | None:
    """Return when the run that was sent from a folder started; None where no run was."""
    file = folder / SENT_FILE
    return file.read_text() if file.is_file() else None


def _name(row: ResultRow) -> str:
    return f"{row['spec']['arm']}, seed {row['spec']['seed']}"
