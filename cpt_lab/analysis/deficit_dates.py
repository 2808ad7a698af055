"""Costs of a deficit by its date and by the decay of the learning rate.  Paper: section 5, footnote 5.

A deficit is a window of low precision. Its cost is the quality of its control, which trains for as many steps with the
same learning rates at q_max, minus its own, by seed. Two questions are asked of the costs:

- Does a deficit at the start cost more under one decay than under another? The paper says no (footnote 5).
- Does an early deficit cost more than a late one, under each decay by itself? All deficits that are compared are
  followed by as many steps, so that a late one has as much time to recover. The slope is that of the straight line
  through the costs, from the earliest date to the latest, by seed.

``outcome`` answers both from rows, ``loss_table`` and ``difference_table`` show the answers, ``decay_figure`` draws
them. The measures of claims use ``costs`` and ``slopes`` too.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis import levels, run_groups, statistics
from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.estimates import Estimate, unit_of
from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import COLORS, SMALL, subplots

DECAYS = (
    "step",
    "cosine",
    "linear",
    "plateau",
    "constant",
)  # the order in which they are named
MIN_DATES = 3  # fewer dates make no slope
COLOR_OF_DECAY = {
    "step": COLORS["large"],
    "cosine": COLORS["medium"],
    "constant": COLORS["static"],
}
MARKER_OF_DECAY = {"step": "o", "cosine": "s", "constant": "D"}


def decay_name(task: str, lr_rule: str, milestones: str) -> str:
    """Return the name of a learning-rate decay from the fields of a recipe.

    Args:
        task: of the recipe.
        lr_rule: of the recipe, "" where it has none.
        milestones: shares of the steps at which the rate falls, such as "0.5 0.75", "" for none.
    """
    if lr_rule and lr_rule != "milestones":
        return lr_rule
    if milestones and milestones != "0.5 0.75":
        return f"step at {' and '.join(f'{100 * float(share):.0f}' for share in milestones.split())} %"
    if milestones:
        return "step"
    return {"graph": "cosine", "entailment": "linear"}.get(task, "constant")


def with_decay(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with a column ``decay``."""
    columns = runs[["task", "lr_rule", "milestones"]].itertuples(index=False, name=None)
    return runs.assign(decay=[decay_name(*fields) for fields in columns])


def dated_groups(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Return experiments on deficits whose recipes differ in length and decay alone, also preregistered ones.

    Preregistered runs are an experiment of their own: they are not pooled with others.
    """
    found = with_decay(runs[(runs["kind"] == "deficit") & runs["start"].notna()])
    asked = found["key"].isin(run_groups.preregistered()).rename("asked")
    columns = [found[name] for name in ("recipe_but_decay", "preset", "q_max", "scale")]
    parts = [part for _, part in found.groupby([*columns, asked], sort=False)]
    return sorted(parts, key=lambda part: part["scale"].iloc[0] != "paper")


def costs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what the deficits of an experiment cost, by seed.

    Returns:
        Columns: decay, start, stop, total (steps), recovery (steps after the deficit), seed, cost (as stored; of a
        perplexity 100 times its logarithm).
    """
    lines = []
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
            lines += [
                {**where, "recovery": total - stop, "seed": seed, "cost": x}
                for seed, x in by_seed.items()
            ]
    return pd.DataFrame(
        lines, columns=["decay", "start", "stop", "total", "recovery", "seed", "cost"]
    )


def ordered(decays: pd.Series) -> list[str]:
    """Return the decays that there are, in the order of ``DECAYS``, others first."""
    return sorted(
        set(decays),
        key=lambda name: (DECAYS.index(name) if name in DECAYS else -1, name),
    )


def at_equal_recovery(found: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each decay with the costs of deficits at three dates or more that as many steps follow."""
    for decay in ordered(found["decay"]):
        mine = found[found["decay"] == decay]
        for (_, _), part in mine.groupby([mine["stop"] - mine["start"], "recovery"]):
            if part["start"].nunique() >= MIN_DATES:
                yield decay, part


def slopes(part: pd.DataFrame) -> pd.Series:
    """Return the slope of the costs over the dates, latest minus earliest, by seed; for seeds that have all dates."""
    wide = part.pivot(index="seed", columns="start", values="cost").dropna()
    dates = (wide.columns - wide.columns.min()) / (
        wide.columns.max() - wide.columns.min()
    )
    fitted = np.polyfit(dates.to_numpy(dtype=float), wide.to_numpy().T, 1)[0]
    return pd.Series(fitted, index=wide.index)


def start_differences(
    found: pd.DataFrame,
) -> Iterator[tuple[str, str, pd.DataFrame, pd.Series]]:
    """Yield pairs of decays with the longest deficit at the start that both have, and what it costs more by seed.

    Yields:
        The decays; start, stop and total of the deficit, one line; its cost under the first minus under the second.
    """
    first = found[found["start"] == 0]
    for one, other in itertools.combinations(ordered(first["decay"]), 2):
        sides = [
            first[first["decay"] == decay].set_index(["stop", "total", "seed"])["cost"]
            for decay in (one, other)
        ]
        both = (sides[0] - sides[1]).dropna()
        if len(both):
            stop, total = max(both.index.droplevel("seed"))
            where = pd.DataFrame({"start": [0], "stop": [stop], "total": [total]})
            yield one, other, where, both.loc[(stop, total)]


class DateOutcome(NamedTuple):
    """Costs of deficits by date under each decay, with what follows from them; all effects by seed."""

    losses: dict[
        tuple[str, int], Estimate
    ]  # by decay and first step: no deficit minus deficit
    slopes: dict[
        str, Estimate
    ]  # by decay: loss at the latest minus at the earliest date, from a line
    differences: dict[
        tuple[str, str], Estimate
    ]  # by two decays: loss of the deficit at step 0, one minus the other
    slope_differences: dict[
        tuple[str, str], Estimate
    ]  # by two decays: slope under one minus under the other
    control_levels: dict[str, str]  # by decay: what training without a deficit reaches
    deficit_steps: int
    recovery_steps: int


def outcome(runs: pd.DataFrame) -> DateOutcome:
    """Return what the runs of one experiment say, such as those of ``runs.committed("h3")``.

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
    found, unit = costs(group), unit_of(group)
    factor = metric_named(metric_of(group)).factor

    def estimate(what: str, values: pd.Series) -> Estimate:
        return Estimate(what, unit, factor * values.to_numpy(dtype=float))

    losses, by_decay, fitted = {}, {}, {}
    for decay, part in at_equal_recovery(found):
        fitted[decay] = slopes(part)
        by_decay[decay] = estimate(
            f"loss, latest minus earliest, {decay} learning rate", fitted[decay]
        )
        for start, at_date in part.groupby("start"):
            losses[decay, int(start)] = estimate(
                f"loss of a deficit from step {start}, {decay}", at_date["cost"]
            )
    differences = {}
    for one, other, where, values in start_differences(found):
        stop = int(where["stop"].iloc[0])
        differences[one, other] = estimate(
            f"loss of the deficit [0, {stop}), {one} minus {other}", values
        )
    between = {}
    for one, other in itertools.combinations(fitted, 2):
        apart = (fitted[one] - fitted[other]).dropna()
        between[one, other] = estimate(f"slope, {one} minus {other}", apart)
    controls = group[group["stop"] == 0]
    reached = {
        decay: levels.reached(controls[controls["decay"] == decay])
        for decay in by_decay
    }
    _, first = next(at_equal_recovery(found))
    length = int((first["stop"] - first["start"]).iloc[0])
    recovery = int(first["recovery"].iloc[0])
    return DateOutcome(
        losses, by_decay, differences, between, reached, length, recovery
    )


def loss_table(found: DateOutcome) -> pd.DataFrame:
    """Return losses by date, slopes and levels as a table, a line per decay."""
    lines = []
    for decay, slope in found.slopes.items():
        line = {"learning rate": decay}
        for (other, start), loss in found.losses.items():
            if other == decay:
                line[f"[{start}, {start + found.deficit_steps})"] = (
                    loss.shown().removesuffix(f" {loss.unit}")
                )
        line |= {
            f"slope, latest minus earliest ({slope.unit})": slope.shown().removesuffix(
                f" {slope.unit}"
            ),
            "p": f"{slope.p():.2g}",
            "n": str(len(slope.values)),
            "no deficit reaches": found.control_levels[decay],
        }
        lines.append(line)
    return pd.DataFrame(lines)


def difference_table(found: DateOutcome) -> pd.DataFrame:
    """Return how decays differ in the loss of the deficit at the start, and in the slope, as a table."""
    lines = []
    for pair, effect in found.differences.items():
        slope = found.slope_differences[pair]
        lines.append(
            {
                "learning rates": " minus ".join(pair),
                f"loss of the deficit [0, {found.deficit_steps}) [95 %]": effect.shown(),
                "p": f"{effect.p():.1g}",
                "slope [95 %]": slope.shown(),
                "p of the slope": f"{slope.p():.1g}",
                "n": str(len(effect.values)),
            }
        )
    return pd.DataFrame(lines)


def finding(found: DateOutcome) -> str:
    """Return in words under which decays an early deficit costs more than a late one: where the interval excludes 0."""
    signs: dict[str, list[str]] = {"more": [], "less": [], "no clear difference": []}
    for decay, slope in found.slopes.items():
        low, high = slope.interval()
        if high < 0:
            signs["more"].append(decay)
        elif low > 0:
            signs["less"].append(decay)
        else:
            signs["no clear difference"].append(decay)
    parts = [
        f"costs {word} than a late one with {_joined(signs[word])} decay"
        for word in ("more", "less")
        if signs[word]
    ]
    if unclear := signs["no clear difference"]:
        names = _joined(
            [
                "a constant learning rate" if name == "constant" else f"{name} decay"
                for name in unclear
            ]
        )
        parts.append(f"no clear difference with {names}")
    words = "; ".join(parts)
    return (
        f"An early deficit {words}"
        if parts[0].startswith("costs")
        else f"Early and late deficits: {words}"
    )


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def decay_figure(runs: pd.DataFrame) -> Figure:
    """Draw what a deficit costs against its first step, a line per decay with 95 % intervals; runs as for ``outcome``.

    Paper: section 5, footnote 5.
    Differs: equal time to recover, controls of equal length and intervals are ours.
    """
    found = outcome(runs)
    group = next(
        part for part in dated_groups(runs) if list(at_equal_recovery(costs(part)))
    )
    starts = sorted({start for _, start in found.losses})
    shift = 0.012 * (starts[-1] - starts[0])
    with subplots(alt=f"{finding(found)}. {_described(found)}", figsize=(7, 4.2)) as (
        figure,
        ((ax,),),
    ):
        for i, decay in enumerate(found.slopes):
            mine = [
                (start, loss)
                for (other, start), loss in found.losses.items()
                if other == decay
            ]
            x = [start + (i - 1) * shift for start, _ in mine]
            means = [loss.mean for _, loss in mine]
            halves = [loss.mean - loss.interval()[0] for _, loss in mine]
            label = f"{decay} learning rate: slope {found.slopes[decay].shown()}"
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
        unit = next(iter(found.losses.values())).unit
        ax.set(
            xlabel="first step of the deficit",
            ylabel=f"loss: no deficit minus deficit ({unit})",
            xticks=starts,
        )
        ax.legend(fontsize=SMALL, loc="upper right")
        figure.suptitle(finding(found).replace("; ", ";\n"), fontsize=11)
        figure.supxlabel(_caption(group, found), fontsize=SMALL, color="#666666")
    return figure


def _caption(group: pd.DataFrame, found: DateOutcome) -> str:
    first = group.iloc[0]
    n = min(len(loss.values) for loss in found.losses.values())
    reached = levels.reached(group[group["stop"] == 0])
    return (
        f"{run_groups.title_of(group)}; {found.deficit_steps} steps at {first['q_min']} "
        f"instead of {first['q_max']} bits, "
        f"{found.recovery_steps} steps after each; n = {n}; 95 % intervals;\n"
        f"without a deficit {reached}. Secondary effects, without correction."
    )


def _described(found: DateOutcome) -> str:
    return "; ".join(f"{loss.what}: {loss.shown()}" for loss in found.losses.values())


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the figure and the tables of every experiment with deficits at three dates or more."""
    for group in dated_groups(runs):
        if not list(at_equal_recovery(costs(group))):
            continue
        found = outcome(group)
        title = f"Costs of a deficit by date and learning-rate decay: {run_groups.title_of(group)}"
        note = f"{finding(found)}. Secondary effects: without correction for several tests."
        yield Section(
            title, (note,), decay_figure(group), _described(found), loss_table(found)
        )
        if found.differences:
            yield Section(f"{title}: decays compared", table=difference_table(found))
