"""Effects: differences that the runs of an experiment show, positive in the direction of a claim.

``Effect`` holds one difference with its interval as a function of the test level; ``Claim`` is a line of
``data/paper/claims.csv``. ``effect_of`` makes an effect from differences by seed, ``minus`` and ``arm_minus`` from two
arms.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import numpy as np
import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import baselines, quality_cost, run_groups, statistics
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of
from cpt_lab.paths import results_dir

MIN_SEEDS = 3
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True)
class Effect:
    """A difference measured in one experiment, positive in the direction of a claim."""

    experiment: (
        str  # title and bits of the training, such as "ResNet-8 on ..., 3 to 8 bits"
    )
    scale: str  # of the runs; "exact" for effects that are computed
    # mean and interval of the effect at level 1 - alpha, as a function of alpha
    interval_at: Callable[[float], Interval]
    n: int  # seeds that were compared
    comparison: str  # the two sides, such as "CR minus static 8"
    place: str = ""  # data set and model, such as "digits/cnn"
    bits: str = ""  # such as "q_min 3"
    stores: tuple[str, ...] = ()  # file names of the runs' stores
    task: str = ""
    dataset: str = ""
    start_times: tuple[str, ...] = ()  # of the compared runs, ISO 8601
    diverged: int = 0  # number of compared runs that diverged
    # the effect against further controls; a verdict needs all of them to agree
    other_controls: tuple["Effect", ...] = ()
    # values of ``baselines.BASELINE_COLUMNS`` of the compared runs
    baseline_keys: tuple[tuple[Any, ...], ...] = ()
    baseline: str = ""  # quality at full bits, such as "static 8 reaches 82.1 %"

    @property
    def interval(self) -> Interval:
        """Mean and 95 % interval, as shown on pages."""
        return self.interval_at(statistics.ALPHA)

    def __str__(self) -> str:
        """Return the effect in words; a computed effect has no interval."""
        if self.scale == "exact":
            return self.comparison
        higher = self.higher_range_test()
        below = f" (below the {higher} that the range test finds)" if higher else ""
        baseline = f"; {self.baseline}" if self.baseline else ""
        numbers = [effect.number() for effect in (self, *self.other_controls)]
        return f"{self.experiment}{below}{baseline}: {'; '.join(numbers)}"

    def higher_range_test(self) -> int:
        """Return the q_min of the range test if it is above the q_min of the runs, else 0."""
        tested_q_min = int(range_tests().get(self.place, {}).get("q_min") or 0)
        return tested_q_min if self.bits < f"q_min {tested_q_min}" else 0

    def number(self) -> str:
        """Return the comparison with its mean, interval and number of seeds."""
        mean, low, high = self.interval
        divergence_note = ""
        if self.diverged:
            divergence_note = (
                f", {self.diverged} of {len(self.start_times)} runs diverged"
            )
        if math.isnan(mean):
            return f"{self.comparison}: no seed to compare{divergence_note}"
        text = interval_text(mean, low, high)
        return f"{self.comparison}: {text}, n = {self.n}{divergence_note}"


@cache
def range_tests() -> dict[str, dict[str, Any]]:
    """Return the stored results of the range tests, by data set and model."""
    tests: dict[str, Any] = json.loads(
        (results_dir() / "range_tests.json").read_text(encoding="utf-8")
    )["tests"]
    return tests


@dataclass(frozen=True)
class Claim:
    """A line of ``claims.csv``.

    Attributes:
        id: short name of the claim.
        claim: the claim in words.
        place: where the paper makes it.
        measure: name of the function in ``claim_measures.MEASURES`` that yields its effects.
        a: first side of the comparison, see ``named_arm``.
        b: second side of the comparison.
        tasks: the task that the claim is about; "" for all tasks.
        only: conditions on columns of the runs, such as "q_max=8 model=gcn". Without an aggregation FP-Agg is meant,
            unless the measure compares both.
        test: how an interval becomes a verdict, see ``claims.verdict``.
        margin: smallest effect that confirms the claim.
        grids: the grids that decide the claim: at paper scale only their data sets count.
        since: when the rule was changed last (UTC).
        rule: fingerprint of the rule (``bench.date_claim_rules``): `git log -S RULE data/paper/claims.csv` names the
            commit.
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

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper makes the claim; the place of the other ones begins with "ours"."""
        return not self.place.startswith("ours")


def effect_of(
    runs: pd.DataFrame,
    differences: Iterable[float],
    comparison: str,
    other_controls: tuple[Effect, ...] = (),
) -> Effect:
    """Make the effect of runs from differences by seed, as stored and positive in the claim's direction."""
    values = metric_named(metric_of(runs)).factor * np.asarray(
        list(differences), dtype=float
    )
    return effect_at(
        runs,
        lambda alpha: statistics.interval(values, alpha),
        len(values),
        comparison,
        other_controls,
    )


def effect_at(
    runs: pd.DataFrame,
    interval_at: Callable[[float], Interval],
    n: int,
    comparison: str,
    other_controls: tuple[Effect, ...] = (),
) -> Effect:
    """Make the effect of runs from a function of the test level to the interval."""
    first = runs.iloc[0]
    dataset = str(first["dataset"]).rstrip("/")
    bits = f"{first['q_min']} to {runs['q_max'].max()} bits"
    experiment = [run_groups.title_of(runs), run_groups.gradients_text(runs), bits]
    return Effect(
        ", ".join(filter(None, experiment)),
        str(first["scale"]),
        interval_at,
        n,
        comparison,
        f"{dataset}/{first['model']}",
        f"q_min {first['q_min']}",
        tuple(sorted({store.rpartition("/")[2] for store in runs["store"] if store})),
        str(first["task"]),
        dataset,
        tuple(runs["started"]),
        int(runs["diverged"].sum()),
        other_controls,
    )


def _with_baseline_keys(make: Callable[..., Effect]) -> Callable[..., Effect]:
    """Add the recipes of the compared runs to an effect, from which its quality at full bits is found."""

    @wraps(make)
    def with_baseline_keys(runs: pd.DataFrame, *args: Any, **kwargs: Any) -> Effect:
        recipes = (
            runs[baselines.BASELINE_COLUMNS]
            .drop_duplicates()
            .itertuples(index=False, name=None)
        )
        return replace(make(runs, *args, **kwargs), baseline_keys=tuple(recipes))

    return with_baseline_keys


# Not a decorator: the fingerprint of a claim's rule covers the source of the function, without its baseline.
effect_at = _with_baseline_keys(effect_at)


def quality_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with a column "quality", for which more is better.

    The quality of a perplexity is -100 times its logarithm.
    """
    metric = metric_of(runs)
    if metric == "perplexity":
        values = -100 * np.log(runs[metric])
    else:
        values = metric_named(metric).better * runs[metric]
    return runs.assign(quality=values)


def minus(runs: pd.DataFrame, a: str, b: str, words: str = "") -> Iterator[Effect]:
    """Yield the quality of ``a`` minus the quality of ``b`` (``named_arm``); nothing if one of them did not run."""
    runs = quality_of(runs)
    try:
        names = named_arm(runs, a), named_arm(runs, b)
        sides = [quality_cost.runs_of(runs, name) for name in names]
    except ValueError:
        return
    arm_names = [_arm_name(side, name) for side, name in zip(sides, names, strict=True)]
    comparison = " minus ".join(arm_names) + words
    first, second = sides
    differences = statistics.paired(first, second, "quality")
    yield effect_of(pd.concat(sides), differences, comparison)


def _arm_name(side: pd.DataFrame, name: str) -> str:
    """Return the name of an arm or of a savings group, with the group's arms if some of them did not run."""
    arms = [arm for arm, profile in SUITE.items() if profile.savings == name]
    stored_arms = [arm for arm in arms if arm in set(side["arm"])]
    if stored_arms == arms:
        return name
    return f"{name} ({', '.join(stored_arms)} alone)"


def named_arm(runs: pd.DataFrame, name: str) -> str:
    """Return the arm or savings group that a claim names.

    "static" is static q_max. "worst" and "second worst" are those of the ten schedules, by the mean quality over one
    experiment's runs. Any other name is returned as it is. That the worst of ten is picked counts against a claim about
    all schedules.

    Raises:
        ValueError: if "worst" is named and not all ten schedules were run.
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
    runs: pd.DataFrame, a: tuple[str, str], b: tuple[str, str], comparison: str
) -> Effect:
    """Return the quality of ``a`` minus the quality of ``b``, each an (arm, recipe)."""
    runs = quality_of(runs)
    sides = []
    for arm, recipe in (a, b):
        sides.append(runs[(runs["arm"] == arm) & (runs["recipe"] == recipe)])
    first, second = sides
    differences = statistics.paired(first, second, "quality")
    return effect_of(pd.concat(sides), differences, comparison)
