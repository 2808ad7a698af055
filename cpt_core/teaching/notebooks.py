"""Run the notebooks through papermill and collect them in one report; a second run does only what changed."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from tqdm.auto import tqdm

from cpt_core.analysis import report
from cpt_core.experiments.recipes import task_of_dataset
from cpt_core.paths import ROOT, notebooks_dir, runs_dir
from cpt_core.teaching.parameters import check_parameters, check_values

# Measured on two cores: (smoke, demo) seconds, for the estimate that is printed before anything starts.
SECONDS = {
    "00": (6, 8), "01": (6, 6), "02": (8, 8), "03": (12, 150), "04": (15, 180), "05": (12, 120), "06": (15, 150),
    "07": (15, 180), "08": (12, 90),
}  # fmt: skip

AT_ONCE = 2

# A cell that takes longer than this has lost its kernel (it happens when many start at once) and is tried once more.
TIMEOUT = {"smoke": 180, "demo": 1800, "paper": None}


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook."""

    name: str
    status: str  # "done", "up to date", "failed", or "earlier" for what another call has run
    seconds: float
    page: Path
    error: str = ""


def notebooks(number: str | None = None) -> list[Path]:
    """Return the notebooks, or the one whose name starts with ``number``; ValueError names what there is."""
    found = sorted(notebooks_dir().glob("[0-9][0-9]_*.ipynb"))
    if number is None:
        return found
    chosen = [p for p in found if p.name.startswith(number)]
    if not number or len(chosen) != 1:
        raise ValueError(f"no notebook {number!r}; choose from {', '.join(p.name[:2] for p in found)}")
    return chosen


def parameters_of(notebook: Path) -> dict[str, Any]:
    """Return the parameters of a notebook with their defaults."""
    inspected = papermill.inspect_notebook(str(notebook))
    return {name: p["default"] for name, p in inspected.items()}


def reproduce(
    scale: str = "demo",
    number: str | None = None,
    dataset: str | None = None,
    given: dict[str, Any] | None = None,
    progress: bool = True,
) -> tuple[list[Outcome], Path]:
    """Run notebooks at a scale, ``AT_ONCE`` at a time, and write ``runs/reproduce/<scale>/index.html``.

    Args:
        scale: "smoke", "demo" or "paper".
        number: such as "03"; None runs all.
        dataset: for the notebooks of its task; the others keep their own data set, model and preset. Data of your own
            needs ``number``, to say which notebook it is for.
        given: more parameters, each of which at least one of the notebooks must have.
        progress: show a bar.

    Returns:
        The outcomes and the path of the report.

    Raises:
        ValueError: for an unknown notebook, parameter or value, before anything starts.
    """
    chosen = notebooks(number)
    wanted = {"scale": scale, **({"dataset": dataset} if dataset else {}), **(given or {})}
    check_values(wanted)
    accepted = {path: parameters_of(path) for path in chosen}
    for name in wanted:
        if not any(name in parameters for parameters in accepted.values()):
            raise ValueError(f"no chosen notebook has a parameter {name!r}")
    jobs = []
    folder = runs_dir() / "reproduce" / scale
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {path: _task(parameters) for path, parameters in accepted.items()}
    data_task = task_of_dataset(wanted["dataset"]) if "dataset" in wanted else None
    if "dataset" in wanted and data_task is None and len({t for t in tasks.values() if t}) > 1:
        raise ValueError(f"say which notebook {wanted['dataset']!r} is for, such as --notebook 03")
    for path, parameters in accepted.items():
        values = {name: value for name, value in wanted.items() if name in parameters}
        if number is None and data_task and tasks[path] not in (None, data_task):
            values = {name: value for name, value in values.items() if name not in ("dataset", "model", "preset")}
        defaults = {k: _literal(v) for k, v in parameters.items()}
        check_parameters(tasks[path] or "image", **{**defaults, **values})
        jobs.append((path, values, folder))
    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(_run, *job) for job in jobs]
        for future in tqdm(as_completed(futures), total=len(jobs), desc="notebooks", disable=not progress):
            outcomes.append(future.result())
    outcomes.sort(key=lambda o: o.name)
    shown = outcomes + [o for path in notebooks() if path not in chosen for o in _earlier(path, folder)]
    return outcomes, report.write(folder, scale, [vars(o) for o in sorted(shown, key=lambda o: o.name)])


def _task(parameters: dict[str, Any]) -> str | None:
    """The task of a notebook's data set; None for notebooks without one."""
    return task_of_dataset(_literal(parameters["dataset"])) if "dataset" in parameters else None


def estimate(scale: str, number: str | None = None) -> float | None:
    """Return about how many seconds ``reproduce`` takes on two cores; None where it was not measured."""
    column = {"smoke": 0, "demo": 1}.get(scale)
    if column is None:
        return None
    seconds = [SECONDS.get(p.name[:2], (10, 60))[column] for p in notebooks(number)]
    return max(max(seconds), sum(seconds) / AT_ONCE)


def _run(path: Path, values: dict[str, Any], folder: Path) -> Outcome:
    copy, page, state = (folder / f"{path.stem}.{ending}" for ending in ("ipynb", "html", "json"))
    key = _key(path, values)
    if page.exists() and state.exists() and json.loads(state.read_text())["key"] == key:
        return Outcome(path.stem, "up to date", json.loads(state.read_text())["seconds"], page)
    started = time.monotonic()
    error = ""
    try:
        _execute(path, copy, values)
    except papermill.PapermillExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue}"
    except (CellTimeoutError, DeadKernelError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = round(time.monotonic() - started, 1)
    page.write_text(notebook_page(nbformat.read(copy, as_version=4)))
    if not error:
        state.write_text(json.dumps({"key": key, "seconds": seconds}))
    return Outcome(path.stem, "failed" if error else "done", seconds, page, error)


def notebook_page(book: nbformat.NotebookNode) -> str:
    """Return an executed notebook as one HTML page that needs nothing from the network."""
    exporter = HTMLExporter()
    for url in ("mathjax_url", "require_js_url", "jquery_url", "jupyter_widgets_base_url", "widget_renderer_url"):
        if exporter.has_trait(url):
            setattr(exporter, url, "")
    for cell in book.cells:  # sliders need a kernel: keep the static figure, drop the widget
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    book.metadata.pop("widgets", None)
    text, _ = exporter.from_notebook_node(book)
    return re.sub(r"<script[^>]*(src=\"https?:[^\"]*\"|type=\"module\")[^>]*>.*?</script>", "", text, flags=re.S)


def _earlier(path: Path, folder: Path) -> list[Outcome]:
    """What an earlier call left of a notebook that this one does not run."""
    page, state = folder / f"{path.stem}.html", folder / f"{path.stem}.json"
    if not (page.exists() and state.exists()):
        return []
    return [Outcome(path.stem, "earlier", json.loads(state.read_text())["seconds"], page)]


def _execute(path: Path, copy: Path | None, values: dict[str, Any]) -> nbformat.NotebookNode:
    try:
        return _execute_once(path, copy, values)
    except (CellTimeoutError, DeadKernelError):
        return _execute_once(path, copy, values)


def _execute_once(path: Path, copy: Path | None, values: dict[str, Any]) -> nbformat.NotebookNode:
    return papermill.execute_notebook(
        str(path),
        None if copy is None else str(copy),
        values,
        progress_bar=False,
        kernel_name="python3",
        cwd=str(notebooks_dir()),
        execution_timeout=TIMEOUT[values.get("scale", "smoke")],
        extra_arguments=["--IPKernelApp.log_level=40"],  # else every kernel warns of its local, unencrypted port
    )


def _key(path: Path, values: dict[str, Any]) -> str:
    """Hash all that the outcome depends on: the notebook, its parameters and the code of the package."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    committed = sorted((ROOT / "data" / "results").glob("*.json*")) + sorted((ROOT / "data" / "paper").glob("*.csv"))
    for source in [path, *sorted((ROOT / "cpt_core").rglob("*.py")), *committed]:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _literal(text: str) -> Any:
    import ast

    return ast.literal_eval(text)


def execute_in_place(paths: Sequence[Path] | None = None) -> None:
    """Run notebooks at their defaults (smoke scale) and save them with outputs and execution counts."""
    for path in paths or notebooks():
        nbformat.write(_clean(_execute(path, None, {})), path)


def _clean(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what papermill and the machine leave behind: timings, paths, widget state."""
    for key in ("papermill", "widgets"):
        book.metadata.pop(key, None)
    book.metadata["language_info"] = {"name": "python"}
    for cell in book.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if cell.metadata.get("tags") == []:
            cell.metadata.pop("tags")
    return book
