"""Readers of images of one's own: archives, and folders of classes, into memory or as lists of files.

Pictures of any kind are read as eight-bit red, green and blue, see ``pictures``.
"""

import io
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import DataNotFoundError, explain_read_errors, own_path
from cpt_lab.data.folder_contents import (
    FolderContents,
    ImageFiles,
    duplicate_files,
    identical_files,
    is_image_file,
    list_folder,
    normalize_name,
    read_class_folders,
    report_unused_files,
)
from cpt_lab.data.image_decoding import (
    ImageFacts,
    apply_orientation,
    describe_range,
    grey_bits,
    inspect_image_file,
    inspect_open_image,
    open_rgb,
    report_image_files,
    report_orientation,
    to_rgb,
    to_upright_rgb,
)
from cpt_lab.data.loading import read_each
from cpt_lab.data.report import DataReport, list_first, pluralize
from cpt_lab.data.split_facts import identical_images
from cpt_lab.data.splits import as_int64_vector

__all__ = [
    "ArrayImages",
    "OwnImages",
    "inspect_image_folders",
    "list_image_folders",
    "open_rgb",
    "read_own_images",
    "to_rgb",
]

TEST_FOLDERS = (
    "val",
    "valid",
    "validation",
    "test",
)  # folders of what is tested on; the first that is there
TRAIN_FOLDER_NAMES = ("train", "training", "trn")  # what people call their splits
TEST_FOLDER_NAMES = (
    *TEST_FOLDERS,
    "validate",
    "dev",
    "testing",
    "eval",
    "evaluation",
    "holdout",
)
MAX_SHARED_TEST_IMAGES = (
    0.1  # of the test images of archives may be copies of training images
)
T = TypeVar("T")


@dataclass(frozen=True)
class ArrayImages:
    """Images in memory: uint8 (N, C, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> "ArrayImages":
        return ArrayImages(self.images[index], self.labels[index])


class OwnImages(NamedTuple):
    """Images to train and to test on, in memory or on disk."""

    train: Any  # ArrayImages or PictureFiles
    test: Any
    title: str
    classes: list[str]  # names; empty where labels are numbers


class ImageSource(NamedTuple):
    """A picture in a file of its own, or in an archive."""

    name: str  # in reports
    path: Path  # of the file or the archive
    content: bytes | None = None  # where an archive holds it


def read_own_images(dataset: str, size: int, report: DataReport) -> OwnImages:
    """Return training and test images in memory; pictures of a folder come at ``size`` pixels.

    Raises:
        DataNotFoundError, ValueError: naming the file or folder, and what is wrong with it.
    """
    given = [own_path(part) for part in dataset.split(",")]
    folder = given[0]
    if (
        len(given) == 1
        and folder.is_dir()
        and ((folder / "train").is_dir() or not any(folder.glob("*.npz")))
    ):
        found = list_image_folders(folder, report)
        train, test = _load_resized(folder, [found.train, found.test], size, report)
        return found._replace(train=train, test=test)
    title = f"own images ({folder.name if len(given) == 1 else folder.stem})"
    train, test = _read_archive_pair(
        dataset, given if len(given) > 1 else _find_archives(folder, report), report
    )
    return OwnImages(train, test, title, [])


# --- archives -------------------------------------------------------------------------------------


class _Archive(NamedTuple):
    """Content of an archive: labels (n,), and images (n, H, W) or (n, H, W, C), or pictures to decode."""

    path: Path
    labels: np.ndarray
    images: np.ndarray | None
    sources: list[ImageSource]


def _read_archive_pair(
    dataset: str, paths: list[Path], report: DataReport
) -> list[ArrayImages]:
    if len(paths) != 2:
        raise ValueError(
            f"two archives expected, 'train.npz,test.npz', got {dataset!r}"
        )
    names = _short_names(paths)
    archives = [
        _read_archive(path, name, report)
        for path, name in zip(paths, names, strict=True)
    ]
    sources = [source for archive in archives for source in archive.sources]
    decoded = iter(
        _read_sources(dataset, sources, np.asarray, report) if sources else []
    )
    train, test = (
        _check_archive(archive, list(itertools.islice(decoded, len(archive.sources))))
        for archive in archives
    )
    for name, part in zip(names, (train, test), strict=True):
        _, channels, height, width = part.images.shape
        report.add(
            "read",
            f"{name}: {pluralize(len(part), 'image')}, {width} x {height} pixels, {pluralize(channels, 'channel')}",
        )
    if train.images.shape[1] != test.images.shape[1]:
        both = " and ".join(str(part.images.shape[1]) for part in (train, test))
        raise ValueError(f"{dataset}: training and test images have {both} channels")
    unknown = test.labels[test.labels > train.labels.max()]
    if len(unknown):
        raise ValueError(
            f"{paths[1]}: label {int(unknown[0])} is unknown; {paths[0].name} has 0..{train.labels.max()}"
        )
    _check_shared_images(dataset, train, test)
    return [train, test]


def _check_shared_images(dataset: str, train: ArrayImages, test: ArrayImages) -> None:
    """Refuse test images that are training images: all of them, or more than a tenth."""
    shared = identical_images(train.images, test.images)
    if len(shared) == len(test):
        raise ValueError(
            f"{dataset}: the {len(test)} test images are the training images; a test needs others"
        )
    if len(shared) > MAX_SHARED_TEST_IMAGES * len(test):
        pairs = list_first(
            [f"test image {i} is training image {k}" for i, k in shared.items()]
        )
        raise ValueError(
            f"{dataset}: {len(shared):,} of {len(test):,} test images are copies of training images ({pairs}, counted "
            "from 0); a test needs others: take them out of one of the two archives"
        )


def _find_archives(folder: Path, report: DataReport) -> list[Path]:
    if not folder.is_dir():
        raise DataNotFoundError(
            f"there is no folder {folder}; give a folder or 'train.npz,test.npz'"
        )
    files = sorted(folder.glob("*.npz"))
    train = [f for f in files if "train" in f.name]
    test = [
        f
        for f in files
        if "train" not in f.name and ("test" in f.name or "val" in f.name)
    ]
    if len(train) != 1 or len(test) != 1:
        names = ", ".join(f.name for f in files) or "none"
        raise ValueError(
            f"{folder} needs train/ and val/, or one *train*.npz and one *test*.npz or *val*.npz (archives there: "
            f"{names}); name two archives as 'train.npz,test.npz'"
        )
    contents = list_folder(folder)
    contents.report_unread(report)
    used = {train[0].name, test[0].name}
    report.leave_out(
        f"only {train[0].name} and {test[0].name} are read",
        [name for name in contents.files if name not in used],
    )
    return [*train, *test]


def _short_names(paths: list[Path]) -> list[str]:
    """Return short names of two archives that tell them apart."""
    names = [path.name for path in paths]
    return (
        names
        if len(set(names)) == len(names)
        else [f"{path.parent.name}/{path.name}" for path in paths]
    )


def _read_archive(path: Path, name: str, report: DataReport) -> _Archive:
    with (
        explain_read_errors(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as z,
    ):
        keys = set(z.files)
        if "labels" not in keys or not ("data" in keys or {"jpeg", "offsets"} <= keys):
            raise ValueError(
                f"{path}: needs labels and either data or jpeg + offsets, has {', '.join(sorted(keys))}"
            )
        given = z["labels"]
        labels = as_int64_vector(f"{path}: labels", given)
        images = z["data"] if "data" in keys else None
        sources = (
            []
            if "data" in keys
            else _packed_sources(path, name, z["jpeg"], z["offsets"])
        )
    used = {"labels", "data"} if "data" in keys else {"labels", "jpeg", "offsets"}
    if unused := sorted(keys - used):
        report.add(
            "left out",
            f"{pluralize(len(unused), 'array')} of {name}: {list_first(unused)}",
        )
    if given.dtype.kind not in "iu" or given.ndim != 1:
        report.add(
            "changed",
            f"labels of {name}, {given.dtype} of shape {given.shape}, became whole numbers (n,)",
        )
    return _Archive(path, labels, images, sources)


def _packed_sources(
    path: Path, name: str, raw: np.ndarray, offsets: np.ndarray
) -> list[ImageSource]:
    """Return the pictures of files that lie one after the other in an archive."""
    ends = as_int64_vector(f"{path}: offsets", offsets)
    if (
        len(ends) < 2
        or ends[0] != 0
        or ends[-1] != len(raw)
        or (np.diff(ends) <= 0).any()
    ):
        raise ValueError(
            f"{path}: offsets must rise from 0 to the length of jpeg, {len(raw)}"
        )
    parts = enumerate(itertools.pairwise(ends))
    return [
        ImageSource(f"{name} picture {i}", path, raw[a:b].tobytes())
        for i, (a, b) in parts
    ]


def _check_archive(archive: _Archive, decoded: list[np.ndarray]) -> ArrayImages:
    """Return the images of an archive; ValueError where they are not as documented."""
    path, labels = archive.path, archive.labels
    if archive.images is not None:
        images = archive.images
    else:
        with explain_read_errors(path):
            images = np.stack(decoded)
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or len(images) != len(labels)
    ):
        raise ValueError(
            f"{path}: images must be uint8 (n, H, W) or (n, H, W, C) with n labels, got {images.dtype} {images.shape} "
            f"and {len(labels)} labels"
        )
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        raise ValueError(
            f"{path}: images must have 1 or 3 channels, (n, H, W, C), got {images.shape[3]}"
        )
    if images.size == 0 or int(labels.min()) < 0:
        raise ValueError(f"{path}: labels must be 0, 1, ..., and at least one")
    tensor = torch.from_numpy(images)
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2)
    return ArrayImages(tensor.contiguous(), torch.from_numpy(labels))


# --- folders of classes ---------------------------------------------------------------------------


def list_image_folders(folder: Path, report: DataReport) -> OwnImages:
    """Return lists of files to train and to test on, the second numbered by the classes of the first.

    They are those of ``train/`` and of the first of ``HELD``; a class may be missing from the second, but not from the
    first. Where there is one of them alone, or class folders alone, every fifth picture of a class is tested on, in an
    order drawn once and for all, and the title says so.

    Raises:
        DataNotFoundError, ValueError: naming the folder, and what is wrong with it.
    """
    contents = list_folder(folder)
    parts = contents.subfolders("")
    first = "train" if "train" in parts else ""
    held = next((part for part in TEST_FOLDERS if part in parts), None)
    if not first and held:
        raise DataNotFoundError(
            f"{folder} has {held}/ and no train/; it needs train/<class>/"
        )
    _check_split_names(folder, parts, first, held)
    contents.report_unread(report)
    if first:
        _report_other_folders(report, contents, held)
    title, train = (
        f"own images ({folder.name})",
        read_class_folders(folder, first, contents, report),
    )
    if len(train.classes) == 1:
        raise ValueError(
            f"{folder / first}: the only class is {train.classes[0]!r}; there is nothing to learn from one class; give "
            "the pictures of every class a folder of their own"
        )
    if held is None:
        train, test = _draw_test_images(train, folder, report)
        return OwnImages(
            train, test, f"{title}, a fifth drawn to test on", train.classes
        )
    test = read_class_folders(folder, held, contents, report)
    if sum(part in TEST_FOLDERS for part in parts) > 1:
        title += f", tested on {held}/"
    _check_classes(folder / held, train.classes, test.classes)
    _check_copies(folder, held, train, test)
    numbers = {name: number for number, name in enumerate(train.classes)}
    test.target_transform = [numbers[name] for name in test.classes].__getitem__
    report.add("split", f"train/ is trained on and {held}/ tested on")
    return OwnImages(train, test, title, train.classes)


def _check_split_names(
    folder: Path, parts: list[str], first: str, held: str | None
) -> None:
    """Refuse folders that look like splits under other names: they would be classes, or not be read."""
    train = [
        part for part in parts if part.lower() in TRAIN_FOLDER_NAMES and part != "train"
    ]
    tested = [
        part
        for part in parts
        if part.lower() in TEST_FOLDER_NAMES and part not in TEST_FOLDERS
    ]
    if first and held is None and tested:
        raise ValueError(
            f"{folder} has train/ and {tested[0]}/; call the second one val/"
        )
    if not first and train and tested:
        raise ValueError(
            f"{folder} has {train[0]}/ and {tested[0]}/; call the folders train/ and val/"
        )


def _report_other_folders(
    report: DataReport, contents: FolderContents, held: str | None
) -> None:
    """Add facts about what lies beside train/ and the folder that is tested on."""
    for part in contents.subfolders(""):
        if part not in ("train", held):
            reason = (
                f"{held}/ is tested on"
                if part in TEST_FOLDERS
                else "only train/ and a folder to test on are read"
            )
            report_unused_files(report, contents.files_below(part), reason)
    report_unused_files(report, [name for name in contents.files if "/" not in name])


def _check_classes(held: Path, known: list[str], tested: list[str]) -> None:
    """Refuse classes that are only tested on."""
    unknown = sorted(set(tested) - set(known))
    if not unknown:
        return
    names = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    alike = [
        name for name in known if normalize_name(name) == normalize_name(unknown[0])
    ]
    tables = sorted(
        path.name
        for path in held.iterdir()
        if path.is_file() and not is_image_file(path.name)
    )
    way_out = ""
    if alike:
        way_out = (
            f"; {alike[0]!r} differs in spelling alone: give both folders one name"
        )
    elif len(tested) == 1:
        source = f" ({tables[0]} may say which)" if tables else ""
        way_out = f"; give the pictures of every class a folder of their own, {held.name}/<class>/{source}"
    raise ValueError(
        f"{held}: class {unknown[0]!r} is unknown; those of train/ are {names}{way_out}"
    )


def _check_copies(folder: Path, held: str, train: ImageFiles, test: ImageFiles) -> None:
    """Refuse test pictures whose files are those of training pictures, byte for byte."""
    copies = identical_files(
        [path for path, _ in train.samples], [path for path, _ in test.samples]
    )
    if len(copies) == len(test):
        raise ValueError(
            f"{folder / held}: the {len(test)} test images are the training images; a test needs others"
        )
    if copies:
        pairs = list_first(
            [
                f"{_relative_name(folder, one)} is {_relative_name(folder, other)}"
                for one, other in sorted(copies.items())
            ]
        )
        raise ValueError(
            f"{folder / held}: {len(copies):,} of {len(test):,} test images are copies of training images ({pairs}); a "
            "test needs others: take them out of one of the two folders"
        )


def _relative_name(folder: Path, path: str) -> str:
    return Path(path).relative_to(folder).as_posix()


def _draw_test_images(
    files: ImageFiles, folder: Path, report: DataReport
) -> tuple[ImageFiles, ImageFiles]:
    """Return two lists of the files of one, to train and to test on; copies stand on the side of their original."""
    copies = duplicate_files([path for path, _ in files.samples])
    originals = [i for i, (path, _) in enumerate(files.samples) if path not in copies]
    seen: Counter[int] = Counter()
    tested: set[str] = set()
    for position in np.random.default_rng(0).permutation(len(originals)):
        path, label = files.samples[originals[position]]
        seen[label] += 1
        if seen[label] % 5 == 0:
            tested.add(path)
    if not tested:
        raise ValueError(
            f"{files.root}: no class has the five pictures of which one is tested on; give train/, val/"
        )
    report.add(
        "split",
        "a fifth of the pictures of every class is tested on, drawn with seed 0; the others are trained on",
    )
    if copies:
        pairs = [
            f"{_relative_name(folder, one)} is {_relative_name(folder, other)}"
            for one, other in sorted(copies.items())
        ]
        report.add(
            "changed",
            f"copies of other files, byte for byte: {len(copies):,}; each is in the split of its original "
            f"({list_first(pairs)})",
        )
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for path, label in files.samples:
        parts[copies.get(path, path) in tested].append((path, label))
    train, test = (ImageFiles(files.root, files.classes, part) for part in parts)
    return train, test


# --- reading --------------------------------------------------------------------------------------


def inspect_image_folders(folder: Path, size: int, report: DataReport) -> OwnImages:
    """Return lists of files that stay on disk, every one looked at, and report what they are.

    Raises:
        DataNotFoundError, ValueError: naming the files, and what is wrong with them.
    """
    found = list_image_folders(folder, report)
    paths = [path for files in (found.train, found.test) for path, _ in files.samples]
    facts = dict(
        zip(
            [_relative_name(folder, p) for p in paths],
            read_each(inspect_image_file, map(Path, paths)),
            strict=True,
        )
    )
    bits = _report_files(folder.name, facts, report)
    found.train.bits = found.test.bits = bits
    report_cropping(report, size)
    return found


def report_cropping(report: DataReport, size: int) -> None:
    """Add a fact about pictures on disk, which are resized and cropped while they are read."""
    report.add(
        "changed",
        f"resized to {round(size / 0.875)} pixels on the short side and cropped to the {size} x {size} in the middle "
        f"to test on; of training pictures a part drawn at random is resized to {size} x {size}",
    )


def _report_files(
    dataset: str, facts: dict[str, ImageFacts], report: DataReport
) -> int | None:
    """Add facts about the files of pictures; return the bits of those of 16 bits."""
    bits = grey_bits(dataset, facts)
    report_image_files(report, facts, bits)
    report_orientation(report, facts)
    return bits


def _read_sources(
    dataset: str,
    sources: Sequence[ImageSource],
    prepare: Callable[[Any], T],
    report: DataReport,
) -> list[T]:
    """Return pictures, each made ready from PIL's mode RGB, and report what they are.

    Every file is decoded once, but for pictures of 16 bits: their scale is known when all were looked at.
    """
    looked_at = read_each(lambda source: _inspect_and_prepare(source, prepare), sources)
    facts = {
        source.name: found
        for source, (found, _) in zip(sources, looked_at, strict=True)
    }
    bits = _report_files(dataset, facts, report)
    results = []
    for source, (_, result) in zip(sources, looked_at, strict=True):
        results.append(
            _prepare_deep(source, prepare, bits) if result is None else result
        )
    return results


def _inspect_and_prepare(
    source: ImageSource, prepare: Callable[[Any], T]
) -> tuple[ImageFacts, T | None]:
    with explain_read_errors(source.path), _open(source) as image:
        facts = inspect_open_image(image)
        return facts, None if facts.is_deep_grey else prepare(
            apply_orientation(to_rgb(image), facts.orientation, facts.format)
        )


def _prepare_deep(
    source: ImageSource, prepare: Callable[[Any], T], bits: int | None
) -> T:
    with explain_read_errors(source.path), _open(source) as image:
        return prepare(to_upright_rgb(image, bits))


def _open(source: ImageSource) -> Any:
    return import_optional("PIL.Image", "vision").open(
        source.path if source.content is None else io.BytesIO(source.content)
    )


def _load_resized(
    folder: Path, lists: list[ImageFiles], size: int, report: DataReport
) -> list[ArrayImages]:
    v2 = import_optional("torchvision.transforms.v2", "vision")
    resize = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
    sources = [
        ImageSource(_relative_name(folder, path), Path(path))
        for files in lists
        for path, _ in files.samples
    ]
    sizes: list[tuple[int, int]] = []

    def prepare(image: Any) -> Tensor:
        sizes.append((image.height, image.width))
        return resize(image)

    images = torch.stack(_read_sources(folder.name, sources, prepare, report))
    report_resizing(report, sizes, size)
    labels = torch.tensor(
        [files.label(index) for files in lists for index in range(len(files))]
    )
    whole = ArrayImages(images, labels)
    return [whole[: len(lists[0])], whole[len(lists[0]) :]]


def report_resizing(
    report: DataReport, sizes: list[tuple[int, int]], size: int
) -> None:
    """Add a fact about pictures, (height, width), that are resized on the short side and cropped to a square."""
    others = [
        (height, width) for height, width in sizes if (height, width) != (size, size)
    ]
    if not others:
        return
    ratios = [width / height for height, width in others]
    enlarged = sum(min(one) < size for one in others)
    crop = (
        f", centre cropped: width / height {describe_range(min(ratios), max(ratios))}"
    )
    report.add(
        "changed",
        f"{pluralize(len(others), 'picture')} resized to {size} pixels on the short side"
        f"{crop if any(height != width for height, width in others) else ''}"
        f"{f'; {enlarged:,} of them are enlarged' if enlarged else ''}",
    )
