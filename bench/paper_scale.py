"""Estimated cost of all runs of the paper: ``python -m bench.paper_scale``.

    python -m bench.paper_scale --tflops 10 --price 2

It counts the multiply-accumulates (MACs) of a forward pass of every recipe, as ``cpt plan --measure --scale paper``
does for the first recipe of every grid; what was measured before is not measured again. A training step has three such
passes, a MAC is two operations, and a simulated matmul runs in float32; rounding, evaluation, reading data and waiting
come on top. So hours = 6 x MACs x steps x runs / speed. The float32 speed that a GPU reaches on such models and the
price of an hour are options: no GPU was measured. Writes ``data/results/paper_scale.json``, without these two.
"""

from __future__ import annotations

import argparse
import json

import pandas as pd

from cpt_extras.files import write_text
from cpt_lab.experiments.grids import find_grids
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.provenance import source
from cpt_lab.sweeps.forecast import CURVE_BYTES, RUN_BYTES
from cpt_lab.sweeps.step_timing import Calibration, cached_timing, measure

OPERATIONS = 6  # of a training step, for every MAC of a forward pass
SCHEDULE_FIELDS = ("steps", "lr", "milestones", "n_cycles")  # of a recipe
COLUMNS = "grid artefact runs steps gigamacs store_mb checkpoint_mb".split()


def count_grids() -> pd.DataFrame:
    """Return one line per grid of the paper: runs, mean steps, mean MACs of a forward pass, storage."""
    rows, counted_keys = [], set[str]()
    timings: dict[str, Calibration] = {}
    for name, grid in find_grids(None).items():
        if "paper" not in grid.scales:
            continue
        specs = [
            spec for spec in grid.make("paper") if spec.key not in counted_keys
        ]  # a run of two grids counts in the first
        if not specs:
            continue
        counted_keys |= {spec.key for spec in specs}
        for spec in specs:
            if (work := work_key(spec)) not in timings:
                timings[work] = cached_timing(spec) or measure(spec)
        steps = [spec.recipe.steps for spec in specs]
        macs = [timings[work_key(spec)].macs for spec in specs]
        weighted = [n * count for n, count in zip(macs, steps, strict=True)]
        mean_macs = sum(weighted) / sum(steps)
        checkpoints = [timings[work_key(spec)].checkpoint for spec in specs]
        store_mb = sum(CURVE_BYTES * n + RUN_BYTES for n in steps) / 1e6
        values = (
            name,
            grid.artefact,
            len(specs),
            sum(steps) / len(steps),
            mean_macs / 1e9,
            store_mb,
            2 * max(checkpoints) / 1e6,
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return pd.DataFrame(rows, columns=COLUMNS)


def work_key(spec: RunSpec) -> str:
    """Return a text that two runs share if their steps do the same work: the recipe without its schedules."""
    recipe = spec.to_dict()["recipe"]
    for name in SCHEDULE_FIELDS:
        recipe.pop(name, None)
    return json.dumps(recipe, sort_keys=True)


def add_prices(frame: pd.DataFrame, tflops: float, price: float) -> pd.DataFrame:
    """Add exaops, GPU hours and money, from a speed in TFLOPS and a price per hour."""
    operations = OPERATIONS * frame.gigamacs * 1e9 * frame.steps * frame.runs
    hours = operations / (tflops * 1e12) / 3600
    return frame.assign(exaops=operations / 1e18, hours=hours, money=hours * price)


def main() -> None:
    """Count the runs, write the counts, and print the estimate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tflops",
        type=float,
        default=10.0,
        help="float32 speed that the GPU reaches, in 10^12 operations a second",
    )
    parser.add_argument(
        "--price", type=float, default=2.0, help="price of an hour of the GPU"
    )
    options = parser.parse_args()
    frame = count_grids()
    content = {
        "command": "python -m bench.paper_scale",
        "rows": frame.to_dict("records"),
        "provenance": source(),
    }
    write_text(results_dir() / "paper_scale.json", json.dumps(content, indent=1) + "\n")
    table = add_prices(frame, options.tflops, options.price)
    print(table.round(1).to_string(index=False))
    print(
        table[["runs", "store_mb", "exaops", "hours", "money"]]
        .sum()
        .round(1)
        .to_string()
    )


if __name__ == "__main__":
    main()
