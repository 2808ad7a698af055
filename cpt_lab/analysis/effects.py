"""Effects: what the runs of an experiment say, in the direction of a claim."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import numpy as np
import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import levels, quality_cost, run_groups, statistics
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of
from cpt_lab.paths import results_dir

LEAST_SEEDS = 3
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True)
class Effect:
    """What one experiment says, in the direction of a claim."""

    experiment: str  # what was trained, in words; ``place`` the same in short: data set and model; ``bits`` its q_min
    scale: str  # of the runs; "exact" of what is computed
    at: Callable[
        [float], Interval
    ]  # the effect with its interval at 1 - alpha, from alpha
    n: int  # seeds that were compared
    what: str  # what was compared
    place: str = ""
    bits: str = ""
    stores: tuple[str, ...] = ()  # that the runs are in
    task: str = ""
    dataset: str = ""
    started: tuple[str, ...] = ()  # when the runs that were compared were started, ISO
    diverged: int = 0  # how many of them did
    others: tuple[
        "Effect", ...
    ] = ()  # the same effect against further controls; all have to agree
    compared: tuple[
        tuple[Any, ...], ...
    ] = ()  # values of ``levels.LEVEL_COLUMNS`` of the runs that were compared
    level: str = (
        ""  # what full bits reach in this experiment, such as "static 8 reaches 82.1 %"
    )

    @property
    def interval(self) -> Interval:
        """The effect with the interval that is shown."""
        return self.at(statistics.ALPHA)

    def __str__(self) -> str:
        """Return it in words; exact ones have no interval."""
        if self.scale == "exact":
            return self.what
        higher = self.higher_range_test()
        below = f" (below the {higher} that the range test finds)" if higher else ""
        level = f"; {self.level}" if self.level else ""
        return f"{self.experiment}{below}{level}: {'; '.join(e.number() for e in (self, *self.others))}"

    def higher_range_test(self) -> int:
        """Return the q_min that the range test finds if it is higher than that of the runs, else 0."""
        found = int(range_tests().get(self.place, {}).get("q_min") or 0)
        return found if self.bits < f"q_min {found}" else 0

    def number(self) -> str:
        """Return what was compared with its effect."""
        mean, low, high = self.interval
        lost = (
            f", {self.diverged} of {len(self.started)} runs diverged"
            if self.diverged
            else ""
        )
        if mean != mean:
            return f"{self.what}: no seed to compare{lost}"
        return f"{self.what}: {interval_text(mean, low, high)}, n = {self.n}{lost}"


@cache
def range_tests() -> dict[str, dict[str, Any]]:
    """Return the kept range tests, by data set and model."""
    tests: dict[str, Any] = json.loads(
        (results_dir() / "range_tests.json").read_text(encoding="utf-8")
    )["tests"]
    return tests


@dataclass(frozen=True)
class Claim:
    """One line of ``claims.csv``.

    ``a`` and ``b`` are what is compared (``named_arm``). ``tasks`` limits it to a task ("" for all), ``only`` to runs
    with some values, such as "q_max=8 model=gcn"; without an aggregation FP-Agg is meant, where the measure does not
    compare both. ``grids`` are those that decide it: at paper scale only their data sets count. ``since`` says when its
    rule was changed last (UTC), ``rule`` is the fingerprint of that rule (``rules.fingerprint``): `git log -S RULE
    data/paper/claims.csv` names the commit.
    """

    id: str
    claim: str
    place: str
    measure: str
    a: str
    b: str
    tasks: str
    only: str
    test: str
    margin: float
    grids: str
    since: str
    rule: str


def effect_of(
    runs: pd.DataFrame,
    differences: Iterable[float],
    what: str,
    others: tuple[Effect, ...] = (),
) -> Effect:
    """Make an effect of differences by seed, as stored and positive in the claim's direction; of the runs compared."""
    values = metric_named(metric_of(runs)).factor * np.asarray(
        list(differences), dtype=float
    )
    return effect_at(
        runs,
        lambda alpha: statistics.interval(values, alpha),
        len(values),
        what,
        others,
    )


def effect_at(
    runs: pd.DataFrame,
    at: Callable[[float], Interval],
    n: int,
    what: str,
    others: tuple[Effect, ...] = (),
) -> Effect:
    """Make an effect whose interval is a function of its level; of the runs compared."""
    first = runs.iloc[0]
    dataset = str(first["dataset"]).rstrip("/")
    return Effect(
        f"{run_groups.title_of(runs)}, {first['q_min']} to {runs['q_max'].max()} bits",
        str(first["scale"]),
        at,
        n,
        what,
        f"{dataset}/{first['model']}",
        f"q_min {first['q_min']}",
        tuple(sorted({store.rpartition("/")[2] for store in runs["store"] if store})),
        str(first["task"]),
        dataset,
        tuple(runs["started"]),
        int(runs["diverged"].sum()),
        others,
    )


def _with_compared(make: Callable[..., Effect]) -> Callable[..., Effect]:
    """Add to an effect in which recipes its runs were trained, from which its level is found."""

    @wraps(make)
    def with_compared(runs: pd.DataFrame, *args: Any, **kwargs: Any) -> Effect:
        recipes = (
            runs[levels.LEVEL_COLUMNS]
            .drop_duplicates()
            .itertuples(index=False, name=None)
        )
        return replace(make(runs, *args, **kwargs), compared=tuple(recipes))

    return with_compared


effect_at = _with_compared(
    effect_at
)  # not above it: the fingerprint of a rule is that of what it computes


def quality_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with a column "quality", more is better; of a perplexity 100 times minus its logarithm."""
    metric = metric_of(runs)
    values = (
        -100 * np.log(runs[metric])
        if metric == "perplexity"
        else metric_named(metric).better * runs[metric]
    )
    return runs.assign(quality=values)


def minus(runs: pd.DataFrame, a: str, b: str, words: str = "") -> Iterator[Effect]:
    """Quality of ``a`` minus that of ``b``, see ``named_arm``; nothing when one of them was not run."""
    runs = quality_of(runs)
    try:
        x, y = named_arm(runs, a), named_arm(runs, b)
        sides = quality_cost.runs_of(runs, x), quality_cost.runs_of(runs, y)
    except ValueError:
        return
    what = " minus ".join(
        _called(side, name) for side, name in zip(sides, (x, y), strict=True)
    )
    yield effect_of(
        pd.concat(sides), statistics.paired(*sides, "quality"), what + words
    )


def _called(side: pd.DataFrame, name: str) -> str:
    """An arm, or a group of savings with the arms that stand for it where some of the suite were not run."""
    arms = [arm for arm, profile in SUITE.items() if profile.savings == name]
    there = [arm for arm in arms if arm in set(side["arm"])]
    return name if there == arms else f"{name} ({', '.join(there)} alone)"


def named_arm(runs: pd.DataFrame, name: str) -> str:
    """Return the arm or group of savings that a claim means: "static" is static q_max, "worst" and "second worst" those
    of the ten schedules by the mean quality of one experiment's runs; others are called by their names.

    ValueError when not all ten schedules were run. That the worst of ten is picked counts against a claim about all.
    """
    if name == "static":
        return f"static {runs['q_max'].iloc[0]}"
    if name not in ("worst", "second worst"):
        return name
    means = runs[runs["arm"].isin(SUITE)].groupby("arm")["quality"].mean().sort_values()
    if len(means) < len(SUITE):
        raise ValueError(f"{len(SUITE)} schedules are needed, there are {len(means)}")
    return str(means.index[int(name == "second worst")])


def arm_minus(
    runs: pd.DataFrame, a: tuple[str, str], b: tuple[str, str], what: str
) -> Effect:
    """Quality of ``a`` minus that of ``b``, each an arm of a recipe."""
    runs = quality_of(runs)
    x, y = (
        runs[(runs["arm"] == arm) & (runs["recipe"] == recipe)]
        for arm, recipe in (a, b)
    )
    return effect_of(pd.concat([x, y]), statistics.paired(x, y, "quality"), what)
