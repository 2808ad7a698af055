"""Measures of claims that are computed without runs: costs of schedules and of a model's training."""

from collections.abc import Iterator, Mapping
from functools import cache

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis.effects import MIN_SEEDS, Claim, Effect, Interval
from cpt_lab.experiments.registry import DATASETS, recipe


def _exact(scale_name: str, is_correct: bool, comparison: str) -> Iterator[Effect]:
    """Yield a computed effect: 1 if the claim is correct, else -1."""
    value = 1.0 if is_correct else -1.0

    def interval_at(alpha: float) -> Interval:
        return value, value, value

    yield Effect(scale_name, "exact", interval_at, MIN_SEEDS, comparison)


def ptb_costs(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Compare the counted BitOps of section 4.4 with the paper's numbers."""
    totals = _ptb_bitops()
    is_correct = (
        totals["STATIC"] > 9
        and abs(totals["CR"] - 7) < 0.1
        and abs(totals["RR"] - 5.5) < 0.1
    )
    yield from _exact(
        "counted",
        is_correct,
        "static 8, CR, RR: " + ", ".join(f"{t:.2f}" for t in totals.values()),
    )


@cache
def _ptb_bitops() -> dict[str, float]:
    """Count the BitOps of section 4.4 from the model, in 10^13 by the paper's convention; seconds of computing."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.models.lstm_lm import LanguageModel
    from cpt_core.quantization.convert import quantize_

    with torch.device("meta"):
        model = quantize_(LanguageModel(10_000, 800, 800))
        inputs = (torch.empty(35, 20, dtype=torch.int64), None)
    totals = {}
    for arm in ("STATIC", "CR", "RR"):
        schedule = make_schedule(
            arm,
            q_min=8 if arm == "STATIC" else 5,
            q_max=8,
            total_steps=40 * 1327,
            n_cycles=2,
        )
        totals[arm] = (
            count_bitops(model, inputs, schedule, convention="paper").total / 1e13
        )
    return totals


def cost_groups(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Check that every schedule of a savings group costs less than every schedule of the next group.

    The bits and lengths are those of the paper.
    """
    settings = [
        (recipe("paper", dataset), q_max)
        for dataset in ("cifar10", "imagenet", "ptb")
        for q_max in (6, 8)
    ]
    is_correct = all(
        _in_order(r.q_min, q_max, r.steps, r.n_cycles) for r, q_max in settings
    )
    yield from _exact(
        "computed", is_correct, "all ten schedules at 3, 4, 5 to 6 and 8 bits"
    )


def more_than_halved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Check that schedules of large savings from 3 to 8 bits cost less than half."""
    costs = [
        make_schedule(name, q_min=3, q_max=8, total_steps=64_000).relative_cost()
        for name, entry in SUITE.items()
        if entry.savings == "large"
    ]
    yield from _exact(
        "computed",
        max(costs) < 0.5,
        f"RR and RTH, 3 to 8 bits: {max(costs):.3f} of static 8 bits",
    )


def cost_order(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Check that the savings groups have the same order of cost for any number of cycles."""
    counts = (2, 4, 8, 16)
    is_correct = all(_in_order(3, 8, 64_000, n) for n in counts)
    yield from _exact(
        "computed",
        is_correct,
        f"groups of savings, 3 to 8 bits, {', '.join(map(str, counts))} cycles",
    )


def _in_order(q_min: int, q_max: int, steps: int, n_cycles: int) -> bool:
    """Return whether large savings cost less than medium savings, and these less than small savings."""
    costs_by_group: dict[str, list[float]] = {}
    for name, entry in SUITE.items():
        schedule = make_schedule(
            name, q_min=q_min, q_max=q_max, total_steps=steps, n_cycles=n_cycles
        )
        costs = costs_by_group.setdefault(entry.savings, [])
        costs.append(schedule.relative_cost())
    large, medium, small = (
        costs_by_group[group] for group in ("large", "medium", "small")
    )
    return max(large) < min(medium) and max(medium) < min(small)


def saved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Check that schedule or group ``a`` saves ``b`` percent, within the margin, at the setting of the claim's grid."""
    dataset, model = claim.grids.split("/")
    paper_recipe = recipe("paper", dataset, model)
    schedules = [
        make_schedule(
            name,
            q_min=paper_recipe.q_min,
            q_max=8,
            total_steps=paper_recipe.steps,
            n_cycles=paper_recipe.n_cycles,
        )
        for name, entry in SUITE.items()
        if claim.a in (name, entry.savings)
    ]
    savings = [100 - 100 * schedule.relative_cost() for schedule in schedules]
    is_correct = all(
        abs(percent - float(claim.b)) <= claim.margin for percent in savings
    )
    yield from _exact(
        "computed",
        is_correct,
        f"{claim.a}: {min(savings):.1f} to {max(savings):.1f} %, q_max 8",
    )


def aggregation_share(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Check that sums over neighbours are at most ``a`` percent of a forward pass (static 8 bits, FP-Agg).

    The paper does not say of what they are a portion: one effect is of the operations, one of their BitOps.
    Counted on OGBN-Arxiv's GCN with a hundredth of its nodes and edges: the shares depend on the edges per node alone.
    """
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.graphs.graph import Graph
    from cpt_core.models.gnn import GraphNet
    from cpt_core.quantization.convert import quantize_

    sizes = DATASETS["ogbn-arxiv"].sizes
    nodes = sizes["nodes"] // 100
    # Every edge sends a message both ways, and every node one to itself.
    messages = (2 * sizes["edges"] + sizes["nodes"]) // 100
    targets = torch.arange(messages) % nodes
    graph = Graph.from_edges(
        (targets + torch.arange(messages) // nodes) % nodes, targets, nodes
    )
    model = quantize_(GraphNet("gcn", sizes["features"], sizes["classes"]))
    plan = count_bitops(
        model, (graph, torch.empty(nodes, sizes["features"])), StaticSchedule(8, 1)
    )

    def share(counts: Mapping[str, int]) -> float:
        return (
            100
            * sum(n for name, n in counts.items() if name.endswith("(aggregation)"))
            / sum(counts.values())
        )

    bitops = {name: passes["forward"] for name, passes in plan.bitops.items()}
    for counts, unit in ((plan.macs, "operations"), (bitops, "BitOps")):
        percent = share(counts)
        comparison = (
            f"OGBN-Arxiv, GCN, static 8 bits, FP-Agg: {percent:.1f} % of the {unit}"
        )
        yield from _exact("counted", percent <= float(claim.a), comparison)
