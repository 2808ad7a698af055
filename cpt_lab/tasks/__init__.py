"""The tasks, by name; each is imported when it is asked for, so that a text run needs no torchvision.

>>> TASKS["image"].metric
'accuracy'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cpt_core.checks import library
from cpt_lab.experiments.recipes import EXPERIMENTS
from cpt_lab.tasks.base import Task


class _Tasks(Mapping[str, type[Task]]):
    """Name -> class, of ``EXPERIMENTS``; ImportError names the extra that a task needs."""

    def __getitem__(self, name: str) -> type[Task]:
        return library(EXPERIMENTS[name].task, EXPERIMENTS[name].extra)

    def __contains__(self, name: object) -> bool:
        return name in EXPERIMENTS

    def __iter__(self) -> Iterator[str]:
        return iter(EXPERIMENTS)

    def __len__(self) -> int:
        return len(EXPERIMENTS)

    def __repr__(self) -> str:
        return f"tasks: {', '.join(self)}"


TASKS = _Tasks()
