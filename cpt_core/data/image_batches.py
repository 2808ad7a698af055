"""Batches of images: a pure function of (seed, step), from memory or from disk, and the order of evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cpt_core.checks import library
from cpt_core.data.common import Stream, epoch_order, generator_of
from cpt_core.data.image_readers import ArrayImages
from cpt_core.data.images import IMAGENET_MEAN, IMAGENET_STD, Batch, ImageData, Split
from cpt_core.experiments.image import ImageRecipe


class ArrayBatches:
    """Batches of images in memory, augmented on ``device``: a pure function of (seed, step).

    Args:
        split: the images.
        data: the data set they belong to (for mean and standard deviation).
        recipe: batch size and augmentation.
        seed: of order and augmentation.
        device: where the images are kept and the batches made.
    """

    def __init__(
        self, split: ArrayImages, data: ImageData, recipe: ImageRecipe, seed: int, device: torch.device
    ) -> None:
        """Pad the images once and move them to the device."""
        self.seed, self.batch, self.flip, self.device = seed, recipe.batch, recipe.flip, device
        self.pad = int(recipe.crop)
        self.images = torch.nn.functional.pad(split.images, (self.pad,) * 4).to(device)
        self.labels = split.labels.to(device)
        self.size = split.images.shape[-1]
        self.normalize = _Normalize(data, device)
        self._epoch = -1
        self._order = torch.empty(0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; the last may be smaller and is not dropped."""
        return math.ceil(len(self.labels) / self.batch)

    def __call__(self, step: int) -> Batch:
        """Return the batch of an optimizer step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(len(self.labels), self.seed, epoch).to(self.device)
        index = self._order[position * self.batch : (position + 1) * self.batch]
        images = self._crop_and_flip(index, generator_of(self.seed, step, Stream.AUGMENT))
        return self.normalize(images), self.labels[index]

    def _crop_and_flip(self, index: Tensor, generator: torch.Generator) -> Tensor:
        n = len(index)
        if self.pad:
            # every position of the window as a view, then one gather: an offset of its own for each image
            windows = self.images.unfold(2, self.size, 1).unfold(3, self.size, 1)
            offsets = torch.randint(0, 2 * self.pad + 1, (2, n), generator=generator).to(self.device)
            images = windows[index, :, offsets[0], offsets[1]]
        else:
            images = self.images[index]
        if self.flip:
            flip = torch.rand(n, generator=generator).to(self.device) < 0.5
            images = torch.where(flip[:, None, None, None], images.flip(-1), images)
        return images

    def iterate(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        step = start
        while True:
            yield self(step)
            step += 1


class _Normalize:
    def __init__(self, data: ImageData, device: torch.device) -> None:
        self.mean = 255 * torch.tensor(data.mean, device=device).view(1, -1, 1, 1)
        self.std = 255 * torch.tensor(data.std, device=device).view(1, -1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std)


class _Seeded(Dataset):
    """Images from disk with a random transform whose randomness depends on (seed, epoch, index) alone."""

    def __init__(self, files: Any, transform: Callable[[Any], Tensor], seed: int) -> None:
        self.files, self.transform, self.seed = files, transform, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        image, label = self.files[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_of(self.seed, epoch, index, Stream.IMAGE).initial_seed())
            return self.transform(image.convert("RGB")), label


class FileBatches:
    """Batches of images read from disk by worker processes; same contract as ``ArrayBatches``."""

    def __init__(self, split: Any, recipe: ImageRecipe, seed: int, device: torch.device, workers: int) -> None:
        """Prepare the random transform: resized crop and flip, as for ImageNet."""
        v2 = library("torchvision.transforms.v2", "vision")
        steps: list[Any] = [v2.RandomResizedCrop(recipe.size, antialias=True)]
        if recipe.flip:
            steps.append(v2.RandomHorizontalFlip())
        self.data = _Seeded(split, v2.Compose([*steps, *_to_normalized()]), seed)
        self.seed, self.batch, self.device, self.workers = seed, recipe.batch, device, workers

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; the last may be smaller and is not dropped."""
        return math.ceil(len(self.data) / self.batch)

    def iterate(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        epoch, position = divmod(start, self.steps_per_epoch)
        while True:
            order = epoch_order(len(self.data), self.seed, epoch).tolist()
            keys = [(epoch, i) for i in order[position * self.batch :]]
            batches = [keys[i : i + self.batch] for i in range(0, len(keys), self.batch)]
            loader = DataLoader(self.data, batch_sampler=batches, num_workers=self.workers)
            for images, labels in loader:
                yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            epoch, position = epoch + 1, 0


def _to_normalized() -> list[Any]:
    v2 = library("torchvision.transforms.v2", "vision")
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


class _Test(Dataset):
    def __init__(self, files: Any, size: int) -> None:
        v2 = library("torchvision.transforms.v2", "vision")
        self.files = files
        self.transform = v2.Compose(
            [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size), *_to_normalized()]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.files[index]
        return self.transform(image.convert("RGB")), label


def evaluation_batches(split: Split, data: ImageData, size: int, device: torch.device, workers: int) -> Iterator[Batch]:
    """Yield a split once, in order, without augmentation."""
    if isinstance(split, ArrayImages):
        normalize = _Normalize(data, device)
        for start in range(0, len(split), 1000):
            part = split[start : start + 1000]
            yield normalize(part.images.to(device)), part.labels.to(device)
    else:
        for images, labels in DataLoader(_Test(split, size), batch_size=250, num_workers=workers):
            yield images.to(device), labels.to(device)
