"""Experiments in the rows and what they say: critical periods, equal cost, predictors.  Paper: sections 4.5 and 5.

Everything here takes result rows and returns tables; it needs no torch.

>>> experiments([])
[]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from cpt_core.analysis.runs import recipe_key
from cpt_core.sweeps.stores import Row


def experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Split rows into experiments of quality against cost: one recipe, one preset, one q_max; paper scale first.

    Runs of critical periods (``deficits``) and of ``equal_cost`` are left out.
    """
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        spec = row["spec"]
        if spec["schedule"]["kind"] != "deficit" and not EQUAL_COST_ARM.search(spec["arm"]):
            key = (recipe_key(spec["recipe"]), spec["preset"], spec["q_max"], spec["scale"])
            groups.setdefault(key, []).append(row)
    return sorted(groups.values(), key=lambda rows: rows[0]["spec"]["scale"] != "paper")


def without_length(row: Row) -> str:
    """What the runs of a critical-period or equal-cost experiment share: all but the length of training."""
    spec = row["spec"]
    recipe = {k: v for k, v in spec["recipe"].items() if k not in ("steps", "milestones", "evaluate_every")}
    return json.dumps([recipe, spec["preset"], spec["q_max"], spec["scale"]], sort_keys=True)


EQUAL_COST_ARM = re.compile(r"^RR at |delayed [\d.]+ %$|, \d+ of \d+ steps$")


def experiment_name(rows: list[Row]) -> str:
    """Return what was trained, how long and between which bits, for headings."""
    recipe = rows[0]["spec"]["recipe"]
    title = next((r["title"] for r in rows if r.get("title")), f"{recipe['model']} on {recipe['dataset']}")
    spec = rows[0]["spec"]
    bits = f"q_min {recipe['q_min']}, q_max {spec['q_max']}"
    return f"{title}, {recipe['steps']:,} steps, {bits}, {spec['scale']} scale"
