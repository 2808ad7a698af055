"""What a store of many rows costs: reading it, finding a run, appending a row.  CPU seconds, medians.

    python -m bench.stores --rows 100000

The rows are the committed ones again and again, of other seeds. Who finds or appends a row looks through the whole
store, and parses the lines of that run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cpt_lab.experiments.spec import key_of
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.lines import line_of


def fill(store: Path, count: int) -> dict[str, Any]:
    """Write a store and return one of its rows."""
    lines = [line for path in sorted(results_dir().glob("*.jsonl")) for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    with open(store, "wb") as file:
        file.writelines(line_of(of(rows[i % len(rows)], i)) for i in range(count))
    return rows[0]


def of(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the row of another seed."""
    spec = {**row["spec"], "seed": seed}
    return {**row, "spec": spec, "key": key_of(spec)}


def seconds(call: Callable[[int], Any], repeats: int) -> float:
    """Return the median CPU time of a call, which is told its number."""
    times = []
    for i in range(repeats):
        began = time.process_time()
        call(i)
        times.append(time.process_time() - began)
    return median(times)


def measure(store: Path, count: int, repeats: int) -> str:
    """Return the line of one size."""
    row = fill(store, count)
    new = [of(row, count + i) for i in range(repeats)]
    appended = seconds(lambda i: stores.append_row(store, new[i]), repeats)
    found = seconds(lambda i: stores.find_row(store, new[i]["key"]), repeats)
    read = seconds(lambda i: stores.load_rows(store), repeats)
    size = store.stat().st_size / 1e6
    return f"{count:8} {size:6.0f} {read:8.2f} {1e3 * found:8.1f} {1e3 * appended:10.2f}"


def main() -> None:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{'rows':>8} {'MB':>6} {'read s':>8} {'find ms':>8} {'append ms':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for count in given.rows:
            print(measure(Path(folder) / f"{count}.jsonl", count, given.repeats))


if __name__ == "__main__":
    main()
