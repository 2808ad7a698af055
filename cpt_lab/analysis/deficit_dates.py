"""Costs of a deficit by its date and by the decay of the learning rate.  Paper: section 5, footnote 5.

A deficit is a window of low precision. Its cost is the quality of its control, which trains for as many steps with the
same learning rates at q_max, minus its own, by seed. Two questions are answered from the costs:

- Does a deficit at the start cost more under one decay than under another? The paper says no (footnote 5).
- Does an early deficit cost more than a late one, under each decay by itself? All compared deficits are followed by
  equally many steps, so that a late one has as much time to recover. The slope is that of the straight line through
  the costs, from the earliest date to the latest, by seed.

``outcome`` answers both from rows, ``loss_table`` and ``difference_table`` print the answers, ``decay_figure`` draws
them. The measures of claims use ``costs`` and ``slopes`` too.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis import baselines, run_groups, statistics
from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.estimates import Estimate, unit_of
from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, subplots

# order of decays in tables and figures
DECAY_ORDER = (
    "step",
    "cosine",
    "linear",
    "plateau",
    "constant",
)
MIN_DATES = 3  # smallest number of dates for a slope
COLOR_OF_DECAY = {
    "step": COLORS["large"],
    "cosine": COLORS["medium"],
    "constant": COLORS["static"],
}
MARKER_OF_DECAY = {"step": "o", "cosine": "s", "constant": "D"}


def decay_name(task: str, lr_rule: str, milestones: str) -> str:
    """Return the name of a learning-rate decay from the fields of a recipe.

    Args:
        task: task of the recipe.
        lr_rule: learning-rate rule of the recipe, "" for none.
        milestones: shares of the steps at which the rate falls, such as "0.5 0.75", "" for none.
    """
    if lr_rule and lr_rule != "milestones":
        return lr_rule
    if milestones and milestones != "0.5 0.75":
        return f"step at {' and '.join(f'{100 * float(share):.0f}' for share in milestones.split())} %"
    if milestones:
        return "step"
    return {"graph": "cosine", "entailment": "linear"}.get(task, "constant")


def decay_kind(decay: str) -> str:
    """Return the kind of a decay, such as "step" of "step at 67 and 83 %".

    Two step decays may be one, counted from the start of training and from the end of a deficit.
    """
    return decay.partition(" at ")[0]


def with_decay(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with a column ``decay``."""
    columns = runs[["task", "lr_rule", "milestones"]].itertuples(index=False, name=None)
    return runs.assign(decay=[decay_name(*fields) for fields in columns])


def dated_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the deficit experiments, preregistered ones included, with recipes that differ in length and decay alone.

    Preregistered runs are an experiment of their own: they are not pooled with other runs.
    """
    is_dated = (runs["kind"] == "deficit") & runs["start"].notna()
    deficit_runs = with_decay(runs[is_dated])
    is_preregistered = deficit_runs["key"].isin(run_groups.preregistered())
    columns = [
        deficit_runs[name] for name in ("recipe_but_decay", "preset", "q_max", "scale")
    ]
    columns.append(run_groups.reduced_gradient_bits(deficit_runs))
    columns.append(is_preregistered.rename("is_preregistered"))
    parts = [part for _, part in deficit_runs.groupby(columns, sort=False)]
    return sorted(parts, key=lambda part: part["scale"].iloc[0] != "paper")


def decays_of_other_experiments(
    group: pd.DataFrame, groups: Iterable[pd.DataFrame]
) -> list[str]:
    """Return decays that a model has in other experiments alone, such as at other learning rates.

    Args:
        group: a deficit experiment of ``dated_groups``.
        groups: all of them.
    """
    columns = ["task", "dataset", "model", "preset", "scale", "q_min", "q_max"]
    first = group.iloc[0]
    own_kinds = {decay_kind(decay) for decay in group["decay"]}
    missing: set[str] = set()
    for other in groups:
        if other.iloc[0][columns].equals(first[columns]):
            missing |= {d for d in other["decay"] if decay_kind(d) not in own_kinds}
    return ordered(pd.Series(list(missing), dtype="string"))


def costs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the cost of every deficit of an experiment, by seed.

    Returns:
        Columns: decay, start, stop, total (steps), recovery (steps after the deficit), seed, cost (as stored; for a
        perplexity 100 times its logarithm).
    """
    rows = []
    for _, family in quality_of(runs).groupby("recipe", sort=False):
        control = family[family["stop"] == 0]
        for (start, stop), part in family[family["stop"] > 0].groupby(
            ["start", "stop"]
        ):
            total = int(family["total_steps"].iloc[0])
            where = {
                "decay": family["decay"].iloc[0],
                "start": int(start),
                "stop": int(stop),
                "total": total,
            }
            by_seed = statistics.paired(control, part, "quality")
            rows += [
                {**where, "recovery": total - stop, "seed": seed, "cost": x}
                for seed, x in by_seed.items()
            ]
    return pd.DataFrame(
        rows, columns=["decay", "start", "stop", "total", "recovery", "seed", "cost"]
    )


def ordered(decays: pd.Series) -> list[str]:
    """Return the distinct decays in the order of ``DECAY_ORDER``, unknown ones first."""
    return sorted(
        set(decays),
        key=lambda name: (DECAY_ORDER.index(name) if name in DECAY_ORDER else -1, name),
    )


def at_equal_recovery(
    deficit_costs: pd.DataFrame,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each decay with its deficits of one length at three dates or more, all with equal steps after them."""
    for decay in ordered(deficit_costs["decay"]):
        decay_costs = deficit_costs[deficit_costs["decay"] == decay]
        length = decay_costs["stop"] - decay_costs["start"]
        for _, part in decay_costs.groupby([length, "recovery"]):
            if part["start"].nunique() >= MIN_DATES:
                yield decay, part


def slopes(part: pd.DataFrame) -> pd.Series:
    """Return the slope of the costs over the dates, latest minus earliest, by seed; for seeds that have all dates."""
    wide = part.pivot(index="seed", columns="start", values="cost").dropna()
    first, last = wide.columns.min(), wide.columns.max()
    dates = (wide.columns - first) / (last - first)
    costs_by_date = wide.to_numpy().T
    fitted = np.polyfit(dates.to_numpy(dtype=float), costs_by_date, 1)[0]
    return pd.Series(fitted, index=wide.index)


class StartDifference(NamedTuple):
    """Costs of one deficit at the start of training, under one decay minus under another."""

    first_decay: str
    second_decay: str
    stop: int  # length of the deficit, in steps
    total: int  # length of the training, in steps
    differences: pd.Series  # by seed


def start_differences(deficit_costs: pd.DataFrame) -> Iterator[StartDifference]:
    """Yield the cost difference of every two kinds of decay, for the longest deficit at the start that both have."""
    at_start = deficit_costs[deficit_costs["start"] == 0]
    for decays in itertools.combinations(ordered(at_start["decay"]), 2):
        if decay_kind(decays[0]) == decay_kind(decays[1]):
            continue
        by_deficit = []
        for decay in decays:
            decay_costs = at_start[at_start["decay"] == decay]
            indexed = decay_costs.set_index(["stop", "total", "seed"])
            by_deficit.append(indexed["cost"])
        differences = (by_deficit[0] - by_deficit[1]).dropna()
        if len(differences):
            stop, total = max(differences.index.droplevel("seed"))
            longest = differences.loc[(stop, total)]
            yield StartDifference(*decays, stop, total, longest)


class DateOutcome(NamedTuple):
    """Costs of deficits by date under each decay, and the effects computed from them, all by seed."""

    # (decay, first step of the deficit) -> quality without a deficit minus quality with it
    losses: dict[tuple[str, int], Estimate]
    # decay -> loss at the latest minus at the earliest date, from a fitted line
    slopes: dict[str, Estimate]
    # two decays -> loss by the deficit at step 0, under the first minus under the second
    differences: dict[tuple[str, str], Estimate]
    # two decays -> slope under the first minus under the second
    slope_differences: dict[tuple[str, str], Estimate]
    # decay -> quality of training without a deficit, in words
    control_quality: dict[str, str]
    deficit_steps: int
    recovery_steps: int


def outcome(runs: pd.DataFrame) -> DateOutcome:
    """Return the effects of the runs of one experiment, such as ``run_table.committed("h3")``.

    All are of deficits of one length with equal steps after them; of several such the first counts.

    Raises:
        ValueError: for runs that are not one experiment with deficits at three dates or more.
    """
    parts = [
        part for part in dated_groups(runs) if list(at_equal_recovery(costs(part)))
    ]
    if len(parts) != 1:
        raise ValueError(
            f"runs: expected one experiment with deficits at {MIN_DATES} dates or more, got {len(parts)}"
        )
    (group,) = parts
    deficit_costs, unit = costs(group), unit_of(group)
    factor = metric_named(metric_of(group)).factor

    def estimate(description: str, values: pd.Series) -> Estimate:
        return Estimate(description, unit, factor * values.to_numpy(dtype=float))

    _, first = next(at_equal_recovery(deficit_costs))
    recovery_steps = int(first["recovery"].iloc[0])
    deficit_steps = int((first["stop"] - first["start"]).iloc[0])
    is_compared = deficit_costs["recovery"] == recovery_steps
    is_compared &= deficit_costs["stop"] - deficit_costs["start"] == deficit_steps
    parts_by_decay = dict(at_equal_recovery(deficit_costs[is_compared]))

    losses, slope_by_decay, fitted = {}, {}, {}
    for decay, part in parts_by_decay.items():
        fitted[decay] = slopes(part)
        description = f"loss, latest minus earliest, {decay} learning rate"
        slope_by_decay[decay] = estimate(description, fitted[decay])
        for start, at_date in part.groupby("start"):
            description = f"loss of a deficit from step {start}, {decay}"
            losses[decay, int(start)] = estimate(description, at_date["cost"])

    differences = {}
    for pair in start_differences(pd.concat(parts_by_decay.values())):
        decays = pair.first_decay, pair.second_decay
        description = f"loss of the deficit [0, {pair.stop}), {' minus '.join(decays)}"
        differences[decays] = estimate(description, pair.differences)

    slope_differences = {}
    for decays in itertools.combinations(fitted, 2):
        by_seed = (fitted[decays[0]] - fitted[decays[1]]).dropna()
        slope_differences[decays] = estimate(
            f"slope, {' minus '.join(decays)}", by_seed
        )

    controls = group[group["stop"] == 0]
    control_quality = {}
    for decay in slope_by_decay:
        control_quality[decay] = baselines.quality_text(
            controls[controls["decay"] == decay]
        )
    return DateOutcome(
        losses,
        slope_by_decay,
        differences,
        slope_differences,
        control_quality,
        deficit_steps=deficit_steps,
        recovery_steps=recovery_steps,
    )


def loss_table(results: DateOutcome) -> pd.DataFrame:
    """Return losses by date, slopes and quality without a deficit as a table, a line per decay."""
    lines = []
    for decay, slope in results.slopes.items():
        line = {"learning rate": decay}
        for (other, start), loss in results.losses.items():
            if other == decay:
                line[f"[{start}, {start + results.deficit_steps})"] = (
                    loss.text().removesuffix(f" {loss.unit}")
                )
        line |= {
            f"slope, latest minus earliest ({slope.unit})": slope.text().removesuffix(
                f" {slope.unit}"
            ),
            "p": f"{slope.p():.2g}",
            "n": str(len(slope.values)),
            "no deficit reaches": results.control_quality[decay],
        }
        lines.append(line)
    return pd.DataFrame(lines)


def difference_table(results: DateOutcome) -> pd.DataFrame:
    """Return the differences between decays as a table: loss by the deficit at the start, and slope."""
    lines = []
    for pair, effect in results.differences.items():
        slope = results.slope_differences[pair]
        lines.append(
            {
                "learning rates": " minus ".join(pair),
                f"loss of the deficit [0, {results.deficit_steps}) [95 %]": effect.text(),
                "p": f"{effect.p():.1g}",
                "slope [95 %]": slope.text(),
                "p of the slope": f"{slope.p():.1g}",
                "n": str(len(effect.values)),
            }
        )
    return pd.DataFrame(lines)


def finding(results: DateOutcome) -> str:
    """Return a sentence that compares early with late deficits under each decay.

    They differ when the interval of the slope excludes 0.
    """
    higher, lower, inconclusive = [], [], []
    for decay, slope in results.slopes.items():
        low, high = slope.interval()
        if high < 0:
            higher.append(decay)
        elif low > 0:
            lower.append(decay)
        elif decay == "constant":
            inconclusive.append("a constant learning rate")
        else:
            inconclusive.append(f"{decay} decay")

    parts = []
    if higher:
        parts.append(f"costs more than a late one with {_join_names(higher)} decay")
    if lower:
        parts.append(f"costs less than a late one with {_join_names(lower)} decay")
    starts_with_cost = bool(parts)
    if inconclusive:
        parts.append(f"no clear difference with {_join_names(inconclusive)}")
    words = "; ".join(parts)
    if starts_with_cost:
        return f"An early deficit {words}"
    return f"Early and late deficits: {words}"


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def decay_figure(runs: pd.DataFrame) -> Figure:
    """Draw the cost of a deficit against its first step, a line per decay with 95 % intervals; runs as for ``outcome``.

    Paper: section 5, footnote 5.
    Differs: equal time to recover, controls of equal length and intervals are ours.
    """
    results = outcome(runs)
    group = next(
        part for part in dated_groups(runs) if list(at_equal_recovery(costs(part)))
    )
    starts = sorted({start for _, start in results.losses})
    shift = 0.012 * (starts[-1] - starts[0])
    with subplots(
        alt=f"{finding(results)}. {_losses_text(results)}", figsize=(7, 4.2)
    ) as (
        figure,
        ((ax,),),
    ):
        for i, decay in enumerate(results.slopes):
            decay_losses = [
                (start, loss)
                for (other, start), loss in results.losses.items()
                if other == decay
            ]
            x = [start + (i - 1) * shift for start, _ in decay_losses]
            means = [loss.mean for _, loss in decay_losses]
            halves = [loss.mean - loss.interval()[0] for _, loss in decay_losses]
            label = f"{decay} learning rate: slope {results.slopes[decay].text()}"
            color, marker = (
                COLOR_OF_DECAY.get(decay, COLORS["own"]),
                MARKER_OF_DECAY.get(decay, "^"),
            )
            ax.errorbar(
                x,
                means,
                yerr=halves,
                color=color,
                marker=marker,
                capsize=3,
                markersize=5,
                label=label,
            )
        ax.axhline(0, color="#888888", linewidth=0.8)
        unit = next(iter(results.losses.values())).unit
        ax.set(
            xlabel="first step of the deficit",
            ylabel=f"loss: no deficit minus deficit ({unit})",
            xticks=starts,
        )
        ax.legend(fontsize=SMALL_FONT_SIZE, loc="upper right")
        figure.suptitle(finding(results).replace("; ", ";\n"), fontsize=11)
        figure.supxlabel(
            _caption(group, results), fontsize=SMALL_FONT_SIZE, color="#666666"
        )
    return figure


def _caption(group: pd.DataFrame, results: DateOutcome) -> str:
    first = group.iloc[0]
    n = min(len(loss.values) for loss in results.losses.values())
    reached = baselines.quality_text(group[group["stop"] == 0])
    return (
        f"{run_groups.title_of(group)}; {results.deficit_steps} steps at {first['q_min']} "
        f"instead of {first['q_max']} bits, "
        f"{results.recovery_steps} steps after each; n = {n}; 95 % intervals;\n"
        f"without a deficit {reached}. Secondary effects, without correction."
    )


def _losses_text(results: DateOutcome) -> str:
    return "; ".join(
        f"{loss.description}: {loss.text()}" for loss in results.losses.values()
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the figure and the tables of every experiment with deficits at three dates or more."""
    for group in dated_groups(runs):
        if not list(at_equal_recovery(costs(group))):
            continue
        results = outcome(group)
        title = f"Costs of a deficit by date and learning-rate decay: {run_groups.title_of(group)}"
        note = f"{finding(results)}. Secondary effects: without correction for several tests."
        yield Section(
            title,
            (note,),
            decay_figure(group),
            _losses_text(results),
            loss_table(results),
        )
        if results.differences:
            yield Section(f"{title}: decays compared", table=difference_table(results))
