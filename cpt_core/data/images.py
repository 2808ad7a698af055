"""Images: embedded digits, torchvision's data sets, and your own; batches that a resumed run continues exactly.

Small images live in memory as one uint8 tensor and are augmented there, a batch at a time, on the device. Large ones
(ImageNet, folders at full size) are read from disk by worker processes. Either way a batch is a pure function of
(seed, step): the order of the data and its augmentation need no state.

Your own images, as ``dataset``:

- a folder with ``train/<class>/*.jpg`` and ``val/<class>/*.jpg`` (torchvision's ImageFolder layout);
- ``"train.npz,test.npz"``, or a folder with exactly one ``*train*.npz`` and one ``*test*.npz`` or ``*val*.npz``; each
  archive has ``labels`` (n,) and either ``data`` uint8 (n, H, W) or (n, H, W, C), or ``jpeg`` (all files, one after
  the other, uint8) with ``offsets`` (n + 1,).

A name without a slash is a known data set, so a folder in the data folder is written ``"my-images/"``.

Shapes: N images, C channels, H x W pixels.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from cpt_core.checks import library
from cpt_core.data.common import DataNotFoundError, generator_of, own_path
from cpt_core.experiments.image import EXPERIMENT, ImageRecipe
from cpt_core.experiments.recipe import is_own
from cpt_core.paths import command, data_dir

Batch = tuple[Tensor, Tensor]  # images float32 (N, C, H, W), normalised; labels int64 (N,)


SMALL = 64  # images up to this many pixels a side are kept in memory


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory: uint8 (N, C, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Return N."""
        return len(self.labels)

    def __getitem__(self, index: Any) -> ArrayImages:
        """Return a part."""
        return ArrayImages(self.images[index], self.labels[index])


Split = ArrayImages | Dataset


@dataclass(frozen=True)
class ImageData:
    """A data set, split three ways.

    Attributes:
        title: what the numbers are measured on, as figures must call it.
        classes: number of classes.
        channels: 1 or 3.
        mean, std: of the pixels divided by 255, per channel.
        train, valid, test: the splits; ``valid`` is empty when nothing is held out.
        checksum: of pixels and labels in memory, or of the list of files.
    """

    title: str
    classes: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    valid: Split
    test: Split
    checksum: str


def load_images(recipe: ImageRecipe) -> ImageData:
    """Load the data of a recipe, hold out its validation images and cut it to size.

    The held-out images and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when the files do not have the documented layout or there are too few images.
    """
    if recipe.size > SMALL:
        return _load_files(recipe)
    train, test, title, mean, std = _load_arrays(recipe.dataset, recipe.size)
    wanted = (recipe.train_images or 0) + recipe.valid_images
    if wanted > len(train) or recipe.valid_images >= len(train):
        raise ValueError(f"{recipe.dataset}: {wanted} training and validation images wanted, there are {len(train)}")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    valid, rest = train[order[: recipe.valid_images]], train[order[recipe.valid_images :]]
    train, test = rest[: recipe.train_images], test[: recipe.test_images]
    digest = hashlib.sha256()
    for split in (train, valid, test):
        digest.update(split.images.numpy().tobytes() + split.labels.numpy().tobytes())
    return ImageData(
        title=title,
        classes=int(max(train.labels.max(), test.labels.max())) + 1,
        channels=train.images.shape[1],
        mean=mean,
        std=std,
        train=train,
        valid=valid,
        test=test,
        checksum=digest.hexdigest()[:16],
    )


def random_images(recipe: ImageRecipe) -> ImageData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    One batch for training and one to evaluate on; images of one's own are loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named:
        return load_images(recipe)
    sizes = EXPERIMENT.named[recipe.dataset].sizes
    classes, channels = sizes["classes"], sizes["channels"]
    generator = generator_of(0)
    shape = (2 * recipe.batch, channels, recipe.size, recipe.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    split = ArrayImages(images, torch.randint(0, classes, (len(images),), generator=generator))
    return ImageData(
        title=f"random pixels for {recipe.dataset}",
        classes=classes,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        train=split[: recipe.batch],
        valid=split[:0],
        test=split[recipe.batch :],
        checksum="",
    )


Arrays = tuple[ArrayImages, ArrayImages, str, tuple[float, ...], tuple[float, ...]]  # train, test, title, mean, std


def _load_arrays(dataset: str, size: int) -> Arrays:
    EXPERIMENT.check_dataset(dataset)
    if not is_own(dataset) and dataset not in READERS:
        raise ValueError(f"{dataset} is read from disk, at sizes above {SMALL} pixels; got {size}")
    train, test, title, mean, std = READERS[dataset](dataset) if dataset in READERS else _own_arrays(dataset, size)
    if train.images.shape[-1] != size:
        title += f", {size} x {size}"
    resized = [ArrayImages(_resize(s.images, size), s.labels) for s in (train, test)]
    channels = resized[0].images.shape[1]
    return resized[0], resized[1], title, mean[:channels], std[:channels]


def _digits(name: str) -> Arrays:
    # 0..16 per pixel; scaled as if it were 0..255 so that mean 0 and std 16 / 255 give pixel / 16
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order].astype(np.uint8)).unsqueeze(1)
    both = ArrayImages(images, torch.from_numpy(digits.target[order].astype(np.int64)))
    return both[700:], both[:700], "scikit-learn digits, 8 x 8", (0.0,), (16 / 255,)


def _cifar_class(name: str) -> Any:
    return getattr(library("torchvision.datasets", "vision"), name.upper())


def _cifar(name: str) -> Arrays:
    try:
        parts = [_cifar_class(name)(data_dir(), train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        raise DataNotFoundError(
            f"{name} is not in {data_dir()} (or is damaged); get it with: {command(f'download {name}')}"
        ) from error
    train, test = (
        ArrayImages(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return train, test, EXPERIMENT.named[name].title, CIFAR_MEAN, CIFAR_STD


READERS: dict[str, Callable[[str], Arrays]] = {"digits": _digits, "cifar10": _cifar, "cifar100": _cifar}


def _own_arrays(dataset: str, size: int) -> Arrays:
    if "," in dataset:
        parts = [own_path(p) for p in dataset.split(",")]
        if len(parts) != 2:
            raise ValueError(f"two archives expected, 'train.npz,test.npz', got {dataset!r}")
        return _archive(parts[0]), _archive(parts[1]), f"own images ({parts[0].stem})", IMAGENET_MEAN, IMAGENET_STD
    folder = own_path(dataset)
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}; give a folder or 'train.npz,test.npz'")
    if (folder / "train").is_dir():
        train, test = (_folder_arrays(folder / _split_name(folder, part), size) for part in ("train", "val"))
        return train, test, f"own images ({folder.name})", IMAGENET_MEAN, IMAGENET_STD
    files = sorted(folder.glob("*.npz"))
    train_files = [f for f in files if "train" in f.name]
    test_files = [f for f in files if "train" not in f.name and ("test" in f.name or "val" in f.name)]
    if len(train_files) != 1 or len(test_files) != 1:
        names = ", ".join(f.name for f in files) or "none"
        raise ValueError(
            f"{folder} needs train/ and val/, or one *train*.npz and one *test*.npz or *val*.npz (archives there: "
            f"{names}); name two archives as 'train.npz,test.npz'"
        )
    train, test = _archive(train_files[0]), _archive(test_files[0])
    return train, test, f"own images ({folder.name})", IMAGENET_MEAN, IMAGENET_STD


def _archive(path: Path) -> ArrayImages:
    if not path.is_file():
        raise DataNotFoundError(f"there is no archive {path}")
    with np.load(path, allow_pickle=False) as z:
        keys = set(z.files)
        if "labels" not in keys or not ("data" in keys or {"jpeg", "offsets"} <= keys):
            raise ValueError(f"{path}: needs labels and either data or jpeg + offsets, has {', '.join(sorted(keys))}")
        labels = torch.from_numpy(z["labels"].astype(np.int64))
        if "data" in keys:
            images = z["data"]
        else:  # read each key once: every access decompresses it again
            raw, offsets = z["jpeg"], z["offsets"]
            files = (raw[a:b].tobytes() for a, b in itertools.pairwise(offsets))
            read = library("PIL.Image", "vision").open
            images = np.stack([np.asarray(read(io.BytesIO(f)).convert("RGB")) for f in files])
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise ValueError(
            f"{path}: images must be uint8 (n, H, W) or (n, H, W, C) with n labels, got {images.dtype} {images.shape} "
            f"and {len(labels)} labels"
        )
    if len(labels) == 0 or int(labels.min()) < 0:
        raise ValueError(f"{path}: labels must be 0, 1, ..., and at least one")
    tensor = torch.from_numpy(images)
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2)
    return ArrayImages(tensor.contiguous(), labels)


def _split_name(folder: Path, part: str) -> str:
    if part == "val" and not (folder / "val").is_dir():
        raise ValueError(f"{folder} has train/ but no val/")
    return part


def _folder_arrays(folder: Path, size: int) -> ArrayImages:
    v2 = library("torchvision.transforms.v2", "vision")
    steps = [v2.Lambda(lambda image: image.convert("RGB")), v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()]
    files = library("torchvision.datasets", "vision").ImageFolder(str(folder), transform=v2.Compose(steps))
    images, labels = zip(*(files[i] for i in range(len(files))), strict=True)
    return ArrayImages(torch.stack(images), torch.tensor(labels))


def _resize(images: Tensor, size: int) -> Tensor:
    if images.shape[-2:] == (size, size):
        return images
    resize = library("torchvision.transforms.v2.functional", "vision").resize
    parts = [resize(part, [size, size], antialias=True) for part in images.split(4096)]
    return torch.cat(parts)


def _load_files(recipe: ImageRecipe) -> ImageData:
    datasets = library("torchvision.datasets", "vision")
    if recipe.dataset == "imagenet":
        try:
            parts = [datasets.ImageNet(str(data_dir() / "imagenet"), split=s) for s in ("train", "val")]
        except (RuntimeError, FileNotFoundError) as error:
            raise DataNotFoundError(
                f"imagenet is not in {data_dir() / 'imagenet'}; put the three official archives there (see "
                f"data/cards/imagenet.md), then run: {command('download imagenet')}"
            ) from error
        title = EXPERIMENT.named[recipe.dataset].title
    else:
        folder = own_path(recipe.dataset)
        if not (folder / "train").is_dir() or not (folder / "val").is_dir():
            raise DataNotFoundError(f"{folder} has no train/ and val/ folders of images (ImageFolder layout)")
        parts = [datasets.ImageFolder(str(folder / s)) for s in ("train", "val")]
        title = f"own images ({folder.name})"
    train, test = parts
    if train.classes != test.classes:
        raise ValueError(f"{recipe.dataset}: train/ and val/ must have the same classes")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    if recipe.valid_images >= len(train):
        raise ValueError(f"{recipe.dataset}: {recipe.valid_images} images to hold out, there are {len(train)}")
    held, rest = order[: recipe.valid_images], order[recipe.valid_images :][: recipe.train_images]
    names = "\n".join(f"{Path(path).name} {label}" for path, label in train.samples + test.samples)
    return ImageData(
        title=title,
        classes=len(train.classes),
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        train=torch.utils.data.Subset(train, rest),
        valid=torch.utils.data.Subset(train, held),
        test=torch.utils.data.Subset(test, range(len(test))[: recipe.test_images]),
        checksum=hashlib.sha256(names.encode()).hexdigest()[:16],
    )


def download(name: str, language: str = "") -> Path:
    """Get "cifar10", "cifar100", or unpack and check the archives of "imagenet"; they have no language."""
    try:
        if name != "imagenet":
            _cifar_class(name)(data_dir(), download=True)
            return data_dir()
        for split in ("train", "val"):  # the archives themselves need a licence
            library("torchvision.datasets", "vision").ImageNet(str(data_dir() / "imagenet"), split=split)
    except RuntimeError as error:  # torchvision's for archives that are damaged or not there
        card = "imagenet" if name == "imagenet" else "cifar"
        raise DataNotFoundError(f"{error} See data/cards/{card}.md") from error
    return data_dir() / "imagenet"
