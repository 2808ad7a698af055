"""Runs of H7 and H8 in ``docs/preregistration.md``: fewer gradient bits may pay for forward bits.

>>> [arm for arm in STUDY.arms(CASES["digits"]) if "cycle" not in arm]
['3/8', '4/8', '5/8', '4/5', '5/5', '6/5', '8/8']
"""

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.studies.case import FACEBOOK, Case
from cpt_lab.studies.h1_to_h4.arms import min_noise_schedule
from cpt_lab.studies.tuned import TunedStudy

Q_MAX = 8  # gradient bits of the paper
REDUCED_GRAD_BITS = 5  # the savings pay for one more forward bit
BUDGETS = (3, 4, 5)  # bits of the static precisions whose costs are the budgets
CYCLE_BUDGETS = (3, 4)  # budgets of H8

CASES = {
    "characters": Case(
        "pydoc", "language_model", seeds=20, margin=1.0, changes={"steps": 640}
    ),
    "digits": Case("digits", "image", seeds=40, margin=1.0),
    "gcn": Case(FACEBOOK, "graph", "gcn", 16, 0.2, {"steps": 64}, title="Facebook GCN"),
    "sage": Case(
        FACEBOOK, "graph", "sage", 20, 0.2, {"steps": 120}, title="Facebook GraphSAGE"
    ),
    "cifar10-jpeg": Case(
        "cifar10-jpeg/", "image", seeds=16, margin=1.0, title="CIFAR-10 copies"
    ),
    "ptb": Case(
        "ptb",
        "language_model",
        None,
        12,
        1.0,
        {"steps": 300},
        title="Penn Treebank, small",
    ),
}


def reduced_gradient_arm(bits: int) -> str:
    """Return the arm that costs no more than ``bits``/8: one more forward bit, gradients of 5 bits."""
    return f"{bits + 1}/{REDUCED_GRAD_BITS}"


def arms(case: Case) -> dict[str, tuple[Schedule, int]]:
    """Return (forward bits, gradient bits) of every arm.

    "4/5" is static 4 with gradients of 5 bits. A cycle is the least noisy of the suite's ten shapes, in two cycles,
    that starts one bit below static and costs what static does.
    """
    steps = case.recipe.steps
    static_pairs = [(bits, Q_MAX) for bits in BUDGETS]
    static_pairs += [(bits + 1, REDUCED_GRAD_BITS) for bits in BUDGETS]
    static_pairs.append((Q_MAX, Q_MAX))
    cycle_pairs = [(4, Q_MAX)]
    cycle_pairs += [(bits + 1, REDUCED_GRAD_BITS) for bits in CYCLE_BUDGETS]

    arms_by_name: dict[str, tuple[Schedule, int]] = {}
    for forward, gradient in static_pairs:
        schedule = StaticSchedule(forward, steps)
        arms_by_name[f"{forward}/{gradient}"] = (schedule, gradient)
    for forward, gradient in cycle_pairs:
        cycle = min_noise_schedule(forward, steps, gradient, lowest=forward - 1)
        arms_by_name[f"cycle at {forward}/{gradient}"] = (cycle, gradient)
    return arms_by_name


STUDY = TunedStudy(
    "h7",
    "gradients that pay for forward bits",
    CASES,
    arms,
    tuning_seeds=range(50, 53),
    first_seed=300,
)
GRIDS = STUDY.grids()

EXTENDED_STUDY = STUDY.with_extended_rates()
EXTENDED_GRIDS = EXTENDED_STUDY.grids()
