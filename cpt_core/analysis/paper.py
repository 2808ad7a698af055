"""The numbers printed in the paper, beside ours."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cpt_core.analysis import critical_periods
from cpt_core.analysis.groups import deficit_groups
from cpt_core.analysis.metrics import spread_text
from cpt_core.experiments.recipe import Metric
from cpt_core.paths import paper_dir

UNITS = {"%": 100.0, "1e13 BitOps": 1e-13}  # of the paper's numbers
PRINTED = Metric("", "", digits=2)


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's numbers with their places, and ours where the same thing was measured at paper scale."""
    runs = runs[runs["scale"] == "paper"]
    deficits = [r for part in deficit_groups(runs) for r in critical_periods.deficits(part).itertuples()]
    lines = []
    for p in pd.read_csv(paper_dir() / "numbers.csv").itertuples():
        same = (runs["dataset"] == p.dataset) & (runs["model"] == p.model) & (runs["q_max"] == p.q_max)
        if p.artefact == "table_1":
            arms = {(r.arm, r.recipe) for r in deficits if r.paper_arm == p.arm}
            same &= np.array([pair in arms for pair in zip(runs["arm"], runs["recipe"], strict=True)], dtype=bool)
        else:
            same &= runs["arm"] == p.arm
        values, lost = runs.loc[same, p.metric].dropna() * UNITS[p.unit], int(runs.loc[same, "diverged"].sum())
        ours = spread_text(PRINTED, values.mean(), values.std(), len(values)) if len(values) else "not run"
        ours += f", {lost} diverged" if lost else ""
        name = f"{p.artefact.replace('_', ' ')}: {p.dataset}, {p.model}"
        lines.append((name, p.arm, p.metric, f"{p.value:g} {p.unit}", ours, p.place))
    return pd.DataFrame(lines, columns=["what", "arm", "metric", "paper", "ours +- std", "where it stands"])


def table_1() -> pd.DataFrame:
    """Return table 1 of the paper for people, every arm with its distance to training without a deficit."""
    paper = pd.read_csv(paper_dir() / "numbers.csv").query("artefact == 'table_1'")
    lines = []
    for (dataset, model), part in paper.groupby(["dataset", "model"]):
        clean = part[part.arm == "no deficit"].value.iloc[0]
        for r in part.itertuples():
            minus = f"{r.value - clean:+.2f}" if r.arm != "no deficit" else ""
            lines.append((f"{dataset}, {model}", r.arm, f"{r.value:.2f}", minus))
    return pd.DataFrame(lines, columns=["what", "low precision", "accuracy %", "minus no deficit"])
