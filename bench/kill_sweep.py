"""Test of crash safety: kill a sweep at random moments, restart it, compare its rows with an undisturbed sweep.

    python -m bench.kill_sweep --kills 50 --seed 0

Each time SIGKILL ends the sweep, one of its runs, or the process that holds the write lock of the store; or the sweep
gets one or two Ctrl-C. At the end no row may be missing, none may be there twice, and every
number of every row and curve must equal that of the undisturbed sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cpt_lab.experiments import designs
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.sweep import run_grid

# In turn. A run or a writer is killed as soon as there is one, so what comes next meets a sweep at work; and the sweep
# after that tries again what failed.
KINDS = ("run", "writer", "sweep", "run", "ctrl-c twice", "ctrl-c")
SWEEP = """
import json, sys
from pathlib import Path
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.sweep import run_grid
if __name__ == "__main__":
    specs = [RunSpec.from_dict(d) for d in json.loads(Path(sys.argv[1]).read_text())]
    print("started", flush=True)
    run_grid(specs, sys.argv[2], workers=2, checkpoint_seconds=0.1, retry_failed=True)
"""


def start(specs: Path, store: Path) -> subprocess.Popen[str]:
    """Start a sweep in a process group of its own, as a terminal does."""
    command = [sys.executable, "-c", SWEEP, str(specs), str(store)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def holder(lock: Path) -> int | None:
    """Return the id of the process that holds a lock file, as the kernel reports it; None if nobody does."""
    try:
        inode = lock.stat().st_ino
    except OSError:
        return None
    match = re.search(
        rf"FLOCK\s+ADVISORY\s+WRITE (\d+) \w+:\w+:{inode} ",
        Path("/proc/locks").read_text(encoding="utf-8"),
    )
    return int(match[1]) if match else None


def claims(store: Path) -> list[Path]:
    """Return the lock files of all runs that were ever claimed."""
    return sorted((store.parent / f"{store.stem}.locks").glob("*.lock"))


def strike(
    kind: str, sweep: subprocess.Popen[str], store: Path, rng: random.Random
) -> bool:
    """Send the signal of one kind; return False if there was no such process."""
    if kind == "sweep":
        sweep.kill()
    elif kind.startswith("ctrl-c"):
        os.killpg(sweep.pid, signal.SIGINT)  # reaches the runs too, as in a terminal
        if kind.endswith("twice"):
            time.sleep(0.6 + rng.random() * 0.3)
            if sweep.poll() is None:
                os.killpg(sweep.pid, signal.SIGINT)
    else:
        deadline = time.monotonic() + 20
        while sweep.poll() is None and time.monotonic() < deadline:
            locks = (
                [store.with_name(store.name + ".lock")]
                if kind == "writer"
                else claims(store)
            )
            holders = [pid for pid in map(holder, locks) if pid is not None]
            pid = rng.choice(holders) if holders else sweep.pid
            if pid != sweep.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                return True
        return False
    return True


def row_numbers(store: Path) -> dict[str, tuple[str, str]]:
    """Return the numbers of every row and of its curve, by key."""
    facts_by_key = {}
    for row in stores.load_rows(store):
        numbers = {
            name: row.get(name)
            for name in (
                "status",
                "metrics",
                "bitops",
                "steps",
                "loss",
                "data_checksum",
            )
        }
        facts_by_key[row["key"]] = (
            json.dumps(numbers, sort_keys=True),
            stores.load_curve(store, row["key"]).to_json(),
        )
    return facts_by_key


def torture(
    kills: int,
    seed: int,
    *,
    seeds: tuple[int, ...] = (0, 1),
    steps: int = 190,
    report=print,
) -> Counter[str]:
    """Kill ``kills`` times, over as many sweeps as needed; raise AssertionError if anything is lost.

    Returns:
        Number of kills by kind, and "resumed": runs that continued from a checkpoint.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        specs = designs.quality_cost("smoke", seeds=seeds, steps=steps)
        (folder / "specs.json").write_text(
            json.dumps([spec.to_dict() for spec in specs])
        )

        began = time.monotonic()
        run_grid(specs, folder / "calm" / "rows.jsonl", workers=0)
        span = time.monotonic() - began
        expected = row_numbers(folder / "calm" / "rows.jsonl")
        assert len(expected) == len(specs)
        report(f"undisturbed: {len(specs)} runs in {span:.1f} s")

        num_rounds = num_kills = 0
        while num_kills < kills:
            num_rounds += 1
            store = folder / f"round{num_rounds}" / "rows.jsonl"
            sweep = start(folder / "specs.json", store)
            while True:
                if num_kills < kills and sweep.poll() is None:
                    time.sleep(rng.random() * span / 6)
                    kind = KINDS[num_kills % len(KINDS)]
                    if sweep.poll() is None and strike(kind, sweep, store, rng):
                        num_kills += 1
                        counts[kind] += 1
                is_running = num_kills < kills and sweep.poll() is None
                if is_running and kind in ("run", "writer"):
                    continue
                if sweep.wait() == 0 and is_complete(store, len(specs)):
                    break
                sweep = start(folder / "specs.json", store)

            check_store(store, expected)
            for log in (store.parent / "rows.logs").glob("*.log"):
                counts["resumed"] += log.read_text().count("goes on from step")
            lines = [json.loads(line) for line in store.read_text().splitlines()]
            counts["failed rows"] += sum(line["status"] == "failed" for line in lines)
            report(
                f"round {num_rounds}: {num_kills} kills so far, all {len(specs)} rows there once and the same; "
                f"{dict(counts)}"
            )
    return counts


def is_complete(store: Path, num_runs: int) -> bool:
    """Return whether a store has the rows of all runs, and no run failed in the end."""
    status_by_key = {row["key"]: row["status"] for row in stores.load_rows(store)}
    has_failures = "failed" in status_by_key.values()
    return len(status_by_key) == num_runs and not has_failures


def check_store(store: Path, expected: dict[str, tuple[str, str]]) -> None:
    """Assert that a store has every row once with the expected numbers, and no leftovers."""
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    finished = Counter(line["key"] for line in lines if line["status"] != "failed")
    assert set(finished) == set(expected), "a row was lost"
    assert set(finished.values()) == {1}, (
        f"a run was done twice: {finished.most_common(3)}"
    )
    assert row_numbers(store) == expected, "a resumed run differs"

    leftovers = [path.name for path in (store.parent / "rows.checkpoints").glob("*")]
    assert not leftovers, leftovers
    locks = {path.stem: (path.stat().st_size, holder(path)) for path in claims(store)}
    assert locks == dict.fromkeys(expected, (0, None))


def main() -> None:
    """Run the test from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    counts = torture(options.kills, options.seed)
    print(
        f"{options.kills} kills in {time.monotonic() - began:.0f} s: {dict(counts)}; nothing lost, nothing twice"
    )


if __name__ == "__main__":
    main()
