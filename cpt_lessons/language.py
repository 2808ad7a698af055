"""The runs of notebook 06 at every scale."""

from __future__ import annotations

from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lessons.exercises import warnings_as_text
from cpt_lessons.parameters import Parameters

SCHEDULES = {"smoke": ("CR", "ER"), "demo": None, "paper": None}  # of those that are asked for; None takes all
ON_PAIRS = {"smoke": ("CR",), "demo": ("CR", "RR"), "paper": None}
STATIC = {"smoke": (2, 8), "demo": (2, 3, 4, 8), "paper": None}  # bits; None takes q_max alone


def language_runs(given: Parameters) -> tuple[list[RunSpec], list[RunSpec], list[RunSpec]]:
    """Return the runs on a text, static q_max = 6 on it, and the runs on sentence pairs, which may be left out.

    What warns of cycles that are too short is printed.

    Args:
        given: with scale, dataset, pairs, preset, schedules and seeds.
    """
    scale, preset, seeds = given.scale, given.preset, given.seeds or None

    def asked(kept: tuple[str, ...] | None) -> list[str]:
        return [s for s in given.schedules if kept is None or s in kept]

    def runs(task: str, dataset: str, **design: object) -> list[RunSpec]:
        return designs.quality_cost(scale, dataset, task=task, preset=preset, seeds=seeds, **design)  # type: ignore[arg-type]

    with warnings_as_text():
        static = STATIC[scale]
        text = runs("language_model", given.dataset, schedules=asked(SCHEDULES[scale]), static=static)
        six = runs("language_model", given.dataset, schedules=[], static=[6], q_max=[6])
        top = static and static[-1:]
        pairs = runs("entailment", given.pairs, schedules=asked(ON_PAIRS[scale]), static=top) if given.pairs else []
    return text, six, pairs
