"""An effect with its t-tests, Holm's correction over several tests, and tables of the runs that both need.

>>> Estimate("a minus b", "points", np.array([0.9, 1.1, 1.0])).p(0.5, "greater") < 0.01
True
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of, plural
from cpt_lab.analysis.statistics import ALPHA, interval
from cpt_lab.experiments.schema import CURRENT_BITS, EIGHT_BITS
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec

POINTS, PERCENT = "points", "%"
INCONCLUSIVE = "inconclusive"  # outcome of a test that decides nothing
NOT_RUN = "not run"  # outcome without any run
NOT_FINISHED = "not finished: "  # outcome while runs are missing, before their number
# bits at which runs are evaluated -> suffix of the metric's column
EVALUATION_RULES = {
    EIGHT_BITS: "",
    CURRENT_BITS: "_current",
}


@dataclass(frozen=True)
class Estimate:
    """An effect with one value per seed.

    Attributes:
        description: the effect in words.
        unit: such as "points".
        values: one per seed.
        margin: effects within +- margin do not count; NaN for none.
    """

    description: str
    unit: str
    values: np.ndarray
    margin: float = math.nan

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.values))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the bounds of the 1 - alpha confidence interval."""
        return interval(self.values, alpha)[1:]

    def p(self, bound: float = 0.0, side: str = "two-sided") -> float:
        """Return the p-value of the t-test against ``bound``, two-sided or of being "greater" or "less"."""
        if stats.sem(self.values) == 0:  # scipy warns or returns NaN for equal values
            away = self.mean - bound
            is_beyond = {
                "two-sided": away != 0,
                "greater": away > 0,
                "less": away < 0,
            }
            return 0.0 if is_beyond[side] else 1.0
        return float(stats.ttest_1samp(self.values, bound, alternative=side).pvalue)

    @property
    def is_equivalent(self) -> bool:
        """Equivalence within the margin: the 90 % interval lies inside (two one-sided tests at .05)."""
        low, high = self.interval(0.1)
        return -self.margin < low and high < self.margin

    def __str__(self) -> str:
        seeds = len(self.values)
        return f"{self.description}: {self.text()}, n = {seeds}, p = {self.p():.2g}"

    def text(self) -> str:
        """Return the mean with its interval and unit, such as "-0.6 [-0.8, -0.3] points"."""
        return f"{interval_text(self.mean, *self.interval())} {self.unit}".strip()


def find_rows(specs: Iterable[RunSpec], runs: pd.DataFrame) -> pd.DataFrame | str:
    """Return the newest row of every spec, in order, or a note such as "not finished: 3 of 9 runs"."""
    keys = [spec.key for spec in specs]
    stored_rows = runs.drop_duplicates("key", keep="last").set_index("key")
    num_stored = sum(key in stored_rows.index for key in keys)
    if num_stored < len(keys):
        return _missing_note(num_stored, len(keys))
    return stored_rows.loc[keys]


def find_complete(
    makers: Mapping[str, Callable[[], list[RunSpec]]], num_runs: int, runs: pd.DataFrame
) -> tuple[dict[str, pd.DataFrame], str]:
    """Return the rows of every complete task of a study, and a note if tasks are missing.

    Args:
        makers: task -> function that makes its runs, or raises NotMeasuredError while they cannot be defined.
        num_runs: number of runs of all tasks; runs that tasks share count once.
        runs: stored runs.

    Returns:
        Task -> rows in the order of its runs; and a note such as "not finished: 3 of 9 runs", or "".
    """
    stored_keys, found_keys, rows_by_task = set(runs["key"]), set[str](), {}
    for task, make in makers.items():
        try:
            specs = make()
        except NotMeasuredError:
            continue
        found_keys |= {spec.key for spec in specs} & stored_keys
        rows = find_rows(specs, runs)
        if not isinstance(rows, str):
            rows_by_task[task] = rows
    is_complete = len(rows_by_task) == len(makers)
    return rows_by_task, "" if is_complete else _missing_note(len(found_keys), num_runs)


def _missing_note(num_stored: int, num_runs: int) -> str:
    return f"{NOT_FINISHED}{num_stored} of {plural(num_runs, 'run')}"


def unit_of(rows: pd.DataFrame) -> str:
    """Return the unit of ``quality``: percent for a perplexity, points for an accuracy."""
    return PERCENT if metric_of(rows) == "perplexity" else POINTS


def quality(rows: pd.DataFrame, outputs: int, column: str = "") -> np.ndarray:
    """Return points of accuracy, or -100 times the logarithm of the perplexity; chance for lost runs.

    Args:
        rows: runs of one task.
        outputs: number of classes or words.
        column: suffix of the metric's column, such as "_current".
    """
    metric = metric_of(rows)
    values = rows[metric + column].where(
        rows["status"] == "ok", outputs if metric == "perplexity" else 1 / outputs
    )
    return metric_named(metric).factor * quality_of(rows.assign(**{metric: values}))[
        "quality"
    ].to_numpy(dtype=float)


def run_frame(
    specs: Sequence[RunSpec],
    rows: pd.DataFrame,
    outputs: int,
    columns: Mapping[str, str] = EVALUATION_RULES,
) -> pd.DataFrame:
    """Return one line per run: spec, seed, arm, unit, whether it was lost, its BitOps, and ``quality`` by ``columns``.

    An arm is named without the number that a grid appends, as in "over time at 0.417".

    Args:
        specs: the runs.
        rows: the row of every spec, in the same order.
        outputs: number of classes or words.
        columns: name of a quality column -> suffix of the metric's column.
    """
    arms = [re.sub(r" at [\d.]+$", "", spec.arm) for spec in specs]
    frame = pd.DataFrame(
        {
            "spec": specs,
            "seed": [spec.seed for spec in specs],
            "arm": arms,
            "unit": unit_of(rows),
        }
    )
    costs = {name: rows[name].to_numpy() for name in ("bitops", "bitops_per_op")}
    values = {name: quality(rows, outputs, column) for name, column in columns.items()}
    return frame.assign(lost=(rows["status"] != "ok").to_numpy(), **costs, **values)


def seeds_by_arms(runs: pd.DataFrame, value: str = EIGHT_BITS) -> pd.DataFrame:
    """Return a column of ``run_frame`` as a table of seeds by arms, arms in the order of the design."""
    return runs.pivot(index="seed", columns="arm", values=value)[
        list(dict.fromkeys(runs["arm"]))
    ]


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method.

    NaN stands for a test whose runs are missing: it counts in the correction and stays NaN.
    """
    order = np.argsort(np.nan_to_num(np.asarray(p, float), nan=1.0), kind="stable")
    adjusted = [math.nan] * len(p)
    highest = 0.0
    for rank, i in enumerate(order):
        if math.isnan(p[i]):
            continue
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = highest
    return adjusted


def significant_effects(
    effects: Sequence[Estimate], side: str, level: float
) -> list[str]:
    """Return the effects that differ from 0 at a level, with Holm's correction over all effects.

    Args:
        effects: effects with descriptions of their own.
        side: "greater" or "less", or "two-sided" for both.
        level: family-wise level.
    """
    adjusted = holm([effect.p(0.0, side) for effect in effects])
    return [
        effect.description
        for effect, p in zip(effects, adjusted, strict=True)
        if p < level
    ]
