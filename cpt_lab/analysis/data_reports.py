"""Data reports on pages: how readers changed the data of runs, and what they left out."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from cpt_lab.analysis.rendering import Section
from cpt_lab.data.report import DataReport, pluralize
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import load_rows
from cpt_lab.sweeps.stores import load_data_report, place

TITLE = "Data report of"
NOTHING_CHANGED = "Nothing was left out or changed, and no sample stands in two splits."
NOT_STORED = "the report of these rows is not stored beside them"


def stored_reports(
    files: Iterable[Path], rows: Iterable[ResultRow] | None = None
) -> tuple[list[DataReport], list[str]]:
    """Return the distinct data reports that rows name, and a sentence for each report that cannot be read.

    Args:
        files: stores, whose reports are stored in a folder next to them.
        rows: rows whose reports are wanted; None for all rows of the stores.
    """
    reports: dict[str, DataReport] = {}
    missing: dict[str, str] = {}
    for file in files:
        if not place(file, "data", "").parent.is_dir():  # rows older than data reports
            continue
        for row in load_rows(file) if rows is None else rows:
            digest = row.get("data_report")
            if digest is None or digest in reports:
                continue
            try:
                reports[digest] = load_data_report(file, digest)
                missing.pop(digest, None)
            except (FileNotFoundError, ValueError) as error:
                reason = (
                    NOT_STORED if isinstance(error, FileNotFoundError) else str(error)
                )
                missing[digest] = (
                    f"{row['spec']['recipe']['dataset']} (report {digest}): {reason}"
                )
    return list(reports.values()), list(missing.values())


def sections(
    reports: Iterable[DataReport], missing: Iterable[str] = (), style: str = "left"
) -> list[Section]:
    """Return a section of a page for every data report, and one for those that cannot be read."""
    page_sections = []
    for report in reports:
        notes = [
            f"Report {report.digest}: `data_report` of the rows that were trained on these data."
        ]
        if not report.notices:
            notes.append(NOTHING_CHANGED)
        table = pd.DataFrame(report.facts, columns=["topic", "fact"])
        page_sections.append(
            Section(f"{TITLE} {report.dataset}", tuple(notes), table=table, style=style)
        )
    if sentences := tuple(missing):
        page_sections.append(Section("Data whose report cannot be read", sentences))
    return page_sections


def summary(reports: Iterable[DataReport]) -> tuple[str, ...]:
    """Return a sentence if data were left out, changed or shared between splits; otherwise nothing."""
    count = sum(len(report.notices) for report in reports)
    if not count:
        return ()
    return (
        f"{pluralize(count, 'fact')} below on what was left out or changed of the data, or stands in two splits.",
    )
