"""Contents of folders: every file below one is a picture of a class, or has its reason in the report for being none.

Hidden files and folders (names that begin with ".", "__" or "@", as notebooks, Macs and network drives leave them) play
no part at any depth.
"""

import errno
import hashlib
import os
import posixpath
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any

from torch.utils.data import Dataset

from cpt_lab.data.files import explain_read_errors
from cpt_lab.data.image_decoding import IMAGE_ENDINGS, UNREAD_ENDINGS, open_rgb
from cpt_lab.data.report import DataReport, list_first, pluralize

HIDDEN_STARTS = (".", "__", "@")
HIDDEN_NAMES = ("lost+found", "$RECYCLE.BIN", "System Volume Information")
HIDDEN_REASON = "hidden files and folders are not read"
UNREAD_FORMAT = "pictures of this kind are not read; save them as .jpg or .png"
NOT_AN_IMAGE = "no pictures"
MISSING_SIZE = -1  # size of a file that is not there
MIDDLE_BYTES = 256  # bytes that tell most files of one size apart
OUTSIDE_CLASS_FOLDERS = "pictures outside of the folders of the classes are not read"


@dataclass
class FolderContents:
    """Everything below a folder, by names relative to it, with "/" between folders."""

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)  # files, and folders without a file
    loops: list[str] = field(
        default_factory=list
    )  # links that lead back to a folder around them
    devices: list[str] = field(
        default_factory=list
    )  # neither files nor folders, such as pipes

    def files_below(self, folder: str) -> list[str]:
        """Return the files below a folder, or all for ""."""
        return [
            name for name in self.files if not folder or name.startswith(f"{folder}/")
        ]

    def subfolders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, or in the whole for "", in alphabetical order."""
        parent = PurePosixPath(folder)
        return sorted(
            PurePosixPath(name).name
            for name in self.folders
            if PurePosixPath(name).parent == parent
        )

    def report_unread(self, report: DataReport) -> None:
        """Add facts about what cannot be read, whatever the layout."""
        report.leave_out(HIDDEN_REASON, self.hidden)
        report.leave_out("links that lead back to a folder around them", self.loops)
        report.leave_out("neither files nor folders", self.devices)
        parents = {
            str(parent)
            for name in [*self.files, *self.hidden]
            for parent in PurePosixPath(name).parents
        }
        if empty := sorted(set(self.folders) - parents):
            report.add(
                "left out",
                f"{pluralize(len(empty), 'folder')} without files ({list_first(empty)})",
            )


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of that name plays no part.

    >>> is_hidden(".ipynb_checkpoints"), is_hidden("@eaDir"), is_hidden("cat")
    (True, True, False)
    """
    return name.startswith(HIDDEN_STARTS) or name in HIDDEN_NAMES


def is_image_file(name: str) -> bool:
    """Return whether a file has an ending of the pictures that are read."""
    return name.lower().endswith(IMAGE_ENDINGS)


def list_folder(folder: Path) -> FolderContents:
    """Return all that is below a folder, in alphabetical order; links are followed."""
    contents = FolderContents()
    _collect(contents, folder, "", hidden=False, around=())
    return contents


def _collect(
    contents: FolderContents,
    folder: Path,
    prefix: str,
    hidden: bool,
    around: tuple[Any, ...],
) -> None:
    with explain_read_errors(folder):
        stat = folder.stat()
        entries = sorted(os.listdir(folder))
    inside = (*around, (stat.st_dev, stat.st_ino))
    if hidden and not entries:
        contents.hidden.append(prefix.removesuffix("/"))
    for entry in entries:
        name, path, is_shadow = (
            f"{prefix}{entry}",
            folder / entry,
            hidden or is_hidden(entry),
        )
        kind = _entry_kind(path, inside)
        if kind == "folder":
            if not is_shadow:
                contents.folders.append(name)
            _collect(contents, path, f"{name}/", is_shadow, inside)
        elif kind == "file":
            (contents.hidden if is_shadow else contents.files).append(name)
        else:
            (contents.loops if kind == "loop" else contents.devices).append(name)


def _entry_kind(path: Path, inside: tuple[Any, ...]) -> str:
    """Return "file", "folder", "loop" or "device"; a link to nowhere is a file, which is missed when it is read."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return "file"
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return "loop"
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if S_ISDIR(stat.st_mode):
        return "loop" if (stat.st_dev, stat.st_ino) in inside else "folder"
    return "file" if S_ISREG(stat.st_mode) else "device"


def report_unused_files(
    report: DataReport, names: Iterable[str], reason: str = OUTSIDE_CLASS_FOLDERS
) -> None:
    """Add facts about files that are not read; ``reason`` is that of pictures of a kind that would be."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if is_image_file(name):
            by_reason[reason].append(name)
        else:
            by_reason[
                UNREAD_FORMAT if name.lower().endswith(UNREAD_ENDINGS) else NOT_AN_IMAGE
            ].append(name)
    for why, found in by_reason.items():
        report.leave_out(why, found)


class ImageFiles(Dataset):
    """Pictures of classes on disk, as torchvision's ImageFolder has them.

    Attributes:
        root: their folder.
        classes: names of the classes, in the order of their numbers.
        samples: path and number of the class of every picture.
        targets: number of the class of every picture.
        target_transform: from numbers of these classes to those of the training data; None where they are the same.
        bits: that grey pictures of 16 bits use, see ``pictures.bits_of``.
    """

    def __init__(
        self, root: Path, classes: Sequence[str], samples: Sequence[tuple[str, int]]
    ) -> None:
        self.root, self.classes, self.samples = root, list(classes), list(samples)
        self.targets = [label for _, label in self.samples]
        self.target_transform: Callable[[int], int] | None = None
        self.bits: int | None = None

    def label(self, index: int) -> int:
        """Return the class of a picture, in the numbering of the training data."""
        number = self.samples[index][1]
        return (
            number if self.target_transform is None else self.target_transform(number)
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return open_rgb(self.samples[index][0], self.bits), self.label(index)


def read_class_folders(
    folder: Path, part: str, contents: FolderContents, report: DataReport
) -> ImageFiles:
    """Return the pictures in the class folders of a split, and report all else below it.

    Args:
        folder: of the data set.
        part: name of the split's folder in it, "" for the folder itself.
        contents: of ``folder``.
        report: of the data set.

    Raises:
        ValueError: for a class without pictures, and where there is no class.
    """
    classes = contents.subfolders(part)
    if not classes:
        raise ValueError(
            f"{folder / part} has no folder of a class in it{_suggest_class_folders(contents, part)}"
        )
    files_of, outside = _group_by_class(contents.files_below(part), part, classes)
    samples: list[tuple[str, int]] = []
    unread = outside
    nested: Counter[str] = Counter()
    for number, name in enumerate(classes):
        pictures = [file for file in files_of[name] if is_image_file(file)]
        others = [file for file in files_of[name] if not is_image_file(file)]
        if not pictures:
            raise ValueError(
                f"{folder / part / name} is the folder of a class, and has no picture{_describe_other_files(others)}"
            )
        samples += [
            (str(folder / file), number)
            for file in sorted(pictures, key=posixpath.split)
        ]
        unread += others
        parents = Counter(posixpath.dirname(file) for file in pictures)
        nested.update(
            {
                parent: n
                for parent, n in parents.items()
                if parent != posixpath.join(part, name)
            }
        )
    report_unused_files(report, unread)
    _report_nested(report, nested)
    _report_similar_classes(report, part, classes)
    return ImageFiles(folder / part, classes, samples)


def _group_by_class(
    files: list[str], part: str, classes: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each class folder of a split, and those beside the class folders."""
    files_of: dict[str, list[str]] = {name: [] for name in classes}
    outside: list[str] = []
    for file in files:
        first, _, rest = file.removeprefix(f"{part}/" if part else "").partition("/")
        (files_of[first] if rest else outside).append(file)
    return files_of, outside


def _describe_other_files(files: list[str]) -> str:
    """Return what is in a class folder that has no picture."""
    if not files:
        return ""
    endings = Counter(
        PurePosixPath(name).suffix.lower() or "without ending" for name in files
    )
    found = ", ".join(
        f"{pluralize(count, 'file')} {ending}"
        for ending, count in endings.most_common(3)
    )
    return f" that is read (found: {found}); save pictures as .jpg or .png"


def _suggest_class_folders(contents: FolderContents, part: str) -> str:
    pictures = [name for name in contents.files_below(part) if is_image_file(name)]
    if not pictures:
        return ""
    return (
        f"; {pluralize(len(pictures), 'picture')} lie directly in it ({list_first(pictures)}): give those of every "
        f"class a folder of their own, {part + '/' if part else ''}<class>/"
    )


def _report_nested(report: DataReport, nested: Counter[str]) -> None:
    if nested:
        folders = [f"{name} {count:,}" for name, count in sorted(nested.items())]
        report.add(
            "changed",
            f"{pluralize(nested.total(), 'picture')} in folders inside of class folders belong to that class "
            f"({list_first(folders)})",
        )


def normalize_name(name: str) -> str:
    """Return what names have in common that people take for one: case, composed letters and blanks do not count."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _report_similar_classes(
    report: DataReport, part: str, classes: Collection[str]
) -> None:
    for alike in group_similar_names(classes):
        where = f" in {part}/" if part else ""
        report.add(
            "classes",
            f"{' and '.join(alike)}{where} differ in spelling alone, and are {len(alike)} classes",
        )


def group_similar_names(names: Collection[str]) -> list[list[str]]:
    """Return the names that differ in case, composed letters or blanks alone, in groups.

    >>> group_alike(["Cat", "cat", "dog"])
    [['Cat', 'cat']]
    """
    groups = defaultdict(list)
    for name in sorted(names):
        groups[normalize_name(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def identical_files(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Return files of ``second`` whose bytes are those of a file of ``first``: {file: its copy in first}.

    Files of one size alone are opened, and those alone are read whole that are equal in the middle, too.
    """
    ours, theirs = list(first), list(second)
    digests: dict[str, Any] = {}
    for key in (_size, _middle, _digest):
        digests = {path: key(path) for path in [*ours, *theirs]}
        shared = {digests[path] for path in ours} & {
            digests[path] for path in theirs
        } - {MISSING_SIZE}
        ours = [path for path in ours if digests[path] in shared]
        theirs = [path for path in theirs if digests[path] in shared]
    originals: dict[str, str] = {}
    for path in ours:
        originals.setdefault(digests[path], path)
    return {path: originals[digests[path]] for path in theirs}


def duplicate_files(paths: Sequence[str]) -> dict[str, str]:
    """Return files whose bytes are those of an earlier one: {file: the first of its copies}."""
    left = list(paths)
    digests: dict[str, Any] = {}
    for key in (_size, _middle, _digest):
        digests = {path: key(path) for path in left}
        counts = Counter(digests.values())
        left = [
            path
            for path in left
            if counts[digests[path]] > 1 and digests[path] != MISSING_SIZE
        ]
    originals: dict[str, str] = {}
    for path in left:
        originals.setdefault(digests[path], path)
    return {
        path: originals[digests[path]]
        for path in left
        if originals[digests[path]] != path
    }


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:  # a link to nowhere: named when it is read
        return MISSING_SIZE


def _middle(path: str) -> bytes:
    """Return some bytes from the middle of a file."""
    with explain_read_errors(Path(path)), Path(path).open("rb") as file:
        file.seek(max(0, _size(path) // 2 - MIDDLE_BYTES // 2))
        return file.read(MIDDLE_BYTES)


def _digest(path: str) -> str:
    with explain_read_errors(Path(path)), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
