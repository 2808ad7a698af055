"""Readers of the user's own images: archives and class folders, into memory or as lists of files.

``read_own_images`` returns images in memory, ``inspect_image_folders`` lists of files that stay on disk. Images of any
kind are read as eight-bit RGB, see ``image_decoding``.
"""

import io
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import DataNotFoundError, explain_read_errors, own_paths
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
)  # the first that exists is tested on
# Names that users give to folders of splits.
TRAIN_FOLDER_NAMES = ("train", "training", "trn")
TEST_FOLDER_NAMES = (
    *TEST_FOLDERS,
    "validate",
    "dev",
    "testing",
    "eval",
    "evaluation",
    "holdout",
)
MAX_SHARED_TEST_SHARE = (
    0.1  # share of the test images that may have the pixels of training images
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
    """Images to train and to test on: ArrayImages in memory or ImageFiles on disk.

    ``classes`` are the names of the classes, empty where labels are numbers. ``is_drawn``: whether the test images were
    drawn from one set of images.
    """

    train: Any
    test: Any
    title: str
    classes: list[str]
    is_drawn: bool = False


class ImageSource(NamedTuple):
    """An encoded image in a file of its own, or in an archive.

    Attributes:
        name: name in reports.
        path: path of the file or the archive.
        content: bytes of the image if an archive holds it, else None.
    """

    name: str
    path: Path
    content: bytes | None = None


def read_own_images(dataset: str, size: int, report: DataReport) -> OwnImages:
    """Return training and test images in memory; images from class folders are resized to ``size`` pixels.

    Raises:
        DataNotFoundError, ValueError: naming the file or folder, and what is wrong with it.
    """
    paths = own_paths(dataset)
    folder = paths[0]
    if len(paths) == 1 and folder.is_dir():
        has_archives = any(folder.glob("*.npz"))
        if (folder / "train").is_dir() or not has_archives:
            files = list_image_folders(folder, report)
            train, test = _load_resized(folder, [files.train, files.test], size, report)
            if not files.is_drawn:
                _check_shared_images(dataset, train, test, "folders")
            return files._replace(train=train, test=test)

    if len(paths) == 1:
        title = f"own images ({folder.name})"
        paths = _find_archives(folder, report)
    else:
        title = f"own images ({folder.stem})"
    train, test = _read_archive_pair(dataset, paths, report)
    return OwnImages(train, test, title, [])


# --- archives -------------------------------------------------------------------------------------


class _Archive(NamedTuple):
    """Content of an archive: labels (n,), and either pixels (n, H, W) or (n, H, W, C), or encoded images."""

    path: Path
    labels: np.ndarray
    images: np.ndarray | None
    sources: list[ImageSource]


def _read_archive_pair(
    dataset: str, paths: list[Path], report: DataReport
) -> list[ArrayImages]:
    """Return the images of a training and a test archive."""
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

    for name, images in zip(names, (train, test), strict=True):
        _, channels, height, width = images.images.shape
        report.add(
            "read",
            f"{name}: {pluralize(len(images), 'image')}, {width} x {height} pixels, {pluralize(channels, 'channel')}",
        )
    train_channels, test_channels = train.images.shape[1], test.images.shape[1]
    if train_channels != test_channels:
        raise ValueError(
            f"{dataset}: training and test images have {train_channels} and {test_channels} channels"
        )
    unknown = np.setdiff1d(test.labels, train.labels)
    if len(unknown):
        known = np.unique(train.labels)
        known_text = f"0..{known[-1]}"
        if len(known) <= known[-1]:
            known_text = list_first(list(map(str, known)), 12)
        raise ValueError(
            f"{paths[1]}: label {int(unknown[0])} is unknown; {paths[0].name} has {known_text}"
        )
    _check_shared_images(dataset, train, test)
    return [train, test]


def _check_shared_images(
    dataset: str, train: ArrayImages, test: ArrayImages, places: str = "archives"
) -> None:
    """Refuse test images that are training images: all of them, or more than ``MAX_SHARED_TEST_SHARE``.

    Args:
        dataset: name of the data set, for the errors.
        train: images to train on, in memory.
        test: images to test on, in memory.
        places: where the images are, for the errors.
    """
    shared = identical_images(train.images, test.images)
    if len(shared) == len(test):
        raise ValueError(
            f"{dataset}: the {len(test)} test images are the training images; a test needs others"
        )
    if len(shared) > MAX_SHARED_TEST_SHARE * len(test):
        pairs = list_first(
            [f"test image {i} is training image {k}" for i, k in shared.items()]
        )
        raise ValueError(
            f"{dataset}: {len(shared):,} of {len(test):,} test images are copies of training images ({pairs}, counted "
            f"from 0); a test needs others: take them out of one of the two {places}"
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
    """Return the names of two archives, with their folders if the names are equal."""
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    return [f"{path.parent.name}/{path.name}" for path in paths]


def _read_archive(path: Path, name: str, report: DataReport) -> _Archive:
    with (
        explain_read_errors(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        keys = set(archive.files)
        if "labels" not in keys or not ("data" in keys or {"jpeg", "offsets"} <= keys):
            raise ValueError(
                f"{path}: needs labels and either data or jpeg + offsets, has {', '.join(sorted(keys))}"
            )
        stored_labels = archive["labels"]
        labels = as_int64_vector(f"{path}: labels", stored_labels)
        if "data" in keys:
            used = {"labels", "data"}
            images, sources = archive["data"], []
        else:
            used = {"labels", "jpeg", "offsets"}
            images, sources = (
                None,
                _packed_sources(path, name, archive["jpeg"], archive["offsets"]),
            )

    unused = sorted(keys - used)
    if unused:
        report.add(
            "left out",
            f"{pluralize(len(unused), 'array')} of {name}: {list_first(unused)}",
        )
    if stored_labels.dtype.kind not in "iu" or stored_labels.ndim != 1:
        report.add(
            "changed",
            f"labels of {name}, {stored_labels.dtype} of shape {stored_labels.shape}, became whole numbers (n,)",
        )
    return _Archive(path, labels, images, sources)


def _packed_sources(
    path: Path, name: str, raw: np.ndarray, offsets: np.ndarray
) -> list[ImageSource]:
    """Return the encoded images of an archive, from concatenated files and their offsets."""
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
    sources = []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        sources.append(ImageSource(f"{name} image {i}", path, raw[start:end].tobytes()))
    return sources


def _check_archive(archive: _Archive, decoded: list[np.ndarray]) -> ArrayImages:
    """Return the images of an archive; ValueError if arrays do not have the documented shapes and types."""
    path, labels = archive.path, archive.labels
    if archive.images is not None:
        images = archive.images
    else:
        for number, image in enumerate(decoded):
            if image.shape != decoded[0].shape:
                raise ValueError(
                    f"{path}: all images need one size, image 0 has {decoded[0].shape} and image {number} "
                    f"{image.shape} (height, width, channels)"
                )
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
    if images.size == 0:
        raise ValueError(f"{path} has no images")
    if int(labels.min()) < 0:
        first = int((labels < 0).argmax())
        raise ValueError(
            f"{path}: labels must be 0, 1, ..., label {first} is {int(labels[first])}"
        )
    tensor = torch.from_numpy(images)
    tensor = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2)
    return ArrayImages(tensor.contiguous(), torch.from_numpy(labels))


# --- folders of classes ---------------------------------------------------------------------------


def list_image_folders(folder: Path, report: DataReport) -> OwnImages:
    """Return lists of files to train and to test on, both with the class numbers of the training data.

    They are the files of ``train/`` and of the first of ``TEST_FOLDERS``; a class may be missing from the test folder,
    but not from ``train/``. If there is only one of the two folders, or only class folders, every fifth image of a
    class is tested on, drawn with a fixed seed, and the title says so.

    Raises:
        DataNotFoundError, ValueError: naming the folder, and what is wrong with it.
    """
    contents = list_folder(folder)
    parts = contents.subfolders("")
    train_folder = "train" if "train" in parts else ""
    test_folder = next((part for part in TEST_FOLDERS if part in parts), None)
    if not train_folder and test_folder:
        raise DataNotFoundError(
            f"{folder} has {test_folder}/ and no train/; it needs train/<class>/"
        )
    _check_split_names(folder, parts, train_folder, test_folder)
    contents.report_unread(report)
    if train_folder:
        _report_other_folders(report, contents, test_folder)

    title = f"own images ({folder.name})"
    train = read_class_folders(folder, train_folder, contents, report)
    if len(train.classes) == 1:
        raise ValueError(
            f"{folder / train_folder}: the only class is {train.classes[0]!r}; there is nothing to learn from one "
            "class; "
            "give the images of every class a folder of their own"
        )
    if test_folder is None:
        train, test = _draw_test_images(train, folder, report)
        title += ", a fifth drawn to test on"
        return OwnImages(train, test, title, train.classes, is_drawn=True)

    test = read_class_folders(folder, test_folder, contents, report)
    if sum(part in TEST_FOLDERS for part in parts) > 1:
        title += f", tested on {test_folder}/"
    _check_classes(folder / test_folder, train.classes, test.classes)
    _check_copies(folder, test_folder, train, test)
    numbers = {name: number for number, name in enumerate(train.classes)}
    test.target_transform = [numbers[name] for name in test.classes].__getitem__
    report.add("split", f"train/ is trained on and {test_folder}/ tested on")
    return OwnImages(train, test, title, train.classes)


def _check_split_names(
    folder: Path, parts: list[str], train_folder: str, test_folder: str | None
) -> None:
    """Refuse folders with other names for splits: they would be read as classes, or not at all."""
    train_like = [
        part for part in parts if part.lower() in TRAIN_FOLDER_NAMES and part != "train"
    ]
    test_like = [
        part
        for part in parts
        if part.lower() in TEST_FOLDER_NAMES and part not in TEST_FOLDERS
    ]
    if train_folder and test_folder is None and test_like:
        raise ValueError(
            f"{folder} has train/ and {test_like[0]}/; call the second one val/"
        )
    if not train_folder and train_like and test_like:
        raise ValueError(
            f"{folder} has {train_like[0]}/ and {test_like[0]}/; call the folders train/ and val/"
        )


def _report_other_folders(
    report: DataReport, contents: FolderContents, test_folder: str | None
) -> None:
    """Add facts about files outside of train/ and the test folder."""
    for part in contents.subfolders(""):
        if part in ("train", test_folder):
            continue
        if part in TEST_FOLDERS:
            reason = f"{test_folder}/ is tested on"
        else:
            reason = "only train/ and a folder to test on are read"
        report_unused_files(report, contents.files_below(part), reason)
    report_unused_files(report, [name for name in contents.files if "/" not in name])


def _check_classes(
    test_folder: Path, train_classes: list[str], test_classes: list[str]
) -> None:
    """Refuse classes of the test folder that the training data do not have."""
    unknown = sorted(set(test_classes) - set(train_classes))
    if not unknown:
        return
    class_list = ", ".join(train_classes[:20]) + (
        ", ..." if len(train_classes) > 20 else ""
    )
    raise ValueError(
        f"{test_folder}: class {unknown[0]!r} is unknown; those of train/ are {class_list}"
        f"{_suggest_class_fix(test_folder, unknown[0], train_classes, test_classes)}"
    )


def _suggest_class_fix(
    test_folder: Path, unknown: str, train_classes: list[str], test_classes: list[str]
) -> str:
    """Return what to do about an unknown class, "" where that is not known."""
    for name in train_classes:
        if normalize_name(name) == normalize_name(unknown):
            return f"; {name!r} differs in spelling alone: give both folders one name"
    if len(test_classes) > 1:
        return ""
    tables = sorted(
        path.name
        for path in test_folder.iterdir()
        if path.is_file() and not is_image_file(path.name)
    )
    source = f" ({tables[0]} may say which)" if tables else ""
    return f"; give the images of every class a folder of their own, {test_folder.name}/<class>/{source}"


def _check_copies(
    folder: Path, test_folder: str, train: ImageFiles, test: ImageFiles
) -> None:
    """Refuse test image files that are copies of training image files, byte for byte."""
    train_paths = [path for path, _ in train.samples]
    test_paths = [path for path, _ in test.samples]
    copies = identical_files(train_paths, test_paths)
    if len(copies) == len(test):
        raise ValueError(
            f"{folder / test_folder}: the {len(test)} test images are the training images; a test needs others"
        )
    if copies:
        raise ValueError(
            f"{folder / test_folder}: {len(copies):,} of {len(test):,} test images are copies of training images "
            f"({_list_copies(folder, copies)}); a test needs others: take them out of one of the two folders"
        )


def _list_copies(folder: Path, copies: dict[str, str]) -> str:
    """Return the first copies and their originals, by names relative to a folder."""
    pairs = [
        f"{_relative_name(folder, copy)} is {_relative_name(folder, original)}"
        for copy, original in sorted(copies.items())
    ]
    return list_first(pairs)


def _relative_name(folder: Path, path: str) -> str:
    return Path(path).relative_to(folder).as_posix()


def _draw_test_images(
    files: ImageFiles, folder: Path, report: DataReport
) -> tuple[ImageFiles, ImageFiles]:
    """Split a list of files into training files and a fifth of every class to test on.

    Copies of a file are in the split of the original.
    """
    copies = duplicate_files([path for path, _ in files.samples])
    originals = [(path, label) for path, label in files.samples if path not in copies]
    count_by_class: Counter[int] = Counter()
    test_paths: set[str] = set()
    for position in np.random.default_rng(0).permutation(len(originals)):
        path, label = originals[position]
        count_by_class[label] += 1
        if count_by_class[label] % 5 == 0:
            test_paths.add(path)
    if not test_paths:
        raise ValueError(
            f"{files.root}: no class has the five images of which one is tested on; give train/, val/"
        )

    report.add(
        "split",
        "a fifth of the images of every class is tested on, drawn with seed 0; the others are trained on",
    )
    if copies:
        report.add(
            "changed",
            f"copies of other files, byte for byte: {len(copies):,}; each is in the split of its original "
            f"({_list_copies(folder, copies)})",
        )
    train_samples: list[tuple[str, int]] = []
    test_samples: list[tuple[str, int]] = []
    for path, label in files.samples:
        is_tested = copies.get(path, path) in test_paths
        (test_samples if is_tested else train_samples).append((path, label))
    return (
        ImageFiles(files.root, files.classes, train_samples),
        ImageFiles(files.root, files.classes, test_samples),
    )


# --- reading --------------------------------------------------------------------------------------


def inspect_image_folders(folder: Path, report: DataReport) -> OwnImages:
    """Return lists of files that stay on disk, after inspecting each file; report facts about them.

    Raises:
        DataNotFoundError, ValueError: naming the files, and what is wrong with them.
    """
    images = list_image_folders(folder, report)
    paths = [path for files in (images.train, images.test) for path, _ in files.samples]
    names = [_relative_name(folder, path) for path in paths]
    inspected = read_each(inspect_image_file, map(Path, paths))
    bits = _report_files(folder.name, dict(zip(names, inspected, strict=True)), report)
    images.train.bits = images.test.bits = bits
    return images


def _report_files(
    dataset: str, facts: dict[str, ImageFacts], report: DataReport
) -> int | None:
    """Add facts about image files; return the number of bits that 16-bit grey images use."""
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
    """Return ``prepare(image)`` of all images, as PIL images of mode RGB; report facts about them.

    Every file is decoded once, except 16-bit images: their scale is known only after all were inspected.
    """
    inspected = read_each(lambda source: _inspect_and_prepare(source, prepare), sources)
    facts = {}
    for source, (image_facts, _) in zip(sources, inspected, strict=True):
        facts[source.name] = image_facts
    bits = _report_files(dataset, facts, report)
    prepared = []
    for source, (_, image) in zip(sources, inspected, strict=True):
        prepared.append(
            _prepare_deep(source, prepare, bits) if image is None else image
        )
    return prepared


def _inspect_and_prepare(
    source: ImageSource, prepare: Callable[[Any], T]
) -> tuple[ImageFacts, T | None]:
    """Return facts about an image, and the prepared image; None instead of a 16-bit grey one."""
    with _explain_errors(source), _open(source) as image:
        facts = inspect_open_image(image)
        if facts.is_deep_grey:
            return facts, None
        upright = apply_orientation(to_rgb(image), facts.orientation, facts.format)
        return facts, prepare(upright)


def _prepare_deep(
    source: ImageSource, prepare: Callable[[Any], T], bits: int | None
) -> T:
    with _explain_errors(source), _open(source) as image:
        return prepare(to_upright_rgb(image, bits))


def _explain_errors(source: ImageSource) -> AbstractContextManager[None]:
    """Return a context that names the file of an image in errors, and the image if the file holds several."""
    part = "" if source.content is None else source.name
    return explain_read_errors(source.path, part)


def _open(source: ImageSource) -> Any:
    return import_optional("PIL.Image", "vision").open(
        source.path if source.content is None else io.BytesIO(source.content)
    )


def _load_resized(
    folder: Path, file_lists: list[ImageFiles], size: int, report: DataReport
) -> list[ArrayImages]:
    """Return the training and the test files in memory, resized and centre cropped to a square."""
    v2 = import_optional("torchvision.transforms.v2", "vision")
    resize = v2.Compose([v2.Resize(size), v2.CenterCrop(size), v2.PILToTensor()])
    sources = []
    labels = []
    for files in file_lists:
        for index, (path, _) in enumerate(files.samples):
            sources.append(ImageSource(_relative_name(folder, path), Path(path)))
            labels.append(files.label(index))
    sizes: list[tuple[int, int]] = []

    def prepare(image: Any) -> Tensor:
        sizes.append((image.height, image.width))
        return resize(image)

    pixels = torch.stack(_read_sources(folder.name, sources, prepare, report))
    report_resizing(report, sizes, size)
    images = ArrayImages(pixels, torch.tensor(labels))
    num_train = len(file_lists[0])
    return [images[:num_train], images[num_train:]]


def report_resizing(
    report: DataReport, sizes: list[tuple[int, int]], size: int
) -> None:
    """Add a fact about images that are resized on the short side and cropped to a square.

    Args:
        report: gets the fact.
        sizes: height and width of every image before.
        size: side of the square in pixels.
    """
    resized = [
        (height, width) for height, width in sizes if (height, width) != (size, size)
    ]
    if not resized:
        return
    text = (
        f"{pluralize(len(resized), 'image')} resized to {size} pixels on the short side"
    )
    if any(height != width for height, width in resized):
        ratios = [width / height for height, width in resized]
        text += f", centre cropped: width / height {describe_range(min(ratios), max(ratios))}"
    num_enlarged = sum(min(height, width) < size for height, width in resized)
    if num_enlarged:
        text += f"; {num_enlarged:,} of them are enlarged"
    report.add("changed", text)
