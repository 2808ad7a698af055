"""Image classification on digits, CIFAR-10/100, ImageNet and the user's own images.  Paper: section 4.2."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpt_core.models import MODELS
from cpt_extras.optional_libraries import explain_missing_extra
from cpt_lab.data.image_batches import (
    array_batches,
    batch_bytes,
    evaluation_batches,
    file_batches,
)
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import Batch, load_images, random_images
from cpt_lab.data.loading import load_once, reader_count
from cpt_lab.experiments.image import ImageRecipe
from cpt_lab.experiments.schema import CYCLIC_RULES
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    accuracy_and_loss,
    constant,
    cosine,
    cyclic,
    make_optimizer,
    milestones,
    warmup_stable_decay,
)
from cpt_lab.tasks.transformer_models import ImageTransformer


class ImageTask:
    """SGD with a step-wise learning rate, cross entropy, accuracy.

    Paper: section 4.2.
    """

    cost_batches = 1
    fixed_shape = True

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe, self.seed, self.device = (
            cast(ImageRecipe, spec.recipe),
            spec.seed,
            device,
        )
        limits = ("size", "crop", "train_images", "valid_images", "test_images")
        self.data = (
            random_images(self.recipe)
            if stand_in
            else load_once(load_images, self.recipe, *limits)
        )
        # Random images lie in memory, and a resized crop exists only for images read from disk.
        in_memory = isinstance(self.data.train, ArrayImages)
        if in_memory and self.recipe.crop == "resized":
            self.recipe = replace(self.recipe, crop=0)
        self.workers = 0 if in_memory else reader_count(batch_bytes(self.recipe))
        self.title = f"{self.recipe.model} on {self.data.title}"

    def build_model(self) -> nn.Module:
        """Build the recipe's model."""
        shape = self.data.channels, self.recipe.size, self.data.classes
        if self.recipe.model == "vit":
            with explain_missing_extra("text"):
                return ImageTransformer(*shape).to(self.device)
        with explain_missing_extra("vision"):
            return MODELS[self.recipe.model](*shape).to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield augmented training batches from step ``start`` on."""

        def whole_batch(batch: Any) -> Any:
            return batch

        return self.shared_batches(start, whole_batch)

    def shared_batches(
        self, start: int, share: Callable[[Any], Any]
    ) -> Iterator[Batch]:
        """Yield this process's part of every batch; only these images are read from disk."""
        if isinstance(self.data.train, ArrayImages):
            batches = array_batches(
                self.data.train, self.data, self.recipe, self.seed, self.device, start
            )
            return (cast(Batch, tuple(map(share, batch))) for batch in batches)
        return file_batches(
            self.data.train,
            self.recipe,
            self.seed,
            self.device,
            self.workers,
            start,
            share,
        )

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the mean cross entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels), None

    def inputs(self, batch: Batch) -> tuple[Tensor]:
        """Return the images."""
        return batch[:1]

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return accuracy (share of images, 0..1) and mean cross entropy of every split that is not empty."""
        metrics = {}
        for name, part in (("valid", self.data.valid), ("test", self.data.test)):
            if count := len(part):  # type: ignore[arg-type]
                batches = evaluation_batches(
                    part, self.data, self.recipe.size, self.device, self.workers
                )
                metrics[name] = accuracy_and_loss(
                    ((model(images), labels) for images, labels in batches), count
                )
        return metrics

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return the optimizer and the learning rate by the recipe's rule: "milestones" is times 0.1 at each."""
        r = self.recipe
        optimizer = make_optimizer(
            torch.optim.SGD, model.parameters(), r, momentum=r.momentum
        )
        if r.lr_rule in CYCLIC_RULES:
            rising = r.lr_rule == "cyclic_rising"
            return optimizer, cyclic(r.lr, r.n_cycles, r.steps, rising)
        if r.lr_rule == "wsd":
            return optimizer, warmup_stable_decay(r.lr, r.steps)
        if r.lr_rule == "constant":
            return optimizer, constant(r.lr)
        if r.lr_rule == "cosine":
            return optimizer, cosine(r.lr, 0.0, r.steps)
        return optimizer, milestones(r.lr, r.milestones, r.steps)
