"""Every setting of every experiment, looked up by name.  Needs no torch.

``smoke`` proves that things run, ``demo`` shows a direction in seconds, ``background`` is the best scale that two CPU
cores carry in hours, ``paper`` is the paper's own setting.
``preset="authors"`` gives what the authors' scripts do where they differ from the paper's text.

>>> recipe("paper", "cifar10", "resnet74").steps
64000
"""

from dataclasses import replace

from cpt_core.validation import check_choice, suggest_names
from cpt_lab.experiments import detection, entailment, graph, image, language_model
from cpt_lab.experiments.schema import (
    PRESETS,
    SCALES,
    Dataset,
    Deficits,
    Experiment,
    Recipe,
)

EXPERIMENTS: dict[str, Experiment] = {
    "image": image.EXPERIMENT,
    "detection": detection.EXPERIMENT,
    "graph": graph.EXPERIMENT,
    "language_model": language_model.EXPERIMENT,
    "entailment": entailment.EXPERIMENT,
}

# the data sets of all tasks by name
DATASETS: dict[str, Dataset] = {
    name: d for e in EXPERIMENTS.values() for name, d in e.named_datasets.items()
}


def recipe(
    scale: str,
    dataset: str = "digits",
    model: str | None = None,
    preset: str = "ours",
    task: str = "image",
) -> Recipe:
    """Look a recipe up.

    Args:
        dataset: a named data set, or data of your own: images in an ImageFolder use ImageNet's recipe at paper scale,
            other images CIFAR-10's; pictures with boxes, Pascal VOC 2007, and 2012 below paper scale, those of
            "own-pictures"; graphs, and OGB's below paper scale, those of "own-graph"; sentence pairs, and XNLI below
            paper scale, those of "own-pairs".
        model: None takes the first model listed for the data set.
        task: what the user's own data is for; a named data set has its own.

    ValueError names what there is; of scales and presets the module says what they are for.
    """
    check_choice("scale", scale, SCALES)
    check_choice("preset", preset, PRESETS)
    family = _recipe_family(scale, dataset, task)
    models = {r.model: r for r in family.recipes[scale]}
    result = models[check_choice("model", model or next(iter(models)), models)]
    if preset == "authors":
        if scale != "paper" or not family.authors:
            names = ", ".join(d.name for d in DATASETS.values() if d.authors)
            raise ValueError(
                f"preset 'authors' exists at scale 'paper' for {names}, not {scale}/{dataset}"
            )
        result = replace(
            result, **{**family.authors[""], **family.authors.get(result.model, {})}
        )
    return replace(result, dataset=dataset)


def _recipe_family(scale: str, dataset: str, task: str) -> Dataset:
    """Return the data set whose recipes are used; ValueError if there are none."""
    check_choice("task", task, EXPERIMENTS)
    family = EXPERIMENTS[task_of_dataset(dataset) or task].family(scale, dataset)
    if family is not None:
        return family
    names = sorted(d.name for d in DATASETS.values() if scale in d.recipes)
    raise ValueError(
        f"no {scale} recipe for dataset {dataset!r}; {suggest_names(dataset, names)}, "
        "or your own data: a folder such as 'my-images/', with a slash, or .npz, .txt or .pt files"
    )


def deficits(
    scale: str, dataset: str = "digits", model: str | None = None, task: str = "image"
) -> tuple[Recipe, Deficits]:
    """Look up the recipe of a critical-period experiment, for the training after a deficit, and its deficits.

    Arguments and errors are those of ``recipe``. Where nothing special is known, deficits are shares of the recipe's
    own training: 1/4, 1/2 and all of its steps at the start, windows of half of it, no weight decay.

    Paper: section 5.
    """
    base_recipe = recipe(scale, dataset, model, task=task)
    settings = (
        _recipe_family(scale, dataset, task)
        .deficits.get(scale, {})
        .get(base_recipe.model)
    )
    if settings is None:
        n = base_recipe.steps
        quarters = tuple(n * k // 4 for k in range(4))
        settings = Deficits(
            dict(
                weight_decay=0.0,
                evaluate_every=base_recipe.evaluate_every or max(1, n // 10),
            ),
            lengths=(0, *quarters[1:3], n),
            windows=tuple((start, start + n // 2) for start in quarters[:2]),
            window_steps=n,
            lr_after=hasattr(base_recipe, "milestones"),
        )
    return replace(base_recipe, **settings.changes), settings


def task_of_dataset(dataset: str) -> str | None:
    """Return the task of a named data set; None for the user's own data, which can be of any."""
    return next(
        (
            task
            for task, experiment in EXPERIMENTS.items()
            if dataset in experiment.named_datasets
        ),
        None,
    )
