"""Files of a data set's folder that no reader of texts, sentence pairs or graphs opens: the report names them."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath

from cpt_lab.data.folder_contents import is_hidden, list_folder
from cpt_lab.data.report import DataReport


def is_below_hidden(place: PurePath) -> bool:
    """Return whether a path, relative to a data set's folder, is hidden or lies in a hidden folder.

    >>> is_below_hidden(PurePath("raw/.ipynb_checkpoints/edge.csv.gz")), is_below_hidden(PurePath("raw/edge.csv.gz"))
    (True, False)
    """
    return any(is_hidden(part) for part in place.parts)


def report_unread(
    report: DataReport,
    folder: Path,
    used: Collection[Path],
    reason: str,
    own_reasons: Iterable[tuple[str, str]] = (),
) -> None:
    """Add the files of a folder that are not among those that were read, by reason and by ending.

    Args:
        report: gets the facts.
        folder: of the data set; names are relative to it.
        used: the files that were read.
        reason: why other files are not read.
        own_reasons: (pattern as ``Path.match`` has it, reason), the first that fits.
    """
    contents = list_folder(folder)
    contents.report_unread(report)
    read = {os.path.relpath(path, folder).replace(os.sep, "/") for path in used}
    by_reason = defaultdict(list)
    for name in contents.files:
        if name not in read:
            own = (why for pattern, why in own_reasons if PurePath(name).match(pattern))
            by_reason[next(own, reason)].append(name)
    for why, names in by_reason.items():
        report.leave_out(why, names)
