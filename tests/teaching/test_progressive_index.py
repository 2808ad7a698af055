"""The index of ``make reproduce`` while notebooks run: sections of the paper from the first moment."""

import threading
from pathlib import Path

import pytest

from cpt_lab.analysis import report
from cpt_lab.analysis.run_table import table
from cpt_lessons import notebooks
from cpt_lessons.notebook_runs import NotebookOutcome, NotebookRun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        ("demo", "no run of this section has ended here at demo scale yet"),
        ("smoke", "smoke runs are too short to be shown"),
    ],
)
def test_index_shows_committed_figures_before_runs(scale, reason):
    sections = report._paper_sections(table([]), scale, ["04"], has_claims=False)
    claims, *figures = sections
    assert claims.title == "Object detection: the paper, committed rows"
    assert claims.table is None
    assert figures
    for section in figures:
        assert section.figure is not None
        assert section.notes[0] == f"Committed rows: {reason}."


def test_index_has_sections_in_order_of_notebooks(monkeypatch):
    monkeypatch.setattr(report, "_committed_figures", lambda topic: ())
    numbers = [f"{number:02}" for number in range(19)]
    sections = report._paper_sections(table([]), "smoke", numbers, has_claims=False)
    shown = [
        number
        for section in sections
        for number in numbers
        if f"Notebook {number} explains it" in section.notes[0]
    ]
    assert shown == sorted(shown)
    assert {"03", "04", "05", "06", "07"} <= set(shown)


@pytest.mark.parametrize(
    ("dataset", "shown"), [("", ["03"]), ("digits", ["03"]), ("my-pictures/", [])]
)
def test_index_omits_committed_sections_for_user_data(
    dataset, shown, tmp_path, monkeypatch
):
    """Show the committed rows of a section only beside data of the paper or a stand-in."""
    numbers = []

    def write(folder, scale, pages, evidence, answer, notebooks, has_claims):
        numbers.extend(notebooks)
        return folder / "index.html"

    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(notebooks, "_committed_evidence", list)
    notebooks._write_index(tmp_path, "smoke", dataset, [], ["03"], is_final=True)
    assert numbers == shown


def test_reproduce_updates_index_after_sections(monkeypatch):
    names = ["01_schedules", "08_choosing", "04_detection"]
    jobs = [NotebookRun(Path(f"{name}.ipynb"), {}, {}, Path()) for name in names]

    is_updated = threading.Event()
    seen = []

    def run(job, key, place):
        if job.notebook.stem == "08_choosing":
            is_updated.wait(30.0)
        return NotebookOutcome(job.notebook.stem, "", "done", 1.0, None)

    def after_section(outcomes):
        seen.append([outcome.name for outcome in outcomes])
        is_updated.set()

    monkeypatch.setattr(notebooks, "AT_ONCE", 1)
    monkeypatch.setattr(notebooks, "_run", run)
    monkeypatch.setattr(NotebookRun, "key", lambda self: "")
    outcomes = notebooks._run_all(jobs, {}, False, after_section)
    assert sorted(outcome.name for outcome in outcomes) == sorted(names)
    assert seen == [["01_schedules"]]
