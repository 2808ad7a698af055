"""Images: embedded digits, torchvision's data sets, and the user's own, in the layouts of ``data/cards/own-images.md``.

``load_images`` loads the data of a recipe. Small images lie in memory as one uint8 tensor; large ones (ImageNet, own
images at full size) are read from disk.

Shapes: N images, C channels, H x W pixels.
"""

import hashlib
import logging
import os
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
from cpt_lab.data.folder_contents import ImageFiles
from cpt_lab.data.image_readers import (
    ArrayImages,
    inspect_image_folders,
    read_own_images,
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
MAX_IN_MEMORY_SIZE = 64  # pixels per side up to which images are kept in memory
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
Split = ArrayImages | Dataset


@dataclass(frozen=True)
class ImageData:
    """An image data set in three splits.

    Attributes:
        title: name of the data in figures and rows.
        classes: number of classes.
        channels: 1 or 3.
        mean: mean of the pixels divided by 255, per channel.
        std: standard deviation of the pixels divided by 255, per channel.
        train: training split.
        valid: validation split; empty when nothing is held out.
        test: test split.
        checksum: checksum of pixels and labels in memory, or of the lists of files.
        report: what was read, left out and changed.
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
    report: DataReport = field(default_factory=empty_report)

    @property
    def test_labels(self) -> Tensor:
        """Labels of the test data; labels of files are numbered by their own class folders."""
        test: Any = self.test
        if isinstance(test, ArrayImages):
            return test.labels
        return torch.tensor(test.dataset.targets)[test.indices]


def load_images(recipe: ImageRecipe) -> ImageData:
    """Load the data of a recipe, hold out its validation images and cut the splits to size.

    The held-out images and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when the files do not have the documented layout, there are too few images, or the recipe's crop is
            not one for its size.
    """
    _check_crop(recipe)
    report = DataReport(recipe.dataset)
    in_memory = recipe.size <= MAX_IN_MEMORY_SIZE
    loaded = _load_arrays(recipe, report) if in_memory else _load_files(recipe, report)
    classes = class_count(f"{recipe.dataset}: training images", loaded.labels("train"))
    num_train, num_held_out = split_sizes(recipe, len(loaded.train))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(loaded.train), generator=generator).tolist()
    splits: list[Any] = [
        loaded.subset("train", order[num_held_out:][:num_train]),
        loaded.subset("train", order[:num_held_out]),
        loaded.subset(
            "test",
            _choose_test_images(np.asarray(loaded.labels("test")), recipe.test_images),
        ),
    ]
    train, valid, test = splits
    report_sizes(
        report, [len(split) for split in splits], (len(loaded.train), len(loaded.test))
    )
    _report_splits(
        report, splits, loaded.classes or [str(number) for number in range(classes)]
    )
    report.log_notices(log)
    return ImageData(
        title=title_with_sizes(loaded.title, recipe, train, valid),
        classes=classes,
        channels=len(loaded.mean),
        mean=loaded.mean,
        std=loaded.std,
        train=train,
        valid=valid,
        test=test,
        checksum=_checksum(loaded, splits),
        report=report,
    )


def _check_crop(recipe: ImageRecipe) -> None:
    """Refuse a crop that training images of the recipe's size cannot have."""
    crop, size = recipe.crop, recipe.size
    if isinstance(crop, int) and crop >= 0:
        return
    if crop == "resized" and size > MAX_IN_MEMORY_SIZE:
        return
    raise ValueError(
        f"crop: expected a number of pixels from 0 on, or 'resized' at a size above {MAX_IN_MEMORY_SIZE}; got {crop!r} "
        f"at size {size}"
    )


def _checksum(loaded: "_Loaded", splits: list[Any]) -> str:
    """Return the checksum of the splits in memory, or of the lists of files.

    Of the user's files it has the class folders, the sizes and which of them are trained on, too.
    """
    digest = hashlib.sha256()
    if loaded.in_memory:
        for split in splits:
            digest.update(
                split.images.numpy().tobytes() + split.labels.numpy().tobytes()
            )
    elif isinstance(loaded.train, ImageFiles):
        for files in (loaded.train, loaded.test):
            digest.update(f"{len(files)} files\n".encode())
            for path, label in files.samples:
                name = Path(path).relative_to(files.root).as_posix()
                entry = f"{name}\0{label}\0{Path(path).stat().st_size}\n"
                digest.update(os.fsencode(entry))
    else:
        samples = loaded.train.samples + loaded.test.samples
        digest.update(
            "\n".join(f"{Path(path).name} {label}" for path, label in samples).encode()
        )
    return digest.hexdigest()[:16]


def _report_splits(report: DataReport, splits: list[Any], classes: list[str]) -> None:
    """Add facts about classes and values of training, validation and test images, and images in several splits."""
    if isinstance(splits[0], ArrayImages):
        for name, split in zip(SPLIT_NAMES, splits, strict=True):
            report_classes(report, name, split.labels, classes)
            report_values(report, name, split.images)
        images = [split.images for split in splits]
        report_shared_images(report, dict(zip(SPLIT_NAMES, images, strict=True)))
        return

    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        report_classes(report, name, _labels(split), classes)
        report_sample_values(report, name, split, _first)
    if is_own(report.dataset):
        train, valid, _ = splits
        report_shared_files(report, _file_paths(train), _file_paths(valid))


def _first(sample: tuple[Any, int]) -> Any:
    return sample[0]


def _file_paths(split: Any) -> list[str]:
    """Return the paths of the files in a split."""
    return [split.dataset.samples[index][0] for index in split.indices]


def _labels(split: Any) -> list[int]:
    """Return the class numbers of files, in the numbering of the training data."""
    renumber = split.dataset.target_transform or int
    return [renumber(split.dataset.targets[index]) for index in split.indices]


def _choose_test_images(labels: np.ndarray, limit: int | None) -> list[int]:
    """Return the indices of at most ``limit`` test images.

    They are the first ones, or are drawn if images are sorted by class, as in folders.
    """
    # Expected number of neighbours of different classes in random order.
    changes_in_random_order = len(labels) - (np.bincount(labels) ** 2).sum() / len(
        labels
    )
    is_sorted_by_class = np.count_nonzero(np.diff(labels)) < changes_in_random_order / 2
    if is_sorted_by_class:
        return choose_samples(len(labels), limit)
    return list(range(len(labels)))[:limit]


def random_images(recipe: ImageRecipe) -> ImageData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    There is one batch for training and one for testing. The user's own images are loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named_datasets:
        return load_images(recipe)
    sizes = EXPERIMENT.named_datasets[recipe.dataset].sizes
    classes, channels = sizes["classes"], sizes["channels"]
    generator = seeded_generator(0)
    shape = (2 * recipe.batch, channels, recipe.size, recipe.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    images = ArrayImages(
        pixels, torch.randint(0, classes, (len(pixels),), generator=generator)
    )
    return ImageData(
        title=f"random pixels for {recipe.dataset}",
        classes=classes,
        channels=channels,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        train=images[: recipe.batch],
        valid=images[:0],
        test=images[recipe.batch :],
        checksum="",
    )


class _Loaded(NamedTuple):
    """A data set before it is split: ArrayImages in memory, or lists of files.

    Attributes:
        train: images to train on and to hold out.
        test: images to test on.
        title: name of the data in figures and rows.
        mean: mean of the pixels divided by 255, per channel.
        std: standard deviation of the pixels divided by 255, per channel.
        classes: names of the classes; empty where labels are numbers.
    """

    train: Any
    test: Any
    title: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: list[str]

    @property
    def in_memory(self) -> bool:
        """True for images in memory, False for lists of files."""
        return isinstance(self.train, ArrayImages)

    def labels(self, part: str) -> Any:
        """Return the labels of "train" or "test"."""
        images = getattr(self, part)
        return images.labels if self.in_memory else np.array(images.targets)

    def subset(self, part: str, indices: list[int]) -> Split:
        """Return some images of "train" or "test"."""
        images = getattr(self, part)
        return (
            images[indices]
            if self.in_memory
            else torch.utils.data.Subset(images, indices)
        )


def _load_arrays(recipe: ImageRecipe, report: DataReport) -> _Loaded:
    """Return the images of a recipe in memory, resized."""
    dataset, size = recipe.dataset, recipe.size
    EXPERIMENT.check_dataset(dataset)
    if is_own(dataset):
        own_images = read_own_images(dataset, size, report)
        loaded = _Loaded(
            own_images.train,
            own_images.test,
            own_images.title,
            IMAGENET_MEAN,
            IMAGENET_STD,
            own_images.classes,
        )
    elif dataset in ARRAY_READERS:
        loaded = ARRAY_READERS[dataset](dataset)
    else:
        raise ValueError(
            f"{dataset} is read from disk, at sizes above {MAX_IN_MEMORY_SIZE} pixels; got {size}"
        )

    title = loaded.title
    if loaded.train.images.shape[-1] != size:
        title += f", {size} x {size}"
    _report_arrays(report, dataset, loaded, size)
    train = ArrayImages(_resize_images(loaded.train.images, size), loaded.train.labels)
    test = ArrayImages(_resize_images(loaded.test.images, size), loaded.test.labels)
    channels = train.images.shape[1]
    return loaded._replace(
        train=train,
        test=test,
        title=title,
        mean=loaded.mean[:channels],
        std=loaded.std[:channels],
    )


def _report_arrays(
    report: DataReport, dataset: str, loaded: _Loaded, size: int
) -> None:
    """Add facts about the images of named data in memory, and about images that are resized."""
    for name, images in (("training", loaded.train), ("test", loaded.test)):
        count, channels, height, width = images.images.shape
        if not is_own(dataset):
            report.add(
                "read",
                f"{loaded.title}: {count:,} {name} images, {width} x {height}, {pluralize(channels, 'channel')}",
            )
        if (height, width) != (size, size):
            text = f"{count:,} {name} images resized from {width} x {height} to {size} x {size}"
            if height != width:
                text += f"; not in proportion, as {width} x {height} is no square"
            report.add("changed", text)


def _load_digits_images(name: str) -> _Loaded:
    """Return scikit-learn's digits.

    Pixels are 0..16; as images are divided by 255, mean 0 and standard deviation 16 / 255 give pixel / 16.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    pixels = torch.from_numpy(digits.images[order].astype(np.uint8)).unsqueeze(1)
    images = ArrayImages(
        pixels, torch.from_numpy(digits.target[order].astype(np.int64))
    )
    return _Loaded(
        images[700:],
        images[:700],
        "scikit-learn digits, 8 x 8",
        (0.0,),
        (16 / 255,),
        [],
    )


def _load_cifar(name: str) -> _Loaded:
    """Return CIFAR-10 or CIFAR-100 from the data folder."""
    dataset_class = getattr(
        import_optional("torchvision.datasets", "vision"), name.upper()
    )
    try:
        train = dataset_class(data_dir(), train=True, download=False)
        test = dataset_class(data_dir(), train=False, download=False)
    except RuntimeError as error:
        raise missing_data_error(name, " (or is damaged)") from error

    def to_array_images(dataset: Any) -> ArrayImages:
        pixels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
        return ArrayImages(pixels, torch.tensor(dataset.targets))

    return _Loaded(
        to_array_images(train),
        to_array_images(test),
        EXPERIMENT.named_datasets[name].title,
        CIFAR_MEAN,
        CIFAR_STD,
        list(train.classes),
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
    """Return lists of image files that stay on disk."""
    if recipe.dataset != "imagenet":
        own_images = inspect_image_folders(own_path(recipe.dataset), report)
        _report_cropping(report, recipe)
        return _Loaded(
            own_images.train,
            own_images.test,
            own_images.title,
            IMAGENET_MEAN,
            IMAGENET_STD,
            own_images.classes,
        )

    folder = data_dir() / "imagenet"
    imagenet_class = import_optional("torchvision.datasets", "vision").ImageNet
    try:
        train = imagenet_class(str(folder), split="train")
        test = imagenet_class(str(folder), split="val")
    except (RuntimeError, FileNotFoundError) as error:
        raise DataNotFoundError(
            f"imagenet is not in {folder}; put the three official archives there (see "
            f"data/cards/imagenet.md), then run: {command('download imagenet')}"
        ) from error
    title = EXPERIMENT.named_datasets[recipe.dataset].title
    report.add(
        "read",
        f"{title}: {len(train):,} training and {len(test):,} test images, as torchvision reads them",
    )
    _report_cropping(report, recipe)
    return _Loaded(train, test, title, IMAGENET_MEAN, IMAGENET_STD, list(train.wnids))


def _report_cropping(report: DataReport, recipe: ImageRecipe) -> None:
    """Add a fact about images on disk, which are resized and cropped while they are read."""
    size, crop = recipe.size, recipe.crop
    text = f"resized to {round(size / 0.875)} pixels on the short side and cropped to the {size} x {size} in the middle"
    if crop == "resized":
        text += f" to test on; of training images a part drawn at random is resized to {size} x {size}"
    elif crop:
        text += f"; training images are then padded with {crop} black pixels and cropped at random"
    report.add("changed", text)


def download(name: str, language: str = "") -> Path:
    """Download "cifar10" or "cifar100", or unpack and check the archives of "imagenet"; they have no language."""
    datasets = import_optional("torchvision.datasets", "vision")
    try:
        if name != "imagenet":
            getattr(datasets, name.upper())(data_dir(), download=True)
            return data_dir()
        # ImageNet's licence allows no download without an account.
        for split in ("train", "val"):
            datasets.ImageNet(str(data_dir() / "imagenet"), split=split)
    except (
        RuntimeError
    ) as error:  # torchvision's error for archives that are damaged or missing
        card = "imagenet" if name == "imagenet" else "cifar"
        raise DataNotFoundError(f"{error} See data/cards/{card}.md") from error
    return data_dir() / "imagenet"
