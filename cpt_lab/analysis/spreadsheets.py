"""Tables written as CSV files whose texts a spreadsheet does not compute as formulas."""

import csv
import re
from pathlib import Path
from typing import Any

import pandas as pd

# A spreadsheet reads a text with such a start as a formula; the last four are their wide forms in East Asian fonts.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # noqa: RUF001
# Outside of quotes a new cell begins at a carriage return, or at a separator other than the comma.
NEW_CELL = re.compile(rf"\r|[;\t] *[{re.escape(''.join(FORMULA_STARTS))}]")


def write_csv(frame: pd.DataFrame, path: Path, index_label: str | None = None) -> None:
    """Write a table as CSV, with the index as the column ``index_label`` if named.

    A text that a spreadsheet would compute starts with an apostrophe in the file. Numbers are unchanged.
    """
    table = frame.reset_index(names=index_label) if index_label else frame
    safe = table.map(without_formula).rename(columns=without_formula)
    cells = [*safe.columns, *safe.select_dtypes(exclude="number").to_numpy().ravel()]
    texts = [cell for cell in cells if isinstance(cell, str)]
    quoting = csv.QUOTE_MINIMAL
    if any(NEW_CELL.search(text) for text in texts):
        quoting = csv.QUOTE_ALL
    safe.to_csv(path, index=False, quoting=quoting, encoding="utf-8")


def without_formula(cell: Any) -> Any:
    """Return a cell, with an apostrophe in front if a spreadsheet would read its text as a formula.

    >>> [without_formula(cell) for cell in ("=1+1", "-0.5", -0.5, "static 8")]
    ["'=1+1", '-0.5', -0.5, 'static 8']
    """
    if not isinstance(cell, str):
        return cell
    text = cell
    if not cell.isascii():
        # A file name may not be valid UTF-8.
        text = cell.encode("utf-8", "backslashreplace").decode()
    is_formula = text.startswith(FORMULA_STARTS) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
