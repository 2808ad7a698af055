"""Time of rounding a tensor to every format, relative to the affine grid: ``python -m bench.formats``.

A million elements, 4096 rows of 256 with one range each, one thread; plain torch, which runs all formats but the affine
grid in every backend. Ratios are those of medians to the affine grid in plain torch and in C++ of the same rounding,
nearest or stochastic; all run interleaved in one process. Formats that search their range are at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from cpt_core.formats.format import FORMATS
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels.backend import backend

PLAIN, ACTIVE = torch.ops.cpt_reference, torch.ops.cpt
OPTIONS = ("e4m3:rounding=stochastic", "e2m1:clipping=percentile", "e2m1:clipping=rms", "affine4:clipping=rms")
NAMES = ("affine8", "symmetric8", *(n for n, f in FORMATS.items() if f.kind not in ("affine", "symmetric")), *OPTIONS)


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of every call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print one line per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--formats", nargs="+", default=NAMES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(backend())
    x, levels, key = torch.randn(given.rows, given.columns), torch.tensor(255.0), torch.tensor(3)
    bases = ("plain", "plain, stochastic", "active", "active, stochastic")
    calls: dict[str, Callable[[], object]] = {}
    for base in bases:
        ops, noise = PLAIN if base.startswith("plain") else ACTIVE, key if "stochastic" in base else None
        calls[base] = lambda ops=ops, noise=noise: ops.fake_quantize(x, levels, "per_row", noise)
    for name in given.formats:
        to = Quantizer("per_row").on(Quantizer.of(name))
        noise, grid = key if to.rounding == "stochastic" else None, to.grid
        calls[name] = lambda grid=grid, noise=noise: PLAIN.fake_quantize(x, levels, grid, noise)
    for call in calls.values():
        call()
    found = seconds(calls, given.rounds)
    print(f"{'':28} {'ms':>7} {'to affine':>10} {'to its C++':>11}")
    for name in given.formats:
        noisy = ", stochastic" * (Quantizer.of(name).rounding == "stochastic")
        plain, active = (found[name] / found[base + noisy] for base in ("plain", "active"))
        print(f"{name:28} {1e3 * found[name]:7.2f} {plain:9.1f}x {active:10.1f}x")


if __name__ == "__main__":
    main()
