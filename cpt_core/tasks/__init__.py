"""The tasks, by name.

>>> sorted(TASKS)
['detection', 'entailment', 'graph', 'image', 'language_model']
"""

from __future__ import annotations

from cpt_core.tasks.base import Task
from cpt_core.tasks.detection import DetectionTask
from cpt_core.tasks.entailment import EntailmentTask
from cpt_core.tasks.graph import GraphTask
from cpt_core.tasks.image import ImageTask
from cpt_core.tasks.language_model import LanguageModelTask

TASKS: dict[str, type[Task]] = {
    "image": ImageTask,
    "detection": DetectionTask,
    "graph": GraphTask,
    "language_model": LanguageModelTask,
    "entailment": EntailmentTask,
}
