"""Stored runs that a figure of the paper is drawn from, the most informative experiment first.  No torch."""

from typing import NamedTuple

import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_lab.analysis import run_groups
from cpt_lab.analysis.run_table import committed
from cpt_lab.experiments.registry import DATASETS
from cpt_lab.experiments.schema import SCALES
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.sweeps.stores import load_rows

MIN_SCHEDULES = 5  # of the ten: fewer do not show how quality depends on cost
MIN_FIGURE_SEEDS = 2  # one seed has no spread

_TASKS = {"figure_3": "image", "figure_4": "detection", "figure_6": "graph"}


def experiments(
    artefact: str, runs: pd.DataFrame | None = None, model: str = ""
) -> list[pd.DataFrame]:
    """Return the experiments of a figure, the most informative first.

    An experiment is one recipe at one scale, with any q_max and both aggregations. The order is by scale, then by the
    data (real data before embedded stand-ins), then by the number of q_max, schedules and seeds. Experiments with fewer
    than ``MIN_SCHEDULES`` schedules or ``MIN_FIGURE_SEEDS`` seeds come last.

    Args:
        artefact: "figure_3" to "figure_8", "table_1", or "figure_7/language_model" and "figure_7/entailment".
        runs: None uses all committed rows.
        model: only runs of this model; "" for all models.
    """
    candidates = committed() if runs is None else runs
    candidates = candidates[candidates["scale"] != "smoke"]
    if model:
        candidates = candidates[candidates["model"] == model]
    figure, _, task = artefact.partition("/")
    if figure in ("figure_8", "table_1"):
        parts = run_groups.deficit_groups(
            candidates[candidates["task"] == "image"]
            if figure == "table_1"
            else candidates
        )
    elif figure == "figure_5":
        parts = run_groups.aggregation_groups(candidates)
    else:
        if task:
            tasks = [task]
        elif figure in _TASKS:
            tasks = [_TASKS[figure]]
        else:
            tasks = ["language_model", "entailment"]
        parts = _by_recipe(candidates[candidates["task"].isin(tasks)])
    return sorted((part for part in parts if len(part)), key=_relevance, reverse=True)


def best_rows(
    artefact: str, runs: pd.DataFrame | None = None, model: str = ""
) -> pd.DataFrame:
    """Return the most informative experiment of a figure; an empty table if there is none."""
    candidates = experiments(artefact, runs, model)
    return candidates[0] if candidates else committed().iloc[:0]


def specs_of(runs: pd.DataFrame) -> list[RunSpec]:
    """Return the specs of rows from the committed stores; other rows are left out."""
    specs = []
    for store, part in runs.groupby("store"):
        keys = set(part["key"])
        path = results_dir() / str(store).rpartition("/")[2]
        if path.is_file():
            specs += [
                RunSpec.from_dict(row["spec"])
                for row in load_rows(path)
                if row["key"] in keys
            ]
    return specs


def _by_recipe(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Split runs of quality against cost by recipe; q_max and aggregation stay together."""
    parts = run_groups.quality_cost_groups(runs)
    if not parts:
        return []
    pooled = pd.concat(parts)
    columns = [pooled[name] for name in ("recipe_but_aggregation", "preset", "scale")]
    columns.append(run_groups.reduced_gradient_bits(pooled))
    return [part for _, part in pooled.groupby(columns, sort=False)]


class _Relevance(NamedTuple):
    """Sort key of an experiment by its information; larger is better."""

    has_enough: bool  # it has the arms that its figure needs
    scale: int  # index in ``SCALES``
    is_real: bool  # its data are not embedded
    num_q_max: int  # number of q_max at which schedules ran
    schedules: int
    seeds: int


def _relevance(part: pd.DataFrame) -> _Relevance:
    first = part.iloc[0]
    suite_runs = part[part["arm"].isin(SUITE)]
    schedules = suite_runs["arm"].nunique()
    is_embedded = str(first["dataset"]) in DATASETS and bool(
        DATASETS[str(first["dataset"])].embedded
    )
    num_seeds = int(part.groupby("arm")["seed"].nunique().median())
    shows_trade_off = schedules >= MIN_SCHEDULES and num_seeds >= MIN_FIGURE_SEEDS
    has_deficits = part["kind"].eq("deficit").any()
    has_both_aggregations = part["aggregation"].nunique() == 2
    return _Relevance(
        bool(shows_trade_off or has_deficits or has_both_aggregations),
        SCALES.index(first["scale"]),
        not is_embedded,
        suite_runs["q_max"].nunique(),
        schedules,
        num_seeds,
    )
