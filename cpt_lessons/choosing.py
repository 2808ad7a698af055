"""What notebook 08 prints of committed rows and of budgets, so that its cells are about choosing a schedule."""

from __future__ import annotations

import json
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from cpt_core.choosing.precision_range import PrecisionRange
from cpt_core.choosing.range_test import RangeTestWarning
from cpt_core.choosing.solver import solve_schedule
from cpt_core.formats.costs import COSTS
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.analysis.equal_cost import equal_cost
from cpt_lab.analysis.groups import quality_cost_groups, title_of
from cpt_lab.analysis.preregistered import findings
from cpt_lab.analysis.quality_cost import summary
from cpt_lab.experiments.recipes import recipe
from cpt_lab.paths import results_dir
from cpt_lab.training.recipe_trials import recipe_range_test
from cpt_lessons.exercises import show, warnings_as_text
from cpt_lessons.parameters import Parameters

WIDTH = 110  # characters of a line that a notebook shows beside the list of files, on a small screen


def show_outcome(runs: pd.DataFrame) -> None:
    """Print what rows say of schedules and static precision at equal cost: a question, and a line for each answer."""
    for said in findings(runs):
        question, *answers = re.split(r"(?<=[.?]) (?=[A-Z])", said)
        print(question)
        for answer in answers:
            print(textwrap.fill(answer, WIDTH, initial_indent="  ", subsequent_indent="    "))
        print()


def _stored() -> dict[str, Any]:
    tests: dict[str, Any] = json.loads((results_dir() / "range_tests.json").read_text(encoding="utf-8"))["tests"]
    return tests


def stored_range_test(name: str) -> PrecisionRange:
    """Return a committed range test, such as "digits/mlp6"."""
    test = _stored()[name]
    return PrecisionRange(**{field.name: test[field.name] for field in fields(PrecisionRange)})


def show_range_tests() -> None:
    """Print the committed range tests: the share of q_max's loss reduction at each precision, and both q_min."""
    print(f"{'data set/network':<29}{'f(2)':>14}{'f(3)':>14}{'f(4)':>14}   q_min found   here  paper")
    for name, test in _stored().items():
        cells = []
        for bits in (2, 3, 4):
            column = [row[test["bits"].index(bits)] for row in test["shares"]]
            spread = f" +- {np.std(column, ddof=1):.2f}" if None not in column and len(column) > 1 else ""
            cells.append("diverged" if None in column else f"{np.mean(column):.2f}{spread}")
        doubt = "?" if test["warning"] else " "
        seeds = len(test["shares"])
        found = f"{test['q_min']}{doubt} ({seeds} seed{'s' * (seeds > 1)})"
        print(
            f"{name:<29}" + "".join(f"{c:>14}" for c in cells)
            + f"   {found:<14}{test['recipe_q_min']:<6}"
            + ", ".join(c for c in test["paper_q_min"] if c.isdigit())
        )  # fmt: skip


def own_range_test(given: Parameters) -> PrecisionRange:
    """Run a range test of a recipe, three seeds, and print it; at smoke scale the shares of 2 and 3 bits alone.

    Args:
        given: with scale, dataset, model and q_max.
    """
    tested = recipe(given.scale, given.dataset, given.model or None)
    if given.scale != "smoke":
        with warnings_as_text():
            found = recipe_range_test(tested, q_max=given.q_max)
        print(found)
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RangeTestWarning)
        found = recipe_range_test(tested, q_max=given.q_max, bits=(2, 3), dwell=40)
    shares = ", ".join(f"{q} bits {found.mean(q):.2f}" for q in found.bits[:-1])
    print(f"smoke scale: not a result. Of the loss reduction at {given.q_max} bits, in 40 steps: {shares}")
    print('With scale = "demo" this cell tests all precisions and says which of them will do')
    return found


def show_budgets(
    budgets: Sequence[float], families: Sequence[str], q_min: int, q_max: int, total_steps: int, delay: float = 0.0
) -> None:
    """Print the schedules that meet some budgets, by family, and why none meets the others."""
    lines, unmet = [], []
    for budget in budgets:
        for family in families:
            try:
                found = solve_schedule(budget, q_min, q_max, total_steps, family=family, delay=delay)
            except ValueError as error:
                unmet.append(f"{family}: {error}")
                continue
            power = found.to_dict().get("schedule", found.to_dict()).get("profile", {}).get("power", float("nan"))
            measures = f"{found.relative_cost():.4f}", f"{found.noise_exposure():.1f}", f"{found.share_at(q_min):.3f}"
            lines.append((f"{budget:g}", family, f"{power:.3f}", *measures))
    if lines:
        columns = ["budget", "family", "power", "cost", "noise exposure", "share of steps at q_min"]
        show(pd.DataFrame(lines, columns=columns))
    for said in unmet:
        print(textwrap.fill(said, WIDTH, subsequent_indent="  "))


def show_costs(q_min: int, q_max: int, total_steps: int = 64_000) -> None:
    """Print what static precisions and a schedule of every group cost by each of ``COSTS``; static q_max is 1."""
    arms: dict[str, Schedule] = {f"static {q}": StaticSchedule(q, total_steps) for q in range(q_min, q_max)}
    arms |= {
        name: make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps) for name in ("RR", "CR", "ER")
    }
    costs = {arm: [s.relative_cost(q_max, q_max, cost=name) for name in COSTS] for arm, s in arms.items()}
    lines = [(arm, *(f"{c:.3f}" for c in of)) for arm, of in sorted(costs.items(), key=lambda line: line[1])]
    show(pd.DataFrame(lines, columns=["arm", *COSTS]))


def show_spending(specs: Sequence[Any]) -> None:
    """Print what the arms of an experiment run: their steps, and their BitOps beside static q_max over all steps."""
    first = specs[0]
    for spec in specs:
        if spec.seed == first.seed:
            share = spec.schedule.relative_cost(spec.q_grad, spec.q_max) * spec.recipe.steps / first.recipe.steps
            print(f"{spec.arm:<28} {spec.recipe.steps:>4} steps   BitOps {share:.3f} of static {spec.q_max}")


def show_fronts(runs: pd.DataFrame) -> None:
    """Print the Pareto front of every experiment with all ten schedules: arms that none beats, their costs behind."""
    for group in quality_cost_groups(runs):
        arms = summary(group)
        if (arms.savings != "static").sum() >= 10:
            front = arms[arms["Pareto front"] == "yes"]
            print(title_of(group))
            costs = zip(front["arm"], front["relative cost"], strict=True)
            whole = ", ".join(f"{arm} ({cost})".replace(" ", "\u00a0") for arm, cost in costs)  # broken at commas only
            said = textwrap.fill(whole, WIDTH, initial_indent="  ", subsequent_indent="  ")
            print(said.replace("\u00a0", " "))


def show_equal_cost(experiments: Mapping[str, pd.DataFrame]) -> None:
    """Print, for experiments by name, what three ways to spend the BitOps of a schedule did beside it."""
    ways = {"the same, delayed": " delayed ", "8 bits, stopped early": "static 8,", "fewer bits": "static [2-7]"}
    found = {name: equal_cost(runs) for name, runs in experiments.items()}
    bases = list(dict.fromkeys(base for lines in found.values() for base in lines["base"]))
    table = []
    for name, lines in found.items():
        for way, pattern in ways.items():
            arms = lines[(lines.arm != lines.base) & lines.arm.str.contains(pattern)]
            said = {base: [_beside(r) for r in arms[arms.base == base].itertuples()] for base in bases}
            table.append((name, way, *("; ".join(said[base]) or "–" for base in bases)))
    show(pd.DataFrame(table, columns=["task", "spent on", *(f"beside {base}" for base in bases)]))


def _beside(line: Any) -> str:
    word = "better" if line.low > 0 else "worse" if line.high < 0 else "not told apart"
    return f"{line.arm.partition(',')[0]} {word}" if line.arm.startswith("static") else word
