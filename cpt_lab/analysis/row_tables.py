"""Short tables of stored rows, one line per arm, as ``cpt rows`` prints them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pandas as pd

from cpt_lab.analysis.metrics import metric_named, metric_of
from cpt_lab.experiments.schema import Recipe

# Columns of runs that distinguish the arms of a grid, besides the fields of their recipes.
_SETTINGS = ("preset", "q_max", "q_grad")


def by_arm(
    runs: pd.DataFrame, recipes: Mapping[str, Recipe]
) -> dict[str, pd.DataFrame]:
    """Return a table per data set, network and scale: arm, seeds stored, relative cost, mean and spread of the metric.

    An arm has a line for each of its settings: every field of the recipes in which the runs of a table differ is a
    column. The number of runs is a column where an arm has several of one seed, such as schedules of one name.

    Args:
        runs: the typed table of ``run_table.table``.
        recipes: the recipe of every run, by key.
    """
    tables = {}
    for (dataset, model, scale), part in runs.groupby(
        ["dataset", "model", "scale"], sort=False
    ):
        metric = metric_named(metric_of(part))
        settings = _settings(part, [recipes[key] for key in part["key"]])
        has_repeated_seeds = False
        lines = []
        for setting, arm in part.groupby(
            [part["arm"], *settings.values()], sort=False, dropna=False
        ):
            values = metric.factor * arm[metric.name].dropna()
            mean, std = "–", "–"
            if len(values):
                mean = f"{values.mean():.{metric.digits}f}"
            if len(values) > 1:
                std = f"{values.std():.{metric.digits}f}"
            num_seeds = arm["seed"].nunique()
            has_repeated_seeds |= num_seeds < len(arm)
            lines.append(
                {
                    **dict(zip(["arm", *settings], setting, strict=True)),
                    "seeds": num_seeds,
                    "runs": len(arm),
                    "relative cost": f"{arm['relative_cost'].mean():.3f}",
                    metric.name: mean,
                    "std": std,
                }
            )
        table = pd.DataFrame(lines)
        if not has_repeated_seeds:
            table = table.drop(columns="runs")
        unit = f", {metric.name} in {metric.unit}" if metric.unit else ""
        tables[f"{model} on {dataset}, {scale} scale{unit}"] = table
    return tables


def _settings(runs: pd.DataFrame, recipes: list[Recipe]) -> dict[str, pd.Series]:
    """Return the settings in which runs differ, by name; a value per run."""
    settings = {name: runs[name] for name in _SETTINGS}
    for field in fields(recipes[0]):
        if field.compare:
            values = [_field_text(getattr(recipe, field.name)) for recipe in recipes]
            settings[field.name] = pd.Series(values, runs.index, dtype="object")
    return {
        name: values
        for name, values in settings.items()
        if values.nunique(dropna=False) > 1
    }


def _field_text(value: Any) -> Any:
    """Return a value of a recipe; several values as a text, such as "0.5 0.75"."""
    if not isinstance(value, tuple):
        return value
    return " ".join(f"{x:g}" if isinstance(x, float) else str(x) for x in value)
