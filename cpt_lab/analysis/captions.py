"""Captions of figures: data set, network, length of training, seeds, and the quality at full bits.  Needs no torch."""

import warnings
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.analysis import levels
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.run_groups import AGGREGATIONS, title_of
from cpt_lab.analysis.run_table import _recipe_key as recipe_key
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe

# training images of data sets whose recipes take all of them; held-out images are taken from these
TRAIN_IMAGES = {
    "cifar10": 50_000,
    "cifar10-jpeg": 50_000,
    "cifar100": 50_000,
    "imagenet": 1_281_167,
}
SMOKE_WARNING = "smoke scale: not a result. "


def caption(runs: pd.DataFrame, stored: pd.DataFrame | None = None) -> str:
    """Return the caption of an experiment's figure, such as "ResNet-8 on ...; 4 seeds; static 8 reaches 75.4 %".

    Args:
        runs: of one experiment, those that are drawn; of several q_max the largest counts for the level.
        stored: all of its runs, among which the lost ones are counted; None when all are drawn.
    """
    first = runs.iloc[0]
    seeds = ", ".join([seeds_text(runs), f"{first['scale']} scale"])
    parts = [
        f"{title_of(runs)}: {training(runs)}",
        seeds,
        *_levels(runs),
        *_early_ends(runs),
    ]
    lost = lost_text(runs if stored is None else stored)
    return "; ".join([*parts, lost] if lost else parts)


def warned(finding: str, runs: pd.DataFrame) -> str:
    """Return a finding, after a warning when the runs are at smoke scale."""
    return f"{SMOKE_WARNING}{finding}" if (runs["scale"] == "smoke").any() else finding


def seeds_text(runs: pd.DataFrame) -> str:
    """Return how many seeds the arms of an experiment have, such as "4 seeds" or "2 to 3 seeds"."""
    seeds = runs.groupby(["recipe", "q_max", "arm"])["seed"].nunique()
    fewer = f"{seeds.min()} to " if seeds.min() < seeds.max() else ""
    return f"{fewer}{plural(seeds.max(), 'seed')}"


def lost_text(runs: pd.DataFrame) -> str:
    """Return how many runs diverged or failed; "" when none did. Means count those that diverged at chance."""
    lost = int((runs["diverged"] | (runs["status"] == "failed")).sum())
    return f"{plural(lost, 'run')} diverged or failed" if lost else ""


def training(runs: pd.DataFrame) -> str:
    """Return the steps of the training, with its epochs where all runs have one length and a declared recipe."""
    first = runs.iloc[0]
    shortest, longest = int(runs["total_steps"].min()), int(runs["total_steps"].max())
    if shortest < longest:
        return f"{shortest:,} to {longest:,} steps"
    declared = declared_recipe(first)
    epochs = _epochs(declared) if declared else ""
    return f"{shortest:,} steps ({epochs})" if epochs else f"{shortest:,} steps"


def declared_recipe(run: pd.Series) -> Recipe | None:
    """Return the declared recipe of a run, with its own steps; None when the run changed anything else in it."""
    try:
        found = recipe(
            run["scale"], run["dataset"], run["model"], run["preset"], run["task"]
        )
    except ValueError:
        return None
    names = {f.name for f in fields(found)}
    known: dict[str, Any] = {
        name: int(run[name])
        for name in ("q_min", "n_cycles", "fanout")
        if name in names and pd.notna(run[name])
    }
    if "aggregation" in names:
        known["aggregation"] = run["aggregation"]
    found = replace(found, **known, steps=int(run["total_steps"]))
    same = (
        recipe_key(found.to_dict(), "steps", "milestones", "evaluate_every")
        == run["recipe_but_length"]
    )
    return found if same else None


def _epochs(declared: Recipe) -> str:
    """Return the epochs or passes of a recipe, such as "10 epochs"; "" where the size of its data is not declared."""
    images = getattr(declared, "train_images", None)
    if images is None and hasattr(declared, "train_images"):
        images = TRAIN_IMAGES.get(declared.dataset.rstrip("/"), 0)
        images -= getattr(declared, "valid_images", 0) or 0
    if images and images > 0:
        epochs = declared.steps * declared.batch / images
        return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"
    text = levels.training_text(declared)
    return "" if text.endswith(" steps") else text.partition(" of ")[0]


def _levels(runs: pd.DataFrame) -> list[str]:
    """Return what full bits reach, one sentence for every aggregation."""
    full = levels.full_bits(runs[runs["q_max"] == runs["q_max"].max()])
    if (runs["kind"] == "deficit").all():
        shortest = full[full["total_steps"] == full["total_steps"].min()]
        level = levels.stated("training without a deficit", [levels.reached(shortest)])
        return [level] if level else []
    several = runs["aggregation"].nunique() > 1
    found = []
    for kind, part in full.groupby("aggregation"):
        level = levels.stated(f"static {part['q_max'].iloc[0]}", [levels.reached(part)])
        if level:
            found.append(f"{level} with {AGGREGATIONS[kind]}" if several else level)
    return found


def _early_ends(runs: pd.DataFrame) -> list[str]:
    """Return which schedules end below q_max, as their cycles are too short for the steep end of their profile."""
    suite = runs[runs["arm"].isin(SUITE) & (runs["kind"] == "cyclic")]
    columns = ["arm", "q_min", "q_max", "total_steps", "n_cycles"]
    arms: dict[tuple[int, int], list[str]] = {}
    for line in suite[columns].drop_duplicates().itertuples():
        with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
            schedule = make_schedule(
                str(line.arm),
                q_min=int(line.q_min),
                q_max=int(line.q_max),
                total_steps=int(line.total_steps),
                n_cycles=int(line.n_cycles),
            )
        last = schedule(schedule.total_steps - 1)
        if last < line.q_max:
            arms.setdefault((int(line.q_max), int(last)), []).append(line.arm)
    several = runs["q_max"].nunique() > 1
    found = []
    for (q_max, last), names in sorted(arms.items(), reverse=True):
        where = f" at q_max {q_max}" if several else ""
        found.append(
            f"{', '.join(dict.fromkeys(names))} end at {last} bits{where}, as their cycles are short"
        )
    return found
