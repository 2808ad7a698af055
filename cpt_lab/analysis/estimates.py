"""An effect with its t-tests, Holm's correction over several tests, and the runs that both need.

>>> Estimate("a minus b", "points", np.array([0.9, 1.1, 1.0])).p(0.5, "greater") < 0.01
True
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of, plural
from cpt_lab.analysis.statistics import ALPHA, interval
from cpt_lab.experiments.spec import RunSpec

POINTS, PERCENT = "points", "%"
TOP, CURRENT_BITS = "8 bits", "their own bits"
EVALUATION_RULES = {
    TOP: "",
    CURRENT_BITS: "_current",
}  # where runs are evaluated, and what follows the metric in rows


@dataclass(frozen=True)
class Estimate:
    """An effect, one value a seed: ``what``, its ``unit``, and the ``margin`` within which it is too small to name."""

    what: str
    unit: str
    values: np.ndarray
    margin: float = math.nan

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.values))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the bounds of the 1 - alpha confidence interval."""
        return interval(self.values, alpha)[1:]

    def p(self, bound: float = 0.0, side: str = "two-sided") -> float:
        """Return the p-value of the t-test against ``bound``; of being "greater" or "less" alone, or of both."""
        if stats.sem(self.values) == 0:  # all seeds alike: scipy warns, or has NaN
            away = self.mean - bound
            return (
                0.0
                if {"two-sided": away != 0, "greater": away > 0, "less": away < 0}[side]
                else 1.0
            )
        return float(stats.ttest_1samp(self.values, bound, alternative=side).pvalue)

    @property
    def small(self) -> bool:
        """Whether the 90 % interval lies within the margin: two one-sided tests at .05."""
        low, high = self.interval(0.1)
        return -self.margin < low and high < self.margin

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.shown()}, n = {len(self.values)}, p = {self.p():.2g}"
        )

    def shown(self) -> str:
        """Return the mean with its interval and unit, such as "-0.6 [-0.8, -0.3] points"."""
        return f"{interval_text(self.mean, *self.interval())} {self.unit}".strip()


def find_rows(specs: Iterable[RunSpec], runs: pd.DataFrame) -> pd.DataFrame | str:
    """Return the newest rows of specs in their order; where some are missing, a word such as "open: 3 of 9 runs"."""
    keys, known = (
        [spec.key for spec in specs],
        runs.drop_duplicates("key", keep="last").set_index("key"),
    )
    there = sum(key in known.index for key in keys)
    return (
        known.loc[keys]
        if there == len(keys)
        else f"open: {there} of {plural(len(keys), 'run')}"
    )


def unit_of(rows: pd.DataFrame) -> str:
    """Return the unit of ``quality``: percent of a perplexity, points of an accuracy."""
    return PERCENT if metric_of(rows) == "perplexity" else POINTS


def quality(rows: pd.DataFrame, outputs: int, column: str = "") -> np.ndarray:
    """Return points of accuracy, or 100 times minus the logarithm of the perplexity; chance where a run was lost.

    Args:
        outputs: classes or words.
        column: what follows the name of the metric, such as "_current".
    """
    metric = metric_of(rows)
    values = rows[metric + column].where(
        rows["status"] == "ok", outputs if metric == "perplexity" else 1 / outputs
    )
    return metric_named(metric).factor * quality_of(rows.assign(**{metric: values}))[
        "quality"
    ].to_numpy(dtype=float)


def by_run(
    specs: Sequence[RunSpec],
    rows: pd.DataFrame,
    outputs: int,
    columns: Mapping[str, str] = EVALUATION_RULES,
) -> pd.DataFrame:
    """Return one line per run: spec, seed, arm, unit, whether it was lost, its BitOps, and ``quality`` by ``columns``.

    An arm goes without the number that a grid adds to its name, as in "over time at 0.417".

    Args:
        rows: theirs, in the same order.
        outputs: classes or words.
        columns: name -> what follows the metric.
    """
    arms = [re.sub(r" at [\d.]+$", "", spec.arm) for spec in specs]
    found = pd.DataFrame(
        {
            "spec": specs,
            "seed": [spec.seed for spec in specs],
            "arm": arms,
            "unit": unit_of(rows),
        }
    )
    taken = {name: rows[name].to_numpy() for name in ("bitops", "bitops_per_op")}
    values = {name: quality(rows, outputs, column) for name, column in columns.items()}
    return found.assign(lost=(rows["status"] != "ok").to_numpy(), **taken, **values)


def seeds_by_arms(runs: pd.DataFrame, value: str = TOP) -> pd.DataFrame:
    """Return a column of ``by_run``, seeds by arms, arms in the order of the design."""
    return runs.pivot(index="seed", columns="arm", values=value)[
        list(dict.fromkeys(runs["arm"]))
    ]


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method; NaN counts as a test that may still come, and stays."""
    order = np.argsort(np.nan_to_num(np.asarray(p, float), nan=1.0), kind="stable")
    adjusted, highest = [math.nan] * len(p), 0.0
    for rank, i in enumerate(order):
        if p[i] == p[i]:
            highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
            adjusted[i] = highest
    return adjusted


def significant_effects(
    effects: Sequence[Estimate], side: str, level: float
) -> list[str]:
    """Return the effects that lie on one side of 0, with Holm's correction over all of them."""
    adjusted = holm([effect.p(0.0, side) for effect in effects])
    return [
        effect.what for effect, p in zip(effects, adjusted, strict=True) if p < level
    ]
