"""Pascal VOC's layout: lists of ids, the picture and the annotation of an id, and the objects of an annotation.

Pixels are counted from 1 in VOC's form, and both corners belong to a box.
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

MAX_ID_LENGTH = 200  # characters: file systems take 255 for a name
CLASS_LIST_FLAGS = ("1", "-1", "0")  # second words of VOC's lists of one class
MAX_OVERHANG_PIXELS = 1  # pixels that a box may stick out: rounding of other tools
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
    """Files of one picture and its annotation."""

    image: Path
    annotation: Path


class AnnotatedObjects(NamedTuple):
    """Objects of an annotation: boxes (x1, y1, x2, y2, in pixels from the upper left corner), classes, flags."""

    boxes: list[list[float]]
    labels: list[int]
    difficult: list[bool]


@dataclass
class AnnotationNotes:
    """Facts that are gathered while annotations are read; names are relative to ``folder``."""

    folder: Path
    pictures: dict[str, ImageFacts] = field(default_factory=dict)
    drawn_as_stored: list[str] = field(
        default_factory=list
    )  # pictures whose boxes are drawn before the EXIF orientation
    undecided: list[str] = field(
        default_factory=list
    )  # pictures turned by EXIF, whose sizes do not tell
    clipped: list[str] = field(default_factory=list)  # annotations
    trimmed: list[str] = field(default_factory=list)  # annotations
    renamed: list[str] = field(
        default_factory=list
    )  # annotations whose <filename> is that of another file
    empty: list[str] = field(default_factory=list)  # annotations
    unused: Counter[str] = field(default_factory=Counter)  # elements

    def name(self, path: Path) -> str:
        """Return the name of a file in facts."""
        return (
            path.relative_to(self.folder).as_posix()
            if path.is_relative_to(self.folder)
            else path.name
        )

    def add_to(self, report: DataReport) -> None:
        """Add the facts to a report."""
        for topic, names, text in (
            ("read", self.empty, "without an object: all background"),
            (
                "read",
                self.renamed,
                "with another name in <filename> than that of the picture: it plays no part",
            ),
            (
                "changed",
                self.clipped,
                f"with boxes that stick out by at most {MAX_OVERHANG_PIXELS} pixel: clipped",
            ),
            ("changed", self.trimmed, "with blanks around names of classes: left out"),
        ):
            if names:
                found = sorted(set(names))
                report.add(
                    topic,
                    f"{pluralize(len(found), 'annotation')} {text} ({list_first(found)})",
                )
        if self.drawn_as_stored:
            report.add(
                "changed",
                f"EXIF orientation not applied to {pluralize(len(self.drawn_as_stored), 'picture')}: by the sizes in "
                "the annotations, boxes were drawn on the pictures as stored "
                f"({list_first(sorted(self.drawn_as_stored))})",
            )
        if self.undecided:
            report.add(
                "read",
                f"{pluralize(len(self.undecided), 'picture')} with EXIF orientation, of one size before and after: "
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
    found = [
        f.parent
        for pattern in ("", "VOC*/", "VOCdevkit/VOC*/")
        for f in folder.glob(f"{pattern}Annotations")
    ]
    if len(found) != 1:
        names = ", ".join(str(f) for f in found) or "none"
        raise ValueError(
            f"{folder} must hold one data set in VOC's layout (JPEGImages, Annotations); found: {names}"
        )
    return found[0]


def list_path(folder: Path, part: str) -> Path:
    """Return the path of the list of a split."""
    return folder / "ImageSets" / "Main" / f"{part}.txt"


class VocIndex:
    """Pictures and annotations of a folder in VOC's layout, by id.

    Args:
        folder: that holds ``Annotations`` and ``JPEGImages``.
        contents: of ``top``, a folder around it or itself.
        top: the folder that was given.
    """

    def __init__(self, folder: Path, contents: FolderContents, top: Path) -> None:
        self.folder = folder
        base = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
        self.pictures: dict[str, list[str]] = defaultdict(list)
        self.others: dict[str, str] = {}  # files of other kinds among the pictures
        for file in contents.files_below(f"{base}JPEGImages"):
            name = file.removeprefix(f"{base}JPEGImages/")
            if is_image_file(name):
                self.pictures[posixpath.splitext(name)[0]].append(name)
            else:
                self.others.setdefault(posixpath.splitext(name)[0], name)
        self.annotations = {
            posixpath.splitext(file.removeprefix(f"{base}Annotations/"))[0]
            for file in contents.files_below(f"{base}Annotations")
            if file.lower().endswith(".xml")
        }

    def split_files(self, part: str, report: DataReport) -> list[VocFile]:
        """Return picture and annotation of every line in the list of a split.

        Raises:
            DataNotFoundError: without a list.
            ValueError: for a line that is no id, or may be two.
        """
        path = list_path(self.folder, part)
        if not path.is_file():
            raise DataNotFoundError(
                f"there is no {path}: a list of picture ids, one per line"
            )
        with explain_read_errors(path):
            lines = [
                line.strip()
                for line in path.read_text(encoding="utf-8-sig").splitlines()
                if line.strip()
            ]
        if not lines:
            raise ValueError(f"{path} is empty")
        ids = [self._id(line, path) for line in lines]
        if flagged := sum(
            line != one and line.split()[-1] in CLASS_LIST_FLAGS
            for line, one in zip(lines, ids, strict=True)
        ):
            report.add(
                "left out",
                f"second column of {path.name}, {', '.join(CLASS_LIST_FLAGS)} in VOC's lists, in {flagged:,} lines",
            )
        return [self._file(one, report) for one in ids]

    def _id(self, line: str, path: Path) -> str:
        """Return the id in a line: the whole, or what stands before the flag of a list of one class."""
        words = line.split()
        first = (
            line.rsplit(maxsplit=1)[0]
            if len(words) > 1 and words[-1] in CLASS_LIST_FLAGS
            else line
        )
        if first != line and self._is_known(first):
            if self._is_known(line):
                raise ValueError(
                    f"{path}: {line!r} may be picture {line!r}, or {first!r} and a flag; rename one"
                )
            line = first
        is_path = line.startswith("/") or ".." in PurePosixPath(line).parts
        if not line.isprintable() or len(line) > MAX_ID_LENGTH or is_path:
            raise ValueError(f"{path}: {line[:40]!r} is no picture id")
        return line

    def _is_known(self, name: str) -> bool:
        stem = _without_ending(name)
        return any(
            one in self.pictures or one in self.annotations for one in (name, stem)
        )

    def _file(self, name: str, report: DataReport) -> VocFile:
        """Return the files of an id, which may have the ending of its picture."""
        pictures = self.pictures.get(name, [])
        stem = name
        if (
            not pictures
            and name not in self.annotations
            and _without_ending(name) != name
        ):
            stem = _without_ending(name)
            pictures = self.pictures.get(stem, [])
            pictures = [one for one in pictures if one == name] or pictures
        annotation = self.folder / "Annotations" / f"{stem}.xml"
        place = self.folder / "JPEGImages"
        if len(pictures) == 1:
            return VocFile(place / pictures[0], annotation)
        named = self._named_in(annotation)
        if named is not None and (not pictures or named in pictures):
            if not pictures:
                report.add(
                    "read",
                    f"Annotations/{stem}.xml has its picture by <filename>: {named}",
                )
            return VocFile(place / named, annotation)
        if pictures:
            raise ValueError(
                f"{place}: {' and '.join(sorted(pictures))} may both be the picture of {stem!r}; keep one, or name it "
                f"in <filename> of {annotation.name}"
            )
        if stem in self.others:
            raise ValueError(
                f"{place / self.others[stem]} is of a kind that is not read; save it as .jpg or .png"
            )
        return VocFile(place / f"{stem}.jpg", annotation)

    def _named_in(self, annotation: Path) -> str | None:
        """Return the picture that an annotation names, where there is one."""
        if not annotation.is_file():
            return None
        name = annotated_file_name(annotation_root(annotation))
        return (
            name if name in self.pictures.get(posixpath.splitext(name)[0], []) else None
        )


def _without_ending(name: str) -> str:
    stem, ending = posixpath.splitext(name)
    return stem if ending.lower() in (*IMAGE_ENDINGS, ".xml") else name


def annotated_file_name(root: ElementTree.Element) -> str:
    """Return the name of the picture that an annotation gives, without folders, or ""."""
    return re.split(r"[/\\]", root.findtext("filename", "").strip())[-1]


def check_lists(folder: Path, lists: dict[str, list[VocFile]]) -> None:
    """Refuse pictures that are listed twice, and test pictures that are training pictures.

    Args:
        folder: in VOC's layout.
        lists: files by the name of the list: that to train on and that to test on.

    Raises:
        ValueError: names the first pictures, their number, and what to do.
    """
    for part in lists.values():
        image, count = Counter(file.image for file in part).most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"{folder}: {image.name} is listed {count} times; list every picture once"
            )
    (first, train), (second, test) = lists.items()
    names = sorted({f.image.name for f in train if f in set(test)})
    way_out = "a test needs pictures of its own: take them out of one list"
    if names:
        raise ValueError(
            f"{folder}: {len(names):,} of {pluralize(len(test), 'picture')} in {second}.txt stand in {first}.txt, too "
            f"({list_first(names)}); {way_out}"
        )
    copies = identical_files(
        [str(f.image) for f in train], [str(f.image) for f in test]
    )
    if copies:
        pairs = list_first(
            [
                f"{Path(one).name} is {Path(other).name}"
                for one, other in sorted(copies.items())
            ]
        )
        raise ValueError(
            f"{folder}: {len(copies):,} of {pluralize(len(test), 'picture')} in {second}.txt are copies of pictures in "
            f"{first}.txt ({pairs}); {way_out}"
        )


def report_unlisted(
    report: DataReport,
    contents: FolderContents,
    top: Path,
    lists: dict[str, list[VocFile]],
    folder: Path,
) -> None:
    """Add facts about files below a data set's folder that play no part.

    Args:
        report: of the data set.
        contents: of ``top``.
        top: folder of the data set.
        lists: files by the name of the list.
        folder: in VOC's layout, ``top`` or below it.
    """
    contents.report_unread(report)
    used = {list_path(folder, part) for part in lists}
    used.update(path for files in lists.values() for file in files for path in file)
    unused = [name for name in contents.files if top / name not in used]
    base = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
    places = (f"{base}JPEGImages/", f"{base}Annotations/")
    unlisted = [
        name
        for name in unused
        if name.startswith(places) and (is_image_file(name) or name.endswith(".xml"))
    ]
    report.leave_out(
        f"listed neither in {' nor in '.join(f'{part}.txt' for part in lists)}",
        unlisted,
    )
    other_lists = [
        name
        for name in unused
        if name.startswith(f"{base}ImageSets/") and name.endswith(".txt")
    ]
    report.leave_out(
        f"of the lists, only {' and '.join(f'{part}.txt' for part in lists)} are read",
        other_lists,
    )
    others = set(unused) - set(unlisted) - set(other_lists)
    report.leave_out("no part of the layout that is read", sorted(others))


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
    """Return whether boxes are drawn on the picture as viewers show it, turned by its EXIF orientation.

    The size in the annotation decides; where it cannot, boxes are where a viewer shows them.

    Raises:
        ValueError: where it is the size of neither.
    """
    height, width = (_number(root, f"size/{side}", xml) for side in ("height", "width"))
    if (height, width) == facts.shown_size:
        if facts.orientation > 1 and facts.shown_size == facts.stored_size:
            notes.undecided.append(notes.name(image))
        return True
    if (height, width) == facts.stored_size:
        notes.drawn_as_stored.append(notes.name(image))
        return False
    shown, stored = (
        f"{size[1]} x {size[0]}" for size in (facts.shown_size, facts.stored_size)
    )
    hint = ""
    if facts.orientation > 1:
        hint = (
            f", and {stored} before its EXIF orientation {facts.orientation} is applied"
        )
    elif (width, height) == facts.shown_size:
        hint = ": the sides are exchanged, as where a picture has lost its EXIF orientation"
    raise ValueError(
        f"{xml} says {width:g} x {height:g} pixels, {image.name} has {shown}{hint}"
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
        xml: its file, for the errors.
        root: of the annotation.
        size: height and width of the picture as its boxes see it.
        classes: names of all classes.
        notes: takes what is changed and what plays no part.

    Raises:
        ValueError: names the file, the object, and what is wrong with it.
    """
    found = AnnotatedObjects([], [], [])
    objects = root.findall("object")
    if inside := len(list(root.iter("object"))) - len(objects):
        raise ValueError(
            f"{xml}: {pluralize(inside, 'object')} inside of other elements; <annotation> must hold them"
        )
    notes.unused.update(
        child.tag for child in root if child.tag not in ANNOTATION_PARTS
    )
    if not objects:
        notes.empty.append(notes.name(xml))
    for number, obj in enumerate(objects, start=1):
        what = f"{xml}, object {number}"
        name = obj.findtext("name", "")
        if name != name.strip():
            notes.trimmed.append(notes.name(xml))
        name = name.strip()
        if name not in classes:
            raise ValueError(
                f"{what}: unknown class {name!r}; the classes are {', '.join(classes)}"
            )
        found.boxes.append(_box(obj, f"{what} ({name})", size, xml, notes))
        found.labels.append(classes.index(name))
        found.difficult.append(_is_difficult(obj, what))
        notes.unused.update(
            f"object/{child.tag}" for child in obj if child.tag not in OBJECT_PARTS
        )
    return found


def _box(
    obj: ElementTree.Element,
    what: str,
    size: tuple[int, int],
    xml: Path,
    notes: AnnotationNotes,
) -> list[float]:
    height, width = size
    if obj.find("bndbox") is None:
        others = (
            ", ".join(child.tag for child in obj if child.tag not in OBJECT_PARTS)
            or "nothing else"
        )
        raise ValueError(
            f"{what}: there is no bndbox (found: {others}); boxes need xmin, ymin, xmax, ymax"
        )
    x1, y1, x2, y2 = (_number(obj, f"bndbox/{corner}", what) for corner in BOX_CORNERS)
    shown = f"({x1:g}, {y1:g}) to ({x2:g}, {y2:g})"
    if not (x1 - 1 < x2 and y1 - 1 < y2):  # a box of one pixel has x1 = x2
        raise ValueError(f"{what}: the box {shown} has no area")
    outside = f"{what}: the box {shown} is not inside the {width} x {height} picture"
    if min(x1, y1) == 0:
        raise ValueError(
            f"{outside}: VOC counts pixels from 1, and this file probably from 0; add 1 to xmin and ymin of all boxes, "
            "and to xmax and ymax where they are the last pixels of a box"
        )
    clipped = [max(x1, 1), max(y1, 1), min(x2, width), min(y2, height)]
    moved = max(abs(a - b) for a, b in zip(clipped, (x1, y1, x2, y2), strict=True))
    if moved > MAX_OVERHANG_PIXELS or not (
        clipped[0] - 1 < clipped[2] and clipped[1] - 1 < clipped[3]
    ):
        raise ValueError(outside)
    if moved:
        notes.clipped.append(notes.name(xml))
    return [clipped[0] - 1, clipped[1] - 1, clipped[2], clipped[3]]


def _is_difficult(obj: ElementTree.Element, what: str) -> bool:
    text = obj.findtext("difficult", "").strip().lower()
    if text not in DIFFICULT_VALUES:
        raise ValueError(f"{what}: difficult must be 0 or 1, got {text!r}")
    return DIFFICULT_VALUES[text]


def _number(element: ElementTree.Element, path: str, what: object) -> float:
    text = element.findtext(path)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{what}: {path} must be a number, got {text!r}")
    return value
