"""Rows of a store, with their curves, in a tracker: ``track.py runs/demo/image.jsonl mlflow`` (or tensorboard).

The store stays the truth; what was sent before is not sent again, so that this may run after every sweep.
"""

import sys
from pathlib import Path

from cpt_lab.sweeps.stores import load_curve, load_rows


def to_tensorboard(name, params, final, curve, folder):
    """Write the files that ``tensorboard --logdir tensorboard`` shows."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for step, values in curve:
            for metric, value in values.items():
                writer.add_scalar(metric, value, step)
        writer.add_hparams(params, final, run_name=".")


def to_mlflow(name, params, final, curve, folder):
    """Send to the server that ``MLFLOW_TRACKING_URI`` names."""
    import mlflow

    mlflow.set_experiment("cpt")
    with mlflow.start_run(run_name=name):
        mlflow.log_params(params)
        mlflow.log_metrics(final)
        for step, values in curve:
            mlflow.log_metrics(values, step=step)


def main(store, tracker):
    """Send what was not sent yet; return how many rows these were."""
    send, count = {"tensorboard": to_tensorboard, "mlflow": to_mlflow}[tracker], 0
    for row in load_rows(Path(store)):
        sent = Path(tracker) / row["key"]
        if row["status"] == "failed" or sent.exists():
            continue
        spec, metrics = row["spec"], [m for m in row["metrics"] if m["split"] == "test" and m["when"] == "final"]
        params = {name: str(value) for name, value in {**spec["recipe"], **spec}.items() if name != "recipe"}
        final = {f"{m['name']}_at_{m['precision']}": m["value"] for m in metrics} | {"cost": row["relative_cost"]}
        lines = load_curve(store, row["key"]).set_index("step").iterrows()
        curve = [(int(step), line.dropna().to_dict()) for step, line in lines]
        send(f"{spec['arm']}, seed {spec['seed']}", params, final, curve, sent)
        sent.mkdir(parents=True, exist_ok=True)
        count += 1
    return count


if __name__ == "__main__":
    print(main(*sys.argv[1:]), "rows sent")
