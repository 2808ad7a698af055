"""Small worlds to look into: demonstrations that notebooks print."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from cpt_core.paths import results_dir
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.solver import solve_schedule
from cpt_core.teaching.pictures import Boxes, pictures_with_boxes


def tiny_problem(batch: int = 32, seed: int = 0) -> tuple[Any, list[tuple[Any, Any]], Any, Any]:
    """Return an ordinary training set-up on the digits: model, list of batches, loss function, optimizer."""
    import torch
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )
    order = torch.randperm(len(labels))[: 40 * batch]
    loader = [(images[i], labels[i]) for i in order.split(batch)]
    return model, loader, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def quantization_table(values: list[float], bits: int) -> None:
    """Print the anatomy of one quantisation: minimum, step, and value -> level -> quantised value."""
    import torch

    from cpt_core.quantization.fake_quantize import levels_of, quantize

    x = torch.tensor(values)
    low, width = x.min(), x.max() - x.min()
    step = width / levels_of(bits)
    print(f"{bits} bits: {2**bits} levels from {low:.3f} to {x.max():.3f}, step {step:.4f}")
    for value, quantized in zip(x, quantize(x, bits), strict=True):
        level = round(float((quantized - low) / step))
        print(f"  {value:7.3f} -> level {level:3d} -> {quantized:7.3f}   error {quantized - value:+.4f}")


def straight_through_table(values: list[float], bits: int) -> None:
    """Print the gradient that reaches every value through the quantiser when 1 comes from above."""
    import torch

    from cpt_core.quantization.fake_quantize import quantize

    x = torch.tensor(values, requires_grad=True)
    quantize(x, bits).sum().backward()
    print("value    ", *(f"{v:6.2f}" for v in values))
    print("gradient ", *(f"{g:6.2f}" for g in x.grad))  # type: ignore[union-attr]


def rounding_bias(value: float, bits: int, draws: int = 20_000) -> dict[str, float]:
    """Return the mean error of rounding one value of [0, 1], in steps of the grid, by rounding rule."""
    import torch

    from cpt_core.quantization.fake_quantize import levels_of, round_to_grid
    from cpt_core.quantization.noise import NoisePool

    x = torch.full((draws,), value)
    low, width, levels = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(levels_of(bits))
    noise = {"nearest": None, "stochastic": NoisePool(0).draw(x)}
    return {
        rule: float((round_to_grid(x, low, width, levels, n, clip=True) - value).mean() * levels)
        for rule, n in noise.items()
    }


def bitops_table(model: str, size: int, classes: int, batch: int, schedule: Any) -> None:
    """Print forward MACs by kind of layer and the BitOps of a model of the paper, in both conventions."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.bitops.trace import CONVENTIONS, trace
    from cpt_core.models import MODELS
    from cpt_core.quantization.convert import quantize_

    network = quantize_(MODELS[model](3, size, classes), "imagenet" if size > 64 else "cifar")
    inputs = (torch.empty(batch, 3, size, size, device="meta"),)
    kinds: dict[str, int] = {}
    for call in trace(network, inputs)[0]:
        kinds[call.kind] = kinds.get(call.kind, 0) + call.macs
    print(f"{model}, batch {batch}: " + ", ".join(f"{kind} {macs:,}" for kind, macs in kinds.items()) + " per step")
    for convention in CONVENTIONS:
        plan = count_bitops(network, inputs, schedule, convention=convention)
        print(f"  {convention:<8} {plan.total:.4e} BitOps")


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


def aggregation_error(bits: Sequence[int], neighbours: Sequence[int]) -> None:
    """Print the error of the mean over n quantised messages, as a share of the error of one message."""
    import torch

    from cpt_core.quantization.fake_quantize import quantize

    messages = torch.randn(max(neighbours), 4096, generator=torch.Generator().manual_seed(0))
    print("neighbours " + "".join(f"{n:>7}" for n in neighbours))
    for q in bits:
        error = quantize(messages, q, "graph_aggregation") - messages
        sizes = [float(error[:n].mean(0).square().mean().sqrt() / error[0].square().mean().sqrt()) for n in neighbours]
        print(f"{q} bits     " + "".join(f"{s:>7.2f}" for s in sizes))


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


def hidden_ranges(bits: int, steps: Sequence[int], width: int = 64) -> None:
    """Print how the hidden state of a fresh LSTM widens over the steps, and what one range for all steps would cost."""
    import torch

    from cpt_core.quantization.fake_quantize import levels_of, quantize, straight_through

    torch.manual_seed(0)
    with torch.no_grad():
        hidden = torch.nn.LSTM(width, width)(torch.randn(max(steps), 20, width))[0]
    low, whole = hidden.min(), hidden.max() - hidden.min()
    print("step   width of its range   error with its own range   with one range for all steps")
    for step in steps:
        h = hidden[step - 1]
        shared = straight_through(h, low, whole, torch.tensor(levels_of(bits)))
        own, one = ((x - h).square().mean().sqrt() for x in (quantize(h, bits, "lstm_hidden"), shared))
        print(f"{step:4d}   {h.max() - h.min():18.2f}   {own:24.4f}   {one:28.4f}")


def probabilities_table(row: Sequence[float], bits: Sequence[int]) -> None:
    """Print a row of attention probabilities at several precisions, with its sum."""
    import torch

    from cpt_core.quantization.fake_quantize import quantize

    x = torch.tensor(row)
    print("float32", *(f"{p:6.3f}" for p in row), f"  sum {sum(row):.3f}")
    for q in bits:
        quantized = quantize(x, q, "attention_probabilities")
        print(f"{q} bits ", *(f"{p:6.3f}" for p in quantized), f"  sum {quantized.sum():.3f}")


def language_model_bitops(arms: Sequence[str], q_min: int = 5, q_max: int = 8) -> None:
    """Print the operations of a step of the paper's language model, and the BitOps of its 40 epochs for some arms."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.bitops.trace import trace
    from cpt_core.models.lstm_lm import LanguageModel
    from cpt_core.quantization.convert import quantize_

    with torch.device("meta"):
        model = quantize_(LanguageModel(10_000, 800, 800))
    inputs = (torch.empty(35, 20, dtype=torch.int64, device="meta"), None)
    kinds: dict[str, int] = {}
    for call in trace(model, inputs)[0]:
        kinds[call.kind] = kinds.get(call.kind, 0) + call.macs
    print("a step: " + ", ".join(f"{kind} {macs:,}" for kind, macs in kinds.items()))
    for arm in arms:
        cycles: dict[str, Any] = {} if arm.upper() == "STATIC" else {"q_min": q_min, "n_cycles": 2}
        schedule = make_schedule(arm.upper(), q_max=q_max, total_steps=40 * 1327, **cycles)
        print(f"{arm:<7} {count_bitops(model, inputs, schedule).total / 1e13:.4f} x 1e13 BitOps")


def overlap_table(box: Sequence[float], anchors: Sequence[Sequence[float]]) -> None:
    """Print the overlap (IoU) of an object with some anchors, and what training makes of each."""
    import torch
    from torchvision.ops import box_iou

    for anchor, iou in zip(anchors, box_iou(torch.tensor([box]), torch.tensor(anchors))[0].tolist(), strict=True):
        verdict = "positive" if iou >= 0.5 else "ignored" if iou >= 0.4 else "background"
        print(f"anchor {' '.join(f'{x:3g}' for x in anchor)}   overlap {iou:.3f}   {verdict}")


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


def detection_bitops(arms: Sequence[str], q_min: int = 5, q_max: int = 8) -> None:
    """Print the operations of the paper's RetinaNet, and the BitOps of its 120 epochs at two sizes of its input."""
    import torch

    from cpt_core.bitops.plan import count_bitops
    from cpt_core.bitops.trace import trace
    from cpt_core.models.retinanet import retinanet

    with torch.device("meta"):
        model = retinanet("retinanet", classes=20)
    calls = trace(model, (torch.empty(1, 3, 224, 224, device="meta"),))[0]
    parts = {"backbone.body": "backbone", "backbone.fpn": "pyramid", "head": "two heads"}
    macs = {name: sum(c.macs for c in calls if c.layer.startswith(start)) for start, name in parts.items()}
    print(f"one picture of 224 x 224: {sum(macs.values()):,} operations: " + ", ".join(
        f"{name} {100 * n / sum(macs.values()):.1f} %" for name, n in macs.items()
    ))  # fmt: skip
    sizes = {"256 x 224 x 224 (authors)": (256, 3, 224, 224), "4 x 608 x 832 (trained on)": (4, 3, 608, 832)}
    print(f"{'arm':<10}{'relative':>9}" + "".join(f"{name:>30}" for name in sizes))
    for arm in arms:
        cycles: dict[str, Any] = {} if arm.upper() == "STATIC" else {"q_min": q_min, "n_cycles": 8}
        schedule = make_schedule(arm.upper(), q_max=q_max, total_steps=120 * 1430, **cycles)
        totals = (
            count_bitops(model, (torch.empty(size, device="meta"),), schedule).total / 1e13 for size in sizes.values()
        )
        print(f"{arm:<10}{schedule.relative_cost():>9.3f}" + "".join(f"{t:>23,.1f} x 1e13" for t in totals))


def pretrained_or_scratch(scale: str) -> dict[str, bool]:
    """Say how detectors start at a scale; where ImageNet weights are missing, change the recipe to "from scratch".

    The paper starts from pretrained weights; the choice becomes part of every run and its title.
    """
    if scale != "paper":
        return {}
    from cpt_core.data.common import DataNotFoundError
    from cpt_core.data.detection import backbone_weights

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
    figure.tight_layout()
    return figure


def show_range_tests() -> None:
    """Print the committed range tests: the share of q_max's loss reduction at each precision, and both q_min."""
    tests = json.loads((results_dir() / "range_tests.json").read_text())["tests"]
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
