"""The paper's study for a model of yours: ``python study.py SEEDS``. Replace ``build`` and ``quality``, keep the rest.

It finds q_min with the range test and measures in which layers and when a bit matters. Then it trains every static
precision, the ten schedules, and bits allocated by what was measured at the cost of half of static Q_MAX.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy import stats
from sklearn.datasets import load_digits

import cpt_core as cpt

STEPS, Q_MAX, STORE = 400, 8, Path("study.jsonl")
X, Y = (torch.tensor(a).float() for a in load_digits(return_X_y=True))


def build(seed):
    """Return a model, what makes one optimizer step with batch number i, and the optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def train_step(i):
        chosen = torch.randint(
            1200, (64,), generator=torch.Generator().manual_seed(10_000 * seed + i)
        )
        loss = torch.nn.functional.cross_entropy(
            model(X[chosen] / 16), Y[chosen].long()
        )
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        return loss

    return model, train_step, optimizer


def quality(schedule, seed):
    """Train under a schedule; return the accuracy in percent, evaluated at the most bits."""
    model, train_step, optimizer = build(seed)
    cpt.PrecisionScheduler(
        cpt.quantize_(model), schedule, q_grad=Q_MAX, optimizer=optimizer
    )
    for i in range(STEPS):
        train_step(i)
    with torch.no_grad(), cpt.precision(model.eval(), Q_MAX):
        return 100 * float((model(X[1200:] / 16).argmax(1) == Y[1200:]).float().mean())


def arms():
    """Return the schedules to compare."""
    low = cpt.search.precision_range_test(*build(0), q_max=Q_MAX).q_min
    found = {f"static {q}": cpt.StaticSchedule(q, STEPS) for q in range(low, Q_MAX + 1)}
    found |= {
        a: cpt.make_schedule(a, q_min=low, q_max=Q_MAX, total_steps=STEPS, n_cycles=2)
        for a in cpt.SUITE
    }
    matters = cpt.search.sensitivity(
        *build(0), base=low + 1, q_max=Q_MAX, steps=STEPS // 4, seeds=(0, 1)
    )
    return found | {
        "allocated": cpt.search.allocate(matters, 0.5, low, Q_MAX, total_steps=STEPS)
    }


def study(seeds):
    """Train what was not trained yet; return cost, mean quality, and the gain on static bits of that cost."""
    if seeds < 3:
        raise ValueError(
            f"two seeds can be alike by chance: give 3 or more, got {seeds}"
        )
    known = (
        dict(map(json.loads, STORE.read_text().splitlines())) if STORE.exists() else {}
    )

    def keep(name, value):
        known[name] = value
        with STORE.open("a") as file:  # at once, so that what was stopped goes on
            file.write(json.dumps([name, value]) + "\n")

    if "arms" not in known:
        keep("arms", {name: schedule.to_dict() for name, schedule in arms().items()})
    schedules = {name: cpt.schedule_from_dict(d) for name, d in known["arms"].items()}
    for seed in range(seeds):
        for arm, schedule in schedules.items():
            if f"{arm}, {seed}" not in known:
                keep(f"{arm}, {seed}", quality(schedule, seed))
    cost = {
        arm: schedule.relative_cost(q_grad=Q_MAX, q_max=Q_MAX)
        for arm, schedule in schedules.items()
    }
    reached = {
        arm: np.array([known[f"{arm}, {seed}"] for seed in range(seeds)])
        for arm in schedules
    }
    static = [arm for arm in schedules if arm.startswith("static")]
    lines = np.stack(
        [reached[arm] for arm in static], 1
    )  # of static bits, seed by seed
    others = len(schedules) - len(static)
    rows = []
    for arm in sorted(schedules, key=cost.__getitem__):
        row = {"arm": arm, "cost": cost[arm], "quality": reached[arm].mean()}
        if arm not in static:
            gain = reached[arm] - [
                np.interp(cost[arm], [cost[a] for a in static], line) for line in lines
            ]
            half = stats.t.ppf(1 - 0.025 / others, seeds - 1) * stats.sem(
                gain
            )  # 95 % for all arms together
            row |= {"gain": gain.mean(), "+-": half}
        rows.append(row)
    return pd.DataFrame(rows).set_index("arm")


def draw(table):
    """Return the figure of what every arm gains on static bits of its cost, cheapest first."""
    shown = table.dropna().iloc[::-1]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.errorbar(shown.gain, range(len(shown)), xerr=shown["+-"], fmt="o", capsize=3)
    axes.axvline(0, color="0.6")
    axes.set_yticks(
        range(len(shown)), [f"{arm}, at {cost:.2f}" for arm, cost in shown.cost.items()]
    )
    axes.set(
        xlabel="quality beyond that of static bits of the same cost (0)",
        title=answer(table),
    )
    return figure


def answer(table):
    """Return in words what beats static bits of its cost."""
    won = table.index[table.gain > table["+-"]]
    return f"Better than static bits of the same cost: {', '.join(won) or 'none that these seeds can tell'}"


if __name__ == "__main__":
    found = study(int(sys.argv[1]))
    print(found.round(3).to_string(na_rep=""))
    print(answer(found))
    draw(found).savefig("study.png", dpi=150)
