"""Reports in HTML that open offline: of a reproduction (a folder), and of everything that is stored (one page)."""

from __future__ import annotations

import html
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.analysis import metrics, quality_cost, schedules
from cpt_core.analysis.aggregation import aggregation_section
from cpt_core.analysis.claims import claims_section
from cpt_core.analysis.critical_periods import critical_periods_section
from cpt_core.analysis.equal_cost import equal_cost_section
from cpt_core.analysis.groups import experiment_name, experiments
from cpt_core.analysis.paper import paper_numbers
from cpt_core.analysis.predictors import predictors_section
from cpt_core.analysis.quality_cost import experiment_section
from cpt_core.analysis.reproducing import harvest
from cpt_core.analysis.runs import table
from cpt_core.analysis.style import image_tag
from cpt_core.experiments.grids import GRIDS
from cpt_core.paths import ROOT, results_dir, runs_dir
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.sweeps import stores
from cpt_core.sweeps.stores import Row, load_rows

PACKAGES = ("cpt-core", "torch", "torchvision", "numpy", "papermill", "jupyterlab")

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
table {{ border-collapse: collapse; font-size: .9rem; }} th, td {{ padding: .25rem .7rem; text-align: right; }}
th {{ border-bottom: 2px solid #888; }} td {{ border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; white-space: nowrap; }} img {{ max-width: 100%; }}
.left td, .left th {{ text-align: left; }} .claims td {{ white-space: normal !important; }} code {{ font-size: .9em; }}
.failed {{ color: #b00020; font-weight: bold; }} .note {{ color: #555; font-size: .9rem; }}
</style></head><body>{body}</body></html>"""


def write(folder: Path, scale: str, outcomes: list[dict[str, Any]]) -> Path:
    """Write ``index.html`` into ``folder``: notebooks, figures and tables from the rows of this scale, versions."""
    rows = _rows(scale)
    parts = [
        f"<h1>Cyclic precision training, reproduced at {scale} scale</h1>",
        "<p class='note'>A simulation: bit operations (BitOps) count work at low precision, they are not seconds.</p>",
        "<h2>Notebooks</h2>",
        _notebooks(outcomes),
        *(experiment_section(part) for part in experiments(rows)),
        *aggregation_section(rows),
        *critical_periods_section(rows),
        *equal_cost_section(rows),
        "<h2>Where this comes from</h2>",
        _provenance(outcomes),
    ]
    if scale == "smoke":
        parts.insert(2, "<p class='note'>Smoke runs show that everything runs; they are not a result.</p>")
    index = folder / "index.html"
    index.write_text(PAGE.format(title=f"Cyclic precision training, {scale}", body="\n".join(parts)))
    return index


def write_report(files: Sequence[Path] | None = None, out: Path | None = None) -> Path:
    """Write one page, complete in itself, about all stored rows but those of smoke runs, and return its path.

    Args:
        files: stores; None takes the committed ones and those under ``runs/``.
        out: the page; None takes ``runs/report.html``.
    """
    files = all_stores() if files is None else files
    of = {path: [row for row in load_rows(path) if row["spec"]["scale"] != "smoke"] for path in files}
    rows = list(stores.newest(row for part in of.values() for row in part).values())
    shown = [
        *map(experiment_section, experiments(rows)),
        *aggregation_section(rows),
        *critical_periods_section(rows),
        *equal_cost_section(rows),
    ]
    parts = [
        "<h1>Cyclic precision training: figures and tables from stored runs</h1>",
        "<p class='note'>Made from result rows alone. Training at low precision is simulated; bit operations (BitOps) "
        "count work, they are not seconds. +- is the standard deviation over seeds (n - 1).</p>",
        "<h2>What has been run</h2>",
        _overview(rows),
        "<h2>Figure 2: the ten schedules</h2>",
        image_tag(schedules.figure_2(), "precision over training steps for the ten schedules"),
        *claims_section(of),
        *(shown or ["<h2>Results</h2><p>No rows are stored yet; <code>make plan</code> lists the grids.</p>"]),
        *predictors_section(rows),
        "<h2>Numbers printed in the paper</h2>",
        paper_numbers(rows),
        "<h2>Differences from the paper</h2>",
        "<ul>"
        + "".join(f"<li>{_words(e)} <span class='note'>{p}</span></li>" for p, e in harvest("Differs"))
        + "</ul>",
        "<h2>Where this comes from</h2>",
        _sources(of),
        _versions(),
    ]
    out = out or runs_dir() / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(PAGE.format(title="Cyclic precision training: results", body="\n".join(parts)))
    return out


def all_stores() -> list[Path]:
    """Return the committed stores and those under ``runs/`` but for smoke runs."""
    own = [p for p in sorted(runs_dir().glob("*/*.jsonl")) if p.parent.name != "smoke"]
    return [*sorted(results_dir().glob("*.jsonl")), *own]


def _overview(rows: list[Row]) -> str:
    """How many runs of every grid are stored, and what is stored besides."""
    left = {row["key"]: row for row in rows}
    lines = []
    for name, grid in GRIDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShortCycleWarning)
            keys = {spec.key for spec in grid.make(grid.scales[0])}
        there = sum(row["key"] in keys for row in rows)
        left = {key: row for key, row in left.items() if key not in keys}
        state = f"{there} of {len(keys)} runs stored" if there else "not run"
        lines.append((grid.artefact.replace("_", " "), name, grid.about, grid.scales[0], state))
    others = Counter(
        (f"{r['dataset'].rstrip('/')}/{r['model']}", row["spec"]["scale"])
        for row in left.values()
        for r in [row["spec"]["recipe"]]
    )
    lines += [("", name, "not one of the grids", at, f"{n} runs stored") for (name, at), n in others.items()]
    frame = pd.DataFrame(lines, columns=["what", "grid", "about", "scale", "state"])
    return frame.to_html(index=False, border=0, classes="left")


def _sources(files: dict[Path, list[Row]]) -> str:
    """Every store with its devices, versions, commits and times."""
    lines = []
    for path, rows in files.items():
        if not rows:
            continue
        where = [row["provenance"] for row in rows]
        commits = {(w["commit"] or "none")[:8] + (" with changes" if w["dirty"] else "") for w in where}
        torch = {w["versions"]["torch"] for w in where}
        started = sorted(w["started"] for w in where)
        hours = sum(row.get("seconds", 0.0) for row in rows) / 3600
        lines.append(
            (
                path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name,
                len(rows),
                sum(row["status"] == "failed" for row in rows),
                ", ".join(sorted({row.get("device", "") for row in rows})),
                f"{hours:.2f}",
                ", ".join(sorted(torch)),
                ", ".join(sorted(commits)),
                f"{started[0][:10]} to {started[-1][:10]}",
            )
        )
    columns = ["store", "runs", "failed", "device", "hours", "torch", "commit", "started"]
    return pd.DataFrame(lines, columns=columns).to_html(index=False, border=0, classes="left")


def _words(entry: str) -> str:
    """Escape a docstring's line and set its code words as code."""
    return re.sub(r"``?([^`]+)``?", r"<code>\1</code>", html.escape(entry))


def summary(scale: str) -> list[str]:
    """Return what the stored rows of a scale say, in a few lines."""
    rows = _rows(scale)
    lines = []
    for part in experiments(rows):
        part = quality_cost.tuned(part)
        runs, arms = table(part), quality_cost.by_arm(part)
        counts = ", ".join(f"{n} {status}" for status, n in runs.status.value_counts().items())
        lines.append(f"{experiment_name(part)}: {counts}")
        metric = metrics.metric_of(part)
        measure = metrics.measure_of(metric)
        if metric not in runs:  # every run failed
            continue
        groups = [(g, measure.factor * runs[runs.savings == g][metric].mean()) for g in ("large", "medium", "small")]
        top = arms[arms.arm == f"static {arms.q_max.max()}"]
        said = [f"{g} savings {mean:.1f}" for g, mean in groups if mean == mean]
        said += [
            f"{r.arm} bits {measure.factor * r.mean:.1f} +- {measure.factor * r.std:.1f}" for r in top.itertuples()
        ]
        lines.append(f"  {metric} {measure.unit}".rstrip() + f": {', '.join(said)}")
    return lines


def _notebooks(outcomes: list[dict[str, Any]]) -> str:
    lines = []
    for o in outcomes:
        error = f"<br><span class='failed'>{html.escape(o['error'])}</span>" if o["error"] else ""
        lines.append(
            f"<tr><td><a href='{o['page'].name}'>{o['name']}</a>{error}</td>"
            f"<td class='{o['status']}'>{o['status']}</td><td>{o['seconds']:.0f} s</td></tr>"
        )
    return f"<table><tr><th>notebook</th><th>status</th><th>time</th></tr>{''.join(lines)}</table>"


def _rows(scale: str) -> list[Row]:
    """The rows of a scale that are kept: smoke runs are none."""
    stores_of = [] if scale == "smoke" else sorted((runs_dir() / scale).glob("*.jsonl"))
    return [row for path in stores_of for row in load_rows(path)]


def _provenance(outcomes: list[dict[str, Any]]) -> str:
    return f"<p>Notebook time {sum(o['seconds'] for o in outcomes):.0f} s in all.</p>{_versions()}"


def _versions() -> str:
    there = {d.name.replace("_", "-").lower(): d.version for d in metadata.distributions()}
    versions = ", ".join(f"{name} {there[name]}" for name in PACKAGES if name in there)
    commit = stores.commit()
    where = f"{commit['commit'][:12]}{' with local changes' if commit['dirty'] else ''}" if commit["commit"] else "none"
    written = datetime.now(UTC).isoformat(timespec="minutes")
    return f"<p class='note'>Written {written} with {versions}; commit {where}.</p>"
