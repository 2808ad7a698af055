"""Facts about files in a data set's folder that the readers of texts, sentence pairs and graphs do not open."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath

from cpt_lab.data.folder_contents import is_hidden, list_folder
from cpt_lab.data.report import DataReport


def is_below_hidden(relative_path: PurePath) -> bool:
    """Return whether a path, relative to a data set's folder, is hidden or lies in a hidden folder.

    >>> is_below_hidden(PurePath("raw/.ipynb_checkpoints/edge.csv.gz")), is_below_hidden(PurePath("raw/edge.csv.gz"))
    (True, False)
    """
    return any(is_hidden(part) for part in relative_path.parts)


def report_unread(
    report: DataReport,
    folder: Path,
    used: Collection[Path],
    reason: str,
    pattern_reasons: Iterable[tuple[str, str]] = (),
) -> None:
    """Add facts about the files of a folder that were not read, by reason and by ending.

    Args:
        report: gets the facts.
        folder: folder of the data set; names are relative to it.
        used: files that were read.
        reason: why files are not read that match no pattern.
        pattern_reasons: (pattern as ``Path.match`` has it, reason); the first pattern that matches counts.
    """
    contents = list_folder(folder)
    contents.report_unread(report)
    read = {os.path.relpath(path, folder).replace(os.sep, "/") for path in used}
    names_by_reason = defaultdict(list)
    for name in contents.files:
        if name in read:
            continue
        matching = (
            text for pattern, text in pattern_reasons if PurePath(name).match(pattern)
        )
        names_by_reason[next(matching, reason)].append(name)
    for file_reason, names in names_by_reason.items():
        report.leave_out(file_reason, names)
