"""Tables written as CSV files: spreadsheets show their texts, and compute none of them."""

import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd

# With these a spreadsheet begins a formula; the last four are their wide forms in East Asian fonts.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
# a new cell begins here, but not between quotes: at a carriage return, or at another separator than the comma
NEW_CELL = re.compile(rf"\r|[;\t] *[{re.escape(''.join(FORMULA_STARTS))}]")


def write_csv(frame: pd.DataFrame, path: Path, index_label: str | None = None) -> None:
    """Write a table as CSV, with the index as the column ``index_label`` if named.

    A text that a spreadsheet would compute begins with an apostrophe in the file. Numbers stay as they are.
    """
    table = frame.reset_index(names=index_label) if index_label else frame
    safe = table.map(without_formula).rename(columns=without_formula)
    texts = [*safe.columns, *safe.select_dtypes(exclude="number").to_numpy().ravel()]
    has_new_cell = any(
        isinstance(text, str) and NEW_CELL.search(text) for text in texts
    )
    quoting = csv.QUOTE_ALL if has_new_cell else csv.QUOTE_MINIMAL
    safe.to_csv(path, index=False, quoting=quoting, encoding="utf-8")


def without_formula(cell: Any) -> Any:
    """Return a cell with an apostrophe in front where a spreadsheet would take its text for a formula.

    >>> [without_formula(cell) for cell in ("=1+1", "-0.5", -0.5, "static 8")]
    ["'=1+1", '-0.5', -0.5, 'static 8']
    """
    if not isinstance(cell, str):
        return cell
    text = (
        cell if cell.isascii() else cell.encode("utf-8", "backslashreplace").decode()
    )  # a file name may be no UTF-8
    return (
        f"'{text}" if text.startswith(FORMULA_STARTS) and not _is_number(text) else text
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
