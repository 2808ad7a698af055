"""Data reports on pages: what readers found, left out and changed of the data that runs were trained on."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from cpt_lab.analysis.rendering import Section
from cpt_lab.data.report import DataReport, pluralize
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import load_rows
from cpt_lab.sweeps.stores import load_data_report, place

TITLE = "What was read of"
NOTHING_CHANGED = "Nothing was left out or changed, and no sample stands in two splits."
NOT_STORED = "the report of these rows is not stored beside them"


def stored_reports(
    files: Iterable[Path], rows: Iterable[ResultRow] | None = None
) -> tuple[list[DataReport], list[str]]:
    """Return the different data reports that rows name, and a sentence for each that cannot be read.

    Args:
        files: stores, whose reports lie beside them.
        rows: rows whose reports are meant; None for all rows of the stores.
    """
    found: dict[str, DataReport] = {}
    missing: dict[str, str] = {}
    for file in files:
        if not place(file, "data", "").parent.is_dir():  # rows older than data reports
            continue
        for row in load_rows(file) if rows is None else rows:
            digest = row.get("data_report")
            if digest is None or digest in found:
                continue
            try:
                found[digest] = load_data_report(file, digest)
                missing.pop(digest, None)
            except (FileNotFoundError, ValueError) as error:
                reason = (
                    NOT_STORED if isinstance(error, FileNotFoundError) else str(error)
                )
                missing[digest] = (
                    f"{row['spec']['recipe']['dataset']} (report {digest}): {reason}"
                )
    return list(found.values()), list(missing.values())


def sections(
    reports: Iterable[DataReport], missing: Iterable[str] = (), style: str = "left"
) -> list[Section]:
    """Return a section of a page for every data report, and one for those that cannot be read."""
    shown = []
    for report in reports:
        notes = [
            f"Report {report.digest}: `data_report` of the rows that were trained on these data."
        ]
        if not report.notices:
            notes.append(NOTHING_CHANGED)
        table = pd.DataFrame(report.facts, columns=["topic", "fact"])
        shown.append(
            Section(f"{TITLE} {report.dataset}", tuple(notes), table=table, style=style)
        )
    if sentences := tuple(missing):
        shown.append(Section("Data whose report cannot be read", sentences))
    return shown


def summary(reports: Iterable[DataReport]) -> tuple[str, ...]:
    """Return a sentence where data were left out, changed or shared between splits; none elsewhere."""
    count = sum(len(report.notices) for report in reports)
    if not count:
        return ()
    return (
        f"{pluralize(count, 'fact')} below on what was left out or changed of the data, or stands in two splits.",
    )
