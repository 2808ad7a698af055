"""What a notebook says of the runs that it made itself."""

import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.groups import AGGREGATIONS, at_q_max
from cpt_lab.analysis.metrics import counted, metric_named, metric_of
from cpt_lab.analysis.quality_cost import figure_3, paired_difference
from cpt_lessons.exercises import compare, in_band

SHOWN = ("RR", "CR", "ER")  # of large, medium and small savings
FAIR = 0.1  # how much dearer or cheaper static precision may be to stand beside a schedule

# data set, model -> a metric of its smoke runs, and what their bands are called
BANDS = {
    ("digits", "mlp6"): ("accuracy", "smoke accuracy of"),
    ("digit-scenes", "retinanet_small"): ("loss", "smoke loss of the detector with"),
}


def ran(runs: pd.DataFrame) -> None:
    """Print what ran, in a line: runs, arms, seeds, how many diverged, seconds of training."""
    if runs.empty:
        print("nothing to run")
        return
    said = f"{counted(len(runs), 'run')}, {counted(runs.arm.nunique(), 'arm')}, {counted(runs.seed.nunique(), 'seed')}"
    ended = f"{n} diverged" if (n := int(runs.diverged.sum())) else "none diverged"
    print(f"{said}, {ended}: {runs.seconds.sum():.0f} s of training")


def titled(figure: Figure, finding: str) -> Figure:
    """Return a figure with what it shows, in a sentence, for its title."""
    figure.suptitle(finding, fontsize=10, y=1, va="bottom")
    return figure


def compared(*experiments: pd.DataFrame) -> None:
    """Print what ran; draw it against cost, and set schedules beside their rivals; hold smoke runs against bands.

    An experiment is of one recipe, maybe of several q_max and both aggregations.
    """
    for runs in experiments:
        ran(runs)
        if (runs.scale == "smoke").any():
            print('smoke runs are too short to compare; scale = "demo" compares')
            for run in runs[runs.arm.isin(["static 8", "ER"]) & (runs.preset == "ours")].itertuples():
                if (run.dataset, run.model) in BANDS:
                    value, name = BANDS[run.dataset, run.model]
                    in_band(f"{name} {run.arm}", getattr(run, value))
        else:
            figure_3(runs)
            beside_rivals(at_q_max(runs, None), f"{runs.dataset.iloc[0]}, " if experiments[1:] else "")


def beside_rivals(runs: pd.DataFrame, of: str = "") -> None:
    """Print RR, CR and ER minus the static bits of nearest cost, with both costs, where they ran within ``FAIR``.

    The runs are of one recipe and q_max; ``of`` is what every line says of them.
    """
    metric = metric_named(metric_of(runs))
    unit = "points" if metric.factor == 100 else f"of {metric.name} (less is better)"
    for kind, part in runs.groupby("aggregation"):
        of = f"{AGGREGATIONS[kind]}, " if runs.aggregation.nunique() > 1 else of
        cost = part.groupby("arm").relative_cost.first()
        static = cost[cost.index.str.fullmatch(r"static \d+")]
        for arm in (a for a in SHOWN if a in cost):
            away, said = (static / cost[arm] - 1).abs(), f"{arm} ({of}cost {cost[arm]:.2f})"
            if (away <= FAIR).any():
                rival = away.idxmin()
                said += f" minus {rival} ({static[rival]:.2f})"
                compare(said, metric.factor * paired_difference(part, arm, rival), unit)
            else:
                print(f"{said}: no static precision ran within {100 * FAIR:.0f} % of its cost")
