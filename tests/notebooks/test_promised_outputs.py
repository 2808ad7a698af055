"""``bench.demo_check``, and the figures and claims of runs that a user adds to notebooks 03 to 07."""

import copy

import pytest
from matplotlib.figure import Figure
from notebook_files import NOTEBOOKS, read

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
