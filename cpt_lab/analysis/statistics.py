"""Differences paired by seed, confidence intervals and rank correlations."""

import math
from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

ALPHA = 0.05  # all intervals on pages hold 95 %
MAX_CACHED_TABLES = 1000  # small tables, a few hundred for all stored runs


def paired(a: pd.DataFrame, b: pd.DataFrame, value: str) -> pd.Series:
    """Return a column of runs ``a`` minus the column of runs ``b``, paired by seed.

    A side with several arms has their mean, on the seeds that all of them have. A run that diverged has the worst value
    of its task (``run_table.table``); a seed at which every run of both sides diverged is left out.
    """
    x, y = by_seed(a, value), by_seed(b, value)
    return (x[value] - y[value])[x["diverged"] + y["diverged"] < 2].rename("difference")


def check_one_run_per_seed(
    runs: pd.DataFrame, arm_columns: Sequence[str] = ("arm",)
) -> None:
    """Raise ValueError if an arm has two runs with one seed, which are trainings with different settings."""
    repeated = runs[runs.duplicated([*arm_columns, "seed"])]
    if len(repeated):
        first = repeated.iloc[0]
        raise ValueError(
            f"runs: expected one run per arm and seed, got another run of {first['arm']!r} with seed {first['seed']}. "
            "Runs with different settings are not paired or averaged: give their schedules different names, or choose "
            "the runs of one setting"
        )


def by_seed(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the mean over arms of a column, and the share that diverged, on the seeds that all arms have.

    Raises:
        ValueError: for two runs of an arm with one seed.
    """
    check_one_run_per_seed(runs)
    pairs = list(zip(runs["seed"], runs["arm"], strict=True))
    arms = sorted(set(runs["arm"]))
    values_by_pair: dict[str, dict[tuple[int, str], float]] = {}
    for name in (value, "diverged"):
        known: dict[tuple[int, str], float] = {}
        for pair, x in zip(pairs, runs[name].astype(float), strict=True):
            if not math.isnan(x):
                known[pair] = x
        values_by_pair[name] = known

    seeds = []
    for seed in sorted(set(runs["seed"])):
        if all(
            (seed, arm) in known for known in values_by_pair.values() for arm in arms
        ):
            seeds.append(seed)
    means = {}
    for name, known in values_by_pair.items():
        table = [[known[seed, arm] for seed in seeds] for arm in arms]
        means[name] = np.sum(table, axis=0) / max(len(arms), 1)
    return pd.DataFrame(means, index=pd.Index(seeds, name="seed", dtype="Int64"))


def _cache_by_content(function: Any) -> Any:
    """Cache a function of (runs, column) by the contents of the runs, as claims compare few controls with all arms."""
    cached: dict[Any, pd.DataFrame] = {}

    @wraps(function)
    def cached_function(runs: pd.DataFrame, value: str) -> pd.DataFrame:
        read = runs[["seed", "arm", "diverged", value]]
        contents = (value, *read.dtypes, *read.itertuples(index=False, name=None))
        if len(cached) > MAX_CACHED_TABLES:
            cached.clear()
        if contents not in cached:
            cached[contents] = function(read, value)
        return cached[contents].copy()

    return cached_function


# Not a decorator: the fingerprint of a claim's rule covers the source of the function itself.
by_seed = _cache_by_content(by_seed)


class IntervalBounds(NamedTuple):
    """A mean with the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def interval(values: Iterable[float], alpha: float = ALPHA) -> IntervalBounds:
    """Return mean, low and high of the 1 - alpha confidence interval (Student's t); one value has NaN bounds."""
    x = np.asarray(list(values), dtype=float)
    if len(x) < 2:
        mean = float(x.mean()) if len(x) else math.nan
        return IntervalBounds(mean, math.nan, math.nan)
    # stats.t.interval and ttest_1samp warn or return NaN if all values are equal.
    quantile = stats.t.ppf(1 - alpha / 2, len(x) - 1)
    half = quantile * stats.sem(x)
    mean = float(x.mean())
    return IntervalBounds(mean, float(x.mean() - half), float(x.mean() + half))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation along the last axis, NaN if all values are equal; ``y`` may have more axes."""
    # scipy's function computes one pair of samples at a time, and a bootstrap has thousands.
    a, b = stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
