"""Commands of ``cpt`` for the course: run, copy and collect notebooks, write pages and studies.

Importing this module adds them to ``cpt_lab.commands.app``.
"""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt_lab.commands import Many, Scale, app, stoppable
from cpt_lab.paths import study_dir

Number = Annotated[
    str | None,
    typer.Option(help="Number of one notebook, such as 03; default: all notebooks."),
]
Data = Annotated[
    str | None, typer.Option(help="Name of a data set, or your own files.")
]
NotebookParameters = Annotated[
    list[str],
    typer.Option(
        "--parameter",
        "-p",
        help="Parameter of the notebooks as NAME=VALUE, such as seeds=[0,1].",
    ),
]


@app.command()
def explorer(
    out: Annotated[
        Path, typer.Argument(help="File of the page, such as explorer.html.")
    ],
    home: Annotated[
        str, typer.Option(help="Address of a page that the explorer links back to.")
    ] = "",
) -> None:
    """Write an HTML page that trains a schedule in the browser, next to static precision of equal cost."""
    from cpt_lessons.explorer import write_explorer

    typer.echo(f"explorer: {write_explorer(out, home)}")


@app.command(cls=Many)
def reproduce(
    scale: Scale = "demo",
    notebook: Number = None,
    dataset: Data = None,
    parameter: NotebookParameters = [],  # noqa: B006
) -> None:
    """Run the notebooks and write their pages, with runs/reproduce/SCALE/index.html; stored runs are not repeated."""
    with stoppable():  # from the imports on, which take seconds
        _reproduce(scale, notebook, dataset, parameter)


def _reproduce(
    scale: str, notebook: str | None, dataset: str | None, parameter: list[str]
) -> None:
    from cpt_lessons.parameters import check_values, parse

    parameters = parse(parameter)
    checked_values = {"scale": scale, **parameters}
    if dataset:
        checked_values = {"scale": scale, "dataset": dataset, **parameters}
    check_values(checked_values)
    from cpt_lessons import notebooks as runner

    seconds = runner.estimate(scale, notebook)
    expected_time = (
        f"about {seconds / 60:.1f} minutes on two cores"
        if seconds
        else "GPU days; runs resume when interrupted"
    )
    start_time = time.monotonic()
    names = ", ".join(p.stem[:2] for p in runner.notebooks(notebook))
    typer.echo(f"notebooks {names} at {scale} scale: {expected_time}")
    outcomes, index = runner.reproduce(scale, notebook, dataset, parameters)
    width = max(len(o.name) for o in outcomes)
    for o in outcomes:
        typer.echo(
            f"  {o.name:<{width}} {o.status:<11} {o.seconds:6.0f} s  {o.error}".rstrip()
        )
    failed = [o for o in outcomes if o.failed]
    typer.echo(f"took {time.monotonic() - start_time:.0f} s")
    typer.echo(f"report: {index}")
    if failed:
        typer.echo(
            f"failed: {', '.join(o.name for o in failed)}; the same command tries again",
            err=True,
        )
        raise typer.Exit(1)


@app.command()
def notebooks(
    copy: Annotated[
        Path | None,
        typer.Option(
            help="Folder to copy the notebooks into; created if it is missing."
        ),
    ] = None,
    hand_out: Annotated[
        bool,
        typer.Option(
            "--hand-out", help="Copy for a class, without solutions and outputs."
        ),
    ] = False,
    parameters: Annotated[
        str | None,
        typer.Option(
            help="Number of a notebook whose parameters are listed, such as 03."
        ),
    ] = None,
) -> None:
    """Copy the notebooks, with the result rows they use, to work on them; or list the parameters of one."""
    from cpt_lessons import notebooks as r

    if (copy is None) == (parameters is None):
        raise ValueError(
            "give either --copy FOLDER or --parameters NOTEBOOK, such as --parameters 03"
        )
    if parameters is not None:
        (path,) = r.notebooks(parameters)
        typer.echo(f"{path.name}\n{_describe_parameters(r.parameters_of(path))}")
        return
    assert copy is not None
    copies = r.copy_notebooks(copy, hand_out)
    typer.echo(
        f"{len(copies)} notebooks and their rows are in {copy}; next: jupyter lab {copy}"
    )


def _describe_parameters(defaults: dict[str, Any]) -> str:
    """Return a line per parameter: name, type, default and allowed values."""
    from cpt_lessons.parameters import NOTEBOOK_PARAMETERS, ONE_SCHEDULE

    parameters = NOTEBOOK_PARAMETERS
    if "total_steps" in defaults:
        parameters = NOTEBOOK_PARAMETERS | ONE_SCHEDULE

    width = max(map(len, defaults))
    lines = []
    for name, value in defaults.items():
        kind, allowed = type(value).__name__, ""
        if name in parameters:
            kind, allowed = parameters[name].kind, parameters[name].allowed

        line = f"{name:<{width}}  {kind:<5}  default {value!r}"
        lines.append(f"{line}; {allowed}" if allowed else line)
    return "\n".join(lines)


study = typer.Typer(
    help="Repeat the paper's study with your own model.", no_args_is_help=True
)
app.add_typer(study, name="study")


@study.command("new")
def new_study(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the study; created if it is missing.")
    ],
) -> None:
    """Write study.py, a template for your model, and a notebook that runs it and shows the results."""
    files = [study_dir() / name for name in ("study.py", "study.ipynb")]
    if existing_files := [folder / f.name for f in files if (folder / f.name).exists()]:
        raise FileExistsError(
            f"{existing_files[0]} is there already; name another folder, nothing was written"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(file, folder)
    typer.echo(
        f"next: put your model into {folder / 'study.py'}, then `jupyter lab {folder}`, or there `python study.py 8`"
    )


@app.command()
def collect(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of handed-in notebooks, or of one folder per student."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File for the table, such as results.csv.")
    ] = None,
) -> None:
    """Tabulate the exercises by student: correct, not yet, not attempted, not run, not handed in.

    A file that cannot be read is named with the reason, and the exit status is 1; the table has the other students.
    """
    from cpt_lab.analysis.spreadsheets import write_csv
    from cpt_lessons.submissions import read_submissions

    submissions = read_submissions(folder)
    for sentence in submissions.unreadable:
        typer.echo(f"warning: {sentence}", err=True)
    if submissions.without_notebook:
        typer.echo(
            f"no notebook in: {', '.join(submissions.without_notebook)}", err=True
        )
    table = submissions.checked_table(folder)
    typer.echo(table.to_string())
    if out:
        write_csv(table, out, index_label="student")
    if submissions.unreadable:
        typer.echo(
            f"could not be read: {len(submissions.unreadable)}, see the warnings above",
            err=True,
        )
        raise typer.Exit(1)
