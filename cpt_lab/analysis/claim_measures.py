"""Measures: functions that take the runs that a claim is about, and yield effects in its direction."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import (
    aggregation,
    computed_claims,
    critical_periods,
    deficit_dates,
    predictors,
    run_groups,
    statistics,
)
from cpt_lab.analysis.effects import (
    Claim,
    Effect,
    Interval,
    arm_minus,
    effect_at,
    effect_of,
    minus,
    quality_of,
)
from cpt_lab.analysis.metrics import metric_of


def _arms(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    for group in run_groups.quality_cost_groups(runs):
        yield from minus(group, claim.a, claim.b)


def _best_elsewhere(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The schedule that is best here minus the one that is best in other tasks, by its mean rank.

    Both are chosen on every second seed and compared on the others. An effect of 0 says that they are the same.
    """
    parts = [
        quality_of(part)
        for part in run_groups.quality_cost_groups(runs)
        if {*SUITE} <= {*part["arm"]}
    ]
    chosen = [part["seed"].isin(sorted(set(part["seed"]))[::2]) for part in parts]
    suites = [
        part[mine & part["arm"].isin([*SUITE])]
        for part, mine in zip(parts, chosen, strict=True)
    ]
    ranks = pd.DataFrame(
        [suite.groupby("arm")["quality"].mean().rank() for suite in suites]
    )
    for i, (part, mine) in enumerate(zip(parts, chosen, strict=True)):
        elsewhere = ranks[
            [other["task"].iloc[0] != part["task"].iloc[0] for other in parts]
        ]
        if len(elsewhere) and not mine.all():
            best, other = ranks.iloc[i].idxmax(), elsewhere.mean().idxmax()
            yield from minus(
                part[~mine], str(best), str(other), ", the best of other tasks"
            )


def _aggregation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """FP-Agg minus Q-Agg on validation nodes, as figure 5 has it, and on test nodes: both have to agree."""
    for group in run_groups.aggregation_groups(runs[runs["q_max"] == 8]):
        effects: tuple[Effect, ...] = ()
        for metric, words in (("valid", "validation"), ("accuracy", "test")):
            gaps = -aggregation.aggregation_difference(group, metric)[
                "difference"
            ].dropna()
            if (
                len(gaps) or metric == "accuracy"
            ):  # an experiment that shows nothing is said to show nothing
                effects += (
                    effect_of(
                        group,
                        gaps,
                        f"FP-Agg minus Q-Agg at static 8 bits, {words} nodes",
                    ),
                )
        yield replace(effects[0], others=effects[1:])


def _top_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Static training at its own q_max, gradients included, in one recipe: ``a`` minus ``b``."""
    for group in run_groups.top_groups(runs):
        yield from minus(group, claim.a, claim.b, ", gradients too")


def _gradient_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Static ``a`` with gradients of q_max 8 minus the same with its own bits, each evaluated at the bits of those."""
    for group in run_groups.gradient_groups(runs, f"static {claim.a}"):
        x, y = (
            quality_of(group[group["q_grad"] == bits]) for bits in (8, int(claim.a))
        )
        what = f"static {claim.a}, 8-bit minus {claim.a}-bit gradients"
        yield effect_of(group, statistics.paired(x, y, "quality"), what)


def _correlation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Rank correlation of cost and quality; with ``a`` what a predictor's is more than that of cost."""
    columns = (
        ("difference", "difference_low", "difference_high")
        if claim.a
        else ("strength", "low", "high")
    )
    what = (
        f"strength of {claim.a.replace('_', ' ')} minus that of cost"
        if claim.a
        else "rank correlation"
    )
    for group in run_groups.quality_cost_groups(runs):

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
        yield effect_at(group, at, int(first.seeds), f"{what} over {first.arms} arms")


def _deficit_length(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The longest deficit at the start against two trainings without one, which have to agree.

    Lasting damage shows against both: worse than the normal training alone (else low steps are worth less than good
    ones, but harm nothing), and worse than training of the same length at q_max (else it is the length that harms).
    """
    for group, deficits, clean in _lengths(runs):
        longest = deficits.iloc[-1]
        effects: tuple[Effect, ...] = ()
        for r in clean[
            clean.total.isin([longest.total, clean.total.min()])
        ].itertuples():
            what = f"{r.total} steps at q_max minus a deficit of {longest.stop} of {longest.total} steps"
            effects += (
                arm_minus(
                    group, (r.arm, r.recipe), (longest.arm, longest.recipe), what
                ),
            )
        if effects:
            yield replace(effects[0], others=effects[1:])


def _deficit_window(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The earliest window against the latest one that leaves some time after it.

    Where windows have as much time after them, at three dates or more, the line through their losses counts, under each
    decay of the learning rate: a late window of a training of fixed length has less time to recover.
    """
    for group in run_groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        inner = found[
            (found.experiment == "window") & found.place.isin(["start", "inside"])
        ].sort_values("start")
        if len(inner) > 1 and inner.start.iloc[0] == 0:
            first, last = inner.iloc[0], inner.iloc[-1]
            what = f"window {last.arm} minus {first.arm}"
            yield arm_minus(
                group, (last.arm, first.recipe), (first.arm, first.recipe), what
            )
    for group in deficit_dates.dated_groups(runs):
        for decay, part in deficit_dates.at_equal_recovery(deficit_dates.costs(group)):
            dates, recovery = part["start"].nunique(), part["recovery"].iloc[0]
            what = f"loss at the earliest minus at the latest of {dates} dates, {recovery} steps after each"
            same_decay = group[group["decay"] == decay]
            effect = effect_of(
                same_decay,
                -deficit_dates.slopes(part),
                f"{what}, {decay} learning rate",
            )
            yield replace(effect, bits=f"{effect.bits}, {decay} learning rate")


def _deficit_end(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The latest window that leaves some time after it against one of the same length at the end."""
    for group in run_groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        windows = (
            found[found.experiment == "window"].sort_values("start").set_index("place")
        )
        if {"inside", "end"} <= set(windows.index):
            before, last = (
                windows.loc[["inside"]].iloc[-1],
                windows.loc[["end"]].iloc[-1],
            )
            if before.stop - before.start == last.stop - last.start:
                what = f"window {before.arm} minus {last.arm}"
                yield arm_minus(
                    group, (before.arm, before.recipe), (last.arm, last.recipe), what
                )


def _deficit_slope(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Over windows of low precision: what each costs, and what the clean training gains from its start to its end.

    The rank correlation of both, by seed. What training gains before its first evaluation is not known.
    """
    for group in run_groups.deficit_groups(runs):
        found, name = critical_periods.deficits(group), metric_of(group)
        inner = found[
            (found.experiment == "window") & found.place.isin(["start", "inside"])
        ]
        for recipe, windows in inner.groupby("recipe"):
            mine = group[group["recipe"] == recipe]
            clean, gains = mine[mine["stop"] == 0].set_index("seed"), {}
            for seed, evaluations in clean["evaluations"].items():
                at, of = zip(
                    *((e["step"], e["test"][name]) for e in evaluations), strict=True
                )
                gains[seed] = np.interp(windows.stop, at, of) - np.interp(
                    windows.start, at, of
                )
            costs = mine.pivot(index="seed", columns="arm", values=name)[
                windows.arm
            ].rsub(clean[name], axis=0)
            rho = costs.corrwith(
                pd.DataFrame(gains, windows.arm).T, axis=1, method="spearman"
            ).dropna()
            what = f"rank correlation over {len(windows)} windows"
            yield effect_at(mine, partial(statistics.interval, rho), len(rho), what)


def _deficit_longer(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The longest deficit at the start against the next shorter one."""
    for group, deficits, _ in _lengths(runs):
        if len(deficits) > 1:
            shorter, longest = deficits.iloc[-2], deficits.iloc[-1]
            what = f"a deficit of {longest.stop} minus one of {shorter.stop} steps"
            yield arm_minus(
                group,
                (longest.arm, longest.recipe),
                (shorter.arm, shorter.recipe),
                what,
            )


def _deficit_short(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The shortest deficit at the start against the training that comes after it, alone."""
    for group, deficits, clean in _lengths(runs):
        shortest, normal = deficits.iloc[0], clean.iloc[0]
        what = f"a deficit of {shortest.stop} minus none, then {normal.total} steps"
        yield arm_minus(
            group, (shortest.arm, shortest.recipe), (normal.arm, normal.recipe), what
        )


def _deficit_decay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """What the longest deficit at the start costs, against equal length, under two decays of the learning rate.

    All pairs of decays have to agree.
    """
    for group in deficit_dates.dated_groups(runs):
        effects: tuple[Effect, ...] = ()
        for one, other, where, differences in deficit_dates.start_differences(
            deficit_dates.costs(group)
        ):
            stop, total = where["stop"].iloc[0], where["total"].iloc[0]
            alike = group["decay"].isin([one, other]) & (group["total_steps"] == total)
            compared = group[
                alike & group["stop"].isin([0, stop]) & (group["start"] == 0)
            ]
            what = f"cost of a deficit of {stop} of {total} steps, {one} minus {other} learning rate"
            effects += (effect_of(compared, differences, what),)
        if effects:
            yield replace(effects[0], others=effects[1:])


def _lengths(
    runs: pd.DataFrame,
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]]:
    """Experiments with deficits at the start, those by length, and trainings without one by length."""
    for group in run_groups.deficit_groups(runs):
        found = critical_periods.deficits(group)
        found = found[found.experiment == "length"]
        deficits, clean = (
            found[found.place == "start"].sort_values("stop"),
            found[found.place == "none"],
        )
        if len(deficits) and len(clean):
            yield group, deficits, clean.sort_values("total")


def _cycles(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The same schedules with ``a`` and with ``b`` cycles, in recipes that differ in nothing else."""
    for group in run_groups.cycle_groups(runs):
        yield from _varied(group, claim, "n_cycles", "cycles")


def _fanout(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Static q_max with ``a`` and with ``b`` sampled neighbours, in recipes that differ in nothing else."""
    for group in run_groups.fanout_groups(runs):
        yield from _varied(group, claim, "fanout", "neighbours")


def _varied(
    runs: pd.DataFrame, claim: Claim, column: str, words: str
) -> Iterator[Effect]:
    sides = [quality_of(runs[runs[column] == int(n)]) for n in (claim.a, claim.b)]
    arms = sorted(set(sides[0]["arm"]) & set(sides[1]["arm"]))
    if arms:
        x, y = (side[side["arm"].isin(arms)] for side in sides)
        what = f"{claim.a} minus {claim.b} {words} of {', '.join(arms)}"
        yield effect_of(pd.concat([x, y]), statistics.paired(x, y, "quality"), what)


def _aggregation_fanout(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """What Q-Agg loses with ``a`` sampled neighbours more than with ``b``."""
    for group in run_groups.fanout_groups(runs, aggregations=True):
        parts = [group[group["fanout"] == int(n)] for n in (claim.a, claim.b)]
        if all(part["aggregation"].nunique() == 2 for part in parts):
            x, y = (
                aggregation.aggregation_difference(part).set_index("seed")["difference"]
                for part in parts
            )
            what = f"FP-Agg minus Q-Agg, with {claim.a} minus with {claim.b} neighbours"
            yield effect_of(pd.concat(parts), (y - x).dropna(), what)


def _delay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """A delayed RR against RR of the same cost."""
    for group in run_groups.equal_cost_groups(runs):
        for arm in group["arm"].unique():
            base = re.fullmatch(r"(RR.*) delayed [\d.]+ %", arm)
            if base:
                yield from minus(group, arm, base[1], ", at one cost")


BOTH_AGGREGATIONS = ("aggregation", "aggregation_fanout")  # measures that compare them

MEASURES: dict[str, Callable[[pd.DataFrame, Claim], Iterator[Effect]]] = {
    measure.__name__.lstrip("_"): measure
    for measure in (
        _arms,
        _best_elsewhere,
        _aggregation,
        _top_bits,
        _gradient_bits,
        _correlation,
        _deficit_length,
        _deficit_window,
        _deficit_end,
        _deficit_slope,
        _deficit_longer,
        _deficit_short,
        _deficit_decay,
        _cycles,
        _fanout,
        _aggregation_fanout,
        _delay,
        computed_claims.ptb_costs,
        computed_claims.cost_groups,
        computed_claims.more_than_halved,
        computed_claims.cost_order,
        computed_claims.saved,
        computed_claims.aggregation_share,
    )
}
