"""Outputs of notebooks 03 to 08: the promised figures and tables."""

import copy
import re

import nbclient
import nbformat
import pytest
from notebook_dataflow import NOTEBOOKS, read

from bench import demo_check

PAPER = [p for p in NOTEBOOKS if p.name[:2] in demo_check.PAPER]
OWN_RUNS = """
from cpt_lab.analysis import run_table
from cpt_lessons import run_reports
rows = run_table.committed("{store}").query("{condition}")
run_reports.compare_with_paper(rows)
"""


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_notebook_shows_promised_outputs(path):
    assert demo_check.missing(read(path), own_runs=False) == []


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
@pytest.mark.parametrize(
    ("store", "condition"),
    [
        ("image_digits", "model == 'mlp6' and q_min == 3 and seed < 4"),
        ("graph_facebook", "model == 'gcn' and seed < 3"),
        ("language_pydoc", "n_cycles == 2"),
        ("deficit_digits", "seed < 4"),
        ("detection_scenes", "seed < 2"),
    ],
)
def test_user_runs_show_figure_and_claims(store, condition):
    source = OWN_RUNS.format(store=store, condition=condition)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(book, timeout=300).execute()
    shown = [output.get("data", {}) for output in book.cells[0].outputs]
    assert any(demo_check.PICTURE in data for data in shown)
    assert any(demo_check.CLAIMS in data.get(demo_check.TABLE, "") for data in shown)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_notebooks_share_headings(path):
    text = "\n\n".join(
        cell.source for cell in read(path).cells if cell.cell_type == "markdown"
    )
    headings = [
        re.sub(r"^\d\. ", "", heading)
        for heading in re.findall(r"^## (.*)$", text, flags=re.M)
    ]
    first = ["The paper: method and claims", "Settings, side by side", "The experiment"]
    assert headings[:3] == first
    assert headings[-3:] == ["Paper and reproduction", "Exercises", "Summary"]
    assert any(heading.startswith(("Figure", "Figures")) for heading in headings[3:-3])


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_notebooks_summarise_paper_briefly(path):
    (first,) = [
        cell.source
        for cell in read(path).cells
        if "The paper: method and claims" in cell.source
    ]
    says = first.split("method and claims")[1]
    assert 50 < len(re.sub(r"\$[^$]*\$|\]\([^)]*\)", "x", says).split()) <= 150


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_paper_notebooks_name_existing_sweep_files(path):
    text = "\n\n".join(
        cell.source for cell in read(path).cells if cell.cell_type == "markdown"
    )
    files = re.findall(r"-f (notebooks/sweeps/\S+)", text)
    assert files
    assert all((path.parents[1] / name).is_file() for name in files)
