"""Rows and curves in a tracker, through its own client: ``cpt run GRID --log mlflow``. The store stays the truth."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cpt_core.validation import choose
from cpt_lab.sweeps.stores import Row, load_curve, place

Curve = Iterable[tuple[int, dict[str, float]]]
PROJECT = "cpt"


def to_tensorboard(client: Any, name: str, params: Mapping[str, str], final: Any, curve: Curve, folder: Path) -> None:
    """Write the files that ``tensorboard --logdir`` shows, into the folder."""
    with client.SummaryWriter(folder) as writer:
        for step, values in curve:
            for metric, value in values.items():
                writer.add_scalar(metric, value, step)
        writer.add_hparams(params, final, run_name=".")


def to_mlflow(client: Any, name: str, params: Mapping[str, str], final: Any, curve: Curve, folder: Path) -> None:
    """Send to the server that ``MLFLOW_TRACKING_URI`` names."""
    client.set_experiment(PROJECT)
    with client.start_run(run_name=name):
        client.log_params(params)
        client.log_metrics(final)
        for step, values in curve:
            client.log_metrics(values, step=step)


def to_trackio(client: Any, name: str, params: Mapping[str, str], final: Any, curve: Curve, folder: Path) -> None:
    """Write what ``trackio show`` shows."""
    client.init(project=PROJECT, name=name, config=dict(params))
    for step, values in curve:
        client.log(values, step=step)
    client.log(final)
    client.finish()


TRACKERS: dict[str, tuple[str, Callable[..., None]]] = {
    "tensorboard": ("torch.utils.tensorboard", to_tensorboard),
    "mlflow": ("mlflow", to_mlflow),
    "trackio": ("trackio", to_trackio),
}


def sender(tracker: str) -> Callable[[Path, Iterable[Row]], int]:
    """Return what sends rows of a store to a tracker, those that it did not send before, and how many these were.

    What was sent has a folder ``<store>.<tracker>/<key>``; of TensorBoard it holds the files.

    Raises:
        ValueError: for an unknown tracker.
        ImportError: where its client is not installed.
        OSError: later, where the client fails; what was sent stays sent.
    """
    module, send = TRACKERS[choose("log", tracker, TRACKERS)]
    try:
        client = import_module(module)
    except ImportError as error:
        raise ImportError(f"{tracker} cannot be imported; get it with: pip install {tracker}") from error

    def sent(store: Path, rows: Iterable[Row]) -> int:
        new = [r for r in rows if r["status"] != "failed" and not place(store, tracker, r["key"]).exists()]
        for row in new:
            spec, folder = row["spec"], place(store, tracker, row["key"])
            params = {name: str(value) for name, value in {**spec["recipe"], **spec}.items() if name != "recipe"}
            metrics = [m for m in row["metrics"] if m["split"] == "test" and m["when"] == "final"]
            final = {f"{m['name']}_at_{m['precision']}": m["value"] for m in metrics if m["value"] is not None}
            lines = load_curve(store, row["key"]).set_index("step").iterrows()
            curve = [(int(step), line.dropna().to_dict()) for step, line in lines]
            name = f"{spec['arm']}, seed {spec['seed']}"
            try:
                send(client, name, params, final | {"cost": row["relative_cost"]}, curve, folder)
            except Exception as error:
                raise OSError(f"{tracker} did not take {name}: {error}; the rows are kept, try again") from error
            folder.mkdir(parents=True, exist_ok=True)
        return len(new)

    return sent
