"""Commands of ``cpt``: grids, stored rows, verification, claims, data sets, precision search and the machine check.

Every command is a function that imports what it needs when it is called, so that ``cpt --help`` is quick. ``main`` runs
them, also as ``python -m cpt_lab``, and turns wrong values into one line. ``cpt_lessons.commands`` adds the commands of
the course to ``app``.
"""

import hashlib
import inspect
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import cpt_core
from cpt_core.validation import check_choice, suggest_names
from cpt_extras.optional_libraries import explain_missing_extra
from cpt_lab.paths import all_stores, paper_dir, results_dir, runs_dir
from cpt_lab.signals import handle_signals, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(is_asked: bool) -> None:
    """Print the versions of the package and of torch, and end."""
    if is_asked:
        import torch

        typer.echo(f"cpt {cpt_core.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print the versions of this package and of torch.",
        ),
    ] = False,
) -> None:
    """Cyclic precision training: reproduce the paper's experiments."""


class Many(TyperCommand):
    """A command whose list options take several values at once: ``--seeds 0 1`` is ``--seeds 0 --seeds 1``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of a list option before each of its values."""
        lists = {
            name
            for p in self.params
            if getattr(p, "multiple", False)
            for name in p.opts
        }
        out: list[str] = []
        current = ""
        for word in args:
            if word.startswith("-"):
                current = word if word in lists else ""
            elif current and out[-1] != current:
                out.append(current)
            out.append(word)
        return super().parse_args(ctx, out)


Scale = Annotated[
    str,
    typer.Option(
        help="Size of the experiment: smoke (seconds), demo (minutes) or paper (GPU days)."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Device: cpu, cuda, or auto, which takes a CUDA device at paper scale."
    ),
]
AtScale = Annotated[
    str | None,
    typer.Option(
        "--scale",
        help="Size of the experiment: smoke, demo or paper; default: the largest of each grid.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="Task of your own data, such as image or detection; default: guessed from the files."
    ),
]

# Options of `run`, `plan` and `rows`, with the names of the notebooks' parameters.
PARAMETER_HELP = {
    "dataset": "Data set to train on: a name, or your own files.",
    "model": "Network to train; default: the first of the data set.",
    "preset": "Hyperparameters: ours, or authors.",
    "schedules": "Schedules to train, such as CR RR.",
    "static_bits": "Bits of the static baselines, such as 4 8; none leaves them out.",
    "q_max": "Highest forward bits of the schedules, such as 6 8.",
    "q_min": "Lowest forward bits of the schedules.",
    "q_grad": "Bits of the gradients.",
    "n_cycles": "Number of cycles of the schedules.",
    "steps": "Optimizer steps of a run.",
    "learning_rate": "Learning rate at the start.",
    "seeds": "Random seeds to train with, such as 0 1.",
    "deficit_bits": "Bits during a deficit, a period of too low precision.",
    "deficit_lengths": "Lengths of deficits at the start of training, in steps, such as 0 100.",
    "deficit_starts": "First steps of later deficits, such as 0 100; none leaves them out.",
    "deficit_window": "Length of the later deficits, in steps.",
    "decay": "Learning-rate decays: recipe, constant, step or cosine.",
    "controls": "Train control runs of equal length beside the runs with deficits.",
}
FILTER_HELP = {
    "arms": "Only the runs of these arms, such as CR 'static 8'.",
    "savings": "Only the runs with these savings: large, medium, small, static.",
}
# Options that take several values.
LIST_OPTIONS = (
    "schedules",
    "static_bits",
    "q_max",
    "seeds",
    "deficit_lengths",
    "deficit_starts",
    "decay",
    *FILTER_HELP,
)


def selects_runs(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of ``PARAMETER_HELP`` and ``FILTER_HELP`` to a command; it receives a ``grids.Selection``."""

    @wraps(command)
    def with_selection(**arguments: Any) -> None:
        from cpt_lab.experiments.grids import Selection
        from cpt_lab.experiments.parameters import PARAMETERS, checked

        choices = {}
        for name in PARAMETER_HELP:
            words = arguments.pop(name)
            if isinstance(words, bool):
                choices[name] = words
            elif words:
                words = [words] if isinstance(words, str) else words
                choices[name] = checked(name, PARAMETERS[name].from_words(name, words))
        filters = {name: arguments.pop(name) for name in FILTER_HELP}
        command(**arguments, selection=Selection(choices, **filters))

    signature = inspect.signature(command)
    other_parameters = [
        p for p in signature.parameters.values() if p.name != "selection"
    ]
    options = [
        _option(name, text) for name, text in (PARAMETER_HELP | FILTER_HELP).items()
    ]
    parameters = [*other_parameters, *options]
    with_selection.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_selection


def _option(name: str, text: str) -> inspect.Parameter:
    """Return the command-line option of a parameter; ``experiments.parameters`` checks its values."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    if name == "controls":
        flag = Annotated[
            bool | None,
            typer.Option("--controls/--no-controls", help=text, rich_help_panel="Runs"),
        ]
        return inspect.Parameter(name, keyword, default=None, annotation=flag)
    option = typer.Option(help=text, rich_help_panel="Runs")
    if name in LIST_OPTIONS:
        return inspect.Parameter(
            name, keyword, default=[], annotation=Annotated[list[str], option]
        )
    return inspect.Parameter(
        name, keyword, default=None, annotation=Annotated[str | None, option]
    )


def describe_resumable_stop() -> str:
    """Return the line that a stopped command prints by default."""
    return "stopped; the same command goes on from here"


@contextmanager
def stoppable(
    describe_stop: Callable[[], str] = describe_resumable_stop,
) -> Iterator[None]:
    """Turn Ctrl-C into one line and exit status 130.

    Args:
        describe_stop: returns the line, unless the KeyboardInterrupt has a message.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        say(f"\n{str(stop) or describe_stop()}\n")
        raise typer.Exit(130) from None


@app.command(cls=Many)
@selects_runs
def plan(
    selection: Any,
    grid: Annotated[
        str | None,
        typer.Argument(
            help="Grid, or a figure of the paper such as figure_3; default: all grids."
        ),
    ] = None,
    scale: AtScale = None,
    device: Device = "auto",
    measure: Annotated[
        bool,
        typer.Option(help="Time a few steps of every model now, and store the times."),
    ] = False,
) -> None:
    """List the grids with their runs (done, failed, missing), bit operations, hours and disk space.

    Hours and disk space are known for models that were timed on this machine, see --measure.
    """
    from cpt_lab.experiments.grids import check_choices, find_grids

    check_choices(find_grids(grid), selection.choices)
    typer.echo("reading grids and stored rows", err=True)
    from cpt_lab.sweeps.forecast import plan, text

    frame = plan(grid, scale, device=device, measured=measure, selection=selection)
    typer.echo(text(frame))


@app.command(cls=Many)
@selects_runs
def run(
    selection: Any,
    grid: Annotated[
        str,
        typer.Argument(
            help="Grid, figure or study, such as figure_3 or h7; give it before the options."
        ),
    ],
    scale: AtScale = None,
    executor: Annotated[
        str,
        typer.Option(
            help="Where the runs are trained: local (this machine) or dask (a cluster)."
        ),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes; 0 trains in this one; default: as many as fit."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each run.")] = 1,
    device: Device = "auto",
    per_gpu: Annotated[
        int | None,
        typer.Option(
            help="Number of runs that share a GPU; default: as many as measured memory allows."
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="Address of a Dask scheduler, such as tcp://host:8786."),
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            help="Number of runs of one seed that train in lockstep in one process; default: by task and device."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a run is stopped and counts as failed."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Train failed runs again.")
    ] = False,
    rerun_old: Annotated[
        bool,
        typer.Option(
            "--rerun-old",
            help="Train runs again whose rows were made with other numerics.",
        ),
    ] = False,
    shard: Annotated[
        str,
        typer.Option(
            help="I/N trains every N-th run from the I-th, for machines without a shared disk."
        ),
    ] = "",
    log: Annotated[
        str,
        typer.Option(
            help="Experiment tracker that gets rows and curves: tensorboard, mlflow, trackio or wandb."
        ),
    ] = "",
) -> None:
    """Train the missing runs of a grid.

    Ctrl-C stops the runs with a checkpoint, and the same command continues them. Several commands at once share the
    work.
    """
    from cpt_lab.experiments import grids
    from cpt_lab.sweeps import stores
    from cpt_lab.sweeps.options import SweepOptions
    from cpt_lab.sweeps.trackers import Sender
    from cpt_lab.sweeps.worker import follow
    from cpt_lab.training.process_group import join_process_group

    specs = _selected_specs(grids, grid, scale, selection)
    if shard:
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= len(specs):
            raise ValueError(
                f"--shard takes I/N, such as 1/4, with I <= N <= {len(specs)}, the runs; got {shard!r}"
            )
        specs = specs[int(match[1]) - 1 :: int(match[2])]
    by_store: dict[Path, list[Any]] = {}
    for spec in specs:
        by_store.setdefault(stores.store_path(spec.scale, spec.recipe.task), []).append(
            spec
        )
    send = Sender(log) if log else None
    handle_signals(signal.default_int_handler)  # before and after the runs, as Ctrl-C
    options = SweepOptions(
        executor,
        workers,
        threads,
        device,
        per_gpu,
        scheduler,
        together,
        timeout,
        retry_failed,
        rerun_old,
    )
    with (
        join_process_group() as leads
    ):  # alone, or the first of the processes of torchrun
        failed = _run(grid, by_store, options, send) if leads else follow()
    if failed:
        typer.echo("  the same command with --retry-failed tries these again", err=True)
    if send is not None and send.failure:
        typer.echo(f"warning: {send.failure}", err=True)
    if failed or (send is not None and send.failure):
        raise typer.Exit(1)


def _selected_specs(
    grids: Any, name: str, scale: str | None, selection: Any
) -> list[Any]:
    """Return the selected runs of a grid or a figure, each once: grids of a figure may share runs.

    Grids of a figure that do not have the scale are left out.
    """
    grid_by_name = grids.find_grids(name)
    scales = list(
        dict.fromkeys(s for grid in grid_by_name.values() for s in grid.scales)
    )
    if scale is not None and scale not in scales:
        raise ValueError(
            f"{name} has no scale {scale!r}; {suggest_names(scale, scales)}"
        )
    selected = selection.specs(grid_by_name, scale)
    every_spec = [spec for specs in selected.values() for spec in specs]
    if not every_spec:
        raise ValueError(f"{name} has no runs with these options")
    return list({spec.key: spec for spec in every_spec}.values())


def describe_early_stop() -> str:
    """Return the line of a sweep that was stopped before its first run."""
    return "stopped before anything ran"


def _run(grid: str, by_store: dict[Path, list[Any]], options: Any, send: Any) -> int:
    """Run specs store by store, print their results, and return the number of failed runs."""
    from cpt_lab.sweeps import stores
    from cpt_lab.sweeps.sweep import run_grid

    failed = 0
    for store, part in by_store.items():
        typer.echo(
            f"{grid} at {part[0].scale} scale: {len(part)} runs, rows in {store}"
        )
        with stoppable(describe_early_stop):
            rows = run_grid(part, store, options)
        counts = {
            status: sum(row["status"] == status for row in rows)
            for status in stores.STATUSES
        }
        typer.echo(", ".join(f"{n} {status}" for status, n in counts.items() if n))
        if send:
            sent, without_curve = send(store, rows), send.without_curve
            note = (
                f", {without_curve} of them without a curve, which is not there"
                if without_curve
                else ""
            )
            typer.echo(f"rows sent: {sent}{note}")
        failed += counts["failed"]
        for row in rows:
            if row["status"] == "failed":
                log_file = stores.place(store, "logs", row["key"])
                typer.echo(f"{_describe_failure(row)} (log: {log_file})", err=True)
    return failed


def _describe_failure(row: Any) -> str:
    """Return a line about a failed row: its arm, its seed and the message of its error."""
    lines = row["error"].strip().splitlines()
    reason = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return f"  failed: {row['spec']['arm']} seed {row['spec']['seed']}: {reason}"


@app.command(cls=Many)
@selects_runs
def rows(
    selection: Any,
    grid: Annotated[
        str,
        typer.Argument(
            help="Grid, figure or study, such as figure_3 or h7; give it before the options."
        ),
    ],
    scale: AtScale = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write one line per run into this file.")
    ] = None,
) -> None:
    """Show the result rows of a grid as a table, from the committed stores and those under runs/."""
    if csv is not None and (csv.is_dir() or not csv.absolute().parent.is_dir()):
        raise FileNotFoundError(
            f"--csv takes a file in an existing folder, such as rows.csv; got {csv}"
        )
    from cpt_lab.experiments import grids

    specs = _selected_specs(grids, grid, scale, selection)
    from cpt_lab.analysis import run_table
    from cpt_lab.analysis.rendering import terminal
    from cpt_lab.analysis.row_tables import by_arm
    from cpt_lab.analysis.spreadsheets import write_csv
    from cpt_lab.sweeps.stores import store_path

    keys = [spec.key for spec in specs]
    smoke = {
        store_path("smoke", spec.recipe.task) for spec in specs if spec.scale == "smoke"
    }
    frame = run_table.load(*all_stores(), *sorted(smoke), every_rate=True).set_index(
        "key", drop=False
    )
    found = frame.loc[[key for key in keys if key in frame.index]].reset_index(
        drop=True
    )
    recipes = {spec.key: spec.recipe for spec in specs}
    for name, table in by_arm(found, recipes).items():
        typer.echo(f"{name}\n{terminal(table)}")
    failed = int((found["status"] == "failed").sum())
    typer.echo(
        f"{len(found)} of {len(keys)} runs stored"
        + (f", {failed} of them failed" if failed else "")
    )
    if csv is not None:
        write_csv(found.drop(columns="evaluations"), csv)
        typer.echo(f"written to {csv}")


@app.command()
def verify(
    store: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of result rows, such as data/results/h5.jsonl."),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Number of rows of every file to run again.")
    ] = 5,
    seed: Annotated[int, typer.Option(help="Random seed for the choice of rows.")] = 0,
    cheapest: Annotated[
        bool,
        typer.Option(
            "--cheapest",
            help="Choose the rows that took the least time, instead of random ones.",
        ),
    ] = False,
    skip_missing: Annotated[
        bool,
        typer.Option(
            "--skip-missing", help="Skip files whose data sets are missing here."
        ),
    ] = False,
    verdict: Annotated[
        str | None,
        typer.Option(
            help="Preregistered grid to repeat with fresh seeds, such as h5/characters."
        ),
    ] = None,
) -> None:
    """Train the runs of stored rows again and compare: bit for bit on the same machine, else within a tolerance.

    With --verdict, train a preregistered grid with fresh seeds and report whether its effects repeat.
    """
    from cpt_lab.sweeps import verify as v
    from cpt_lab.sweeps.row_format import integrity

    if (verdict is None) == (not store):
        raise ValueError("give files of rows, or a preregistered grid with --verdict")
    if verdict is not None:
        return _verdict(verdict)
    assert store is not None
    samples = [v.sample(path, rows, seed, cheapest) for path in store]
    skipped = [sample for sample in samples if sample.missing]
    if skipped and not skip_missing:
        raise FileNotFoundError(
            f"{skipped[0].store}: {skipped[0].missing}; --skip-missing leaves such stores out"
        )
    runnable = [sample for sample in samples if not sample.missing]
    picked = [row for sample in runnable for row in sample.picked]
    count, seconds = len(picked), sum(row["seconds"] for row in picked)
    intact = integrity(store)
    typer.echo(
        f"{intact}\n{count} rows of {len(runnable)} stores to run again; they took {seconds:.0f} s"
    )
    findings: list[v.Finding] = []
    with stoppable(lambda: f"stopped after {len(findings)} of {count} rows"):
        for sample in runnable:
            typer.echo(sample.store)
            for finding in v.verify(sample):
                typer.echo(f"  {finding}")
                findings.append(finding)
    for sample in skipped:
        typer.echo(f"skipped {sample.store}: {sample.missing}")
    typer.echo(
        v.summary(findings)
        + (f"; {len(skipped)} of {len(samples)} stores skipped" if skipped else "")
    )
    if intact.faults or not all(finding.reproduced for finding in findings):
        raise typer.Exit(1)


def _verdict(grid: str) -> None:
    """Train a preregistered grid with fresh seeds and print whether each effect repeats."""
    import torch

    from cpt_lab.analysis.preregistered import (
        fresh_seed_specs,
        grid_data,
        replicated_effects,
    )
    from cpt_lab.sweeps.sweep import run_grid
    from cpt_lab.tasks.base import load_task_class

    specs, store = fresh_seed_specs(grid), runs_dir() / "verdicts" / f"{grid}.jsonl"
    for spec, checksum in grid_data(grid):
        local_checksum = load_task_class(spec)(spec, torch.device("cpu")).data.checksum
        if local_checksum != checksum:
            raise ValueError(
                f"{spec.recipe.dataset!r} has checksum {local_checksum} here, and {checksum} in the rows of {grid}: "
                "effects on other data neither repeat it nor differ from it"
            )
    typer.echo(f"{grid} with fresh seeds: {len(specs)} runs, rows in {store}")
    rows = run_grid(specs, store, retry_failed=True)
    failed = sum(row["status"] == "failed" for row in rows)
    if failed:
        raise ValueError(
            f"{failed} of {len(rows)} runs failed, so the result is undecided; the same command tries them again"
        )
    effects = replicated_effects(grid, rows)
    for effect in effects:
        typer.echo(f"  {effect}")
    if any(effect.outcome == "DIFFERS" for effect in effects):
        raise typer.Exit(1)


@app.command()
def report(
    store: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of result rows; default: all."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File of the page; default: runs/report.html.")
    ] = None,
) -> None:
    """Write a self-contained HTML report: figures, tables next to the paper's numbers, statistics, differences."""
    if missing := [path for path in store or [] if not path.is_file()]:
        raise FileNotFoundError(f"there is no file {missing[0]}")
    typer.echo(
        "writing the page, for about a minute where all rows are shown", err=True
    )
    from cpt_lab.analysis import report as r

    typer.echo(f"report: {r.write_report(store or None, out)}")


def _recipe(dataset: str, model: str | None, scale: str, task: str | None) -> Any:
    """Return the recipe of a data set after checking that its files exist."""
    from cpt_lab.data.files import check_data, task_for_data
    from cpt_lab.experiments.registry import recipe
    from cpt_lab.experiments.schema import is_own

    if task and not is_own(dataset):
        raise ValueError(
            f"--task {task} is for data of your own; {dataset} has its task"
        )
    checked_recipe = recipe(scale, dataset, model, task=task or task_for_data(dataset))
    check_data(checked_recipe)
    return checked_recipe


@app.command()
def data(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a data set, or your own files: my-images/, my-text/, my-graph.npz."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose picture size is used; default: the first of the data set."
        ),
    ] = None,
    scale: Scale = "demo",
    task: Task = None,
) -> None:
    """Check a data set: print what is read, left out and changed, without training."""
    recipe = _recipe(dataset, model, scale, task)
    from cpt_lab.tasks.base import load_data

    typer.echo(load_data(recipe).report)


@app.command("try")
def try_(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a data set, or your own files: my-images/, my-text/, my-graph.npz."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model to train; default: the first of the data set."),
    ] = None,
    scale: Scale = "demo",
    minutes: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Minutes after which no new training starts; the same command continues.",
        ),
    ] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds (at most).")] = 10,
    margin: Annotated[
        float,
        typer.Option(
            min=1e-6,
            help="Smallest difference that counts, in accuracy points or percent of perplexity.",
        ),
    ] = 1,
    task: Task = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of trainings at a time; default: the number of cores."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Search for the fewest bits that train on your data, test whether a schedule helps, and write an HTML page.

    The page shows every training with its quality and its cost.
    """
    from cpt_lab.experiments.schema import is_own

    r = _recipe(dataset, model, scale, task)
    from cpt_lab.tasks.base import read_all_data

    guesses = (
        read_all_data(r) if is_own(dataset) else None
    )  # before slow imports, so that a defect is reported within seconds
    from functools import partial

    from cpt_lab.analysis.precision_search_report import try_recipe
    from cpt_lab.resources import usable_cores
    from cpt_lab.sweeps.options import SweepOptions
    from cpt_lab.sweeps.sweep import run_grid

    if r.task == "detection" and scale != "smoke":
        typer.echo(
            "pictures with boxes: on two cores a training takes minutes, an answer hours (--minutes 300)",
            err=True,
        )
    options = SweepOptions(workers=workers, device=device, progress=False)
    note = f"The model is {r.model}" + (
        ", the first for such data; --model names another." if model is None else "."
    )
    typer.echo(note, err=True)
    with stoppable():
        try:
            search_result, page = try_recipe(
                r,
                scale,
                _with_lines(partial(run_grid, options=options)),
                at_once=workers or usable_cores(),
                minutes=minutes,
                seeds=seeds,
                margin=margin,
                guessed=guesses,
                note=note,
            )
        except RuntimeError as error:
            typer.echo(f"error: a training failed: {error}", err=True)
            raise typer.Exit(1) from None
    typer.echo(f"{search_result}\npage: {page}")


def _with_lines(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return ``run``, or a version that prints a line per training where the output is no terminal."""
    if sys.stderr.isatty():
        return run

    def run_and_say(specs: list[Any], store: Path) -> list[Any]:
        rows = run(specs, store)
        for row in rows:
            arm, seed = row["spec"]["arm"], row["spec"]["seed"]
            typer.echo(
                f"trained {arm}, seed {seed}: {row['status']}, {row.get('seconds', 0):.0f} s",
                err=True,
            )
        return rows

    return run_and_say


@app.command("range-test", cls=Many)
def range_test(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a data set, or your own files; give it before the options."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model to train; default: the first of the data set."),
    ] = None,
    scale: Scale = "demo",
    q_max: Annotated[
        int,
        typer.Option(
            min=2, help="Bits of the baseline that lower precisions are compared with."
        ),
    ] = 8,
    bits: Annotated[
        list[int],
        typer.Option(
            help="Precisions to test, such as 2 3 4; default: 2 to q_max - 1."
        ),
    ] = [],  # noqa: B006
    dwell: Annotated[
        int, typer.Option(help="Optimizer steps at each precision.")
    ] = 100,
    mode: Annotated[
        str,
        typer.Option(
            help="Start of each precision: reset (initial weights) or continuing (as in the paper)."
        ),
    ] = "reset",
    seeds: Annotated[
        list[int],
        typer.Option(help="Random seeds to repeat the test with, such as 0 1 2."),
    ] = [  # noqa: B006
        0,
        1,
        2,
    ],
    task: Task = None,
    device: Device = "auto",
    figure: Annotated[
        Path | None,
        typer.Option(help="Image file to draw the result into, such as answer.png."),
    ] = None,
) -> None:
    """Find the lowest precision that still trains a model, by the precision range test."""
    r = _recipe(dataset, model, scale, task)
    if figure is not None and (figure.is_dir() or not figure.parent.is_dir()):
        raise FileNotFoundError(
            f"--figure takes a file in an existing folder, such as answer.png; got {figure}"
        )
    if figure is not None:
        from matplotlib.figure import Figure

        check_choice(
            "type of --figure",
            figure.suffix.removeprefix("."),
            Figure().canvas.get_supported_filetypes(),
        )

    import torch

    from cpt_extras.search.range_test import RangeTestWarning
    from cpt_lab.experiments.spec import run_spec
    from cpt_lab.resources import usable_cores
    from cpt_lab.training.device import choose_device
    from cpt_lab.training.recipe_search import recipe_range_test

    torch.set_num_threads(
        min(torch.get_num_threads(), usable_cores())
    )  # torch knows no quotas
    device = choose_device(
        device, run_spec(r, f"static {q_max}", q_max=q_max, seed=0, scale=scale)
    )
    warnings.simplefilter("ignore", RangeTestWarning)  # the result says it
    result = recipe_range_test(
        r,
        q_max=q_max,
        bits=bits or None,
        dwell=dwell,
        mode=mode,
        seeds=seeds,
        device=device,
    )
    typer.echo(f"{result.title}\n{result}")
    if figure is not None:
        result.figure().savefig(figure, dpi=120)
        typer.echo(f"drawn in {figure}")
    if result.q_min is None:
        raise typer.Exit(1)


@app.command()
def claims(
    every: Annotated[
        bool, typer.Option("--all", help="List every claim with its verdicts.")
    ] = False,
    evidence: Annotated[
        bool,
        typer.Option(help="List every claim with the effects behind its verdicts."),
    ] = False,
) -> None:
    """Summarise which claims of the paper the result rows support, and the answers to our own questions.

    The summary is of the committed rows; --all judges your rows under runs/ as well.
    """
    judged_rows, _, summary = (
        (paper_dir() / "claims.txt").read_text(encoding="utf-8").partition("\n")
    )
    committed_stores = sorted(results_dir().glob("*.jsonl"))
    if (
        not every and not evidence and judged_rows == digest(committed_stores)
    ):  # a test compares the summary with the rows
        typer.echo(summary.rstrip())
        if len(all_stores()) > len(committed_stores):
            typer.echo(
                f"by the committed rows; --all judges those under {runs_dir()}, too",
                err=True,
            )
        return
    typer.echo("judging all rows, for about half a minute", err=True)
    from cpt_lab.analysis import claims, preregistered, run_table

    frame = run_table.load(*all_stores())
    typer.echo(
        "\n".join(
            claims_lines(
                claims.judge_claims(frame),
                preregistered.all_answers(frame),
                every,
                evidence,
            )
        )
    )


def digest(paths: Iterable[Path]) -> str:
    """Return a hash, of 16 digits, of files and of the paper's numbers and claims."""
    files = (*paths, paper_dir() / "numbers.csv", paper_dir() / "claims.csv")
    parts = [
        path.name.encode() + hashlib.sha256(path.read_bytes()).digest()
        for path in files
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def claims_lines(
    entries: list[Any],
    answers: Iterable[Any],
    every: bool = False,
    evidence: bool = False,
) -> Iterator[str]:
    """Yield the lines of ``cpt claims``: verdicts on the paper's claims, and answers to our own questions."""
    from cpt_lab.analysis.claims import claims_headline
    from cpt_lab.sweeps.row_format import integrity

    yield f"{claims_headline(entries)} (--all lists them, --evidence with effects)"
    for entry in entries if every or evidence else []:
        at_paper, smaller = entry.verdicts()
        yield f"{entry.claim.claim} ({entry.claim.place})"
        yield f"  paper scale: {at_paper}\n  smaller scales: {smaller}\n  rule of {entry.rule()}"
        yield from (f"    {line}" for line in entry.evidence() if evidence)
    yield "our own questions (docs/preregistration.md):"
    for a in answers:
        yield f"{a.question}: {a.question_text}\n  {a.outcome}"
        if a.by_rule:
            yield f"  {a.rules_text()}"
        yield from (
            f"    {effect}" for effect in (*a.primary, *a.secondary) if evidence
        )
    if evidence:
        yield str(integrity(all_stores()))


@app.command()
def download(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a data set, such as cifar10, ogbn-arxiv or xnli; a wrong name lists them all."
        ),
    ],
    language: Annotated[str, typer.Option(help="Language of the text of xnli.")] = "de",
) -> None:
    """Download a data set into the data folder; CPT_DATA_DIR names another folder."""
    from cpt_lab import data

    typer.echo(f"{dataset} is in {data.download(dataset, language)}")


@app.command()
def doctor() -> None:
    """Check this machine (kernels, git, locks, disk, memory, GPU, user) and print how to fix what is missing."""
    from cpt_lab.doctor import examine
    from cpt_lab.sweeps.stores import FREE_BYTES

    checks = examine(min_free_bytes=FREE_BYTES)
    for check in checks:
        typer.echo(check)
    if any(check.state == "refused" for check in checks):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; print one line instead of a traceback for a wrong value."""
    if find_spec(
        "cpt_lessons"
    ):  # an optional package that adds its commands to ``app``
        import_module("cpt_lessons.commands")
    try:
        with warnings.catch_warnings(), explain_missing_extra():
            warnings.showwarning = lambda message, *_, **__: typer.echo(
                f"warning: {message}", err=True
            )
            app()
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {error}\n")
        raise SystemExit(2) from None
