"""Intervals and rank correlations."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy import stats


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return mean, low and high of the 95 % confidence interval (Student's t); the bounds are NaN for one value."""
    x = np.asarray(list(values), dtype=float)
    if len(x) < 2:
        return float(x.mean()) if len(x) else float("nan"), float("nan"), float("nan")
    # not stats.t.interval or ttest_1samp: they warn or return NaN where all values are alike
    half = stats.t.ppf(0.975, len(x) - 1) * stats.sem(x)
    return float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation along the last axis, NaN where all are alike; ``y`` may have more axes."""
    # by hand, as scipy's takes one pair of samples at a time, and a bootstrap has thousands
    a, b = stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
