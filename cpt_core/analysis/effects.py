"""Effects: what the runs of an experiment say, in the direction of a claim."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cpt_core.analysis import aggregation, critical_periods, groups, predictors, quality_cost, statistics
from cpt_core.analysis.metrics import metric_named, metric_of
from cpt_core.experiments.recipes import recipe
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE

LEAST_SEEDS = 3
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True)
class Effect:
    """What one experiment says: an effect in the claim's direction with its 95 % interval, and over how many seeds.

    ``n`` of a correlation is the number of arms; what is said names both.
    """

    experiment: str
    scale: str
    interval: Interval
    n: int
    what: str
    stores: tuple[str, ...] = ()
    domain: str = ""
    dataset: str = ""

    def __str__(self) -> str:
        """Return it in words; exact ones have no interval."""
        if self.scale == "exact":
            return self.what
        mean, low, high = self.interval
        shown = f" [{low:+.2f}, {high:+.2f}]" if low == low else ""
        return f"{self.experiment}: {self.what}: {mean:+.2f}{shown}, n = {self.n}"


@dataclass(frozen=True)
class Claim:
    """One line of ``claims.csv``.

    ``a`` and ``b`` are what is compared, ``tasks`` limits it to a task ("" for all), ``grids`` are those of the paper's
    scale that decide it.
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


def _effect(runs: pd.DataFrame, differences: Iterable[float], what: str) -> Effect:
    """Make an effect of paired differences in stored units, positive in the claim's direction."""
    values = metric_named(metric_of(runs)).factor * np.asarray(list(differences), dtype=float)
    return Effect(
        _name(runs), runs["scale"].iloc[0], statistics.interval(values), len(values), what, _stores(runs),
        dataset=_dataset(runs),
    )  # fmt: skip


def _stores(runs: pd.DataFrame) -> tuple[str, ...]:
    return tuple(sorted({store.rpartition("/")[2] for store in runs["store"] if store}))


def _dataset(runs: pd.DataFrame) -> str:
    return str(runs["dataset"].iloc[0]).rstrip("/")


def _name(runs: pd.DataFrame) -> str:
    return f"{groups.title_of(runs)}, {runs['q_min'].iloc[0]} to {runs['q_max'].iloc[0]} bits"


def _quality(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with a column "quality", more is better; of a perplexity 100 times minus its logarithm."""
    metric = metric_of(runs)
    values = -100 * np.log(runs[metric]) if metric == "perplexity" else metric_named(metric).better * runs[metric]
    return runs.assign(quality=values)


def _minus(runs: pd.DataFrame, a: str, b: str) -> pd.Series:
    """Quality of ``a`` minus that of ``b`` by seed, arms or groups of savings; empty when there is no such arm."""
    runs = _quality(runs)
    try:
        return (quality_cost.of_arms(runs, a, "quality") - quality_cost.of_arms(runs, b, "quality")).dropna()
    except ValueError:
        return pd.Series(dtype=float)


def _arms(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    for group in groups.quality_cost_groups(runs):
        if group["aggregation"].iloc[0] in ("", "fp") and group["q_max"].iloc[0] == 8:
            differences = _minus(group, claim.a, claim.b)
            if len(differences):
                yield _effect(group, differences, f"{claim.a} minus {claim.b}")


def _aggregation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    for group in groups.aggregation_groups(runs[(runs["model"] == claim.a) & (runs["q_max"] == 8)]):
        differences = -aggregation.aggregation_difference(group)["difference"]
        yield _effect(group, differences, "FP-Agg minus Q-Agg at static 8 bits")


def _top_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Static training at its own q_max, gradients included, in one recipe: ``a`` minus ``b``."""
    for group in groups.top_groups(runs):
        differences = _minus(group, claim.a, claim.b)
        if len(differences):
            yield _effect(group, differences, f"{claim.a} minus {claim.b}, gradients too")


def _correlation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Rank correlation of cost and quality; with ``a`` what a predictor's is more than that of cost."""
    for group in groups.quality_cost_groups(runs):
        try:
            found = predictors.predictors(group).set_index("predictor")
        except ValueError:  # too few arms or seeds
            continue
        line = found.loc[claim.a or "relative_cost"]
        over = f"over {line.arms} arms, {line.seeds} seeds"
        if claim.a:
            interval = (line.difference, line.difference_low, line.difference_high)
            what = f"strength of {claim.a.replace('_', ' ')} minus that of cost {over}"
        else:
            interval = (line.strength, line.low, line.high)
            what = f"rank correlation {over}"
        first = group.iloc[0]
        yield Effect(
            _name(group), first["scale"], interval, int(line.arms), what, _stores(group), first["task"], _dataset(group)
        )


def _deficit_length(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The longest deficit at the start against the weaker of two trainings without one.

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
        controls = {
            f"{r.total} steps at q_max": _by_seed(group, r.arm, r.recipe)
            for r in clean[clean.total.isin([longest.total, clean.total.min()])].itertuples()
        }
        if controls:
            weaker = min(controls, key=lambda name: controls[name].mean())
            differences = controls[weaker] - _by_seed(group, longest.arm, longest.recipe)
            what = f"{weaker} minus a deficit of {longest.stop} of {longest.total} steps"
            yield _effect(group, differences.dropna(), what)


def _deficit_window(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The earliest window against the latest one that leaves some time after it."""
    for group in groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        inner = found[(found.experiment == "window") & found.place.isin(["start", "inside"])].sort_values("start")
        if len(inner) > 1 and inner.start.iloc[0] == 0:
            first, last = inner.iloc[0], inner.iloc[-1]
            differences = _by_seed(group, last.arm, first.recipe) - _by_seed(group, first.arm, first.recipe)
            yield _effect(group, differences.dropna(), f"window {last.arm} minus {first.arm}")


def _by_seed(runs: pd.DataFrame, arm: str, recipe: str) -> pd.Series:
    part = _quality(runs[(runs["recipe"] == recipe) & (runs["arm"] == arm)])
    return part.groupby("seed")["quality"].first()


def _cycles(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The same schedule with ``a`` and with ``b`` cycles, in recipes that differ in nothing else."""
    for group in groups.cycle_groups(runs):
        wide = _quality(group).pivot_table(index=["arm", "seed"], columns="n_cycles", values="quality")
        if {int(claim.a), int(claim.b)} <= set(wide.columns):
            both = (wide[int(claim.a)] - wide[int(claim.b)]).dropna()
            if len(both):
                arms = ", ".join(sorted(both.index.unique("arm")))
                yield _effect(group, both.groupby("seed").mean(), f"{claim.a} minus {claim.b} cycles of {arms}")


def _delay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """A delayed RR against RR of the same cost."""
    for group in groups.equal_cost_groups(runs):
        for arm in group["arm"].unique():
            base = re.fullmatch(r"(RR.*) delayed [\d.]+ %", arm)
            if base:
                yield _effect(group, _minus(group, arm, base[1]), f"{arm} minus {base[1]}, at one cost")


def _exact(name: str, right: bool, what: str) -> Iterator[Effect]:
    yield Effect(name, "exact", (1.0 if right else -1.0,) * 3, LEAST_SEEDS, what)


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
