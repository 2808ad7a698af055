"""Run of notebooks at their defaults, saved with outputs, before a commit: ``python -m book.notebooks [02 07]``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import nbformat

from cpt_lessons import jupyter_kernel
from cpt_lessons.export import without_widgets
from cpt_lessons.notebooks import notebooks


def clean(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what papermill and the machine leave behind: timings, paths, widgets."""
    without_widgets(book).metadata.pop("papermill", None)
    book.metadata["language_info"] = {"name": "python"}
    for cell in book.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if cell.metadata.get("tags") == []:
            cell.metadata.pop("tags")
    return book


def main(numbers: Sequence[str]) -> None:
    """Run and save the notebooks with these numbers, or all without numbers, and print their seconds."""
    paths = [path for number in numbers for path in notebooks(number)]
    for path in paths or notebooks():
        start = time.monotonic()
        nbformat.write(clean(jupyter_kernel.execute(path, None, {})), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
