"""Differences by seed, intervals and rank correlations."""

from collections.abc import Iterable
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

ALPHA = 0.05  # of all intervals that are shown: they hold 95 %


def paired(a: pd.DataFrame, b: pd.DataFrame, value: str) -> pd.Series:
    """Return a column of runs ``a`` minus that of runs ``b`` by seed.

    Where several arms stand on a side, their mean counts, on the seeds that all of them have. A run that diverged has
    the worst value of its task (``runs.table``); a seed at which every run of both sides diverged compares nothing and
    is left out.
    """
    x, y = by_seed(a, value), by_seed(b, value)
    return (x[value] - y[value])[x["diverged"] + y["diverged"] < 2].rename("difference")


def by_seed(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the mean over arms of a column, and the share that diverged, on the seeds that all arms have."""
    wide = {
        name: runs.astype({name: float}).pivot_table(
            index="seed", columns="arm", values=name, aggfunc="first", dropna=False
        )
        for name in (value, "diverged")
    }
    return pd.DataFrame(
        {name: part.dropna().mean(axis=1) for name, part in wide.items()}
    ).dropna()


def _once(by: Any) -> Any:
    """Ask once of the same contents: claims compare a few controls with everything."""
    made: dict[Any, pd.DataFrame] = {}

    @wraps(by)
    def of(runs: pd.DataFrame, value: str) -> pd.DataFrame:
        read = runs[["seed", "arm", "diverged", value]]
        asked = (value, *read.dtypes, *read.itertuples(index=False, name=None))
        if len(made) > 1000:  # small tables, a few hundred for all that is stored
            made.clear()
        return (
            made[asked] if asked in made else made.setdefault(asked, by(read, value))
        ).copy()

    return of


by_seed = _once(
    by_seed
)  # not above it: the fingerprint of a rule is that of the whole text


def interval(
    values: Iterable[float], alpha: float = ALPHA
) -> tuple[float, float, float]:
    """Return mean, low and high of the 1 - alpha confidence interval (Student's t); one value has no bounds: NaN."""
    x = np.asarray(list(values), dtype=float)
    if len(x) < 2:
        return float(x.mean()) if len(x) else float("nan"), float("nan"), float("nan")
    # not stats.t.interval or ttest_1samp: they warn or return NaN where all values are alike
    half = stats.t.ppf(1 - alpha / 2, len(x) - 1) * stats.sem(x)
    return float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation along the last axis, NaN where all are alike; ``y`` may have more axes."""
    # by hand, as scipy's takes one pair of samples at a time, and a bootstrap has thousands
    a, b = stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
