"""Generator of ``docs/small-studies.md``: ``python -m book.small_studies``.

The prose is the template ``small-studies.md.j2``; the tables and the effects in the text come from the results of
``bench.roles``, ``bench.evaluation_bits``, ``bench.rising_vs_falling`` and of the removed ``bench.adaptive``. Every
effect is a difference of two arms, paired by seed. The rule of ``bench.roles`` and ``bench.rising_vs_falling`` is
applied here: an effect is bold if its two-sided t test is significant at .05 after Holm's correction over the study.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import evaluation_bits, rising_vs_falling, roles
from cpt_extras.files import write_text
from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.analysis.estimates import PERCENT, POINTS, Estimate, significant_effects
from cpt_lab.analysis.rendering import render
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.paths import ROOT, results_dir
from cpt_lab.studies.h7.arms import CASES

PAGE = ROOT / "docs" / "small-studies.md"
TITLES = {"gcn": "Facebook GCN", "ptb": "Penn Treebank, small"}
OTHER_ARMS = ("3/8", "4/5")  # that allocated bits are compared with
ORDERS = (  # compared arms, and whether the study tests them
    ("rising", "even", True),
    ("rising", "falling", True),
    ("rising", "static", False),
    ("even", "static", False),
)
ARM_TITLES = {"even": "mixed", "static": "static 4/5"}


def page() -> str:
    """Return the page in Markdown."""
    return render(
        "small-studies.md.j2",
        Path(__file__).parent,
        adaptive=adaptive_effects(),
        allocation=allocation_table(),
        evaluation=evaluation_table(),
        float32=float32_changes(),
        order=order_table(),
    )


def read_results(name: str) -> dict[str, Any]:
    """Return the content of a JSON file of data/results."""
    return json.loads((results_dir() / f"{name}.json").read_text(encoding="utf-8"))


def unit_of_task(task: str) -> str:
    """Return the unit of a task's effects: percent of the perplexity, or points of the accuracy."""
    return PERCENT if CASES[task].task == "language_model" else POINTS


def bold_if(text: str, condition: bool) -> str:
    """Return text, in bold if a condition holds."""
    return f"**{text}**" if condition else text


# --- tables -----------------------------------------------------------------------------------------


def qualities(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], np.ndarray]:
    """Return the quality of a task's arm by seed; (task, arm) -> values in the order of seeds."""
    frame = pd.DataFrame(rows).sort_values("seed")
    groups = frame.groupby(["task", "arm"])["quality"]
    return {key: values.to_numpy() for key, values in groups}


def allocation_effects() -> dict[tuple[str, str], Estimate]:
    """Return what allocated bits gain on every task and other arm."""
    quality = qualities(read_results("roles")["rows"])
    effects = {}
    for task, other in itertools.product(roles.TASKS, OTHER_ARMS):
        values = quality[task, "allocated"] - quality[task, other]
        description = f"{task}, allocated minus {other}"
        effects[task, other] = Estimate(description, unit_of_task(task), values)
    return effects


def allocated_bits(task: str, measured: dict[str, Any]) -> str:
    """Return the bits of weights, activations and gradients that a measurement leads to, such as "5, 4 to 5, 4"."""
    arms = roles.arms(Sensitivity.from_dict(measured), CASES[task].recipe.steps)
    schedule: Any = arms["allocated"][0]
    texts = []
    for part in (schedule.weight, schedule.activation, schedule.error):
        levels = sorted(set(part.bits().tolist()))
        texts.append(" to ".join(map(str, levels)))
    return ", ".join(texts)


def allocation_table() -> pd.DataFrame:
    """Return the allocated bits of every task, and what they gain."""
    effects = allocation_effects()
    significant = significant_effects(list(effects.values()), "two-sided", ALPHA)
    measured = read_results("roles")["measured"]
    lines = []
    for task in roles.TASKS:
        cells = [TITLES.get(task, task), allocated_bits(task, measured[task])]
        for other in OTHER_ARMS:
            effect = effects[task, other]
            cells.append(bold_if(effect.text(), effect.description in significant))
        lines.append(cells)
    columns = ["task", "allocated bits: weights, activations, gradients"]
    columns += [f"allocated minus {other}" for other in OTHER_ARMS]
    return pd.DataFrame(lines, columns=columns)


def adaptive_effects() -> dict[str, Estimate]:
    """Return what bits that rise when the loss stalls gain on static bits of equal cost, by task."""
    effects = {}
    for task, runs in read_results("adaptive")["tasks"].items():
        values = np.array([run["adaptive"] - run["static"] for run in runs])
        effects[task] = Estimate(task, unit_of_task(task), values)
    return effects


# (task, bits of training, bits of evaluation or "float") -> quality by seed
EvaluatedQualities = dict[tuple[str, int, str], np.ndarray]


def evaluated_qualities() -> EvaluatedQualities:
    """Return the quality of every trained model at all bits of evaluation."""
    values: dict[tuple[str, int, str], list[float]] = {}
    for row in sorted(
        read_results("evaluated_at")["rows"], key=lambda row: row["seed"]
    ):
        for evaluated, quality in row["quality"].items():
            values.setdefault((row["task"], row["trained"], evaluated), []).append(
                quality
            )
    return {key: np.array(each) for key, each in values.items()}


def evaluation_table() -> pd.DataFrame:
    """Return the effects of evaluating at 8 bits and of training at 8 bits, by task and bits."""
    quality = evaluated_qualities()
    lines = []
    for task, bits in itertools.product(
        evaluation_bits.TASKS, evaluation_bits.BITS[:-1]
    ):
        own = quality[task, bits, str(bits)]
        others = (quality[task, bits, "8"], quality[task, 8, str(bits)])
        texts = [Estimate("", unit_of_task(task), x - own).text() for x in others]
        lines.append((TITLES.get(task, task), bits, *texts))
    columns = [
        "task",
        "bits b",
        "trained at b: evaluated at 8 minus evaluated at b",
        "evaluated at b: trained at 8 minus trained at b",
    ]
    return pd.DataFrame(lines, columns=columns)


def float32_changes() -> dict[str, float]:
    """Return the largest change of a mean quality from 8 bits to float32, by unit."""
    quality = evaluated_qualities()
    changes = {POINTS: 0.0, PERCENT: 0.0}
    for task, bits in itertools.product(evaluation_bits.TASKS, evaluation_bits.BITS):
        change = np.mean(quality[task, bits, "float"] - quality[task, bits, "8"])
        unit = unit_of_task(task)
        changes[unit] = max(changes[unit], abs(float(change)))
    return changes


def order_effects(
    tested: Sequence[bool] = (True, False),
) -> dict[tuple[str, str], Estimate]:
    """Return the differences of two orders, by task and title; those that the study tests, or not, or all."""
    quality = qualities(read_results("rising_vs_falling")["rows"])
    effects = {}
    for task in rising_vs_falling.RECIPES:
        for arm, other, is_tested in ORDERS:
            title = f"{ARM_TITLES.get(arm, arm)} minus {ARM_TITLES.get(other, other)}"
            if is_tested in tested:
                values = quality[task, arm] - quality[task, other]
                effects[task, title] = Estimate(f"{task}, {title}", PERCENT, values)
    return effects


def order_table() -> pd.DataFrame:
    """Return the differences of rising, falling, mixed and static bits, by task."""
    significant = significant_effects(
        list(order_effects([True]).values()), "two-sided", ALPHA
    )
    cells: dict[str, dict[str, str]] = {}
    for (task, title), effect in order_effects().items():
        text = bold_if(effect.text(), effect.description in significant)
        cells.setdefault(task, {"task": task})[title] = text
    return pd.DataFrame(cells.values())


def main() -> None:
    """Write the page."""
    write_text(PAGE, page())
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
