"""The notebooks, and what of one comes from where, by its code alone."""

import ast
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

# What trains, measures or computes in float32 gives other last digits, or more than that, on another machine.
MACHINE_DEPENDENT = {
    "backward",
    "precision_range_test",
    "promise_and_machine",
    "record",
    "run",
    "sensitivity",
    "tiny_problem",
    "torch",
    "train",
}
ROWS = {"all_committed", "best_rows", "committed", "experiments"}


@cache
def read(path):
    """Return a notebook, which is not to be changed."""
    return nbformat.read(path, as_version=4)


def code_cells(book):
    return [c for c in book.cells if c.cell_type == "code"]


def pictures(book):
    """Return the code cells that show a picture."""
    return [
        c
        for c in code_cells(book)
        if any("image/png" in output.get("data", {}) for output in c.outputs)
    ]


def dependent_cells(book, roots):
    """Return the ids of the cells whose last statement uses a root, or a name that was assigned from one."""
    names, ids = set(), set()
    for cell in book.cells:
        if cell.cell_type == "code":
            comes = False
            for statement in ast.parse(cell.source).body:
                words, used, assigned = _names(statement)
                comes = bool(words & roots or used & names)
                names = names | assigned if comes else names - assigned
            ids |= {cell.id} if comes else set()
    return ids


def _names(statement):
    """Return all names that are read, attributes too; the variables that are read; those that are assigned."""
    nodes = list(ast.walk(statement))
    loops = [n.target for n in nodes if isinstance(n, ast.For | ast.comprehension)]
    local = {
        n.id for target in loops for n in ast.walk(target) if isinstance(n, ast.Name)
    }
    local |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    variables = [n for n in nodes if isinstance(n, ast.Name) and n.id not in local]
    read = {n.id for n in variables if isinstance(n.ctx, ast.Load)}
    assigned = {n.id for n in variables if isinstance(n.ctx, ast.Store)}
    assigned |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    return (
        read | {n.attr for n in nodes if isinstance(n, ast.Attribute)},
        read,
        assigned,
    )
