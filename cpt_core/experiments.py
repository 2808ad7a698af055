"""Experiments in the rows and what they say: critical periods, equal cost, predictors.  Paper: sections 4.5 and 5.

Everything here takes result rows and returns tables; it needs no torch.

>>> experiments([])
[]
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd

from cpt_core.paths import paper_dir
from cpt_core.results import at_q_max, interval, measure_of, metric_of, recipe_key, spearman, table, tuned
from cpt_core.stores import Row


def experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Split rows into experiments of quality against cost: one recipe, one preset, one q_max; paper scale first.

    Runs of critical periods (``deficits``) and of ``equal_cost`` are left out.
    """
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        spec = row["spec"]
        if spec["schedule"]["kind"] != "deficit" and not EQUAL_COST_ARM.search(spec["arm"]):
            key = (recipe_key(spec["recipe"]), spec["preset"], spec["q_max"], spec["scale"])
            groups.setdefault(key, []).append(row)
    return sorted(groups.values(), key=lambda rows: rows[0]["spec"]["scale"] != "paper")


def _without_length(row: Row) -> str:
    """What the runs of a critical-period or equal-cost experiment share: all but the length of training."""
    spec = row["spec"]
    recipe = {k: v for k, v in spec["recipe"].items() if k not in ("steps", "milestones", "evaluate_every")}
    return json.dumps([recipe, spec["preset"], spec["q_max"], spec["scale"]], sort_keys=True)


def deficit_experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Split off the rows of critical-period experiments, one list for each: one recipe but for its length."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["spec"]["schedule"]["kind"] == "deficit":
            groups.setdefault(_without_length(row), []).append(row)
    return sorted(groups.values(), key=lambda rows: rows[0]["spec"]["scale"] != "paper")


def deficits(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Return one line per arm of a critical-period experiment, each compared with its control, by seed.

    The control of an arm is the training of the same length, with the same learning rates, at q_max throughout.

    Args:
        rows: of one such experiment (``deficit_experiments``).
        metric: None takes the main one of the task.

    Returns:
        Columns: experiment ("length": low steps at the start make training longer; "window": they lie within a fixed
        length), arm, recipe (as in ``table``), place ("none", "start", "inside", "end"), start, stop, total (steps);
        mean, std, n and diverged runs; difference to the control with low and high (95 %, paired), worse (seeds below
        the control); paper_arm, the name in the paper's table 1.

    Paper: section 5, figure 8, table 1.
    """
    rows = list(rows)
    metric = metric or metric_of(rows)
    runs = table(rows)
    if metric not in runs:
        runs[metric] = float("nan")
    spans = [row["spec"]["schedule"].get("windows", [None, None]) for row in rows]
    if any(len(s) > 1 for s in spans):
        raise ValueError("rows of deficits with at most one window are needed")
    runs["start"] = [s[0][0] if s else 0 for s in spans]
    runs["stop"] = [s[0][1] if s else 0 for s in spans]
    runs["total"] = [row["spec"]["schedule"]["total_steps"] for row in rows]
    better = measure_of(metric).better
    families = list(runs.groupby("recipe", sort=False))
    is_window = {key: bool(((f.start > 0) & (f.stop < f.total)).any()) for key, f in families}
    # steps after a deficit at the start: those of a training without one, shared by most of these families
    unharmed = {int(f.total.iloc[0]) for _, f in families if (f.stop == 0).any()}
    clean = Counter(int(f.total.iloc[0] - max(f.stop[f.start == 0])) for key, f in families if not is_window[key])
    after = max(clean, key=lambda n: (n in unharmed, clean[n], n)) if clean else 0
    lines = []
    for key, family in families:
        total = int(family.total.iloc[0])
        control = family[family.stop == 0].groupby("seed")[metric].first()
        at_start = int(max(family.stop[family.start == 0], default=0))
        length = not is_window[key] and total - at_start == after
        for arm, part in family.groupby("arm", sort=False):
            start, stop = int(part.start.iloc[0]), int(part.stop.iloc[0])
            values = part.groupby("seed")[metric].first()
            difference = (values - control).dropna() if stop else values.iloc[:0]
            mean, low, high = interval(difference)
            place = "none" if not stop else "start" if not start else "end" if stop == total else "inside"
            experiments_of = ["length"] if length else ["window"]
            if place == "none" and total == after and "length" not in experiments_of:
                experiments_of.append("length")  # training without deficit serves both
            for experiment in experiments_of:
                lines.append(
                    {
                        "experiment": experiment, "arm": arm, "recipe": key, "place": place, "start": start,
                        "stop": stop, "total": total, "mean": values.mean(), "std": values.std(),
                        "n": int(values.count()),
                        "diverged": int((part.status == "diverged").sum()), "difference": mean, "low": low,
                        "high": high, "worse": int((better * difference < 0).sum()),
                        "paper_arm": _paper_arm(experiment, place, str(arm), total == after),
                    }
                )  # fmt: skip
    out = pd.DataFrame(lines)
    return out.sort_values(["experiment", "total", "start", "stop"], kind="stable").reset_index(drop=True)


def _paper_arm(experiment: str, place: str, arm: str, shortest: bool) -> str:
    """The name of an arm in the paper's table 1; controls and ends are ours."""
    if place == "none":
        return "no deficit" if experiment == "length" and shortest else ""
    if (place == "start") == (experiment == "length") and place != "end":
        return arm.split(" of ")[0]
    return ""


def table_1(rows: Iterable[Row], metric: str | None = None) -> pd.DataFrame:
    """Put a critical-period experiment beside table 1 of the paper: the columns of ``deficits``, in percent, and paper.

    ``paper`` is NaN where the paper has no such number, which is everywhere but at paper scale.

    Paper: table 1.
    """
    rows = list(rows)
    metric = metric or metric_of(rows)
    found = deficits(rows, metric)
    scaled = ["mean", "std", "difference", "low", "high"]
    found[scaled] *= measure_of(metric).factor
    spec = rows[0]["spec"]
    paper = pd.read_csv(paper_dir() / "numbers.csv")
    same = (paper.artefact == "table_1") & (paper.dataset == spec["recipe"]["dataset"])
    same &= (paper.model == spec["recipe"]["model"]) & (paper.metric == metric) & (spec["scale"] == "paper")
    known = paper[same].set_index("arm").value
    found["paper"] = [float(known.get(arm, float("nan"))) for arm in found.paper_arm]
    return found


EQUAL_COST_ARM = re.compile(r"^RR at |delayed [\d.]+ %$|, \d+ of \d+ steps$")


def equal_cost_experiments(rows: Iterable[Row]) -> list[list[Row]]:
    """Pick the rows of equal-cost experiments, one list for each: all arms of its recipe, at any length of training."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["spec"]["schedule"]["kind"] != "deficit":
            groups.setdefault(_without_length(row), []).append(row)
    return [g for g in groups.values() if any(EQUAL_COST_ARM.search(row["spec"]["arm"]) for row in g)]


def equal_cost(rows: Iterable[Row], metric: str | None = None, within: float = 0.05) -> pd.DataFrame:
    """Compare arms that spent the same number of BitOps, by seed.

    Args:
        rows: of one recipe, at any length of training (``grids.equal_cost``).
        metric: None takes the main one of the task.
        within: how much dearer or cheaper than RR an arm may be to be compared with it.

    Returns:
        For each budget (RR, or RR bent to a budget) one line per arm: base, arm, spent (BitOps as a share of those of
        the base), mean, std, n; difference to the base in quality, positive when better, with low and high (95 %,
        paired over seeds), better (seeds above the base).
    """
    rows = [row for row in rows if row["status"] == "ok"]
    metric = metric or metric_of(rows)
    runs = table(rows)
    better = measure_of(metric).better
    lines = []
    bases = [a for a in runs["arm"].unique() if re.fullmatch(r"RR( at [\d.]+)?", a)]
    for base in bases:
        reference = runs[runs["arm"] == base].set_index("seed")
        other = runs["arm"].str.startswith("RR") & ~runs["arm"].str.match(rf"{re.escape(base)}( delayed|$)")
        for arm, part in runs[~other].groupby("arm", sort=False):
            part = part.set_index("seed")
            spent = float(part["bitops"].mean() / reference["bitops"].mean())
            if abs(spent - 1) > within:
                continue
            values = part[metric]
            difference = (better * (values - reference[metric])).dropna() if arm != base else values.iloc[:0]
            mean, low, high = interval(difference)
            lines.append(
                {
                    "base": base, "arm": arm, "spent": spent, "mean": values.mean(), "std": values.std(),
                    "n": int(values.count()), "difference": mean, "low": low, "high": high,
                    "better": int((difference > 0).sum()),
                }
            )  # fmt: skip
    if not lines:
        raise ValueError("no rows of RR that others could be compared with; run grids.equal_cost")
    return pd.DataFrame(lines)


PREDICTORS = {"relative_cost": 1, "noise_exposure": -1, "share_at_q_min": -1}  # name -> expected sign


def predictors(
    rows: Iterable[Row], metric: str | None = None, *, static: bool = False, resamples: int = 2000
) -> pd.DataFrame:
    """Return how well cost, noise exposure and share of steps at q_min predict the quality of an arm before training.

    The rule, written down before the seeds that test it were run:

    - An experiment is one recipe at one q_max; the ten schedules and static q_max take part (``static``: all static
      precisions from q_min on as well), with the seeds that all of them have. It needs ten arms and two seeds.
    - The strength of a predictor is Spearman's rank correlation over arms with mean quality, with the sign turned so
      that the expected direction counts as positive: quality rises with cost, falls with noise and with time at q_min.
    - Seeds and arms are resampled together. A predictor is better than cost in an experiment when the 95 % interval of
      its strength minus that of cost lies above 0, worse when it lies below, else undecided.
    - It is the better predictor of quality when it is better than cost in at least two domains and worse in none.

    Args:
        rows: of one experiment.
        metric: None takes the main one of the task.
        static: see above.
        resamples: of the bootstrap.

    Returns:
        One line per predictor: strength, low, high (95 %), and against cost: difference, difference_low,
        difference_high; verdict "better", "worse" or "undecided"; arms, seeds.

    Raises:
        ValueError: for fewer than ten arms or two seeds, and when all arms are alike.

    Paper: section 4.5 (cost and quality correlate); the other predictors are not in the paper.
    """
    rows = tuned(rows)
    metric = metric or metric_of(rows)
    runs = at_q_max(table(rows), None)
    if metric not in runs:
        raise ValueError(f"no run has a {metric}: ten arms and two seeds are needed")
    bits = runs["arm"].str.extract(r"^static (\d+)$")[0].astype("Int64")
    kept = (bits >= runs["q_min"]) if static else (bits == runs["q_max"])
    runs = runs[runs["savings"].isin(["large", "medium", "small"]) | kept.fillna(False)]
    wide = runs.pivot_table(index="arm", columns="seed", values=metric, aggfunc="first").dropna(axis=1)
    if len(wide) < 10 or wide.shape[1] < 2:
        raise ValueError(f"ten arms and two seeds are needed, there are {len(wide)} and {wide.shape[1]}")
    values = measure_of(metric).better * wide.to_numpy()
    n, seeds = values.shape
    if np.ptp(values) == 0:
        raise ValueError(f"all arms have the same {metric}; there is nothing to rank")
    first = runs.groupby("arm")[list(PREDICTORS)].first().loc[wide.index]
    xs = first.to_numpy().T * np.array([list(PREDICTORS.values())]).T
    rng = np.random.default_rng(0)
    arms = rng.integers(n, size=(resamples, n))
    chosen = rng.integers(seeds, size=(resamples, 1, seeds))
    quality = values[arms[:, :, None], chosen].mean(-1)
    strength = [spearman(x, values.mean(1)) for x in xs]
    sampled = np.array([spearman(x[arms], quality) for x in xs])
    lines = []
    for i, name in enumerate(PREDICTORS):
        difference = sampled[i] - sampled[0]
        low, high = np.nanpercentile(sampled[i], [2.5, 97.5])
        d_low, d_high = np.nanpercentile(difference, [2.5, 97.5])
        lines.append(
            {
                "predictor": name, "strength": float(strength[i]), "low": low, "high": high,
                "difference": float(strength[i] - strength[0]), "difference_low": d_low, "difference_high": d_high,
                "verdict": "better" if d_low > 0 else "worse" if d_high < 0 else "undecided",
                "arms": n, "seeds": seeds,
            }
        )  # fmt: skip
    return pd.DataFrame(lines)


def predictors_by_title(rows: Iterable[Row]) -> dict[str, pd.DataFrame]:
    """Return ``predictors`` of every experiment in the rows that is large enough, by what was trained."""
    found = {}
    for group in experiments(rows):
        title = next((row["title"] for row in group if row.get("title")), group[0]["spec"]["recipe"]["model"])
        try:
            found[f"{title}, {group[0]['spec']['scale']} scale"] = predictors(group)
        except ValueError:  # too few arms or seeds
            continue
    return found
