"""The paper's study for a model of yours: ``own_study.py SEEDS``. Replace ``build`` and ``quality``, keep the rest."""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits

import cpt_core as cpt

STEPS, Q_MAX, STORE = 400, 8, Path("own_study.jsonl")
X, Y = (torch.tensor(a).float() for a in load_digits(return_X_y=True))


def build(seed):
    """Return a model, what makes one optimizer step with batch number i, and the optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def train_step(i):
        chosen = torch.randint(1200, (64,), generator=torch.Generator().manual_seed(10_000 * seed + i))
        loss = torch.nn.functional.cross_entropy(model(X[chosen] / 16), Y[chosen].long())
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        return loss

    return model, train_step, optimizer


def quality(schedule, seed):
    """Train under a schedule; return the accuracy in percent, evaluated at the most bits."""
    model, train_step, optimizer = build(seed)
    cpt.PrecisionScheduler(cpt.quantize_(model), schedule, q_grad=Q_MAX, optimizer=optimizer)
    for i in range(STEPS):
        train_step(i)
    with torch.no_grad(), cpt.precision(model.eval(), Q_MAX):
        return 100 * float((model(X[1200:] / 16).argmax(1) == Y[1200:]).float().mean())


if __name__ == "__main__":
    seeds, known = range(int(sys.argv[1])), dict(map(json.loads, STORE.open())) if STORE.exists() else {}
    low = cpt.choosing.precision_range_test(*build(0), q_max=Q_MAX).q_min
    static = {f"static {q}": cpt.StaticSchedule(q, STEPS) for q in range(low, Q_MAX + 1)}
    arms = static | {a: cpt.make_schedule(a, q_min=low, q_max=Q_MAX, total_steps=STEPS, n_cycles=2) for a in cpt.SUITE}
    for name, arm, seed in ((f"{a}, {s}", a, s) for s in seeds for a in arms if f"{a}, {s}" not in known):
        known[name] = quality(arms[arm], seed)
        STORE.open("a").write(json.dumps([name, known[name]]) + "\n")  # so that what was stopped goes on
    cost = {arm: schedule.relative_cost(Q_MAX, Q_MAX) for arm, schedule in arms.items()}
    reached = {arm: np.array([known[f"{arm}, {s}"] for s in seeds]) for arm in arms}
    lines = np.stack([reached[a] for a in static], 1)  # of static bits, seed by seed
    for arm in sorted(arms, key=cost.__getitem__):
        gain = reached[arm] - [np.interp(cost[arm], [cost[a] for a in static], line) for line in lines]
        half = stats.t.ppf(0.975, len(gain) - 1) * stats.sem(gain)
        print(f"{arm:<8} cost {cost[arm]:.3f}: {reached[arm].mean():.2f} %, {gain.mean():+.2f} +- {half:.2f} to static")
        plt.plot(cost[arm], reached[arm].mean(), marker=f"${arm.replace(' ', '')}$", markersize=28)
    plt.savefig("own_study.png")
