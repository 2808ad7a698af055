"""Batches of images with boxes, grouped by aspect ratio, as a pure function of (seed, step).

``batches`` yields training batches, ``evaluation_batches`` a split once. Images are read and resized by worker
processes, and normalised on the device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from cpt_lab.data.detection import AnnotatedImage
from cpt_lab.data.image_batches import make_normalizer
from cpt_lab.data.loading import make_loader, to_device
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.detection import DetectionRecipe

CPU = torch.device("cpu")
SIDE_MULTIPLE = 32  # sides of a padded batch are multiples of this number of pixels


@dataclass(frozen=True)
class Batch:
    """Images of a batch, and their objects.

    Attributes:
        images: float32 (N, 3, H, W), normalised and padded with zeros to multiples of 32; uint8 when read by a worker.
        targets: of every image, boxes float32 (n, 4) in pixels of ``images`` and labels int64 (n,).
        sizes: height and width of every image without its padding.
        originals: images before resizing.
    """

    images: Tensor
    targets: list[dict[str, Tensor]]
    sizes: list[tuple[int, int]]
    originals: list[AnnotatedImage]

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory, for asynchronous copies to a GPU; torch's DataLoader calls this."""
        pinned_targets = []
        for target in self.targets:
            pinned_targets.append({name: t.pin_memory() for name, t in target.items()})
        return replace(self, images=self.images.pin_memory(), targets=pinned_targets)


class _ImageGroups(Dataset):
    """Groups of images by key (epoch, group): read, resized, flipped at random, and padded to one size.

    Args:
        images: images of a split.
        recipe: recipe of the run.
        seed: seed of the flips; None flips no image.
    """

    def __init__(
        self,
        images: Sequence[AnnotatedImage],
        recipe: DetectionRecipe,
        seed: int | None,
    ) -> None:
        self.images, self.recipe, self.seed = images, recipe, seed
        self.groups = aspect_groups(images, recipe.batch)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, group = key
        images, targets = [], []
        for index in self.groups[group]:
            image, target = self._read(index, epoch)
            images.append(image)
            targets.append(target)

        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        height = _round_up(max(height for height, _ in sizes))
        width = _round_up(max(width for _, width in sizes))
        padded = []
        for image, (image_height, image_width) in zip(images, sizes, strict=True):
            padding = [
                0,
                0,
                width - image_width,
                height - image_height,
            ]  # left, top, right, bottom
            padded.append(v2.functional.pad(image, padding))
        originals = [self.images[index] for index in self.groups[group]]
        return Batch(torch.stack(padded), targets, sizes, originals)

    def _read(self, index: int, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the resized pixels of an image, and its boxes and labels without difficult objects."""
        original = self.images[index]
        counts = ~original.difficult
        image = tv_tensors.Image(original.read())
        boxes = tv_tensors.BoundingBoxes(
            torch.from_numpy(original.boxes[counts]),
            format="XYXY",
            canvas_size=original.size,
        )
        resize = v2.Resize(
            self.recipe.size, max_size=self.recipe.max_size, antialias=True
        )
        if (
            self.seed is not None
            and self.recipe.flip
            and _draws_flip(self.seed, epoch, index)
        ):
            image = v2.functional.horizontal_flip(image)
            boxes = v2.functional.horizontal_flip(boxes)
        image, boxes = resize(image, boxes)
        target = {
            "boxes": boxes.as_subclass(Tensor),
            "labels": torch.from_numpy(original.labels[counts]),
        }
        return image.as_subclass(Tensor), target


def _round_up(side: int) -> int:
    """Return the next multiple of ``SIDE_MULTIPLE``."""
    return SIDE_MULTIPLE * math.ceil(side / SIDE_MULTIPLE)


def _draws_flip(*key: int) -> bool:
    """Return whether the image of a key (seed, epoch, index) is flipped: half of them are."""
    generator = seeded_generator(*key, Stream.IMAGE)
    return bool(torch.rand((), generator=generator) < 0.5)


def aspect_groups(images: Sequence[AnnotatedImage], batch: int) -> list[list[int]]:
    """Return groups of ``batch`` images with similar aspect ratio, to need little padding; the last may be smaller."""

    def aspect_ratio(index: int) -> float:
        height, width = images[index].size
        return width / height

    order = sorted(range(len(images)), key=aspect_ratio)
    return [order[i : i + batch] for i in range(0, len(order), batch)]


def batches(
    images: Sequence[AnnotatedImage],
    recipe: DetectionRecipe,
    seed: int,
    start: int,
    workers: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """Yield training batches on the device from step ``start`` on, without end: a pure function of (seed, step).

    Batches hold the same images in every epoch, in another order. Files are read by worker processes.
    """
    groups = _ImageGroups(images, recipe, seed)
    keys = (key for (key,) in batch_keys(len(groups), 1, seed, start))
    return _load_batches(groups, keys, workers, device)


def evaluation_batches(
    images: Sequence[AnnotatedImage],
    recipe: DetectionRecipe,
    workers: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """Yield a split once, without flips, on the device."""
    groups = _ImageGroups(images, recipe, None)
    keys = ((0, group) for group in range(len(groups)))
    return _load_batches(groups, keys, workers, device)


def batch_bytes(recipe: DetectionRecipe) -> int:
    """Return the largest size in bytes of one training batch and one evaluation batch of images together."""
    return 2 * recipe.batch * 3 * _round_up(recipe.max_size) ** 2


def _load_batches(
    groups: _ImageGroups,
    keys: Iterator[tuple[int, int]],
    workers: int,
    device: torch.device,
) -> Iterator[Batch]:
    normalize = make_normalizer(device)

    def to_normalized(batch: Batch) -> Batch:
        images = normalize(to_device(batch.images, device).float().div_(255))
        for image, (height, width) in zip(images, batch.sizes, strict=True):
            image[:, height:].zero_()
            image[:, :, width:].zero_()
        targets = []
        for target in batch.targets:
            targets.append({name: to_device(t, device) for name, t in target.items()})
        return replace(batch, images=images, targets=targets)

    return map(
        to_normalized,
        make_loader(groups, device, workers, sampler=keys, batch_size=None),
    )
