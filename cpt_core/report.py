"""Reports in HTML that open offline: of a reproduction (a folder), and of everything that is stored (one page)."""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from nbconvert import HTMLExporter

from cpt_core import experiments, figures, ledger, results, stores
from cpt_core.grids import ARTEFACTS, GRIDS
from cpt_core.paths import ROOT, paper_dir, results_dir, runs_dir
from cpt_core.reproducing import harvest
from cpt_core.schedules import ShortCycleWarning
from cpt_core.stores import Row, load_rows

PACKAGES = ("cpt-core", "torch", "torchvision", "numpy", "papermill", "jupyterlab")

UNITS = {"%": 100.0, "1e13 BitOps": 1e-13}  # of the paper's numbers

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
        *(_experiment(part) for part in experiments.experiments(rows)),
        *_aggregations(rows),
        *_critical_periods(rows),
        *_equal_costs(rows),
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
        *map(_experiment, experiments.experiments(rows)),
        *_aggregations(rows),
        *_critical_periods(rows),
        *_equal_costs(rows),
    ]
    parts = [
        "<h1>Cyclic precision training: figures and tables from stored runs</h1>",
        "<p class='note'>Made from result rows alone. Training at low precision is simulated; bit operations (BitOps) "
        "count work, they are not seconds. +- is the standard deviation over seeds (n - 1).</p>",
        "<h2>What has been run</h2>",
        _overview(rows),
        "<h2>Figure 2: the ten schedules</h2>",
        _image(figures.figure_2(), "precision over training steps for the ten schedules"),
        *_claims(of),
        *(shown or ["<h2>Results</h2><p>No rows are stored yet; <code>make plan</code> lists the grids.</p>"]),
        *_predictors(rows),
        "<h2>Numbers printed in the paper</h2>",
        _paper_numbers(rows),
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


def _critical_periods(rows: list[Row]) -> list[str]:
    """Figure 8 and table 1 of every critical-period experiment."""
    parts = []
    for group in experiments.deficit_experiments(rows):
        if all(row["status"] == "failed" for row in group):
            continue
        measure = results.measure_of(results.metric_of(group))
        found = experiments.table_1(group)
        number = f"{{:.{measure.digits}f}}".format
        interval = [
            _interval(r, 1.0, measure.digits) if r.difference == r.difference else "" for r in found.itertuples()
        ]
        shown = pd.DataFrame(
            {
                "low precision": found.arm,
                "experiment": found.experiment,
                f"{results.metric_of(group)} {measure.unit}".rstrip(): found["mean"].map(number),
                "std": found["std"].map(number).replace("nan", "–"),
                "n": found.n,
                "minus control of equal length [95 %]": interval,
                "worse": [f"{r.worse} of {r.n}" if r.place != "none" else "" for r in found.itertuples()],
                "diverged": found.diverged,
                "paper": [f"{p:g}" if p == p else "–" for p in found.paper],
            }
        )
        name = _name(group).split(", q_min")[0].rsplit(",", 1)[0]
        parts += [
            f"<h2>Critical learning periods: {html.escape(name)}</h2>",
            _image(figures.figure_8(group), "quality after a deficit, with controls"),
            shown.to_html(index=False, border=0),
        ]
    return parts


def _interval(line: Any, factor: float, digits: int) -> str:
    """Such as "-0.6 [-0.8, -0.3]": the difference of a line, with its interval."""
    return "{0:+.{3}f} [{1:+.{3}f}, {2:+.{3}f}]".format(
        factor * line.difference, factor * line.low, factor * line.high, digits
    )


def _equal_costs(rows: list[Row]) -> list[str]:
    """What the same BitOps buy, for every recipe where that was tried."""
    parts = []
    for group in experiments.equal_cost_experiments(rows):
        try:
            found = experiments.equal_cost(group)
        except ValueError:  # RR itself is missing or failed
            continue
        if (found.arm == found.base).all():
            continue
        measure = results.measure_of(results.metric_of(group))
        number = f"{{:.{measure.digits}f}}".format
        interval = [_interval(r, measure.factor, measure.digits) if r.arm != r.base else "" for r in found.itertuples()]
        shown = pd.DataFrame(
            {
                "arm": found.arm,
                "BitOps / those of RR": found.spent.map("{:.3f}".format),
                f"{results.metric_of(group)} {measure.unit}".rstrip(): (measure.factor * found["mean"]).map(number),
                "std": (measure.factor * found["std"]).map(number).replace("nan", "–"),
                "n": found.n,
                "better than RR by [95 %]": interval,
                "better": [f"{r.better} of {r.n}" if r.arm != r.base else "" for r in found.itertuples()],
            }
        )
        parts += [
            f"<h2>Equal cost: {html.escape(_name(group))}</h2>",
            _image(figures.equal_cost_figure(group), "differences to RR at the same cost"),
            shown.to_html(index=False, border=0),
        ]
    return parts


def _predictors(rows: list[Row]) -> list[str]:
    """What predicts the quality of a schedule, over all experiments that are large enough."""
    found = experiments.predictors_by_title(rows)
    if not found:
        return []
    words = {"better": " (better than cost)", "worse": " (worse than cost)", "undecided": " (undecided)"}
    lines = [
        f"<li>{html.escape(name)}: "
        + "; ".join(
            f"{r.predictor.replace('_', ' ')} {r.strength:.2f} [{r.low:.2f}, {r.high:.2f}]"
            + ("" if r.predictor == "relative_cost" else words[r.verdict])
            for r in frame.itertuples()
        )
        + "</li>"
        for name, frame in found.items()
    ]
    return [
        "<h2>What predicts the quality of a schedule?</h2>",
        _image(figures.predictors_figure(found), "rank correlations of three predictors with quality"),
        f"<ul>{''.join(lines)}</ul>",
    ]


def _claims(of: dict[Path, list[Row]]) -> list[str]:
    """The ledger of the paper's claims."""
    entries = ledger.ledger({path.name: rows for path, rows in of.items()})
    lines = []
    for entry in entries:
        evidence = "".join(f"<li>{html.escape(line)}</li>" for line in entry.evidence())
        details = f"<details><summary>{len(entry.effects)} effects</summary><ul>{evidence}</ul></details>"
        lines.append(
            (html.escape(entry.claim.claim), entry.claim.place, *entry.verdicts(), details if evidence else "")
        )
    columns = ["claim", "paper", "at paper scale", "at smaller scales", "evidence"]
    frame = pd.DataFrame(lines, columns=columns)
    return [
        "<h2>Claims of the paper</h2>",
        "<p class='note'>Confirmed, contradicted or open by written rules (docstring of cpt_core/ledger.py), from the "
        "rows of this page. What small runs contradict may hold at the paper's scale.</p>",
        frame.to_html(index=False, border=0, classes="left claims", escape=False),
    ]


def _paper_numbers(rows: list[Row]) -> str:
    """The paper's numbers with their places, and ours where the same thing was measured at paper scale."""
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    rows = [r for r in rows if r["spec"]["scale"] == "paper"]
    runs = results.table(results.tuned(rows))
    deficits = [r for part in experiments.deficit_experiments(rows) for r in experiments.deficits(part).itertuples()]
    lines = []
    for p in paper.itertuples():
        same = (runs.dataset == p.dataset) & (runs.model == p.model) & (runs.q_max == p.q_max)
        if p.artefact == "table_1":
            arms = {(r.arm, r.recipe) for r in deficits if r.paper_arm == p.arm}
            same &= np.array([pair in arms for pair in zip(runs.arm, runs.recipe, strict=True)], dtype=bool)
        else:
            same &= runs.arm == p.arm
        values = runs.loc[same, p.metric].dropna() * UNITS[p.unit] if p.metric in runs else pd.Series(dtype=float)
        ours = f"{values.mean():.2f} +- {values.std():.2f} ({len(values)})" if len(values) else "not run"
        name = f"{p.artefact.replace('_', ' ')}: {p.dataset}, {p.model}"
        lines.append((name, p.arm, p.metric, f"{p.value:g} {p.unit}", ours, p.place))
    columns = ["what", "arm", "metric", "paper", "ours +- std (n)", "where it stands"]
    return pd.DataFrame(lines, columns=columns).to_html(index=False, border=0, classes="left")


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
    for part in experiments.experiments(rows):
        part = results.tuned(part)
        runs, arms = results.table(part), results.by_arm(part)
        counts = ", ".join(f"{n} {status}" for status, n in runs.status.value_counts().items())
        lines.append(f"{_name(part)}: {counts}")
        metric = results.metric_of(part)
        measure = results.measure_of(metric)
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


def _aggregations(rows: list[Row]) -> list[str]:
    """Figure 5 for every recipe that was run with both aggregations at static q_max."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        spec = row["spec"]
        recipe = {k: v for k, v in spec["recipe"].items() if k != "aggregation"}
        if row["status"] == "ok" and spec["arm"] == f"static {spec['q_max']}" and "aggregation" in spec["recipe"]:
            groups.setdefault(f"{recipe} {spec['q_max']} {spec['scale']}", []).append(row)
    parts = []
    for group in groups.values():
        if len({row["spec"]["recipe"]["aggregation"] for row in group}) == 2:
            d = 100 * results.aggregation_difference(group)["difference"]
            name = _name(group).replace(" (FP-Agg)", "").replace(" (Q-Agg)", "")
            figure = figures.figure_5(group, group[0]["spec"]["q_max"])
            parts.append(
                f"<h2>Figure 5: {html.escape(name)}</h2>{_image(figure, 'validation accuracy with FP-Agg and Q-Agg')}"
                f"<p>Q-Agg minus FP-Agg, test accuracy at the end: {d.mean():+.2f} +- {d.std():.2f} points "
                f"({len(d)} seeds).</p>"
            )
    return parts


def _experiment(rows: list[Row]) -> str:
    rows = results.tuned(rows)
    arms, metric = results.by_arm(rows), results.metric_of(rows)
    measure = results.measure_of(metric)
    artefact = ARTEFACTS[rows[0]["spec"]["recipe"]["task"]]
    parts = [f"<h2>{html.escape(_name(rows))}</h2>"]
    if len(arms) > 1:
        drawn = figures.figure_3(rows, xs=("relative_cost", "noise_exposure"), front=True)
        parts.append(_image(drawn, f"{metric} against cost"))
    if (arms["mean"].notna() & (arms.savings != "static")).sum() >= 3:  # arms whose runs all failed have no mean
        for x, name in (("relative_cost", "cost"), ("noise_exposure", "noise exposure")):
            c = results.correlation(rows, x)
            spread = f"[{c['low']:.2f}, {c['high']:.2f}] (95 % bootstrap over {c['seeds']} seeds)"
            shown = spread if c["seeds"] > 1 else "(one seed)"
            what = f"{name} and quality ({metric}) over {c['arms']} arms"
            parts.append(f"<p>Rank correlation of {what}: {c['rho']:.2f} {shown}.</p>")
    lines = pd.DataFrame(
        {
            "arm": arms.arm,
            "savings": arms.savings,
            "relative cost": arms.relative_cost.map("{:.3f}".format),
            "noise exposure": arms.noise_exposure.map("{:.0f}".format),
            f"{metric} {measure.unit}".rstrip(): (measure.factor * arms["mean"]).map(f"{{:.{measure.digits}f}}".format),
            "std": (measure.factor * arms["std"]).map(f"{{:.{measure.digits}f}}".format).replace("nan", "–"),
            "n": arms.n,
            "paper": [_paper_value(p) for p in results.compare_with_paper(rows, artefact).itertuples()],
            "Pareto front": results.pareto(arms, measure.better).map({True: "yes", False: ""}),
            "diverged": arms.diverged,
            "failed": arms.failed,
        }
    )
    return "\n".join([*parts, lines.to_html(index=False, border=0)])


def _name(rows: list[Row]) -> str:
    recipe = rows[0]["spec"]["recipe"]
    title = next((r["title"] for r in rows if r.get("title")), f"{recipe['model']} on {recipe['dataset']}")
    spec = rows[0]["spec"]
    bits = f"q_min {recipe['q_min']}, q_max {spec['q_max']}"
    return f"{title}, {recipe['steps']:,} steps, {bits}, {spec['scale']} scale"


def _paper_value(line: Any) -> str:
    return line.place if line.paper != line.paper else f"{line.paper:g} ({line.place})"


def _image(figure: Figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return f"<img alt='{alt}' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _provenance(outcomes: list[dict[str, Any]]) -> str:
    return f"<p>Notebook time {sum(o['seconds'] for o in outcomes):.0f} s in all.</p>{_versions()}"


def _versions() -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    commit = stores.commit()
    where = f"{commit['commit'][:12]}{' with local changes' if commit['dirty'] else ''}" if commit["commit"] else "none"
    written = datetime.now(UTC).isoformat(timespec="minutes")
    return f"<p class='note'>Written {written} with {versions}; commit {where}.</p>"
