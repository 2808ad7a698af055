"""Numbers printed in the paper, read from ``data/paper/numbers.csv``.

A line is about an arm or a savings group, alone or compared with another one (``minus``; "static" is static q_max).
Its number is ``value``, or a range from ``value`` to ``to``, with a standard deviation if one is printed; ``place`` is
where it is printed. ``model`` and ``q_max`` are empty if the text names none. "saved" is a share of the BitOps of
static q_max.
"""

import math

import pandas as pd

from cpt_lab.analysis.metrics import metric_of
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, task_of_dataset
from cpt_lab.paths import paper_dir

# unit of the paper -> factor from stored values
UNITS = {"%": 100.0, "points": 100.0, "1e13 BitOps": 1e-13}


def numbers() -> pd.DataFrame:
    """Return all printed numbers; empty cells are "" in texts and NaN in numbers."""
    return pd.read_csv(paper_dir() / "numbers.csv").fillna({"model": "", "minus": ""})


def experiment_numbers(runs: pd.DataFrame, artefact: str) -> pd.DataFrame:
    """Return the numbers of an artefact, such as "figure_3", about the arms of an experiment at paper scale."""
    all_numbers, first = numbers(), runs.iloc[0]
    is_selected = (
        (all_numbers["minus"] == "")
        & (all_numbers["artefact"] == artefact)
        & (all_numbers["metric"] == metric_of(runs))
        & (all_numbers["dataset"] == first["dataset"])
        & (all_numbers["model"] == first["model"])
        & (first["scale"] == "paper")
    )
    return all_numbers[is_selected].astype({"q_max": int})


def figure_numbers(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of the paper's figure of quality against cost that an experiment redraws.

    At paper scale these are the numbers for the same data set and network, if there are any; otherwise those for all
    data of the same task, on graphs with the same network. Column ``own_data`` is True where the paper's data differ
    from those of the experiment; ``data`` is the name of the paper's data set.
    """
    all_numbers, first = numbers(), runs.iloc[0]
    all_numbers = all_numbers[
        all_numbers["artefact"] == EXPERIMENTS[first["task"]].artefact
    ]
    all_numbers = all_numbers[
        [
            task_of_dataset(dataset) == first["task"]
            for dataset in all_numbers["dataset"]
        ]
    ]
    if first["task"] == "graph":
        all_numbers = all_numbers[all_numbers["model"] == first["model"]]
    is_same_setting = (all_numbers["dataset"] == first["dataset"]) & all_numbers[
        "model"
    ].isin(["", first["model"]])
    own_data = not (first["scale"] == "paper" and is_same_setting.any())
    if not own_data:
        all_numbers = all_numbers[is_same_setting]
    return all_numbers.assign(
        own_data=own_data,
        data=[DATASETS[dataset].title for dataset in all_numbers["dataset"]],
    )


def number_text(value: float, upper: float, std: float, unit: str) -> str:
    """Return a number as it is printed, such as "92.23 +- 0.09 %" or "-1.5 to -1 points"; NaN parts are left out."""
    sign = "+" if unit == "points" else ""
    text = f"{value:{sign}g}"
    if not math.isnan(upper):
        text += f" to {upper:{sign}g}"
    if not math.isnan(std):
        text += f" +- {std:.2f}"
    return f"{text} {unit}"
