"""Small worlds to look into: demonstrations that notebooks print."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.analysis.equal_cost import equal_cost
from cpt_core.analysis.groups import quality_cost_groups, title_of
from cpt_core.analysis.quality_cost import summary
from cpt_core.paths import results_dir
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.solver import solve_schedule
from cpt_core.teaching.pictures import Boxes, pictures_with_boxes


def tiny_problem(batch: int = 32, seed: int = 0) -> tuple[Any, list[tuple[Any, Any]], Any, Any]:
    """Return an ordinary training set-up on the digits: model, list of 40 batches, loss function, optimizer."""
    import torch

    model, images, labels, order = _tiny(seed)
    loader = [(images[i], labels[i]) for i in order[: 40 * batch].split(batch)]
    return model, loader, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def held_out(batch: int = 32, seed: int = 0) -> tuple[Any, Any]:
    """Return the digits in no batch of ``tiny_problem(batch, seed)``: images (N, 1, 8, 8) and labels (N,)."""
    import torch

    with torch.random.fork_rng(devices=[]):
        _, images, labels, order = _tiny(seed)
    return images[order[40 * batch :]], labels[order[40 * batch :]]


def _tiny(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a small network, all digits and their labels, and an order of them, which the seed decides."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )
    return model, images, torch.tensor(digits.target), torch.randperm(len(digits.target))


def rounded_tensors(model: Any, layer: Any, batch: tuple[Any, Any], loss: Any) -> dict[str, Any]:
    """Return what a step rounds in a layer, before it is rounded: weights, inputs, gradients of the output."""
    found = {"weights": layer.weight.detach()}
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: found.update(inputs=given[0].detach())),
        layer.register_full_backward_pre_hook(lambda module, given: found.update(gradients=given[0].detach())),
    ]
    inputs, labels = batch
    loss(model(inputs), labels).backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return found


def bitops_table(
    model: Any,
    inputs: tuple[Any, ...],
    arms: Sequence[str],
    *,
    conventions: Sequence[str] = ("paper", "per_op"),
    parts: Mapping[str, str] | None = None,
    q_min: int,
    q_max: int = 8,
    total_steps: int,
    n_cycles: int = 8,
) -> None:
    """Print the operations (MACs) of a forward pass, and the BitOps of whole trainings, one line per schedule.

    Args:
        model: quantised or not; only shapes matter, so it may live on the "meta" device.
        inputs: the arguments of its forward for one optimizer step.
        arms: names of schedules; "STATIC" is static ``q_max``.
        conventions: of counting, see ``count_bitops``.
        parts: beginning of the names of layers -> what to call them together; None puts them together by kind.
        q_min: lowest bits of the schedules; so on as for ``make_schedule``.
    """
    from cpt_core.bitops.plan import count_bitops
    from cpt_core.bitops.trace import trace

    macs: Counter[str] = Counter()
    for call in trace(model, inputs)[0]:
        named = (word for start, word in (parts or {}).items() if call.layer.startswith(start))
        macs[next(named, call.kind)] += call.macs
    shares = ", ".join(f"{name} {count:,} ({100 * count / macs.total():.1f} %)" for name, count in macs.items())
    print(f"operations of a forward pass: {macs.total():,}: {shares}")
    print(f"{'':<8}{'cost':>6}" + "".join(f"{f'BitOps, {c}':>17}" for c in conventions))
    for arm in arms:
        lowest = None if arm == "STATIC" else q_min
        schedule = make_schedule(arm, q_min=lowest, q_max=q_max, total_steps=total_steps, n_cycles=n_cycles)
        totals = (count_bitops(model, inputs, schedule, convention=c).total for c in conventions)
        print(f"{arm:<8}{schedule.relative_cost():>6.3f}" + "".join(f"{t:>17.4e}" for t in totals))


def message_passing_table(edges: Sequence[tuple[int, int]], features: Sequence[float]) -> None:
    """Print equation 1 for undirected edges with self-loops and one feature: neighbours, coefficients, sums."""
    import torch

    from cpt_core.data.graphs import bidirected
    from cpt_core.graphs.layers import GraphConv

    source, destination = np.array(edges).T
    graph = bidirected(source, destination, len(features), self_loops=True)
    layer = GraphConv(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    sums = layer(graph, torch.tensor(features, dtype=torch.float32).unsqueeze(1)).flatten().tolist()
    degrees = graph.in_degrees.tolist()
    for node, (start, stop) in enumerate(itertools.pairwise(graph.indptr.tolist())):
        terms = [f"{features[j]:g} / sqrt({degrees[node]:g} * {degrees[j]:g})" for j in graph.indices[start:stop]]
        print(f"node {node}: {' + '.join(terms)} = {sums[node]:.3f}")


def aggregation_share(nodes: int, edges: int, sizes: Sequence[int], bits: Sequence[int]) -> None:
    """Print what sums over neighbours add to the operations of a GCN: counted plainly, and in BitOps of a step."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.graphs.graph import Graph
    from cpt_core.models.gnn import GraphNet
    from cpt_core.quantization.convert import QuantConfig, quantize_

    indptr = torch.div(torch.arange(nodes + 1) * edges, nodes, rounding_mode="floor")
    graph, x = Graph(indptr, torch.zeros(edges, dtype=torch.int64), nodes), torch.empty(nodes, sizes[0], device="meta")
    inputs, depth = (graph.set_constant(x), x), len(sizes) - 1

    def share(kind: str, q: int, counted: str) -> float:
        model = quantize_(GraphNet("gcn", sizes[0], sizes[-1], sizes[1], depth), QuantConfig(aggregation=kind))
        schedule = make_schedule("STATIC", q_max=q, total_steps=1000)
        plan = count_bitops(model, inputs, schedule, convention="per_op", q_grad=max(bits))
        layers = {k: v for k, v in getattr(plan, counted).items() if "norm" not in k}
        return 100 * sum(v for k, v in layers.items() if "aggregation" in k) / sum(layers.values())

    print(f"operations of a forward pass: {share('fp', max(bits), 'macs'):.1f} % are sums over neighbours")
    for q in bits:
        fp, quantized = (share(kind, q, "by_layer") for kind in ("fp", "quantized"))
        print(f"BitOps of training at {q} bits: FP-Agg {fp:5.1f} %   Q-Agg {quantized:4.1f} %")


def focal_loss_table(background: int, objects: int, says: Sequence[float], of_objects: float) -> None:
    """Print how much of the loss is background, by cross entropy and by focal loss, while training goes on.

    ``says`` are probabilities of an object that the model gives to background anchors, ``of_objects`` the one that it
    gives to anchors on objects.
    """
    import torch
    from torchvision.ops import sigmoid_focal_loss

    def loss(p: float, there: float, focal: bool) -> float:
        logit, target = torch.tensor(p).logit(), torch.tensor(there)
        if focal:
            return float(sigmoid_focal_loss(logit, target, alpha=0.25, gamma=2))
        return float(torch.nn.functional.binary_cross_entropy_with_logits(logit, target))

    print(f"{background:,} anchors on background, {objects} on objects; on objects the model says {of_objects:g}")
    print("it says of background   background's share of the loss: cross entropy   focal loss")
    for p in says:
        shares = []
        for focal in (False, True):
            empty, full = background * loss(p, 0.0, focal), objects * loss(of_objects, 1.0, focal)
            shares.append(100 * empty / (empty + full))
        print(f"{p:22g}   {shares[0]:42.1f} %   {shares[1]:8.1f} %")


def pretrained_or_scratch(scale: str) -> dict[str, bool]:
    """Say how detectors start at a scale; where ImageNet weights are missing, change the recipe to "from scratch".

    The paper starts from pretrained weights; the choice becomes part of every run and its title.
    """
    if scale != "paper":
        return {}
    from cpt_core.data.detection import backbone_weights
    from cpt_core.data.files import DataNotFoundError

    try:
        print(f"the backbone starts from {backbone_weights().name}")
    except DataNotFoundError as missing:
        print(f"training starts from scratch, unlike the paper's: {missing}")
        return {"pretrained": False}
    return {}


def learn_by_heart(spec: Any, at_least: float = 0.3) -> Figure:
    """Train a run on its few pictures and draw what the model finds on them before and after."""
    import torch

    from cpt_core.quantization.scheduler import precision
    from cpt_core.tasks.detection import DetectionTask, mean_average_precision
    from cpt_core.training.train import train

    torch.manual_seed(spec.seed)
    task = DetectionTask(spec, torch.device("cpu"))
    untrained, _ = task.detect(task.model().eval(), task.data.train)
    run = train(DetectionTask, spec)
    with precision(run.model.eval(), bits=spec.q_max):
        trained, _ = task.detect(run.model, task.data.train)
    scores = [100 * mean_average_precision(pairs)["map50"] for pairs in (untrained, trained)]

    def words(found: dict[str, Any], least: float = 0.0) -> Boxes:
        sure = found.get("scores", torch.ones(len(found["boxes"])))
        names = [task.data.classes[label] for label in found["labels"].tolist()]
        return [
            (box, f"{name} {score:.1f}" if least else name)
            for box, name, score in zip(found["boxes"].tolist(), names, sure.tolist(), strict=True)
            if score >= least
        ]

    pictures = [there for _, there in trained]
    figure = pictures_with_boxes(
        [there.read().permute(1, 2, 0).numpy() for there in pictures],
        {
            "what is there": [words({"boxes": a.boxes, "labels": a.labels}) for a in pictures],
            "found before training": [words(found, at_least) for found, _ in untrained],
            "found after training": [words(found, at_least) for found, _ in trained],
        },
    )
    figure.suptitle(
        f"{task.title}, {spec.recipe.steps} steps with {spec.arm}\nmAP on these pictures, which it was trained on: "
        f"{scores[0]:.0f} % before, {scores[1]:.0f} % after",
        fontsize=9,
    )
    return figure


def show_range_tests() -> None:
    """Print the committed range tests: the share of q_max's loss reduction at each precision, and both q_min."""
    tests = json.loads((results_dir() / "range_tests.json").read_text(encoding="utf-8"))["tests"]
    print(f"{'':<29}{'f(2)':>14}{'f(3)':>14}{'f(4)':>14}   q_min found   here  paper")
    for name, test in tests.items():
        cells = []
        for bits in (2, 3, 4):
            column = [row[test["bits"].index(bits)] for row in test["shares"]]
            spread = f" +- {np.std(column, ddof=1):.2f}" if None not in column and len(column) > 1 else ""
            cells.append("diverged" if None in column else f"{np.mean(column):.2f}{spread}")
        doubt = "?" if test["warning"] else " "
        seeds = len(test["shares"])
        found = f"{test['q_min']}{doubt} ({seeds} seed{'s' * (seeds > 1)})"
        print(
            f"{name:<29}" + "".join(f"{c:>14}" for c in cells)
            + f"   {found:<14}{test['recipe_q_min']:<6}"
            + ", ".join(c for c in test["paper_q_min"] if c.isdigit())
        )  # fmt: skip


def show_budgets(
    budgets: Sequence[float], families: Sequence[str], q_min: int, q_max: int, total_steps: int, delay: float = 0.0
) -> None:
    """Print the schedules that meet some budgets, by family, or why none does."""
    print("budget  family       power   cost     noise exposure   share of steps at q_min")
    for budget in budgets:
        for family in families:
            try:
                found = solve_schedule(budget, q_min, q_max, total_steps, family=family, delay=delay)
            except ValueError as error:
                print(f"{budget:<7} {family:<12} {error}")
                continue
            power = found.to_dict().get("schedule", found.to_dict()).get("profile", {}).get("power", float("nan"))
            print(
                f"{budget:<7} {family:<12}{power:6.3f}  {found.relative_cost():.4f}   {found.noise_exposure():14.1f}   "
                f"{found.share_at(q_min):.3f}"
            )


def show_spending(specs: Sequence[Any]) -> None:
    """Print what the arms of an experiment run: their steps, and their BitOps beside static q_max over all steps."""
    first = specs[0]
    for spec in specs:
        if spec.seed == first.seed:
            share = spec.schedule.relative_cost(spec.q_grad, spec.q_max) * spec.recipe.steps / first.recipe.steps
            print(f"{spec.arm:<28} {spec.recipe.steps:>4} steps   BitOps {share:.3f} of static {spec.q_max}")


def show_fronts(runs: pd.DataFrame) -> None:
    """Print the Pareto front of every experiment with all ten schedules: arms that none beats, their costs behind."""
    for group in quality_cost_groups(runs):
        arms = summary(group)
        if (arms.savings != "static").sum() >= 10:
            front = arms[arms["Pareto front"] == "yes"]
            print(title_of(group))
            costs = zip(front["arm"], front["relative cost"], strict=True)
            print("  " + ", ".join(f"{arm} ({cost})" for arm, cost in costs))


def show_equal_cost(experiments: Mapping[str, pd.DataFrame]) -> None:
    """Print, for experiments by name, what three ways to spend the BitOps of a schedule did against it."""
    ways = {"the same, delayed": " delayed ", "8 bits, stopped early": "static 8,", "fewer bits": "static [2-7]"}
    for name, runs in experiments.items():
        found = equal_cost(runs)
        for way, pattern in ways.items():
            said = [
                f"{r.arm} {'better than' if r.low > 0 else 'worse than' if r.high < 0 else 'not told from'} {r.base}"
                for r in found[(found.arm != found.base) & found.arm.str.contains(pattern)].itertuples()
            ]
            print(f"{name}, {way}: {'; '.join(said) or 'not run'}")
