"""The command line: ``python -m cpt_core --help``."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

app = typer.Typer(
    help="Cyclic precision training: reproduce the paper's experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Scale = Annotated[str, typer.Option(help="smoke (seconds), demo (minutes) or paper (GPU days)")]
Number = Annotated[str | None, typer.Option(help="one notebook, such as 03; all when left out")]
Data = Annotated[str | None, typer.Option(help="digits, cifar10, cifar100, imagenet, or your own images")]


@app.command()
def reproduce(scale: Scale = "demo", notebook: Number = None, dataset: Data = None) -> None:
    """Run the notebooks and write runs/reproduce/SCALE/index.html; runs that are there already are not repeated."""
    from cpt_core.parameters import check_values

    check_values({"scale": scale, **({"dataset": dataset} if dataset else {})})
    from cpt_core import reproduce as r

    seconds = r.estimate(scale, notebook)
    about = f"about {seconds / 60:.1f} minutes on two cores" if seconds else "GPU days; runs resume when interrupted"
    started = time.monotonic()
    names = ", ".join(p.stem[:2] for p in r.notebooks(notebook))
    typer.echo(f"notebooks {names} at {scale} scale: {about}")
    outcomes, index = r.reproduce(scale, notebook, dataset, progress=sys.stderr.isatty())
    for o in outcomes:
        typer.echo(f"  {o.name:<32} {o.status:<11} {o.seconds:6.0f} s  {o.error}".rstrip())
    from cpt_core import report

    for line in report.summary(scale):
        typer.echo(line)
    typer.echo(f"took {time.monotonic() - started:.0f} s")
    typer.echo(f"report: {index}")
    if any(o.status == "failed" for o in outcomes):
        raise typer.Exit(1)


@app.command()
def notebooks() -> None:
    """Run every notebook at smoke scale and save it with its outputs (before a commit)."""
    from cpt_core import reproduce as r

    for path in r.notebooks():
        started = time.monotonic()
        r.execute_in_place([path])
        typer.echo(f"{path.name}: {time.monotonic() - started:.0f} s")


@app.command()
def docs() -> None:
    """Write REPRODUCING.md from the docstrings, and the README's figure from the committed rows."""
    from cpt_core import figures, results
    from cpt_core.paths import ROOT, results_dir
    from cpt_core.reproducing import text

    (ROOT / "REPRODUCING.md").write_text(text())
    rows = results.load_rows(results_dir() / "image_digits.jsonl")
    rows = [r for r in rows if r["spec"]["recipe"]["model"] == "mlp6" and r["spec"]["recipe"]["q_min"] == 3]
    figures.figure_3(rows, xs=("relative_cost", "noise_exposure")).savefig(results_dir() / "image_digits.png", dpi=110)
    typer.echo("REPRODUCING.md and data/results/image_digits.png written")


@app.command()
def download(dataset: Annotated[str, typer.Argument(help="cifar10, cifar100 or imagenet")]) -> None:
    """Download a data set into CPT_DATA_DIR (or data/cache), with progress and checksums."""
    from cpt_core import data

    typer.echo(f"{dataset} is in {data.download(dataset)}")


def main() -> None:
    """Run a command; wrong values end with one line, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
