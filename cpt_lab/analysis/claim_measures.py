"""Measures of claims: functions from the runs that a claim is about to effects in the claim's direction.

``MEASURES`` names them as ``data/paper/claims.csv`` does. Each yields one ``Effect`` per experiment;
``computed_claims`` has the measures that need no runs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

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
    """Yield the best schedule of an experiment minus the schedule that is best in other tasks, by its mean rank.

    Both are chosen on every second seed and compared on the remaining seeds. An effect of 0 means that both are the
    same schedule.
    """
    groups = [
        quality_of(group)
        for group in run_groups.quality_cost_groups(runs)
        if {*SUITE} <= {*group["arm"]}
    ]
    selection_masks = []
    mean_ranks = []
    for group in groups:
        selection_seeds = sorted(set(group["seed"]))[::2]
        is_selection = group["seed"].isin(selection_seeds)
        suite = group[is_selection & group["arm"].isin([*SUITE])]
        selection_masks.append(is_selection)
        mean_ranks.append(suite.groupby("arm")["quality"].mean().rank())
    ranks = pd.DataFrame(mean_ranks)

    for i, (group, is_selection) in enumerate(
        zip(groups, selection_masks, strict=True)
    ):
        task = group["task"].iloc[0]
        ranks_elsewhere = ranks[[other["task"].iloc[0] != task for other in groups]]
        if len(ranks_elsewhere) and not is_selection.all():
            best_here = str(ranks.iloc[i].idxmax())
            best_elsewhere = str(ranks_elsewhere.mean().idxmax())
            words = ", the best of other tasks"
            yield from minus(group[~is_selection], best_here, best_elsewhere, words)


def _aggregation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield FP-Agg minus Q-Agg on validation nodes, as in figure 5, and on test nodes; both have to agree."""
    for group in run_groups.aggregation_groups(runs[runs["q_max"] == 8]):
        effects: list[Effect] = []
        for metric, words in (("valid", "validation"), ("accuracy", "test")):
            differences = aggregation.aggregation_difference(group, metric)
            gaps = -differences["difference"].dropna()
            # An experiment without any common seed still has an effect, on test nodes, that shows nothing.
            if len(gaps) or metric == "accuracy":
                comparison = f"FP-Agg minus Q-Agg at static 8 bits, {words} nodes"
                effects.append(effect_of(group, gaps, comparison))
        yield _with_controls(effects)


def _with_controls(effects: Sequence[Effect]) -> Effect:
    """Return the first effect, with all remaining ones as its controls."""
    return replace(effects[0], other_controls=tuple(effects[1:]))


def _top_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield static training at q_max ``a`` minus that at ``b``, gradients included, within one recipe."""
    for group in run_groups.top_groups(runs):
        yield from minus(group, claim.a, claim.b, ", gradients too")


def _gradient_bits(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield static ``a`` with 8-bit gradients minus static ``a`` with ``a``-bit gradients.

    Each run is evaluated at the bits of its gradients.
    """
    for group in run_groups.gradient_groups(runs, f"static {claim.a}"):
        wide = quality_of(group[group["q_grad"] == 8])
        narrow = quality_of(group[group["q_grad"] == int(claim.a)])
        differences = statistics.paired(wide, narrow, "quality")
        comparison = f"static {claim.a}, 8-bit minus {claim.a}-bit gradients"
        yield effect_of(group, differences, comparison)


def _correlation(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the rank correlation of cost and quality.

    With ``claim.a`` it is the rank correlation of that predictor minus the one of cost.
    """
    if claim.a:
        columns = ["difference", "difference_low", "difference_high"]
        comparison = f"strength of {claim.a.replace('_', ' ')} minus that of cost"
    else:
        columns = ["strength", "low", "high"]
        comparison = "rank correlation"
    for group in run_groups.quality_cost_groups(runs):

        @cache
        def line(alpha: float, group: pd.DataFrame = group) -> pd.Series:
            by_predictor = predictors.predictors(group, alpha=alpha)
            return by_predictor.set_index("predictor").loc[claim.a or "relative_cost"]

        def interval_at(
            alpha: float, line: Callable[[float], pd.Series] = line
        ) -> Interval:
            mean, low, high = line(alpha)[columns]
            return mean, low, high

        try:
            first = line(statistics.ALPHA)
        except ValueError:  # too few arms or seeds
            continue
        over_arms = f"{comparison} over {first.arms} arms"
        yield effect_at(group, interval_at, int(first.seeds), over_arms)


def _deficit_length(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the loss by the longest deficit at the start against two trainings without one, which have to agree.

    Lasting damage shows against both: worse than the normal training alone (otherwise low steps are worth less than
    good ones, but do no harm), and worse than training of the same length at q_max (otherwise the length does harm).
    """
    for group, deficits, clean in _lengths(runs):
        longest = deficits.iloc[-1]
        lengths = [longest.total, clean.total.min()]
        effects = []
        for control in clean[clean.total.isin(lengths)].itertuples():
            comparison = (
                f"{control.total} steps at q_max minus a deficit of {longest.stop} "
                f"of {longest.total} steps"
            )
            effects.append(_arm_difference(group, control, longest, comparison))
        if effects:
            yield _with_controls(effects)


def _arm_difference(
    runs: pd.DataFrame, first: Any, second: Any, comparison: str
) -> Effect:
    """Return the effect of one arm of ``critical_periods.deficits`` minus another, each in its own recipe."""
    return arm_minus(
        runs, (first.arm, first.recipe), (second.arm, second.recipe), comparison
    )


def _deficit_window(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the loss by the earliest window minus that by the latest one with some training after it.

    A late window of a training of fixed length has less time to recover. For windows with equal time after them, at
    three dates or more, the effect is the slope of the line through their losses, under each learning-rate decay.
    """
    for group in run_groups.deficit_groups(runs):
        inner = _inner_windows(critical_periods.deficits(group)).sort_values("start")
        if len(inner) > 1 and inner.start.iloc[0] == 0:
            first, last = inner.iloc[0], inner.iloc[-1]
            yield arm_minus(
                group,
                (last.arm, first.recipe),
                (first.arm, first.recipe),
                f"window {last.arm} minus {first.arm}",
            )
    for group in deficit_dates.dated_groups(runs):
        costs = deficit_dates.costs(group)
        for decay, part in deficit_dates.at_equal_recovery(costs):
            dates, recovery = part["start"].nunique(), part["recovery"].iloc[0]
            comparison = (
                f"loss at the earliest minus at the latest of {dates} dates, "
                f"{recovery} steps after each, {decay} learning rate"
            )
            same_decay = group[group["decay"] == decay]
            effect = effect_of(same_decay, -deficit_dates.slopes(part), comparison)
            yield replace(effect, bits=f"{effect.bits}, {decay} learning rate")


def _inner_windows(arms: pd.DataFrame) -> pd.DataFrame:
    """Return the windows of ``critical_periods.deficits`` that do not lie at the end of training."""
    is_inner = (arms.experiment == "window") & arms.place.isin(["start", "inside"])
    return arms[is_inner]


def _deficit_end(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the latest window with some training after it minus one of equal length at the end."""
    for group in run_groups.deficit_groups(runs):
        arms = critical_periods.deficits(group)
        windows = arms[arms.experiment == "window"].sort_values("start")
        windows = windows.set_index("place")
        if not {"inside", "end"} <= set(windows.index):
            continue

        before = windows.loc[["inside"]].iloc[-1]
        last = windows.loc[["end"]].iloc[-1]
        if before.stop - before.start == last.stop - last.start:
            comparison = f"window {before.arm} minus {last.arm}"
            yield _arm_difference(group, before, last, comparison)


def _deficit_slope(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the rank correlation, by seed, of a window's cost with the gain of clean training during that window.

    The gain of training before its first evaluation is unknown. Seeds whose clean training did not finish have no
    learning curve, and are left out.
    """
    for group in run_groups.deficit_groups(runs):
        name = metric_of(group)
        inner = _inner_windows(critical_periods.deficits(group))
        for recipe, windows in inner.groupby("recipe"):
            recipe_runs = group[group["recipe"] == recipe]
            is_clean = (recipe_runs["stop"] == 0) & (recipe_runs["status"] == "ok")
            clean = recipe_runs[is_clean].set_index("seed")
            gains = {}
            for seed, evaluations in clean["evaluations"].items():
                steps = [evaluation["step"] for evaluation in evaluations]
                values = [evaluation["test"][name] for evaluation in evaluations]
                at_stop = np.interp(windows.stop, steps, values)
                at_start = np.interp(windows.start, steps, values)
                gains[seed] = at_stop - at_start

            by_arm = recipe_runs.pivot(index="seed", columns="arm", values=name)
            costs = by_arm[windows.arm].rsub(clean[name], axis=0)
            gains_by_seed = pd.DataFrame(gains, windows.arm).T
            correlations = costs.corrwith(gains_by_seed, axis=1, method="spearman")
            correlations = correlations.dropna()
            yield effect_at(
                recipe_runs,
                partial(statistics.interval, correlations),
                len(correlations),
                f"rank correlation over {len(windows)} windows",
            )


def _deficit_longer(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the longest deficit at the start minus the next shorter one."""
    for group, deficits, _ in _lengths(runs):
        if len(deficits) > 1:
            shorter, longest = deficits.iloc[-2], deficits.iloc[-1]
            comparison = (
                f"a deficit of {longest.stop} minus one of {shorter.stop} steps"
            )
            yield _arm_difference(group, longest, shorter, comparison)


def _deficit_short(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the shortest deficit at the start minus the normal training without a deficit."""
    for group, deficits, clean in _lengths(runs):
        shortest, normal = deficits.iloc[0], clean.iloc[0]
        comparison = (
            f"a deficit of {shortest.stop} minus none, then {normal.total} steps"
        )
        yield _arm_difference(group, shortest, normal, comparison)


def _deficit_decay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the cost of the longest deficit at the start under one learning-rate decay minus that under another.

    The cost is the loss against training of equal length. All pairs of decays of an experiment have to agree; decays
    that the model has in other experiments alone, such as at other learning rates, are named.
    """
    groups = deficit_dates.dated_groups(runs)
    for group in groups:
        missing = deficit_dates.decays_of_other_experiments(group, groups)
        note = (
            f" (not with {', '.join(missing)}, an experiment apart)" if missing else ""
        )
        effects = []
        for pair in deficit_dates.start_differences(deficit_dates.costs(group)):
            decays = [pair.first_decay, pair.second_decay]
            same_length = group["total_steps"] == pair.total
            same_deficit = group["stop"].isin([0, pair.stop]) & (group["start"] == 0)
            compared_runs = group[
                group["decay"].isin(decays) & same_length & same_deficit
            ]
            comparison = (
                f"cost of a deficit of {pair.stop} of {pair.total} steps, "
                f"{' minus '.join(decays)} learning rate{note}"
            )
            effects.append(effect_of(compared_runs, pair.differences, comparison))
        if effects:
            yield _with_controls(effects)


class _DeficitLengths(NamedTuple):
    """An experiment with deficits at the start of training."""

    runs: pd.DataFrame
    deficits: pd.DataFrame  # arms with a deficit at the start, the shortest first
    clean: pd.DataFrame  # arms without a deficit, the shortest training first


def _lengths(runs: pd.DataFrame) -> Iterator[_DeficitLengths]:
    """Yield the experiments that have deficits at the start and trainings without a deficit."""
    for group in run_groups.deficit_groups(runs):
        arms = critical_periods.deficits(group)
        arms = arms[arms.experiment == "length"]
        deficits = arms[arms.place == "start"].sort_values("stop")
        clean = arms[arms.place == "none"]
        if len(deficits) and len(clean):
            yield _DeficitLengths(group, deficits, clean.sort_values("total"))


def _cycles(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the schedules with ``a`` cycles minus those with ``b`` cycles, all else being equal."""
    for group in run_groups.cycle_groups(runs):
        yield from _varied(group, claim, "n_cycles", "cycles")


def _fanout(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield static q_max with ``a`` sampled neighbours minus that with ``b``, all else being equal."""
    for group in run_groups.fanout_groups(runs):
        yield from _varied(group, claim, "fanout", "neighbours")


def _varied(
    runs: pd.DataFrame, claim: Claim, column: str, words: str
) -> Iterator[Effect]:
    """Yield the runs with ``column`` equal to ``claim.a`` minus those with ``claim.b``, over their common arms."""
    first = quality_of(runs[runs[column] == int(claim.a)])
    second = quality_of(runs[runs[column] == int(claim.b)])
    arms = sorted(set(first["arm"]) & set(second["arm"]))
    if not arms:
        return

    first = first[first["arm"].isin(arms)]
    second = second[second["arm"].isin(arms)]
    differences = statistics.paired(first, second, "quality")
    comparison = f"{claim.a} minus {claim.b} {words} of {', '.join(arms)}"
    yield effect_of(pd.concat([first, second]), differences, comparison)


def _aggregation_fanout(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield the loss by Q-Agg with ``a`` sampled neighbours minus that with ``b``."""
    for group in run_groups.fanout_groups(runs, aggregations=True):
        parts = [group[group["fanout"] == int(n)] for n in (claim.a, claim.b)]
        if any(part["aggregation"].nunique() != 2 for part in parts):
            continue

        gains = []
        for part in parts:
            differences = aggregation.aggregation_difference(part)
            gains.append(differences.set_index("seed")["difference"])
        losses = (gains[1] - gains[0]).dropna()
        comparison = (
            f"FP-Agg minus Q-Agg, with {claim.a} minus with {claim.b} neighbours"
        )
        yield effect_of(pd.concat(parts), losses, comparison)


def _delay(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Yield a delayed RR minus RR of equal cost."""
    for group in run_groups.equal_cost_groups(runs):
        for arm in group["arm"].unique():
            base = re.fullmatch(r"(RR.*) delayed [\d.]+ %", arm)
            if base:
                yield from minus(group, arm, base[1], ", at one cost")


# measures that compare both aggregations
BOTH_AGGREGATIONS = ("aggregation", "aggregation_fanout")

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
