"""Contents of data folders: image files in class folders, and files that are not read, with the reason for the report.

``list_folder`` lists everything below a folder, ``read_class_folders`` returns the images of its class folders, and
``identical_files`` and ``duplicate_files`` find copies. Hidden files and folders (names that begin with ".", "__" or
"@", as notebooks, Macs and network drives leave them) are ignored at any depth.
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
UNREAD_FORMAT = "images of this kind are not read; save them as .jpg or .png"
NOT_AN_IMAGE = "no images"
MISSING_SIZE = -1  # size of a file that is not there
MIDDLE_BYTES = (
    256  # bytes from the middle of a file, which differ in most files of one size
)
OUTSIDE_CLASS_FOLDERS = "images outside of the folders of the classes are not read"


@dataclass
class FolderContents:
    """Everything below a folder, by names relative to it, with "/" between folders.

    Attributes:
        folders: folders that are not hidden.
        files: files that are not hidden.
        hidden: hidden files, and hidden folders without a file.
        loops: links that lead back to a folder around them.
        devices: entries that are neither files nor folders, such as pipes.
    """

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)

    def files_below(self, folder: str) -> list[str]:
        """Return the files below a folder, or all files for ""."""
        return [
            name for name in self.files if not folder or name.startswith(f"{folder}/")
        ]

    def subfolders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, in alphabetical order; "" is the top folder."""
        parent = PurePosixPath(folder)
        return sorted(
            PurePosixPath(name).name
            for name in self.folders
            if PurePosixPath(name).parent == parent
        )

    def report_unread(self, report: DataReport) -> None:
        """Add facts about entries that no layout reads: hidden ones, loops, devices, and folders without files."""
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
    """Return whether a file or folder of that name is ignored.

    >>> is_hidden(".ipynb_checkpoints"), is_hidden("@eaDir"), is_hidden("cat")
    (True, True, False)
    """
    return name.startswith(HIDDEN_STARTS) or name in HIDDEN_NAMES


def is_image_file(name: str) -> bool:
    """Return whether a file name has the ending of an image format that is read."""
    return name.lower().endswith(IMAGE_ENDINGS)


def list_folder(folder: Path) -> FolderContents:
    """List all that is below a folder, in alphabetical order, following links."""
    contents = FolderContents()
    _collect(contents, folder, "", hidden=False, parents=())
    return contents


def _collect(
    contents: FolderContents,
    folder: Path,
    prefix: str,
    hidden: bool,
    parents: tuple[tuple[int, int], ...],
) -> None:
    """Add the entries of a folder, and of the folders in it, to ``contents``.

    Args:
        contents: gets the entries.
        folder: folder that is listed.
        prefix: its name relative to the top folder, with a "/" at the end.
        hidden: whether it lies in a hidden folder or is one.
        parents: device and inode of the folders around it.
    """
    with explain_read_errors(folder):
        stat = folder.stat()
        entries = sorted(os.listdir(folder))
    parents = (*parents, (stat.st_dev, stat.st_ino))
    if hidden and not entries:
        contents.hidden.append(prefix.removesuffix("/"))
    for entry in entries:
        name, path = f"{prefix}{entry}", folder / entry
        is_entry_hidden = hidden or is_hidden(entry)
        kind = _entry_kind(path, parents)
        if kind == "folder":
            if not is_entry_hidden:
                contents.folders.append(name)
            _collect(contents, path, f"{name}/", is_entry_hidden, parents)
        elif kind == "file" and is_entry_hidden:
            contents.hidden.append(name)
        elif kind == "file":
            contents.files.append(name)
        elif kind == "loop":
            contents.loops.append(name)
        else:
            contents.devices.append(name)


def _entry_kind(path: Path, parents: tuple[tuple[int, int], ...]) -> str:
    """Return "file", "folder", "loop" or "device".

    A link to nowhere is a file, whose absence is an error when it is read.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        return "file"
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return "loop"
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if S_ISDIR(stat.st_mode):
        return "loop" if (stat.st_dev, stat.st_ino) in parents else "folder"
    return "file" if S_ISREG(stat.st_mode) else "device"


def report_unused_files(
    report: DataReport, names: Iterable[str], reason: str = OUTSIDE_CLASS_FOLDERS
) -> None:
    """Add facts about files that are not read.

    Args:
        report: gets the facts.
        names: names of the files.
        reason: why images in formats that are read are not used here.
    """
    names_by_reason: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if is_image_file(name):
            names_by_reason[reason].append(name)
        elif name.lower().endswith(UNREAD_ENDINGS):
            names_by_reason[UNREAD_FORMAT].append(name)
        else:
            names_by_reason[NOT_AN_IMAGE].append(name)
    for file_reason, file_names in names_by_reason.items():
        report.leave_out(file_reason, file_names)


class ImageFiles(Dataset):
    """Images of classes on disk, with the attributes of torchvision's ImageFolder.

    Attributes:
        root: the folder of the class folders.
        classes: names of the classes, in the order of their numbers.
        samples: path and class number of every image.
        targets: class number of every image.
        target_transform: maps class numbers of these files to those of the training data; None if they are equal.
        bits: number of bits that 16-bit grey images use, see ``image_decoding.grey_bits``.
    """

    def __init__(
        self, root: Path, classes: Sequence[str], samples: Sequence[tuple[str, int]]
    ) -> None:
        self.root, self.classes, self.samples = root, list(classes), list(samples)
        self.targets = [label for _, label in self.samples]
        self.target_transform: Callable[[int], int] | None = None
        self.bits: int | None = None

    def label(self, index: int) -> int:
        """Return the class number of an image, in the numbering of the training data."""
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
    """Return the images in the class folders of a split; report all other files below it.

    Args:
        folder: folder of the data set.
        part: name of the split's folder in it, "" for the folder itself.
        contents: contents of ``folder``.
        report: gets the facts.

    Raises:
        ValueError: for a class without images, and if there is no class.
    """
    classes = contents.subfolders(part)
    if not classes:
        raise ValueError(
            f"{folder / part} has no folder of a class in it{_suggest_class_folders(contents, part)}"
        )

    files_by_class, unused = _group_by_class(contents.files_below(part), part, classes)
    samples: list[tuple[str, int]] = []
    nested: Counter[str] = Counter()
    for number, name in enumerate(classes):
        images = [file for file in files_by_class[name] if is_image_file(file)]
        other_files = [file for file in files_by_class[name] if not is_image_file(file)]
        if not images:
            raise ValueError(
                f"{folder / part / name} is the folder of a class, and has no image{_describe_other_files(other_files)}"
            )
        samples += [
            (str(folder / file), number) for file in sorted(images, key=posixpath.split)
        ]
        unused += other_files
        for file in images:
            parent = posixpath.dirname(file)
            if parent != posixpath.join(part, name):
                nested[parent] += 1

    report_unused_files(report, unused)
    _report_nested(report, nested)
    _report_similar_classes(report, part, classes)
    return ImageFiles(folder / part, classes, samples)


def _group_by_class(
    files: list[str], part: str, classes: Collection[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of each class folder of a split, and the files outside of class folders."""
    files_by_class: dict[str, list[str]] = {name: [] for name in classes}
    outside_files: list[str] = []
    prefix = f"{part}/" if part else ""
    for file in files:
        first, _, rest = file.removeprefix(prefix).partition("/")
        if rest:
            files_by_class[first].append(file)
        else:
            outside_files.append(file)
    return files_by_class, outside_files


def _describe_other_files(files: list[str]) -> str:
    """Return what a class folder without images has instead, and what to do; "" for an empty folder."""
    if not files:
        return ""
    endings = Counter(
        PurePosixPath(name).suffix.lower() or "without ending" for name in files
    )
    counts = [
        f"{pluralize(count, 'file')} {ending}"
        for ending, count in endings.most_common(3)
    ]
    return f" that is read (found: {', '.join(counts)}); save images as .jpg or .png"


def _suggest_class_folders(contents: FolderContents, part: str) -> str:
    """Return the advice to sort images that lie directly in a folder into class folders, "" without images."""
    images = [name for name in contents.files_below(part) if is_image_file(name)]
    if not images:
        return ""
    return (
        f"; {pluralize(len(images), 'image')} lie directly in it ({list_first(images)}): give those of every class "
        f"a folder of their own, {part + '/' if part else ''}<class>/"
    )


def _report_nested(report: DataReport, nested: Counter[str]) -> None:
    if nested:
        folders = [f"{name} {count:,}" for name, count in sorted(nested.items())]
        report.add(
            "changed",
            f"{pluralize(nested.total(), 'image')} in folders inside of class folders belong to that class "
            f"({list_first(folders)})",
        )


def normalize_name(name: str) -> str:
    """Return a name in lower case, with composed letters and single blanks: equal for names that users take for one."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _report_similar_classes(
    report: DataReport, part: str, classes: Collection[str]
) -> None:
    folder = f" in {part}/" if part else ""
    for names in group_similar_names(classes):
        report.add(
            "classes",
            f"{' and '.join(names)}{folder} differ in spelling alone, and are {len(names)} classes",
        )


def group_similar_names(names: Collection[str]) -> list[list[str]]:
    """Return groups of names that differ only in case, composed letters or blanks.

    >>> group_similar_names(["Cat", "cat", "dog"])
    [['Cat', 'cat']]
    """
    groups = defaultdict(list)
    for name in sorted(names):
        groups[normalize_name(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def identical_files(first: Sequence[str], second: Sequence[str]) -> dict[str, str]:
    """Return files of ``second`` with the bytes of a file of ``first``: {file: its copy in first}.

    Only files of equal size are opened, and only those with an equal middle part are read whole.
    """
    paths, other_paths = list(first), list(second)
    digests: dict[str, Any] = {}
    for digest in (_size, _read_middle, _digest):
        digests = {path: digest(path) for path in [*paths, *other_paths]}
        shared = {digests[path] for path in paths}
        shared &= {digests[path] for path in other_paths}
        shared.discard(MISSING_SIZE)
        paths = [path for path in paths if digests[path] in shared]
        other_paths = [path for path in other_paths if digests[path] in shared]

    originals: dict[str, str] = {}
    for path in paths:
        originals.setdefault(digests[path], path)
    return {path: originals[digests[path]] for path in other_paths}


def duplicate_files(paths: Sequence[str]) -> dict[str, str]:
    """Return files with the bytes of an earlier file: {file: the first file with these bytes}."""
    candidates = list(paths)
    digests: dict[str, Any] = {}
    for digest in (_size, _read_middle, _digest):
        digests = {path: digest(path) for path in candidates}
        counts = Counter(digests.values())
        candidates = [
            path
            for path in candidates
            if counts[digests[path]] > 1 and digests[path] != MISSING_SIZE
        ]

    originals: dict[str, str] = {}
    copies = {}
    for path in candidates:
        original = originals.setdefault(digests[path], path)
        if original != path:
            copies[path] = original
    return copies


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:  # a link to nowhere, which is an error when it is read
        return MISSING_SIZE


def _read_middle(path: str) -> bytes:
    """Read ``MIDDLE_BYTES`` from the middle of a file."""
    with explain_read_errors(Path(path)), Path(path).open("rb") as file:
        file.seek(max(0, _size(path) // 2 - MIDDLE_BYTES // 2))
        return file.read(MIDDLE_BYTES)


def _digest(path: str) -> str:
    with explain_read_errors(Path(path)), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
