"""Costs of arms under three price models of a matmul by its operand bits, and the verdicts that they touch.  No torch.

BitOps, the count of the paper, price a matmul of a and b bits at a * b; no hardware has confirmed that. A unit that
works at the wider operand costs max(a, b)**2; a tensor core has few rates (``cpt_extras.formats.costs``).

>>> schedule, q_grad = h10.STUDY.arms(CASES["digits"])[LATE]
>>> [round(price, 2) for price in relative_prices(CASES["digits"], schedule, q_grad).values()]
[0.33, 0.4, 0.6]
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.analysis.estimates import Estimate, significant_effects
from cpt_lab.studies.case import Case
from cpt_lab.studies.h1_to_h4 import outcome as h2
from cpt_lab.studies.h1_to_h4.arms import STEPS_BY_MODEL, min_noise_schedule
from cpt_lab.studies.h7 import outcome as h7
from cpt_lab.studies.h7.arms import BUDGETS, CYCLE_BUDGETS, reduced_gradient_arm
from cpt_lab.studies.h10 import outcome as h10
from cpt_lab.studies.h10.arms import CASES, LATE
from cpt_lab.studies.tuned import TunedStudy
from cpt_lab.studies.tuned_outcome import Task

BITOPS, WIDER_OPERAND = "a * b (the paper)", "wider operand: max(a, b)^2"
TENSOR_CORES = "tensor cores: 4 bits twice as fast as 6 or 8"
# printed name of a price model -> its name in ``COSTS``
PRICES: Mapping[str, str] = {
    BITOPS: "bitops",
    WIDER_OPERAND: "wider_operand",
    TENSOR_CORES: "tensor_core",
}
TOLERANCE = 0.02  # arms whose prices differ by less cost the same


def relative_prices(
    case: Case, schedule: Schedule, q_grad: int | None
) -> dict[str, float]:
    """Return the cost of a training by each of ``PRICES``, relative to static 8 bits with 8-bit gradients."""
    recipe = case.recipe
    ladder = None if recipe.ladder == "affine" else recipe.formats
    return {
        title: schedule.relative_cost(q_grad, case.q_max, cost, ladder)
        for title, cost in PRICES.items()
    }


def prices(study: TunedStudy, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return ``relative_prices`` of the arms of a task.

    Args:
        study: with its arms.
        case: a task of the study.
        only: names of arms; empty for all arms.

    Returns:
        A line per arm: columns "arm" and the names of ``PRICES``.
    """
    wanted_arms, task = list(only), study.case(case)
    return pd.DataFrame(
        {"arm": arm} | relative_prices(task, schedule, q_grad)
        for arm, (schedule, q_grad) in study.arms(task).items()
        if not wanted_arms or arm in wanted_arms
    )


def price_table(study: TunedStudy, case: str, only: Iterable[str] = ()) -> pd.DataFrame:
    """Return a printable form of ``prices``, with three digits."""
    arm_prices = prices(study, case, only)
    cells = {"arm": arm_prices["arm"]}
    for name in PRICES:
        cells[name] = arm_prices[name].map("{:.3f}".format)
    return pd.DataFrame(cells)


# --- verdicts -------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """A comparison of two arms that has been run because both cost the same bit operations.

    Attributes:
        question: of the preregistration.
        arm: name of the first arm.
        other: name of the second arm.
        ratios: price of the first arm, relative to the second, by the names of ``PRICES``.
        effects: quality of the first arm minus that of the second, of every task.
    """

    question: str
    arm: str
    other: str
    ratios: Mapping[str, float]
    effects: Sequence[Estimate]

    @property
    def num_better(self) -> int:
        """Number of tasks in which the first arm is better, at .025 on one side after Holm's correction."""
        return len(significant_effects(self.effects, "greater", 0.025))

    @property
    def num_worse(self) -> int:
        """Number of tasks in which the first arm is worse."""
        return len(significant_effects(self.effects, "less", 0.025))

    def holds(self, price: str) -> bool:
        """Return whether the arm that is better in more tasks costs no more than the other, by a name of ``PRICES``.

        Where neither is better in more tasks, both must cost the same.
        """
        ratio = self.ratios[price]
        first_pays = ratio > 1 + TOLERANCE
        second_pays = ratio < 1 - TOLERANCE
        if self.num_better > self.num_worse:
            return not first_pays
        if self.num_better < self.num_worse:
            return not second_pays
        return not (first_pays or second_pays)


def comparisons(runs: pd.DataFrame) -> Iterator[Comparison]:
    """Yield the preregistered comparisons at equal bit operations that have answers in a table of runs.

    H5 and H6 are left out: what they compare has another price in every layer or format.
    """
    case = CASES["digits"]
    steps = STEPS_BY_MODEL["gcn"]
    answers = {answer.question: answer for answer in h2.answers(runs)}
    for bits in (5, 3):
        primary = answers["H2"].primary
        cycle, static = min_noise_schedule(bits, steps), StaticSchedule(bits, steps)
        effects = [e for e in primary if e.description.endswith(f"static {bits}")]
        if effects:
            ratios = _ratios(
                relative_prices(case, cycle, 8), relative_prices(case, static, 8)
            )
            yield Comparison("H2", "cycle", f"static {bits}", ratios, effects)

    parts, missing = h7.tasks(runs)
    if not missing:
        for bits in BUDGETS:
            pair = reduced_gradient_arm(bits)
            yield _compare("H7", h7.STUDY, parts, pair, f"{bits}/8")
        for bits in CYCLE_BUDGETS:
            pair = reduced_gradient_arm(bits)
            yield _compare("H8", h7.STUDY, parts, f"cycle at {pair}", pair)
    parts, missing = h10.tasks(runs)
    if not missing:
        for other in ("4/6", "5/4", "gradients late", "both late", "forward spread"):
            yield _compare("H10", h10.STUDY, parts, LATE, other)


def _compare(
    question: str, study: TunedStudy, parts: Sequence[Task], arm: str, other: str
) -> Comparison:
    arm_prices = prices(study, "digits", (arm, other)).set_index("arm")
    ratios = _ratios(arm_prices.loc[arm], arm_prices.loc[other])
    effects = [
        part.gain(arm, other) for part in parts if {arm, other} <= part.settings.keys()
    ]
    return Comparison(question, arm, other, ratios, effects)


def _ratios(
    first: Mapping[str, float] | pd.Series, second: Mapping[str, float] | pd.Series
) -> dict[str, float]:
    return {name: first[name] / second[name] for name in PRICES}


def verdict_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a printable table of ``comparisons``: tasks won and lost, price ratios, and where the verdict holds."""
    lines = []
    for c in comparisons(runs):
        cells = []
        for name in PRICES:
            word = "holds" if c.holds(name) else "does not hold"
            cells.append(f"{c.ratios[name]:.2f}, {word}")
        won = f"better in {c.num_better}, worse in {c.num_worse} of {len(c.effects)}"
        lines.append((c.question, c.arm, c.other, won, *cells))
    columns = ["", "arm", "against", "tasks", *PRICES]
    return pd.DataFrame(lines, columns=columns)


def robust_verdicts(runs: pd.DataFrame) -> list[str]:
    """Return the comparisons with a winner whose verdict holds under all of ``PRICES``, in words."""
    texts = []
    for c in comparisons(runs):
        if c.num_better != c.num_worse and all(map(c.holds, PRICES)):
            better, worse = c.arm, c.other
            if c.num_better < c.num_worse:
                better, worse = worse, better
            texts.append(f"{better} against {worse} ({c.question})")
    return texts
