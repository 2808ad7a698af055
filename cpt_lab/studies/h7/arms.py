"""The runs of H7 and H8 in ``docs/preregistration.md``: gradients may pay for forward bits.  No torch.

A task has two grids: ``h7-rates/NAME`` chooses the settings of every arm, ``h7/NAME`` compares the arms at them.

>>> [arm for arm in arms(600) if "cycle" not in arm]
['3/8', '4/8', '5/8', '4/5', '5/5', '6/5', '8/8']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from cpt_core.checks import choose
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.studies.case import FACEBOOK, OUTPUTS, Case
from cpt_lab.studies.h1_to_h4.arms import least_noisy
from cpt_lab.sweeps.stores import load_rows

FILE = "h7_rates.jsonl"  # under data/results: the rows of the grids ``h7-rates``
Q_MAX, SPENT = 8, 5  # gradient bits of the paper, and those of gradients that pay
BUDGETS = (3, 4, 5)  # bits of the static precisions whose costs are spent
CYCLED = (3, 4)  # of them, those that H8 has
RATES, TUNING = (0.5, 1.0, 2.0), range(50, 53)  # times the rate of the recipe; seeds of the choice
EVALUATED = {"8 bits": "q_max", "their own bits": "current"}  # at which bits: the precision of a metric in rows


CASES = {
    "characters": Case("pydoc", "language_model", seeds=20, margin=1.0, changes={"steps": 640}),
    "digits": Case("digits", "image", seeds=40, margin=1.0),
    "gcn": Case(FACEBOOK, "graph", "gcn", seeds=16, margin=0.2, changes={"steps": 64}),
    "sage": Case(FACEBOOK, "graph", "sage", seeds=20, margin=0.2, changes={"steps": 120}),
    "cifar10-jpeg": Case("cifar10-jpeg/", "image", seeds=16, margin=1.0),
    "ptb": Case("ptb", "language_model", seeds=12, margin=1.0, changes={"steps": 300}),
}


def pays(bits: int) -> str:
    """Return the arm that spends no more than ``bits``/8: a bit more forward, gradients of 5 bits."""
    return f"{bits + 1}/{SPENT}"


@cache
def arms(steps: int) -> dict[str, tuple[Schedule, int]]:
    """Return forward bits over ``steps`` steps and gradient bits of every arm.

    "4/5" is static 4 with gradients of 5 bits. A cycle is the least noisy of the suite's ten shapes, in two cycles,
    that starts one bit below static and costs what static does.
    """
    pairs = [(b, Q_MAX) for b in BUDGETS] + [(b + 1, SPENT) for b in BUDGETS] + [(Q_MAX, Q_MAX)]
    found: dict[str, tuple[Schedule, int]] = {f"{q}/{g}": (StaticSchedule(q, steps), g) for q, g in pairs}
    for q, g in [(4, Q_MAX), *((b + 1, SPENT) for b in CYCLED)]:
        found[f"cycle at {q}/{g}"] = least_noisy(q, steps, g, lowest=q - 1), g
    return found


def _specs(case: str, rates: Callable[[str], Iterable[float]], seeds: Sequence[int]) -> list[RunSpec]:
    r = CASES[choose("case", case, CASES)].recipe
    return [
        RunSpec(replace(r, lr=rate * r.lr), schedule, Q_MAX, g, seed, f"{arm} at {rate:g}", "demo")
        for arm, (schedule, g) in arms(r.steps).items()
        for rate in rates(arm)
        for seed in seeds
    ]


def tuning(case: str = "digits", seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs from which every arm's learning rate and bits of evaluation are chosen."""
    return _specs(case, lambda arm: RATES, TUNING if seeds is None else seeds)


def spent(case: str = "digits", seeds: Sequence[int] | None = None) -> list[RunSpec]:
    """Return the runs of a task, every arm at its own rate; NotMeasuredError where rows that choose it are missing."""
    c = CASES[choose("case", case, CASES)]
    chosen = settings(case)
    return _specs(case, lambda arm: [chosen[arm][0]], range(300, 300 + c.seeds) if seeds is None else seeds)


@cache
def settings(case: str) -> dict[str, tuple[float, str]]:
    """Return rate and key of ``EVALUATED`` of every arm: the best on held-out data, by the mean over ``TUNING``.

    The loss decides on text, the accuracy elsewhere; a run that diverged counts as chance.
    """
    specs, path = tuning(case), results_dir() / FILE
    rows = {row["key"]: row for row in load_rows(path)}
    if missing := sum(spec.key not in rows for spec in specs):
        raise NotMeasuredError(
            f"{path} lacks {missing} of the {len(specs)} runs that choose the learning rates of {case!r}; "
            f"run them: python -m cpt_lab run h7-rates/{case}"
        )
    text, outputs = CASES[case].task == "language_model", OUTPUTS[CASES[case].dataset]

    def quality(row: dict[str, Any], precision: str) -> float:
        found = {
            (m["name"], m["precision"]): m["value"]
            for m in row.get("metrics", ()) if m["split"] == "valid" and m["when"] == "final"
        }  # fmt: skip
        if row["status"] != "ok":
            return -float(np.log(outputs)) if text else 1 / outputs
        return -found["loss", precision] if text else found["accuracy", precision]

    means: dict[str, dict[tuple[float, str], float]] = {}
    for spec in specs[:: len(TUNING)]:
        arm, _, rate = spec.arm.rpartition(" at ")
        mine = [rows[replace(spec, seed=seed).key] for seed in TUNING]
        for name, precision in EVALUATED.items():
            value = float(np.mean([quality(row, precision) for row in mine]))
            means.setdefault(arm, {})[float(rate), name] = value
    return {arm: max(of, key=of.__getitem__) for arm, of in means.items()}


# name of a grid -> what makes its runs, what they are
GRIDS: dict[str, tuple[Callable[..., list[RunSpec]], str]] = {
    **{f"h7-rates/{name}": (partial(tuning, name), f"learning rates of every arm of H7, {name}") for name in CASES},
    **{f"h7/{name}": (partial(spent, name), f"gradients that pay for forward bits, {name}") for name in CASES},
}
