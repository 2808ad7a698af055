"""An effect with its t-tests, and Holm's correction over several tests.

>>> Estimate("a minus b", "points", np.array([0.9, 1.1, 1.0])).p(0.5, "above") < 0.01
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis.metrics import interval_text


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

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return float(np.std(self.values, ddof=1) / math.sqrt(len(self.values)))

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the bounds of the confidence interval (Student's t)."""
        half = float(stats.t.ppf((1 + level) / 2, len(self.values) - 1)) * self.error
        return self.mean - half, self.mean + half

    def p(self, bound: float = 0.0, side: str = "two") -> float:
        """Return the p-value of the t-test against ``bound``; of being "above" it or "below" it alone, or of both."""
        away = self.mean - bound
        if self.error == 0:  # all seeds alike
            right = away != 0 if side == "two" else away > 0 if side == "above" else away < 0
            return 0.0 if right else 1.0
        t, free = away / self.error, len(self.values) - 1
        if side == "two":
            return float(2 * stats.t.sf(abs(t), free))
        return float(stats.t.sf(t, free) if side == "above" else stats.t.cdf(t, free))

    @property
    def small(self) -> bool:
        """Whether the 90 % interval lies within the margin: two one-sided tests at .05."""
        low, high = self.interval(0.9)
        return -self.margin < low and high < self.margin

    def __str__(self) -> str:
        """Return it in words."""
        shown = interval_text(self.mean, *self.interval())
        return f"{self.what}: {shown} {self.unit}, n = {len(self.values)}, p = {self.p():.2g}"


def quality(rows: pd.DataFrame, task: str, outputs: int, column: str = "") -> np.ndarray:
    """Return points of accuracy, or 100 times minus the logarithm of the perplexity; chance where a run was lost.

    Args:
        rows: runs of one task.
        task: "language_model" has a perplexity.
        outputs: classes or words.
        column: what follows the name of the metric, such as "_current".
    """
    perplexity = task == "language_model"
    values = rows[("perplexity" if perplexity else "accuracy") + column].to_numpy(dtype=float)
    values = np.where(rows["status"] == "ok", values, outputs if perplexity else 1 / outputs)
    return -100 * np.log(values) if perplexity else 100 * values


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method; NaN counts as a test that may still come, and stays."""
    order = np.argsort(np.nan_to_num(np.asarray(p, float), nan=1.0), kind="stable")
    adjusted, highest = [math.nan] * len(p), 0.0
    for rank, i in enumerate(order):
        if p[i] == p[i]:
            highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
            adjusted[i] = highest
    return adjusted
