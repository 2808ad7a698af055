"""Studies whose arms have learning rates and evaluation bits chosen on held-out data.  No torch.

Such a study has two grids per task: ``NAME-rates/TASK`` chooses the settings of every arm, ``NAME/TASK`` compares the
arms at these settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd

from cpt_core.schedules.schedule import Schedule
from cpt_core.validation import check_choice
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.studies.case import NUM_OUTPUTS, Case
from cpt_lab.sweeps.stores import load_rows

RATE_FACTORS = (0.5, 1.0, 2.0)  # multiples of the recipe's learning rate
# bits of evaluation -> precision of a metric in rows
EVALUATION_SUFFIXES = {
    "8 bits": "q_max",
    "their own bits": "current",
}


@dataclass(frozen=True, eq=False)
class TunedStudy:
    """The runs of a study."""

    name: str  # such as "h7"
    description: str  # the comparison in words
    cases: Mapping[str, Case]  # its tasks
    # from a task to arm -> (schedule, gradient bits), see ``RunSpec``
    arms: Callable[[Case], Mapping[str, tuple[Schedule, int | None]]]
    tuning_seeds: Sequence[int]  # seeds that choose the settings; no test uses them
    first_seed: int  # first seed of the test

    @property
    def file(self) -> str:
        """Name of the file under data/results with the rows that choose the settings."""
        return f"{self.name}_rates.jsonl"

    def case(self, name: str) -> Case:
        """Return a task; ValueError for an unknown name."""
        return self.cases[check_choice("case", name, self.cases)]

    def rates(
        self, case: str = "digits", seeds: Sequence[int] | None = None
    ) -> list[RunSpec]:
        """Return the runs that choose every arm's learning rate and evaluation bits."""
        rates_by_arm = dict.fromkeys(self.arms(self.case(case)), RATE_FACTORS)
        seeds = self.tuning_seeds if seeds is None else seeds
        return self._specs(case, rates_by_arm, seeds)

    def runs(
        self, case: str = "digits", seeds: Sequence[int] | None = None
    ) -> list[RunSpec]:
        """Return the runs of a task, every arm at its own rate.

        Raises:
            NotMeasuredError: if rows that choose the rates are missing.
        """
        last = self.first_seed + self.case(case).seeds
        rates_by_arm = {arm: (rate,) for arm, (rate, _) in settings(self, case).items()}
        seeds = range(self.first_seed, last) if seeds is None else seeds
        return self._specs(case, rates_by_arm, seeds)

    def _specs(
        self,
        case: str,
        rates_by_arm: Mapping[str, Iterable[float]],
        seeds: Sequence[int],
    ) -> list[RunSpec]:
        task = self.case(case)
        specs = []
        for arm, (schedule, q_grad) in self.arms(task).items():
            for rate in rates_by_arm[arm]:
                recipe = replace(task.recipe, lr=rate * task.recipe.lr)
                name = f"{arm} at {rate:g}"
                for seed in seeds:
                    specs.append(
                        RunSpec(
                            recipe, schedule, task.q_max, q_grad, seed, name, "demo"
                        )
                    )
        return specs

    def grids(self) -> dict[str, tuple[Callable[..., list[RunSpec]], str]]:
        """Return the grids of the study: name -> (function that makes the runs, description)."""
        grids: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {}
        rates_title = f"learning rates of every arm of {self.name.upper()}"
        for case in self.cases:
            title = f"{rates_title}, {case}"
            grids[f"{self.name}-rates/{case}"] = (partial(self.rates, case), title)
        for case in self.cases:
            title = f"{self.description}, {case}"
            grids[f"{self.name}/{case}"] = (partial(self.runs, case), title)
        return grids


def settings(study: TunedStudy, case: str) -> dict[str, tuple[float, str]]:
    """Return the best (rate, key of ``EVALUATION_SUFFIXES``) of every arm on held-out data, by the mean over seeds."""
    return {
        arm: max(quality_by_setting, key=quality_by_setting.__getitem__)
        for arm, quality_by_setting in held_out(study, case).items()
    }


def rates_at_ends(study: TunedStudy) -> pd.DataFrame:
    """Return how many arms of every task chose the smallest or the largest of ``RATE_FACTORS`` on held-out data.

    Such a choice shows that a rate is better than two others, not that it is tuned: one outside may be better still.

    Returns:
        Columns: task, arms, smallest rate, largest rate (numbers of arms).
    """
    lines = []
    for name, case in study.cases.items():
        rates = [rate for rate, _ in settings(study, name).values()]
        lines.append(
            (
                case.title or name,
                len(rates),
                rates.count(min(RATE_FACTORS)),
                rates.count(max(RATE_FACTORS)),
            )
        )
    return pd.DataFrame(
        lines, columns=["task", "arms", "smallest rate", "largest rate"]
    )


@cache
def held_out(study: TunedStudy, case: str) -> dict[str, dict[tuple[float, str], float]]:
    """Return the mean quality of every arm on held-out data, by (rate, key of ``EVALUATION_SUFFIXES``).

    The quality is minus the loss on text, the accuracy elsewhere; a run that diverged counts as chance.
    """
    specs, path = study.rates(case), results_dir() / study.file
    rows = {row["key"]: row for row in load_rows(path)}
    num_missing = sum(spec.key not in rows for spec in specs)
    if num_missing:
        raise NotMeasuredError(
            f"{path} lacks {num_missing} of the {len(specs)} runs that choose the learning rates of {case!r}; "
            f"run them: python -m cpt_lab run {study.name}-rates/{case}"
        )
    task = study.case(case)
    num_seeds = len(study.tuning_seeds)
    means: dict[str, dict[tuple[float, str], float]] = {}
    for i in range(0, len(specs), num_seeds):
        arm, _, rate = specs[i].arm.rpartition(" at ")
        seed_rows = [rows[spec.key] for spec in specs[i : i + num_seeds]]
        for name, precision in EVALUATION_SUFFIXES.items():
            qualities = [_held_out_quality(row, task, precision) for row in seed_rows]
            by_setting = means.setdefault(arm, {})
            by_setting[float(rate), name] = float(np.mean(qualities))
    return means


def _held_out_quality(row: Mapping[str, Any], task: Case, precision: str) -> float:
    """Return the final quality of a row on held-out data at a precision."""
    is_text = task.task == "language_model"
    if row["status"] != "ok":
        num_outputs = NUM_OUTPUTS[task.dataset]
        return -float(np.log(num_outputs)) if is_text else 1 / num_outputs
    values = {
        (m["name"], m["precision"]): m["value"]
        for m in row.get("metrics", ())
        if m["split"] == "valid" and m["when"] == "final"
    }
    return -values["loss", precision] if is_text else values["accuracy", precision]
