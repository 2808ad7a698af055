"""Measures that are computed: costs of schedules, and of a model's training; no run takes part."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis.effects import LEAST_SEEDS, Claim, Effect
from cpt_lab.experiments.recipes import recipe


def _exact(name: str, right: bool, what: str) -> Iterator[Effect]:
    value = 1.0 if right else -1.0
    yield Effect(name, "exact", lambda alpha: (value, value, value), LEAST_SEEDS, what)


def ptb_costs(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """BitOps of section 4.4, counted from the model as the paper counts them."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.models.lstm_lm import LanguageModel
    from cpt_core.quantization.convert import quantize_

    with torch.device("meta"):
        model = quantize_(LanguageModel(10_000, 800, 800))
        inputs = (torch.empty(35, 20, dtype=torch.int64), None)
    totals = {}
    for arm in ("STATIC", "CR", "RR"):
        schedule = make_schedule(arm, q_min=8 if arm == "STATIC" else 5, q_max=8, total_steps=40 * 1327, n_cycles=2)
        totals[arm] = count_bitops(model, inputs, schedule, convention="paper").total / 1e13
    right = totals["STATIC"] > 9 and abs(totals["CR"] - 7) < 0.1 and abs(totals["RR"] - 5.5) < 0.1
    yield from _exact("counted", right, "static 8, CR, RR: " + ", ".join(f"{t:.2f}" for t in totals.values()))


def cost_groups(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Every schedule of a group costs less than every schedule of the next, at the bits and lengths of the paper."""
    settings = {("cifar10", 6), ("cifar10", 8), ("imagenet", 6), ("imagenet", 8), ("ptb", 6), ("ptb", 8)}
    right = True
    for dataset, q_max in settings:
        r = recipe("paper", dataset)
        of: dict[str, list[float]] = {}
        for name, entry in SUITE.items():
            schedule = make_schedule(name, q_min=r.q_min, q_max=q_max, total_steps=r.steps, n_cycles=r.n_cycles)
            of.setdefault(entry.savings, []).append(schedule.relative_cost())
        right &= max(of["large"]) < min(of["medium"]) and max(of["medium"]) < min(of["small"])
    yield from _exact("computed", right, "all ten schedules at 3, 4, 5 to 6 and 8 bits")


def more_than_halved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Schedules of large savings from 3 to 8 bits cost less than half."""
    costs = [
        make_schedule(name, q_min=3, q_max=8, total_steps=64_000).relative_cost()
        for name, entry in SUITE.items()
        if entry.savings == "large"
    ]
    yield from _exact("computed", max(costs) < 0.5, f"RR and RTH, 3 to 8 bits: {max(costs):.3f} of static 8 bits")


def cost_order(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The groups of savings cost in the same order whatever the number of cycles."""
    counts, right = (2, 4, 8, 16), True
    for n in counts:
        of: dict[str, list[float]] = {}
        for name, entry in SUITE.items():
            schedule = make_schedule(name, q_min=3, q_max=8, total_steps=64_000, n_cycles=n)
            of.setdefault(entry.savings, []).append(schedule.relative_cost())
        right &= max(of["large"]) < min(of["medium"]) and max(of["medium"]) < min(of["small"])
    yield from _exact("computed", right, f"groups of savings, 3 to 8 bits, {', '.join(map(str, counts))} cycles")


def saved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Schedule or group ``a`` saves ``b`` percent, give or take the margin, at the setting of the claim's grid."""
    dataset, model = claim.grids.split("/")
    r = recipe("paper", dataset, model)
    schedules = [
        make_schedule(name, q_min=r.q_min, q_max=8, total_steps=r.steps, n_cycles=r.n_cycles)
        for name, entry in SUITE.items()
        if claim.a in (name, entry.savings)
    ]
    found = [100 - 100 * schedule.relative_cost() for schedule in schedules]
    right = all(abs(percent - float(claim.b)) <= claim.margin for percent in found)
    yield from _exact("computed", right, f"{claim.a}: {min(found):.1f} to {max(found):.1f} %, q_max 8")
