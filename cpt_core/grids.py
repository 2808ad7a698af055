"""Which runs a figure of the paper needs: one function per artefact, returning its list of runs.  Needs no torch.

>>> len(image_cifar("cifar10", "resnet74"))
66
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from cpt_core.recipes import recipe
from cpt_core.schedules import SUITE
from cpt_core.specs import RunSpec, run_spec


def image(
    scale: str = "demo",
    dataset: str = "digits",
    model: str | None = None,
    *,
    schedules: Sequence[str] = tuple(SUITE),
    static: Sequence[int] | None = None,
    q_max: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    preset: str = "ours",
    **changes: Any,
) -> list[RunSpec]:
    """Return the runs of a quality-cost figure for image classification.

    Args:
        scale: "smoke", "demo" or "paper".
        dataset: see ``recipes.recipe``.
        model: None takes the recipe's.
        schedules: names of the suite.
        static: bits of the static baselines; None takes q_max alone at paper scale, as the paper does, 2..q_max at
            demo scale, an equal-cost baseline that the paper lacks, and 2 and q_max at smoke scale.
        q_max: None takes 6 and 8 at paper scale, 8 elsewhere.
        seeds: None takes the recipe's.
        preset: "ours" or "authors".
        changes: other values for fields of the recipe, such as ``steps=2_000``.

    Raises:
        ValueError: for unknown names, before anything runs.

    Paper: section 4.2, figure 3.
    """
    r = recipe(scale, dataset, model, preset)
    unknown = sorted(set(changes) - set(asdict(r)))
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(unknown)}; it has {', '.join(asdict(r))}")
    r = replace(r, **changes)
    tops = tuple(q_max) if q_max is not None else ((6, 8) if scale == "paper" else (8,))
    specs = []
    for top in tops:
        default = {"smoke": (2, top), "demo": tuple(range(2, top + 1)), "paper": (top,)}[scale]
        bits = default if static is None else tuple(static)
        # the authors' CIFAR sweeps keep 8-bit gradients also at q_max = 6
        q_grad = 8 if preset == "authors" and r.dataset.startswith("cifar") else None
        for arm in (*schedules, *(f"static {b}" for b in bits)):
            for seed in r.seeds if seeds is None else seeds:
                specs.append(run_spec(r, arm, q_max=top, seed=seed, scale=scale, preset=preset, q_grad=q_grad))
    return specs


def image_cifar(
    dataset: str = "cifar10", model: str = "resnet74", scale: str = "paper", **choices: Any
) -> list[RunSpec]:
    """Figure 3, CIFAR-10/100: 10 schedules + static, q_max 6 and 8, 3 seeds = 66 runs of 64,000 steps per model.

    Models: resnet74, resnet152, mobilenetv2. A GPU is needed: on one CPU core a ResNet-74 run takes more than a day.
    Choices as for ``image``. Command: ``papermill notebooks/03_image_classification.ipynb runs/03.ipynb -p scale
    paper -p dataset cifar10 -p model resnet74``.

    Paper: section 4.2, figure 3.
    """
    return image(scale, dataset, model, **choices)


def image_imagenet(model: str = "resnet18", scale: str = "paper", **choices: Any) -> list[RunSpec]:
    """Figure 3, ImageNet: 10 schedules + static, q_max 6 and 8, 3 seeds = 66 runs of 90 epochs per model.

    Models: resnet18, resnet34. Command: as for ``image_cifar`` with ``-p dataset imagenet -p model resnet18``.

    Paper: section 4.2, figure 3.
    """
    return image(scale, "imagenet", model, **choices)


GRIDS: dict[str, Callable[..., list[RunSpec]]] = {
    "image": image,
    "image_cifar": image_cifar,
    "image_imagenet": image_imagenet,
}
