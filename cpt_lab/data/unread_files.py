"""Files of a data set's folder that no reader opens: the report names them.  Needs no torch."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from cpt_lab.data.report import DataReport

# what systems, tools and other loaders leave behind: part of a path -> reason
LEFT_BEHIND = {
    ".ipynb_checkpoints": "copies that a notebook makes", "__MACOSX": "made by macOS when it packs an archive",
    ".git": "files of git", ".cache": "a tool's own memory", "processed": "made by another loader",
}  # fmt: skip
SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder and of the folders in it, each folder once, also where links lead back."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [name for name in sorted(folders) if os.path.realpath(os.path.join(place, name)) not in seen]
        yield from (Path(place, name) for name in sorted(names))


def report_unread(
    report: DataReport, folder: Path, used: Collection[Path], reason: str, own_reasons: Iterable[tuple[str, str]] = ()
) -> None:
    """Add the files of a folder that are not among those that were read, by reason and by ending.

    Args:
        report: gets the facts.
        folder: of the data set; names are relative to it.
        used: the files that were read.
        reason: why other files are not read.
        own_reasons: (pattern as ``Path.match`` has it, reason), the first that fits.
    """
    paths = {os.path.abspath(path) for path in used}
    by_reason = defaultdict(list)
    for path in files_below(folder):
        if os.path.abspath(path) not in paths:
            place = path.relative_to(folder)
            by_reason[_reason_of(place, reason, own_reasons)].append(place.as_posix())
    for why, names in by_reason.items():
        report.leave_out(why, names)


def _reason_of(place: Path, reason: str, own_reasons: Iterable[tuple[str, str]]) -> str:
    if place.name in SYSTEM_FILES or place.name.startswith("._"):
        return "made by the system"
    for part, why in LEFT_BEHIND.items():
        if part in place.parts[:-1]:
            return why
    return next((why for pattern, why in own_reasons if place.match(pattern)), reason)
