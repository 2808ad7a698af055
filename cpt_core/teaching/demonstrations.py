"""Small worlds to look into: demonstrations that notebooks print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from cpt_core.analysis.equal_cost import equal_cost
from cpt_core.analysis.groups import quality_cost_groups, title_of
from cpt_core.analysis.quality_cost import summary
from cpt_core.paths import results_dir
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.solver import solve_schedule


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
