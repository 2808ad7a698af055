"""Tables, statistics and comparisons with the paper, from result rows alone. Needs no torch.

>>> load(Path("nowhere.jsonl")).empty
True
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.analysis.metrics import METRICS
from cpt_core.paths import runs_dir
from cpt_core.schedules.profiles import SUITE
from cpt_core.sweeps.stores import Row, load_rows, newest

TYPES = {
    "arm": "string", "savings": "string", "seed": "Int64", "scale": "string", "task": "string", "dataset": "string",
    "model": "string", "preset": "string", "recipe": "string", "q_min": "Int64", "q_max": "Int64",
    "relative_cost": "float64", "noise_exposure": "float64", "share_at_q_min": "float64", "status": "string",
    "seconds": "float64", "steps": "Int64", "bitops": "float64", "device": "string", "started": "string",
    "commit": "string", "title": "string", "error": "string", "key": "string", "aggregation": "string",
}  # fmt: skip


def load(*stores: Path) -> pd.DataFrame:
    """Return one typed line per run, the row that counts of every key, from the stores given or all under ``runs/``.

    Columns: those of ``TYPES``, then the test metrics as float64 (see ``table``).

    Raises:
        ValueError: for a file that is no store, see ``load_rows``.
    """
    files = stores or tuple(sorted(runs_dir().glob("*/*.jsonl")))
    return table(newest(row for file in files for row in load_rows(Path(file))).values())


def table(rows: Iterable[Row]) -> pd.DataFrame:
    """Return one line per run: arm, seed, settings, costs, status and the test metrics (NaN when it did not finish).

    Metrics at q_max bits are called by their name, such as "accuracy", and "accuracy_best_valid" at the best step on
    held-out data; "_current" marks those at the bits of the step.
    """
    lines = []
    for row in rows:
        spec = row["spec"]
        line = {
            "arm": spec["arm"],
            "savings": _savings(spec["arm"]),
            "seed": spec["seed"],
            "scale": spec["scale"],
            "task": spec["recipe"]["task"],
            "dataset": spec["recipe"]["dataset"],
            "model": spec["recipe"]["model"],
            "preset": spec["preset"],
            "recipe": recipe_key(spec["recipe"]),
            "q_min": spec["recipe"]["q_min"],
            "q_max": spec["q_max"],
            "relative_cost": row["relative_cost"],
            "noise_exposure": row["noise_exposure"],
            "share_at_q_min": _share_at_q_min(row),
            "status": row["status"],
            "seconds": row.get("seconds", float("nan")),
            "steps": row.get("steps"),
            "bitops": row.get("bitops", {}).get("paper", float("nan")),
            "device": row.get("device", ""),
            "started": row["provenance"]["started"],
            "commit": row["provenance"]["commit"],
            "title": row.get("title", ""),
            "error": row.get("error", ""),
            "key": row["key"],
            "aggregation": spec["recipe"].get("aggregation", ""),
        }
        for m in row.get("metrics", []):
            if m["split"] == "test":
                suffix = {"final": "", "best_valid": "_best_valid", "best_test": "_best_test"}[m["when"]]
                line[f"{m['name']}{suffix}" + ("" if m["precision"] == "q_max" else "_current")] = m["value"]
        lines.append(line)
    metrics = list(dict.fromkeys(name for line in lines for name in line if name not in TYPES))
    return pd.DataFrame(lines, columns=[*TYPES, *metrics]).astype({**TYPES, **dict.fromkeys(metrics, "float64")})


def where(runs: pd.DataFrame, conditions: Iterable[str]) -> pd.DataFrame:
    """Keep the lines that meet every condition, such as "arm=CR,RR" or "q_max=8"; ValueError names what there is."""
    for condition in conditions:
        name, _, text = condition.partition("=")
        name = "arm" if name == "schedule" else name
        if name not in TYPES or not text:
            raise ValueError(f"--only takes NAME=VALUE with {', '.join(TYPES)}; got {condition!r}")
        wanted = [value.strip() for value in text.split(",")]
        there = runs[name].astype("string").dropna()
        unknown = [value for value in wanted if value not in set(there)]
        if unknown:
            shown = ", ".join(sorted(set(there))[:20]) or "nothing: there are no rows"
            raise ValueError(f"no row has {name} {unknown[0]!r}; there is {shown}")
        runs = runs[runs[name].astype("string").isin(wanted)]
    return runs


def text(runs: pd.DataFrame) -> str:
    """Return runs as a table for a terminal, with the counts of each status."""
    if runs.empty:
        return "no rows"
    columns = "scale dataset model q_min q_max arm seed status relative_cost".split()
    metrics = [m for name in METRICS if name != "loss" for m in (name, f"{name}_best_valid") if m in runs]
    shown = runs[[*columns, *metrics, "seconds", "key"]].round(
        {"relative_cost": 3, "seconds": 1, **dict.fromkeys(metrics, 4)}
    )
    counts = ", ".join(f"{n} {status}" for status, n in runs["status"].value_counts().items())
    return f"{shown.to_string(index=False)}\n\n{len(runs)} rows: {counts}"


def recipe_key(recipe: dict[str, Any]) -> str:
    """Return a short name of a recipe: rows of one experiment share it, also at several learning rates."""
    if len(recipe.get("learning_rates", ())) > 1:
        recipe = {k: v for k, v in recipe.items() if k != "lr"}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]


def _savings(arm: str) -> str:
    return SUITE[arm].savings if arm in SUITE else "static" if arm.startswith("static ") else "own"


def _share_at_q_min(row: Row) -> float:
    """Share of the steps at the q_min of the experiment: of static precisions, only the lowest has any."""
    schedule = row["spec"]["schedule"]
    if schedule["kind"] == "static":
        return float(schedule["q_max"] == row["spec"]["recipe"]["q_min"])
    return row["share_at_q_min"]
