"""Batches of images as a pure function of (seed, step), from memory or from disk, and the batches of an evaluation.

``array_batches`` augments images in memory on the device; ``file_batches`` reads and augments files in worker
processes; ``evaluation_batches`` yields a split in order.
"""

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

EVALUATION_IMAGES = 250  # images from disk in a batch of an evaluation


def array_batches(
    split: ArrayImages,
    data: ImageData,
    recipe: ImageRecipe,
    seed: int,
    device: torch.device,
    start: int,
) -> Iterator[Batch]:
    """Yield batches of images in memory, augmented on the device, from step ``start`` on, without end.

    A batch is a pure function of (seed, step); the last one of an epoch may be smaller. The images stay on the device;
    ``data`` has their mean and standard deviation.
    """
    pad, size = int(recipe.crop), split.images.shape[-1]
    images = torch.nn.functional.pad(split.images, (pad,) * 4).to(device)
    # Every crop position is a view, so one gather gives each image its own offset.
    windows = images.unfold(2, size, 1).unfold(3, size, 1)
    labels = split.labels.to(device)
    normalize = make_normalizer(device, data.mean, data.std, 255)
    for step, keys in enumerate(
        batch_keys(len(split), recipe.batch, seed, start), start
    ):
        generator, n = seeded_generator(seed, step, Stream.AUGMENT), len(keys)
        # Rows: image, row and column of the crop, whether it is mirrored. One tensor needs one copy to the device.
        draws = torch.zeros(4, n, dtype=torch.int64)
        draws[0] = torch.tensor([index for _, index in keys])
        if pad:
            draws[1:3] = torch.randint(0, 2 * pad + 1, (2, n), generator=generator)
        if recipe.flip:
            draws[3] = torch.rand(n, generator=generator) < 0.5
        index, row, column, mirrored = to_device(draws, device)
        crops = windows[index, :, row, column]
        if recipe.flip:
            crops = torch.where(
                mirrored.bool()[:, None, None, None], crops.flip(-1), crops
            )
        yield normalize(crops.float()), labels[index]


def make_normalizer(
    device: torch.device,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    white: int = 1,
) -> Callable[[Tensor], Tensor]:
    """Return a function that normalises pixels in place, float32 (N, C, H, W) on the device.

    Args:
        device: device of the images.
        mean: mean of every channel, for pixels from 0 to 1.
        std: standard deviation of every channel.
        white: largest value of a pixel.
    """
    shift, scale = (
        to_device((white * torch.tensor(x)).view(-1, 1, 1), device) for x in (mean, std)
    )

    def normalize(images: Tensor) -> Tensor:
        return images.sub_(shift).div_(scale)

    return normalize


class _TransformedFiles(Dataset):
    """Transformed images from disk by key (epoch, index); random transforms depend on (seed, epoch, index) alone."""

    def __init__(self, files: Any, transforms: list[Any], seed: int = 0) -> None:
        v2 = import_optional("torchvision.transforms.v2", "vision")
        self.files, self.seed = files, seed
        self.transform = v2.Compose([*transforms, v2.PILToTensor()])

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        image, label = self.files[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                seeded_generator(self.seed, epoch, index, Stream.IMAGE).initial_seed()
            )
            return self.transform(image.convert("RGB")), label


def batch_bytes(recipe: ImageRecipe) -> int:
    """Return the size in bytes of one training batch and one evaluation batch of images together."""
    return 3 * recipe.size**2 * (recipe.batch + EVALUATION_IMAGES)


def training_files(split: Any, recipe: ImageRecipe, seed: int) -> _TransformedFiles:
    """Return images with the random transforms of training: the recipe's crop and flip."""
    v2 = import_optional("torchvision.transforms.v2", "vision")
    if recipe.crop == "resized":
        crop = [v2.RandomResizedCrop(recipe.size, antialias=True)]
    else:
        padded_crop = v2.RandomCrop(recipe.size, padding=int(recipe.crop))
        crop = [*_centre_crop(recipe.size), padded_crop]
    flip = [v2.RandomHorizontalFlip()] if recipe.flip else []
    return _TransformedFiles(split, [*crop, *flip], seed)


def _centre_crop(size: int) -> list[Any]:
    """Return the transforms of images from disk that are tested on."""
    v2 = import_optional("torchvision.transforms.v2", "vision")
    return [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)]


def file_batches(
    split: Any,
    recipe: ImageRecipe,
    seed: int,
    device: torch.device,
    workers: int,
    start: int,
    share: Callable[[list[Any]], list[Any]] = list,
) -> Iterator[Batch]:
    """Yield training batches of images that worker processes read from disk, from step ``start`` on, without end.

    A batch is a pure function of (seed, step).

    Args:
        split: images on disk.
        recipe: recipe of the run.
        seed: seed of order and augmentation.
        device: device to which batches go.
        workers: number of worker processes; 0 reads in this process.
        start: first step.
        share: returns this process's part of the keys of a batch.
    """
    keys = map(share, batch_keys(len(split), recipe.batch, seed, start))
    return _load_batches(training_files(split, recipe, seed), keys, device, workers)


def _load_batches(
    data: _TransformedFiles,
    keys: Iterable[list[tuple[int, int]]],
    device: torch.device,
    workers: int,
) -> Iterator[Batch]:
    normalize = make_normalizer(device)
    for images, labels in make_loader(data, device, workers, batch_sampler=keys):
        pixels = to_device(images, device).float().mul_(1 / 255)
        yield normalize(pixels), to_device(labels, device)


def evaluation_batches(
    split: Split, data: ImageData, size: int, device: torch.device, workers: int
) -> Iterator[Batch]:
    """Yield a split once, in order, without augmentation."""
    if isinstance(split, ArrayImages):
        normalize = make_normalizer(device, data.mean, data.std, 255)
        for start in range(0, len(split), 1000):
            part = split[start : start + 1000]
            images = to_device(part.images, device).float()
            yield normalize(images), to_device(part.labels, device)
        return

    files = _TransformedFiles(split, _centre_crop(size))
    keys = [(0, index) for index in range(len(files.files))]
    batches = [
        keys[i : i + EVALUATION_IMAGES] for i in range(0, len(keys), EVALUATION_IMAGES)
    ]
    yield from _load_batches(files, batches, device, workers)
