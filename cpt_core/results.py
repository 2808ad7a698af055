"""Result rows: one JSON line per run, appended and never edited; tables and comparisons read rows only.

A row holds the spec, status, metrics, costs and where it came from. Needs no torch.

>>> table([])
Empty DataFrame
Columns: []
Index: []
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock
from scipy import stats

from cpt_core import cost
from cpt_core.paths import ROOT, paper_dir
from cpt_core.schedules import SUITE
from cpt_core.specs import RunSpec

SCHEMA_VERSION = 1
Row = dict[str, Any]
STATUSES = ("ok", "diverged", "failed")

# --- the store ------------------------------------------------------------------------------------


def append_row(store: Path, row: Row) -> None:
    """Append a row as one line, under a lock; a torn last line of an interrupted writer is cut off first."""
    store.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, sort_keys=True, allow_nan=False) + "\n"
    with FileLock(str(store) + ".lock"), open(store, "a+b") as f:
        end = f.seek(0, os.SEEK_END)
        if end:
            f.seek(end - 1)
            if f.read(1) != b"\n":
                f.seek(0)
                f.truncate(f.read().rfind(b"\n") + 1)
        f.write(line.encode())
        f.flush()
        os.fsync(f.fileno())


def load_rows(store: Path) -> list[Row]:
    """Return the newest row of every key, in the order the keys first appeared; a torn last line is left out.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    if not Path(store).exists():
        return []
    newest: dict[str, Row] = {}
    text = Path(store).read_text()
    lines = text.split("\n")[:-1]  # what follows the last newline is torn, or nothing
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{store}, line {number} is no JSON: {line[:60]!r}") from error
        if row.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"{store}, line {number}: schema {row.get('schema')!r} is not {SCHEMA_VERSION}")
        newest[row["key"]] = row
    return list(newest.values())


def describe(spec: RunSpec) -> Row:
    """Return the part of a row that is known before the run: the spec, its costs and its provenance."""
    bits = spec.schedule.bits()
    return {
        "schema": SCHEMA_VERSION,
        "key": spec.key,
        "spec": spec.to_dict(),
        "relative_cost": cost.relative_cost(bits, spec.q_max, spec.q_grad),
        "noise_exposure": cost.noise_exposure(bits, spec.q_max),
        "share_at_q_min": spec.schedule.share_at(spec.schedule.q_min),
        "provenance": {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: _version(name) for name in ("cpt-core", "torch", "numpy", "torchvision")},
            "python": platform.python_version(),
            **commit(),
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> dict[str, Any]:
    """Return the commit of the project and whether tracked files differ from it; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain", "-uno").strip())}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


# --- tables ---------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line per run: arm, seed, settings, costs, status and the test metrics (NaN when it did not finish)."""
    lines = []
    for row in rows:
        spec = row["spec"]
        line = {
            "arm": spec["arm"],
            "savings": _savings(spec["arm"]),
            "seed": spec["seed"],
            "scale": spec["scale"],
            "dataset": spec["recipe"]["dataset"],
            "model": spec["recipe"]["model"],
            "preset": spec["preset"],
            "recipe": _recipe_key(spec["recipe"]),
            "q_min": spec["recipe"]["q_min"],
            "q_max": spec["q_max"],
            "relative_cost": row["relative_cost"],
            "noise_exposure": row["noise_exposure"],
            "share_at_q_min": row["share_at_q_min"],
            "status": row["status"],
            "seconds": row.get("seconds", float("nan")),
            "title": row.get("title", ""),
            "key": row["key"],
        }
        for m in row.get("metrics", []):
            if m["split"] == "test":
                suffix = {"final": "", "best_valid": "_best_valid", "best_test": "_best_test"}[m["when"]]
                line[f"{m['name']}{suffix}" + ("" if m["precision"] == "q_max" else "_current")] = m["value"]
        lines.append(line)
    return pd.DataFrame(lines)


def _recipe_key(recipe: dict[str, Any]) -> str:
    """Return a short name of a recipe: rows of one experiment share it."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def _savings(arm: str) -> str:
    return SUITE[arm].savings if arm in SUITE else "static"


def by_arm(rows: Iterable[Row], metric: str = "accuracy") -> pd.DataFrame:
    """Return mean, standard deviation (n - 1) and n of a metric per arm, with costs and the number of diverged runs.

    Rows must belong to one experiment: ValueError when they mix data sets, models, scales, presets or recipes.
    """
    runs = table(rows)
    if runs.empty:
        raise ValueError("there are no rows; run the grid first")
    for column in ("dataset", "model", "scale", "preset", "q_min", "recipe"):
        if runs[column].nunique() > 1:
            raise ValueError(f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one")
    if metric not in runs:
        runs[metric] = float("nan")
    groups = runs.groupby(["q_max", "arm"], sort=False)
    out = groups.agg(
        savings=("savings", "first"),
        relative_cost=("relative_cost", "first"),
        noise_exposure=("noise_exposure", "first"),
        share_at_q_min=("share_at_q_min", "first"),
        mean=(metric, "mean"),
        std=(metric, "std"),
        n=(metric, "count"),
    )
    out["diverged"] = groups["status"].agg(lambda s: int((s == "diverged").sum()))
    out["failed"] = groups["status"].agg(lambda s: int((s == "failed").sum()))
    return out.reset_index()


def paired_difference(rows: Iterable[Row], a: str, b: str, metric: str = "accuracy") -> pd.Series:
    """Return metric(a) - metric(b) by seed, for arms or savings groups ("large", "medium", "small")."""
    runs = table(rows)

    def of(name: str) -> pd.Series:
        column = "savings" if name in ("large", "medium", "small") else "arm"
        part = runs[runs[column] == name]
        if part.empty:
            raise ValueError(f"no rows for {name!r}; there are {', '.join(sorted(runs['arm'].unique()))}")
        return part.groupby("seed")[metric].mean()

    return (of(a) - of(b)).dropna()


def correlation(
    rows: Iterable[Row], x: str = "relative_cost", metric: str = "accuracy", resamples: int = 1000
) -> dict[str, float]:
    """Return Spearman's rank correlation over arms between ``x`` and the mean metric, with a bootstrap interval.

    The ten schedules and the static baseline at q_max take part; seeds are resampled (paired over arms), so the
    interval says how far other seeds might have moved the number; it is NaN for one seed. Keys: rho, low, high (95 %),
    arms, seeds.

    Paper: section 4.5 (cost and quality correlate).
    """
    runs = table(rows)
    runs = runs[(runs["savings"] != "static") | (runs["arm"] == "static " + runs["q_max"].astype(str))]
    wide = runs.pivot_table(index="arm", columns="seed", values=metric, aggfunc="first")
    costs = runs.groupby("arm")[x].first().loc[wide.index].to_numpy()
    values = wide.to_numpy()
    if len(values) < 3:
        raise ValueError(f"a rank correlation needs at least three arms, there are {len(values)}")
    rng = np.random.default_rng(0)
    rhos = []
    for _ in range(resamples):
        means = np.nanmean(values[:, rng.integers(values.shape[1], size=values.shape[1])], axis=1)
        rhos.append(stats.spearmanr(costs, means).statistic)
    # one seed has no spread: no interval
    low, high = np.nanpercentile(rhos, [2.5, 97.5]) if values.shape[1] > 1 else (float("nan"), float("nan"))
    rho = stats.spearmanr(costs, np.nanmean(values, axis=1)).statistic
    return {"rho": float(rho), "low": float(low), "high": float(high), "arms": len(values), "seeds": values.shape[1]}


def compare_with_paper(rows: Iterable[Row], artefact: str, metric: str = "accuracy") -> pd.DataFrame:
    """Put our numbers beside those printed in the paper (``data/paper/numbers.csv``), in percent.

    Args:
        rows: of one experiment.
        artefact: such as "figure_3"; numbers of the paper are matched by artefact, data set, model, q_max and arm.
        metric: ours.

    Returns:
        Columns arm, q_max, cost, ours, std, n, paper, difference, place. Where the paper draws a point but prints no
        number, ``paper`` is NaN and ``place`` says so.
    """
    ours = by_arm(rows, metric)
    first = next(iter(table(rows).itertuples()))
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    known = paper[(paper.artefact == artefact) & (paper.dataset == first.dataset) & (paper.model == first.model)]
    out = []
    for r in ours.itertuples():
        hit = known[(known.arm == r.arm) & (known.q_max == r.q_max)]
        value = float(hit.value.iloc[0]) if len(hit) else float("nan")
        out.append(
            {
                "arm": r.arm,
                "q_max": r.q_max,
                "cost": r.relative_cost,
                "ours": 100 * r.mean,
                "std": 100 * r.std,
                "n": r.n,
                "paper": value,
                "difference": 100 * r.mean - value,
                "place": hit.place.iloc[0] if len(hit) else "drawn, no number printed",
            }
        )
    return pd.DataFrame(out)
