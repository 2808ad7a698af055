"""The text and the runs of notebook 06."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from cpt_lab.data.text import columns, load_text
from cpt_lab.experiments import designs
from cpt_lab.experiments.language_model import LanguageModelRecipe
from cpt_lab.experiments.recipes import recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lessons.exercises import warnings_as_text

SCHEDULES = {"smoke": ("CR", "ER"), "demo": None, "paper": None}  # of those that are asked for; None takes all
ON_PAIRS = {"smoke": ("CR",), "demo": ("CR", "RR"), "paper": None}
STATIC = {"smoke": (2, 8), "demo": (2, 3, 4, 8), "paper": None}  # bits; None takes q_max alone


def characters() -> tuple[Tensor, Tensor, int]:
    """Return Python's reference text to learn from and to test on, in columns (T, 20), and how many characters it has.

    Every number is a character.
    """
    text = load_text(cast(LanguageModelRecipe, recipe("smoke", "pydoc")))
    return columns(text.train, 20), columns(text.test, 20), len(text.vocabulary)


def experiment(
    scale: str, dataset: str, pairs: str, schedules: Sequence[str], seeds: Sequence[int], preset: str
) -> list[list[RunSpec]]:
    """Return the runs on a text, with static q_max = 6, and those on sentence pairs, which may be left out.

    What warns of cycles that are too short is printed.
    """

    def asked(kept: tuple[str, ...] | None) -> list[str]:
        return [s for s in schedules if kept is None or s in kept]

    def runs(task: str, dataset: str, **design: object) -> list[RunSpec]:
        return designs.quality_cost(scale, dataset, task=task, preset=preset, seeds=seeds or None, **design)  # type: ignore[arg-type]

    with warnings_as_text():
        static = STATIC[scale]
        text = runs("language_model", dataset, schedules=asked(SCHEDULES[scale]), static=static)
        text += runs("language_model", dataset, schedules=[], static=[6], q_max=[6])
        top = static and static[-1:]
        judged = runs("entailment", pairs, schedules=asked(ON_PAIRS[scale]), static=top) if pairs else []
    once = list({spec.key: spec for spec in text}.values())  # the paper's scale has static 6 already
    return [once, judged] if judged else [once]
