"""Effects: what the runs of an experiment say, in the direction of a claim."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from cpt_core.analysis import aggregation, critical_periods, groups, predictors, quality_cost, statistics
from cpt_core.analysis.metrics import interval_text, metric_named, metric_of
from cpt_core.experiments.recipes import recipe
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE

LEAST_SEEDS = 3
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True)
class Effect:
    """What one experiment says, in the direction of a claim.

    Attributes:
        experiment: what was trained, in words; ``place`` the same in short: data set and model; ``bits`` its q_min.
        scale: of the runs; "exact" of what is computed.
        at: the effect with its interval at 1 - alpha, from alpha.
        n: seeds that were compared.
        what: what was compared.
        stores: that the runs are in.
        task: of the runs.
        dataset: of the runs.
        started: when the runs that were compared were started, ISO.
        diverged: how many of them did.
        others: the same effect against further controls; all have to agree.
    """

    experiment: str
    scale: str
    at: Callable[[float], Interval]
    n: int
    what: str
    place: str = ""
    bits: str = ""
    stores: tuple[str, ...] = ()
    task: str = ""
    dataset: str = ""
    started: tuple[str, ...] = ()
    diverged: int = 0
    others: tuple[Effect, ...] = ()

    @property
    def interval(self) -> Interval:
        """The effect with the interval that is shown."""
        return self.at(statistics.ALPHA)

    def __str__(self) -> str:
        """Return it in words; exact ones have no interval."""
        if self.scale == "exact":
            return self.what
        return f"{self.experiment}: {'; '.join(e.number() for e in (self, *self.others))}"

    def number(self) -> str:
        """Return what was compared with its effect."""
        mean, low, high = self.interval
        lost = f", {self.diverged} of {len(self.started)} runs diverged" if self.diverged else ""
        if mean != mean:
            return f"{self.what}: no seed to compare{lost}"
        return f"{self.what}: {interval_text(mean, low, high)}, n = {self.n}{lost}"


@dataclass(frozen=True)
class Claim:
    """One line of ``claims.csv``.

    ``a`` and ``b`` are what is compared, ``tasks`` limits it to a task ("" for all), ``grids`` are those of the paper's
    scale that decide it. ``since`` says when its rule was changed last (UTC), ``rule`` is the fingerprint of that rule
    (``rules.fingerprint``): `git log -S RULE data/paper/claims.csv` names the commit.
    """

    id: str
    claim: str
    place: str
    measure: str
    a: str
    b: str
    tasks: str
    test: str
    margin: float
    grids: str
    since: str
    rule: str


def _effect(runs: pd.DataFrame, differences: Iterable[float], what: str, others: tuple[Effect, ...] = ()) -> Effect:
    """Make an effect of differences by seed, as stored and positive in the claim's direction; of the runs compared."""
    values = metric_named(metric_of(runs)).factor * np.asarray(list(differences), dtype=float)
    return _of(runs, lambda alpha: statistics.interval(values, alpha), len(values), what, others)


def _of(
    runs: pd.DataFrame, at: Callable[[float], Interval], n: int, what: str, others: tuple[Effect, ...] = ()
) -> Effect:
    first = runs.iloc[0]
    dataset = str(first["dataset"]).rstrip("/")
    return Effect(
        f"{groups.title_of(runs)}, {first['q_min']} to {runs['q_max'].max()} bits", str(first["scale"]), at, n, what,
        f"{dataset}/{first['model']}", f"q_min {first['q_min']}",
        tuple(sorted({store.rpartition("/")[2] for store in runs["store"] if store})), str(first["task"]), dataset,
        tuple(runs["started"]), int(runs["diverged"].sum()), others,
    )  # fmt: skip


def _quality(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with a column "quality", more is better; of a perplexity 100 times minus its logarithm."""
    metric = metric_of(runs)
    values = -100 * np.log(runs[metric]) if metric == "perplexity" else metric_named(metric).better * runs[metric]
    return runs.assign(quality=values)


def _minus(runs: pd.DataFrame, a: str, b: str, words: str = "") -> Iterator[Effect]:
    """Quality of ``a`` minus that of ``b``, arms or groups of savings; nothing when one of them was not run."""
    runs = _quality(runs)
    try:
        sides = quality_cost.runs_of(runs, a), quality_cost.runs_of(runs, b)
    except ValueError:
        return
    yield _effect(pd.concat(sides), statistics.paired(*sides, "quality"), f"{a} minus {b}{words}")


def _arms(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    for group in groups.quality_cost_groups(runs):
        if group["aggregation"].iloc[0] in ("", "fp") and group["q_max"].iloc[0] == 8:
            yield from _minus(group, claim.a, claim.b)


def _aggregation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    for group in groups.aggregation_groups(runs[(runs["model"] == claim.a) & (runs["q_max"] == 8)]):
        differences = -aggregation.aggregation_difference(group)["difference"]
        yield _effect(group, differences, "FP-Agg minus Q-Agg at static 8 bits")


def _top_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Static training at its own q_max, gradients included, in one recipe: ``a`` minus ``b``."""
    for group in groups.top_groups(runs):
        yield from _minus(group, claim.a, claim.b, ", gradients too")


def _correlation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Rank correlation of cost and quality; with ``a`` what a predictor's is more than that of cost."""
    columns = ("difference", "difference_low", "difference_high") if claim.a else ("strength", "low", "high")
    what = f"strength of {claim.a.replace('_', ' ')} minus that of cost" if claim.a else "rank correlation"
    for group in groups.quality_cost_groups(runs):

        @cache
        def line(alpha: float, group: pd.DataFrame = group) -> pd.Series:
            found = predictors.predictors(group, alpha=alpha).set_index("predictor")
            return found.loc[claim.a or "relative_cost"]

        def at(alpha: float, line: Callable[[float], pd.Series] = line) -> Interval:
            mean, low, high = line(alpha)[list(columns)]
            return mean, low, high

        try:
            first = line(statistics.ALPHA)
        except ValueError:  # too few arms or seeds
            continue
        yield _of(group, at, int(first.seeds), f"{what} over {first.arms} arms")


def _deficit_length(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The longest deficit at the start against two trainings without one, which have to agree.

    Lasting damage shows against both: worse than the normal training alone (else low steps are worth less than good
    ones, but harm nothing), and worse than training of the same length at q_max (else it is the length that harms).
    """
    for group in groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        found = found[found.experiment == "length"]
        deficits, clean = found[found.place == "start"], found[found.place == "none"]
        if deficits.empty:
            continue
        longest = deficits.sort_values("stop").iloc[-1]
        effects: tuple[Effect, ...] = ()
        for r in clean[clean.total.isin([longest.total, clean.total.min()])].sort_values("total").itertuples():
            what = f"{r.total} steps at q_max minus a deficit of {longest.stop} of {longest.total} steps"
            effects += (_arm_minus(group, (r.arm, r.recipe), (longest.arm, longest.recipe), what),)
        if effects:
            yield replace(effects[0], others=effects[1:])


def _deficit_window(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The earliest window against the latest one that leaves some time after it."""
    for group in groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        inner = found[(found.experiment == "window") & found.place.isin(["start", "inside"])].sort_values("start")
        if len(inner) > 1 and inner.start.iloc[0] == 0:
            first, last = inner.iloc[0], inner.iloc[-1]
            what = f"window {last.arm} minus {first.arm}"
            yield _arm_minus(group, (last.arm, first.recipe), (first.arm, first.recipe), what)


def _arm_minus(runs: pd.DataFrame, a: tuple[str, str], b: tuple[str, str], what: str) -> Effect:
    """Quality of ``a`` minus that of ``b``, each an arm of a recipe."""
    runs = _quality(runs)
    x, y = (runs[(runs["arm"] == arm) & (runs["recipe"] == recipe)] for arm, recipe in (a, b))
    return _effect(pd.concat([x, y]), statistics.paired(x, y, "quality"), what)


def _cycles(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The same schedules with ``a`` and with ``b`` cycles, in recipes that differ in nothing else."""
    for group in groups.cycle_groups(runs):
        sides = [_quality(group[group["n_cycles"] == int(n)]) for n in (claim.a, claim.b)]
        arms = sorted(set(sides[0]["arm"]) & set(sides[1]["arm"]))
        if arms:
            x, y = (side[side["arm"].isin(arms)] for side in sides)
            what = f"{claim.a} minus {claim.b} cycles of {', '.join(arms)}"
            yield _effect(pd.concat([x, y]), statistics.paired(x, y, "quality"), what)


def _delay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """A delayed RR against RR of the same cost."""
    for group in groups.equal_cost_groups(runs):
        for arm in group["arm"].unique():
            base = re.fullmatch(r"(RR.*) delayed [\d.]+ %", arm)
            if base:
                yield from _minus(group, arm, base[1], ", at one cost")


def _exact(name: str, right: bool, what: str) -> Iterator[Effect]:
    value = 1.0 if right else -1.0
    yield Effect(name, "exact", lambda alpha: (value, value, value), LEAST_SEEDS, what)


def _ptb_costs(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """BitOps of section 4.4, counted from the model as the paper counts them."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.models.lstm_lm import LanguageModel
    from cpt_core.quantization.convert import quantize_

    with torch.device("meta"):
        model = quantize_(LanguageModel(10_000, 800, 800))
        inputs = (torch.empty(35, 20, dtype=torch.int64), None)
    totals = {}
    for arm in ("STATIC", "CR", "RR"):
        schedule = make_schedule(arm, q_min=8 if arm == "STATIC" else 5, q_max=8, total_steps=40 * 1327, n_cycles=2)
        totals[arm] = count_bitops(model, inputs, schedule).total / 1e13
    right = totals["STATIC"] > 9 and abs(totals["CR"] - 7) < 0.1 and abs(totals["RR"] - 5.5) < 0.1
    yield from _exact("counted", right, "static 8, CR, RR: " + ", ".join(f"{t:.2f}" for t in totals.values()))


def _cost_groups(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Every schedule of a group costs less than every schedule of the next, at the bits and lengths of the paper."""
    settings = {("cifar10", 6), ("cifar10", 8), ("imagenet", 6), ("imagenet", 8), ("ptb", 6), ("ptb", 8)}
    right = True
    for dataset, q_max in settings:
        r = recipe("paper", dataset)
        of: dict[str, list[float]] = {}
        for name, entry in SUITE.items():
            schedule = make_schedule(name, q_min=r.q_min, q_max=q_max, total_steps=r.steps, n_cycles=r.n_cycles)
            of.setdefault(entry.savings, []).append(schedule.relative_cost())
        right &= max(of["large"]) < min(of["medium"]) and max(of["medium"]) < min(of["small"])
    yield from _exact("computed", right, "all ten schedules at 3, 4, 5 to 6 and 8 bits")


def _more_than_halved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    costs = [
        make_schedule(name, q_min=3, q_max=8, total_steps=64_000).relative_cost()
        for name, entry in SUITE.items()
        if entry.savings == "large"
    ]
    yield from _exact("computed", max(costs) < 0.5, f"RR and RTH, 3 to 8 bits: {max(costs):.3f} of static 8 bits")


EFFECTS: dict[str, Callable[[pd.DataFrame, Claim], Iterator[Effect]]] = {
    "arms": _arms,
    "aggregation": _aggregation,
    "top_bits": _top_bits,
    "correlation": _correlation,
    "deficit_length": _deficit_length,
    "deficit_window": _deficit_window,
    "cycles": _cycles,
    "delay": _delay,
    "ptb_costs": _ptb_costs,
    "cost_groups": _cost_groups,
    "more_than_halved": _more_than_halved,
}
