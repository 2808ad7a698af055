"""The tasks, by name.

>>> sorted(TASKS)
['image']
"""

from __future__ import annotations

from cpt_core.tasks.base import Task
from cpt_core.tasks.image import ImageTask

TASKS: dict[str, type[Task]] = {"image": ImageTask}
