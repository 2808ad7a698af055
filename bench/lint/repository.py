"""The files of the repository as the checks read them, and the problems that the checks report."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import yaml

ROOT = Path(__file__).parents[2]
GENERATED = re.compile(
    r"(\.|build/|dist/|runs/|data/cache/)|.*(/__pycache__/|\.egg-info/)"
)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


class Problem(NamedTuple):
    """A place that breaks a rule.

    Attributes:
        file: path from the root of the repository.
        line: number of the line, from 1.
        text: what is wrong.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


read_text = cache(Path.read_text)
parse = cache(ast.parse)
parse_notebook = cache(nbformat.v4.reads)


class Repository:
    """Texts of the files of a checkout.

    Args:
        root: folder of the checkout.
        changes: texts that stand for those on disk, by file, so that a test can plant a fault.
        files: the only files that checks find, in place of all.
    """

    def __init__(
        self,
        root: Path = ROOT,
        changes: Mapping[str, str] | None = None,
        files: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.changes = changes or {}
        self.selected_files = files

    @cached_property
    def files(self) -> list[str]:
        """Files that git lists or would add; without git, all that no program generated."""
        if self.selected_files:
            return list(self.selected_files)
        command = [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        process = subprocess.run(
            command, cwd=self.root, capture_output=True, text=True, check=False
        )
        names = process.stdout.split("\0")[:-1]
        if process.returncode:
            paths = (
                path.relative_to(self.root).as_posix() for path in self.root.rglob("*")
            )
            names = [path for path in paths if not GENERATED.match(path)]
        present = {name for name in names if (self.root / name).is_file()}
        return sorted(present)

    def text(self, file: str) -> str:
        """Return the text of a file."""
        if file in self.changes:
            return self.changes[file]
        return read_text(self.root / file, encoding="utf-8", errors="replace")

    def tree(self, file: str) -> ast.Module:
        """Return the syntax tree of a Python file."""
        return parse(self.text(file))

    def notebook(self, file: str) -> Any:
        """Return a notebook, not to be changed."""
        return parse_notebook(self.text(file))

    def find(self, pattern: str) -> list[str]:
        """Return the files whose path matches a regular expression as a whole."""
        return [file for file in self.files if re.fullmatch(pattern, file)]

    def exists(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return path in self.changes or (self.root / path).exists()

    def problem(self, file: str, text: str, place: str = "") -> Problem:
        """Return a problem at the first occurrence of a place in a file, else at its first line."""
        before, found, _ = self.text(file).partition(place) if place else ("", "", "")
        return Problem(file, before.count("\n") + 1 if found else 1, text)

    def yaml(self, file: str) -> Any:
        """Return the content of a YAML file."""
        return yaml.safe_load(self.text(file))

    def prose(self, file: str) -> str:
        """Return the text of a page, or of the Markdown cells of a notebook."""
        if not file.endswith(".ipynb"):
            return self.text(file)
        cells = self.notebook(file).cells
        return "\n\n".join(
            cell.source for cell in cells if cell.cell_type == "markdown"
        )


def code_cells(notebook: Any) -> list[Any]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    """Return the tags of a cell."""
    return cell.metadata.get("tags", [])
