"""Run of every notebook at its defaults, saved with its outputs, before a commit: ``python -m book.notebooks``."""

from __future__ import annotations

import time

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


def main() -> None:
    """Run and save every notebook, and print its seconds."""
    for path in notebooks():
        start = time.monotonic()
        nbformat.write(clean(jupyter_kernel.execute(path, None, {})), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
