"""Checks, timings and first runs on a GPU, in parts of less than ten minutes each.

    python -m bench.gpu checks      the tests that need CUDA; quantisers, layers and tasks against the CPU
    python -m bench.gpu speed       a training step: float32, quantised, captured, one operation at a time
    python -m bench.gpu memory      the peak of the same steps
    python -m bench.gpu packing     1 to 16 processes that share the GPU
    python -m bench.gpu evidence    runs of the Penn Treebank figure, into the ordinary store

Every part is a list of stages. The result of a stage is a line of ``runs/gpu/PART.jsonl`` as soon as it ends, a failure
too, and the same command goes on with the stages that are left; a summary, ``PART.json``, is written at the end of
every call. ``--dry`` is the rehearsal: everything runs on the CPU, at small sizes.

Exit status: 0 when every stage is done or was left out for a stated reason, 1 when some failed, 3 when some are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys

import torch

from bench.gpu.parts import PARTS
from bench.gpu.stages import (
    Options,
    describe_environment,
    forget_failures,
    run_stages,
    summary,
)
from cpt_lab.paths import runs_dir

SPARE = 60.0  # seconds after the limit at which a stage that hangs is ended, and its traceback written


def main(words: list[str] | None = None) -> int:
    """Run a part from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument(
        "--dry", action="store_true", help="rehearse on the CPU with small sizes"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=500.0,
        help="seconds after which no further stage starts",
    )
    parser.add_argument(
        "--only",
        default="",
        help="run only stages whose name contains one of these words, separated by commas",
    )
    parser.add_argument("--again", action="store_true", help="retry stages that failed")
    parser.add_argument(
        "--workers", type=int, help="runs at a time in the part evidence"
    )
    arguments = parser.parse_args(words)
    device = "cpu" if arguments.dry else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry rehearses on the CPU")
    folder = runs_dir() / ("gpu-dry" if arguments.dry else "gpu")
    options = Options(
        arguments.part,
        device,
        arguments.dry,
        arguments.seconds,
        arguments.workers,
        folder,
    )
    if arguments.again:
        forget_failures(options.rows)
    filters = arguments.only.split(",")
    stages = {
        n: s
        for n, s in PARTS[arguments.part](options).items()
        if any(word in n for word in filters)
    }
    if not stages:
        parser.error(
            f"no stage of {arguments.part} has one of {arguments.only!r} in its name"
        )
    environment = describe_environment(device)
    faulthandler.dump_traceback_later(arguments.seconds + SPARE, exit=True)
    try:
        rows = run_stages(stages, options, environment)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return summary(options, list(stages), rows, environment)


if __name__ == "__main__":
    sys.exit(main())
