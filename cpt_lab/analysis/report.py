"""Reports in HTML that open offline: of a reproduction (a folder), and of everything that is stored (one page)."""

import ast
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.checks import write_text
from cpt_lab import provenance
from cpt_lab.analysis import aggregation, critical_periods, equal_cost, execution, paper, predictors, quality_cost
from cpt_lab.analysis.claims import section as of_claims
from cpt_lab.analysis.metrics import counted
from cpt_lab.analysis.pages import Section, render
from cpt_lab.analysis.runs import load, table, tuned
from cpt_lab.analysis.schedules import figure_2
from cpt_lab.experiments.grids import studies
from cpt_lab.paths import ROOT, all_stores, runs_dir
from cpt_lab.sweeps.lines import integrity

PACKAGES = ("cpt-core", "torch", "torchvision", "numpy", "papermill", "jupyterlab")
ANSWER = (  # of H2, a test holds it to the rows
    "How few bits can a network be trained with, and does it help to let them rise and fall? In the results that are "
    "kept, no cyclic schedule beat static bits of its cost by the margin set beforehand."
)
BRACKETS = (
    "In round brackets: what training cost, relative to the most bits throughout. In square ones: 95 % intervals, "
    "paired by seed, each on its own and not corrected for several comparisons."
)
QUESTIONS = (quality_cost, aggregation, critical_periods, equal_cost, execution)


def write(folder: Path, scale: str, outcomes: list[dict[str, Any]], first: Sequence[Section] = ()) -> Path:
    """Write ``index.html`` into ``folder``: what comes ``first``, notebooks, figures, tables of a scale, versions."""
    files = [] if scale == "smoke" else sorted((runs_dir() / scale).glob("*.jsonl"))
    runs = load(*files) if files else table([])
    answered = "What was found for your data comes first." if first else "`cpt try` answers both for data of yours."
    notes = [
        ANSWER,
        f"{answered} Low precision is simulated here: bit operations (BitOps) count work, they are not seconds. The "
        "words are explained at the end.",
    ]
    if scale == "smoke":
        notes.append("Smoke runs show that everything runs; they are not a result.")
    sections = [
        *first,
        Section("Notebooks", (BRACKETS,), table=_notebooks(outcomes), style="left"),
        *(section for question in QUESTIONS if len(runs) for section in question.sections(runs)),
        Section("Where this comes from", (_versions(),)),
    ]
    index = folder / "index.html"
    title = f"Cyclic precision training, reproduced at {scale} scale"
    write_text(index, render("page.html.j2", title=title, notes=notes, sections=sections))
    return index


def write_report(files: Sequence[Path] | None = None, out: Path | None = None) -> Path:
    """Write one page, complete in itself, about all stored runs but those at smoke scale, and return its path.

    Without ``files`` it takes the committed stores and those under ``runs/``, without ``out`` ``runs/report.html``.
    """
    files = all_stores() if files is None else files
    found = load(*files, every_rate=True) if files else table([])
    stored = found[found["scale"] != "smoke"]
    runs = tuned(stored)
    shown = [section for question in QUESTIONS for section in question.sections(runs)]
    printed, title = paper.summary(runs), "Numbers printed in the paper"
    missing = printed.eq("not run").any(axis=1)
    parts = (title, printed[~missing], "left"), (f"{title}: not run", printed[missing], "left folded")
    sections = [
        *(shown or [Section("Results", ("No run above smoke scale is stored yet; `cpt plan` lists the grids.",))]),
        *(section for study in studies("outcome") for section in study.sections(runs)),
        of_claims(runs),
        *predictors.sections(runs),
        Section("Figure 2: the ten schedules", (), figure_2(), "precision over training steps for the ten schedules"),
        *(Section(title, table=lines, style=style) for title, lines, style in parts if len(lines)),
        Section("Differences from the paper", points=tuple((entry, place) for place, entry in harvest("Differs"))),
        Section("Where this comes from", (str(integrity(files)), _versions()), table=_sources(stored), style="left"),
    ]
    notes = [
        ANSWER,
        "Made from result rows alone. Training at low precision is simulated; bit operations (BitOps) count work, they "
        "are not seconds. +- is the standard deviation over seeds (n - 1); one seed has none.",
    ]
    if smoke := len(found) - len(stored):
        notes.append(f"{counted(smoke, 'run')} at smoke scale left out: they show that everything runs, and no more.")
    out = out or runs_dir() / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    title = "Cyclic precision training: figures and tables from stored runs"
    write_text(out, render("page.html.j2", title=title, notes=notes, sections=sections))
    return out


def _notebooks(outcomes: list[dict[str, Any]]) -> pd.DataFrame:
    """A line per page: the good one, with question and answer, and the failure with its reason, if the last."""
    lines = []
    for o in outcomes:
        links = {"page": o["page"] and o["page"].name, "failed": o["failed"] and o["failed"].name}
        time = f"{o['seconds']:.0f}\N{NO-BREAK SPACE}s" if o["seconds"] else "–"
        when = f"{time}, earlier" if "earlier" in o["status"] else time
        lines.append(({**links, "name": o["name"], "error": o["error"]}, o["asked"], o["found"], when))
    return pd.DataFrame(lines, columns=["notebook", "what was asked", "what came out", "time"])


def _sources(runs: pd.DataFrame) -> pd.DataFrame:
    changed = runs["dirty"].map({True: " with changes"}).fillna("")
    runs = runs.assign(commit=runs["commit"].fillna("none").str[:8] + changed, day=runs["started"].str[:10])
    lines = []
    for store, part in runs.groupby("store"):
        devices, torch, commits = (", ".join(sorted(set(part[name]))) for name in ("device", "torch", "commit"))
        hours, days = part["seconds"].sum() / 3600, f"{part['day'].min()} to {part['day'].max()}"
        diverged = int(part["diverged"].sum())
        failed = int(((part["status"] == "failed") & ~part["diverged"]).sum())
        lines.append((store, len(part), diverged, failed, devices, f"{hours:.2f}", torch, commits, days))
    columns = ["store", "runs that count", "diverged", "failed", "device", "hours", "torch", "commit", "started"]
    return pd.DataFrame(lines, columns=columns)


def _versions() -> str:
    found = {name: provenance.version(name) for name in PACKAGES}
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version != "not installed")
    commit = provenance.commit()
    where = f"{commit['commit'][:12]}{' with local changes' if commit['dirty'] else ''}" if commit["commit"] else "none"
    written = datetime.now(UTC).isoformat(timespec="minutes")
    return f"Written {written} with {versions}; commit {where}."


def harvest(kind: str) -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Paper:`` or ``Differs:`` line."""
    for path in sorted(ROOT.glob("cpt_*/**/*.py")):
        place = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(source)) if f"{kind}: " in source else ()
        for node in nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = "" if isinstance(node, ast.Module) else f" {node.name}"
                for entry in _entries(ast.get_docstring(node) or "", kind):
                    yield f"{place}{name}", entry
        for comment in re.findall(r"((?:^ *# .*\n)+)", source, flags=re.M):
            for entry in _entries(re.sub(r"^ *# ?", "", comment, flags=re.M), kind):
                yield place, entry


def _entries(text: str, kind: str) -> list[str]:
    """Cut the entries out of a text: from the word to the next such word, a blank line or a line of less indent."""
    found = re.findall(rf"(?:^|\s){kind}: (.*?)(?=(?:\s(?:Paper|Differs): )|\n\s*\n|\n\w+:|\Z)", text, re.S)
    return [" ".join(entry.split()) for entry in found]
