"""Bands in which the live numbers of the notebooks must lie: ``python -m bench.bands``.

A band is the mean over twelve seeds +- four standard deviations. A negative control, static training at too few bits,
must fall outside; otherwise the command refuses to write the bands. Run it again when results change on purpose.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train

SEEDS = range(12)


def smoke(dataset: str, arm: str) -> list[RunSpec]:
    """Smoke runs of the notebook on an embedded data set."""
    static = [int(arm.split()[1])] if arm.startswith("static") else []
    return designs.quality_cost(
        "smoke",
        dataset,
        schedules=[] if static else [arm],
        static_bits=static,
        seeds=SEEDS,
    )


image, detection = (
    partial(smoke, name) for name in ("digits", "digit-scenes")
)  # notebooks 03, 04


# name of the band -> (specs of an arm, the arm, the control, the metric)
BANDS: dict[str, tuple[Callable[[str], list[RunSpec]], str, str, str]] = {
    "smoke accuracy of static 8": (image, "static 8", "static 2", "accuracy"),
    "smoke accuracy of ER": (image, "ER", "static 2", "accuracy"),
    "smoke loss of the detector with static 8": (
        detection,
        "static 8",
        "static 1",
        "loss",
    ),
    "smoke loss of the detector with ER": (detection, "ER", "static 1", "loss"),
}


def measure_runs(specs: list[RunSpec], metric: str) -> list[float]:
    """Return the final test metric of every run."""
    return [
        round(train(load_task_class(spec), spec).metric(metric), 4) for spec in specs
    ]


def main() -> None:
    """Measure the bands, all or those that --only selects, and write ``data/results/bands.json``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", help="part of a band's name; the others stay as they are"
    )
    only = parser.parse_args().only
    torch.set_num_threads(1)
    path = results_dir() / "bands.json"
    bands = {
        k: v
        for k, v in json.loads(path.read_text())["bands"].items()
        if only and k in BANDS
    }
    for name, (specs, arm, control_arm, metric) in BANDS.items():
        if only not in name:
            continue
        values, control = (
            measure_runs(specs(arm), metric),
            measure_runs(specs(control_arm), metric),
        )
        mean, sigma = statistics.mean(values), statistics.stdev(values)
        low, high = round(mean - 4 * sigma, 4), round(mean + 4 * sigma, 4)
        outside = sum(not low <= c <= high for c in control)
        print(
            f"{name}: {low} .. {high}; control outside for {outside} of {len(control)} seeds",
            flush=True,
        )
        if outside < len(control):
            raise SystemExit(
                f"the control {control_arm!r} falls inside the band of {name!r}: {control}"
            )
        bands[name] = {"low": low, "high": high, "values": values, "control": control}
    content = {
        "command": "python -m bench.bands",
        "rule": "mean +- 4 standard deviations",
        "bands": bands,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
