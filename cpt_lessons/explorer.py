"""The schedule explorer: one HTML page that shows any schedule, its cost, and the committed results of that cost.

The page needs no server and no network. Its mathematics, ``schedules.js``, is that of ``cpt_core.schedules``, with the
constants taken from there; ``explorer.js`` is the page's own code.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_core.checks import MOST_BITS, write_text
from cpt_core.choosing.solver import POWERS, TOLERANCE
from cpt_core.schedules.make import DELAYS_AT
from cpt_core.schedules.profiles import PROFILES, SUITE, Exponential, Rex, Warped
from cpt_core.schedules.schedule import FLOAT32, MIRRORS
from cpt_lab.analysis.groups import named, preregistered
from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.analysis.pages import render
from cpt_lab.analysis.quality_cost import by_arm
from cpt_lab.analysis.runs import committed
from cpt_lab.analysis.statistics import interval

MAX_STEPS = 1_000_000  # that a page draws at once; Python knows no limit
LEAST = 3  # seeds of an interval
MATHEMATICS = Path(__file__).with_name("schedules.js")
PAGE = Path(__file__).with_name("explorer.js")


def constants() -> dict[str, Any]:
    """Return what ``schedules.js`` takes from cpt_core: the suite, the profiles and their constants, limits."""
    return {
        "suite": {name: asdict(entry) for name, entry in SUITE.items()},
        "profiles": [name for name, kind in PROFILES.items() if kind is not Warped],
        "rate": Exponential().rate,
        "d": Rex().d,
        "maxBits": MOST_BITS,
        "float32": FLOAT32,
        "tolerance": TOLERANCE,
        "powers": list(POWERS),
        "maxSteps": MAX_STEPS,
        "mirrors": list(MIRRORS),
        "delaysAt": list(DELAYS_AT),
    }


def experiments(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return, of every experiment of several arms, quality and cost of each arm: what the page shows of results.

    Arms of one recipe, so of one length of training, stand together; critical periods and the preregistered questions
    are left out: nothing is pooled with those. Means and 95 % intervals (Student's t) are over the n seeds of an arm,
    in the units in which the metric is shown; fewer than three seeds have no interval that would say anything. A run
    that diverged counts with the worst value of its task.
    """
    kept = runs[(runs["kind"] != "deficit") & ~runs["key"].isin(preregistered())]
    parts = [part for _, part in kept.groupby(["recipe", "preset", "q_max", "scale"], sort=False)]
    found = []
    for name, part in named(part for part in parts if part["arm"].nunique() > 1):
        metric = metric_named(metric_of(part))
        arms = by_arm(part).sort_values(["relative_cost", "arm"])
        values = dict(iter(part.groupby("arm")[metric.name]))
        found.append(
            {
                "name": name,
                "metric": f"{metric.name} {metric.unit}".rstrip() + (", less is better" if metric.better < 0 else ""),
                "digits": metric.digits,
                "q_max": int(part["q_max"].iloc[0]),
                "arms": [_arm(line, values[line.arm], metric.factor) for line in arms.itertuples()],
            }
        )
    return sorted(found, key=lambda e: -len(e["arms"]))


def _arm(line: Any, values: pd.Series, factor: float) -> dict[str, Any]:
    mean, low, high = (round(factor * x, 4) if math.isfinite(x) else None for x in interval(values.dropna()))
    if line.n < LEAST:
        low = high = None
    return {
        "arm": line.arm,
        "relative_cost": line.relative_cost,
        "mean": mean,
        "low": low,
        "high": high,
        "n": int(line.n),
        "diverged": int(line.diverged),
    }


def write_explorer(out: Path, home: str = "") -> Path:
    """Write the page, complete in itself but for a link to ``home``, with the committed results; return its path."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent}")
    code = {name: path.read_text(encoding="utf-8") for name, path in (("mathematics", MATHEMATICS), ("page", PAGE))}
    write_text(
        out, render("explorer.html.j2", constants=constants(), experiments=experiments(committed()), home=home, **code)
    )
    return out
