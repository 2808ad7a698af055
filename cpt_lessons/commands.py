"""The commands of ``cpt`` that run notebooks or make pages for lessons."""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt_lab.commands import Many, Scale, app, stoppable
from cpt_lab.paths import study_dir

Number = Annotated[
    str | None, typer.Option(help="one notebook, such as 03; all when left out")
]
Data = Annotated[str | None, typer.Option(help="a named data set, or your own")]
Given = Annotated[
    list[str],
    typer.Option(
        "--parameter", "-p", help="NAME=VALUE of a notebook, such as seeds=[0,1]"
    ),
]


@app.command()
def explorer(
    out: Annotated[Path, typer.Argument(help="the page, such as explorer.html")],
    home: Annotated[str, typer.Option(help="a page to lead back to")] = "",
) -> None:
    """Write the explorer, one HTML page that trains a schedule in the browser, beside static precision of its cost."""
    from cpt_lessons.explorer import write_explorer

    typer.echo(f"explorer: {write_explorer(out, home)}")


@app.command(cls=Many)
def reproduce(
    scale: Scale = "demo",
    notebook: Number = None,
    dataset: Data = None,
    parameter: Given = [],  # noqa: B006
) -> None:
    """Run the notebooks and write runs/reproduce/SCALE/index.html; runs that are there already are not repeated."""
    with stoppable():  # from the imports on, which take seconds
        _reproduce(scale, notebook, dataset, parameter)


def _reproduce(
    scale: str, notebook: str | None, dataset: str | None, parameter: list[str]
) -> None:
    from cpt_lessons.parameters import check_values, parse

    given = parse(parameter)
    check_values({"scale": scale, **({"dataset": dataset} if dataset else {}), **given})
    from cpt_lessons import notebooks as r

    seconds = r.estimate(scale, notebook)
    about = (
        f"about {seconds / 60:.1f} minutes on two cores"
        if seconds
        else "GPU days; runs resume when interrupted"
    )
    started = time.monotonic()
    names = ", ".join(p.stem[:2] for p in r.notebooks(notebook))
    typer.echo(f"notebooks {names} at {scale} scale: {about}")
    outcomes, index = r.reproduce(scale, notebook, dataset, given)
    width = max(len(o.name) for o in outcomes)
    for o in outcomes:
        typer.echo(
            f"  {o.name:<{width}} {o.status:<11} {o.seconds:6.0f} s  {o.error}".rstrip()
        )
    failed = [o for o in outcomes if o.failed]
    typer.echo(f"took {time.monotonic() - started:.0f} s")
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
        typer.Option(help="the folder, which is made where it is not there"),
    ] = None,
    hand_out: Annotated[
        bool, typer.Option("--hand-out", help="for a class: no solutions, no outputs")
    ] = False,
    parameters: Annotated[
        str | None, typer.Option(help="list the parameters of a notebook, such as 03")
    ] = None,
) -> None:
    """Copy the notebooks and the rows that they speak of, to work on them; or list the parameters of one."""
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
    """Return a line per parameter, as the notebook has it, with what is allowed."""
    from cpt_lessons.parameters import ONE_SCHEDULE, PARAMETERS

    known = PARAMETERS | (ONE_SCHEDULE if "total_steps" in defaults else {})
    width = max(map(len, defaults))
    lines = []
    for name, value in defaults.items():
        kind, allowed = (
            (known[name].kind, known[name].allowed)
            if name in known
            else (type(value).__name__, "")
        )
        lines.append(
            f"{name:<{width}}  {kind:<5}  default {value!r}"
            + (f"; {allowed}" if allowed else "")
        )
    return "\n".join(lines)


study = typer.Typer(
    help="The paper's study for a model of yours.", no_args_is_help=True
)
app.add_typer(study, name="study")


@study.command("new")
def new_study(
    folder: Annotated[Path, typer.Argument(help="which is made where it is not there")],
) -> None:
    """Write study.py, where your model goes, and a notebook that runs it and shows what came out."""
    files = [study_dir() / name for name in ("study.py", "study.ipynb")]
    if there := [folder / f.name for f in files if (folder / f.name).exists()]:
        raise FileExistsError(
            f"{there[0]} is there already; name another folder, nothing was written"
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
        typer.Argument(help="of notebooks, or of one folder of them for every student"),
    ],
    out: Annotated[
        Path | None, typer.Option(help="write the table into this .csv, too")
    ] = None,
) -> None:
    """Tell by student what the exercises say: correct, not yet, not attempted, not run, not handed in.

    A file that cannot be read is named with the reason, and the status is 1; the other students are in the table.
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
