"""Bits where they matter against static precision of equal cost: H5 of ``PREREGISTRATION.md``.  No torch.

A case is answered when all its runs are there. A run that diverged or failed counts as chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cpt_core.analysis.estimates import Estimate, holm
from cpt_core.analysis.metrics import interval_text
from cpt_core.analysis.pages import Section
from cpt_core.analysis.style import COLORS, drawing
from cpt_core.experiments.allocation import CASES, LATE, Q_MAX, STATIC, NotMeasuredError, allocated, stored
from cpt_core.schedules import cost
from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import Schedule
from cpt_core.schedules.sensitivity import OVER

LEVEL = 0.05  # of the family: all cases times all arms
ALLOCATED = tuple(f"over {over}" for over in OVER)
ARMS = (*ALLOCATED, LATE)
WINS, LOSES = "wins", "loses"


def effects(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one line per case and arm: what it gains on the better of static's two evaluations, by seed.

    Args:
        runs: any; those of H5 are found by their keys.

    Returns:
        case, arm, unit ("points", or "%" of the perplexity), mean, low, high (95 %), p (two-sided), adjusted (Holm over
        all cases times arms), word ("wins", "loses", "open", or what is missing), n, lost (runs of arm and opponent
        that diverged or failed), opponent ("8 bits" or "own bits"), static (its quality), full (gain of static 8 on
        it), promised (gain by the model). NaN where a case has missing runs.

    Raises:
        NotMeasuredError: when no sensitivity is stored.
    """
    known = runs.drop_duplicates("key", keep="last").set_index("key")
    lines = [line for case in CASES for line in _case(case, known)]
    adjusted = holm([line["p"] for line in lines])
    for line, p in zip(lines, adjusted, strict=True):
        line["adjusted"] = p
        line["word"] = line["word"] or ("open" if not p < LEVEL else WINS if line["mean"] > 0 else LOSES)
    columns = "case arm unit mean low high p adjusted word n lost opponent static full promised".split()
    return pd.DataFrame(lines, columns=columns)


def _case(case: str, known: pd.DataFrame) -> Iterator[dict[str, Any]]:
    specs = allocated(case)
    there = sum(spec.key in known.index for spec in specs)
    perplexity = specs[0].recipe.task == "language_model"
    unit = "%" if perplexity else "points"
    if there < len(specs):
        word = f"open: {there} of {len(specs)} runs"
        for arm in ARMS:
            yield {"case": case, "arm": arm, "unit": unit, "p": math.nan, "word": word, "n": 0, "lost": 0}
        return
    schedules = {spec.arm.split(" at ")[0]: spec.schedule for spec in specs}
    at_top, own = (dict[str, list[float]]((arm, []) for arm in schedules) for _ in range(2))
    lost = dict.fromkeys(schedules, 0)
    for spec in specs:
        arm, row = spec.arm.split(" at ")[0], known.loc[spec.key]
        lost[arm] += row["status"] != "ok"
        at_top[arm].append(_quality(row, "", perplexity, CASES[case].outputs))
        own[arm].append(_quality(row, "_current", perplexity, CASES[case].outputs))
    top, low = np.array(at_top[STATIC]), np.array(own[STATIC])
    static, opponent = (top, f"{Q_MAX} bits") if top.mean() >= low.mean() else (low, "own bits")
    full = float(np.mean(at_top[f"static {Q_MAX}"]) - static.mean())
    s = stored(case)
    scale = 100 / float(np.mean(s.reference)) if perplexity else 100.0
    for arm in ARMS:
        found = Estimate(arm, unit, np.array(at_top[arm]) - static)
        low_bound, high_bound = found.interval()
        same = _bits(schedules[arm]) == _bits(schedules[STATIC])
        yield {
            "case": case, "arm": arm, "unit": unit, "mean": found.mean, "low": low_bound, "high": high_bound,
            "p": 1.0 if same else found.p(), "word": "static precision itself" if same else "", "n": len(static),
            "lost": lost[arm] + lost[STATIC], "opponent": opponent, "static": float(static.mean()), "full": full,
            "promised": scale * (s.promised(schedules[STATIC]) - s.promised(schedules[arm])),
        }  # fmt: skip


def _quality(row: pd.Series, column: str, perplexity: bool, outputs: int) -> float:
    """Points of accuracy, or 100 times minus the logarithm of the perplexity; chance where a run was lost."""
    name = "perplexity" if perplexity else "accuracy"
    value = row[name + column] if row["status"] == "ok" else outputs if perplexity else 1 / outputs
    return float(-100 * math.log(value) if perplexity else 100 * value)


def _bits(schedule: Schedule) -> set[tuple[int, ...]]:
    """Return the bits that some layer has, as they follow one another."""
    rows = schedule.by_group() if isinstance(schedule, LayeredSchedule) else [schedule.bits()]
    return {tuple(row.tolist()) for row in rows}


def verdict(found: pd.DataFrame) -> str:
    """Return the outcome of H5 in a line, as the document words it, from ``effects``."""
    mine = found[found["arm"].isin(ALLOCATED)]
    wins, loses = (set(mine["arm"][mine["word"] == word]) for word in (WINS, LOSES))
    if missing := [case for case in CASES if found["word"][found["case"] == case].str.startswith("open: ").any()]:
        return f"open: runs of {', '.join(missing)} are missing"
    if not wins:
        best = mine.loc[(mine["high"] / mine["full"]).idxmax()]
        return (
            f"nothing beat static: at most {best.high:+.2f} {best.unit} ({best.arm}, {best.case}, of {best.full:.2f} "
            f"between static and static {Q_MAX})"
        )
    lines = mine[mine["word"] == WINS]
    said = "; ".join(f"{r.arm}, {r.case}: {interval_text(r.mean, r.low, r.high)} {r.unit}" for r in lines.itertuples())
    clean = sorted(wins - loses)
    return f"bits here, not there: {said}" if clean else f"mixed, as what wins here loses elsewhere: {said}"


def outcome(runs: pd.DataFrame) -> str:
    """Return ``verdict`` of runs, also where nothing has been measured yet."""
    try:
        return verdict(effects(runs))
    except NotMeasuredError:
        return "not run yet: where bits matter has not been measured in all tasks"


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Return ``effects`` for people."""
    numbers = found.assign(
        gain=[f"{interval_text(r.mean, r.low, r.high)} {r.unit}".strip() if r.n else "–" for r in found.itertuples()]
    )
    return pd.DataFrame(
        {
            "task": numbers["case"],
            "arm": numbers["arm"],
            "gain on static [95 %]": numbers["gain"],
            "promised": [f"{x:+.2f}" if x == x else "–" for x in numbers["promised"]],
            f"static {Q_MAX} on static": [f"{x:+.2f}" if x == x else "–" for x in numbers["full"]],
            "p": [f"{x:.2g}" if x == x else "–" for x in numbers["p"]],
            "p (Holm)": [f"{x:.2g}" if x == x else "–" for x in numbers["adjusted"]],
            "outcome": numbers["word"],
            "static judged at": numbers["opponent"].fillna("–"),
            "seeds": numbers["n"],
            "diverged or failed": numbers["lost"],
        }
    )


def allocation_figure(found: pd.DataFrame) -> Figure:
    """Draw the schedules of every answered case and what they gain on static precision of equal cost.

    Args:
        found: of ``effects``.

    Raises:
        ValueError: when no case is answered.
    """
    cases = [case for case in CASES if (found["n"][found["case"] == case] > 0).any()]
    if not cases:
        raise ValueError("no case of H5 is answered yet; all runs of one are needed")
    with drawing(len(cases), 4, figsize=(11, 1.9 * len(cases) + 0.4)) as (figure, axes):
        for row, case in zip(axes, cases, strict=True):
            specs = {spec.arm.split(" at ")[0]: spec for spec in allocated(case, [0])}
            for ax, arm in zip(row, ALLOCATED, strict=False):
                _draw_bits(ax, specs[arm].schedule, CASES[case].bits)
                ax.set_title(f"{case}: {arm}", fontsize=8)
            _draw_gains(row[-1], found[found["case"] == case])
        for ax in axes[-1, :3]:
            ax.set_xlabel("training step", fontsize=8)
        figure.suptitle("Bits where they matter, at the cost of the static precision that is dashed", fontsize=10)
    return figure


def _draw_bits(ax: Axes, schedule: Schedule, static: int) -> None:
    """Draw the mean bits of a twentieth of the steps at a time, a line per group of layers."""
    parts = schedule.parts if isinstance(schedule, LayeredSchedule) else ((("all layers",), schedule, 1),)
    for names, inner, _ in parts:
        edges = np.linspace(0, inner.total_steps, 21).astype(int)
        means = [inner.bits()[a:b].mean() for a, b in itertools.pairwise(edges)]
        ax.plot(edges[:-1], means, drawstyle="steps-post", linewidth=1.4, label=names[0])
    ax.axhline(static, color=COLORS["static"], linestyle="--", linewidth=0.8)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(labelsize=7)
    ax.legend(fontsize=6)


def _draw_gains(ax: Axes, lines: pd.DataFrame) -> None:
    for y, r in zip(range(len(lines))[::-1], lines.itertuples(), strict=True):
        color = COLORS["small"] if r.word == WINS else COLORS["large"] if r.word == LOSES else COLORS["static"]
        ax.errorbar(
            r.mean, y, xerr=[[r.mean - r.low], [r.high - r.mean]], fmt="o", color=color, markersize=4, capsize=3
        )
        ax.plot(r.promised, y, "x", color="#888888", markersize=5)
    ax.axvline(0, color="#888888", linewidth=0.8)
    ax.set_yticks(range(len(lines))[::-1], lines["arm"], fontsize=7)
    ax.set_ylim(-0.6, len(lines) - 0.4)
    ax.set_title(f"gain on static, {lines['unit'].iloc[0]} (x: promised)", fontsize=8)
    ax.tick_params(labelsize=7)


def jensen_figure(q_min: int = 3, q_max: int = 8, total_steps: int = 64_000) -> Figure:
    """Draw why no schedule beats static precision where all work is alike: noise is a convex function of cost.

    The line joins the static precisions; whatever changes its bits lies at the mean of the points that it visits, which
    is on the line or above it.
    """
    bits = np.arange(q_min, q_max + 1)
    static = [(cost.relative_cost([q], q_max), cost.noise_exposure([q], q_max)) for q in bits]
    with drawing(figsize=(6.4, 3.8)) as (figure, axes):
        ax = axes[0, 0]
        ax.plot(*zip(*static, strict=True), "o-", color=COLORS["static"], markersize=5, label="static")
        for q, (x, y) in zip(bits, static, strict=True):
            ax.annotate(str(q), (x, y), textcoords="offset points", xytext=(-8, -10), fontsize=8)
        labels = set()
        for name in SUITE:
            s = make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps)
            group = s.savings or ""
            label = "" if group in labels else f"schedules, {group} savings"
            labels.add(group)
            ax.plot(s.relative_cost(), s.noise_exposure(), "D", color=COLORS[group], markersize=5, label=label or None)
        ax.set(yscale="log", xlabel="cost relative to static q_max (BitOps)", ylabel="noise: mean 4^-q, relative")
        ax.legend(fontsize=8)
        figure.suptitle("At equal cost, static precision has the least noise", fontsize=10)
    return figure


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what H5 came to, once all runs of a case are there."""
    try:
        found = effects(runs)
    except NotMeasuredError:
        return
    if not found["n"].any():
        return
    notes = (
        f"H5 of PREREGISTRATION.md: {verdict(found)}.",
        "Static precision is judged at 8 bits and at its own; the better counts. Runs that diverged or failed count as "
        "chance. Crosses: what the measured sensitivities promised.",
    )
    alt = "schedules made from sensitivities, and their gain on static precision of equal cost"
    yield Section("Bits where they matter", notes, allocation_figure(found), alt, summary(found), "left")
