"""Batches of images: a pure function of (seed, step), from memory or from disk, and the order of evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cpt_core.checks import library
from cpt_lab.data.common import Stream, epoch_order, generator_of, send
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import IMAGENET_MEAN, IMAGENET_STD, Batch, ImageData, Split
from cpt_lab.data.loading import loader
from cpt_lab.experiments.image import ImageRecipe

EVALUATION_BATCH = 250  # images from disk


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
            self._epoch, self._order = epoch, send(epoch_order(len(self.labels), self.seed, epoch), self.device)
        index = self._order[position * self.batch : (position + 1) * self.batch]
        images = self._crop_and_flip(index, generator_of(self.seed, step, Stream.AUGMENT))
        return self.normalize(images), self.labels[index]

    def _crop_and_flip(self, index: Tensor, generator: torch.Generator) -> Tensor:
        n = len(index)
        drawn = torch.zeros(3, n, dtype=torch.int64)  # row and column of the window, whether it is mirrored
        if self.pad:
            drawn[:2] = torch.randint(0, 2 * self.pad + 1, (2, n), generator=generator)
        if self.flip:
            drawn[2] = torch.rand(n, generator=generator) < 0.5
        row, column, mirrored = send(drawn, self.device)
        if self.pad:
            # every position of the window as a view, then one gather: an offset of its own for each image
            windows = self.images.unfold(2, self.size, 1).unfold(3, self.size, 1)
            images = windows[index, :, row, column]
        else:
            images = self.images[index]
        if self.flip:
            images = torch.where(mirrored.bool()[:, None, None, None], images.flip(-1), images)
        return images

    def iterate(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        step = start
        while True:
            yield self(step)
            step += 1


class _Normalize:
    """Pixels 0..255 as uint8 -> float32 of mean 0, on the device."""

    def __init__(self, data: ImageData, device: torch.device) -> None:
        self.mean = send(255 * torch.tensor(data.mean).view(1, -1, 1, 1), device)
        self.std = send(255 * torch.tensor(data.std).view(1, -1, 1, 1), device)

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.std)


class _NormalizeFiles:
    """The same for images from disk, rounded as torchvision rounds it."""

    def __init__(self, device: torch.device) -> None:
        self.mean, self.std = (send(torch.tensor(x).view(-1, 1, 1), device) for x in (IMAGENET_MEAN, IMAGENET_STD))

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().mul_(1 / 255).sub_(self.mean).div_(self.std)


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


def bytes_read(recipe: ImageRecipe) -> int:
    """Return how many bytes of images lie in a batch of training and one of evaluation."""
    return 3 * recipe.size**2 * (recipe.batch + EVALUATION_BATCH)


class FileBatches:
    """Batches of images read from disk by worker processes; same contract as ``ArrayBatches``."""

    def __init__(self, split: Any, recipe: ImageRecipe, seed: int, device: torch.device, workers: int) -> None:
        """Prepare the random transform: resized crop and flip, as for ImageNet."""
        v2 = library("torchvision.transforms.v2", "vision")
        steps: list[Any] = [v2.RandomResizedCrop(recipe.size, antialias=True)]
        if recipe.flip:
            steps.append(v2.RandomHorizontalFlip())
        self.data = _Seeded(split, v2.Compose([*steps, v2.PILToTensor()]), seed)
        self.seed, self.batch, self.device, self.workers = seed, recipe.batch, device, workers
        self.normalize = _NormalizeFiles(device)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; the last may be smaller and is not dropped."""
        return math.ceil(len(self.data) / self.batch)

    def iterate(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        read = loader(self.data, self.device, self.workers, batch_sampler=self._keys(start))
        return map(self._ready, read)

    def _ready(self, read: Batch) -> Batch:
        images, labels = (send(x, self.device) for x in read)
        return self.normalize(images), labels

    def _keys(self, start: int) -> Iterator[list[tuple[int, int]]]:
        first, position = divmod(start, self.steps_per_epoch)
        for epoch in itertools.count(first):  # one loader for all of them: workers start once
            order = epoch_order(len(self.data), self.seed, epoch).tolist()
            keys = [(epoch, i) for i in order[position * self.batch :]]
            yield from (keys[i : i + self.batch] for i in range(0, len(keys), self.batch))
            position = 0


class _Test(Dataset):
    def __init__(self, files: Any, size: int) -> None:
        v2 = library("torchvision.transforms.v2", "vision")
        self.files = files
        self.transform = v2.Compose(
            [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
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
            yield normalize(send(part.images, device)), send(part.labels, device)
    else:
        scale = _NormalizeFiles(device)
        for images, labels in loader(_Test(split, size), device, workers, batch_size=EVALUATION_BATCH):
            yield scale(send(images, device)), send(labels, device)
