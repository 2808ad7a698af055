"""Batches of images: a pure function of (seed, step), from memory or from disk, and the order of evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cpt_core.checks import library
from cpt_lab.data.common import Stream, batch_keys, epoch_order, generator_of, send
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
        self.normalize = _of_arrays(data, device)
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
        return self.normalize(images.float()), self.labels[index]

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
        return map(self, itertools.count(start))


class Normalize:
    """Pixels, float32 (N, C, H, W) on the device -> mean 0, in place."""

    def __init__(self, mean: Tensor, std: Tensor, device: torch.device) -> None:
        """Take mean and standard deviation of the pixels, (C,)."""
        self.mean, self.std = (send(x.view(-1, 1, 1), device) for x in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images."""
        return images.sub_(self.mean).div_(self.std)


def _of_arrays(data: ImageData, device: torch.device) -> Normalize:
    return Normalize(255 * torch.tensor(data.mean), 255 * torch.tensor(data.std), device)


def of_files(device: torch.device) -> Normalize:
    """Return what normalises pixels from 0 to 1, as torchvision does."""
    return Normalize(torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD), device)


class _Files(Dataset):
    """Images from disk, transformed; what is random depends on (seed, epoch, index) alone. Keys: (epoch, index)."""

    def __init__(self, files: Any, steps: list[Any], seed: int = 0) -> None:
        v2 = library("torchvision.transforms.v2", "vision")
        self.files, self.transform, self.seed = files, v2.Compose([*steps, v2.PILToTensor()]), seed

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
    """Batches of images read from disk by worker processes; same contract as ``ArrayBatches.iterate``."""

    def __init__(self, split: Any, recipe: ImageRecipe, seed: int, device: torch.device, workers: int) -> None:
        """Prepare the random transform: resized crop and flip, as for ImageNet."""
        v2 = library("torchvision.transforms.v2", "vision")
        flip = [v2.RandomHorizontalFlip()] if recipe.flip else []
        self.data = _Files(split, [v2.RandomResizedCrop(recipe.size, antialias=True), *flip], seed)
        self.seed, self.batch, self.device, self.workers = seed, recipe.batch, device, workers

    def iterate(self, start: int) -> Iterator[Batch]:
        """Yield the batches from step ``start`` on, without end."""
        keys = batch_keys(len(self.data.files), self.batch, self.seed, start)
        return _read(self.data, keys, self.device, self.workers)


def _read(data: _Files, keys: Iterable[list[tuple[int, int]]], device: torch.device, workers: int) -> Iterator[Batch]:
    normalize = of_files(device)
    for images, labels in loader(data, device, workers, batch_sampler=keys):
        yield normalize(send(images, device).float().mul_(1 / 255)), send(labels, device)


def evaluation_batches(split: Split, data: ImageData, size: int, device: torch.device, workers: int) -> Iterator[Batch]:
    """Yield a split once, in order, without augmentation."""
    if isinstance(split, ArrayImages):
        normalize = _of_arrays(data, device)
        for part in (split[start : start + 1000] for start in range(0, len(split), 1000)):
            yield normalize(send(part.images, device).float()), send(part.labels, device)
    else:
        v2 = library("torchvision.transforms.v2", "vision")
        files = _Files(split, [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)])
        keys = [(0, index) for index in range(len(files.files))]
        batches = [keys[i : i + EVALUATION_BATCH] for i in range(0, len(keys), EVALUATION_BATCH)]
        yield from _read(files, batches, device, workers)
