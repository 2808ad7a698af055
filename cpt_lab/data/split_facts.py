"""Facts about splits of images for a data report: sizes, classes, values, and images in several splits."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpt_lab.data.folder_contents import identical_files
from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize

MAX_IMAGES_INSPECTED = 100  # images of a split on disk whose values are read
SPLIT_NAMES = ("training", "validation", "test")


def report_sizes(
    report: DataReport, sizes: Sequence[int], available: Sequence[int]
) -> None:
    """Add a fact about the sizes of the splits.

    Args:
        report: gets the fact.
        sizes: numbers of images to train on, held out and to test on.
        available: numbers of images in the training part and in the test part of the data set.
    """
    train, valid, test = (f"{size:,}" for size in sizes)
    report.add(
        "split",
        f"of {pluralize(available[0], 'training image')}, {train} are trained on and {valid} held out to choose the "
        f"best evaluation; of {pluralize(available[1], 'test image')}, {test} are tested on",
    )


def report_classes(
    report: DataReport,
    split: str,
    labels: Any,
    names: Sequence[str],
    noun: str = "image",
) -> None:
    """Add facts about the number of samples per class in a split, and about classes without samples.

    Args:
        report: gets the facts.
        split: name of the split.
        labels: class number of every sample.
        names: names of all classes.
        noun: noun for a sample.
    """
    numbers = np.asarray(labels, dtype=np.int64)
    if not len(numbers):
        return
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    count_by_class = {}
    missing = []
    for name, count in zip(names, counts, strict=True):
        if count:
            count_by_class[f"class {name}:" if name.isdecimal() else name] = count
        else:
            missing.append(name)

    summary = (
        f"{pluralize(len(numbers), noun)} of {_count_classes(len(count_by_class))}"
    )
    report.add("classes", f"{split}: {summary}: {list_counts(count_by_class)}")
    if missing:
        report.add(
            "classes",
            f"{split} has no {noun} of {_count_classes(len(missing))}: {list_first(missing)}",
        )
    present = np.flatnonzero(counts)
    last = int(present[-1])
    gap = last - int(present[-2]) if len(present) > 1 else 0
    if names[last].isdecimal() and gap > len(present):
        report.add(
            "markers",
            f"{pluralize(counts[last], noun)} of class {last}, after a gap: the model has outputs for {len(names):,} "
            "classes",
        )


def _count_classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def report_values(
    report: DataReport, split: str, images: Tensor | Sequence[Tensor]
) -> None:
    """Add a fact about the range of pixel values of images in memory, uint8 (N, C, H, W) or N of (C, H, W)."""
    if not len(images):
        return
    if isinstance(images, Tensor):
        flat = images.flatten(1)
        ranges = list(zip(flat.amin(1).tolist(), flat.amax(1).tolist(), strict=True))
    else:
        ranges = [(int(image.min()), int(image.max())) for image in images]
    _add_range(report, split, pluralize(len(images), "image"), ranges)


def report_sample_values(
    report: DataReport, split: str, samples: Any, read: Callable[[Any], Any]
) -> None:
    """Add a fact about the range of pixel values of at most ``MAX_IMAGES_INSPECTED`` images on disk.

    Args:
        report: gets the fact.
        split: name of the split.
        samples: a sequence of samples.
        read: returns the PIL image of a sample.
    """
    count = len(samples)
    if not count:
        return
    indices = np.linspace(0, count - 1, min(count, MAX_IMAGES_INSPECTED)).astype(
        np.int64
    )
    indices = np.unique(indices)
    ranges = []
    for index in indices:
        extrema = read(samples[int(index)]).convert("RGB").getextrema()
        lows, highs = zip(*extrema, strict=True)
        ranges.append((min(lows), max(highs)))
    selection = "" if len(indices) == count else f" of {count:,}, evenly spaced"
    _add_range(report, split, f"{pluralize(len(indices), 'image')}{selection}", ranges)


def _add_range(
    report: DataReport, split: str, images: str, ranges: Iterable[tuple[int, int]]
) -> None:
    """Add a fact about the smallest and the largest value of images, from the range of each image."""
    lows, highs = zip(*ranges, strict=True)
    num_constant = sum(low == high for low, high in zip(lows, highs, strict=True))
    text = f"{split}: {min(lows)} to {max(highs)} in {images}"
    if num_constant:
        text += f"; {pluralize(num_constant, 'image')} of one value throughout"
    report.add("values", text)


def identical_images(first: Tensor, second: Tensor) -> dict[int, int]:
    """Return the images of ``second`` with the pixels of an image of ``first``: {index: index in first}.

    >>> import torch
    >>> identical_images(torch.tensor([[1], [2]]), torch.tensor([[2], [3]]))
    {0: 1}
    """
    if first.shape[1:] != second.shape[1:]:
        return {}
    index_by_hash: dict[int, int] = {}
    for index, value in enumerate(_hashes(first)):
        index_by_hash.setdefault(value, index)
    originals = {}
    for index, value in enumerate(_hashes(second)):
        original = index_by_hash.get(value)
        if original is not None and torch.equal(second[index], first[original]):
            originals[index] = original
    return originals


def _hashes(images: Tensor) -> Iterable[int]:
    return (hash(image.tobytes()) for image in images.contiguous().numpy())


def report_shared_images(report: DataReport, splits: Mapping[str, Tensor]) -> None:
    """Add facts about test and validation images with the pixels of an image in another split.

    Args:
        report: gets the facts.
        splits: images in memory by the names in ``SPLIT_NAMES``, (N, C, H, W).
    """
    train, valid, test = (splits[name] for name in SPLIT_NAMES)
    size = " x ".join(map(str, reversed(train.shape[-2:])))
    for name, images, other_name, other_images in (
        ("test", test, "training or validation", torch.cat([train, valid])),
        ("validation", valid, "training", train),
    ):
        if not len(images) or not len(other_images):
            continue
        shared = identical_images(other_images, images)
        if shared:
            share = f"{len(shared):,} of {pluralize(len(images), f'{name} image')}"
            report.add(
                "overlap",
                f"{share} have the pixels of a {other_name} image at {size} pixels",
            )


def report_shared_files(
    report: DataReport, train: Sequence[str], valid: Sequence[str]
) -> None:
    """Add a fact about validation image files that are copies of training image files, byte for byte."""
    if valid and (copies := identical_files(train, valid)):
        report.add(
            "overlap",
            f"{len(copies):,} of {pluralize(len(valid), 'validation image')} are copies of training images, byte "
            "for byte",
        )


def list_name_counts(counts: Counter[str]) -> str:
    """Return names with their counts in brackets, in alphabetical order.

    >>> list_name_counts(Counter({"pose": 2, "part": 1}))
    'part (1), pose (2)'
    """
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items()))
