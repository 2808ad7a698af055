"""Batches of pictures with boxes, of like shape: a pure function of (seed, step)."""

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
from cpt_lab.data.image_batches import normalizer
from cpt_lab.data.loading import make_loader, to_device
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.detection import DetectionRecipe

CPU = torch.device("cpu")
SIDE_MULTIPLE = 32  # sides of a padded batch


@dataclass(frozen=True)
class Batch:
    """Pictures made ready for a model, and their objects."""

    images: Tensor  # float32 (N, 3, H, W), normalised, padded with zeros to multiples of 32; as they are read, uint8
    # of every image, boxes float32 (n, 4) in pixels of ``images`` and labels int64 (n,)
    targets: list[dict[str, Tensor]]
    sizes: list[tuple[int, int]]  # height and width of every image without its padding
    originals: list[AnnotatedImage]  # the pictures they were made from

    def pin_memory(self) -> Self:
        """Return it in memory from which a GPU copies while it computes; torch's loader calls this."""
        pinned = [
            {name: t.pin_memory() for name, t in target.items()}
            for target in self.targets
        ]
        return replace(self, images=self.images.pin_memory(), targets=pinned)


class _ImageGroups(Dataset):
    """Groups of pictures as they are read: resized, perhaps mirrored, padded. Keys: (epoch, group)."""

    def __init__(
        self,
        pictures: Sequence[AnnotatedImage],
        recipe: DetectionRecipe,
        seed: int | None,
    ) -> None:
        self.pictures, self.recipe, self.seed = pictures, recipe, seed
        self.groups = aspect_groups(pictures, recipe.batch)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, group = key
        images, targets = zip(
            *(self._item(index, epoch) for index in self.groups[group]), strict=True
        )
        sizes = [(i.shape[-2], i.shape[-1]) for i in images]
        height, width = (
            SIDE_MULTIPLE * math.ceil(max(s) / SIDE_MULTIPLE)
            for s in zip(*sizes, strict=True)
        )
        padded = [
            v2.functional.pad(i, [0, 0, width - w, height - h])
            for i, (h, w) in zip(images, sizes, strict=True)
        ]
        return Batch(
            torch.stack(padded),
            list(targets),
            sizes,
            [self.pictures[i] for i in self.groups[group]],
        )

    def _item(self, index: int, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        picture = self.pictures[index]
        keep = ~picture.difficult
        image = tv_tensors.Image(picture.read())
        found = torch.from_numpy(picture.boxes[keep])
        boxes = tv_tensors.BoundingBoxes(found, format="XYXY", canvas_size=picture.size)
        sized = v2.Resize(
            self.recipe.size, max_size=self.recipe.max_size, antialias=True
        )
        if (
            self.seed is not None
            and self.recipe.flip
            and _draws_flip(self.seed, epoch, index)
        ):
            image, boxes = (
                v2.functional.horizontal_flip(image),
                v2.functional.horizontal_flip(boxes),
            )
        image, boxes = sized(image, boxes)
        return image.as_subclass(Tensor), {
            "boxes": boxes.as_subclass(Tensor),
            "labels": torch.from_numpy(picture.labels[keep]),
        }


def _draws_flip(*numbers: int) -> bool:
    return bool(
        torch.rand((), generator=seeded_generator(*numbers, Stream.IMAGE)) < 0.5
    )


def aspect_groups(pictures: Sequence[AnnotatedImage], batch: int) -> list[list[int]]:
    """Return groups of pictures of like shape, so that little padding is needed; the last may be smaller."""
    order = sorted(
        range(len(pictures)), key=lambda i: pictures[i].size[1] / pictures[i].size[0]
    )
    return [order[i : i + batch] for i in range(0, len(order), batch)]


def batches(
    pictures: Sequence[AnnotatedImage],
    recipe: DetectionRecipe,
    seed: int,
    start: int,
    workers: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """Yield training batches on the device from step ``start`` on, without end: a pure function of (seed, step).

    The groups are the same in every epoch, their order is not. Files are read by worker processes.
    """
    data = _ImageGroups(pictures, recipe, seed)
    return _load_batches(
        data, (key for (key,) in batch_keys(len(data), 1, seed, start)), workers, device
    )


def evaluation_batches(
    pictures: Sequence[AnnotatedImage],
    recipe: DetectionRecipe,
    workers: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """Yield a split once, without mirroring, on the device."""
    data = _ImageGroups(pictures, recipe, None)
    return _load_batches(
        data, ((0, group) for group in range(len(data))), workers, device
    )


def batch_bytes(recipe: DetectionRecipe) -> int:
    """Return how many bytes of pictures may lie in a batch of training and one of evaluation."""
    return (
        2
        * recipe.batch
        * 3
        * (SIDE_MULTIPLE * math.ceil(recipe.max_size / SIDE_MULTIPLE)) ** 2
    )


def _load_batches(
    data: _ImageGroups,
    keys: Iterator[tuple[int, int]],
    workers: int,
    device: torch.device,
) -> Iterator[Batch]:
    normalize = normalizer(device)

    def ready(batch: Batch) -> Batch:
        images = normalize(to_device(batch.images, device).float().div_(255))
        for image, (height, width) in zip(images, batch.sizes, strict=True):
            image[:, height:].zero_()
            image[:, :, width:].zero_()
        targets = [
            {name: to_device(t, device) for name, t in target.items()}
            for target in batch.targets
        ]
        return replace(batch, images=images, targets=targets)

    return map(ready, make_loader(data, device, workers, sampler=keys, batch_size=None))
