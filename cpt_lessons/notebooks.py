"""Run the notebooks and collect them in one report, where a second run does only what changed; copy them to work on.

Running them needs the extra "notebooks", copying does not.
"""

import ast
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from cpt_core.validation import suggest_names
from cpt_extras.files import write_text
from cpt_extras.optional_libraries import import_optional
from cpt_lab.analysis import precision_search_report, report, reproduction
from cpt_lab.analysis.rendering import Section
from cpt_lab.commands import digest, try_
from cpt_lab.experiments.registry import task_of_dataset
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import (
    cards_dir,
    notebooks_dir,
    paper_dir,
    results_dir,
    runs_dir,
    solutions_dir,
    sweeps_dir,
)
from cpt_lessons.notebook_progress import AT_ONCE, Place, Progress
from cpt_lessons.notebook_runs import NotebookOutcome, NotebookRun, earlier_outcomes
from cpt_lessons.parameters import check_parameters, check_values
from cpt_lessons.submissions import read_submissions

# Measured on two cores, two side by side: (smoke, demo) seconds, for the estimates that are shown.
NOTEBOOK_SECONDS = {
    "00": (20, 68),
    "01": (12, 10),
    "02": (8, 9),
    "03": (25, 83),
    "04": (20, 305),
    "05": (12, 119),
    "06": (15, 276),
    "07": (30, 31),
    "08": (25, 46),
    "09": (15, 15),
    "10": (30, 55),
    "11": (30, 36),
    "12": (8, 10),
    "13": (10, 8),
    "14": (25, 21),
    "15": (15, 15),
    "16": (18, 18),
    "17": (20, 20),
    "18": (30, 31),
}

FIRST_NOTEBOOKS = ("01", "03", "05", "07", "04", "06")  # sections of the paper

KERNEL_STOP_SECONDS = 3.0  # for interrupted kernels to end by themselves
REPEATED_SIGNAL_SECONDS = 0.5  # one Ctrl-C often arrives twice, from the terminal and from a program around this one
REPORT_SECONDS = 10.0  # for the page with the claims of the paper, on two cores
SECTION_CLAIMS_SECONDS = 20.0  # at most, for the claims of a notebook's sections
TRY_MINUTES = 5.0  # for data of the user's own, before the notebooks


def notebooks(number: str | None = None) -> list[Path]:
    """Return all notebooks, or the one with a number such as "03" or "3"; ValueError if there is none."""
    paths = sorted(notebooks_dir().glob("[0-9][0-9]_*.ipynb"))
    if number is None:
        return paths
    prefix = f"0{number}" if re.fullmatch("[0-9]", number) else number
    matches = [p for p in paths if p.name.startswith(prefix)]
    if not number or len(matches) != 1:
        raise ValueError(
            f"no notebook {number!r}; {suggest_names(number, [p.name[:2] for p in paths])}"
        )
    return matches


def parameters_of(notebook: Path) -> dict[str, Any]:
    """Return the parameters of a notebook with their defaults."""
    _ = find_spec("papermill") or import_optional(
        "papermill", "notebooks"
    )  # to import it takes a second: only where it runs
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    source = "".join(
        line
        for c in cells
        if "parameters" in c["metadata"].get("tags", ())
        for line in c["source"]
    )
    lines: list[Any] = ast.parse(source).body
    targets: list[Any] = [
        line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
        for line in lines
    ]
    return {
        target.id: ast.literal_eval(line.value)
        for target, line in zip(targets, lines, strict=True)
    }


def copy_notebooks(folder: Path, hand_out: bool = False) -> list[Path]:
    """Copy notebooks, sweeps and solutions into a folder, and into its ``data/`` rows, cards and numbers they speak of.

    The copies run with this package wherever they lie; their runs go to ``runs/`` beside them. What they compare with
    is read from the package, so that the rows in ``data/`` are there to be looked at. Links to pages of the repository
    become their words: a copy may lie anywhere.

    The folder is made where it is not there. To hand out to a class: without solutions, and notebooks without outputs.

    Raises:
        FileExistsError: when the folder holds one of the files already; nothing is copied then.
    """
    sources = {
        folder: notebooks_dir(),
        folder / "sweeps": sweeps_dir(),
        **({} if hand_out else {folder / "solutions": solutions_dir()}),
        **{
            folder / "data" / d.name: d
            for d in (results_dir(), paper_dir(), cards_dir())
        },
    }
    suffixes = (".ipynb", ".py", ".md", ".csv", ".json", ".jsonl", ".sha256", ".yaml")
    copies = {
        into / p.name: p
        for into, d in sources.items()
        for p in sorted(d.iterdir())
        if p.suffix in suffixes
    }
    for copy in copies:
        if copy.exists():
            raise FileExistsError(
                f"{copy} is there already; name a folder without it, nothing was copied"
            )
    for copy, path in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        if copy.parent == folder:
            text = copy.read_text(encoding="utf-8")
            if hand_out:  # the whole sentence
                text = re.sub(
                    r" ?\[Solutions\]\(solutions/[^)]*\)[^.\"]*\. ?", "", text
                )
            copy.write_text(
                re.sub(r"\[([^][]*)\]\(\.\./[^)]*\)", r"\1", text), encoding="utf-8"
            )
        if hand_out and copy.suffix == ".ipynb":
            book = json.loads(copy.read_text(encoding="utf-8"))
            for cell in book["cells"]:
                cell.update(
                    {"execution_count": None, "outputs": []}
                    if cell["cell_type"] == "code"
                    else {}
                )
            copy.write_text(
                json.dumps(book, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
            )
    return [copy for copy in copies if copy.suffix == ".ipynb"]


def collected(folder: Path) -> pd.DataFrame:
    """Return the exercise results of handed-in notebooks, one row per student.

    Raises:
        FileNotFoundError: where there is no such folder.
        ValueError: where no notebook says anything of an exercise.

    Warns:
        UserWarning: of a notebook that cannot be read.
    """
    submissions = read_submissions(folder)
    for sentence in submissions.unreadable:
        warnings.warn(sentence, stacklevel=2)
    return submissions.checked_table(folder)


def reproduce(
    scale: str = "demo",
    number: str | None = None,
    dataset: str | None = None,
    parameters: dict[str, Any] | None = None,
    progress: bool = True,
) -> tuple[list[NotebookOutcome], Path]:
    """Run notebooks at a scale, ``AT_ONCE`` at a time, and write their pages.

    The index is ``runs/reproduce/<scale>/index.html``. It is there before the first notebook ends, with the figures of
    the committed rows, and is written again after every section of the paper. At demo scale, data of the user are tried
    first (`cpt try`), once, and the index begins with the answer.

    Args:
        scale: of all runs, such as "demo".
        number: of one notebook, such as "03"; None runs all.
        dataset: for the notebooks of its task; the others keep their own data set, model and preset. Data of the user
            need ``number``, to say which notebook it is for.
        parameters: more parameters, each of which at least one of the notebooks must have.
        progress: show where the notebooks are and how long the rest takes.

    Raises:
        ValueError: for an unknown notebook, parameter or value, before anything starts.
    """
    paths = notebooks(number)
    requested = {"scale": scale, **(parameters or {})}
    if dataset:
        requested = {"scale": scale, "dataset": dataset, **(parameters or {})}
    folder = runs_dir() / "reproduce" / scale
    jobs = _notebook_runs(paths, requested, number is None, folder)

    user_data = requested.get("dataset", "")
    is_untried = (
        is_own(user_data)
        and scale == "demo"
        and not precision_search_report.answer_sections(user_data, scale)
    )
    if is_untried:
        typer.echo(f"first cpt try {user_data}, {TRY_MINUTES:.0f} minutes at most")
        try_(user_data, scale=scale, minutes=TRY_MINUTES)

    folder.mkdir(parents=True, exist_ok=True)
    jobs.sort(key=_start_order)
    numbers = [path.name[:2] for path in paths]

    def write_index(outcomes: Sequence[NotebookOutcome], is_final: bool) -> Path:
        return _write_index(folder, scale, user_data, outcomes, numbers, is_final)

    if not progress:
        outcomes = _run_all(jobs, {}, is_shown=False)
    else:
        index = write_index((), is_final=False)
        typer.echo(f"report, written again after every section of the paper: {index}")
        outcomes = _run_all(
            jobs,
            expected(scale, paths),
            is_shown=True,
            after_section=lambda outcomes: write_index(outcomes, is_final=False),
        )
    outcomes.sort(key=lambda outcome: outcome.name)
    if progress:
        minutes = max(report_seconds(numbers) / 60, 0.1)
        typer.echo(f"writing the report, about {minutes:.1f} minutes on two cores")
    return outcomes, write_index(outcomes, is_final=True)


def _start_order(job: NotebookRun) -> tuple[int, str]:
    """Return a sort key that starts the sections of the paper first, and the long ones of them last."""
    number = job.notebook.name[:2]
    if number in FIRST_NOTEBOOKS:
        return FIRST_NOTEBOOKS.index(number), number
    return len(FIRST_NOTEBOOKS), number


def _notebook_runs(
    paths: Sequence[Path], requested: dict[str, Any], is_all: bool, folder: Path
) -> list[NotebookRun]:
    """Return the runs of notebooks with the requested parameters that they have.

    Args:
        paths: of the notebooks.
        requested: parameter -> value.
        is_all: whether all notebooks are run; then those of another task keep their own data.
        folder: of the pages.

    Raises:
        ValueError: for a parameter or value that no notebook takes.
    """
    check_values(requested)
    defaults_by_path = {path: parameters_of(path) for path in paths}
    for name in requested:
        if not any(name in defaults for defaults in defaults_by_path.values()):
            raise ValueError(f"no chosen notebook has a parameter {name!r}")

    tasks = _tasks_by_notebook(defaults_by_path)
    data_task = None
    if "dataset" in requested:
        data_task = task_of_dataset(requested["dataset"])
        num_tasks = len({task for task in tasks.values() if task})
        if data_task is None and num_tasks > 1:
            raise ValueError(
                f"say which notebook {requested['dataset']!r} is for, such as --notebook 03"
            )

    jobs = []
    for path, defaults in defaults_by_path.items():
        values = {name: v for name, v in requested.items() if name in defaults}
        if is_all and data_task and tasks[path] not in (None, data_task):
            for name in ("dataset", "model", "preset"):
                values.pop(name, None)
        check_parameters(tasks[path] or "image", **{**defaults, **values})

        changed = {}
        for name, value in values.items():
            # The number of processes changes nothing of what a page shows.
            if name not in ("scale", "workers") and value != defaults[name]:
                changed[name] = value
        jobs.append(NotebookRun(path, values, changed, folder))
    return jobs


def _tasks_by_notebook(
    defaults_by_path: dict[Path, dict[str, Any]],
) -> dict[Path, str | None]:
    """Return the task of every notebook's data set, None for those without one."""
    tasks: dict[Path, str | None] = {}
    for path, defaults in defaults_by_path.items():
        tasks[path] = None
        if "dataset" in defaults:
            tasks[path] = task_of_dataset(defaults["dataset"])
    return tasks


def _write_index(
    folder: Path,
    scale: str,
    user_data: str,
    outcomes: Sequence[NotebookOutcome],
    numbers: Sequence[str],
    is_final: bool,
) -> Path:
    """Write the index of a reproduction, unless it shows the same already.

    Args:
        folder: folder of the pages.
        scale: scale of the runs.
        user_data: data set of the user, "" without.
        outcomes: outcomes so far.
        numbers: numbers of all notebooks that run.
        is_final: whether all have ended; only then the claims of the paper are compared.
    """
    rows = (runs_dir() / scale).glob("*.jsonl")
    answers = runs_dir().glob(f"try/*-{scale}/{precision_search_report.ANSWER_FILE}")
    inputs = sorted([*folder.glob("*.json"), *rows, *answers])
    key_file, key = (
        folder / "index.key",
        f"{user_data} {' '.join(numbers)} {is_final} {digest(inputs)}",
    )
    index = folder / "index.html"
    if key_file.exists() and key_file.read_text(encoding="utf-8") == key:
        return index

    from cpt_lessons import export

    glossary = (notebooks_dir() / "glossary.md").read_text(encoding="utf-8")
    write_text(folder / "glossary.html", export.glossary_page(glossary))

    names = [path.stem for path in notebooks()]
    outcome_by_name = {o.name: o for o in earlier_outcomes(folder, names)}
    outcome_by_name |= {o.name: o for o in outcomes}
    pages = [outcome.index_entry() for _, outcome in sorted(outcome_by_name.items())]

    answer: list[Section] = []
    if user_data:
        answer = precision_search_report.answer_sections(user_data, scale)
    evidence = [] if answer else _committed_evidence()
    # Committed rows are about the data of the paper, not about the user's.
    shown_numbers = () if is_own(user_data) else numbers
    page = report.write(
        folder, scale, pages, evidence, answer, shown_numbers, has_claims=is_final
    )
    write_text(key_file, key)
    return page


def _committed_evidence() -> list[Section]:
    """Return the section with the answer of the committed results."""
    from cpt_lessons.evidence_figures import static_or_cycle

    figure = static_or_cycle()
    return [Section(figure.get_suptitle(), (), figure, figure.get_suptitle())]


def _run_all(
    jobs: list[NotebookRun],
    seconds: dict[str, float],
    is_shown: bool,
    after_section: Callable[[Sequence[NotebookOutcome]], Any] | None = None,
) -> list[NotebookOutcome]:
    """Run ``AT_ONCE`` notebooks at a time; one that fails stops no other.

    Args:
        jobs: notebooks to run, in this order.
        seconds: expected run times, by name.
        is_shown: show the progress.
        after_section: is called with the outcomes so far when a notebook of ``FIRST_NOTEBOOKS`` has ended.
    """
    places = [Place(job.notebook.stem) for job in jobs]
    progress = Progress(places, seconds, AT_ONCE, is_shown)
    outcomes = []
    keys = [
        job.key() for job in jobs
    ]  # before anything runs: data that changes meanwhile is seen the next time
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pending = {
            pool.submit(_run, *arguments)
            for arguments in zip(jobs, keys, places, strict=True)
        }
        try:
            while pending:
                finished, pending = wait(
                    pending, timeout=1.0, return_when=FIRST_COMPLETED
                )
                for outcome in (future.result() for future in finished):
                    outcomes.append(outcome)
                    progress.record_end(
                        outcome.notebook, outcome.status, outcome.seconds, outcome.error
                    )
                    is_section = outcome.notebook[:2] in FIRST_NOTEBOOKS
                    if after_section and pending and is_section:
                        after_section(outcomes)
                progress.refresh()
        except KeyboardInterrupt:
            progress.announce_stop()
            _stop(pending, places)
            raise
        finally:
            progress.bar.close()
    return outcomes


def _stop(futures: Iterable[Future[NotebookOutcome]], places: Sequence[Place]) -> None:
    """Interrupt running notebooks and start no more; kill kernels after ``STOP_SECONDS`` or at a second Ctrl-C."""
    running = {future for future in futures if not future.cancel()}
    for place in places:
        place.stop()
    stop_time = time.monotonic()
    while running and time.monotonic() - stop_time < KERNEL_STOP_SECONDS:
        try:
            _, running = wait(running, timeout=0.2)
        except KeyboardInterrupt:
            if time.monotonic() - stop_time > REPEATED_SIGNAL_SECONDS:
                break
    for place in places:
        place.kill()


def expected(scale: str, paths: Sequence[Path]) -> dict[str, float]:
    """Return the seconds that notebooks take on two cores, by name; empty for a scale that was not measured."""
    column = {"smoke": 0, "demo": 1}.get(scale)
    return (
        {}
        if column is None
        else {p.stem: NOTEBOOK_SECONDS.get(p.name[:2], (10, 60))[column] for p in paths}
    )


def estimate(scale: str, number: str | None = None) -> float | None:
    """Return about how many seconds ``reproduce`` takes on two cores; None where it was not measured."""
    paths = notebooks(number)
    seconds = expected(scale, paths).values()
    if not seconds:
        return None
    numbers = [path.name[:2] for path in paths]
    return max(max(seconds), sum(seconds) / AT_ONCE) + report_seconds(numbers)


def report_seconds(numbers: Collection[str]) -> float:
    """Return about how many seconds the last report of notebooks takes on two cores."""
    sections = {section.number for section in reproduction.SECTIONS.values()}
    num_sections = len(sections.intersection(numbers))
    return REPORT_SECONDS + SECTION_CLAIMS_SECONDS * num_sections


def _run(job: NotebookRun, key: str, place: Place) -> NotebookOutcome:
    if job.up_to_date(key):
        job.forget_failure()
        return job.outcome("up to date")
    import nbformat

    from cpt_lessons import export, jupyter_kernel

    start_time = place.start_time = time.monotonic()
    copy, error = job.file("running.ipynb"), ""
    try:
        try:
            jupyter_kernel.execute(job.notebook, copy, dict(job.values), place)
        except (
            Exception
        ) as failure:  # whatever it is, the report of the others is worth having
            if place.stopped:  # that is no failure
                raise
            error = jupyter_kernel.reason(failure, place)
        seconds = round(time.monotonic() - start_time, 1)
        book = nbformat.read(copy if copy.exists() else job.notebook, as_version=4)
    finally:
        copy.unlink(missing_ok=True)
    page = export.notebook_page(
        book, job.file("html").stem, error and f"This run failed: {error}"
    )
    job.keep(
        page,
        nbformat.writes(book),
        **({"error": error} if error else {"key": key, "seconds": seconds}),
    )
    return job.outcome("failed" if error else "done", seconds)
