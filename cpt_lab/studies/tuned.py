"""Studies whose arms each have a learning rate and bits of evaluation of their own, chosen on held-out data.  No torch.

Such a study has two grids a task: ``NAME-rates/TASK`` chooses the settings of every arm, ``NAME/TASK`` compares the
arms at them.
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
from cpt_lab.studies.case import OUTPUTS, Case
from cpt_lab.sweeps.stores import load_rows

RATES = (0.5, 1.0, 2.0)  # times the rate of the recipe
EVALUATION_SUFFIXES = {
    "8 bits": "q_max",
    "their own bits": "current",
}  # at which bits: the precision of a metric in rows


@dataclass(frozen=True, eq=False)
class Tuned:
    """The runs of a study."""

    name: str  # such as "h7"
    about: str  # what it compares
    cases: Mapping[str, Case]  # its tasks
    # a task -> schedule and gradient bits by name, see ``RunSpec``
    arms: Callable[[Case], Mapping[str, tuple[Schedule, int | None]]]
    tuning: Sequence[int]  # seeds of the choice, which no test has
    first: int  # seed of the test

    @property
    def file(self) -> str:
        """The rows of the choice, under data/results."""
        return f"{self.name}_rates.jsonl"

    def case(self, name: str) -> Case:
        """Return a task; ValueError names those that there are."""
        return self.cases[check_choice("case", name, self.cases)]

    def rates(
        self, case: str = "digits", seeds: Sequence[int] | None = None
    ) -> list[RunSpec]:
        """Return the runs from which every arm's learning rate and bits of evaluation are chosen."""
        return self._specs(
            case, lambda arm: RATES, self.tuning if seeds is None else seeds
        )

    def runs(
        self, case: str = "digits", seeds: Sequence[int] | None = None
    ) -> list[RunSpec]:
        """Return the runs of a task, every arm at its own rate; NotMeasuredError where rows that choose are missing."""
        last, chosen = self.first + self.case(case).seeds, settings(self, case)
        return self._specs(
            case,
            lambda arm: [chosen[arm][0]],
            range(self.first, last) if seeds is None else seeds,
        )

    def _specs(
        self, case: str, rates: Callable[[str], Iterable[float]], seeds: Sequence[int]
    ) -> list[RunSpec]:
        c = self.case(case)
        return [
            RunSpec(recipe, schedule, c.q_max, g, seed, f"{arm} at {rate:g}", "demo")
            for arm, (schedule, g) in self.arms(c).items()
            for rate in rates(arm)
            for recipe in [replace(c.recipe, lr=rate * c.recipe.lr)]
            for seed in seeds
        ]

    def grids(self) -> dict[str, tuple[Callable[..., list[RunSpec]], str]]:
        """Return the name of a grid -> what makes its runs, what they are."""
        about = f"learning rates of every arm of {self.name.upper()}"
        return {
            **{
                f"{self.name}-rates/{c}": (partial(self.rates, c), f"{about}, {c}")
                for c in self.cases
            },
            **{
                f"{self.name}/{c}": (partial(self.runs, c), f"{self.about}, {c}")
                for c in self.cases
            },
        }


def settings(study: Tuned, case: str) -> dict[str, tuple[float, str]]:
    """Return rate and key of ``EVALUATED`` of every arm: the best on held-out data, by the mean over seeds."""
    return {
        arm: max(of, key=of.__getitem__) for arm, of in held_out(study, case).items()
    }


def rates_at_ends(study: Tuned) -> pd.DataFrame:
    """Return how many arms of every task took the smallest or the largest of ``RATES``, by held-out data.

    Such a choice says that a rate is better than two others, not that it is tuned: one outside may be better still.

    Returns:
        Columns: task, arms, smallest rate, largest rate (numbers of arms).
    """
    lines = []
    for name, case in study.cases.items():
        chosen = [rate for rate, _ in settings(study, name).values()]
        lines.append(
            (
                case.title or name,
                len(chosen),
                chosen.count(min(RATES)),
                chosen.count(max(RATES)),
            )
        )
    return pd.DataFrame(
        lines, columns=["task", "arms", "smallest rate", "largest rate"]
    )


@cache
def held_out(study: Tuned, case: str) -> dict[str, dict[tuple[float, str], float]]:
    """Return what every arm reaches on held-out data, by rate and key of ``EVALUATED``: the mean over seeds.

    The loss counts on text, the accuracy elsewhere; a run that diverged counts as chance.
    """
    specs, path = study.rates(case), results_dir() / study.file
    rows = {row["key"]: row for row in load_rows(path)}
    if missing := sum(spec.key not in rows for spec in specs):
        raise NotMeasuredError(
            f"{path} lacks {missing} of the {len(specs)} runs that choose the learning rates of {case!r}; "
            f"run them: python -m cpt_lab run {study.name}-rates/{case}"
        )
    text, outputs = (
        study.case(case).task == "language_model",
        OUTPUTS[study.case(case).dataset],
    )

    def quality(row: Mapping[str, Any], precision: str) -> float:
        found = {
            (m["name"], m["precision"]): m["value"]
            for m in row.get("metrics", ())
            if m["split"] == "valid" and m["when"] == "final"
        }
        if row["status"] != "ok":
            return -float(np.log(outputs)) if text else 1 / outputs
        return -found["loss", precision] if text else found["accuracy", precision]

    means: dict[str, dict[tuple[float, str], float]] = {}
    for i in range(0, len(specs), len(study.tuning)):
        arm, _, rate = specs[i].arm.rpartition(" at ")
        mine = [rows[spec.key] for spec in specs[i : i + len(study.tuning)]]
        for name, precision in EVALUATION_SUFFIXES.items():
            means.setdefault(arm, {})[float(rate), name] = float(
                np.mean([quality(row, precision) for row in mine])
            )
    return means
