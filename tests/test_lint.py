"""`bench.lint`: every check reports the faults that `lint_faults.toml` plants, and not without them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from helpers import run_command

from bench import commit_subjects
from bench.lint.__main__ import all_checks, main
from bench.lint.dataflow import dependent_cells
from bench.lint.notebooks import MACHINE_DEPENDENT, READS_ROWS
from bench.lint.repository import Repository

CHECKS = all_checks()
FAULTS = tomllib.loads(Path(__file__).with_name("lint_faults.toml").read_text("utf-8"))
ALL_FILES = Repository().files
# Checks that compare files with each other; the others look at the changed file alone, which is quicker.
OF_ALL_FILES = {"notebook_order", "pypi_page", "shipped_packages", "study_times"}
CASES = [(check, *fault) for check, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(
    ("check", "file", "before", "after", "problem"),
    CASES,
    ids=[f"{check}, {problem}" for check, *_, problem in CASES],
)
def test_lint_reports_planted_fault(check, file, before, after, problem):
    files = ALL_FILES if check in OF_ALL_FILES else [file, "cpt_lab/numerics.py"]
    clean = Repository(files=files)
    text, after = clean.text(file), after.replace("{}", "")
    assert before in text
    wrong = text.replace(before, after) if before else after + text
    planted = Repository(changes={file: wrong}, files=files)
    assert not any(problem in each.text for each in CHECKS[check](clean))
    assert any(problem in each.text for each in CHECKS[check](planted))


def test_lint_faults_cover_every_check():
    tested_below = {"commit_subjects", "test_names"}
    assert FAULTS.keys() == CHECKS.keys() - tested_below


def test_lint_reports_test_files_of_one_name():
    files = ["tests/a/test_x.py", "tests/a/test_y.py", "tests/b/test_x.py"]
    (problem,) = CHECKS["test_names"](Repository(files=files))
    assert str(problem) == "tests/b/test_x.py:1: tests/a has a test_x.py too"


SUBJECTS = {
    "docs: Explain the range test": "",
    "quant: Process empty tensors": "",
    "tree: Feed seeds to every reader": "",
    "Explain the range test": "expected",
    "docs:Explain the range test": "expected",
    "docs: explain the range test": "expected",
    "docs: Explain the range test.": "expected",
    "prose: Explain the range test": "unknown area 'prose'",
    "docs: Explained the range test": "imperative",
    "docs: Explaining the range test": "imperative",
    "docs: Explains the range test": "imperative",
    "docs: Explain " + "x" * 59: "73 characters",
}


@pytest.mark.parametrize(("subject", "fault"), SUBJECTS.items())
def test_commit_subject_fault_names_broken_rule(subject, fault):
    message = commit_subjects.find_fault(subject)
    assert fault in message
    assert bool(fault) == bool(message)


def test_commit_subjects_are_read_from_git(tmp_path, monkeypatch):
    """Check the commits after the first one; without that one, as in a shallow clone, report that."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    run_command("git", "init", "-q", cwd=tmp_path)
    for subject in ("anything at all", "docs: Explain ranges", "docs: explains ranges"):
        run_command("git", "commit", "-q", "--allow-empty", "-m", subject, cwd=tmp_path)
    check = CHECKS["commit_subjects"]
    (problem,) = check(Repository(tmp_path))
    assert problem.text.endswith("a shallow clone needs git fetch --unshallow")
    assert list(check(Repository(tmp_path / "without_git"))) == []
    monkeypatch.setattr(commit_subjects, "FIRST_CHECKED", "HEAD~2")
    (problem,) = check(Repository(tmp_path))
    assert problem.text.startswith("'docs: explains ranges': ")


def test_lint_command_refuses_unknown_check(capsys):
    with pytest.raises(SystemExit):
        main(["zzz"])
    assert "no check has 'zzz' in its name: package_order" in capsys.readouterr().err


def test_import_cycles_name_files_of_cycle_alone():
    """Report one cycle of two files, and not the file that imports one of them."""
    files = [f"cpt_core/{name}.py" for name in ("lazy_imports", "numerics", "plan")]
    texts = (
        "from cpt_core import numerics",
        "import cpt_core.lazy_imports",
        "import cpt_core.numerics",
    )
    repository = Repository(changes=dict(zip(files, texts, strict=True)), files=files)
    (problem,) = CHECKS["import_cycles"](repository)
    cycle = " -> ".join([*files[:2], files[0]])
    assert problem.text == f"files import each other: {cycle}"


def test_lint_forbids_relative_imports():
    """Refuse them, because they would escape the check of the package order."""
    command = (sys.executable, "-m", "ruff", "check", "--stdin-filename")
    file = Path(__file__).parents[1] / "cpt_core" / "numerics.py"
    process = subprocess.run(
        [*command, file, "-"],
        input="from . import bitops\n",
        capture_output=True,
        text=True,
    )
    assert "TID252" in process.stdout


def test_dependent_cells_follow_assigned_names():
    code = (
        "runs, stored = P.run(specs), committed('x')",
        "runs = P.run(specs)\nstored = committed('x')",
        "draw(runs)",
        "for runs in split(stored):\n    draw(runs)",
        "draw([runs for runs in stored])",
        "with record(model) as seen:\n    model(x)\nprint(1)",
        "draw(seen)",
        "seen = 1",
        "draw(seen)",
        "def step():\n    return runs",
        "step()",
        "total = P.run(specs)",
        "total += 1",
        "draw(total)",
    )
    cells = [nbformat.v4.new_code_cell(c, id=str(i)) for i, c in enumerate(code)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert dependent_cells(notebook, MACHINE_DEPENDENT) == {
        "0",
        "2",
        "6",
        *("9", "10", "11", "12", "13"),
    }
    assert dependent_cells(notebook, READS_ROWS) == {"0", "1", "3", "4"}
