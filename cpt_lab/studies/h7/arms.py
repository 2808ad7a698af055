"""The runs of H7 and H8 in ``docs/preregistration.md``: gradients may pay for forward bits.  No torch.

>>> [arm for arm in STUDY.arms(CASES["digits"]) if "cycle" not in arm]
['3/8', '4/8', '5/8', '4/5', '5/5', '6/5', '8/8']
"""

from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.studies.case import FACEBOOK, Case
from cpt_lab.studies.h1_to_h4.arms import least_noisy
from cpt_lab.studies.tuned import Tuned

Q_MAX, REDUCED_GRAD_BITS = (
    8,
    5,
)  # gradient bits of the paper, and those of gradients that pay
BUDGETS = (3, 4, 5)  # bits of the static precisions whose costs are spent
CYCLED = (3, 4)  # of them, those that H8 has

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


def paying_arm(bits: int) -> str:
    """Return the arm that spends no more than ``bits``/8: a bit more forward, gradients of 5 bits."""
    return f"{bits + 1}/{REDUCED_GRAD_BITS}"


def arms(case: Case) -> dict[str, tuple[Schedule, int]]:
    """Return forward bits and gradient bits of every arm.

    "4/5" is static 4 with gradients of 5 bits. A cycle is the least noisy of the suite's ten shapes, in two cycles,
    that starts one bit below static and costs what static does.
    """
    steps = case.recipe.steps
    pairs = (
        [(b, Q_MAX) for b in BUDGETS]
        + [(b + 1, REDUCED_GRAD_BITS) for b in BUDGETS]
        + [(Q_MAX, Q_MAX)]
    )
    found: dict[str, tuple[Schedule, int]] = {
        f"{q}/{g}": (StaticSchedule(q, steps), g) for q, g in pairs
    }
    for q, g in [(4, Q_MAX), *((b + 1, REDUCED_GRAD_BITS) for b in CYCLED)]:
        found[f"cycle at {q}/{g}"] = least_noisy(q, steps, g, lowest=q - 1), g
    return found


STUDY = Tuned(
    "h7",
    "gradients that pay for forward bits",
    CASES,
    arms,
    tuning=range(50, 53),
    first=300,
)
GRIDS = STUDY.grids()
