"""Effects: what the rows of an experiment say, in the direction of a claim."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cpt_core.analysis import aggregation, critical_periods, equal_cost, metrics, predictors, quality_cost, statistics
from cpt_core.analysis.groups import experiments
from cpt_core.analysis.runs import table
from cpt_core.experiments.recipes import recipe
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.sweeps.stores import Row

LEAST_SEEDS = 3
Interval = tuple[float, float, float]  # mean, low, high


@dataclass(frozen=True)
class Effect:
    """What one experiment says: an effect in the claim's direction with its 95 % interval, and over how many seeds."""

    experiment: str
    scale: str
    interval: Interval
    n: int
    what: str
    stores: tuple[str, ...] = ()
    domain: str = ""

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


def _effect(rows: list[Row], differences: Iterable[float], what: str) -> Effect:
    """Make an effect of paired differences in stored units, positive in the claim's direction."""
    values = metrics.measure_of(metrics.metric_of(rows)).factor * np.asarray(list(differences), dtype=float)
    return Effect(_name(rows), rows[0]["spec"]["scale"], statistics.interval(values), len(values), what, _stores(rows))


def _stores(rows: list[Row]) -> tuple[str, ...]:
    return tuple(sorted({row["store"] for row in rows if "store" in row}))


def _name(rows: list[Row]) -> str:
    spec = rows[0]["spec"]
    title = next(
        (r["title"] for r in rows if r.get("title")), f"{spec['recipe']['model']} on {spec['recipe']['dataset']}"
    )
    return f"{title}, {spec['recipe']['q_min']} to {spec['q_max']} bits"


def _quality(rows: list[Row]) -> pd.DataFrame:
    """Rows as a table with a column "quality", more is better; of a perplexity 100 times minus its logarithm."""
    runs = table(quality_cost.tuned(rows))
    metric = metrics.metric_of(rows)
    if metric not in runs:
        return runs.assign(quality=float("nan"))
    better = metrics.measure_of(metric).better
    values = -100 * np.log(runs[metric]) if metric == "perplexity" else better * runs[metric]
    return runs.assign(quality=values)


def _minus(runs: pd.DataFrame, a: str, b: str) -> pd.Series:
    """Quality of ``a`` minus that of ``b`` by seed, arms or groups of savings; empty when there is no such arm."""
    try:
        return (quality_cost.of_arms(runs, a, "quality") - quality_cost.of_arms(runs, b, "quality")).dropna()
    except ValueError:
        return pd.Series(dtype=float)


def _arms(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    for group in experiments(rows):
        runs = _quality(group)
        if group[0]["spec"]["recipe"].get("aggregation", "fp") == "fp" and runs["q_max"].iloc[0] == 8:
            differences = _minus(runs, claim.a, claim.b)
            if len(differences):
                yield _effect(group, differences, f"{claim.a} minus {claim.b}")


def _aggregation(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    groups: dict[str, list[Row]] = {}
    for group in experiments(rows):
        spec = group[0]["spec"]
        if spec["recipe"].get("aggregation") and spec["recipe"]["model"] == claim.a:
            key = {k: v for k, v in spec["recipe"].items() if k != "aggregation"}
            static = [row for row in group if row["spec"]["arm"] == "static 8"]
            groups.setdefault(f"{key} {spec['scale']}", []).extend(static)
    for group in groups.values():
        if len({row["spec"]["recipe"]["aggregation"] for row in group}) == 2:
            differences = -aggregation.aggregation_difference(group)["difference"]
            yield _effect(group, differences, "FP-Agg minus Q-Agg at static 8 bits")


def _top_bits(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """Static training at its own q_max, gradients included, in one recipe: ``a`` minus ``b``."""
    groups: dict[str, list[Row]] = {}
    for group in experiments(rows):
        spec = group[0]["spec"]
        key = f"{spec['recipe']} {spec['scale']} {spec['preset']}"
        groups.setdefault(key, []).extend(
            row for row in group if row["spec"]["arm"] == f"static {row['spec']['q_max']}"
        )
    for group in groups.values():
        differences = _minus(_quality(group), claim.a, claim.b) if group else []
        if len(differences):
            yield _effect(group, differences, f"{claim.a} minus {claim.b}, gradients too")


def _correlation(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """Rank correlation of cost and quality; with ``a`` what a predictor's is more than that of cost."""
    for group in experiments(rows):
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
        spec = group[0]["spec"]
        n, domain = int(line.arms), spec["recipe"]["task"]
        yield Effect(_name(group), spec["scale"], interval, n, what, _stores(group), domain)


def _deficit_length(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """The longest deficit at the start against the weaker of two trainings without one.

    Lasting damage shows against both: worse than the normal training alone (else low steps are worth less than good
    ones, but harm nothing), and worse than training of the same length at q_max (else it is the length that harms).
    """
    for group in critical_periods.deficit_experiments(rows):
        found = critical_periods.deficits(group)
        found = found[found.experiment == "length"]
        deficits, clean = found[found.place == "start"], found[found.place == "none"]
        if len(deficits):
            longest = deficits.sort_values("stop").iloc[-1]
            runs = _quality(group)
            controls = {}
            for r in clean[clean.total.isin([longest.total, clean.total.min()])].itertuples():
                controls[f"{r.total} steps at q_max"] = _by_seed(runs[(runs.recipe == r.recipe) & (runs.arm == r.arm)])
            mine = _by_seed(runs[(runs.recipe == longest.recipe) & (runs.arm == longest.arm)])
            if controls:
                weaker = min(controls, key=lambda name: controls[name].mean())
                what = f"{weaker} minus a deficit of {longest.stop} of {longest.total} steps"
                yield _effect(group, (controls[weaker] - mine).dropna(), what)


def _deficit_window(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """The earliest window against the latest one that leaves some time after it."""
    for group in critical_periods.deficit_experiments(rows):
        found = critical_periods.deficits(group)
        inner = found[(found.experiment == "window") & found.place.isin(["start", "inside"])].sort_values("start")
        if len(inner) > 1 and inner.start.iloc[0] == 0:
            first, last = inner.iloc[0], inner.iloc[-1]
            runs = _quality(group)
            family = runs[runs["recipe"] == first.recipe]
            differences = _by_seed(family[family["arm"] == last.arm]) - _by_seed(family[family["arm"] == first.arm])
            yield _effect(group, differences.dropna(), f"window {last.arm} minus {first.arm}")


def _by_seed(runs: pd.DataFrame) -> pd.Series:
    return runs.groupby("seed")["quality"].first()


def _cycles(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """The same schedule with ``a`` and with ``b`` cycles, in recipes that differ in nothing else."""
    groups: dict[str, list[Row]] = {}
    for group in experiments(rows):
        spec = group[0]["spec"]
        key = {k: v for k, v in spec["recipe"].items() if k != "n_cycles"}
        groups.setdefault(f"{key} {spec['q_max']} {spec['scale']}", []).extend(
            row for row in group if row["spec"]["arm"] in SUITE
        )
    for group in groups.values():
        if not group:
            continue
        runs = _quality(group)
        runs["n_cycles"] = [row["spec"]["recipe"]["n_cycles"] for row in quality_cost.tuned(group)]
        wide = runs.pivot_table(index=["arm", "seed"], columns="n_cycles", values="quality")
        if {int(claim.a), int(claim.b)} <= set(wide.columns):
            both = (wide[int(claim.a)] - wide[int(claim.b)]).dropna()
            if len(both):
                differences = both.groupby("seed").mean()
                arms = ", ".join(sorted(both.index.unique("arm")))
                yield _effect(group, differences, f"{claim.a} minus {claim.b} cycles of {arms}")


def _delay(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    """A delayed RR against RR of the same cost."""
    for group in equal_cost.equal_cost_experiments(rows):
        runs = _quality(group)
        for arm in runs["arm"].unique():
            base = re.fullmatch(r"(RR.*) delayed [\d.]+ %", arm)
            if base:
                yield _effect(group, _minus(runs, arm, base[1]), f"{arm} minus {base[1]}, at one cost")


def _exact(name: str, right: bool, what: str) -> Iterator[Effect]:
    yield Effect(name, "exact", (1.0 if right else -1.0,) * 3, LEAST_SEEDS, what)


def _ptb_costs(rows: list[Row], claim: Claim) -> Iterator[Effect]:
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


def _cost_groups(rows: list[Row], claim: Claim) -> Iterator[Effect]:
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


def _more_than_halved(rows: list[Row], claim: Claim) -> Iterator[Effect]:
    costs = [
        make_schedule(name, q_min=3, q_max=8, total_steps=64_000).relative_cost()
        for name, entry in SUITE.items()
        if entry.savings == "large"
    ]
    yield from _exact("computed", max(costs) < 0.5, f"RR and RTH, 3 to 8 bits: {max(costs):.3f} of static 8 bits")


MEASURES: dict[str, Callable[[list[Row], Claim], Iterator[Effect]]] = {
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
