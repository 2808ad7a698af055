"""Preregistered tests of figure 3 and table 1 on CIFAR-10 copies, as in ``docs/preregistration.md``.  No torch.

``preregistered_tests`` evaluates the four primary tests on the runs of the grids ``cifar10-jpeg/figure_3`` and
``cifar10-jpeg/table_1``; ``outcomes`` and ``summary`` put them into words. A test is evaluated when all runs that it
needs are stored; until then its outcome is the number of stored runs.

``slopes`` and ``gains_over_static`` accept the runs of any experiment of quality against cost.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.estimates import Estimate, holm, unit_of
from cpt_lab.analysis.metrics import metric_named, metric_of, plural
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.experiments.spec import RunSpec

FIGURE_3 = "cifar10-jpeg/figure_3"
TABLE_1 = "cifar10-jpeg/table_1"
# Points (for the slope: points per doubling of the cost). Smaller effects do not count.
EFFECT_MARGIN = 0.25

NO_DEFICIT = "no deficit, 3900"
LONGEST_DEFICIT = "[0, 3900) of 7800"
EARLY_WINDOW = "[244, 2194) of 3900"
LATE_WINDOW = "[975, 2925) of 3900"


@dataclass(frozen=True)
class PreregisteredTest:
    """A primary test and its result.

    Attributes:
        name: such as "slope".
        paper: the sign, or the number, that the paper reports.
        estimate: the measured effect; None until all runs are stored.
        num_stored: how many runs of the test are stored.
        num_needed: how many runs the test needs.
    """

    name: str
    paper: str
    estimate: Estimate | None
    num_stored: int
    num_needed: int


def slopes(runs: pd.DataFrame) -> Estimate:
    """Return the rise of quality per doubling of the cost over the ten schedules, by seed.

    A seed's slope is that of the least-squares line of its quality over log2 of the relative cost. Seeds that lack one
    of the ten schedules are left out.

    Args:
        runs: of one recipe and one q_max, as ``runs.table`` returns them.
    """
    quality, cost = _quality_and_cost(runs)
    by_schedule = quality[[*SUITE]].dropna()
    log_cost = np.log2(cost[[*SUITE]].to_numpy(dtype=float))
    values = [
        float(np.polyfit(log_cost, seed, 1)[0])
        for seed in by_schedule.to_numpy(dtype=float)
    ]
    return Estimate(
        "quality per doubling of the cost",
        unit_of(runs),
        np.array(values),
        EFFECT_MARGIN,
    )


def gains_over_static(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the quality of schedules minus that of static precision at equal cost, seeds by schedules.

    The quality of static precision at a cost is interpolated linearly between the two static precisions next to it.
    Seeds that lack a static precision are left out; a schedule that did not run has no column.

    Args:
        runs: of one recipe and one q_max, as ``runs.table`` returns them.

    Raises:
        ValueError: when fewer than two static precisions ran.
    """
    quality, cost = _quality_and_cost(runs)
    static = sorted(
        (arm for arm in quality if arm.startswith("static ")), key=lambda arm: cost[arm]
    )
    if len(static) < 2:
        raise ValueError(
            f"runs: at least two static precisions are needed, got {len(static)}"
        )
    complete = quality.dropna(subset=static)
    line = complete[static].to_numpy(dtype=float)
    gains = {}
    for arm in SUITE:
        if arm in complete:
            equal = [np.interp(cost[arm], cost[static], seed) for seed in line]
            gains[arm] = complete[arm] - np.array(equal)
    return pd.DataFrame(gains, index=complete.index)


def _quality_and_cost(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series]:
    """Return quality in printed units, seeds by arms, and the relative cost of every arm."""
    factor = metric_named(metric_of(runs)).factor
    by_arm = quality_of(runs).pivot_table(
        index="seed", columns="arm", values="quality", aggfunc="first"
    )
    return factor * by_arm, runs.groupby("arm")["relative_cost"].first()


def arm_difference(runs: pd.DataFrame, a: str, b: str) -> Estimate:
    """Return the quality of arm ``a`` minus that of arm ``b``, by seed."""
    quality, _ = _quality_and_cost(runs)
    difference = (quality[a] - quality[b]).dropna().to_numpy(dtype=float)
    return Estimate(f"{a} minus {b}", unit_of(runs), difference, EFFECT_MARGIN)


def _mean_gain(runs: pd.DataFrame) -> Estimate:
    gains = gains_over_static(runs).mean(axis=1).to_numpy(dtype=float)
    return Estimate(
        "schedules minus static precision of equal cost",
        unit_of(runs),
        gains,
        EFFECT_MARGIN,
    )


def preregistered_tests(runs: pd.DataFrame) -> list[PreregisteredTest]:
    """Return the four primary tests, in the order of the preregistration.

    Args:
        runs: all stored runs.
    """
    damage = partial(arm_difference, a=NO_DEFICIT, b=LONGEST_DEFICIT)
    windows = partial(arm_difference, a=LATE_WINDOW, b=EARLY_WINDOW)
    figure_3, table_1 = grid_specs(FIGURE_3), grid_specs(TABLE_1)
    return [
        _test("slope", "positive", slopes, figure_3, runs),
        _test("static line", "positive", _mean_gain, figure_3, runs),
        _test("lasting damage", "positive (+1.0 points)", damage, table_1, runs),
        _test("early windows", "positive (+0.04 points)", windows, table_1, runs),
    ]


def _test(
    name: str,
    paper: str,
    estimate: Callable[[pd.DataFrame], Estimate],
    specs: Sequence[RunSpec],
    runs: pd.DataFrame,
) -> PreregisteredTest:
    keys = {spec.key for spec in specs}
    rows = runs[runs["key"].isin(keys)]
    num_stored = rows["key"].nunique()
    complete = num_stored == len(keys)
    return PreregisteredTest(
        name, paper, estimate(rows) if complete else None, num_stored, len(keys)
    )


def outcomes(all_tests: Sequence[PreregisteredTest]) -> list[str]:
    """Return the outcome of every test in words, with Holm's correction over all of them.

    A test with missing runs still counts in the correction.
    """
    p = [test.estimate.p() if test.estimate else math.nan for test in all_tests]
    return [
        _outcome(test, adjusted)
        for test, adjusted in zip(all_tests, holm(p), strict=True)
    ]


def _outcome(test: PreregisteredTest, adjusted_p: float) -> str:
    if test.estimate is None:
        return f"not complete: {test.num_stored} of {plural(test.num_needed, 'run')}"
    if adjusted_p < ALPHA:
        return "as the paper says" if test.estimate.mean > 0 else "against the paper"
    if test.estimate.is_equivalent:
        return "no difference worth naming"
    return "inconclusive"


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable table of the tests: the paper's result, the estimate with its 95 % interval, n, outcome."""
    all_tests = preregistered_tests(runs)
    lines = []
    for test, outcome in zip(all_tests, outcomes(all_tests), strict=True):
        effect = test.estimate.text() if test.estimate else "–"
        seeds = len(test.estimate.values) if test.estimate else "–"
        lines.append((test.name, test.paper, effect, seeds, outcome))
    columns = ["preregistered test", "the paper says", "measured", "n", "outcome"]
    return pd.DataFrame(lines, columns=columns)
