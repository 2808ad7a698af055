"""Images with boxes: scenes of embedded digits, Pascal VOC, and the user's own (``data/cards/own-pictures.md``).

``load_detection`` loads the data of a recipe, ``read_annotated_image`` reads one image and its annotation. Files have
VOC's layout, see ``voc_layout``.

Shapes: n boxes of an image.
"""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.transforms import v2

from cpt_lab.data.files import DataNotFoundError, missing_data_error, own_path
from cpt_lab.data.folder_contents import group_similar_names, list_folder
from cpt_lab.data.image_decoding import (
    grey_bits,
    inspect_image_file,
    open_rgb,
    report_image_files,
    report_orientation,
)
from cpt_lab.data.loading import read_each
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
from cpt_lab.data.splits import choose_samples, split_sizes, title_with_sizes
from cpt_lab.data.voc_layout import (
    AnnotationNotes,
    VocFile,
    VocIndex,
    annotated_file_name,
    annotation_root,
    boxes_are_upright,
    check_lists,
    find_voc_folder,
    list_path,
    read_objects,
    report_unlisted,
)
from cpt_lab.experiments.detection import EXPERIMENT, DetectionRecipe
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import command, data_dir

log = logging.getLogger(__name__)
VOC_CLASSES = tuple(
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor".split()
)
# Year, training split and test split of torchvision's VOCDetection, by name of the data set.
VOC_SPLITS = {
    "voc2012": ("2012", "train", "val"),
    "voc2007": ("2007", "trainval", "test"),
}
DIGIT_NAMES = tuple(str(digit) for digit in range(10))
DEFAULT_SCENE_COUNT = 400  # scenes of a split whose number the recipe leaves open
DIGIT_SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels
MAX_PLACEMENTS = 20  # positions that are tried for a digit


@dataclass(frozen=True)
class AnnotatedImage:
    """An image, as a file or in memory, and its objects.

    Objects are arrays, not tensors: worker processes get thousands of them, and torch would send each tensor through a
    file descriptor of its own.

    Attributes:
        image: a file, or pixels uint8 (3, H, W).
        size: height and width in pixels.
        boxes: float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner.
        labels: class numbers, int64 (n,).
        difficult: VOC's flags of objects that do not count, bool (n,).
        turn: turn the file by its EXIF orientation, as viewers do, because its boxes are drawn on the turned image.
        bits: number of bits that the 16-bit grey images of the data set use; None without such images.
    """

    image: Path | Tensor
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray
    turn: bool = True
    bits: int | None = None

    def read(self) -> Tensor:
        """Return the pixels, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.image, Tensor):
            return self.image
        return v2.functional.pil_to_tensor(open_rgb(self.image, self.bits, self.turn))


@dataclass(frozen=True)
class DetectionData:
    """Annotated images in three splits.

    Attributes:
        title: name of the data in figures and rows.
        classes: names of the classes.
        train: training split.
        valid: validation split; empty when nothing is held out.
        test: test split.
        checksum: checksum of annotations and pixels, or of annotations and the sizes of the files.
        report: what was read, left out and changed.
    """

    title: str
    classes: tuple[str, ...]
    train: tuple[AnnotatedImage, ...]
    valid: tuple[AnnotatedImage, ...]
    test: tuple[AnnotatedImage, ...]
    checksum: str
    report: DataReport = field(default_factory=empty_report)


def annotate_image(
    image: Path | Tensor,
    size: tuple[int, int],
    boxes: Any,
    labels: Any,
    difficult: Any,
) -> AnnotatedImage:
    """Return an image with its objects, as arrays of the types that ``AnnotatedImage`` has."""
    return AnnotatedImage(
        image,
        size,
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(labels, dtype=np.int64),
        np.array(difficult, dtype=bool),
    )


def load_detection(recipe: DetectionRecipe) -> DetectionData:
    """Load the annotated images of a recipe and hold out its validation images.

    The held-out images and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when files do not have the documented layout, an image is damaged, or there are too few.
    """
    report = DataReport(recipe.dataset)
    if recipe.dataset == "digit-scenes":
        return _load_scenes(recipe, report)
    files = _find_files(recipe.dataset, report)
    splits, notes = _read_splits(recipe, files)
    bits = _grey_bits(
        recipe.dataset, [file.image for file in (*files.train, *files.test)], notes
    )
    if bits is not None:
        splits = [[replace(image, bits=bits) for image in split] for split in splits]
    train, valid, test = (tuple(split) for split in splits)

    for name, split in zip(SPLIT_NAMES, (train, valid, test), strict=True):
        if split and all(image.difficult.all() for image in split):
            raise ValueError(
                f"{recipe.dataset}: there is no object that counts on any of {len(split)} {name} images"
            )
    _report_annotations(report, recipe, notes, bits)
    _report_splits(
        report, (train, valid, test), files.classes, (len(files.train), len(files.test))
    )
    report.log_notices(log)
    return DetectionData(
        title=title_with_sizes(files.title, recipe, train, valid),
        classes=files.classes,
        train=train,
        valid=valid,
        test=test,
        checksum=_checksum(train + valid + test),
        report=report,
    )


def _load_scenes(recipe: DetectionRecipe, report: DataReport) -> DetectionData:
    """Return scenes of digits."""
    size = recipe.size
    train = digit_scenes("train", recipe.train_images or DEFAULT_SCENE_COUNT, size)
    valid = digit_scenes("valid", recipe.valid_images, size)
    test = digit_scenes("test", recipe.test_images or DEFAULT_SCENE_COUNT, size)
    title = f"synthetic scenes of scikit-learn digits, {size} x {size}"
    report.add("read", f"{title}: drawn with fixed seeds, no files")
    _report_splits(
        report, (train, valid, test), DIGIT_NAMES, (len(train) + len(valid), len(test))
    )
    return DetectionData(
        title=title,
        classes=DIGIT_NAMES,
        train=train,
        valid=valid,
        test=test,
        checksum=_checksum(train + valid + test),
        report=report,
    )


def _read_splits(
    recipe: DetectionRecipe, files: "_VocFiles"
) -> tuple[list[list[AnnotatedImage]], AnnotationNotes]:
    """Return annotated images to train on, to hold out and to test on, and facts about their files."""
    order = np.random.default_rng(0).permutation(len(files.train))
    num_train, num_held_out = split_sizes(recipe, len(order))
    train_indices = sorted(order[num_held_out:][:num_train])
    valid_indices = sorted(order[:num_held_out])
    split_files = [
        [files.train[i] for i in train_indices],
        [files.train[i] for i in valid_indices],
        [files.test[i] for i in choose_samples(len(files.test), recipe.test_images)],
    ]

    notes = AnnotationNotes(files.folder)

    def read(file: VocFile) -> AnnotatedImage:
        return read_annotated_image(file.image, file.annotation, files.classes, notes)

    images = iter(read_each(read, itertools.chain.from_iterable(split_files)))
    splits = [list(itertools.islice(images, len(part))) for part in split_files]
    return splits, notes


def _grey_bits(
    dataset: str, images: Sequence[Path], notes: AnnotationNotes
) -> int | None:
    """Return how many of 16 bits the grey images of a data set use; None without 16-bit images.

    If some of the images that were read have 16 bits, all images of the data set are inspected.
    """
    facts = dict(notes.images)
    if any(image.is_deep_grey for image in facts.values()):
        unread = [image for image in images if notes.name(image) not in facts]
        names = map(notes.name, unread)
        facts |= dict(zip(names, read_each(inspect_image_file, unread), strict=True))
    return grey_bits(dataset, facts)


def _report_annotations(
    report: DataReport,
    recipe: DetectionRecipe,
    notes: AnnotationNotes,
    bits: int | None,
) -> None:
    """Add facts about the image and annotation files that were read."""
    drawn_as_stored = set(notes.drawn_as_stored)
    facts = {}
    for name, image in notes.images.items():
        facts[name] = (
            image._replace(orientation=1) if name in drawn_as_stored else image
        )
    report_image_files(report, facts, bits)
    report_orientation(report, facts)
    notes.add_to(report)

    short_sides = [min(image.stored_size) for image in notes.images.values()]
    resized = [side for side in short_sides if side != recipe.size]
    if resized:
        text = (
            f"{pluralize(len(resized), 'image')} resized to {recipe.size} pixels on the short side, at most "
            f"{recipe.max_size} on the long one"
        )
        num_enlarged = sum(side < recipe.size for side in resized)
        if num_enlarged:
            text += f"; {num_enlarged:,} of them are enlarged"
        report.add("changed", text)


def _report_splits(
    report: DataReport,
    splits: Sequence[tuple[AnnotatedImage, ...]],
    classes: Sequence[str],
    available: tuple[int, int],
) -> None:
    """Add facts about objects and values of training, validation and test images, and images in several splits.

    Args:
        report: gets the facts.
        splits: training, validation and test images.
        classes: names of the classes.
        available: numbers of images in the training part and in the test part of the data set.
    """
    report_sizes(report, [len(split) for split in splits], available)
    images = [image for split in splits for image in split]
    num_difficult = sum(int(image.difficult.sum()) for image in images)
    if num_difficult:
        report.add(
            "left out",
            f"{pluralize(num_difficult, 'difficult object')}: not trained on, neither found nor missed in tests",
        )
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        labels = [image.labels[~image.difficult] for image in split]
        all_labels = np.concatenate([np.zeros(0, np.int64), *labels])
        report_classes(report, name, all_labels, classes, noun="object")

    if any(isinstance(image.image, Tensor) for image in images):
        _report_images_in_memory(report, splits)
        return
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        report_sample_values(report, name, split, _open_image)
    if is_own(report.dataset):
        train, valid, _ = splits
        report_shared_files(
            report,
            [str(image.image) for image in train],
            [str(image.image) for image in valid],
        )


def _open_image(image: AnnotatedImage) -> Any:
    """Return the PIL image of an annotated image on disk."""
    assert isinstance(image.image, Path)
    return open_rgb(image.image, image.bits, image.turn)


def _report_images_in_memory(
    report: DataReport, splits: Sequence[tuple[AnnotatedImage, ...]]
) -> None:
    """Add facts about the values of images in memory, and about images in several splits."""
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        report_values(report, name, [image.read() for image in split])

    sizes = {image.size for split in splits for image in split}
    if len(sizes) > 1:
        return
    stacked = {}
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        if split:
            stacked[name] = torch.stack([image.read() for image in split])
        else:
            stacked[name] = torch.zeros(0, 3, *splits[0][0].size, dtype=torch.uint8)
    report_shared_images(report, stacked)


class _VocFiles(NamedTuple):
    """Files of a data set in VOC's layout.

    Attributes:
        train: files to train on and to hold out.
        test: files to test on.
        classes: names of the classes.
        title: name of the data in figures and rows.
        folder: folder to which names in facts are relative.
    """

    train: list[VocFile]
    test: list[VocFile]
    classes: tuple[str, ...]
    title: str
    folder: Path


def _find_files(dataset: str, report: DataReport) -> _VocFiles:
    """Return the files of Pascal VOC in the data folder, or of the user's own data."""
    EXPERIMENT.check_dataset(dataset)
    if dataset not in VOC_SPLITS:
        return _find_own_files(dataset, report)
    year, train_split, test_split = VOC_SPLITS[dataset]
    try:
        train = torchvision.datasets.VOCDetection(data_dir(), year, train_split)
        test = torchvision.datasets.VOCDetection(data_dir(), year, test_split)
    except (RuntimeError, FileNotFoundError) as error:
        raise missing_data_error(dataset) from error
    return _VocFiles(
        train=_list_voc_files(train),
        test=_list_voc_files(test),
        classes=VOC_CLASSES,
        title=EXPERIMENT.named_datasets[dataset].title,
        folder=data_dir(),
    )


def _list_voc_files(dataset: Any) -> list[VocFile]:
    """Return the files of a torchvision VOCDetection."""
    return list(map(VocFile, map(Path, dataset.images), map(Path, dataset.annotations)))


def _find_own_files(dataset: str, report: DataReport) -> _VocFiles:
    """Return the image and annotation files of the user's data; report unlisted files."""
    top = own_path(dataset)
    folder = find_voc_folder(top)
    contents = list_folder(top)
    index = VocIndex(folder, contents, top)
    test_split = "test" if list_path(folder, "test").is_file() else "val"
    lists = {split: index.split_files(split, report) for split in ("train", test_split)}
    check_lists(folder, lists)
    report_unlisted(report, contents, top, lists, folder)

    names = set()
    for file in lists["train"]:
        for obj in annotation_root(file.annotation).findall("object"):
            names.add(obj.findtext("name", "").strip())
    classes = tuple(sorted(names - {""}))
    if not classes:
        raise ValueError(f"{folder}: there is no object in any training annotation")
    for similar in group_similar_names(classes):
        report.add(
            "classes",
            f"{' and '.join(similar)} differ in spelling alone, and are {len(similar)} classes",
        )
    report.add("split", f"train.txt is trained on and {test_split}.txt tested on")
    return _VocFiles(
        train=lists["train"],
        test=lists[test_split],
        classes=classes,
        title=f"own pictures ({top.name})",
        folder=top,
    )


def digit_scenes(part: str, count: int, size: int) -> tuple[AnnotatedImage, ...]:
    """Return synthetic scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different images of scikit-learn's set. A scene depends on its
    split, index and size alone. Boxes are exact: the smallest that hold all ink of a digit.

    Args:
        part: "train", "valid" or "test".
        count: number of scenes.
        size: side of a scene in pixels.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    ranges = {"train": (0, 1097), "valid": (1097, 1397), "test": (1397, 1797)}
    first, last = ranges[part]
    indices = order[first:last]
    return tuple(
        _digit_scene(digits, indices, seeded_generator(first, i), size)
        for i in range(count)
    )


def _digit_scene(
    digits: Any, indices: np.ndarray, random: torch.Generator, size: int
) -> AnnotatedImage:
    """Return one scene of digits.

    Args:
        digits: scikit-learn's digits.
        indices: indices of the digits that may be drawn.
        random: generator of the scene.
        size: side of the scene in pixels.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    canvas = torch.zeros(size, size)
    boxes: list[list[int]] = []
    labels = []
    for _ in range(draw(1, 4)):
        index = indices[draw(0, len(indices) - 1)]
        min_side, max_side = (round(side * size / 96) for side in DIGIT_SIDES)
        ink = _enlarge_digit(
            torch.from_numpy(digits.images[index]).float(), draw(min_side, max_side)
        )
        h, w = ink.shape
        for _ in range(MAX_PLACEMENTS):
            x, y = draw(0, size - w), draw(0, size - h)
            box = [x, y, x + w, y + h]
            if not any(_touch(box, other) for other in boxes):
                canvas[y : y + h, x : x + w] = ink
                boxes.append(box)
                labels.append(int(digits.target[index]))
                break
    pixels = canvas.clamp(0, 255).to(torch.uint8).expand(3, -1, -1).contiguous()
    return annotate_image(pixels, (size, size), boxes, labels, [False] * len(boxes))


def _touch(first: list[int], second: list[int]) -> bool:
    """Return whether two boxes x1, y1, x2, y2 overlap or touch."""
    return (
        first[2] >= second[0]
        and second[2] >= first[0]
        and first[3] >= second[1]
        and second[3] >= first[1]
    )


def _enlarge_digit(digit: Tensor, side: int) -> Tensor:
    """Return the ink of an 8 x 8 digit (0..16), enlarged to ``side`` pixels (0..255) and cropped to its bounds."""
    brightness = digit[None] * (255 / 16)
    enlarged = v2.functional.resize(brightness, [side, side], antialias=True)[0]
    has_ink = enlarged >= 1
    rows = has_ink.any(1).nonzero()
    columns = has_ink.any(0).nonzero()
    return enlarged[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def random_detection(recipe: DetectionRecipe) -> DetectionData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    Every split has one batch. The user's own images are loaded instead.
    """
    if is_own(recipe.dataset):
        return load_detection(recipe)
    sizes = EXPERIMENT.named_datasets[recipe.dataset].sizes
    h, w = sizes.get("height", recipe.size), sizes.get("width", recipe.size)
    pixels = torch.randint(
        0,
        256,
        (recipe.batch, 3, h, w),
        generator=seeded_generator(0),
        dtype=torch.uint8,
    )
    box = [w / 4, h / 4, w / 2, h / 2]
    split = tuple(
        annotate_image(image, (h, w), [box], [0], [False]) for image in pixels
    )
    return DetectionData(
        title=f"random pictures for {recipe.dataset}",
        classes=tuple(map(str, range(sizes["classes"]))),
        train=split,
        valid=split,
        test=split,
        checksum="",
    )


def _checksum(images: Sequence[AnnotatedImage]) -> str:
    digest = hashlib.sha256()
    for image in images:
        if isinstance(image.image, Tensor):
            digest.update(image.image.numpy().tobytes())
        else:
            digest.update(f"{image.image.name} {image.image.stat().st_size}".encode())
        difficult = np.flatnonzero(image.difficult)
        digest.update(
            image.boxes.tobytes() + image.labels.tobytes() + difficult.tobytes()
        )
    return digest.hexdigest()[:16]


def read_annotated_image(
    image: Path, xml: Path, classes: Sequence[str], notes: AnnotationNotes | None = None
) -> AnnotatedImage:
    """Read and check an annotation, and that its image is complete and has the annotated size.

    Args:
        image: file of the image.
        xml: file of the annotation.
        classes: names of all classes.
        notes: collects what is changed and what is not used.

    Raises:
        DataNotFoundError: when a file is missing.
        ValueError: naming the file and what is wrong with it.
    """
    notes = AnnotationNotes(xml.parent) if notes is None else notes
    facts = inspect_image_file(image)
    notes.images[notes.name(image)] = facts
    root = annotation_root(xml)
    turn = boxes_are_upright(xml, image, root, facts, notes)
    if annotated_file_name(root) not in ("", image.name, image.stem):
        notes.renamed.append(notes.name(xml))
    size = facts.shown_size if turn else facts.stored_size
    objects = read_objects(xml, root, size, classes, notes)
    annotated = annotate_image(
        image, size, objects.boxes, objects.labels, objects.difficult
    )
    return replace(annotated, turn=turn)


BACKBONE_WEIGHTS_FILE = (
    "resnet18-f37072fd.pth"  # torchvision's ResNet18_Weights.IMAGENET1K_V1
)


def backbone_weights() -> Path:
    """Return the file of the backbone's ImageNet weights; DataNotFoundError says how to get it or train without it."""
    file = data_dir() / BACKBONE_WEIGHTS_FILE
    if not file.is_file():
        raise DataNotFoundError(
            f"there are no ImageNet weights {file}; get them with: {command('download resnet18')}, or train from "
            "scratch with pretrained=False"
        )
    return file


def download(name: str, language: str = "") -> Path:
    """Download "voc2007", "voc2012", or the weights of "resnet18"; they have no language."""
    if name == "resnet18":
        weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
        torch.hub.load_state_dict_from_url(
            weights.url, str(data_dir()), check_hash=True, map_location="cpu"
        )
        return data_dir() / BACKBONE_WEIGHTS_FILE
    year, *parts = VOC_SPLITS[name]
    for part in parts:
        torchvision.datasets.VOCDetection(data_dir(), year, part, download=True)
    return data_dir()
