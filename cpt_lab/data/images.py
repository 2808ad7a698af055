"""Images: embedded digits, torchvision's data sets, and your own, as ``data/cards/own-images.md`` has them.

Small images live in memory as one uint8 tensor; large ones (ImageNet, folders at full size) are read from disk.

Shapes: N images, C channels, H x W pixels.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import DataNotFoundError, missing_data_error, own_path
from cpt_lab.data.image_readers import (
    ArrayImages,
    inspect_image_folders,
    read_own_images,
    report_cropping,
)
from cpt_lab.data.random_streams import seeded_generator
from cpt_lab.data.report import DataReport, empty_report, pluralize
from cpt_lab.data.split_facts import (
    SPLIT_NAMES,
    report_classes,
    report_sample_values,
    report_shared_files,
    report_shared_images,
    report_sizes,
    report_values,
)
from cpt_lab.data.splits import (
    choose_samples,
    class_count,
    split_sizes,
    title_with_sizes,
)
from cpt_lab.experiments.image import EXPERIMENT, ImageRecipe
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import command, data_dir

log = logging.getLogger(__name__)
Batch = tuple[
    Tensor, Tensor
]  # images float32 (N, C, H, W), normalised; labels int64 (N,)
MAX_IN_MEMORY_SIZE = 64  # images up to this many pixels a side are kept in memory
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
Split = ArrayImages | Dataset


@dataclass(frozen=True)
class ImageData:
    """A data set, split three ways."""

    title: str  # what the numbers are measured on, as figures must call it
    classes: int
    channels: int  # 1 or 3
    # mean, std: of the pixels divided by 255, per channel
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # train, valid, test: the splits; ``valid`` is empty when nothing is held out
    train: Split
    valid: Split
    test: Split
    checksum: str  # of pixels and labels in memory, or of the list of files
    report: DataReport = field(
        default_factory=empty_report
    )  # what was read, left out and changed

    @property
    def test_labels(self) -> Tensor:
        """The labels of the test data; those of files in a numbering of their own."""
        test: Any = self.test
        return (
            test.labels
            if isinstance(test, ArrayImages)
            else torch.tensor(test.dataset.targets)[test.indices]
        )


def load_images(recipe: ImageRecipe) -> ImageData:
    """Load the data of a recipe, hold out its validation images and cut it to size.

    The held-out images and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when the files do not have the documented layout or there are too few images.
    """
    report = DataReport(recipe.dataset)
    in_memory = recipe.size <= MAX_IN_MEMORY_SIZE
    load: Callable[[ImageRecipe, DataReport], _Loaded] = (
        _load_arrays if in_memory else _load_files
    )
    train, test, title, mean, std, names = load(recipe, report)
    labels = train.labels if in_memory else np.array(train.targets)
    classes = class_count(f"{recipe.dataset}: training images", labels)
    used, held = split_sizes(recipe, len(train))
    order = torch.randperm(
        len(train), generator=torch.Generator().manual_seed(0)
    ).tolist()
    tested = _choose_test_images(
        test.labels.numpy() if in_memory else np.array(test.targets), recipe.test_images
    )
    parts = (train, order[held:][:used]), (train, order[:held]), (test, tested)
    splits: Any = [
        images[index] if in_memory else torch.utils.data.Subset(images, index)
        for images, index in parts
    ]
    digest = hashlib.sha256()
    if in_memory:
        for split in splits:
            digest.update(
                split.images.numpy().tobytes() + split.labels.numpy().tobytes()
            )
    else:
        file_names = (
            f"{Path(path).name} {label}" for path, label in train.samples + test.samples
        )
        digest.update("\n".join(file_names).encode())
    first, valid, tested = splits
    title = title_with_sizes(title, recipe, first, valid)
    report_sizes(report, [len(split) for split in splits], (len(train), len(test)))
    _report_splits(report, splits, names or [str(number) for number in range(classes)])
    report.log_notices(log)
    return ImageData(
        title,
        classes,
        len(mean),
        mean,
        std,
        first,
        valid,
        tested,
        digest.hexdigest()[:16],
        report,
    )


def _report_splits(report: DataReport, splits: list[Any], classes: list[str]) -> None:
    """Add facts about classes and values of training, validation and test images, and what the splits share."""
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        if isinstance(split, ArrayImages):
            report_classes(report, name, split.labels, classes)
            report_values(report, name, split.images)
        else:
            report_classes(report, name, _labels(split), classes)
            report_sample_values(report, name, split, lambda sample: sample[0])
    if is_own(report.dataset) and not isinstance(splits[0], ArrayImages):
        report_shared_files(
            report,
            *(
                [split.dataset.samples[i][0] for i in split.indices]
                for split in splits[:2]
            ),
        )
    if isinstance(splits[0], ArrayImages):
        report_shared_images(
            report,
            {
                name: split.images
                for name, split in zip(SPLIT_NAMES, splits, strict=True)
            },
        )


def _labels(split: Any) -> list[int]:
    """Return the classes of files in the numbering of the training data."""
    renumber = split.dataset.target_transform or int
    return [renumber(split.dataset.targets[index]) for index in split.indices]


def _choose_test_images(labels: np.ndarray, limit: int | None) -> list[int]:
    """Return which test images are used: the first; where they stand class by class, as in folders, some are drawn."""
    in_mixed_order = len(labels) - (np.bincount(labels) ** 2).sum() / len(
        labels
    )  # changes of class
    by_class = np.count_nonzero(np.diff(labels)) < in_mixed_order / 2
    return (
        choose_samples(len(labels), limit)
        if by_class
        else [*range(len(labels))][:limit]
    )


def random_images(recipe: ImageRecipe) -> ImageData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    One batch for training and one to evaluate on; images of one's own are loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named:
        return load_images(recipe)
    classes, channels = (
        EXPERIMENT.named[recipe.dataset].sizes[name] for name in ("classes", "channels")
    )
    generator = seeded_generator(0)
    shape = (2 * recipe.batch, channels, recipe.size, recipe.size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    split = ArrayImages(
        images, torch.randint(0, classes, (len(images),), generator=generator)
    )
    title, mean, std = (
        f"random pixels for {recipe.dataset}",
        (0.5,) * channels,
        (0.25,) * channels,
    )
    splits = split[: recipe.batch], split[:0], split[recipe.batch :]
    return ImageData(title, classes, channels, mean, std, *splits, "")


class _Loaded(NamedTuple):
    """A data set before it is split: in memory, or as lists of files."""

    train: Any
    test: Any
    title: str
    # mean, std: of the pixels divided by 255, per channel
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: list[str]  # names; empty where labels are numbers


def _load_arrays(recipe: ImageRecipe, report: DataReport) -> _Loaded:
    dataset, size = recipe.dataset, recipe.size
    EXPERIMENT.check_dataset(dataset)
    if is_own(dataset):
        own = read_own_images(dataset, size, report)
        found = _Loaded(
            own.train, own.test, own.title, IMAGENET_MEAN, IMAGENET_STD, own.classes
        )
    elif dataset in ARRAY_READERS:
        found = ARRAY_READERS[dataset](dataset)
    else:
        raise ValueError(
            f"{dataset} is read from disk, at sizes above {MAX_IN_MEMORY_SIZE} pixels; got {size}"
        )
    title = found.title + (
        f", {size} x {size}" if found.train.images.shape[-1] != size else ""
    )
    _report_arrays(report, dataset, found, size)
    train, test = (
        ArrayImages(_resize_images(s.images, size), s.labels)
        for s in (found.train, found.test)
    )
    channels = train.images.shape[1]
    return found._replace(
        train=train,
        test=test,
        title=title,
        mean=found.mean[:channels],
        std=found.std[:channels],
    )


def _report_arrays(report: DataReport, dataset: str, found: _Loaded, size: int) -> None:
    """Add facts about arrays of named data, and about those that are resized."""
    for name, part in (("training", found.train), ("test", found.test)):
        count, channels, height, width = part.images.shape
        if not is_own(dataset):
            report.add(
                "read",
                f"{found.title}: {count:,} {name} pictures, {width} x {height}, {pluralize(channels, 'channel')}",
            )
        if (height, width) != (size, size):
            stretched = (
                ""
                if height == width
                else f"; not in proportion, as {width} x {height} is no square"
            )
            report.add(
                "changed",
                f"{count:,} {name} pictures resized from {width} x {height} to {size} x {size}{stretched}",
            )


def _load_digits_images(name: str) -> _Loaded:
    # 0..16 per pixel; scaled as if it were 0..255 so that mean 0 and std 16 / 255 give pixel / 16
    from sklearn.datasets import load_digits  # here, as it takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order].astype(np.uint8)).unsqueeze(1)
    both = ArrayImages(images, torch.from_numpy(digits.target[order].astype(np.int64)))
    return _Loaded(
        both[700:], both[:700], "scikit-learn digits, 8 x 8", (0.0,), (16 / 255,), []
    )


def _load_cifar(name: str) -> _Loaded:
    kind = getattr(import_optional("torchvision.datasets", "vision"), name.upper())
    try:
        parts = [
            kind(data_dir(), train=train, download=False) for train in (True, False)
        ]
    except RuntimeError as error:
        raise missing_data_error(name, " (or is damaged)") from error
    train, test = (
        ArrayImages(
            torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(),
            torch.tensor(part.targets),
        )
        for part in parts
    )
    return _Loaded(
        train,
        test,
        EXPERIMENT.named[name].title,
        CIFAR_MEAN,
        CIFAR_STD,
        list(parts[0].classes),
    )


ARRAY_READERS: dict[str, Callable[[str], _Loaded]] = {
    "digits": _load_digits_images,
    "cifar10": _load_cifar,
    "cifar100": _load_cifar,
}


def _resize_images(images: Tensor, size: int) -> Tensor:
    if images.shape[-2:] == (size, size):
        return images
    resize = import_optional("torchvision.transforms.v2.functional", "vision").resize
    parts = [resize(part, [size, size], antialias=True) for part in images.split(4096)]
    return torch.cat(parts)


def _load_files(recipe: ImageRecipe, report: DataReport) -> _Loaded:
    """Return lists of files that stay on disk."""
    if recipe.dataset != "imagenet":
        own = inspect_image_folders(own_path(recipe.dataset), recipe.size, report)
        return _Loaded(
            own.train, own.test, own.title, IMAGENET_MEAN, IMAGENET_STD, own.classes
        )
    kind = import_optional("torchvision.datasets", "vision").ImageNet
    try:
        train, test = (
            kind(str(data_dir() / "imagenet"), split=split)
            for split in ("train", "val")
        )
    except (RuntimeError, FileNotFoundError) as error:
        raise DataNotFoundError(
            f"imagenet is not in {data_dir() / 'imagenet'}; put the three official archives there (see "
            f"data/cards/imagenet.md), then run: {command('download imagenet')}"
        ) from error
    title = EXPERIMENT.named[recipe.dataset].title
    report.add(
        "read",
        f"{title}: {len(train):,} training and {len(test):,} test pictures, as torchvision reads them",
    )
    report_cropping(report, recipe.size)
    return _Loaded(train, test, title, IMAGENET_MEAN, IMAGENET_STD, list(train.wnids))


def download(name: str, language: str = "") -> Path:
    """Get "cifar10", "cifar100", or unpack and check the archives of "imagenet"; they have no language."""
    datasets = import_optional("torchvision.datasets", "vision")
    try:
        if name != "imagenet":
            getattr(datasets, name.upper())(data_dir(), download=True)
            return data_dir()
        for split in ("train", "val"):  # the archives themselves need a licence
            datasets.ImageNet(str(data_dir() / "imagenet"), split=split)
    except (
        RuntimeError
    ) as error:  # torchvision's for archives that are damaged or not there
        card = "imagenet" if name == "imagenet" else "cifar"
        raise DataNotFoundError(f"{error} See data/cards/{card}.md") from error
    return data_dir() / "imagenet"
