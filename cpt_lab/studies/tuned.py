"""Studies whose arms have learning rates and evaluation bits chosen on held-out data.  No torch.

Such a study has two grids per task: ``NAME-rates/TASK`` chooses the settings of every arm, ``NAME/TASK`` compares the
arms at these settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cpt_core.schedules.schedule import Schedule
from cpt_core.validation import check_choice
from cpt_lab.experiments.schema import CURRENT_BITS, EIGHT_BITS
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.studies.case import NUM_OUTPUTS, Case
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.stores import load_rows

RATE_FACTORS = (0.5, 1.0, 2.0)  # multiples of the recipe's learning rate
EXTENSION = 2**0.5  # ratio of the rates that extend a grid beyond an end
FULL_BITS_ARM = "8/8"  # the arm that costs most
MAX_RATES = 14  # of an arm; at the last one its grid ends, wherever the best is
# bits of evaluation -> precision of a metric in rows
EVALUATION_PRECISIONS = {EIGHT_BITS: "q_max", CURRENT_BITS: "current"}


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
    rate_factors: Sequence[float] = RATE_FACTORS
    # whether a grid goes on by ``EXTENSION`` while the best rate of its arm is the smallest or the largest
    extends_rates: bool = False
    # from a task and an arm to the fields of its recipe that the arm changes
    changes: Callable[[Case, str], Mapping[str, Any]] = lambda case, arm: {}
    # from an arm to the arm whose learning rate and bits of evaluation it takes; by default every arm has its own
    tuned_as: Callable[[str], str] = lambda arm: arm
    # bits of evaluation to choose from, keys of ``EVALUATION_PRECISIONS``
    evaluations: Sequence[str] = tuple(EVALUATION_PRECISIONS)
    grid_suffix: str = ""  # follows the name of the study in the names of its grids

    def with_extended_rates(self) -> "TunedStudy":
        """Return the same arms with grids of learning rates that go on until the best rate is inside.

        Its rows are stored in the files of this study; its grids are "NAME-extended-rates/TASK" and
        "NAME-extended/TASK".
        """
        return replace(self, extends_rates=True, grid_suffix="-extended")

    @property
    def file(self) -> str:
        """Name of the file under data/results with the rows that choose the settings."""
        return f"{self.name}_rates.jsonl"

    def case(self, name: str) -> Case:
        """Return a task; ValueError for an unknown name."""
        return self.cases[check_choice("case", name, self.cases)]

    def rates(self, case: str, seeds: Sequence[int] | None = None) -> list[RunSpec]:
        """Return the runs that choose learning rates and evaluation bits, of the arms that have their own.

        With ``extends_rates`` they depend on the stored rows: they are complete when all of them are stored.
        """
        rates_by_arm = {
            arm: sorted(tuning.factors) for arm, tuning in _tune(self, case).items()
        }
        seeds = self.tuning_seeds if seeds is None else seeds
        return self._specs(case, rates_by_arm, seeds)

    def runs(self, case: str, seeds: Sequence[int] | None = None) -> list[RunSpec]:
        """Return the runs of a task, every arm at its own rate.

        Raises:
            NotMeasuredError: if rows that choose the rates are missing.
        """
        last = self.first_seed + self.case(case).seeds
        rates_by_arm = {arm: (rate,) for arm, (rate, _) in settings(self, case).items()}
        seeds = range(self.first_seed, last) if seeds is None else seeds
        return self._specs(case, rates_by_arm, seeds)

    def num_runs(self) -> int:
        """Return the number of runs of all tasks, those that tasks share once; it does not depend on the rates."""
        num_seeds = {}
        for case in self.cases.values():
            for arm in self.arms(case):
                (first,) = self.specs_at(case, arm, 1.0, [self.first_seed])
                num_seeds[first.key] = case.seeds
        return sum(num_seeds.values())

    def _specs(
        self,
        case: str,
        rates_by_arm: Mapping[str, Iterable[float]],
        seeds: Sequence[int],
    ) -> list[RunSpec]:
        task = self.case(case)
        specs = []
        for arm in self.arms(task):
            for rate in rates_by_arm.get(arm, ()):
                specs += self.specs_at(task, arm, rate, seeds)
        return specs

    def specs_at(
        self, task: Case, arm: str, rate: float, seeds: Sequence[int]
    ) -> list[RunSpec]:
        """Return the runs of an arm at a multiple of the recipe's rate."""
        schedule, q_grad = self.arms(task)[arm]
        changes = self.changes(task, arm)
        recipe = replace(task.recipe, lr=rate * task.recipe.lr, **changes)
        name = f"{arm} at {rate:g}"
        return [
            RunSpec(recipe, schedule, task.q_max, q_grad, seed, name, "demo")
            for seed in seeds
        ]

    def grids(
        self, tasks: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, tuple[Callable[..., list[RunSpec]], str]]:
        """Return the grids of the study: name -> (function that makes the runs, description).

        Args:
            tasks: task -> its cases, whose runs make one grid; None makes a grid of every case.
        """
        if tasks is None:
            tasks = {case: [case] for case in self.cases}
        grids: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {}
        for prefix, make, description in (
            (
                f"{self.name}{self.grid_suffix}-rates",
                self.rates,
                f"learning rates of every arm of {self.name.upper()}",
            ),
            (f"{self.name}{self.grid_suffix}", self.runs, self.description),
        ):
            for task, cases in tasks.items():
                make_runs = partial(_runs_of_cases, make, cases)
                grids[f"{prefix}/{task}"] = (make_runs, f"{description}, {task}")
        return grids


def _runs_of_cases(
    make: Callable[..., list[RunSpec]],
    cases: Sequence[str],
    seeds: Sequence[int] | None = None,
) -> list[RunSpec]:
    """Return the runs of some cases; those that they share come once."""
    specs = [spec for case in cases for spec in make(case, seeds=seeds)]
    return list({spec.key: spec for spec in specs}.values())


def settings(study: TunedStudy, case: str) -> dict[str, tuple[float, str]]:
    """Return the best (rate, key of ``EVALUATION_PRECISIONS``) of every arm on held-out data, by the mean over seeds.

    An arm takes that of ``study.tuned_as(arm)``.
    """
    best = {
        arm: max(quality_by_setting, key=quality_by_setting.__getitem__)
        for arm, quality_by_setting in held_out(study, case).items()
    }
    return {arm: best[study.tuned_as(arm)] for arm in study.arms(study.case(case))}


def rates_at_ends(study: TunedStudy) -> pd.DataFrame:
    """Return how many arms of every task chose the smallest or the largest of their rates on held-out data.

    Such a choice shows that a rate is better than the others, not that it is tuned: one outside may be better still.
    Tasks whose rows are missing are left out.

    Returns:
        Columns: task, arms, smallest rate, largest rate (numbers of arms).
    """
    lines = []
    for name, case in study.cases.items():
        factors = {arm: tuning.factors for arm, tuning in _tune(study, name).items()}
        try:
            rates = {arm: rate for arm, (rate, _) in settings(study, name).items()}
        except NotMeasuredError:
            continue
        chosen = {arm: rates[arm] for arm in factors}
        lines.append(
            (
                case.title or name,
                len(chosen),
                sum(rate == min(factors[arm]) for arm, rate in chosen.items()),
                sum(rate == max(factors[arm]) for arm, rate in chosen.items()),
            )
        )
    return pd.DataFrame(
        lines, columns=["task", "arms", "smallest rate", "largest rate"]
    )


def held_out(study: TunedStudy, case: str) -> dict[str, dict[tuple[float, str], float]]:
    """Return the mean quality of every arm with an own rate on held-out data, by (rate, bits of evaluation).

    The quality is minus the loss on text, the accuracy elsewhere; a run that diverged counts as chance.
    """
    tuning = _tune(study, case)
    if num_missing := sum(arm.num_missing for arm in tuning.values()):
        num_runs = len(study.tuning_seeds) * sum(
            len(arm.factors) for arm in tuning.values()
        )
        raise NotMeasuredError(
            f"{results_dir() / study.file} lacks {num_missing} of the {num_runs} runs that choose the learning rates "
            f"of {case!r}; run them: python -m cpt_lab run "
            f"{study.name}{study.grid_suffix}-rates/{case.partition('/')[0]}"
        )
    return {arm: dict(tuned.qualities) for arm, tuned in tuning.items()}


class _Tuning(NamedTuple):
    """Learning rates of an arm.

    Attributes:
        factors: multiples of the recipe's rate, in the order in which they were added.
        qualities: mean quality on held-out data by (factor, key of ``EVALUATION_PRECISIONS``) of the stored ones.
        num_missing: number of runs that are not stored.
    """

    factors: tuple[float, ...]
    qualities: Mapping[tuple[float, str], float]
    num_missing: int


def _tune(study: TunedStudy, case: str) -> dict[str, _Tuning]:
    """Return the learning rates of every arm with an own rate, extended as the stored rows ask for."""
    path = results_dir() / study.file
    if not path.exists():
        return _tune_from(study, case, path, None)
    status = path.stat()
    return _tune_from(study, case, path, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=4)
def _rows_by_key(path: Path, version: tuple[int, int] | None) -> dict[str, ResultRow]:
    """Return the rows of a file, none without a version."""
    return {row["key"]: row for row in load_rows(path)} if version else {}


@cache
def _tune_from(
    study: TunedStudy, case: str, path: Path, version: tuple[int, int] | None
) -> dict[str, _Tuning]:
    """Return the learning rates of every arm with an own rate by the rows of a file; ``version`` changes with it."""
    rows, task = _rows_by_key(path, version), study.case(case)

    def tune(arm: str) -> _Tuning:
        factors: list[float] = []
        qualities: dict[tuple[float, str], float] = {}
        new_factors, num_missing = list(study.rate_factors), 0
        while new_factors:
            factors += new_factors
            for factor in new_factors:
                specs = study.specs_at(task, arm, factor, study.tuning_seeds)
                stored = [rows[spec.key] for spec in specs if spec.key in rows]
                num_missing += len(specs) - len(stored)
                if len(stored) == len(specs):
                    for name in study.evaluations:
                        precision = EVALUATION_PRECISIONS[name]
                        values = [
                            _held_out_quality(row, task, precision) for row in stored
                        ]
                        qualities[factor, name] = float(np.mean(values))

            new_factors = []
            if study.extends_rates and not num_missing and len(factors) < MAX_RATES:
                best, _ = max(qualities, key=qualities.__getitem__)
                if best == max(factors):
                    new_factors = [best * EXTENSION]
                elif best == min(factors):
                    new_factors = [best / EXTENSION]
        return _Tuning(tuple(factors), qualities, num_missing)

    return {arm: tune(arm) for arm in study.arms(task) if study.tuned_as(arm) == arm}


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
