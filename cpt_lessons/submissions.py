"""Notebooks that students handed in: where they are, and what the checks of exercises printed in them.

Every notebook is a file of somebody else: what cannot be read becomes a line of its own and stops no other.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_lab.data.files import explain_read_errors

SUFFIX = ".ipynb"
MAX_BYTES = (
    100_000_000  # of a notebook: reading one takes several times its size in memory
)
NOT_HANDED_IN, NOT_RUN, UNREADABLE = "not handed in", "not run", "cannot be read"
RESULTS = (NOT_RUN, "not attempted", "not yet", "correct")  # of a check, best last
IGNORED_FOLDERS = (
    ".ipynb_checkpoints",
    "__MACOSX",
)  # copies of Jupyter, and of macOS's archives


@dataclass
class Submissions:
    """Notebooks of students below a folder.

    Attributes:
        table: a line per student, a column per exercise.
        unreadable: a sentence with file and reason for everything that could not be read.
        without_notebook: folders below the folder that hold no notebook.
    """

    table: pd.DataFrame
    unreadable: list[str]
    without_notebook: list[str]

    def checked_table(self, folder: Path) -> pd.DataFrame:
        """Return the table; ValueError where it has no exercise."""
        if self.table.columns.empty:
            raise ValueError(
                f"no notebook below {printable(folder)} says anything of an exercise; they are to be run, and saved"
            )
        return self.table


@dataclass
class _Student:
    answers: dict[str, str] = field(default_factory=dict)
    is_whole: bool = True  # every notebook was read

    def add(self, answers: dict[str, str]) -> None:
        """Add the answers of a notebook, keeping the best of each exercise."""
        for exercise, answer in answers.items():
            earlier_answer = self.answers.get(exercise, NOT_RUN)
            self.answers[exercise] = max(earlier_answer, answer, key=RESULTS.index)


def read_submissions(folder: Path) -> Submissions:
    """Read the notebooks below a folder; a student is the first name below it.

    Raises:
        FileNotFoundError: where there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {printable(folder)}")
    students: dict[str, _Student] = {}
    notebooks, unreadable = _search(folder)
    for path in notebooks:
        student = students.setdefault(
            _student_name(path.relative_to(folder)), _Student()
        )
        try:
            student.add(answers_in(path))
        except (ValueError, OSError) as error:
            unreadable.append(str(error))
            student.is_whole = False
    empty = sorted(
        printable(entry.name) for entry in folder.iterdir() if _is_student_folder(entry)
    )
    without = [name for name in empty if name not in students]
    return Submissions(_table(students), list(map(printable, unreadable)), without)


def answers_in(path: Path) -> dict[str, str]:
    """Return exercise -> what its check printed last in a notebook, or "not run".

    Raises:
        ValueError: for what is no notebook; the message names the file and the reason.
    """
    with explain_read_errors(path):
        _check_file(path)
        try:
            cells = _cells(json.loads(path.read_text(encoding="utf-8-sig")))
        except RecursionError:
            raise ValueError("its parts are nested too deep for a notebook") from None
        sources, printed = zip(*cells, strict=True) if cells else ((), ())
    exercises = re.findall(r'exercises\.check\("([\d.]+)"', "\n".join(sources))
    printed_results = "|".join(RESULTS[1:])
    # What students print before a check may end without a line end.
    results = re.findall(rf"exercise ([\d.]+): ({printed_results})", "\n".join(printed))
    return dict.fromkeys(exercises, NOT_RUN) | dict(results)


def printable(name: object) -> str:
    """Return a text without line ends, control characters and broken letters, which are written as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name)
    )


def _search(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the notebooks below a folder in order, and sentences of what cannot be opened."""
    failures: list[OSError] = []
    notebooks: list[Path] = []
    unreadable: list[str] = []
    for place, folders, files in os.walk(folder, onerror=failures.append):
        folders[:] = [name for name in folders if name not in IGNORED_FOLDERS]
        unreadable += filter(
            None, (_unfollowed(Path(place, name), folder) for name in folders)
        )
        names = [name for name in (*folders, *files) if name.lower().endswith(SUFFIX)]
        notebooks += [
            Path(place, name) for name in names if not name.startswith("._")
        ]  # macOS's notes about a file
    unreadable += [
        f"{failure.filename} cannot be read: {failure.strerror}" for failure in failures
    ]
    return sorted(notebooks), unreadable


def _unfollowed(path: Path, root: Path) -> str | None:
    """Return a sentence if a folder is a link by which notebooks are missed; what it leads to may be read anyway."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    if target.is_relative_to(root.resolve()) and path.parent != root:
        return None
    return f"{path} is a link to {target}, which is not followed; copy the folder"


def _student_name(path: Path) -> str:
    name = path.parts[0]
    return printable(name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name)


def _is_student_folder(path: Path) -> bool:
    return (
        path.is_dir()
        and not path.is_symlink()
        and path.name not in IGNORED_FOLDERS
        and path.name[0] != "."
    )


def _check_file(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise ValueError("it is a link that leads to no file")
    if path.is_dir():
        raise ValueError("it is a folder")
    if not path.is_file() and path.exists():
        raise ValueError("it is no ordinary file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(
            f"it has {size / 1e6:,.0f} MB, more than {MAX_BYTES / 1e6:,.0f}; clear its outputs and save it"
        )


def _cells(book: Any) -> list[tuple[str, str]]:
    """Return the source of every cell, and what it printed; ValueError for what is no notebook."""
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError(
            "it is no notebook, which has a list of cells; save it with JupyterLab"
        )
    cells = []
    for number, cell in enumerate(book["cells"], start=1):
        if not isinstance(cell, dict) or "source" not in cell:
            raise ValueError(f"cell {number} has no source")
        outputs = cell.get("outputs", [])
        if not isinstance(outputs, list) or not all(
            isinstance(output, dict) for output in outputs
        ):
            raise ValueError(f"the outputs of cell {number} are no list of outputs")
        printed = [
            _text(output.get("text", ""), f"an output of cell {number}")
            for output in outputs
        ]
        cells.append(
            (_text(cell["source"], f"the source of cell {number}"), "".join(printed))
        )
    return cells


def _text(value: Any, place: str) -> str:
    """Return a text, which a notebook may hold as a list of lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{place} is no text")
    return "".join(lines)


def _table(students: dict[str, _Student]) -> pd.DataFrame:
    exercises = sorted(
        {exercise for student in students.values() for exercise in student.answers}
    )
    lines = {}
    for name, student in students.items():
        missing = NOT_HANDED_IN if student.is_whole else UNREADABLE
        lines[name] = [student.answers.get(exercise, missing) for exercise in exercises]
    return pd.DataFrame.from_dict(lines, orient="index", columns=exercises)
