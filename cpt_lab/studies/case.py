"""A task of a study: its data, model and recipe, and the number of classes, on which chance depends.  No torch."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe

FACEBOOK = "facebook_ogb_layout/"  # Facebook's page-page graph in OGB's raw layout, below the data folder
# data set -> number of classes, characters or words; a run that diverged counts as chance
NUM_OUTPUTS = {
    "digits": 10,
    "cifar10-jpeg/": 10,
    FACEBOOK: 4,
    "pydoc": 102,
    "ptb": 2000,
}


@dataclass(frozen=True)
class Case:
    """A task of a study."""

    dataset: str  # as in ``registry.recipe``, like ``task`` and ``model``
    task: str
    model: str | None = None
    seeds: int = 8  # number of seeds of the test
    margin: float = 0.0  # smallest effect that counts, in points or percent; 0 if the study has none
    # fields of the demo recipe with other values
    changes: dict[str, Any] = field(default_factory=dict)
    q_max: int = 8  # highest level of the ladder, the one of eight bits
    title: str = ""  # printed name, if it is not the key

    @cached_property
    def recipe(self) -> Recipe:
        """The demo recipe with the changes, evaluated at the end alone."""
        demo_recipe = recipe("demo", self.dataset, self.model, task=self.task)
        return replace(demo_recipe, n_cycles=2, evaluate_every=0, **self.changes)
