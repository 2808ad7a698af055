"""What every recipe has, and the deficits of a critical-period experiment.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCALES = ("smoke", "demo", "paper")
PRESETS = ("ours", "authors")


@dataclass(frozen=True)
class Recipe:
    """All that defines a training run besides the schedule and the seed; what every task has.

    Attributes:
        task: a key of ``TASKS``.
        dataset: a named data set, or files of the user's own.
        model: the name of a model.
        quantized: which layers are quantised, a key of ``quantization.convert.PRESETS``.
        steps: optimizer steps.
        batch: samples per step; the last batch of an epoch may be smaller.
        lr: learning rate at the start.
        q_min: lowest bits of the schedules; ``n_cycles`` their number of cycles.
        weight_decay: of the optimizer, on all parameters.
        clip: largest total norm of the gradient, or None.
        evaluate_every: steps between evaluations; the end is always evaluated.
        running_start: rule of the running ranges, see ``LayerPrecision``.
        cycle_rule: see ``CyclicSchedule``.
        eval_bits: "q_max" or "current": bits of every evaluation but the last, which is done at both.
        seeds: seeds of a full grid at this scale; no part of a single run.
    """

    task: str
    dataset: str
    model: str
    quantized: str
    steps: int
    batch: int
    lr: float
    q_min: int
    n_cycles: int = 8
    weight_decay: float = 1e-4
    clip: float | None = None
    evaluate_every: int = 0
    running_start: str = "corrected"
    cycle_rule: str = "exact"
    eval_bits: str = "q_max"
    seeds: tuple[int, ...] = field(default=(0, 1, 2), compare=False)


@dataclass(frozen=True)
class Deficits:
    """Settings of the critical-period experiments: training at ``q_min`` bits for a while, elsewhere at q_max.

    Attributes:
        changes: fields of the recipe that differ from those of section 4; ``steps`` is the training after a deficit.
        lengths: low steps at the start of training, which make it longer.
        windows: (start, stop) of low steps within a training of ``window_steps``.
        window_steps: see ``windows``.
        lr_after: the milestones of the learning rate count from the end of a deficit at the start, not from step 0.
        unit: steps that count as one in the names of arms, ``suffix`` what is written behind them.
    """

    changes: dict[str, Any]
    lengths: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]
    window_steps: int
    lr_after: bool = False
    unit: int = 1
    suffix: str = ""


def is_own(dataset: str) -> bool:
    """Whether ``dataset`` names the user's own files rather than a known data set."""
    return "/" in dataset or "\\" in dataset or dataset.endswith(".npz")
