"""Study of the paper for your own model: ``python study.py SEEDS``. Replace ``build`` and ``quality``, keep the rest.

It finds q_min with the range test and measures in which layers and when a bit matters. Then it trains every static
precision, the ten schedules, and bits allocated by what was measured at the cost of half of static Q_MAX.
"""

import ast
import hashlib
import json
import sys
from functools import partial
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
    """Return a model, a function that trains one step on batch number i, and the optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def train_step(i):
        indices = torch.randint(
            1200, (64,), generator=torch.Generator().manual_seed(10_000 * seed + i)
        )
        loss = torch.nn.functional.cross_entropy(
            model(X[indices] / 16), Y[indices].long()
        )
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        return loss

    return model, train_step, optimizer


def quality(schedule, seed):
    """Train under a schedule; return the accuracy in percent, evaluated at Q_MAX bits."""
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
    schedules = {
        f"static {q}": cpt.StaticSchedule(q, STEPS) for q in range(low, Q_MAX + 1)
    }
    schedules |= {
        a: cpt.make_schedule(a, q_min=low, q_max=Q_MAX, total_steps=STEPS, n_cycles=2)
        for a in cpt.SUITE
    }
    sensitivity = cpt.search.sensitivity(
        *build(0), base=low + 1, q_max=Q_MAX, steps=STEPS // 4, seeds=(0, 1)
    )
    return schedules | {
        "allocated": cpt.search.allocate(
            sensitivity, 0.5, low, Q_MAX, total_steps=STEPS
        )
    }


def code_digest():
    """Return a digest of the code above ``code_digest``, from which the results come; comments do not change it."""
    code = Path(__file__).read_text("utf-8").split("def code_digest")[0]
    return hashlib.sha256(ast.dump(ast.parse(code)).encode()).hexdigest()


def stored_results():
    """Return what was stored; ValueError if other code did."""
    results = {}
    if STORE.exists():
        results = dict(map(json.loads, STORE.read_text().splitlines()))
    if results and results.get("code") != code_digest():
        raise ValueError(
            f"{STORE} has the results of another build, quality or setting: rename or remove it to train again"
        )
    return results


def store_result(results, name, value):
    """Store a result at once, so that what was stopped goes on; before the first one the digest of the code."""
    new = {name: value} if results else {"code": code_digest(), name: value}
    results.update(new)
    with STORE.open("a") as file:
        file.writelines(json.dumps(item) + "\n" for item in new.items())


def study(seeds):
    """Train the missing runs; return cost, mean quality, and the gain over static bits of equal cost."""
    if seeds < 3:
        raise ValueError(
            f"two seeds can be alike by chance: give 3 or more, got {seeds}"
        )
    results = stored_results()
    keep = partial(store_result, results)
    if "arms" not in results:
        keep("arms", {name: schedule.to_dict() for name, schedule in arms().items()})
    schedules = {name: cpt.schedule_from_dict(d) for name, d in results["arms"].items()}
    for seed in range(seeds):
        for arm, schedule in schedules.items():
            if f"{arm}, {seed}" not in results:
                keep(f"{arm}, {seed}", quality(schedule, seed))
    cost = {
        arm: schedule.relative_cost(q_grad=Q_MAX, q_max=Q_MAX)
        for arm, schedule in schedules.items()
    }
    quality_by_arm = {
        arm: np.array([results[f"{arm}, {seed}"] for seed in range(seeds)])
        for arm in schedules
    }
    static = [arm for arm in schedules if arm.startswith("static")]
    lines = np.stack(
        [quality_by_arm[arm] for arm in static], 1
    )  # of static bits, seed by seed
    num_schedules = len(schedules) - len(static)
    rows = []
    for arm in sorted(schedules, key=cost.__getitem__):
        row = {"arm": arm, "cost": cost[arm], "quality": quality_by_arm[arm].mean()}
        if arm not in static:
            gain = quality_by_arm[arm] - [
                np.interp(cost[arm], [cost[a] for a in static], line) for line in lines
            ]
            halfwidth = stats.t.ppf(1 - 0.025 / num_schedules, seeds - 1) * stats.sem(
                gain
            )  # 95 % for all arms together
            row |= {"gain": gain.mean(), "+-": halfwidth}
        rows.append(row)
    return pd.DataFrame(rows).set_index("arm")


def draw(table):
    """Draw the gain of every arm over static bits of equal cost, cheapest first."""
    gains = table.dropna().iloc[::-1]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.errorbar(gains.gain, range(len(gains)), xerr=gains["+-"], fmt="o", capsize=3)
    axes.axvline(0, color="0.6")
    axes.set_yticks(
        range(len(gains)), [f"{arm}, at {cost:.2f}" for arm, cost in gains.cost.items()]
    )
    axes.set(
        xlabel="quality beyond that of static bits of the same cost (0)",
        title=answer(table),
    )
    return figure


def answer(table):
    """Return a sentence that names the arms better than static bits of equal cost."""
    won = table.index[table.gain > table["+-"]]
    return f"Better than static bits of the same cost: {', '.join(won) or 'none that these seeds can tell'}"


if __name__ == "__main__":
    table = study(int(sys.argv[1]))
    print(table.round(3).to_string(na_rep=""))
    print(answer(table))
    draw(table).savefig("study.png", dpi=150)
