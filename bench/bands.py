"""Measure the bands that live numbers of the notebooks must lie in: ``python -m bench.bands``.

A band is the mean over twelve seeds +- four standard deviations. A negative control, static training at 2 bits, must
fall outside; the command refuses to write bands that it does not.  Run it again when results change on purpose.
"""

from __future__ import annotations

import json
import statistics

import torch

from cpt_core import grids
from cpt_core.paths import results_dir
from cpt_core.train import task_of, train

SEEDS = range(12)
BANDS = {"smoke accuracy of static 8": "static 8", "smoke accuracy of ER": "ER"}
CONTROL = "static 2"


def accuracies(arm: str) -> list[float]:
    """Return the final test accuracy of a smoke run for every seed."""
    schedules, static = ([], [int(arm.split()[1])]) if arm.startswith("static") else ([arm], [])
    specs = grids.image("smoke", schedules=schedules, static=static, seeds=SEEDS)
    return [round(train(task_of(spec), spec).metric("accuracy"), 4) for spec in specs]


def main() -> None:
    """Measure and write ``data/results/bands.json``."""
    torch.set_num_threads(1)
    control = accuracies(CONTROL)
    bands = {}
    for name, arm in BANDS.items():
        values = accuracies(arm)
        mean, sigma = statistics.mean(values), statistics.stdev(values)
        low, high = round(mean - 4 * sigma, 4), round(mean + 4 * sigma, 4)
        outside = sum(not low <= c <= high for c in control)
        print(f"{name}: {low} .. {high}; control outside for {outside} of {len(control)} seeds")
        if outside < len(control):
            raise SystemExit(f"the control {CONTROL!r} falls inside the band of {name!r}: {control}")
        bands[name] = {"low": low, "high": high, "values": values, "control": control}
    content = {"command": "python -m bench.bands", "rule": "mean +- 4 standard deviations", "bands": bands}
    (results_dir() / "bands.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
