"""Measures that are computed: costs of schedules, and of a model's training; no run takes part."""

from collections.abc import Iterator, Mapping

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis.effects import LEAST_SEEDS, Claim, Effect
from cpt_lab.experiments.registry import DATASETS, recipe


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
    right = (
        totals["STATIC"] > 9
        and abs(totals["CR"] - 7) < 0.1
        and abs(totals["RR"] - 5.5) < 0.1
    )
    yield from _exact(
        "counted",
        right,
        "static 8, CR, RR: " + ", ".join(f"{t:.2f}" for t in totals.values()),
    )


def cost_groups(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Every schedule of a group costs less than every schedule of the next, at the bits and lengths of the paper."""
    settings = [
        (recipe("paper", dataset), q_max)
        for dataset in ("cifar10", "imagenet", "ptb")
        for q_max in (6, 8)
    ]
    right = all(_in_order(r.q_min, q_max, r.steps, r.n_cycles) for r, q_max in settings)
    yield from _exact("computed", right, "all ten schedules at 3, 4, 5 to 6 and 8 bits")


def more_than_halved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Schedules of large savings from 3 to 8 bits cost less than half."""
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
    """The groups of savings cost in the same order whatever the number of cycles."""
    counts = (2, 4, 8, 16)
    right = all(_in_order(3, 8, 64_000, n) for n in counts)
    yield from _exact(
        "computed",
        right,
        f"groups of savings, 3 to 8 bits, {', '.join(map(str, counts))} cycles",
    )


def _in_order(q_min: int, q_max: int, steps: int, n_cycles: int) -> bool:
    """Whether schedules of large savings cost less than those of medium ones, and these less than those of small."""
    of: dict[str, list[float]] = {}
    for name, entry in SUITE.items():
        schedule = make_schedule(
            name, q_min=q_min, q_max=q_max, total_steps=steps, n_cycles=n_cycles
        )
        of.setdefault(entry.savings, []).append(schedule.relative_cost())
    return max(of["large"]) < min(of["medium"]) and max(of["medium"]) < min(of["small"])


def saved(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """Schedule or group ``a`` saves ``b`` percent, give or take the margin, at the setting of the claim's grid."""
    dataset, model = claim.grids.split("/")
    r = recipe("paper", dataset, model)
    schedules = [
        make_schedule(
            name, q_min=r.q_min, q_max=8, total_steps=r.steps, n_cycles=r.n_cycles
        )
        for name, entry in SUITE.items()
        if claim.a in (name, entry.savings)
    ]
    found = [100 - 100 * schedule.relative_cost() for schedule in schedules]
    right = all(abs(percent - float(claim.b)) <= claim.margin for percent in found)
    yield from _exact(
        "computed", right, f"{claim.a}: {min(found):.1f} to {max(found):.1f} %, q_max 8"
    )


def aggregation_share(runs: pd.DataFrame, claim: Claim) -> Iterator[Effect]:
    """The sums over neighbours are at most ``a`` percent of a forward pass: of its BitOps at static 8 bits, FP-Agg.

    Counted on OGBN-Arxiv's GCN, with a hundredth of its nodes and edges: shares depend on edges a node alone.
    """
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.graphs.graph import Graph
    from cpt_core.models.gnn import GraphNet
    from cpt_core.quantization.convert import quantize_

    sizes = DATASETS["ogbn-arxiv"].sizes
    nodes, messages = (
        sizes["nodes"] // 100,
        (2 * sizes["edges"] + sizes["nodes"]) // 100,
    )  # both ways, self-loops
    to = torch.arange(messages) % nodes
    graph = Graph.from_edges((to + torch.arange(messages) // nodes) % nodes, to, nodes)
    model = quantize_(GraphNet("gcn", sizes["features"], sizes["classes"]))
    plan = count_bitops(
        model, (graph, torch.empty(nodes, sizes["features"])), StaticSchedule(8, 1)
    )

    def share(of: Mapping[str, int]) -> float:
        return (
            100
            * sum(n for name, n in of.items() if name.endswith("(aggregation)"))
            / sum(of.values())
        )

    bitops = share({name: passes["forward"] for name, passes in plan.bitops.items()})
    what = (
        f"OGBN-Arxiv, GCN, static 8 bits, FP-Agg: {share(plan.macs):.1f} % of the operations, "
        f"{bitops:.1f} % of BitOps"
    )
    yield from _exact("counted", bitops <= float(claim.a), what)
