"""Check of notebooks 03 to 07 at demo scale, that every output they promise is there: ``python -m bench.demo_check``.

A cell that draws a figure has to show a picture, one that makes a table has to show it, and the cell that trains has to
show the figure and the claims of its own runs. The committed notebooks, at smoke scale, are checked by the tests with
the same function.

``--only 03 05`` takes some notebooks, ``--keep FOLDER`` keeps what ran. About fifteen minutes on two cores.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

PAPER = ("03", "04", "05", "06", "07")
FOLDER = Path(__file__).parents[1] / "notebooks"
PICTURE, TABLE = "image/png", "text/html"
TRAINS = "run_reports.compare_with_paper("
DRAWS = (
    "figures.",
    "deficit_dates.decay_figure(",
    "h12.figure(",
)
TABULATES = "NotebookTable("
CLAIMS = "the paper says"


def missing(notebook: Any, own_runs: bool) -> list[str]:
    """Return the missing outputs of a notebook, one line per cell.

    Args:
        notebook: the notebook with its outputs.
        own_runs: the notebook ran above smoke scale, so that its own runs have a figure and claims.
    """
    lines = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs = [output.get("data", {}) for output in cell.outputs]
        if any(output.output_type == "error" for output in cell.outputs):
            lines.append(f"{cell.id}: it ended in an error")
        if _last_line(cell).startswith(DRAWS) and not any(
            PICTURE in data for data in outputs
        ):
            lines.append(f"{cell.id}: no picture of {_last_line(cell)}")
        if (
            TABULATES in cell.source
            and TRAINS not in cell.source
            and not any(TABLE in data for data in outputs)
        ):
            lines.append(f"{cell.id}: no table of {_last_line(cell)}")
        if TRAINS in cell.source and own_runs:
            if not any(PICTURE in data for data in outputs):
                lines.append(f"{cell.id}: no picture of the runs that it made")
            if not any(CLAIMS in data.get(TABLE, "") for data in outputs):
                lines.append(f"{cell.id}: no claims about the runs that it made")
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for words in (
        TRAINS,
        "figures.figure_",
        "settings_table(",
        "claims_table(",
        "printed_table(",
    ):
        if not any(words in source for source in sources):
            lines.append(f"no cell calls {words.rstrip('(')}")
    return lines


def _last_line(cell: Any) -> str:
    return cell.source.strip().splitlines()[-1].strip() if cell.source.strip() else ""


def run(number: str, folder: Path) -> list[str]:
    """Run a notebook at demo scale with papermill and return what is missing."""
    import papermill

    (path,) = FOLDER.glob(f"{number}_*.ipynb")
    copy = folder / path.name
    papermill.execute_notebook(
        path, copy, {"scale": "demo"}, cwd=str(FOLDER), progress_bar=False
    )
    return missing(nbformat.read(copy, as_version=4), own_runs=True)


def main() -> int:
    """Run the notebooks, print what is missing, and return 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=PAPER, choices=PAPER, help="numbers of notebooks"
    )
    parser.add_argument("--keep", type=Path, help="folder for the notebooks that ran")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number in options.only:
            start = time.monotonic()
            lines = run(number, folder)
            failed += bool(lines)
            report = "all is there" if not lines else "; ".join(lines)
            print(f"{number}: {time.monotonic() - start:.0f} s, {report}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
