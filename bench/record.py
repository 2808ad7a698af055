"""What recording costs: ``python -m bench.record``.

Steps of training on one thread, simulated, in one process and interleaved: without ``cpt.inspecting.record``, inside it
but between two recorded steps, and recorded. Ratios of medians, with those of minima in brackets; of every 100 steps
one is recorded by default, so that their mean is (99 between + 1 recorded) / 100.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from bench.step_ratio import CASES, measure, ratio, stepper
from cpt_core.inspecting.recording import record
from cpt_core.quantization.convert import QuantConfig

CHOSEN = ("ResNet-20, batch 128", "linear block", "LSTM 200", "small BERT", "README")
NEVER = 1 << 40  # steps between two recorded ones


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'times a quantised step: median (minimum)':<45}{'between':>15}{'recorded':>15}{'every=100':>11}")
    for name, case in CASES.items():
        if not name.startswith(CHOSEN) or name.endswith("channels last") or given.only not in name:
            continue
        torch.manual_seed(0)
        inputs = case.inputs()
        steps, open_ones = {}, []
        for way, every in {"without": 0, "between": NEVER, "recorded": 1}.items():
            steps[way] = stepper(model := case.make(), inputs, QuantConfig(), "cpp")
            if every:
                open_ones.append(record(model, every).__enter__())
        times = measure(steps, case.rounds)
        base = times.pop("without")
        mean = (99 * statistics.median(times["between"]) + statistics.median(times["recorded"])) / 100
        cells = "".join(f"{ratio(times[way], base):>15}" for way in times)
        print(f"{name:<45}{cells}{mean / statistics.median(base):>11.3f}", flush=True)
        for recording in open_ones:
            recording.__exit__()


if __name__ == "__main__":
    main()
