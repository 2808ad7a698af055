"""The committed notebooks."""

from functools import cache
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COURSE = NOTEBOOKS  # read in the order of their numbers, 00 to 18
PAPER = (
    "03",
    "04",
    "05",
    "06",
    "07",
    "08",
)  # follow the paper: another opening, and no predictions
OVERVIEWS = ("12", "13", "14")  # lessons that may do without predictions and exercises
PREDICTING = [p for p in COURSE if p.name[:2] not in (*PAPER, *OVERVIEWS)]


@cache
def read(path):
    """Return a notebook, which is not to be changed."""
    return nbformat.read(path, as_version=4)


def code_cells(book):
    return [c for c in book.cells if c.cell_type == "code"]
