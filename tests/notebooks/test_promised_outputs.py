"""``bench.demo_check``, figures and claims of own runs in notebooks 03 to 07, and the budget of notebook 13."""

import copy
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure
from notebook_files import NOTEBOOKS, read

import cpt_core as cpt
from bench import demo_check
from cpt_lab.analysis import run_table
from cpt_lab.analysis.rendering import NotebookTable
from cpt_lessons import run_reports

PAPER = [p for p in NOTEBOOKS if p.name[:2] in demo_check.PAPER]


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_demo_check_reports_dropped_outputs(path):
    book = copy.deepcopy(read(path))
    cells = [
        c
        for c in book.cells
        if c.cell_type == "code" and any("data" in o for o in c.outputs)
    ]
    checked = [c for c in cells if demo_check.TRAINS not in c.source]
    assert len(checked) >= 4  # settings, a figure, claims, printed numbers
    for cell in checked:
        cell.outputs = []
    assert len(demo_check.missing(book, own_runs=False)) == len(checked)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["deficit_digits", "detection_scenes"])
def test_compare_with_paper_shows_figure_and_claims(store, monkeypatch):
    """Show what demo_check looks for; tests/teaching covers the other tasks."""
    shown = []
    monkeypatch.setattr(run_reports, "display", shown.append)
    run_reports.compare_with_paper(run_table.committed(store).query("seed < 2"))
    tables = [each for each in shown if isinstance(each, NotebookTable)]
    assert any(isinstance(each, Figure) for each in shown)
    assert any(demo_check.CLAIMS in table.html() for table in tables)


def test_solver_notebook_uses_budget_in_bisection():
    """Find one power by bisection and by the solver at a budget that is not the default."""
    (path,) = (p for p in NOTEBOOKS if p.name.startswith("13_"))
    (cell,) = (cell for cell in read(path).cells if cell.id == "bisection")
    names = {"cpt": cpt, "P": SimpleNamespace(budget=0.5)}
    exec(cell.source.replace("64_000", "6_400"), names)
    assert names["solved"].relative_cost() == pytest.approx(0.5, abs=1e-3)
    assert names["bent"](names["high"]).relative_cost() == pytest.approx(0.5, abs=1e-3)
