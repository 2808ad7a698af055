"""Bits where they matter against static precision of equal cost: H5 of ``docs/preregistration.md``.  No torch.

A case is answered when all its runs are there. A run that diverged or failed counts as chance.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_core.schedules.schedule import Schedule
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.sensitivity_result import OVER
from cpt_lab.analysis.estimates import (
    CURRENT_BITS,
    EVALUATION_RULES,
    PERCENT,
    TOP,
    Estimate,
    by_run,
    find_rows,
    holm,
    seeds_by_arms,
)
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.preregistered import LEVEL, Answer, depends
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.style import COLORS, SMALL, integer_ticks, interval_bar, subplots
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.studies.case import OUTPUTS
from cpt_lab.studies.h5.arms import (
    CASES,
    LATE,
    Q_MAX,
    STATIC,
    allocated,
    stored_sensitivity,
)

ASKS = "Do bits put where they matter beat static precision of equal cost?"
ALLOCATED = tuple(f"over {over}" for over in OVER)
ARMS = (*ALLOCATED, LATE)
WINS, LOSES = "wins", "loses"
ELSEWHERE = ", as what wins here loses elsewhere"
# the outcomes that the document knows: some arm wins and nowhere loses, wins and loses, loses; none wins
WON, MIXED, WORSE = "bits here, not there", f"mixed{ELSEWHERE}", "worse than static"
NOTHING_BEAT_STATIC = "nothing beat static"


class Arms:
    """The runs of a case: quality at 8 bits and at their own (seeds by arms), runs lost, schedules, BitOps by arm."""

    def __init__(self, specs: list[RunSpec], rows: pd.DataFrame) -> None:
        runs = by_run(specs, rows, OUTPUTS[specs[0].recipe.dataset])
        self.unit, self.schedules = (
            runs["unit"].iloc[0],
            {r.arm: r.spec.schedule for r in runs.itertuples()},
        )
        self.by_rule = {rule: seeds_by_arms(runs, rule) for rule in EVALUATION_RULES}
        self.lost = runs.groupby("arm")["lost"].sum()
        bitops = runs.groupby("arm")[["bitops", "bitops_per_op"]].mean()
        self.bitops = bitops / bitops.loc[STATIC]

    @property
    def opponent(self) -> str:
        """The better of static's two evaluations by its mean, one of ``RULES``."""
        at_top, at_own = (self.by_rule[rule][STATIC] for rule in (TOP, CURRENT_BITS))
        return TOP if at_top.mean() >= at_own.mean() else CURRENT_BITS

    def gain(self, arm: str, rule: str = "") -> Estimate:
        """Return what an arm gains at 8 bits on static's better evaluation, or on static by one of ``RULES``."""
        static = self.by_rule[rule or self.opponent][STATIC]
        return Estimate(
            arm, self.unit, (self.by_rule[rule or TOP][arm] - static).to_numpy()
        )

    def is_static(self, arm: str) -> bool:
        """Whether an arm is static precision itself: its layers have the same bits at every step."""
        return _bits(self.schedules[arm]) == _bits(self.schedules[STATIC])


def effects(parts: Mapping[str, Arms | str], rule: str = "") -> pd.DataFrame:
    """Return one line per case and arm: what it gains on the better of static's two evaluations, by seed.

    Args:
        parts: of ``cases``.
        rule: one of ``RULES``: as they are where it judges arms and static alike.

    Returns:
        case, arm, unit ("points", or "%" of the perplexity), mean, low, high (95 %), p (two-sided), adjusted (Holm over
        all cases times arms), word ("wins", "loses", "open", or what is missing), n, lost (runs of arm and opponent
        that diverged or failed), opponent ("8 bits" or "own bits"), static (its quality), full (gain of static 8 on
        it), promised (gain by the model), bitops and bitops_per_op (those of the whole model, relative to static's, by
        both conventions). NaN where a case has missing runs.
    """
    lines = [line for case, arms in parts.items() for line in _case(case, arms, rule)]
    adjusted = holm([line["p"] for line in lines])
    for line, p in zip(lines, adjusted, strict=True):
        line["adjusted"] = p
        line["word"] = line["word"] or (
            "open" if not p < LEVEL else WINS if line["mean"] > 0 else LOSES
        )
    columns = [
        "case",
        "arm",
        "unit",
        "mean",
        "low",
        "high",
        "p",
        "adjusted",
        "word",
        "n",
        "lost",
        "opponent",
        "static",
        "full",
        "promised",
        "bitops",
        "bitops_per_op",
    ]
    return pd.DataFrame(lines, columns=columns)


def cases(runs: pd.DataFrame) -> dict[str, Arms | str]:
    """Return the runs of every case; where some are missing, or cannot be made yet, a word that says so."""

    def arms(case: str) -> Arms | str:
        try:
            specs = allocated(case)
        except NotMeasuredError:
            return "open: where bits matter has not been measured"
        rows = find_rows(specs, runs)
        return rows if isinstance(rows, str) else Arms(specs, rows)

    return {case: arms(case) for case in CASES}


def _case(case: str, arms: Arms | str, rule: str) -> Iterator[dict[str, Any]]:
    if isinstance(arms, str):
        for arm in ARMS:
            yield {
                "case": case,
                "arm": arm,
                "p": math.nan,
                "word": arms,
                "n": 0,
                "lost": 0,
            }
        return
    s, opponent = stored_sensitivity(case), rule or arms.opponent
    static = float(arms.by_rule[opponent][STATIC].mean())
    scale = 100 / float(np.mean(s.reference)) if arms.unit == PERCENT else 100.0
    for arm in ARMS:
        gain = arms.gain(arm, rule)
        low, high = gain.interval()
        same = arms.is_static(arm)
        yield {
            "case": case,
            "arm": arm,
            "unit": arms.unit,
            "mean": gain.mean,
            "low": low,
            "high": high,
            "p": 1.0 if same else gain.p(),
            "word": "static precision itself" if same else "",
            "n": len(gain.values),
            "lost": arms.lost[arm] + arms.lost[STATIC],
            "opponent": opponent.removeprefix("their "),
            "static": static,
            "full": float(arms.by_rule[TOP][f"static {Q_MAX}"].mean()) - static,
            "promised": scale
            * (
                s.predicted_quality_loss(arms.schedules[STATIC])
                - s.predicted_quality_loss(arms.schedules[arm])
            ),
            **arms.bitops.loc[arm],
        }


def secondary(parts: Mapping[str, Arms | str]) -> pd.DataFrame:
    """Return what else the document promises, from ``cases``, for people; it decides nothing."""
    lines = []
    for case, arms in parts.items():
        if isinstance(arms, str):
            continue

        def add(
            what: str,
            a: pd.Series,
            b: pd.Series,
            case: str = case,
            unit: str = arms.unit,
        ) -> None:
            lines.append((case, what, Estimate(what, unit, (a - b).to_numpy()).shown()))

        top, static = (
            arms.by_rule[TOP],
            float(arms.by_rule[arms.opponent][STATIC].mean()),
        )
        for arm in ARMS:
            add(f"{arm}, minus static at {Q_MAX} bits", top[arm], top[STATIC])
            add(
                f"{arm}, minus static at its own bits",
                top[arm],
                arms.by_rule[CURRENT_BITS][STATIC],
            )
            way = (top[arm].mean() - static) / (top[f"static {Q_MAX}"].mean() - static)
            lines.append(
                (
                    case,
                    f"{arm}, share of the way from static to static {Q_MAX}",
                    f"{100 * way:.0f} %",
                )
            )
            for share, name in zip(
                arms.bitops.loc[arm], ("paper", "per_op"), strict=True
            ):
                lines.append(
                    (
                        case,
                        f"{arm}, BitOps of the whole model beside static's ({name})",
                        f"{share:.3f}",
                    )
                )
        for other in ALLOCATED[:2]:
            add(f"{ALLOCATED[2]}, minus {other}", top[ALLOCATED[2]], top[other])
        for over in OVER[:2]:
            shown = f"{stored_sensitivity(case).agreement(over):+.2f}"
            lines.append(
                (
                    case,
                    f"rank correlation over {over}: measured w, and estimated from gradients",
                    shown,
                )
            )
    return pd.DataFrame(lines, columns=["task", "effect", "mean [95 %]"])


def _bits(schedule: Schedule) -> set[tuple[int, ...]]:
    """Return the bits that some layer has, as they follow one another."""
    rows = (
        schedule.by_group()
        if isinstance(schedule, LayeredSchedule)
        else [schedule.bits()]
    )
    return {tuple(row.tolist()) for row in rows}


def verdict(gains: pd.DataFrame) -> str:
    """Return the outcome of H5 from ``effects``, as the document words it, with every win and every loss.

    Of an arm that wins and nowhere loses, all other tasks are told too.
    """
    mine = gains[gains["arm"].isin(ALLOCATED)]
    if missing := [
        case
        for case in CASES
        if gains["word"][gains["case"] == case].str.startswith("open: ").any()
    ]:
        return f"open: runs of {', '.join(missing)} are missing"
    if not (mine["word"] == WINS).any():
        best = mine.loc[(mine["high"] / mine["full"]).idxmax()]
        return (
            f"{NOTHING_BEAT_STATIC}: at most {best.high:+.2f} {best.unit} ({best.arm}, {best.case}, of {best.full:.2f} "
            f"between static and static {Q_MAX})"
        )
    said, of = [], mine["arm"].map(_outcomes(gains))
    for word in (WON, MIXED, WORSE):
        lines = mine[(of == word) & mine["word"].isin((WINS, LOSES))]
        said += [f"{word}: {'; '.join(_gains(lines))}"] if len(lines) else []
    rest = mine[(of == WON) & (mine["word"] != WINS)]
    undecided = rest["word"] == "open"
    said += (
        [f"open after Holm's correction: {'; '.join(_gains(rest[undecided]))}"]
        if undecided.any()
        else []
    )
    same = [f"{r.arm}, {r.case}" for r in rest[~undecided].itertuples()]
    said += [f"static precision itself: {'; '.join(same)}"] if same else []
    return ". ".join([said[0], *(f"{part[0].upper()}{part[1:]}" for part in said[1:])])


def _outcomes(gains: pd.DataFrame) -> dict[str, str]:
    """Return the outcome of every allocated arm, in the words of the document, or "open"."""
    words = {arm: set(gains["word"][gains["arm"] == arm]) for arm in ALLOCATED}
    known = {(True, False): WON, (True, True): MIXED, (False, True): WORSE}
    return {
        arm: known.get((WINS in found, LOSES in found), "open")
        for arm, found in words.items()
    }


def robustness(parts: Mapping[str, Arms | str]) -> dict[str, str]:
    """Return the arms that have another outcome under ``RULES``, which judge arms and static alike, and which."""
    by_rule = {
        rule: _outcomes(effects(parts, rule)) for rule in ("", *EVALUATION_RULES)
    }
    registered = by_rule.pop("")
    said = {
        a: depends(word, {rule: of[a] for rule, of in by_rule.items()})
        for a, word in registered.items()
    }
    return {arm: text.replace(ELSEWHERE, "") for arm, text in said.items() if text}


def outcomes_by_rule(parts: Mapping[str, Arms | str]) -> dict[str, str]:
    """Return the outcomes of all allocated arms in words by each of ``RULES``, also where both rules agree."""
    found = {}
    for rule in EVALUATION_RULES:
        outcomes = _outcomes(effects(parts, rule))
        found[rule] = "; ".join(
            f"{arm}: {word.replace(ELSEWHERE, '')}" for arm, word in outcomes.items()
        )
    return found


def _gains(lines: pd.DataFrame) -> list[str]:
    """Gains in words; where the BitOps of the whole model differ from static's by 0.5 %, they are told."""
    said = []
    for r in lines.itertuples():
        alike = max(abs(r.bitops - 1), abs(r.bitops_per_op - 1)) < 0.005
        whole = f"{r.bitops:.2f} of static's as the paper counts, {r.bitops_per_op:.2f} of all that runs"
        gain = f"{r.arm}, {r.case}: {_interval(r)}"
        said.append(gain if alike else f"{gain} (BitOps of the whole model: {whole})")
    return said


def _interval(r: Any) -> str:
    return f"{interval_text(r.mean, r.low, r.high)} {r.unit}".strip()


def answers(runs: pd.DataFrame) -> list[Answer]:
    """Return the answer of H5 from rows, in the words that the document has for outcomes."""
    parts = cases(runs)
    said = verdict(effects(parts))
    words = (
        "; ".join(
            word
            for word in (WON, MIXED, WORSE, NOTHING_BEAT_STATIC)
            if word in said.lower()
        )
        or said
    )
    primary = [
        replace(arms.gain(arm), what=f"{case}, {arm} minus static")
        for case, arms in parts.items()
        if not isinstance(arms, str)
        for arm in ARMS
        if not arms.is_static(arm)
    ]
    if rules := robustness(parts):
        words += f"; depends on the rule: {' and '.join(rules)}"
    by_rule = (
        () if said.startswith("open: ") else tuple(outcomes_by_rule(parts).items())
    )
    return [Answer("H5", ASKS, tuple(primary), word=words, by_rule=by_rule)]


def summary(gains: pd.DataFrame) -> pd.DataFrame:
    """Return ``effects`` for people."""

    def shown(values: Iterable[float], form: str) -> list[str]:
        return [form.format(x) if x == x else "–" for x in values]

    bitops = zip(
        shown(gains["bitops"], "{:.3f}"),
        shown(gains["bitops_per_op"], "{:.3f}"),
        strict=True,
    )
    cells = {
        "task": gains["case"],
        "arm": gains["arm"],
        "gain on static [95 %]": [
            _interval(r) if r.n else "–" for r in gains.itertuples()
        ],
        "promised": shown(gains["promised"], "{:+.2f}"),
        f"static {Q_MAX} on static": shown(gains["full"], "{:+.2f}"),
        "BitOps of the whole model (paper, per_op)": [
            "–" if a == "–" else f"{a}, {b}" for a, b in bitops
        ],
        "p": shown(gains["p"], "{:.2g}"),
        "p (Holm)": shown(gains["adjusted"], "{:.2g}"),
        "outcome": gains["word"],
        "static judged at": shown(gains["opponent"], "{}"),
        "seeds": gains["n"],
        "diverged or failed": gains["lost"],
    }
    return pd.DataFrame(cells)


def allocation_figure(gains: pd.DataFrame) -> Figure:
    """Draw the schedules of every answered case of ``effects``, and their gains; ValueError when none is answered."""
    cases = [case for case in CASES if (gains["n"][gains["case"] == case] > 0).any()]
    if not cases:
        raise ValueError("no case of H5 is answered yet; all runs of one are needed")
    with subplots(len(cases), 4, figsize=(10, 2.2 * len(cases) + 0.4)) as (
        figure,
        axes,
    ):
        for row, case in zip(axes, cases, strict=True):
            specs = {spec.arm.split(" at ")[0]: spec for spec in allocated(case, [0])}
            for ax, arm in zip(row, ALLOCATED, strict=False):
                _draw_bits(ax, specs[arm].schedule, CASES[case].bits)
                ax.set_title(f"{case}: {arm}", fontsize=SMALL)
            _draw_gains(row[-1], gains[gains["case"] == case])
        for ax in axes[-1, :3]:
            ax.set_xlabel("training step", fontsize=SMALL)
        figure.suptitle(
            "Bits where they matter, at the cost of the static precision that is dashed",
            fontsize=10,
        )
    return figure


def _draw_bits(ax: Axes, schedule: Schedule, static: int) -> None:
    """Draw the mean bits of a fortieth of the steps at a time, a line per group of layers."""
    parts = (
        schedule.parts
        if isinstance(schedule, LayeredSchedule)
        else ((("all layers",), schedule, 1),)
    )
    for names, inner, _ in parts:
        edges = np.linspace(0, inner.total_steps, 41).astype(int)
        means = [inner.bits()[a:b].mean() for a, b in itertools.pairwise(edges)]
        ax.plot(
            edges[:-1], means, drawstyle="steps-post", linewidth=1.4, label=names[0]
        )
    ax.axhline(static, color=COLORS["static"], linestyle="--", linewidth=0.8)
    low, high = static - 1.5, max(static + 1.5, schedule.q_max + 0.3)
    ax.set_ylim(
        low, low + (high - low) / (0.97 - 0.11 * len(parts))
    )  # names stand above all lines
    integer_ticks(ax.yaxis)
    ax.tick_params(labelsize=SMALL)
    ax.legend(fontsize=SMALL, loc="upper left")


def _draw_gains(ax: Axes, lines: pd.DataFrame) -> None:
    for y, r in zip(range(len(lines))[::-1], lines.itertuples(), strict=True):
        color = (
            COLORS["small"]
            if r.word == WINS
            else COLORS["large"]
            if r.word == LOSES
            else COLORS["static"]
        )
        interval_bar(
            ax, y, (r.mean, r.low, r.high), color=color, markersize=4, capsize=3
        )
        ax.plot(r.promised, y, "x", color="#888888", markersize=5)
    ax.axvline(0, color="#888888", linewidth=0.8)
    ax.axvline(lines["full"].iloc[0], color="#888888", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(lines))[::-1], lines["arm"], fontsize=SMALL)
    ax.set_ylim(-0.6, len(lines) - 0.4)
    ax.set_title(
        f"gain on static, {lines['unit'].iloc[0]} (x: promised)", fontsize=SMALL
    )
    ax.tick_params(labelsize=SMALL)


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield what H5 came to, once all runs of a case are there."""
    parts = cases(runs)
    gains = effects(parts)
    if not gains["n"].any():
        return
    notes = (
        f"H5 of docs/preregistration.md: {verdict(gains)}.",
        *(f"{arm.capitalize()} {text}." for arm, text in robustness(parts).items()),
        "Static precision is judged at 8 bits and at its own; the better counts. Runs that diverged or failed count as "
        "chance. Crosses: what the measured sensitivities promised; dotted: what 8 bits throughout gain.",
    )
    alt = "schedules made from sensitivities, and their gain on static precision of equal cost"
    yield Section(
        "Bits where they matter",
        notes,
        allocation_figure(gains),
        alt,
        summary(gains),
        "left",
    )
    yield Section(
        "Bits where they matter: other effects",
        table=secondary(parts),
        style="left folded",
    )
