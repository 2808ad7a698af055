"""The set-up of a run and one optimizer step, for training, the range test and calibration alike."""

from __future__ import annotations

from cpt_core.experiments.graph import GraphRecipe
from cpt_core.experiments.recipe import Recipe
from cpt_core.experiments.spec import RunSpec
from cpt_core.quantization.convert import PRESETS, QuantConfig
from cpt_core.tasks import TASKS, Task


def quant_config(recipe: Recipe, seed: int) -> QuantConfig:
    """Return what a recipe quantises, and how."""
    base = PRESETS[recipe.quantized]
    aggregation = recipe.aggregation if isinstance(recipe, GraphRecipe) else "fp"
    return QuantConfig(base.float32, base.quantizers, recipe.running_start, seed, aggregation)


def task_of(spec: RunSpec) -> type[Task]:
    """Return the task class of a spec; ValueError names the tasks there are."""
    if spec.recipe.task not in TASKS:
        raise ValueError(f"unknown task {spec.recipe.task!r}; choose from {', '.join(TASKS)}")
    return TASKS[spec.recipe.task]
