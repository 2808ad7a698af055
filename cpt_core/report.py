"""The report of a reproduction: one folder of HTML pages that open offline."""

from __future__ import annotations

import base64
import html
import io
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from matplotlib.figure import Figure
from nbconvert import HTMLExporter

from cpt_core import figures, results
from cpt_core.paths import runs_dir

PACKAGES = ("cpt-core", "torch", "torchvision", "numpy", "papermill", "jupyterlab")

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
table {{ border-collapse: collapse; font-size: .9rem; }} th, td {{ padding: .25rem .7rem; text-align: right; }}
th {{ border-bottom: 2px solid #888; }} td {{ border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }} img {{ max-width: 100%; }}
.failed {{ color: #b00020; font-weight: bold; }} .note {{ color: #555; font-size: .9rem; }}
</style></head><body>{body}</body></html>"""


def write(folder: Path, scale: str, outcomes: list[dict[str, Any]]) -> Path:
    """Write ``index.html`` into ``folder``: notebooks, figures and tables from the rows of this scale, versions."""
    rows = [] if scale == "smoke" else results.load_rows(runs_dir() / scale / "image.jsonl")
    parts = [
        f"<h1>Cyclic precision training, reproduced at {scale} scale</h1>",
        "<p class='note'>A simulation: bit operations (BitOps) count work at low precision, they are not seconds.</p>",
        "<h2>Notebooks</h2>",
        _notebooks(outcomes),
        *(_experiment(part) for part in _experiments(rows)),
        "<h2>Where this comes from</h2>",
        _provenance(outcomes),
    ]
    if scale == "smoke":
        parts.insert(2, "<p class='note'>Smoke runs show that everything runs; they are not a result.</p>")
    index = folder / "index.html"
    index.write_text(PAGE.format(title=f"Cyclic precision training, {scale}", body="\n".join(parts)))
    return index


def summary(scale: str) -> list[str]:
    """Return what the stored rows of a scale say, in a few lines."""
    rows = [] if scale == "smoke" else results.load_rows(runs_dir() / scale / "image.jsonl")
    lines = []
    for part in _experiments(rows):
        runs, arms = results.table(part), results.by_arm(part)
        counts = ", ".join(f"{n} {status}" for status, n in runs.status.value_counts().items())
        lines.append(f"{_name(part)}: {counts}")
        groups = [(g, 100 * runs[runs.savings == g].accuracy.mean()) for g in ("large", "medium", "small")]
        top = arms[arms.arm == f"static {arms.q_max.max()}"]
        said = [f"{g} savings {mean:.1f}" for g, mean in groups if mean == mean]
        said += [f"{r.arm} bits {100 * r.mean:.1f} +- {100 * r.std:.1f}" for r in top.itertuples()]
        lines.append(f"  accuracy %: {', '.join(said)}")
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


def _experiments(rows: list[results.Row]) -> list[list[results.Row]]:
    """Split rows into experiments: one recipe, one preset."""
    groups: dict[tuple[str, str], list[results.Row]] = {}
    for row, run in zip(rows, results.table(rows).itertuples(), strict=True):
        groups.setdefault((run.recipe, run.preset), []).append(row)
    return list(groups.values())


def _experiment(rows: list[results.Row]) -> str:
    arms = results.by_arm(rows)
    parts = [
        f"<h2>{html.escape(_name(rows))}</h2>",
        _image(figures.figure_3(rows, xs=("relative_cost", "noise_exposure"))),
    ]
    if len(arms[arms.savings != "static"]) >= 3:
        for x, name in (("relative_cost", "cost"), ("noise_exposure", "noise exposure")):
            c = results.correlation(rows, x)
            spread = f"[{c['low']:.2f}, {c['high']:.2f}] (95 % bootstrap over {c['seeds']} seeds)"
            shown = spread if c["seeds"] > 1 else "(one seed)"
            parts.append(
                f"<p>Rank correlation of {name} and accuracy over {c['arms']} arms: {c['rho']:.2f} {shown}.</p>"
            )
    lines = pd.DataFrame(
        {
            "arm": arms.arm,
            "savings": arms.savings,
            "relative cost": arms.relative_cost.map("{:.3f}".format),
            "noise exposure": arms.noise_exposure.map("{:.0f}".format),
            "accuracy %": (100 * arms["mean"]).map("{:.1f}".format),
            "std": (100 * arms["std"]).map("{:.1f}".format),
            "runs": arms.n,
            "diverged": arms.diverged,
            "failed": arms.failed,
        }
    )
    return "\n".join([*parts, lines.to_html(index=False, border=0)])


def _name(rows: list[results.Row]) -> str:
    recipe = rows[0]["spec"]["recipe"]
    title = next((r["title"] for r in rows if r.get("title")), f"{recipe['model']} on {recipe['dataset']}")
    return f"{title}, q_min {recipe['q_min']}"


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return (
        f"<img alt='accuracy against cost' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
    )


def _provenance(outcomes: list[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    commit = results.commit()
    where = (
        f"commit {commit['commit'][:12]}{' with local changes' if commit['dirty'] else ''}" if commit["commit"] else ""
    )
    total = sum(o["seconds"] for o in outcomes)
    written = datetime.now(UTC).isoformat(timespec="minutes")
    return f"<p>{versions}; {where}. Notebook time {total:.0f} s in all. Written {written}.</p>"
