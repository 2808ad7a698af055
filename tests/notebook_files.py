"""The committed notebooks."""

from functools import cache
from pathlib import Path

import nbformat

from bench.lint.notebooks import OVERVIEWS, PAPER

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# lessons with predictions and exercises
PREDICTING = [p for p in NOTEBOOKS if p.name[:2] not in (*PAPER, *OVERVIEWS)]


@cache
def read(path):
    """Return a notebook, which is not to be changed."""
    return nbformat.read(path, as_version=4)


def code_cells(book):
    return [c for c in book.cells if c.cell_type == "code"]
