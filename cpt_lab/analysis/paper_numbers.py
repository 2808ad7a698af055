"""The numbers printed in the paper, read from ``data/paper/numbers.csv``.

A line is about an arm or a group of savings, by itself or against another one (``minus``; "static" is static q_max).
Its number is one ``value`` or runs from there ``to`` another one, with a standard deviation where one is printed;
``place`` says where. ``model`` and ``q_max`` are empty where the text names none. "saved" is a share of the BitOps of
static q_max.
"""

import pandas as pd

from cpt_lab.analysis.metrics import metric_of
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, task_of_dataset
from cpt_lab.paths import paper_dir

UNITS = {"%": 100.0, "points": 100.0, "1e13 BitOps": 1e-13}  # from stored values


def numbers() -> pd.DataFrame:
    """Return all of them, texts empty and numbers NaN where there is nothing."""
    return pd.read_csv(paper_dir() / "numbers.csv").fillna({"model": "", "minus": ""})


def of_experiment(runs: pd.DataFrame, artefact: str) -> pd.DataFrame:
    """Return those of an artefact, such as "figure_3", that are about the arms of an experiment at paper scale."""
    found, first = numbers(), runs.iloc[0]
    same = (
        (found["minus"] == "")
        & (found["artefact"] == artefact)
        & (found["metric"] == metric_of(runs))
    )
    same &= (
        (found["dataset"] == first["dataset"])
        & (found["model"] == first["model"])
        & (first["scale"] == "paper")
    )
    return found[same].astype({"q_max": int})


def of_figure(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers in the paper's figure of quality against cost that an experiment redraws.

    At paper scale these are the numbers for the same data set and network, if there are any; else those for all data of
    the same task, on graphs with the same network. Column ``own_data`` is True where the paper's data are not those of
    the experiment; ``data`` is the name of the paper's data set.
    """
    found, first = numbers(), runs.iloc[0]
    found = found[found["artefact"] == EXPERIMENTS[first["task"]].artefact]
    found = found[
        [task_of_dataset(dataset) == first["task"] for dataset in found["dataset"]]
    ]
    if first["task"] == "graph":
        found = found[found["model"] == first["model"]]
    same = (found["dataset"] == first["dataset"]) & found["model"].isin(
        ["", first["model"]]
    )
    own_data = not (first["scale"] == "paper" and same.any())
    if not own_data:
        found = found[same]
    return found.assign(
        own_data=own_data,
        data=[DATASETS[dataset].title for dataset in found["dataset"]],
    )


def number_text(value: float, to: float, std: float, unit: str) -> str:
    """Return a number as it is printed, such as "92.23 +- 0.09 %" or "-1.5 to -1 points"."""
    sign = "+" if unit == "points" else ""
    shown = (
        f"{value:{sign}g}"
        + (f" to {to:{sign}g}" if to == to else "")
        + (f" +- {std:.2f}" if std == std else "")
    )
    return f"{shown} {unit}"
