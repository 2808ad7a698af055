"""Show the runs that a notebook made itself: what ran, the paper's figure and tables of these runs."""

from typing import Any

import pandas as pd
from IPython.display import display
from matplotlib.figure import Figure

from cpt_lab.analysis import critical_periods, quality_cost, reproduction
from cpt_lab.analysis.aggregation import figure_5
from cpt_lab.analysis.figure_data import experiments
from cpt_lab.analysis.metrics import metric_named, metric_of, plural
from cpt_lab.analysis.quality_cost import paired_difference
from cpt_lab.analysis.rendering import NotebookTable
from cpt_lab.analysis.run_groups import AGGREGATION_NAMES, at_q_max
from cpt_lab.analysis.run_table import recipe_key
from cpt_lab.experiments.registry import recipe
from cpt_lessons.exercises import compare, in_band

SCHEDULES_COMPARED = ("RR", "CR", "ER")  # of large, medium and small savings
MAX_COST_DIFFERENCE = (
    0.1  # how much dearer or cheaper static precision may be to stand beside a schedule
)

# data set, model -> a metric of its smoke runs, and what their bands are called
BANDS = {
    ("digits", "mlp6"): ("accuracy", "smoke accuracy of"),
    ("digit-scenes", "retinanet_small"): ("loss", "smoke loss of the detector with"),
}
BAND_BITS = 8  # largest bits of weights and activations, and bits of gradients

# task of the runs -> section of the paper whose claims they speak of; deficits have a section of their own
PAPER_SECTIONS = {
    "image": "images",
    "detection": "detection",
    "graph": "graphs",
    "language_model": "language",
    "entailment": "entailment",
}


def print_runs(runs: pd.DataFrame) -> None:
    """Print what ran, in a line: runs, arms, seeds, how many diverged, seconds of training."""
    if runs.empty:
        print("nothing to run")
        return
    counts = [
        plural(len(runs), "run"),
        plural(runs.arm.nunique(), "arm"),
        plural(runs.seed.nunique(), "seed"),
    ]
    diverged = int(runs.diverged.sum())
    divergence = f"{diverged} diverged" if diverged else "none diverged"
    print(f"{', '.join(counts)}, {divergence}: {runs.seconds.sum():.0f} s of training")


def with_title(figure: Figure, finding: str) -> Figure:
    """Return a figure with what it shows, in a sentence, for its title."""
    figure.suptitle(finding, fontsize=10, y=1, va="bottom")
    return figure


def compare_with_paper(*experiments_of_runs: pd.DataFrame) -> None:
    """Print what ran and show the paper's figure and claims for these runs; hold smoke runs against bands.

    Args:
        experiments_of_runs: tables of runs of one task each, maybe of several q_max, aggregations or recipes.
    """
    for runs in experiments_of_runs:
        print_runs(runs)
        if (runs.scale == "smoke").any():
            print(
                'smoke runs are too short to compare; scale = "demo" draws the figure of your runs'
            )
            _check_bands(runs)
        elif len(runs):
            show_figures(runs)
            show_claims(runs)


def show_figures(runs: pd.DataFrame) -> None:
    """Display the paper's figure of every experiment among runs, and its comparisons with static precision."""
    deficits = runs[runs["kind"] == "deficit"]
    for part in experiments("figure_8", deficits):
        display(critical_periods.figure_8(part))
        display(NotebookTable(critical_periods.summary(part)))
    other_runs = runs[runs["kind"] != "deficit"]
    task = str(runs["task"].iloc[0])
    for part in experiments(f"figure_7/{task}", other_runs):
        display(quality_cost.figure_3(part))
        print("95 % intervals, not corrected for several comparisons:")
        beside_static(at_q_max(part, None))
    for part in experiments("figure_5", other_runs):
        display(figure_5(part, int(part["q_max"].iloc[0])))


def show_claims(runs: pd.DataFrame) -> None:
    """Display the claims of the paper on which these runs say something."""
    task = str(runs["task"].iloc[0])
    topic = (
        "critical-periods"
        if (runs["kind"] == "deficit").all()
        else PAPER_SECTIONS[task]
    )
    table = reproduction.claims_table(topic, runs)
    table = table[table["verdict"] != "not run"]
    if len(table):
        display(
            NotebookTable(
                table,
                "The paper's claims and these runs; effects are positive in the claim's direction. Their 95 % "
                "intervals are not corrected for several comparisons.",
            )
        )


def _check_bands(runs: pd.DataFrame) -> None:
    for run in runs[runs.arm.isin(["static 8", "ER"])].itertuples():
        if (run.dataset, run.model) not in BANDS:
            continue
        value, name = BANDS[run.dataset, run.model]
        if _has_default_parameters(run):
            in_band(f"{name} {run.arm}", getattr(run, value))
        else:
            print(f"{name} {run.arm}: no range was measured for these parameters")


def _has_default_parameters(run: Any) -> bool:
    """Return whether a smoke run has the recipe and bits of the runs that measured the bands."""
    declared = recipe(run.scale, run.dataset, run.model)
    is_declared = run.recipe == recipe_key(declared.to_dict())
    return is_declared and run.q_max == run.q_grad == BAND_BITS


def beside_static(runs: pd.DataFrame) -> None:
    """Print RR, CR and ER minus the static precision of nearest cost, with both costs.

    Args:
        runs: of one recipe and q_max. A static precision counts when its cost is within ``MAX_COST_DIFFERENCE``.
    """
    metric = metric_named(metric_of(runs))
    unit = "points" if metric.factor == 100 else f"of {metric.name} (less is better)"
    for kind, part in runs.groupby("aggregation"):
        prefix = (
            f"{AGGREGATION_NAMES[kind]}, " if runs.aggregation.nunique() > 1 else ""
        )
        cost = part.groupby("arm").relative_cost.first()
        static = cost[cost.index.str.fullmatch(r"static \d+")]
        for arm in (name for name in SCHEDULES_COMPARED if name in cost):
            distance = (static / cost[arm] - 1).abs()
            words = f"{prefix}{arm} (cost {cost[arm]:.2f})"
            if (distance <= MAX_COST_DIFFERENCE).any():
                nearest = distance.idxmin()
                words += f" minus {nearest} ({static[nearest]:.2f})"
                compare(
                    words, metric.factor * paired_difference(part, arm, nearest), unit
                )
            else:
                print(
                    f"{words}: no static precision ran within {100 * MAX_COST_DIFFERENCE:.0f} % of its cost"
                )
