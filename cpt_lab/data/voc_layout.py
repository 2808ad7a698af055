"""Pascal VOC's layout: lists of image ids, the image and the annotation of an id, and the objects of an annotation.

``VocIndex`` finds the files of a split, ``read_objects`` reads an annotation, and ``AnnotationNotes`` collects facts
for the data report. Pixels are counted from 1 in VOC's annotations, and both corners belong to a box.
"""

import math
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree

from cpt_lab.data.files import DataNotFoundError, explain_read_errors
from cpt_lab.data.folder_contents import FolderContents, identical_files, is_image_file
from cpt_lab.data.image_decoding import IMAGE_ENDINGS, ImageFacts
from cpt_lab.data.report import DataReport, list_first, pluralize
from cpt_lab.data.split_facts import list_name_counts

MAX_ID_LENGTH = 200  # characters; file systems allow 255 in a name
CLASS_LIST_FLAGS = (
    "1",
    "-1",
    "0",
)  # second words of the lines in VOC's lists of one class
MAX_OVERHANG_PIXELS = 1  # how far a box may stick out, because other tools round
ANNOTATION_PARTS = (
    "folder",
    "filename",
    "path",
    "source",
    "owner",
    "size",
    "segmented",
    "object",
)
OBJECT_PARTS = ("name", "bndbox", "difficult")
BOX_CORNERS = ("xmin", "ymin", "xmax", "ymax")
DIFFICULT_VALUES = {"": False, "0": False, "false": False, "1": True, "true": True}


class VocFile(NamedTuple):
    """Files of an image and its annotation."""

    image: Path
    annotation: Path


class AnnotatedObjects(NamedTuple):
    """Objects of an annotation: boxes (x1, y1, x2, y2 in pixels from the upper left corner), class numbers, flags."""

    boxes: list[list[float]]
    labels: list[int]
    difficult: list[bool]


@dataclass
class AnnotationNotes:
    """Facts that are collected while annotations are read, by names of files relative to ``folder``.

    Attributes:
        folder: folder of the data set.
        images: facts about every image file.
        drawn_as_stored: images whose boxes are drawn on the stored pixels, before the EXIF orientation.
        undecided: images with an EXIF orientation whose size does not tell on which pixels boxes are drawn.
        clipped: annotations with boxes that stick out of the image and were clipped.
        trimmed: annotations with blanks around names of classes.
        renamed: annotations whose <filename> is that of another file.
        empty: annotations without an object.
        unused: how often each element occurs that is not read.
    """

    folder: Path
    images: dict[str, ImageFacts] = field(default_factory=dict)
    drawn_as_stored: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    clipped: list[str] = field(default_factory=list)
    trimmed: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)

    def name(self, path: Path) -> str:
        """Return the name of a file in facts."""
        if path.is_relative_to(self.folder):
            return path.relative_to(self.folder).as_posix()
        return path.name

    def add_to(self, report: DataReport) -> None:
        """Add the facts to a report."""
        for topic, names, text in (
            ("read", self.empty, "without an object: all background"),
            (
                "read",
                self.renamed,
                "with another name in <filename> than that of the image: it is not used",
            ),
            (
                "changed",
                self.clipped,
                f"with boxes that stick out by at most {MAX_OVERHANG_PIXELS} pixel: clipped",
            ),
            ("changed", self.trimmed, "with blanks around names of classes: left out"),
        ):
            if names:
                different = sorted(set(names))
                report.add(
                    topic,
                    f"{pluralize(len(different), 'annotation')} {text} ({list_first(different)})",
                )
        if self.drawn_as_stored:
            report.add(
                "changed",
                f"EXIF orientation not applied to {pluralize(len(self.drawn_as_stored), 'image')}: by the sizes in "
                "the annotations, boxes were drawn on the images as stored "
                f"({list_first(sorted(self.drawn_as_stored))})",
            )
        if self.undecided:
            report.add(
                "read",
                f"{pluralize(len(self.undecided), 'image')} with EXIF orientation, of one size before and after: "
                f"boxes are taken as drawn on what viewers show ({list_first(sorted(self.undecided))})",
            )
        if self.unused:
            report.add(
                "left out",
                f"elements of annotations, with their number: {list_name_counts(self.unused)}",
            )


def find_voc_folder(folder: Path) -> Path:
    """Return the folder that holds ``Annotations``: ``folder`` itself, or one in it such as ``VOCdevkit/VOC2007``."""
    if not folder.is_dir():
        raise DataNotFoundError(
            f"there is no folder {folder}; give one in the layout of Pascal VOC"
        )
    candidates = []
    for pattern in ("", "VOC*/", "VOCdevkit/VOC*/"):
        candidates += [path.parent for path in folder.glob(f"{pattern}Annotations")]
    if len(candidates) != 1:
        names = ", ".join(map(str, candidates)) or "none"
        raise ValueError(
            f"{folder} must hold one data set in VOC's layout (JPEGImages, Annotations); found: {names}"
        )
    return candidates[0]


def list_path(folder: Path, part: str) -> Path:
    """Return the path of the list of a split."""
    return folder / "ImageSets" / "Main" / f"{part}.txt"


class VocIndex:
    """Image and annotation files of a folder in VOC's layout, by id.

    Args:
        folder: folder that holds ``Annotations`` and ``JPEGImages``.
        contents: contents of ``top``.
        top: folder of the data set: ``folder`` or a folder around it.

    Attributes:
        images: names of the images of every id.
        other_files: name of a file in another format for an id, in the folder of the images.
        annotations: ids that have an annotation.
    """

    def __init__(self, folder: Path, contents: FolderContents, top: Path) -> None:
        self.folder = folder
        base = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
        self.images: dict[str, list[str]] = defaultdict(list)
        self.other_files: dict[str, str] = {}
        for file in contents.files_below(f"{base}JPEGImages"):
            name = file.removeprefix(f"{base}JPEGImages/")
            stem = posixpath.splitext(name)[0]
            if is_image_file(name):
                self.images[stem].append(name)
            else:
                self.other_files.setdefault(stem, name)
        self.annotations = {
            posixpath.splitext(file.removeprefix(f"{base}Annotations/"))[0]
            for file in contents.files_below(f"{base}Annotations")
            if file.lower().endswith(".xml")
        }

    def split_files(self, split: str, report: DataReport) -> list[VocFile]:
        """Return the image and annotation of every line in the list of a split.

        Raises:
            DataNotFoundError: without a list.
            ValueError: for a line that is no id, or may be two.
        """
        path = list_path(self.folder, split)
        if not path.is_file():
            raise DataNotFoundError(
                f"there is no {path}: a list of image ids, one per line"
            )
        with explain_read_errors(path):
            text = path.read_text(encoding="utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{path} is empty")

        ids = [self._parse_id(line, path) for line in lines]
        num_flagged = 0
        for line, image_id in zip(lines, ids, strict=True):
            if line != image_id and line.split()[-1] in CLASS_LIST_FLAGS:
                num_flagged += 1
        if num_flagged:
            report.add(
                "left out",
                f"second column of {path.name}, {', '.join(CLASS_LIST_FLAGS)} in VOC's lists, in {num_flagged:,} lines",
            )
        return [self._find_files(image_id, report) for image_id in ids]

    def _parse_id(self, line: str, path: Path) -> str:
        """Return the id in a line: the whole line, or the part before the flag in a list of one class."""
        words = line.split()
        has_flag = len(words) > 1 and words[-1] in CLASS_LIST_FLAGS
        without_flag = line.rsplit(maxsplit=1)[0] if has_flag else line
        if without_flag != line and self._is_known(without_flag):
            if self._is_known(line):
                raise ValueError(
                    f"{path}: {line!r} may be image {line!r}, or {without_flag!r} and a flag; rename one"
                )
            line = without_flag
        is_path = line.startswith("/") or ".." in PurePosixPath(line).parts
        if not line.isprintable() or len(line) > MAX_ID_LENGTH or is_path:
            raise ValueError(f"{path}: {line[:40]!r} is no image id")
        return line

    def _is_known(self, image_id: str) -> bool:
        """Return whether an id, with or without the ending of a file, has an image or an annotation."""
        names = (image_id, _without_ending(image_id))
        return any(name in self.images or name in self.annotations for name in names)

    def _find_files(self, image_id: str, report: DataReport) -> VocFile:
        """Return the files of an id, which may have the ending of its image."""
        images = self.images.get(image_id, [])
        stem = image_id
        is_unknown = not images and image_id not in self.annotations
        if is_unknown and _without_ending(image_id) != image_id:
            stem = _without_ending(image_id)
            images = self.images.get(stem, [])
            images = [name for name in images if name == image_id] or images

        annotation = self.folder / "Annotations" / f"{stem}.xml"
        image_folder = self.folder / "JPEGImages"
        if len(images) == 1:
            return VocFile(image_folder / images[0], annotation)
        annotated_name = self._annotated_image(annotation)
        if annotated_name is not None and (not images or annotated_name in images):
            if not images:
                report.add(
                    "read",
                    f"Annotations/{stem}.xml has its image by <filename>: {annotated_name}",
                )
            return VocFile(image_folder / annotated_name, annotation)
        if images:
            raise ValueError(
                f"{image_folder}: {' and '.join(sorted(images))} may both be the image of {stem!r}; keep one, or name "
                f"it in <filename> of {annotation.name}"
            )
        if stem in self.other_files:
            raise ValueError(
                f"{image_folder / self.other_files[stem]} is of a kind that is not read; save it as .jpg or .png"
            )
        return VocFile(image_folder / f"{stem}.jpg", annotation)

    def _annotated_image(self, annotation: Path) -> str | None:
        """Return the name of the image that an annotation names, None if there is no such image."""
        if not annotation.is_file():
            return None
        name = annotated_file_name(annotation_root(annotation))
        return (
            name if name in self.images.get(posixpath.splitext(name)[0], []) else None
        )


def _without_ending(name: str) -> str:
    stem, ending = posixpath.splitext(name)
    return stem if ending.lower() in (*IMAGE_ENDINGS, ".xml") else name


def annotated_file_name(root: ElementTree.Element) -> str:
    """Return the file name of the image in an annotation, without folders, or ""."""
    return re.split(r"[/\\]", root.findtext("filename", "").strip())[-1]


def check_lists(folder: Path, lists: dict[str, list[VocFile]]) -> None:
    """Refuse images that are listed twice, and test images that are training images.

    Args:
        folder: folder in VOC's layout.
        lists: files by the name of the list: first the training list, then the test list.

    Raises:
        ValueError: names the first images, their number, and what to do.
    """
    for files in lists.values():
        image, count = Counter(file.image for file in files).most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"{folder}: {image.name} is listed {count} times; list every image once"
            )

    (train_name, train), (test_name, test) = lists.items()
    test_files = set(test)
    names = sorted({file.image.name for file in train if file in test_files})
    hint = "a test needs images of its own: take them out of one list"
    if names:
        raise ValueError(
            f"{folder}: {len(names):,} of {pluralize(len(test), 'image')} in {test_name}.txt stand in "
            f"{train_name}.txt, too ({list_first(names)}); {hint}"
        )
    train_paths = [str(file.image) for file in train]
    test_paths = [str(file.image) for file in test]
    copies = identical_files(train_paths, test_paths)
    if copies:
        pairs = [
            f"{Path(copy).name} is {Path(original).name}"
            for copy, original in sorted(copies.items())
        ]
        raise ValueError(
            f"{folder}: {len(copies):,} of {pluralize(len(test), 'image')} in {test_name}.txt are copies of images in "
            f"{train_name}.txt ({list_first(pairs)}); {hint}"
        )


def report_unlisted(
    report: DataReport,
    contents: FolderContents,
    top: Path,
    lists: dict[str, list[VocFile]],
    folder: Path,
) -> None:
    """Add facts about files below a data set's folder that are not used.

    Args:
        report: gets the facts.
        contents: contents of ``top``.
        top: folder of the data set.
        lists: files by the name of the list.
        folder: folder in VOC's layout, ``top`` or below it.
    """
    contents.report_unread(report)
    used = {list_path(folder, split) for split in lists}
    for files in lists.values():
        for file in files:
            used.update(file)
    unused = [name for name in contents.files if top / name not in used]

    base = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
    file_folders = (f"{base}JPEGImages/", f"{base}Annotations/")
    unlisted, other_lists, other_files = [], [], []
    for name in unused:
        if name.startswith(file_folders) and (
            is_image_file(name) or name.endswith(".xml")
        ):
            unlisted.append(name)
        elif name.startswith(f"{base}ImageSets/") and name.endswith(".txt"):
            other_lists.append(name)
        else:
            other_files.append(name)
    list_names = [f"{split}.txt" for split in lists]
    report.leave_out(f"listed neither in {' nor in '.join(list_names)}", unlisted)
    report.leave_out(
        f"of the lists, only {' and '.join(list_names)} are read", other_lists
    )
    report.leave_out("no part of the layout that is read", sorted(set(other_files)))


def annotation_root(xml: Path) -> ElementTree.Element:
    """Return the root of an annotation; ValueError names a file that is damaged."""
    with explain_read_errors(xml):
        return ElementTree.parse(xml).getroot()


def boxes_are_upright(
    xml: Path,
    image: Path,
    root: ElementTree.Element,
    facts: ImageFacts,
    notes: AnnotationNotes,
) -> bool:
    """Return whether boxes are drawn on the image as viewers show it, turned by its EXIF orientation.

    The size in the annotation decides. If both sizes are equal, boxes are taken as drawn on the turned image.

    Args:
        xml: file of the annotation.
        image: file of the image.
        root: root of the annotation.
        facts: facts about the image.
        notes: notes the image if boxes are drawn on the stored pixels, or if that cannot be told.

    Raises:
        ValueError: if the annotation has neither of the two sizes.
    """
    height, width = (_number(root, f"size/{side}", xml) for side in ("height", "width"))
    if (height, width) == facts.shown_size:
        if facts.orientation > 1 and facts.shown_size == facts.stored_size:
            notes.undecided.append(notes.name(image))
        return True
    if (height, width) == facts.stored_size:
        notes.drawn_as_stored.append(notes.name(image))
        return False

    shown_height, shown_width = facts.shown_size
    hint = ""
    if facts.orientation > 1:
        stored_height, stored_width = facts.stored_size
        hint = f", and {stored_width} x {stored_height} before its EXIF orientation {facts.orientation} is applied"
    elif (width, height) == facts.shown_size:
        hint = (
            ": the sides are exchanged, as where an image has lost its EXIF orientation"
        )
    raise ValueError(
        f"{xml} says {width:g} x {height:g} pixels, {image.name} has {shown_width} x {shown_height}{hint}"
    )


def read_objects(
    xml: Path,
    root: ElementTree.Element,
    size: tuple[int, int],
    classes: Sequence[str],
    notes: AnnotationNotes,
) -> AnnotatedObjects:
    """Return the objects of an annotation.

    Args:
        xml: file of the annotation, for errors.
        root: root of the annotation.
        size: height and width of the image on which boxes are drawn.
        classes: names of all classes.
        notes: collects what is changed and what is not used.

    Raises:
        ValueError: names the file, the object, and what is wrong with it.
    """
    elements = root.findall("object")
    num_nested = len(list(root.iter("object"))) - len(elements)
    if num_nested:
        raise ValueError(
            f"{xml}: {pluralize(num_nested, 'object')} inside of other elements; <annotation> must hold them"
        )
    notes.unused.update(
        child.tag for child in root if child.tag not in ANNOTATION_PARTS
    )
    if not elements:
        notes.empty.append(notes.name(xml))

    objects = AnnotatedObjects([], [], [])
    for number, element in enumerate(elements, start=1):
        where = f"{xml}, object {number}"
        name = element.findtext("name", "")
        if name != name.strip():
            notes.trimmed.append(notes.name(xml))
        name = name.strip()
        if name not in classes:
            raise ValueError(
                f"{where}: unknown class {name!r}; the classes are {', '.join(classes)}"
            )
        objects.boxes.append(_box(element, f"{where} ({name})", size, xml, notes))
        objects.labels.append(classes.index(name))
        objects.difficult.append(_is_difficult(element, where))
        notes.unused.update(
            f"object/{child.tag}" for child in element if child.tag not in OBJECT_PARTS
        )
    return objects


def _box(
    element: ElementTree.Element,
    where: str,
    size: tuple[int, int],
    xml: Path,
    notes: AnnotationNotes,
) -> list[float]:
    """Return the box of an object, counted from 0 and clipped to the image.

    Args:
        element: element of the object.
        where: file, number and class of the object, for errors.
        size: height and width of the image.
        xml: file of the annotation.
        notes: notes the annotation if the box is clipped.
    """
    height, width = size
    for tag in OBJECT_PARTS:
        if (count := len(element.findall(tag))) > 1:
            raise ValueError(f"{where}: {count} elements {tag}; an object has one")
    if element.find("bndbox") is None:
        other_tags = [child.tag for child in element if child.tag not in OBJECT_PARTS]
        raise ValueError(
            f"{where}: there is no bndbox (found: {', '.join(other_tags) or 'nothing else'}); boxes need xmin, ymin, "
            "xmax, ymax"
        )
    x1, y1, x2, y2 = (
        _number(element, f"bndbox/{corner}", where) for corner in BOX_CORNERS
    )
    box_text = f"({x1:g}, {y1:g}) to ({x2:g}, {y2:g})"
    if 0 <= min(x1, y1) < 1 and max(x2, y2) <= 1:
        raise ValueError(
            f"{where}: the box {box_text} looks like fractions of the image; VOC counts pixels from 1"
        )
    if not _has_area([x1, y1, x2, y2]):
        raise ValueError(f"{where}: the box {box_text} has no area")
    outside = f"{where}: the box {box_text} is not inside the {width} x {height} image"
    if min(x1, y1) == 0:
        raise ValueError(
            f"{outside}: VOC counts pixels from 1, and this file probably from 0; add 1 to xmin and ymin of all boxes, "
            "and to xmax and ymax where they are the last pixels of a box"
        )
    clipped = [max(x1, 1), max(y1, 1), min(x2, width), min(y2, height)]
    moved = max(abs(a - b) for a, b in zip(clipped, (x1, y1, x2, y2), strict=True))
    if moved > MAX_OVERHANG_PIXELS or not _has_area(clipped):
        raise ValueError(outside)
    if moved:
        notes.clipped.append(notes.name(xml))
    return [clipped[0] - 1, clipped[1] - 1, clipped[2], clipped[3]]


def _has_area(box: Sequence[float]) -> bool:
    """Return whether a box x1, y1, x2, y2 in VOC's counting has an area; in a box of one pixel, x1 = x2."""
    x1, y1, x2, y2 = box
    return x1 - 1 < x2 and y1 - 1 < y2


def _is_difficult(element: ElementTree.Element, where: str) -> bool:
    text = element.findtext("difficult", "").strip().lower()
    if text not in DIFFICULT_VALUES:
        raise ValueError(f"{where}: difficult must be 0 or 1, got {text!r}")
    return DIFFICULT_VALUES[text]


def _number(element: ElementTree.Element, path: str, where: object) -> float:
    text = element.findtext(path)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {path} must be a number, got {text!r}")
    return value
