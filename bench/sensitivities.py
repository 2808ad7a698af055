"""Sensitivities of the tasks of H5 to bits, by window and layer: ``python -m bench.sensitivities``.

Writes ``data/results/sensitivity.json``, from which the schedules of ``h5/...`` are made. ``--only NAME`` measures one
case; several processes may do one each at a time.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from filelock import FileLock

from cpt_extras.files import write_text
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.paths import results_dir
from cpt_lab.provenance import machine, source, versions
from cpt_lab.studies.h5.arms import CASES, Q_MAX, SENSITIVITY_FILE, MeasuredCase
from cpt_lab.training.recipe_search import recipe_sensitivity


def measure_case(case: MeasuredCase) -> Sensitivity:
    """Measure one case on its own seeds, 50 and up."""
    return recipe_sensitivity(
        case.recipe, base=case.bits, q_max=Q_MAX, seeds=range(50, 50 + case.measured)
    )


def main() -> None:
    """Measure the sensitivities and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", choices=list(CASES), help="one case; the others stay as they are"
    )
    only = parser.parse_args().only
    torch.set_num_threads(1)
    path = results_dir() / SENSITIVITY_FILE
    for name in [only] if only else CASES:
        start = time.monotonic()
        result = measure_case(CASES[name])
        print(f"{name}: {result.title}\n{result}\n", flush=True)
        seconds, where = (
            round(time.monotonic() - start, 1),
            {**source(), "machine": machine(), "versions": versions()},
        )
        with FileLock(path.with_name(f"{path.name}.lock")):
            cases = (
                json.loads(path.read_text(encoding="utf-8"))["cases"]
                if path.exists()
                else {}
            )
            cases[name] = {**result.to_dict(), "seconds": seconds, "provenance": where}
            ordered = {name: cases[name] for name in CASES if name in cases}
            write_text(
                path,
                json.dumps(
                    {"command": "python -m bench.sensitivities", "cases": ordered},
                    indent=1,
                )
                + "\n",
            )


if __name__ == "__main__":
    main()
