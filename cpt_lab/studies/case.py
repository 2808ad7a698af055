"""A task of a study: its data, model and recipe, and what counts as chance there.  No torch."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe

FACEBOOK = "facebook_ogb_layout/"  # Facebook's page-page graph in OGB's raw layout, below the data folder
# classes, characters or words: a run that diverged counts as chance
OUTPUTS = {"digits": 10, "cifar10-jpeg/": 10, FACEBOOK: 4, "pydoc": 102, "ptb": 2000}


@dataclass(frozen=True)
class Case:
    """A task."""

    dataset: str  # see ``recipes.recipe``; ``task`` and ``model`` too
    task: str
    model: str | None = None
    seeds: int = 8  # how many the test has
    margin: float = 0.0  # what is too little to name, in points or percent; 0 where the study has none
    changes: dict[str, Any] = field(
        default_factory=dict
    )  # other values for fields of the demo recipe
    q_max: int = 8  # highest level, of which eight bits are one
    title: str = ""  # its name for people, where that is not its key

    @cached_property
    def recipe(self) -> Recipe:
        """What is trained: the demo recipe, evaluated at the end alone."""
        found = recipe("demo", self.dataset, self.model, task=self.task)
        return replace(found, n_cycles=2, evaluate_every=0, **self.changes)
