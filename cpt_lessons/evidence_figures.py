"""Figures and tables of lessons 10, 13 and 14, from committed rows and of budgets."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.formats.costs import COSTS
from cpt_extras.search.range_test_result import PrecisionRange
from cpt_lab.analysis.effects import range_tests
from cpt_lab.analysis.equal_cost import equal_cost
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.preregistered import all_answers, interval_figure, margin_lines
from cpt_lab.analysis.rendering import terminal
from cpt_lab.analysis.run_table import committed
from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, TEXT, subplots


@cache
def _effects(question: str) -> tuple[Estimate, ...]:
    """Return the primary effects of a preregistered question, by the committed rows of its study."""
    return next(
        a.primary
        for a in all_answers(committed(question[:2].lower()))
        if a.question == question
    )


def static_or_cycle() -> Figure:
    """Draw H2: the least noisy cycles against static 5 and 3 bits, by cost."""
    effects = _effects("H2")
    tasks = ("graph of pages, GCN", "characters, LSTM", "graph of pages, GraphSAGE")
    names = [f"cost {cost}: {task}" for cost in ("0.55", "0.30") for task in tasks]
    unit = "cycle minus static precision of equal cost, in margins\n(grey: within one margin, 0.2 points or 2 %)"
    title = "At equal cost no cycle beats static precision, and cheap cycles lose"
    return interval_figure(
        margin_lines([*effects[::2], *effects[1::2]], names), title, unit, band=1
    )


def noise_harms() -> Figure:
    """Draw H1: what twice the noise does to quality at one cost."""
    lines = margin_lines(
        _effects("H1"), ("graph of pages, GCN", "characters, LSTM"), "worse", "better"
    )
    unit = (
        "effect of twice the noise, in margins (grey: within one, 0.1 points or 1.6 %)"
    )
    return interval_figure(
        lines, "At one cost, twice the noise makes a schedule worse", unit, band=1
    )


def gradient_trade() -> Figure:
    """Draw what gradients that pay for forward bits gain, and cycles, in H7 and H8."""
    h7 = import_module("cpt_lab.studies.h7.outcome")
    return h7.figure(h7.tasks(committed("h7"))[0])


def other_formats() -> Figure:
    """Draw H6b and H6c: schedules against static number formats of their cost."""
    h6 = import_module("cpt_lab.studies.h6.outcome")
    return h6.figure(h6.answers(committed("h6")))


def stored_range_test(name: str) -> PrecisionRange:
    """Return a committed range test, such as "digits/mlp6"."""
    test = range_tests()[name]
    return PrecisionRange(
        **{field.name: test[field.name] for field in fields(PrecisionRange)}
    )


def show_range_tests() -> None:
    """Print the committed range tests: the share of q_max's loss reduction at each precision, and both q_min."""
    print(
        f"{'data set/network':<29}{'f(2)':>14}{'f(3)':>14}{'f(4)':>14}   q_min found   here  paper"
    )
    for name, test in range_tests().items():
        cells = []
        for bits in (2, 3, 4):
            column = [row[test["bits"].index(bits)] for row in test["shares"]]
            deviation = (
                f" +- {np.std(column, ddof=1):.2f}"
                if None not in column and len(column) > 1
                else ""
            )
            cells.append(
                "diverged" if None in column else f"{np.mean(column):.2f}{deviation}"
            )
        doubt = "?" if test["warning"] else " "
        seeds = len(test["shares"])
        q_min_text = f"{test['q_min']}{doubt} ({seeds} seed{'s' * (seeds > 1)})"
        print(
            f"{name:<29}"
            + "".join(f"{c:>14}" for c in cells)
            + f"   {q_min_text:<14}{test['recipe_q_min']:<6}"
            + ", ".join(c for c in test["paper_q_min"] if c.isdigit())
        )


def show_costs(q_min: int, q_max: int, total_steps: int = 64_000) -> None:
    """Print what static precisions and a schedule of each group cost by each price but ACE; static q_max is 1."""
    arms: dict[str, Schedule] = {
        f"static {q}": StaticSchedule(q, total_steps) for q in range(q_min, q_max)
    }
    arms |= {
        name: make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps)
        for name in ("RR", "CR", "ER")
    }
    prices = [name for name in COSTS if name != "ace"]
    costs = {
        arm: [s.relative_cost(q_max, q_max, cost=name) for name in prices]
        for arm, s in arms.items()
    }
    lines = [
        (arm, *(f"{c:.3f}" for c in arm_costs))
        for arm, arm_costs in sorted(costs.items(), key=lambda line: line[1])
    ]
    print(terminal(pd.DataFrame(lines, columns=["arm", *prices])))


def show_equal_cost() -> None:
    """Print how three alternatives of RR's cost compare with it, on three tasks."""
    files = {"digits": "digits", "facebook": "facebook", "characters": "pydoc"}
    ways = {
        "the same, delayed": " delayed ",
        "8 bits, stopped early": "static 8,",
        "fewer bits": "static [2-7]",
    }
    comparisons = {
        name: equal_cost(committed(f"equal_cost_{file}"))
        for name, file in files.items()
    }
    bases = list(
        dict.fromkeys(base for lines in comparisons.values() for base in lines["base"])
    )
    table = []
    for name, lines in comparisons.items():
        for way, pattern in ways.items():
            arms = lines[(lines.arm != lines.base) & lines.arm.str.contains(pattern)]
            words_by_base = {
                base: [
                    _comparison_text(r) for r in arms[arms.base == base].itertuples()
                ]
                for base in bases
            }
            table.append(
                (name, way, *("; ".join(words_by_base[base]) or "–" for base in bases))
            )
    print(
        terminal(
            pd.DataFrame(
                table,
                columns=["task", "spent on", *(f"beside {base}" for base in bases)],
            )
        )
    )


def _comparison_text(line: Any) -> str:
    word = "inconclusive"
    if line.low > 0:
        word = "better"
    elif line.high < 0:
        word = "worse"
    return (
        f"{line.arm.partition(',')[0]} {word}"
        if line.arm.startswith("static")
        else word
    )


def bisection(
    powers: Sequence[float],
    costs: Sequence[float],
    tried_powers: Sequence[float],
    budget: float,
) -> Figure:
    """Draw the cost of a bent profile over its power, the budget, and the powers that a bisection tried, in order."""
    with subplots(1, 1, figsize=(7, 3)) as (figure, ((ax,),)):
        ax.plot(
            powers,
            costs,
            color=COLORS["static"],
            linewidth=1.4,
            label="cost of a schedule of this power",
        )
        ax.axhline(
            budget,
            color=COLORS["large"],
            linestyle="--",
            linewidth=1,
            label=f"budget {budget:g}",
        )
        tried_costs = np.interp(np.log(tried_powers), np.log(powers), costs)
        ax.plot(
            tried_powers,
            tried_costs,
            "o",
            color=COLORS["small"],
            markersize=5,
            label="tried",
        )
        for i, (x, y) in enumerate(
            zip(tried_powers[:4], tried_costs[:4], strict=True), 1
        ):
            ax.annotate(
                str(i),
                (x, y),
                (5, 5),
                textcoords="offset points",
                fontsize=SMALL_FONT_SIZE,
                color=TEXT["small"],
            )
        ax.set_xscale("log", base=2)
        ax.set(xlabel="power of the profile", ylabel="relative cost", ylim=(0, 1.05))
        ax.legend(fontsize=SMALL_FONT_SIZE)
        figure.suptitle(
            "A larger power costs less, so that halving finds the budget", fontsize=11
        )
    return figure
