"""Predictors of a schedule's quality before training: numbers, table, figure.  Paper: section 4.5."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cpt_lab.analysis.estimates import INCONCLUSIVE
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.run_groups import (
    at_q_max,
    quality_cost_groups,
    title_of,
    with_unique_names,
)
from cpt_lab.analysis.statistics import ALPHA, check_one_run_per_seed, spearman
from cpt_lab.analysis.style import COLORS, SMALL_FONT_SIZE, interval_bar, subplots

# name -> expected sign of the correlation with quality
PREDICTORS = {
    "relative_cost": 1,
    "noise_exposure": -1,
    "share_at_q_min": -1,
}
PREDICTOR_NAMES = {
    "relative_cost": "cost",
    "noise_exposure": "noise exposure",
    "share_at_q_min": "share of steps at q_min",
}


def rank_correlation(
    runs: pd.DataFrame,
    metric: str | None = None,
    *,
    static: bool = False,
    resamples: int = 2000,
    alpha: float = ALPHA,
) -> pd.DataFrame:
    """Return the rank correlation over arms of mean quality with cost, noise exposure and share of steps at q_min.

    The strength is Spearman's correlation with the sign turned so that the expected direction counts as positive:
    quality rises with cost, falls with noise and with time at q_min.

    Intervals are a bootstrap that resamples arms and seeds together, as the claim is about schedules in general, not
    about these ten. Of seeds alone a single other schedule would leave them. They are NaN for one seed.

    Args:
        runs: of one experiment; of several q_max the largest counts. The ten schedules and static q_max take part, on
            the seeds that all of them have (on all seeds, without an interval, if there is no such one).
        metric: None takes the main one of the task.
        static: all static precisions from q_min on take part as well.
        resamples: of the bootstrap.
        alpha: intervals hold 1 - alpha of the resamples.

    Returns:
        One line per predictor: strength, low, high, and against cost: difference, difference_low, difference_high;
        arms, seeds (those that all arms have), diverged (runs, which count with the worst value of the task).

    Raises:
        ValueError: for fewer than three arms, and for two runs of an arm with one seed.

    Paper: section 4.5 (cost and quality correlate); the other predictors are not in the paper.
    """
    metric = metric or metric_of(runs)
    runs = at_q_max(runs, None)
    bits = runs["arm"].str.extract(r"^static (\d+)$")[0].astype("Int64")
    is_used = (bits >= runs["q_min"]) if static else (bits == runs["q_max"])
    runs = runs[
        runs["savings"].isin(["large", "medium", "small"]) | is_used.fillna(False)
    ]
    check_one_run_per_seed(runs)
    wide = runs.pivot_table(index="arm", columns="seed", values=metric)
    if len(wide) < 3:
        raise ValueError(
            f"a rank correlation needs at least three arms, there are {len(wide)}"
        )
    common = wide.dropna(axis=1)  # arms are compared on the seeds that all of them have
    values = (
        metric_named(metric).better * (common if common.shape[1] else wide).to_numpy()
    )
    first = runs.groupby("arm")[list(PREDICTORS)].first().loc[wide.index]
    xs = first.to_numpy().T * np.array([list(PREDICTORS.values())]).T
    strength = spearman(xs, np.nanmean(values, axis=1))
    sampled = np.full((len(xs), 1), np.nan)
    if common.shape[1] > 1 and np.ptp(values):
        rng = np.random.default_rng(0)
        arms = rng.integers(len(values), size=(resamples, len(values)))
        seeds = rng.integers(values.shape[1], size=(resamples, 1, values.shape[1]))
        quality = values[arms[:, :, None], seeds].mean(-1)
        sampled = np.array([spearman(x[arms], quality) for x in xs])
    low, high = _bounds(sampled, alpha)
    difference_low, difference_high = _bounds(sampled - sampled[0], alpha)
    return pd.DataFrame(
        {
            "predictor": list(PREDICTORS),
            "strength": strength,
            "low": low,
            "high": high,
            "difference": strength - strength[0],
            "difference_low": difference_low,
            "difference_high": difference_high,
            "arms": len(values),
            "seeds": common.shape[1],
            "diverged": int(runs["diverged"].sum()),
        }
    )


def _bounds(sampled: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """Return the interval of every line of resamples (2, lines).

    Resamples in which all arms are equal are NaN and left out; a line of NaN alone stays NaN.
    """
    if np.isnan(sampled).all():
        return sampled[:, [0, 0]].T
    percentiles = [100 * alpha / 2, 100 - 100 * alpha / 2]
    return np.nanpercentile(sampled, percentiles, axis=1)


def predictors(
    runs: pd.DataFrame,
    metric: str | None = None,
    *,
    static: bool = False,
    alpha: float = ALPHA,
) -> pd.DataFrame:
    """Return ``rank_correlation`` with a verdict about every predictor: is it better than cost?

    The rule, written down before the seeds that test it were run:

    - An experiment is one recipe at one q_max; it needs ten arms and two seeds.
    - A predictor is "better" than cost in an experiment when the 95 % interval of its strength minus that of cost lies
      above 0, "worse" when it lies below, else "inconclusive".
    - It is the better predictor of quality when it is better than cost in at least two domains and worse in none.

    Each verdict is about one experiment; ``claims`` tests several experiments together, by stricter rules. In the
    paper's suite cost has hardly more than three levels, and inside the medium group its small differences run against
    noise: correlations over these ten schedules with cost and noise are partly a property of the suite.

    Raises:
        ValueError: for fewer than ten arms or two seeds, and when all arms are equal.
    """
    correlations = rank_correlation(runs, metric, static=static, alpha=alpha)
    arms, seeds = correlations["arms"].iloc[0], correlations["seeds"].iloc[0]
    if arms < 10 or seeds < 2:
        raise ValueError(
            f"ten arms and two seeds are needed, there are {arms} and {seeds}"
        )
    if correlations["strength"].isna().all():
        raise ValueError(
            f"all arms have the same {metric or metric_of(runs)}; there is nothing to rank"
        )
    verdicts = np.select(
        [correlations["difference_low"] > 0, correlations["difference_high"] < 0],
        ["better", "worse"],
        INCONCLUSIVE,
    )
    return correlations.assign(verdict=verdicts)


def predictors_by_title(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return ``predictors`` of every experiment that is large enough, by its title.

    If two experiments have the same title, both are listed by their full names.
    """
    results = {}
    for name, group in with_unique_names(quality_cost_groups(runs)):
        try:
            results[name] = (
                f"{title_of(group)}, {group['scale'].iloc[0]} scale",
                predictors(group),
            )
        except ValueError:  # too few arms or seeds
            continue
    titles = Counter(title for title, _ in results.values())
    return {
        title if titles[title] == 1 else name: frame
        for name, (title, frame) in results.items()
    }


def summary(results: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a printable form of ``predictors_by_title``: a line per experiment and predictor."""
    value_columns = ["rank correlation [95 %]", "minus that of cost [95 %]"]
    columns = [
        "experiment",
        "predictor",
        *value_columns,
        "verdict",
        "arms",
        "seeds",
        "diverged",
    ]
    lines = []
    # The short name ends at the first comma outside of brackets.
    short = {name: re.split(r",(?![^(]*\))", name)[0] for name in results}
    for name, frame in results.items():
        title = short[name] if list(short.values()).count(short[name]) == 1 else name
        for r in frame.itertuples():
            cost = r.predictor == "relative_cost"
            against = (
                ""
                if cost
                else interval_text(r.difference, r.difference_low, r.difference_high)
            )
            strength = interval_text(r.strength, r.low, r.high)
            verdict = "" if cost else r.verdict
            lines.append(
                (
                    title,
                    PREDICTOR_NAMES[r.predictor],
                    strength,
                    against,
                    verdict,
                    r.arms,
                    r.seeds,
                    r.diverged,
                )
            )
    return pd.DataFrame(lines, columns=columns)


def correlation_figure(results: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the rank correlation of cost and quality over the ten schedules, an interval per experiment.

    Args:
        results: ``predictors_by_title`` of runs.

    Paper: section 4.5 (cost and quality correlate in the majority of domains).
    Differs: the paper gives no coefficient; coefficients and intervals are ours.
    """
    lines = [
        (name, frame.set_index("predictor").loc["relative_cost"])
        for name, frame in results.items()
    ]
    lines.sort(key=lambda line: line[1].strength)
    names = [textwrap.fill(name.removesuffix(" scale"), 48) for name, _ in lines]
    positive = sum(line.strength > 0 for _, line in lines)
    significant = sum(line.low > 0 for _, line in lines)
    title = f"Quality rises with cost in {positive} of {len(lines)} experiments; intervals exclude 0 in {significant}"
    with subplots(1, 1, figsize=(9, 0.5 * len(lines) + 1.2)) as (figure, ((ax,),)):
        for y, (_, line) in enumerate(lines):
            interval_bar(
                ax,
                y,
                (line.strength, line.low, line.high),
                color=COLORS["static"],
                capsize=3,
            )
        ax.axvline(0, color="#888888", linewidth=0.8)
        ax.set_yticks(range(len(lines)), names, fontsize=SMALL_FONT_SIZE)
        ax.set(xlim=(-1.05, 1.05), ylim=(-0.6, len(lines) - 0.4))
        ax.set_xlabel("rank correlation of cost and quality, 95 % interval")
        figure.suptitle(title, fontsize=11)
    return figure


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the table of predictors over all experiments that are large enough."""
    results = predictors_by_title(runs)
    if results:
        note = (
            "Positive in the expected direction: quality rises with cost, falls with noise and with time at q_min. "
            "Every line stands for itself; the claims above test all of them together. In the paper's suite cost has "
            "three levels and little between them, so that these ten schedules can hardly tell cost from noise."
        )
        name = "What predicts the quality of a schedule?"
        yield Section(name, (note,), table=summary(results), style="left")
