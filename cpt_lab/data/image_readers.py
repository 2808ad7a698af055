"""Readers of images of one's own: archives, and folders of classes, into memory or as lists of files.

Pictures of any kind are read as eight-bit red, green and blue.
"""

import copy
import filecmp
import io
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpt_extras.optional_libraries import library
from cpt_lab.data.common import each, whole_numbers
from cpt_lab.data.files import DataNotFoundError, own_path, reading


def open_rgb(path: Path | str) -> Any:
    """Return the picture in a file, in PIL's mode RGB; ValueError names a file that is damaged."""
    with reading(Path(path)), library("PIL.Image", "vision").open(path) as image:
        return rgb(image)


def rgb(image: Any) -> Any:
    """Return a picture of PIL in mode RGB: grey ones get three equal channels, transparency is left out.

    Grey pictures of 16 bits are scaled to eight: PIL alone would cut off all above 255.

    Raises:
        ValueError: for pictures whose range of values is not known: 32-bit and floating ones.
    """
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"a picture of 8 or 16 bits expected, got PIL's mode {image.mode}")
        if 0 < values.max() < 256:
            raise ValueError(f"a picture of 16 bits whose values end at {values.max()} would be black; save it with 8")
        image = library("PIL.Image", "vision").fromarray((values >> 8).astype(np.uint8))
    return image.convert("RGB")


END_OF_JPEG = b"\xff\xd9"
HELD = ("val", "valid", "validation", "test")  # folders of what is tested on; the first that is there


def picture_size(path: Path) -> tuple[int, int]:
    """Return height and width; ValueError for a file that breaks off: it is noticed here, before any training."""
    with reading(path), library("PIL.Image", "vision").open(path) as image:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            if image.format != "JPEG" or END_OF_JPEG not in file.read():  # an unusual end: look at all of it
                rgb(image)
        return image.height, image.width


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory: uint8 (N, C, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> "ArrayImages":
        return ArrayImages(self.images[index], self.labels[index])


def read_own(dataset: str, size: int) -> tuple[ArrayImages, ArrayImages, str]:
    """Return training and test images, and what the data is called; pictures of a folder come at ``size`` pixels.

    Raises:
        DataNotFoundError, ValueError: naming the file or folder, and what is wrong with it.
    """
    given = [own_path(part) for part in dataset.split(",")]
    folder, title = given[0], f"own images ({given[0].name if len(given) == 1 else given[0].stem})"
    if len(given) == 1 and folder.is_dir() and ((folder / "train").is_dir() or not any(folder.glob("*.npz"))):
        *files, title = image_folders(folder)
        train, test = _in_memory(files, size)
    else:
        train, test = _two_archives(dataset, given if len(given) > 1 else _archives_of(folder))
    if torch.equal(train.images, test.images):
        raise ValueError(f"{dataset}: the {len(test)} test images are the training images; a test needs others")
    return train, test, title


def _two_archives(dataset: str, paths: list[Path]) -> tuple[ArrayImages, ArrayImages]:
    if len(paths) != 2:
        raise ValueError(f"two archives expected, 'train.npz,test.npz', got {dataset!r}")
    train, test = map(_archive, paths)
    if train.images.shape[1] != test.images.shape[1]:
        channels = " and ".join(str(part.images.shape[1]) for part in (train, test))
        raise ValueError(f"{dataset}: training and test images have {channels} channels")
    unknown = test.labels[test.labels > train.labels.max()]
    if len(unknown):
        raise ValueError(f"{paths[1]}: label {int(unknown[0])} is unknown; {paths[0].name} has 0..{train.labels.max()}")
    return train, test


def _archives_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}; give a folder or 'train.npz,test.npz'")
    files = sorted(folder.glob("*.npz"))
    train = [f for f in files if "train" in f.name]
    test = [f for f in files if "train" not in f.name and ("test" in f.name or "val" in f.name)]
    if len(train) != 1 or len(test) != 1:
        names = ", ".join(f.name for f in files) or "none"
        raise ValueError(
            f"{folder} needs train/ and val/, or one *train*.npz and one *test*.npz or *val*.npz (archives there: "
            f"{names}); name two archives as 'train.npz,test.npz'"
        )
    return [*train, *test]


def _archive(path: Path) -> ArrayImages:
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as z:
        keys = set(z.files)
        if "labels" not in keys or not ("data" in keys or {"jpeg", "offsets"} <= keys):
            raise ValueError(f"{path}: needs labels and either data or jpeg + offsets, has {', '.join(sorted(keys))}")
        labels = whole_numbers(f"{path}: labels", z["labels"])
        images = z["data"] if "data" in keys else _unpacked(path, z["jpeg"], z["offsets"])
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
        raise ValueError(
            f"{path}: images must be uint8 (n, H, W) or (n, H, W, C) with n labels, got {images.dtype} {images.shape} "
            f"and {len(labels)} labels"
        )
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        raise ValueError(f"{path}: images must have 1 or 3 channels, (n, H, W, C), got {images.shape[3]}")
    if images.size == 0 or int(labels.min()) < 0:
        raise ValueError(f"{path}: labels must be 0, 1, ..., and at least one")
    tensor = torch.from_numpy(images)
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2)
    return ArrayImages(tensor.contiguous(), torch.from_numpy(labels))


def _unpacked(path: Path, raw: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the pictures of files that lie one after the other, (n, H, W, 3) uint8."""
    ends = whole_numbers(f"{path}: offsets", offsets)
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(raw) or (np.diff(ends) <= 0).any():
        raise ValueError(f"{path}: offsets must rise from 0 to the length of jpeg, {len(raw)}")
    read = library("PIL.Image", "vision").open
    return np.stack([np.asarray(rgb(read(io.BytesIO(raw[a:b].tobytes())))) for a, b in itertools.pairwise(ends)])


def image_folders(folder: Path) -> tuple[Any, Any, str]:
    """Return torchvision's lists of files to train and to test on, numbered by the classes of the first, and a title.

    They are those of ``train/`` and of the first of ``HELD``; a class may be missing from the second, but not from the
    first. Where there is one of them alone, or class folders alone, every fifth picture of a class is tested on, in an
    order drawn once and for all, and the title says so.
    """
    first = folder / "train" if (folder / "train").is_dir() else folder
    held = next((folder / part for part in HELD if (folder / part).is_dir()), None)
    if first == folder and held:
        raise DataNotFoundError(f"{folder} has {held.name}/ and no train/; it needs train/<class>/")
    title, train = f"own images ({folder.name})", _listed(first)
    if held is None:
        return *_drawn(train), f"{title}, a fifth drawn to test on"
    test = _listed(held)
    if sum((folder / part).is_dir() for part in HELD) > 1:
        title += f", tested on {held.name}/"
    if unknown := sorted(set(test.classes) - set(train.classes)):
        names = ", ".join(train.classes[:20]) + (", ..." if len(train.classes) > 20 else "")
        raise ValueError(f"{held}: class {unknown[0]!r} is unknown; those of train/ are {names}")
    copies = ((first / Path(path).relative_to(held), path) for path, _ in test.samples)
    if all(one.is_file() and filecmp.cmp(one, other, shallow=False) for one, other in copies):
        raise ValueError(f"{held}: the {len(test)} test images are the training images; a test needs others")
    test.target_transform = [train.class_to_idx[name] for name in test.classes].__getitem__
    return train, test, title


def _listed(folder: Path) -> Any:
    """Return torchvision's list of the pictures in class folders; hidden ones are none, such as notebooks leave."""
    kind = library("torchvision.datasets", "vision").ImageFolder
    files = kind.__new__(kind)
    files.find_classes = _classes
    files.__init__(str(folder), loader=open_rgb, is_valid_file=_shown)
    return files


def _classes(folder: str) -> tuple[list[str], dict[str, int]]:
    names = sorted(p.name for p in Path(folder).iterdir() if p.is_dir() and not p.name.startswith((".", "__")))
    for name in names:
        if not any(_shown(str(path)) for path in (Path(folder) / name).rglob("*")):
            raise ValueError(f"{Path(folder) / name} is the folder of a class, and has no picture")
    if not names:
        raise ValueError(f"{folder} has no folder of a class in it")
    return names, {name: i for i, name in enumerate(names)}


def _shown(path: str) -> bool:
    """Whether a file is a picture that a person has put there, not one of a Mac beside it."""
    kinds = library("torchvision.datasets.folder", "vision").IMG_EXTENSIONS
    return path.lower().endswith(kinds) and not Path(path).name.startswith(".")


def _drawn(files: Any) -> tuple[Any, Any]:
    """Return two lists of the files of one, to train and to test on."""
    seen: Counter[int] = Counter()
    parts: tuple[list[int], list[int]] = ([], [])
    for i in np.random.default_rng(0).permutation(len(files.targets)):
        seen[files.targets[i]] += 1
        parts[seen[files.targets[i]] % 5 == 0].append(i)
    if not parts[1]:
        raise ValueError(f"{files.root}: no class has the five pictures of which one is tested on; give train/, val/")
    train, test = copy.copy(files), copy.copy(files)
    for split, part in zip((train, test), parts, strict=True):
        split.samples = [files.samples[i] for i in sorted(part)]
        split.targets = [label for _, label in split.samples]
    return train, test


def _in_memory(lists: list[Any], size: int) -> tuple[ArrayImages, ArrayImages]:
    v2 = library("torchvision.transforms.v2", "vision")
    for files in lists:
        files.transform = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
    images, labels = zip(*each(lambda at: at[0][at[1]], [(f, i) for f in lists for i in range(len(f))]), strict=True)
    whole = ArrayImages(torch.stack(images), torch.tensor(labels))
    return whole[: len(lists[0])], whole[len(lists[0]) :]
