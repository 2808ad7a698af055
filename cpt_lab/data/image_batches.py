"""Batches of images: a pure function of (seed, step), from memory or from disk, and the order of evaluation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import IMAGENET_MEAN, IMAGENET_STD, Batch, ImageData, Split
from cpt_lab.data.loading import make_loader, to_device
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.image import ImageRecipe

EVALUATION_IMAGES = 250  # images from disk


def array_batches(
    split: ArrayImages,
    data: ImageData,
    recipe: ImageRecipe,
    seed: int,
    device: torch.device,
    start: int,
) -> Iterator[Batch]:
    """Yield batches of images in memory, augmented on the device, from step ``start`` on, without end.

    A batch is a pure function of (seed, step); the last one of an epoch may be smaller. The device is where the images
    are kept, too; ``data`` has their mean and standard deviation.
    """
    pad, size = int(recipe.crop), split.images.shape[-1]
    images = torch.nn.functional.pad(split.images, (pad,) * 4).to(device)
    # every position of the window as a view, then one gather: an offset of its own for each image
    windows = images.unfold(2, size, 1).unfold(3, size, 1)
    labels, normalize = (
        split.labels.to(device),
        normalizer(device, data.mean, data.std, 255),
    )
    for step, keys in enumerate(
        batch_keys(len(split), recipe.batch, seed, start), start
    ):
        generator, n = seeded_generator(seed, step, Stream.AUGMENT), len(keys)
        drawn = torch.zeros(
            4, n, dtype=torch.int64
        )  # image, row and column of the window, whether it is mirrored
        drawn[0] = torch.tensor([number for _, number in keys])
        if pad:
            drawn[1:3] = torch.randint(0, 2 * pad + 1, (2, n), generator=generator)
        if recipe.flip:
            drawn[3] = torch.rand(n, generator=generator) < 0.5
        index, row, column, mirrored = to_device(drawn, device)
        made = windows[index, :, row, column]
        if recipe.flip:
            made = torch.where(
                mirrored.bool()[:, None, None, None], made.flip(-1), made
            )
        yield normalize(made.float()), labels[index]


def normalizer(
    device: torch.device,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    white: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Return what normalises pixels from 0 to ``white``, float32 (N, C, H, W) on the device, in place."""
    shift, scale = (
        to_device((white * torch.tensor(x)).view(-1, 1, 1), device) for x in (mean, std)
    )
    return lambda images: images.sub_(shift).div_(scale)


class _TransformedFiles(Dataset):
    """Images from disk, transformed; what is random depends on (seed, epoch, index) alone. Keys: (epoch, index)."""

    def __init__(self, files: Any, steps: list[Any], seed: int = 0) -> None:
        v2 = import_optional("torchvision.transforms.v2", "vision")
        self.files, self.transform, self.seed = (
            files,
            v2.Compose([*steps, v2.PILToTensor()]),
            seed,
        )

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        image, label = self.files[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                seeded_generator(self.seed, epoch, index, Stream.IMAGE).initial_seed()
            )
            return self.transform(image.convert("RGB")), label


def batch_bytes(recipe: ImageRecipe) -> int:
    """Return how many bytes of images lie in a batch of training and one of evaluation."""
    return 3 * recipe.size**2 * (recipe.batch + EVALUATION_IMAGES)


def training_files(split: Any, recipe: ImageRecipe, seed: int) -> _TransformedFiles:
    """Return images with the random transform of training: resized crop and flip, as for ImageNet."""
    v2 = import_optional("torchvision.transforms.v2", "vision")
    flip = [v2.RandomHorizontalFlip()] if recipe.flip else []
    return _TransformedFiles(
        split, [v2.RandomResizedCrop(recipe.size, antialias=True), *flip], seed
    )


def file_batches(
    split: Any,
    recipe: ImageRecipe,
    seed: int,
    device: torch.device,
    workers: int,
    start: int,
    share: Callable[[list[Any]], list[Any]] = list,
) -> Iterator[Batch]:
    """Yield batches of images read from disk by worker processes, a share of each; else as ``array_batches``."""
    keys = map(share, batch_keys(len(split), recipe.batch, seed, start))
    return _load_batches(training_files(split, recipe, seed), keys, device, workers)


def _load_batches(
    data: _TransformedFiles,
    keys: Iterable[list[tuple[int, int]]],
    device: torch.device,
    workers: int,
) -> Iterator[Batch]:
    normalize = normalizer(device)
    for images, labels in make_loader(data, device, workers, batch_sampler=keys):
        yield (
            normalize(to_device(images, device).float().mul_(1 / 255)),
            to_device(labels, device),
        )


def evaluation_batches(
    split: Split, data: ImageData, size: int, device: torch.device, workers: int
) -> Iterator[Batch]:
    """Yield a split once, in order, without augmentation."""
    if isinstance(split, ArrayImages):
        normalize = normalizer(device, data.mean, data.std, 255)
        for part in (
            split[start : start + 1000] for start in range(0, len(split), 1000)
        ):
            yield (
                normalize(to_device(part.images, device).float()),
                to_device(part.labels, device),
            )
    else:
        v2 = import_optional("torchvision.transforms.v2", "vision")
        files = _TransformedFiles(
            split, [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)]
        )
        keys = [(0, index) for index in range(len(files.files))]
        batches = [
            keys[i : i + EVALUATION_IMAGES]
            for i in range(0, len(keys), EVALUATION_IMAGES)
        ]
        yield from _load_batches(files, batches, device, workers)
