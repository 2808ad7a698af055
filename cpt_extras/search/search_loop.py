"""Loop of a precision search: the arms, the order in which they are trained, and when to stop.  Beyond the paper.

``search_arms`` lists what can be trained: float32, static precisions, schedules of the same cost, fewer gradient bits.
``run_precision_search`` trains them with a function of its caller: float32 and static precisions first; then, at the
fewest bits that are good enough, two schedules of the same cost, and fewer bits for gradients. Arms are compared seed
by seed. Seeds are added until all that the answer rests on is clear, or the time is over. This module needs no torch.
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import (
    MAX_TOTAL_STEPS,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_core.validation import check_int, check_types
from cpt_extras.progress import progress_bar
from cpt_extras.search.search_result import (
    FLOAT32_ARM,
    MAX_SEEDS,
    MIN_SEEDS,
    SCHEDULE_FAMILIES,
    STATIC_BITS,
    Arm,
    PrecisionSearchResult,
    Result,
)
from cpt_extras.search.solver import solve_schedule
from cpt_extras.validation import check_float

GRADIENT_BITS = (6, 5, 4)  # tried below those of the static arms
MIN_CYCLE_STEPS = 8

# trains arms from one seed: (arms, seed) -> {name of an arm: result}
TrainArms = Callable[[Sequence[Arm], int], Mapping[str, Result]]


def search_arms(steps: int, cycles: int) -> Iterator[Arm]:
    """Yield every arm that a search of trainings with ``steps`` steps could train."""
    yield Arm(
        FLOAT32_ARM,
        "static",
        FULL_PRECISION,
        StaticSchedule(FULL_PRECISION, steps),
        FULL_PRECISION,
        "",
    )

    top = STATIC_BITS[0]
    for bits in STATIC_BITS:
        schedule = StaticSchedule(bits, steps)
        name = f"{bits} bits"
        yield Arm(name, "static", bits, schedule, top, FLOAT32_ARM)
        for q_grad in GRADIENT_BITS:
            yield Arm(
                f"{name}, gradients {q_grad}",
                "gradients",
                bits,
                schedule,
                q_grad,
                name,
            )

    for bits, q_min in itertools.pairwise(STATIC_BITS[1:]):
        budget = StaticSchedule(bits, steps).relative_cost(top, top)
        for shape, family in SCHEDULE_FAMILIES.items():
            with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
                try:
                    solved = solve_schedule(budget, q_min, top, steps, cycles, family)
                except ValueError:
                    continue  # no schedule of so few steps costs this; the answer says so
            yield Arm(
                f"{shape} at {bits}", "schedule", bits, solved, top, f"{bits} bits"
            )


def run_precision_search(
    train_arms: TrainArms,
    title: str,
    steps: int,
    *,
    cycles: int = 4,
    margin: float | None = None,
    unit: str = "",
    minutes: float = 10,
    seeds: int = 10,
    at_once: int = 1,
    progress: bool | None = None,
) -> PrecisionSearchResult:
    """Search for the fewest bits that keep the quality.

    Ctrl-C ends the search early: the answer is that of what was trained.

    Args:
        train_arms: trains arms from one seed, ``train_arms(arms, seed) -> {name: Result}``.
        title: name of the model and data.
        steps: optimizer steps of a training.
        cycles: of a schedule.
        margin: largest difference that is too small to matter; None takes 1 % of what float32 reaches.
        unit: of the results, such as "points".
        minutes: after which no training is begun that would end too late.
        seeds: at most so many.
        at_once: at most so many arms in one call of ``train_arms``.
        progress: show a progress bar; None shows it in a terminal or a notebook only.

    Raises:
        ValueError: for wrong values, before anything is trained; when training diverges in float32.
    """
    check_types(run_precision_search, {"margin": margin, "progress": progress})
    seeds = check_int("seeds", seeds, 1, MAX_SEEDS)
    cycles = check_int("cycles", cycles, 1, MAX_TOTAL_STEPS // MIN_CYCLE_STEPS)
    steps = check_int("steps", steps, MIN_CYCLE_STEPS * cycles, MAX_TOTAL_STEPS)
    _check_positive("minutes", minutes)
    if margin is not None:
        _check_positive("margin", margin)

    arms = {arm.name: arm for arm in search_arms(steps, cycles)}
    search = _PrecisionSearch(train_arms, title, arms, margin, unit, minutes, at_once)
    out_of_time = False
    try:
        with progress_bar("trying", unit=" trainings", progress=progress) as bar:
            for seed in range(seeds):
                out_of_time = not search.train_seed(seed, bar)
                enough_seeds = seed + 1 >= MIN_SEEDS
                if out_of_time or (enough_seeds and not search.result().unclear):
                    break
    except KeyboardInterrupt:
        if not search.results:
            raise
        out_of_time = True
    return search.result(out_of_time)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, (bool, str)):
        raise ValueError(f"{name} must be a number of more than 0, got {value!r}")
    if not 0 < check_float(f"{name} must be more than 0", value) < math.inf:
        raise ValueError(f"{name} must be a number of more than 0, got {value!r}")


class _PrecisionSearch:
    """A precision search in progress: its results so far, and its time limit."""

    def __init__(
        self,
        train_arms: TrainArms,
        title: str,
        arms: Mapping[str, Arm],
        margin: float | None,
        unit: str,
        minutes: float,
        at_once: int,
    ) -> None:
        self.train_arms = train_arms
        self.title = title
        self.arms = arms
        self.margin = margin
        self.unit = unit
        self.at_once = at_once
        self.results: dict[str, dict[int, Result]] = {}
        self.deadline = time.monotonic() + 60 * minutes
        self.longest_call = 0.0  # seconds

    def result(self, out_of_time: bool = False) -> PrecisionSearchResult:
        """Return the answer of the trainings so far."""
        float32 = [r.value for r in self.results.get(FLOAT32_ARM, {}).values()]
        one_percent = 0.01 * abs(float(np.mean(float32 or [1.0])))
        margin = self.margin or one_percent or 1.0
        return PrecisionSearchResult(
            self.title, self.arms, self.results, margin, self.unit, out_of_time
        )

    def train_seed(self, seed: int, bar: Any) -> bool:
        """Train what the answer needs from a seed; return whether there was time.

        The first seeds train all static precisions, then what the answer rests on; later ones repeat only what is
        not clear.
        """
        if seed >= MIN_SEEDS:
            names = []
            for comparison in self.result().unclear:
                names += [comparison.arm.baseline, comparison.arm.name]
            return self._train_missing(names, seed, bar)

        statics = [arm.name for arm in self.arms.values() if arm.kind == "static"]
        if not self._train_missing(statics, seed, bar):
            return False
        deciding = [d.arm.name for d in self.result().deciding_comparisons]
        return self._train_missing(deciding, seed, bar)

    def _train_missing(self, names: Sequence[str], last_seed: int, bar: Any) -> bool:
        """Train arms from all seeds up to ``last_seed`` without a result; return whether there was time."""
        missing: dict[int, list[Arm]] = {}
        for seed in range(last_seed + 1):
            missing[seed] = []
            for name in dict.fromkeys(names):
                if seed not in self.results.get(name, {}):
                    missing[seed].append(self.arms[name])

        for seed, arms in missing.items():
            for start in range(0, len(arms), self.at_once):
                if not self._train(arms[start : start + self.at_once], seed, bar):
                    return False
        return True

    def _train(self, arms: Sequence[Arm], seed: int, bar: Any) -> bool:
        """Train arms in one call, unless it would probably end too late; return whether there was time."""
        start_time = time.monotonic()
        if start_time + self.longest_call > self.deadline:
            return False

        minutes_left = max(0, self.deadline - start_time) / 60
        bar.set_postfix_str(
            f"{arms[0].name}, seed {seed}; {minutes_left:.0f} min left at most"
        )
        for name, result in self.train_arms(arms, seed).items():
            self.results.setdefault(name, {})[seed] = result
        float32 = self.results.get(FLOAT32_ARM, {}).values()
        if not all(math.isfinite(r.value) for r in float32):
            raise ValueError(
                "in float32 training diverges, or its evaluation gives no finite number"
            )
        self.longest_call = max(self.longest_call, time.monotonic() - start_time)
        bar.update(len(arms))
        return True
