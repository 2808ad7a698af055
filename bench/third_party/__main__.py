"""Command line of the checks of other libraries' models and functions: ``python -m bench.third_party``.

``--only`` names parts, ``--update`` stores the counts in data/results/third_party.json; a part that was skipped leaves
its stored counts. The exit status is 1 when a promise is broken that is not listed in known_failures.py, or when one is
listed that is kept.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from bench.third_party import databases, examination, invariances, suites
from bench.third_party.foreign_models import FAMILIES
from bench.third_party.known_failures import (
    outdated_answers,
    reason_of,
    unexpected_answers,
    unexpected_rows,
)
from bench.third_party.results import FILE
from cpt_extras.files import write_text
from cpt_lab.paths import results_dir
from cpt_lab.provenance import source

PARTS = ("layers", "functions", "invariances", "suites")


def layers(number: int) -> list[examination.Row]:
    return list(databases.module_rows(databases.module_database()[number]))


def functions(number: int) -> list[examination.Row]:
    return list(databases.function_rows(databases.function_database()[number]))


def family(unit: tuple[str, int]) -> list[invariances.Answer]:
    name, number = unit
    return invariances.answers(list(FAMILIES[name]())[number])


def quiet() -> None:
    """Compute on one thread, and silence the messages of other libraries."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.stderr = open(os.devnull, "w")  # for as long as the process lives


def in_processes(function: Any, units: Iterable[Any], jobs: int) -> list[Any]:
    """Return the rows of all units."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=quiet) as pool:
        return [row for rows in pool.map(function, units) for row in rows]


def summarise_rows(
    rows: list[examination.Row], database: str, size: int
) -> dict[str, Any]:
    """Return the counts and faults of the rows of a database."""
    faults = [
        f"{row.name} ({row.case}): {fault}" for row in rows for fault in row.faults
    ]
    return {
        "database": database,
        "entries": size,
        "counts": examination.count(rows),
        "faults": faults,
    }


def summarise_answers(answers: list[invariances.Answer]) -> dict[str, Any]:
    """Return counts of the invariances, the largest difference that holds, and the broken ones."""
    broken = [
        {**asdict(a), "reason": reason_of(a)}
        for a in answers
        if a.outcome in ("broken", "crashed")
    ]
    largest_differences = [
        max(v for k, v in a.moved.items() if k != "float32")
        for a in answers
        if a.outcome == "holds"
    ]
    models = {(a.family, a.model) for a in answers}
    return {
        "bits": list(invariances.BITS),
        "training passes": invariances.TRAINING_PASSES,
        "models": len(models),
        "questions": invariances.count(answers),
        "largest difference of those that hold": float(
            f"{max(largest_differences, default=0.0):.2g}"
        ),
        "broken": broken,
    }


def run_part(part: str, jobs: int) -> tuple[dict[str, Any], list[str]]:
    """Return the results of a part, and the unexpected failures."""
    if part == "layers":
        size = len(databases.module_database())
        rows = in_processes(layers, range(size), jobs)
        return summarise_rows(rows, "module_db", size), unexpected_rows(rows)
    if part == "functions":
        size = len(databases.function_database())
        rows = in_processes(functions, range(size), jobs)
        return summarise_rows(rows, "op_db", size), unexpected_rows(rows)
    if part == "invariances":
        units = [
            (name, number)
            for name, cases in FAMILIES.items()
            for number in range(len(list(cases())))
        ]
        answers = in_processes(family, units, jobs)
        failures = [*unexpected_answers(answers), *outdated_answers(answers)]
        return summarise_answers(answers), failures
    return suites.run()


def main() -> None:
    """Run the parts, print their counts and store them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run"
    )
    parser.add_argument(
        "--update", action="store_true", help=f"store the counts in data/results/{FILE}"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="number of processes")
    options = parser.parse_args()
    path = results_dir() / FILE
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    failures: list[str] = []
    for part in options.only:
        start = time.monotonic()
        results, unexpected = run_part(part, options.jobs)
        failures += unexpected
        if "skipped" not in results:
            content[part] = {**source(), "torch": torch.__version__, **results}
        print(
            f"\n{part}, {time.monotonic() - start:.0f} s\n{json.dumps(results, indent=1)}",
            flush=True,
        )
    if options.update:
        write_text(
            path,
            json.dumps(
                {"command": "python -m bench.third_party --update", **content}, indent=1
            )
            + "\n",
        )
    if failures:
        raise SystemExit("\n".join(["third-party: not expected:", *failures]))
    print("third-party: every promise was kept")


if __name__ == "__main__":
    main()
