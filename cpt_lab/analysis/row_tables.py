"""Short tables of stored rows, one line per arm, as ``cpt rows`` prints them."""

import pandas as pd

from cpt_lab.analysis.metrics import metric_named, metric_of

# Columns that distinguish the arms of a grid; a column in which all rows agree is not shown.
_SETTINGS = (
    "aggregation",
    "q_max",
    "q_grad",
    "q_min",
    "n_cycles",
    "fanout",
    "lr",
    "lr_rule",
    "total_steps",
)


def by_arm(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a table per data set, network and scale: arm, seeds stored, relative cost, mean and spread of the metric.

    Args:
        runs: the typed table of ``run_table.table``.
    """
    tables = {}
    for (dataset, model, scale), part in runs.groupby(
        ["dataset", "model", "scale"], sort=False
    ):
        metric = metric_named(metric_of(part))
        settings = [
            name
            for name in _SETTINGS
            if name in part and part[name].nunique(dropna=False) > 1
        ]
        lines = []
        for setting, arm in part.groupby(["arm", *settings], sort=False, dropna=False):
            values = metric.factor * arm[metric.name].dropna()
            mean, std = "–", "–"
            if len(values):
                mean = f"{values.mean():.{metric.digits}f}"
            if len(values) > 1:
                std = f"{values.std():.{metric.digits}f}"
            lines.append(
                {
                    **dict(zip(["arm", *settings], setting, strict=True)),
                    "seeds": arm["seed"].nunique(),
                    "relative cost": f"{arm['relative_cost'].mean():.3f}",
                    metric.name: mean,
                    "std": std,
                }
            )
        unit = f", {metric.name} in {metric.unit}" if metric.unit else ""
        tables[f"{model} on {dataset}, {scale} scale{unit}"] = pd.DataFrame(lines)
    return tables
