"""Files of a data set's folder that no reader opens: the report names them.  Needs no torch."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePath

from cpt_lab.data.report import DataReport

HIDDEN_FOLDERS = ("@eaDir", "__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found")
HIDDEN_FILES = ("Thumbs.db", "desktop.ini")


def is_hidden(place: PurePath) -> bool:
    """Return whether a path, relative to a data set's folder, is hidden or made by a system or tool for itself.

    >>> is_hidden(PurePath("raw/.ipynb_checkpoints/edge.csv.gz")), is_hidden(PurePath("raw/edge.csv.gz"))
    (True, False)
    """
    folders = any(part.startswith(".") or part in HIDDEN_FOLDERS for part in place.parts)
    return folders or place.name in HIDDEN_FILES


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
    if is_hidden(place):
        return "hidden, or made by a system or tool for itself"
    return next((why for pattern, why in own_reasons if place.match(pattern)), reason)
