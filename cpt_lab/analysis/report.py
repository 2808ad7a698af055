"""HTML reports that open offline.

``write`` makes the index page of ``make reproduce`` in a folder of notebook pages; ``write_report`` makes one page
about all stored runs (``cpt report``).
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
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
    figure_data,
    int8_comparison,
    paper_comparison,
    predictors,
    quality_cost,
    reproduction,
    run_groups,
)
from cpt_lab.analysis.claims import judge_claims
from cpt_lab.analysis.claims import section as section_of_claims
from cpt_lab.analysis.estimates import NOT_RUN
from cpt_lab.analysis.metrics import metric_of, plural
from cpt_lab.analysis.rendering import Section, render
from cpt_lab.analysis.run_table import load, table, tuned
from cpt_lab.analysis.schedules import figure_2
from cpt_lab.experiments.grids import studies
from cpt_lab.paths import ROOT, all_stores, runs_dir
from cpt_lab.sweeps.row_format import integrity

REPORTED_PACKAGES = (
    "cpt-core",
    "torch",
    "torchvision",
    "numpy",
    "papermill",
    "jupyterlab",
)
HEADLINE = (  # of H2, a test holds it to the rows
    "How few bits can a network be trained with, and does it help to let them rise and fall? In the results that are "
    "stored, no cyclic schedule beat static bits of equal cost by the margin set beforehand."
)
BRACKETS_NOTE = (
    "In round brackets: what training cost, relative to the most bits throughout. In square ones: 95 % intervals, "
    "paired by seed, each on its own and not corrected for several comparisons."
)
SMOKE_NOTE = (
    "This was a smoke run: it shows that everything runs, and nothing on this page is a result of it. `make reproduce` "
    "at demo scale sets its runs beside the paper."
)
ROWS_NOTE = (
    "Made from result rows alone. Training at low precision is simulated; bit operations (BitOps) count work, they "
    "are not seconds. +- is the standard deviation over seeds (n - 1); one seed has none."
)
MIN_SEEDS = 3  # with fewer seeds nothing is decided
SOURCE_COLUMNS = [
    "store",
    "runs that count",
    "diverged",
    "failed",
    "device",
    "hours",
    "numerics",
    "torch",
    "commit",
    "started",
]
TASKS_BY_TOPIC = {  # section of the paper on quality against cost -> its tasks
    "images": ("image",),
    "detection": ("detection",),
    "graphs": ("graph",),
    "language": ("language_model",),
    "entailment": ("entailment",),
}
ARTEFACTS_BY_TOPIC = {  # section of the paper -> its figure, for committed rows
    "images": "figure_3",
    "detection": "figure_4",
    "graphs": "figure_6",
    "language": "figure_7/language_model",
    "entailment": "figure_7/entailment",
    "critical-periods": "table_1",
}
RESULT_MODULES = (
    quality_cost,
    aggregation,
    critical_periods,
    equal_cost,
    int8_comparison,
)


def write(
    folder: Path,
    scale: str,
    outcomes: list[dict[str, Any]],
    committed: Sequence[Section] = (),
    own_data: Sequence[Section] = (),
    notebooks: Collection[str] = (),
    has_claims: bool = True,
) -> Path:
    """Write ``index.html`` into ``folder``: notebooks, and the paper compared with the runs of a scale.

    It can be written while notebooks run: a section without runs yet shows the figure of the committed rows.

    Args:
        folder: folder of the page and of the pages of the notebooks.
        scale: scale of the shown runs; smoke runs are not shown.
        outcomes: outcome of every notebook.
        committed: sections made of committed rows, which come first.
        own_data: answers for the user's own data, which come before everything else.
        notebooks: numbers of notebooks such as "03", whose sections are on the page before any of their runs ends.
        has_claims: compare the claims of the shown sections, which takes up to 20 seconds a section; without, the page
            has figures only.
    """
    files = [] if scale == "smoke" else sorted((runs_dir() / scale).glob("*.jsonl"))
    runs = load(*files) if files else table([])
    notes = [HEADLINE]
    if own_data:
        notes.append("What was found for your data comes first.")
    notes.append(
        "Low precision is simulated here: bit operations (BitOps) count work, they are not seconds. The words are "
        "explained at the end."
    )
    notes += _numerics_note(runs)
    if scale == "smoke":
        notes.insert(0, SMOKE_NOTE)
    sections = [
        *own_data,
        *committed,
        Section(
            "Notebooks", (BRACKETS_NOTE,), table=_notebooks(outcomes), style="left"
        ),
        *_paper_sections(runs, scale, notebooks, has_claims),
        *data_reports.sections(
            *data_reports.stored_reports(files), style="left folded"
        ),
        Section("Provenance", (_versions(),)),
    ]
    index = folder / "index.html"
    title = f"Cyclic precision training: notebooks run at {scale} scale"
    write_text(
        index, render("page.html.j2", title=title, notes=notes, sections=sections)
    )
    return index


def compare_claims(run_claims: pd.DataFrame, committed: pd.DataFrame) -> pd.DataFrame:
    """Return the claims of a section in three columns: the paper, your runs, the committed rows.

    Args:
        run_claims: ``reproduction.claims_table`` of the runs of a page.
        committed: ``reproduction.claims_table`` of the committed rows.
    """
    lines = []
    for run_claim, stored_claim in zip(
        run_claims.itertuples(index=False),
        committed.itertuples(index=False),
        strict=True,
    ):
        lines.append((stored_claim[0], _measured_here(run_claim), *stored_claim[1:]))
    return pd.DataFrame(
        lines,
        columns=[
            run_claims.columns[0],
            "your runs",
            "committed rows",
            *committed.columns[2:],
        ],
    )


def _measured_here(line: tuple[str, ...]) -> str:
    """Return the measured effect and its baseline; with few seeds also that it decides nothing."""
    _, measured, where, baseline, _ = line
    if measured == "–":
        return NOT_RUN
    parts = [measured]
    if baseline != "–":
        parts.append(baseline)
    seeds = [int(n) for n in re.findall(r"\bn = (\d+)", measured)]
    if where != "computed" and max(seeds, default=0) < MIN_SEEDS:
        parts.append("too few seeds to decide")
    return "; ".join(parts)


def _paper_sections(
    runs: pd.DataFrame, scale: str, notebooks: Collection[str], has_claims: bool
) -> Iterator[Section]:
    """Yield claims and figures of every section of the paper that was run, or whose notebook is running."""
    figures = {}
    if len(runs):
        figures = {
            topic: list(_figures(topic, runs)) for topic in reproduction.SECTIONS
        }
    by_number = sorted(
        reproduction.SECTIONS, key=lambda topic: reproduction.SECTIONS[topic].number
    )
    for topic in by_number:
        number = reproduction.SECTIONS[topic].number
        if figures.get(topic):
            yield _claims_with_runs(topic, runs, scale, has_claims)
            yield from figures[topic]
        elif number in notebooks and topic in ARTEFACTS_BY_TOPIC:
            yield _committed_claims(topic, has_claims)
            yield from _explained_committed_figures(topic, scale)


def _claims_with_runs(
    topic: str, runs: pd.DataFrame, scale: str, has_claims: bool
) -> Section:
    """Return the claims of a section measured by runs of a scale, beside the committed rows."""
    section = reproduction.SECTIONS[topic]
    table = None
    if has_claims:
        run_claims = reproduction.claims_table(topic, runs)
        table = compare_claims(run_claims, reproduction.claims_table(topic))
    title = f"{section.title}: the paper, your runs, committed rows"
    note = f"{_place_note(section)} Your runs are all that are stored at {scale} scale. {_verdict_note(has_claims)}"
    return Section(title, (note,), table=table, style="left claims")


def _committed_claims(topic: str, has_claims: bool) -> Section:
    """Return the claims of a section measured by the committed rows."""
    section = reproduction.SECTIONS[topic]
    table = reproduction.claims_table(topic) if has_claims else None
    title = f"{section.title}: the paper, committed rows"
    note = f"{_place_note(section)} {_verdict_note(has_claims)}"
    return Section(title, (note,), table=table, style="left claims")


def _place_note(section: reproduction.PaperSection) -> str:
    return f"Paper: {section.place}. Notebook {section.number} explains it."


def _verdict_note(has_claims: bool) -> str:
    if has_claims:
        return "Verdicts are those of the committed rows."
    return "The claims are compared when all notebooks have ended."


def _explained_committed_figures(topic: str, scale: str) -> Iterator[Section]:
    """Yield the figures of committed rows, with the reason why they are shown instead of runs."""
    reason = f"no run of this section has ended here at {scale} scale yet"
    if scale == "smoke":
        reason = "smoke runs are too short to be shown"
    for shown in _committed_figures(topic):
        yield replace(shown, notes=(f"Committed rows: {reason}.", *shown.notes))


@cache
def _committed_figures(topic: str) -> tuple[Section, ...]:
    """Return the figures of a section made of committed rows."""
    rows = figure_data.best_rows(ARTEFACTS_BY_TOPIC[topic])
    if rows.empty:
        return ()
    return tuple(_figures(topic, rows))


def _figures(topic: str, runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the figures of a section of the paper."""
    if topic == "critical-periods":
        yield from critical_periods.sections(runs)
        return
    if topic == "schedules":
        yield from equal_cost.sections(runs)
        yield from int8_comparison.sections(runs)
        return
    part = runs[runs["task"].isin(TASKS_BY_TOPIC[topic])]
    for name, group in run_groups.with_unique_names(
        run_groups.quality_cost_groups(part)
    ):
        figure = quality_cost.figure_3(group) if group["arm"].nunique() > 1 else None
        seeds = int(group.groupby("arm")["seed"].nunique().max())
        notes = (
            (f"{plural(seeds, 'seed')}: too few to compare.",)
            if seeds < MIN_SEEDS
            else ()
        )
        yield Section(
            name,
            notes,
            figure,
            f"{metric_of(group)} against cost",
            _without_front(group),
        )
    if topic == "graphs":
        yield from aggregation.sections(part)


def _without_front(group: pd.DataFrame) -> pd.DataFrame:
    """Return the table of an experiment without its Pareto front and without constant columns."""
    table = quality_cost.summary(group).drop(columns="Pareto front", errors="ignore")
    empty_values = {"paper": "not in the paper", "std": "–", "failed": 0}
    empty = [
        name
        for name, value in empty_values.items()
        if name in table and (table[name] == value).all()
    ]
    return table.drop(columns=empty)


def write_report(files: Sequence[Path] | None = None, out: Path | None = None) -> Path:
    """Write a self-contained page about all stored runs above smoke scale, and return its path.

    Args:
        files: the stores; None for the committed stores and those under ``runs/``.
        out: path of the page; None for ``runs/report.html``.
    """
    files = all_stores() if files is None else files
    all_runs = load(*files, every_rate=True) if files else table([])
    stored_runs = all_runs[all_runs["scale"] != "smoke"]
    notes = [HEADLINE, ROWS_NOTE, *_numerics_note(stored_runs)]
    num_smoke = len(all_runs) - len(stored_runs)
    if num_smoke:
        notes.append(
            f"{plural(num_smoke, 'run')} at smoke scale left out: they show that everything runs, and no more."
        )
    out = out or runs_dir() / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    title = "Cyclic precision training: figures and tables from stored runs"
    sections = list(_report_sections(tuned(stored_runs), stored_runs, files))
    write_text(out, render("page.html.j2", title=title, notes=notes, sections=sections))
    return out


def _report_sections(
    runs: pd.DataFrame, stored_runs: pd.DataFrame, files: Sequence[Path]
) -> Iterator[Section]:
    """Yield all sections of the report.

    Args:
        runs: the runs at their best learning rates.
        stored_runs: all runs above smoke scale.
        files: their stores.
    """
    yield from _result_sections(runs)
    for study in studies("outcome"):
        yield from study.sections(runs)
    entries = judge_claims(runs)
    claim_tables = reproduction.claims_tables(entries) if len(runs) else {}
    yield from _claims_by_section(claim_tables)
    yield section_of_claims(entries)
    yield from predictors.sections(runs)
    alt = "precision over training steps for the ten schedules"
    yield Section("Figure 2: the ten schedules", (), figure_2(), alt)
    yield from _printed_sections(runs)
    if claim_tables:
        yield _claims_not_run(claim_tables)
    reports, missing = data_reports.stored_reports(files)
    yield from data_reports.sections(reports, missing, style="left folded")
    points = tuple((entry, place) for place, entry in differences())
    yield Section("Differences from the paper", points=points)
    provenance_notes = (str(integrity(files)), _versions())
    table = _sources(stored_runs)
    yield Section("Provenance", provenance_notes, table=table, style="left")


def _result_sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the sections of every kind of result, or one that says that nothing is stored."""
    is_empty = True
    for module in RESULT_MODULES:
        for section in module.sections(runs):
            is_empty = False
            yield section
    if is_empty:
        note = "No run above smoke scale is stored yet; `cpt plan` lists the grids."
        yield Section("Results", (note,))


def _printed_sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the numbers printed in the paper with the measured ones, then those that were not run."""
    printed = paper_comparison.summary(runs)
    is_missing = printed.eq(NOT_RUN).any(axis=1)
    title = "Numbers printed in the paper"
    if not is_missing.all():
        yield Section(title, table=printed[~is_missing], style="left")
    if is_missing.any():
        missing = printed[is_missing]
        yield Section(f"{title}: not run", table=missing, style="left folded")


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
    """Return the claims without any run, and the runs that they need."""
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
    """Return a table of notebooks: link to the page with question and answer, link to a failure, time."""
    lines = []
    for outcome in outcomes:
        page, failed = outcome["page"], outcome["failed"]
        link = {
            "page": page and page.name,
            "failed": failed and failed.name,
            "name": outcome["name"],
            "error": outcome["error"],
        }
        time = "–"
        if outcome["seconds"]:
            time = f"{outcome['seconds']:.0f}\N{NO-BREAK SPACE}s"
        if "earlier" in outcome["status"]:
            time = f"{time}, earlier"
        lines.append((link, outcome["asked"], outcome["found"], time))
    columns = ["notebook", "question", "answer", "time"]
    return pd.DataFrame(lines, columns=columns)


def _sources(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a table of stores: number of runs, devices, hours, versions, commits and days."""
    changes = runs["dirty"].map({True: " with changes"}).fillna("")
    runs = runs.assign(
        commit=runs["commit"].fillna("none").str[:8] + changes,
        day=runs["started"].str[:10],
    )
    lines = []
    for store, part in runs.groupby("store"):
        distinct = {}
        for name in ("device", "torch", "commit"):
            distinct[name] = ", ".join(sorted(set(part[name])))
        is_failed = (part["status"] == "failed") & ~part["diverged"]
        lines.append(
            {
                "store": store,
                "runs that count": len(part),
                "diverged": int(part["diverged"].sum()),
                "failed": int(is_failed.sum()),
                "device": distinct["device"],
                "hours": f"{part['seconds'].sum() / 3600:.2f}",
                "numerics": _numerics(part),
                "torch": distinct["torch"],
                "commit": distinct["commit"],
                "started": f"{part['day'].min()} to {part['day'].max()}",
            }
        )
    return pd.DataFrame(lines, columns=SOURCE_COLUMNS)


def _numerics(runs: pd.DataFrame) -> str:
    """Return the versions of the numerics of runs, with the number of runs of each if they differ."""
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
    """Return a note if some of the runs were made with numerics other than today's."""
    num_others = int((runs["numerics"].fillna(0) != NUMERICS).sum())
    if not num_others:
        return []
    return [
        f"{plural(num_others, 'run')} of {len(runs)} were made with other numerics than today's ({NUMERICS}): equal "
        "seeds gave other noise there, so these runs are neither paired with the others nor comparable run by run. The "
        "column numerics of the last table names them."
    ]


def _versions() -> str:
    """Return a sentence with the date, the versions of packages and the commit."""
    versions = []
    for name in REPORTED_PACKAGES:
        version = provenance.version(name)
        if version != "not installed":
            versions.append(f"{name} {version}")
    commit = provenance.commit()
    where = "none"
    if commit["commit"]:
        changes = " with local changes" if commit["dirty"] else ""
        where = f"{commit['commit'][:12]}{changes}"
    timestamp = datetime.now(UTC).isoformat(timespec="minutes")
    return f"Written {timestamp} with {', '.join(versions)}; commit {where}."


def differences() -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Differs:`` line."""
    for path in sorted(ROOT.glob("cpt_*/**/*.py")):
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        if "Differs: " in source:
            yield from _docstring_differences(place, ast.parse(source))
        for comment in re.findall(r"((?:^ *# .*\n)+)", source, flags=re.M):
            text = re.sub(r"^ *# ?", "", comment, flags=re.M)
            for entry in _entries(text):
                yield place, entry


def _docstring_differences(place: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Differs:`` line in the docstrings of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            name = "" if isinstance(node, ast.Module) else f" {node.name}"
            for entry in _entries(ast.get_docstring(node) or ""):
                yield f"{place}{name}", entry


def _entries(text: str) -> list[str]:
    """Return the ``Differs:`` entries of a text.

    An entry ends at a ``Paper:`` line, a blank line or a line of less indent.
    """
    texts = re.findall(
        r"(?:^|\s)Differs: (.*?)(?=(?:\s(?:Paper|Differs): )|\n\s*\n|\n\w+:|\Z)",
        text,
        re.S,
    )
    return [" ".join(entry.split()) for entry in texts]
