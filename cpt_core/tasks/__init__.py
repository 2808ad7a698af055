"""The tasks, by name.

>>> sorted(TASKS)
['entailment', 'graph', 'image']
"""

from __future__ import annotations

from cpt_core.tasks.base import Task
from cpt_core.tasks.entailment import EntailmentTask
from cpt_core.tasks.graph import GraphTask
from cpt_core.tasks.image import ImageTask

TASKS: dict[str, type[Task]] = {"image": ImageTask, "graph": GraphTask, "entailment": EntailmentTask}
