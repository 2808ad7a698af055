"""Tables, statistics and comparisons with the paper, from result rows alone. Needs no torch.

>>> load(Path("nowhere.jsonl")).empty
True
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from cpt_core.paths import paper_dir, runs_dir
from cpt_core.schedules import SUITE
from cpt_core.stores import Row, load_rows, newest

# --- measures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """How a metric is read.

    Attributes:
        label: for axes.
        unit: for tables.
        factor: from stored to printed numbers.
        better: +1 when a larger value is better, -1 when a smaller one is.
        digits: behind the point in tables.
    """

    label: str
    unit: str = ""
    factor: float = 1.0
    better: int = 1
    digits: int = 1


MEASURES = {
    "accuracy": Measure("test accuracy (%)", "%", 100.0),
    "map50": Measure("test mAP at IoU 0.5 (%)", "%", 100.0),
    "map": Measure("test mAP, COCO (%)", "%", 100.0),
    "perplexity": Measure("test perplexity (axis turned: up is better)", better=-1),
    "loss": Measure("test loss in nats (axis turned: up is better)", better=-1, digits=3),
}
METRICS = {"detection": "map50", "language_model": "perplexity"}  # of a task; of the others it is accuracy


def metric_of(rows: Iterable[Row]) -> str:
    """Return the main metric of the task that rows belong to."""
    tasks = {row["spec"]["recipe"]["task"] for row in rows}
    found = {METRICS.get(task, "accuracy") for task in tasks} or {"accuracy"}
    if len(found) > 1:
        raise ValueError(f"rows mix tasks: {', '.join(sorted(tasks))}; choose one")
    return found.pop()


def measure_of(metric: str) -> Measure:
    """Return how a metric is read, also one of a further test set such as "accuracy_es"."""
    return MEASURES.get(metric.split("_")[0], Measure(metric))


# --- tables ---------------------------------------------------------------------------------------

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
    metrics = [m for name in MEASURES if name != "loss" for m in (name, f"{name}_best_valid") if m in runs]
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


def tuned(rows: Iterable[Row]) -> list[Row]:
    """Keep the rows at the learning rate that is best for their arm, where a recipe leaves it to be chosen.

    The choice is made per arm by the mean of the main metric over seeds on the validation set; the test set plays no
    part in it. Rows of recipes with one learning rate are all kept.

    Paper: section 4.4 (the learning rate of every schedule is chosen on held-out data).
    """
    rows = list(rows)
    found: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in rows:
        rates = found.setdefault(_tuning_key(row), {})
        values = [
            m["value"]
            for m in row.get("metrics", [])
            if (m["name"], m["split"], m["when"], m["precision"]) == (metric_of([row]), "valid", "final", "q_max")
        ]
        rates.setdefault(row["spec"]["recipe"]["lr"], []).extend(values)
    chosen = {}
    for key, rates in found.items():
        better = measure_of(METRICS.get(key[0], "accuracy")).better
        finished = {lr: better * float(np.mean(values)) for lr, values in rates.items() if values}
        chosen[key] = max(finished, key=lambda lr: finished[lr]) if finished else min(rates)
    return [
        row
        for row in rows
        if len(row["spec"]["recipe"].get("learning_rates", ())) < 2
        or row["spec"]["recipe"]["lr"] == chosen[_tuning_key(row)]
    ]


def _tuning_key(row: Row) -> tuple[str, ...]:
    spec = row["spec"]
    recipe = {k: v for k, v in spec["recipe"].items() if k != "lr"}
    return recipe["task"], json.dumps(recipe, sort_keys=True), spec["arm"], str(spec["q_max"]), spec["preset"]


def by_arm(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Return mean, standard deviation (n - 1) and n of a metric per arm, with costs and the number of diverged runs.

    Args:
        rows: of one experiment; where the learning rate is chosen per arm, those of the chosen one count (``tuned``).
        metric: a column of ``table``; None takes the main one of the task. Here and below values are as stored:
            accuracies are shares.

    Raises:
        ValueError: when there are no rows, or they mix data sets, models, scales, presets or recipes.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
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


def at_q_max(runs: pd.DataFrame, q_max: int | None) -> pd.DataFrame:
    """Runs of one q_max: schedules of the same name at another one are other schedules."""
    return runs[runs["q_max"] == (runs["q_max"].max() if q_max is None else q_max)]


def pareto(arms: pd.DataFrame, better: int = 1) -> pd.Series:
    """Return which arms of ``by_arm`` no other arm beats: none is as cheap and better, or as good and cheaper.

    ``better`` is -1 for a metric of which less is better.
    """
    cost, mean = arms["relative_cost"].to_numpy(), better * arms["mean"].to_numpy()
    beaten = [
        bool(((cost <= c) & (mean >= m) & ((cost < c) | (mean > m))).any()) for c, m in zip(cost, mean, strict=True)
    ]
    return pd.Series(~np.array(beaten, dtype=bool) & ~np.isnan(mean), index=arms.index)


def paired_difference(
    rows: Iterable[Row], a: str, b: str, metric: str | None = None, q_max: int | None = None
) -> pd.Series:
    """Return metric(a) - metric(b) by seed, for arms or savings groups ("large", "medium", "small").

    ``metric`` None takes the main one of the task, ``q_max`` None the largest in the rows.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), q_max)

    return (of_arms(runs, a, metric) - of_arms(runs, b, metric)).dropna()


def of_arms(runs: pd.DataFrame, name: str, value: str) -> pd.Series:
    """Return a column of ``table`` by seed, for an arm or averaged over a savings group ("large", "medium", "small").

    Of a group only the seeds count that all its arms in the table have. ValueError when there is no such arm.
    """
    column = "savings" if name in ("large", "medium", "small") else "arm"
    part = runs[runs[column] == name]
    if part.empty:
        raise ValueError(f"no rows for {name!r}; there are {', '.join(sorted(runs['arm'].unique()))}")
    return (
        part.pivot_table(index="seed", columns="arm", values=value, aggfunc="first", dropna=False).dropna().mean(axis=1)
    )


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return mean, low and high of the 95 % confidence interval (Student's t); the bounds are NaN for one value."""
    x = np.asarray(list(values), dtype=float)
    if len(x) < 2:
        return float(x.mean()) if len(x) else float("nan"), float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


def aggregation_difference(rows: Iterable[Row], metric: str = "accuracy") -> pd.DataFrame:
    """Return metric(Q-Agg) - metric(FP-Agg) for every arm and seed that both have: columns arm, seed, difference.

    Rows must belong to one recipe but for the aggregation.

    Paper: section 4.3 (figure 5).
    """
    runs = table(rows)
    for column in ("dataset", "model", "scale", "q_max"):
        if runs[column].nunique() > 1:
            raise ValueError(f"rows mix {column}s: {', '.join(sorted(map(str, runs[column].unique())))}; choose one")
    wide = runs.pivot_table(index=["arm", "seed"], columns="aggregation", values=metric, aggfunc="first")
    if not {"fp", "quantized"} <= set(wide.columns):
        raise ValueError(f"rows of both aggregations are needed, there are: {', '.join(wide.columns) or 'none'}")
    difference = (wide["quantized"] - wide["fp"]).dropna()
    return difference.rename("difference").reset_index()


def correlation(
    rows: Iterable[Row],
    x: str = "relative_cost",
    metric: str | None = None,
    resamples: int = 1000,
    q_max: int | None = None,
) -> dict[str, float]:
    """Return Spearman's rank correlation over arms between ``x`` and mean quality, with a bootstrap interval.

    Quality is the metric, or minus the metric where less is better, such as perplexity: a positive number always says
    that what has more of ``x`` is better. ``metric`` None takes the main one of the task.

    The ten schedules and the static baseline at q_max take part, with the seeds that all of them have (all seeds, if
    there is no such one); seeds are resampled (paired over arms), so the
    interval says how far other seeds might have moved the number; it is NaN for one seed. Keys: rho, low, high (95 %),
    arms, seeds. ``q_max`` None takes the largest in the rows.

    Paper: section 4.5 (cost and quality correlate).
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), q_max)
    runs = runs[(runs["savings"] != "static") | (runs["arm"] == "static " + runs["q_max"].astype(str))]
    wide = runs.pivot_table(index="arm", columns="seed", values=metric, aggfunc="first")
    common = wide.dropna(axis=1)  # arms are compared on the seeds that all of them have
    wide = common if common.shape[1] else wide
    costs = runs.groupby("arm")[x].first().loc[wide.index].to_numpy()
    values = measure_of(metric).better * wide.to_numpy()
    if len(values) < 3:
        raise ValueError(f"a rank correlation needs at least three arms, there are {len(values)}")
    low = high = float("nan")
    if common.shape[1] > 1:  # one seed has no spread: no interval
        rng = np.random.default_rng(0)
        drawn = [rng.integers(values.shape[1], size=values.shape[1]) for _ in range(resamples)]
        low, high = np.nanpercentile(spearman(costs, values[:, drawn].mean(axis=2).T), [2.5, 97.5])
    rho = stats.spearmanr(costs, np.nanmean(values, axis=1)).statistic
    return {"rho": float(rho), "low": float(low), "high": float(high), "arms": len(values), "seeds": values.shape[1]}


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation along the last axis, NaN where all are alike; ``y`` may have more axes."""
    a, b = stats.rankdata(x, axis=-1), stats.rankdata(y, axis=-1)
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def compare_with_paper(rows: Iterable[Row], artefact: str, metric: str | None = None) -> pd.DataFrame:
    """Put our numbers beside those printed in the paper (``data/paper/numbers.csv``).

    Args:
        rows: of one experiment.
        artefact: such as "figure_3"; numbers of the paper are matched by artefact, data set, model, q_max, arm, metric.
        metric: ours; None takes the main one of the task.

    Returns:
        Columns arm, q_max, cost, ours, std, n, paper, difference, place; accuracies in percent. Where the paper draws a
        point but prints no number, or has no such experiment (all that are not at paper scale), ``paper`` is NaN and
        ``place`` says so.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    factor = measure_of(metric).factor
    ours = by_arm(rows, metric)
    first = next(iter(table(rows).itertuples()))
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    absent = "drawn, no number printed" if first.scale == "paper" else "not in the paper"
    same = (paper.artefact == artefact) & (paper.dataset == first.dataset) & (paper.model == first.model)
    known = paper[same & (paper.metric == metric) & (first.scale == "paper")]
    out = []
    for r in ours.itertuples():
        hit = known[(known.arm == r.arm) & (known.q_max == r.q_max)]
        value = float(hit.value.iloc[0]) if len(hit) else float("nan")
        out.append(
            {
                "arm": r.arm,
                "q_max": r.q_max,
                "cost": r.relative_cost,
                "ours": factor * r.mean,
                "std": factor * r.std,
                "n": r.n,
                "paper": value,
                "difference": factor * r.mean - value,
                "place": hit.place.iloc[0] if len(hit) else absent,
            }
        )
    return pd.DataFrame(out)
