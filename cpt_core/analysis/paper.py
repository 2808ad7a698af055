"""The numbers printed in the paper, beside ours."""

from __future__ import annotations

import numpy as np
import pandas as pd

from cpt_core.analysis import critical_periods, quality_cost
from cpt_core.analysis.runs import table
from cpt_core.paths import paper_dir
from cpt_core.sweeps.stores import Row

UNITS = {"%": 100.0, "1e13 BitOps": 1e-13}  # of the paper's numbers


def paper_numbers(rows: list[Row]) -> str:
    """The paper's numbers with their places, and ours where the same thing was measured at paper scale."""
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    rows = [r for r in rows if r["spec"]["scale"] == "paper"]
    runs = table(quality_cost.tuned(rows))
    deficits = [
        r for part in critical_periods.deficit_experiments(rows) for r in critical_periods.deficits(part).itertuples()
    ]
    lines = []
    for p in paper.itertuples():
        same = (runs.dataset == p.dataset) & (runs.model == p.model) & (runs.q_max == p.q_max)
        if p.artefact == "table_1":
            arms = {(r.arm, r.recipe) for r in deficits if r.paper_arm == p.arm}
            same &= np.array([pair in arms for pair in zip(runs.arm, runs.recipe, strict=True)], dtype=bool)
        else:
            same &= runs.arm == p.arm
        values = runs.loc[same, p.metric].dropna() * UNITS[p.unit] if p.metric in runs else pd.Series(dtype=float)
        ours = f"{values.mean():.2f} +- {values.std():.2f} ({len(values)})" if len(values) else "not run"
        name = f"{p.artefact.replace('_', ' ')}: {p.dataset}, {p.model}"
        lines.append((name, p.arm, p.metric, f"{p.value:g} {p.unit}", ours, p.place))
    columns = ["what", "arm", "metric", "paper", "ours +- std (n)", "where it stands"]
    return pd.DataFrame(lines, columns=columns).to_html(index=False, border=0, classes="left")


def paper_table_1() -> None:
    """Print table 1 of the paper."""
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    for (dataset, model), part in paper[paper.artefact == "table_1"].groupby(["dataset", "model"]):
        clean = part[part.arm == "no deficit"].value.iloc[0]
        print(f"{dataset}, {model}: {clean} without a deficit")
        lines = (f"{r.arm} {r.value} ({r.value - clean:+.2f})" for r in part.itertuples() if r.arm != "no deficit")
        print("  " + "\n  ".join(lines))
