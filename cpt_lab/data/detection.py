"""Pictures with boxes: scenes of embedded digits, Pascal VOC, and your own, as ``data/cards/own-pictures.md`` has them.

Pixels are counted from 1 in VOC's form, and both corners belong to a box.

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
# name -> year and the splits to train and to test on
VOC_SPLITS = {
    "voc2012": ("2012", "train", "val"),
    "voc2007": ("2007", "trainval", "test"),
}
DIGIT_NAMES = tuple(str(digit) for digit in range(10))
DEFAULT_SCENE_COUNT = 400  # pictures of a split whose number is left open
DIGIT_SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels
MAX_PLACEMENTS = 20  # to find a free place


@dataclass(frozen=True)
class AnnotatedImage:
    """A picture, by its file or in memory, and its objects.

    Objects are arrays, not tensors: processes that read files get thousands of them, and torch would send each tensor
    through a file descriptor of its own.
    """

    image: Path | Tensor  # a file, or uint8 (3, H, W)
    size: tuple[int, int]  # height and width in pixels
    boxes: (
        np.ndarray
    )  # float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner
    labels: np.ndarray  # int64 (n,)
    difficult: np.ndarray  # bool (n,)
    turn: bool = True  # read a file as viewers show it, by its EXIF orientation: so its boxes are drawn
    bits: int | None = None  # that the grey pictures of 16 bits of the data set use

    def read(self) -> Tensor:
        """Return the picture, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.image, Tensor):
            return self.image
        return v2.functional.pil_to_tensor(open_rgb(self.image, self.bits, self.turn))


@dataclass(frozen=True)
class DetectionData:
    """Annotated pictures, split three ways."""

    title: str  # what the numbers are measured on, as figures must call it
    classes: tuple[str, ...]  # their names
    # train, valid, test: the splits; ``valid`` is empty when nothing is held out
    train: tuple[AnnotatedImage, ...]
    valid: tuple[AnnotatedImage, ...]
    test: tuple[AnnotatedImage, ...]
    checksum: (
        str  # of annotations and pixels, or of annotations and the sizes of the files
    )
    report: DataReport = field(
        default_factory=empty_report
    )  # what was read, left out and changed


def annotate_image(
    picture: Path | Tensor,
    size: tuple[int, int],
    boxes: Any,
    labels: Any,
    difficult: Any,
) -> AnnotatedImage:
    """Return a picture with its boxes and labels in the types that ``Annotated`` has."""
    places, numbers = (
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(labels, dtype=np.int64),
    )
    return AnnotatedImage(
        picture, size, places, numbers, np.array(difficult, dtype=bool)
    )


def load_detection(recipe: DetectionRecipe) -> DetectionData:
    """Load the annotations of a recipe's data and hold out its validation pictures.

    The held-out pictures and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when files do not have the documented layout, a picture is damaged, or there are too few.
    """
    r, report = recipe, DataReport(recipe.dataset)
    if r.dataset == "digit-scenes":
        train = digit_scenes("train", r.train_images or DEFAULT_SCENE_COUNT, r.size)
        valid = digit_scenes("valid", r.valid_images, r.size)
        test = digit_scenes("test", r.test_images or DEFAULT_SCENE_COUNT, r.size)
        title = f"synthetic scenes of scikit-learn digits, {r.size} x {r.size}"
        report.add("read", f"{title}: drawn with fixed seeds, no files")
        _report_splits(
            report,
            (train, valid, test),
            DIGIT_NAMES,
            (len(train) + len(valid), len(test)),
        )
        return DetectionData(
            title,
            DIGIT_NAMES,
            train,
            valid,
            test,
            _checksum(train + valid + test),
            report,
        )
    files, classes, title, folder = _find_files(r.dataset, report)
    order = np.random.default_rng(0).permutation(len(files[0]))
    used, count = split_sizes(r, len(order))
    chosen = [
        [files[0][i] for i in sorted(part)]
        for part in (order[count:][:used], order[:count])
    ]
    chosen.append([files[1][i] for i in choose_samples(len(files[1]), r.test_images)])
    notes = AnnotationNotes(folder)
    read = read_each(
        lambda file: read_annotated_image(file.image, file.annotation, classes, notes),
        [file for part in chosen for file in part],
    )
    bits = _grey_bits(r.dataset, [file.image for part in files for file in part], notes)
    pictures = iter(read if bits is None else [replace(one, bits=bits) for one in read])
    train, valid, test = (
        tuple(itertools.islice(pictures, len(part))) for part in chosen
    )
    for name, part in (("training", train), ("validation", valid), ("test", test)):
        if part and all(a.difficult.all() for a in part):
            raise ValueError(
                f"{r.dataset}: there is no object that counts on any of {len(part)} {name} pictures"
            )
    _report_annotations(report, r, notes, bits)
    _report_splits(
        report, (train, valid, test), classes, (len(files[0]), len(files[1]))
    )
    report.log_notices(log)
    checksum = _checksum(train + valid + test)
    return DetectionData(
        title_with_sizes(title, r, train, valid),
        classes,
        train,
        valid,
        test,
        checksum,
        report,
    )


def _grey_bits(
    dataset: str, pictures: Sequence[Path], notes: AnnotationNotes
) -> int | None:
    """Return how many of 16 bits the grey pictures of a data set use, of all its pictures where some have 16 bits."""
    facts = dict(notes.pictures)
    if any(one.is_deep_grey for one in facts.values()):
        others = [picture for picture in pictures if notes.name(picture) not in facts]
        facts |= dict(
            zip(
                map(notes.name, others),
                read_each(inspect_image_file, others),
                strict=True,
            )
        )
    return grey_bits(dataset, facts)


def _report_annotations(
    report: DataReport,
    recipe: DetectionRecipe,
    notes: AnnotationNotes,
    bits: int | None,
) -> None:
    """Add facts about the files of pictures and annotations that were read."""
    stored = set(notes.drawn_as_stored)
    facts = {
        name: p._replace(orientation=1) if name in stored else p
        for name, p in notes.pictures.items()
    }
    report_image_files(report, facts, bits)
    report_orientation(report, facts)
    notes.add_to(report)
    short = [min(p.stored_size) for p in notes.pictures.values()]
    if others := [side for side in short if side != recipe.size]:
        enlarged = sum(side < recipe.size for side in others)
        report.add(
            "changed",
            f"{pluralize(len(others), 'picture')} resized to {recipe.size} pixels on the short side, at most "
            f"{recipe.max_size} on the long one{f'; {enlarged:,} of them are enlarged' if enlarged else ''}",
        )


def _report_splits(
    report: DataReport,
    splits: Sequence[tuple[AnnotatedImage, ...]],
    classes: Sequence[str],
    there: tuple[int, int],
) -> None:
    """Add facts about objects and values of training, validation and test pictures, and what the splits share."""
    report_sizes(report, [len(split) for split in splits], there)
    difficult = sum(int(a.difficult.sum()) for split in splits for a in split)
    if difficult:
        report.add(
            "left out",
            f"{pluralize(difficult, 'difficult object')}: not trained on, neither found nor missed in tests",
        )
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        labels = [a.labels[~a.difficult] for a in split]
        report_classes(
            report,
            name,
            np.concatenate([np.zeros(0, np.int64), *labels]),
            classes,
            noun="object",
        )
    if any(isinstance(a.image, Tensor) for split in splits for a in split):
        _report_images_in_memory(report, splits)
        return
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        report_sample_values(report, name, split, _open_image)
    if is_own(report.dataset):
        report_shared_files(
            report, *([str(a.image) for a in split] for split in splits[:2])
        )


def _open_image(picture: AnnotatedImage) -> Any:
    """Return a picture on disk, of PIL."""
    assert isinstance(picture.image, Path)
    return open_rgb(picture.image, picture.bits, picture.turn)


def _report_images_in_memory(
    report: DataReport, splits: Sequence[tuple[AnnotatedImage, ...]]
) -> None:
    """Add facts about the values of pictures in memory, and what splits share."""
    for name, split in zip(SPLIT_NAMES, splits, strict=True):
        report_values(report, name, [a.read() for a in split])
    if len({a.size for split in splits for a in split}) == 1:
        empty = torch.zeros(0, 3, *splits[0][0].size, dtype=torch.uint8)
        stacked = [
            torch.stack([a.read() for a in split]) if split else empty
            for split in splits
        ]
        report_shared_images(report, dict(zip(SPLIT_NAMES, stacked, strict=True)))


class _VocFiles(NamedTuple):
    """Files of a data set in VOC's layout."""

    lists: list[list[VocFile]]  # to train and to test on
    classes: tuple[str, ...]
    title: str
    folder: Path  # names in facts are relative to it


def _find_files(dataset: str, report: DataReport) -> _VocFiles:
    """Return pictures and annotations to train and to test on, the classes, and a title."""
    EXPERIMENT.check_dataset(dataset)
    if dataset not in VOC_SPLITS:
        return _find_own_files(dataset, report)
    year, first, second = VOC_SPLITS[dataset]
    try:
        found = [
            torchvision.datasets.VOCDetection(data_dir(), year, part)
            for part in (first, second)
        ]
    except (RuntimeError, FileNotFoundError) as error:
        raise missing_data_error(dataset) from error
    files = [
        list(map(VocFile, map(Path, f.images), map(Path, f.annotations))) for f in found
    ]
    return _VocFiles(files, VOC_CLASSES, EXPERIMENT.named[dataset].title, data_dir())


def _find_own_files(dataset: str, report: DataReport) -> _VocFiles:
    """Return pictures and annotations of one's own, and report what lies beside them."""
    top = own_path(dataset)
    folder = find_voc_folder(top)
    contents = list_folder(top)
    index = VocIndex(folder, contents, top)
    second = "test" if list_path(folder, "test").is_file() else "val"
    lists = {part: index.split_files(part, report) for part in ("train", second)}
    check_lists(folder, lists)
    report_unlisted(report, contents, top, lists, folder)
    objects = (
        obj
        for file in lists["train"]
        for obj in annotation_root(file.annotation).findall("object")
    )
    classes = tuple(
        sorted({obj.findtext("name", "").strip() for obj in objects} - {""})
    )
    if not classes:
        raise ValueError(f"{folder}: there is no object in any training annotation")
    for alike in group_similar_names(classes):
        report.add(
            "classes",
            f"{' and '.join(alike)} differ in spelling alone, and are {len(alike)} classes",
        )
    report.add("split", f"train.txt is trained on and {second}.txt tested on")
    return _VocFiles(list(lists.values()), classes, f"own pictures ({top.name})", top)


def digit_scenes(part: str, count: int, size: int) -> tuple[AnnotatedImage, ...]:
    """Return made-up scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different pictures of scikit-learn's set. A scene depends on its
    split, number and size alone. Boxes are exact: the smallest that holds all ink of a digit.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    first, last = {"train": (0, 1097), "valid": (1097, 1397), "test": (1397, 1797)}[
        part
    ]
    chosen = order[first:last]
    return tuple(
        _digit_scene(digits, chosen, seeded_generator(first, i), size)
        for i in range(count)
    )


def _digit_scene(
    digits: Any, chosen: np.ndarray, random: torch.Generator, size: int
) -> AnnotatedImage:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    canvas = torch.zeros(size, size)
    boxes: list[list[int]] = []
    labels = []
    for _ in range(draw(1, 4)):
        index = chosen[draw(0, len(chosen) - 1)]
        side = draw(*(round(s * size / 96) for s in DIGIT_SIDES))
        ink = _enlarge_digit(torch.from_numpy(digits.images[index]).float(), side)
        h, w = ink.shape
        for _ in range(MAX_PLACEMENTS):
            x, y = draw(0, size - w), draw(0, size - h)
            if all(x + w < a or c < x or y + h < b or d < y for a, b, c, d in boxes):
                canvas[y : y + h, x : x + w] = ink
                boxes.append([x, y, x + w, y + h])
                labels.append(int(digits.target[index]))
                break
    picture = canvas.clamp(0, 255).to(torch.uint8).expand(3, -1, -1).contiguous()
    return annotate_image(picture, (size, size), boxes, labels, [False] * len(boxes))


def _enlarge_digit(digit: Tensor, side: int) -> Tensor:
    """Return the ink of an 8 x 8 digit (0..16) enlarged to ``side`` pixels (0..255), cut to where there is any."""
    large = v2.functional.resize(
        digit[None] * (255 / 16), [side, side], antialias=True
    )[0]
    rows, columns = ((large >= 1).any(dim).nonzero() for dim in (1, 0))
    return large[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def random_detection(recipe: DetectionRecipe) -> DetectionData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    One batch of every split; pictures of one's own are loaded instead.
    """
    if is_own(recipe.dataset):
        return load_detection(recipe)
    sizes = EXPERIMENT.named[recipe.dataset].sizes
    h, w = sizes.get("height", recipe.size), sizes.get("width", recipe.size)
    random = seeded_generator(0)
    pictures = torch.randint(
        0, 256, (recipe.batch, 3, h, w), generator=random, dtype=torch.uint8
    )
    part = tuple(
        annotate_image(p, (h, w), [[w / 4, h / 4, w / 2, h / 2]], [0], [False])
        for p in pictures
    )
    names = tuple(map(str, range(sizes["classes"])))
    return DetectionData(
        f"random pictures for {recipe.dataset}", names, part, part, part, ""
    )


def _checksum(pictures: Sequence[AnnotatedImage]) -> str:
    digest = hashlib.sha256()
    for a in pictures:
        if isinstance(a.image, Tensor):
            digest.update(a.image.numpy().tobytes())
        else:
            digest.update(f"{a.image.name} {a.image.stat().st_size}".encode())
        digest.update(
            a.boxes.tobytes()
            + a.labels.tobytes()
            + np.flatnonzero(a.difficult).tobytes()
        )
    return digest.hexdigest()[:16]


def read_annotated_image(
    image: Path, xml: Path, classes: Sequence[str], notes: AnnotationNotes | None = None
) -> AnnotatedImage:
    """Read and check one annotation, and that its picture is there, whole and of the size it says.

    Args:
        image: file of the picture.
        xml: file of the annotation.
        classes: names of all classes.
        notes: takes what is changed and what plays no part.

    Raises:
        DataNotFoundError: when a file is missing.
        ValueError: naming the file and what is wrong with it.
    """
    notes = AnnotationNotes(xml.parent) if notes is None else notes
    facts = inspect_image_file(image)
    notes.pictures[notes.name(image)] = facts
    root = annotation_root(xml)
    turn = boxes_are_upright(xml, image, root, facts, notes)
    if annotated_file_name(root) not in ("", image.name, image.stem):
        notes.renamed.append(notes.name(xml))
    size = facts.shown_size if turn else facts.stored_size
    objects = read_objects(xml, root, size, classes, notes)
    picture = annotate_image(
        image, size, objects.boxes, objects.labels, objects.difficult
    )
    return replace(picture, turn=turn)


BACKBONE_WEIGHTS_FILE = (
    "resnet18-f37072fd.pth"  # torchvision's ResNet18_Weights.IMAGENET1K_V1
)


def backbone_weights() -> Path:
    """Return the file of the backbone's ImageNet weights; DataNotFoundError says how to get it or do without."""
    file = data_dir() / BACKBONE_WEIGHTS_FILE
    if not file.is_file():
        raise DataNotFoundError(
            f"there are no ImageNet weights {file}; get them with: {command('download resnet18')}, or train from "
            "scratch with pretrained=False"
        )
    return file


def download(name: str, language: str = "") -> Path:
    """Get "voc2007", "voc2012", or the weights of "resnet18"; they have no language."""
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
