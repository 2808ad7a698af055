"""Measure the bands that live numbers of the notebooks must lie in: ``python -m bench.bands``.

A band is the mean over twelve seeds +- four standard deviations. A negative control, static training at too few bits,
must fall outside; the command refuses to write bands that it does not.  Run it again when results change on purpose.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch

from cpt_core import grids
from cpt_core.paths import results_dir
from cpt_core.specs import RunSpec
from cpt_core.train import task_of, train

SEEDS = range(12)


def image(arm: str) -> list[RunSpec]:
    """Smoke runs of notebook 03."""
    static = [int(arm.split()[1])] if arm.startswith("static") else []
    return grids.quality_cost("smoke", schedules=[] if static else [arm], static=static, seeds=SEEDS)


def graph(arm: str) -> list[RunSpec]:
    """Smoke runs of notebook 05; as a control also the gradients have the bits of the arm."""
    static = [int(arm.split()[1])] if arm.startswith("static") else []
    top = [1] if static == [1] else None
    return grids.quality_cost(
        "smoke", "digits-graph", schedules=[] if static else [arm], static=static, q_max=top, seeds=SEEDS
    )


# name of the band -> (specs of an arm, the arm, the control)
BANDS: dict[str, tuple[Callable[[str], list[RunSpec]], str, str]] = {
    "smoke accuracy of static 8": (image, "static 8", "static 2"),
    "smoke accuracy of ER": (image, "ER", "static 2"),
    "smoke accuracy of GCN at static 8": (graph, "static 8", "static 1"),
    "smoke accuracy of GCN with ER": (graph, "ER", "static 1"),
}


def accuracies(specs: list[RunSpec]) -> list[float]:
    """Return the final test accuracy of every run."""
    return [round(train(task_of(spec), spec).metric("accuracy"), 4) for spec in specs]


def main() -> None:
    """Measure and write ``data/results/bands.json``."""
    torch.set_num_threads(1)
    bands = {}
    for name, (specs, arm, control_arm) in BANDS.items():
        values, control = accuracies(specs(arm)), accuracies(specs(control_arm))
        mean, sigma = statistics.mean(values), statistics.stdev(values)
        low, high = round(mean - 4 * sigma, 4), round(mean + 4 * sigma, 4)
        outside = sum(not low <= c <= high for c in control)
        print(f"{name}: {low} .. {high}; control outside for {outside} of {len(control)} seeds", flush=True)
        if outside < len(control):
            raise SystemExit(f"the control {control_arm!r} falls inside the band of {name!r}: {control}")
        bands[name] = {"low": low, "high": high, "values": values, "control": control}
    content = {"command": "python -m bench.bands", "rule": "mean +- 4 standard deviations", "bands": bands}
    (results_dir() / "bands.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
