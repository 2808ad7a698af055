"""Facts about the splits of pictures for a data report: sizes, classes, values after reading, and what splits share."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpt_lab.data.folder_contents import identical_files
from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize

MAX_IMAGES_INSPECTED = (
    100  # pictures of a split whose values are looked at where pictures stay on disk
)
SPLIT_NAMES = ("training", "validation", "test")


def report_sizes(
    report: DataReport, sizes: Sequence[int], there: Sequence[int]
) -> None:
    """Add a fact about the sizes of the splits.

    Args:
        report: of the data set.
        sizes: pictures to train on, held out and to test on.
        there: pictures in the training and in the test part of the data set.
    """
    train, valid, test = (f"{size:,}" for size in sizes)
    report.add(
        "split",
        f"of {pluralize(there[0], 'training picture')}, {train} are trained on and {valid} held out to choose the best "
        f"evaluation; of {pluralize(there[1], 'test picture')}, {test} are tested on",
    )


def report_classes(
    report: DataReport,
    split: str,
    labels: Any,
    names: Sequence[str],
    noun: str = "picture",
) -> None:
    """Add facts about the number of samples per class in a split, and the classes that are missing.

    Args:
        report: of the data set.
        split: its name, for the facts.
        labels: class of every sample, a number.
        names: of all classes.
        noun: of the samples.
    """
    numbers = np.asarray(labels, dtype=np.int64)
    if not len(numbers):
        return
    shown = [f"class {name}:" if name.isdecimal() else name for name in names]
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    present = {name: count for name, count in zip(shown, counts, strict=True) if count}
    found = f"{pluralize(len(numbers), noun)} of {_count_classes(len(present))}"
    report.add("classes", f"{split}: {found}: {list_counts(present)}")
    if missing := [
        name for name, count in zip(names, counts, strict=True) if not count
    ]:
        report.add(
            "classes",
            f"{split} has no {noun} of {_count_classes(len(missing))}: {list_first(missing)}",
        )


def _count_classes(count: int) -> str:
    return "1 class" if count == 1 else f"{count:,} classes"


def report_values(
    report: DataReport, split: str, images: Tensor | Sequence[Tensor]
) -> None:
    """Add a fact about the range of the values of pictures in memory, uint8 (N, C, H, W) or N of (C, H, W)."""
    if not len(images):
        return
    if isinstance(images, Tensor):
        flat = images.flatten(1)
        ranges = list(zip(flat.amin(1).tolist(), flat.amax(1).tolist(), strict=True))
    else:
        ranges = [(int(image.min()), int(image.max())) for image in images]
    _add_range(report, split, pluralize(len(images), "picture"), ranges)


def report_sample_values(
    report: DataReport, split: str, samples: Any, read: Callable[[Any], Any]
) -> None:
    """Add a fact about the range of the values of some pictures on disk.

    Args:
        report: of the data set.
        split: its name, for the facts.
        samples: a sequence of samples.
        read: returns the picture of a sample, of PIL.
    """
    count = len(samples)
    if not count:
        return
    chosen = np.unique(
        np.linspace(0, count - 1, min(count, MAX_IMAGES_INSPECTED)).astype(np.int64)
    )
    channels = [
        read(samples[int(index)]).convert("RGB").getextrema() for index in chosen
    ]
    ranges = [(min(low for low, _ in c), max(high for _, high in c)) for c in channels]
    some = "" if len(chosen) == count else f" of {count:,}, evenly spaced"
    _add_range(report, split, f"{pluralize(len(chosen), 'picture')}{some}", ranges)


def _add_range(
    report: DataReport, split: str, what: str, ranges: Iterable[tuple[int, int]]
) -> None:
    lows, highs = zip(*ranges, strict=True)
    constant = sum(low == high for low, high in zip(lows, highs, strict=True))
    alone = (
        f"; {pluralize(constant, 'picture')} of one value throughout"
        if constant
        else ""
    )
    report.add("values", f"{split}: {min(lows)} to {max(highs)} in {what}{alone}")


def identical_images(first: Tensor, second: Tensor) -> dict[int, int]:
    """Return which pictures of ``second`` have the pixels of one of ``first``: {index: index in first}.

    >>> import torch
    >>> identical_pictures(torch.tensor([[1], [2]]), torch.tensor([[2], [3]]))
    {0: 1}
    """
    if first.shape[1:] != second.shape[1:]:
        return {}
    places: dict[int, int] = {}
    for index, value in enumerate(_hashes(first)):
        places.setdefault(value, index)
    candidates = [
        (index, places[value])
        for index, value in enumerate(_hashes(second))
        if value in places
    ]
    return {
        index: place
        for index, place in candidates
        if torch.equal(second[index], first[place])
    }


def _hashes(images: Tensor) -> Iterable[int]:
    return (hash(image.tobytes()) for image in images.contiguous().numpy())


def report_shared_images(report: DataReport, splits: Mapping[str, Tensor]) -> None:
    """Add facts about pictures of the test and the validation split whose pixels are those of another split.

    Args:
        report: of the data set.
        splits: pictures in memory by the names in ``NAMES``, (N, C, H, W).
    """
    train, valid, test = (splits[name] for name in SPLIT_NAMES)
    size = " x ".join(map(str, reversed(train.shape[-2:])))
    fitted = torch.cat([train, valid])
    for name, images, other, pictures in (
        ("test", test, "training or validation", fitted),
        ("validation", valid, "training", train),
    ):
        if (
            len(images)
            and len(pictures)
            and (shared := identical_images(pictures, images))
        ):
            what = f"{len(shared):,} of {pluralize(len(images), f'{name} picture')}"
            report.add(
                "overlap",
                f"{what} have the pixels of a {other} picture at {size} pixels",
            )


def report_shared_files(
    report: DataReport, train: Sequence[str], valid: Sequence[str]
) -> None:
    """Add a fact about files of validation pictures that are copies of training pictures, byte for byte."""
    if valid and (copies := identical_files(train, valid)):
        report.add(
            "overlap",
            f"{len(copies):,} of {pluralize(len(valid), 'validation picture')} are copies of training pictures, byte "
            "for byte",
        )


def list_name_counts(counts: Counter[str]) -> str:
    """Return names with their counts, in alphabetical order.

    >>> list_alike(Counter({"pose": 2, "part": 1}))
    'part (1), pose (2)'
    """
    return ", ".join(f"{name} ({count:,})" for name, count in sorted(counts.items()))
