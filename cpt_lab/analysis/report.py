"""Reports in HTML that open offline: of a reproduction (a folder), and of everything that is stored (one page)."""

import ast
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.numerics import NUMERICS
from cpt_extras.files import write_text
from cpt_lab import provenance
from cpt_lab.analysis import (
    aggregation,
    critical_periods,
    data_reports,
    equal_cost,
    int8_comparison,
    paper_comparison,
    predictors,
    quality_cost,
    reproduction,
    run_groups,
)
from cpt_lab.analysis.claims import section as of_claims
from cpt_lab.analysis.metrics import metric_of, plural
from cpt_lab.analysis.rendering import Section, render
from cpt_lab.analysis.run_table import load, table, tuned
from cpt_lab.analysis.schedules import figure_2
from cpt_lab.experiments.grids import studies
from cpt_lab.paths import ROOT, all_stores, runs_dir
from cpt_lab.sweeps.row_format import integrity

PACKAGES = ("cpt-core", "torch", "torchvision", "numpy", "papermill", "jupyterlab")
ANSWER = (  # of H2, a test holds it to the rows
    "How few bits can a network be trained with, and does it help to let them rise and fall? In the results that are "
    "kept, no cyclic schedule beat static bits of its cost by the margin set beforehand."
)
BRACKETS = (
    "In round brackets: what training cost, relative to the most bits throughout. In square ones: 95 % intervals, "
    "paired by seed, each on its own and not corrected for several comparisons."
)
SMOKE = (
    "This was a smoke run: it shows that everything runs, and nothing on this page is a result of it. `make reproduce` "
    "at demo scale sets its runs beside the paper."
)
NOT_RUN = "not run"
MIN_SEEDS = 3  # fewer decide nothing
TASKS = {  # of the sections of the paper on quality against cost
    "images": ("image",),
    "detection": ("detection",),
    "graphs": ("graph",),
    "language": ("language_model",),
    "entailment": ("entailment",),
}
QUESTIONS = (quality_cost, aggregation, critical_periods, equal_cost, int8_comparison)


def write(
    folder: Path,
    scale: str,
    outcomes: list[dict[str, Any]],
    committed: Sequence[Section] = (),
    own_data: Sequence[Section] = (),
) -> Path:
    """Write ``index.html`` into ``folder``: notebooks, and the paper beside the runs of a scale.

    Args:
        folder: of the page and of the pages of the notebooks.
        scale: whose runs are shown; smoke runs are not.
        outcomes: what became of every notebook.
        committed: sections made of committed rows, which come first.
        own_data: answers for data of the user's own, which come before all else.
    """
    files = [] if scale == "smoke" else sorted((runs_dir() / scale).glob("*.jsonl"))
    runs = load(*files) if files else table([])
    notes = [ANSWER]
    if own_data:
        notes.append("What was found for your data comes first.")
    notes.append(
        "Low precision is simulated here: bit operations (BitOps) count work, they are not seconds. The words are "
        "explained at the end."
    )
    notes += _numerics_note(runs)
    if scale == "smoke":
        notes.insert(0, SMOKE)
    sections = [
        *own_data,
        *committed,
        Section("Notebooks", (BRACKETS,), table=_notebooks(outcomes), style="left"),
        *_paper_sections(runs),
        *data_reports.sections(
            *data_reports.stored_reports(files), style="left folded"
        ),
        Section("Where this comes from", (_versions(),)),
    ]
    index = folder / "index.html"
    title = f"Cyclic precision training: notebooks run at {scale} scale"
    write_text(
        index, render("page.html.j2", title=title, notes=notes, sections=sections)
    )
    return index


def compare_claims(here: pd.DataFrame, committed: pd.DataFrame) -> pd.DataFrame:
    """Return the claims of a section: the paper, this run, the committed rows.

    Args:
        here: ``reproduction.claims_table`` of the runs of a page.
        committed: the same of the committed rows.
    """
    lines = []
    for ours, theirs in zip(
        here.itertuples(index=False), committed.itertuples(index=False), strict=True
    ):
        lines.append((theirs[0], _measured_here(ours), *theirs[1:]))
    return pd.DataFrame(
        lines,
        columns=[here.columns[0], "this run", "committed rows", *committed.columns[2:]],
    )


def _measured_here(line: tuple[str, ...]) -> str:
    """Return what was measured and its level; with few seeds also that it decides nothing."""
    _, measured, where, level, _ = line
    if measured == "–":
        return NOT_RUN
    parts = [measured]
    if level != "–":
        parts.append(level)
    seeds = [int(n) for n in re.findall(r"\bn = (\d+)", measured)]
    if where != "computed" and max(seeds, default=0) < MIN_SEEDS:
        parts.append("too few seeds to decide")
    return "; ".join(parts)


def _paper_sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield, by section of the paper that was run, the table of claims and the figures of the runs."""
    figures = (
        {topic: list(_figures(topic, runs)) for topic in reproduction.SECTIONS}
        if len(runs)
        else {}
    )
    topics = [topic for topic, drawn in figures.items() if drawn]
    if not topics:
        return
    here, committed = reproduction.claims_tables(runs), reproduction.claims_tables()
    for topic in sorted(topics, key=lambda topic: reproduction.SECTIONS[topic].number):
        section = reproduction.SECTIONS[topic]
        heading = f"{section.title}: the paper, this run, committed rows"
        note = (
            f"Paper: {section.place}. Notebook {section.number} explains it. "
            "Verdicts are those of the committed rows."
        )
        yield Section(
            heading,
            (note,),
            table=compare_claims(here[topic], committed[topic]),
            style="left claims",
        )
        yield from figures[topic]


def _figures(topic: str, runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the figures of the runs that belong to a section of the paper."""
    if topic == "critical-periods":
        yield from critical_periods.sections(runs)
        return
    if topic == "schedules":
        yield from equal_cost.sections(runs)
        yield from int8_comparison.sections(runs)
        return
    part = runs[runs["task"].isin(TASKS[topic])]
    for name, group in run_groups.with_unique_names(
        run_groups.quality_cost_groups(part)
    ):
        drawn = quality_cost.figure_3(group) if group["arm"].nunique() > 1 else None
        seeds = int(group.groupby("arm")["seed"].nunique().max())
        notes = (
            (f"{plural(seeds, 'seed')}: too few to compare.",)
            if seeds < MIN_SEEDS
            else ()
        )
        yield Section(
            name,
            notes,
            drawn,
            f"{metric_of(group)} against cost",
            _without_front(group),
        )
    if topic == "graphs":
        yield from aggregation.sections(part)


def _without_front(group: pd.DataFrame) -> pd.DataFrame:
    """Return the table of an experiment without its Pareto front, and without columns that say nothing."""
    shown = quality_cost.summary(group).drop(columns="Pareto front", errors="ignore")
    empty_values = {"paper": "not in the paper", "std": "–", "failed": 0}
    empty = [
        name
        for name, value in empty_values.items()
        if name in shown and (shown[name] == value).all()
    ]
    return shown.drop(columns=empty)


def write_report(files: Sequence[Path] | None = None, out: Path | None = None) -> Path:
    """Write one page, complete in itself, about all stored runs but those at smoke scale, and return its path.

    Without ``files`` it takes the committed stores and those under ``runs/``, without ``out`` ``runs/report.html``.
    """
    files = all_stores() if files is None else files
    found = load(*files, every_rate=True) if files else table([])
    stored = found[found["scale"] != "smoke"]
    runs = tuned(stored)
    shown = [section for question in QUESTIONS for section in question.sections(runs)]
    printed, title = paper_comparison.summary(runs), "Numbers printed in the paper"
    missing = printed.eq("not run").any(axis=1)
    parts = (
        (title, printed[~missing], "left"),
        (f"{title}: not run", printed[missing], "left folded"),
    )
    tables = reproduction.claims_tables(runs) if len(runs) else {}
    sections = [
        *(
            shown
            or [
                Section(
                    "Results",
                    (
                        "No run above smoke scale is stored yet; `cpt plan` lists the grids.",
                    ),
                )
            ]
        ),
        *(section for study in studies("outcome") for section in study.sections(runs)),
        *_claims_by_section(tables),
        of_claims(runs),
        *predictors.sections(runs),
        Section(
            "Figure 2: the ten schedules",
            (),
            figure_2(),
            "precision over training steps for the ten schedules",
        ),
        *(
            Section(title, table=lines, style=style)
            for title, lines, style in parts
            if len(lines)
        ),
        *([_claims_not_run(tables)] if tables else []),
        *data_reports.sections(
            *data_reports.stored_reports(files), style="left folded"
        ),
        Section(
            "Differences from the paper",
            points=tuple((entry, place) for place, entry in differences()),
        ),
        Section(
            "Where this comes from",
            (str(integrity(files)), _versions()),
            table=_sources(stored),
            style="left",
        ),
    ]
    notes = [
        ANSWER,
        "Made from result rows alone. Training at low precision is simulated; bit operations (BitOps) count work, they "
        "are not seconds. +- is the standard deviation over seeds (n - 1); one seed has none.",
    ]
    notes += _numerics_note(stored)
    if smoke := len(found) - len(stored):
        notes.append(
            f"{plural(smoke, 'run')} at smoke scale left out: they show that everything runs, and no more."
        )
    out = out or runs_dir() / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    title = "Cyclic precision training: figures and tables from stored runs"
    write_text(out, render("page.html.j2", title=title, notes=notes, sections=sections))
    return out


def _claims_by_section(tables: dict[str, pd.DataFrame]) -> Iterator[Section]:
    """Yield the measured claims of every section of the paper, as on the page of ``make reproduce``."""
    for topic in sorted(tables, key=lambda topic: reproduction.SECTIONS[topic].number):
        section = reproduction.SECTIONS[topic]
        lines = tables[topic]
        heading = f"{section.title}: the paper and these rows"
        measured = lines[lines["verdict"] != NOT_RUN]
        yield Section(
            heading,
            (f"Paper: {section.place}.",),
            table=measured,
            style="left claims folded",
        )


def _claims_not_run(tables: dict[str, pd.DataFrame]) -> Section:
    """Return the claims that nothing was run for, and what they need."""
    lines = pd.concat(list(tables.values()))
    missing = lines.loc[
        lines["verdict"] == NOT_RUN, ["the paper says", "data and scale"]
    ]
    return Section(
        "Claims not run",
        table=missing.rename(columns={"data and scale": "needs"}),
        style="left folded",
    )


def _notebooks(outcomes: list[dict[str, Any]]) -> pd.DataFrame:
    """A line per page: the good one, with question and answer, and the failure with its reason, if the last."""
    lines = []
    for o in outcomes:
        links = {
            "page": o["page"] and o["page"].name,
            "failed": o["failed"] and o["failed"].name,
        }
        time = f"{o['seconds']:.0f}\N{NO-BREAK SPACE}s" if o["seconds"] else "–"
        when = f"{time}, earlier" if "earlier" in o["status"] else time
        lines.append(
            (
                {**links, "name": o["name"], "error": o["error"]},
                o["asked"],
                o["found"],
                when,
            )
        )
    return pd.DataFrame(
        lines, columns=["notebook", "what was asked", "what came out", "time"]
    )


def _sources(runs: pd.DataFrame) -> pd.DataFrame:
    changed = runs["dirty"].map({True: " with changes"}).fillna("")
    runs = runs.assign(
        commit=runs["commit"].fillna("none").str[:8] + changed,
        day=runs["started"].str[:10],
    )
    lines = []
    for store, part in runs.groupby("store"):
        devices, torch, commits = (
            ", ".join(sorted(set(part[name]))) for name in ("device", "torch", "commit")
        )
        numerics = _numerics(part)
        hours, days = (
            part["seconds"].sum() / 3600,
            f"{part['day'].min()} to {part['day'].max()}",
        )
        diverged = int(part["diverged"].sum())
        failed = int(((part["status"] == "failed") & ~part["diverged"]).sum())
        lines.append(
            (
                store,
                len(part),
                diverged,
                failed,
                devices,
                f"{hours:.2f}",
                numerics,
                torch,
                commits,
                days,
            )
        )
    columns = [
        "store",
        "runs that count",
        "diverged",
        "failed",
        "device",
        "hours",
        "numerics",
        "torch",
        "commit",
    ]
    columns.append("started")
    return pd.DataFrame(lines, columns=columns)


def _numerics(runs: pd.DataFrame) -> str:
    """Return the versions of the numerics that made some runs, with the number of runs of each where they differ."""
    counts = (
        runs["numerics"]
        .astype("string")
        .fillna("unknown")
        .value_counts()
        .sort_index(ascending=False)
    )
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(
        f"{version}: {plural(count, 'run')}" for version, count in counts.items()
    )


def _numerics_note(runs: pd.DataFrame) -> list[str]:
    """Return a note where some of the runs were made with other numerics than today's."""
    others = int((runs["numerics"].fillna(0) != NUMERICS).sum())
    if not others:
        return []
    return [
        f"{plural(others, 'run')} of {len(runs)} were made with other numerics than today's ({NUMERICS}): equal seeds "
        "gave other noise there, so these runs are neither paired with the others nor comparable run by run. The "
        "column numerics of the last table names them."
    ]


def _versions() -> str:
    found = {name: provenance.version(name) for name in PACKAGES}
    versions = ", ".join(
        f"{name} {version}"
        for name, version in found.items()
        if version != "not installed"
    )
    commit = provenance.commit()
    where = (
        f"{commit['commit'][:12]}{' with local changes' if commit['dirty'] else ''}"
        if commit["commit"]
        else "none"
    )
    written = datetime.now(UTC).isoformat(timespec="minutes")
    return f"Written {written} with {versions}; commit {where}."


def differences() -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Differs:`` line."""
    for path in sorted(ROOT.glob("cpt_*/**/*.py")):
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(source)) if "Differs: " in source else ()
        for node in nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = "" if isinstance(node, ast.Module) else f" {node.name}"
                for entry in _entries(ast.get_docstring(node) or ""):
                    yield f"{place}{name}", entry
        for comment in re.findall(r"((?:^ *# .*\n)+)", source, flags=re.M):
            for entry in _entries(re.sub(r"^ *# ?", "", comment, flags=re.M)):
                yield place, entry


def _entries(text: str) -> list[str]:
    """Return the differences in a text: each ends at a ``Paper:`` line, a blank line or a line of less indent."""
    found = re.findall(
        r"(?:^|\s)Differs: (.*?)(?=(?:\s(?:Paper|Differs): )|\n\s*\n|\n\w+:|\Z)",
        text,
        re.S,
    )
    return [" ".join(entry.split()) for entry in found]
