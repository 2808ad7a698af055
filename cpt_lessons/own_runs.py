"""What a notebook says of the runs that it made itself."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.metrics import counted, metric_named, metric_of
from cpt_lab.analysis.pages import terminal
from cpt_lab.analysis.quality_cost import SILENT, figure_3, paired_difference, summary
from cpt_lessons.exercises import compare, in_band

# data set, model -> a metric of its smoke runs, and what their bands are called
BANDS = {
    ("digits", "mlp6"): ("accuracy", "smoke accuracy of"),
    ("digit-scenes", "retinanet_small"): ("loss", "smoke loss of the detector with"),
}


def ran(runs: pd.DataFrame) -> None:
    """Print what ran, in a line: runs, arms, seeds, how many diverged, seconds of training.

    Args:
        runs: a line per run, such as ``Parameters.run`` returns: runs that fail outright do not get there.
    """
    if runs.empty:
        print("nothing to run")
        return
    said = f"{counted(len(runs), 'run')}, {counted(runs.arm.nunique(), 'arm')}, {counted(runs.seed.nunique(), 'seed')}"
    ended = f"{n} diverged" if (n := int(runs.diverged.sum())) else "none diverged"
    print(f"{said}, {ended}: {runs.seconds.sum():.0f} s of training")


def told(*experiments: pd.DataFrame) -> None:
    """Print what ran, and beyond smoke scale a table of it, of every q_max and aggregation.

    Args:
        experiments: a line per run, of one task each.
    """
    for runs in experiments:
        ran(runs)
        for _, part in runs[runs.scale != "smoke"].groupby(["q_max", "aggregation"]):
            brief(summary(part))


def titled(figure: Figure, finding: str) -> Figure:
    """Return a figure with what it shows, in a sentence, for its title."""
    figure.suptitle(finding, fontsize=10, y=1, va="bottom")
    return figure


def compared(runs: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> None:
    """Print what ran; draw it against cost, with the differences of pairs, or hold smoke runs against their bands.

    Args:
        runs: a line per run, of one recipe.
        pairs: arms, or savings groups, of which the second is subtracted; those that did not run are left out.
    """
    ran(runs)
    if not (runs.scale == "smoke").any():
        metric = metric_named(metric_of(runs))
        figure_3(runs)
        for a, b in pairs:
            if {a, b} <= {*runs.arm, *runs.savings}:
                compare(f"{a} minus {b}", metric.factor * paired_difference(runs, a, b))
        return
    said = ", ".join(f"{a} and {b}" for a, b in pairs)
    print(f'smoke scale, nothing to compare; scale = "demo" prints the differences of {said}, drawn too')
    for run in runs[runs.arm.isin(["static 8", "ER"]) & (runs.preset == "ours")].itertuples():
        if (run.dataset, run.model) in BANDS:
            value, name = BANDS[run.dataset, run.model]
            in_band(f"{name} {run.arm}", getattr(run, value))


def brief(table: pd.DataFrame) -> None:
    """Print a table of several lines without the columns that say the same in all of them; these follow in words.

    Left out are columns without a name, and those that say nothing there (``SILENT``).
    """
    same = [name for name in table if table[name].nunique(dropna=False) == 1]
    print(terminal(table.drop(columns=same)))
    values = {name: table[name].iloc[0] for name in same if name}
    said = [f"{name} {value}" for name, value in values.items() if SILENT.get(name) != value]
    if said:
        print("in every line: " + "; ".join(said))
