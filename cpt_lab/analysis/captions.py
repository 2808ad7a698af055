"""Captions of figures: data set, network, length of training, seeds, and the quality at full bits.  No torch."""

import warnings
from dataclasses import fields, replace
from typing import Any

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.analysis import baselines
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.run_groups import AGGREGATION_NAMES, gradients_text, title_of
from cpt_lab.analysis.run_table import recipe_key
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe

# Training images of data sets whose recipes use all of them; the held-out images are taken from these.
TRAIN_IMAGES = {
    "cifar10": 50_000,
    "cifar10-jpeg": 50_000,
    "cifar100": 50_000,
    "imagenet": 1_281_167,
}
SMOKE_WARNING = "smoke scale: not a result. "


def caption(runs: pd.DataFrame, all_runs: pd.DataFrame | None = None) -> str:
    """Return the caption of an experiment's figure, such as "ResNet-8 on ...; 4 seeds; static 8 reaches 75.4 %".

    Args:
        runs: the drawn runs of one experiment; with several q_max the quality is that of the largest.
        all_runs: all runs of the experiment, to count those that diverged or failed; None when all are drawn.
    """
    scale = runs.iloc[0]["scale"]
    parts = [
        f"{title_of(runs)}: {training_length(runs)}",
        f"{seeds_text(runs)}, {scale} scale",
        *filter(None, [gradients_text(runs)]),
        *_baselines(runs),
        *_early_ends(runs),
    ]
    losses = lost_text(runs if all_runs is None else all_runs)
    if losses:
        parts.append(losses)
    return "; ".join(parts)


def with_smoke_warning(finding: str, runs: pd.DataFrame) -> str:
    """Return a finding, with a warning in front of it when the runs are at smoke scale."""
    return f"{SMOKE_WARNING}{finding}" if (runs["scale"] == "smoke").any() else finding


def seeds_text(runs: pd.DataFrame) -> str:
    """Return the number of seeds of an experiment's arms, such as "4 seeds" or "2 to 3 seeds"."""
    seeds = runs.groupby(["recipe", "q_max", "arm"])["seed"].nunique()
    fewer = f"{seeds.min()} to " if seeds.min() < seeds.max() else ""
    return f"{fewer}{plural(seeds.max(), 'seed')}"


def lost_text(runs: pd.DataFrame) -> str:
    """Return the number of runs that diverged or failed, in words; "" for none.

    Means count runs that diverged with the worst value of their task (``Experiment.worst``).
    """
    num_lost = int((runs["diverged"] | (runs["status"] == "failed")).sum())
    return f"{plural(num_lost, 'run')} diverged or failed" if num_lost else ""


def training_length(runs: pd.DataFrame) -> str:
    """Return the steps of the training, with its epochs if all runs have one length and a declared recipe."""
    first = runs.iloc[0]
    shortest, longest = int(runs["total_steps"].min()), int(runs["total_steps"].max())
    if shortest < longest:
        return f"{shortest:,} to {longest:,} steps"

    declared = declared_recipe(first)
    epochs = _epochs(declared) if declared else ""
    steps = f"{shortest:,} steps"
    return f"{steps} ({epochs})" if epochs else steps


def declared_recipe(run: pd.Series) -> Recipe | None:
    """Return the declared recipe of a run, with the run's own steps; None when the run changed any other field."""
    try:
        declared = recipe(
            run["scale"], run["dataset"], run["model"], run["preset"], run["task"]
        )
    except ValueError:
        return None
    names = {f.name for f in fields(declared)}
    run_values: dict[str, Any] = {
        name: int(run[name])
        for name in ("q_min", "n_cycles", "fanout")
        if name in names and pd.notna(run[name])
    }
    if "aggregation" in names:
        run_values["aggregation"] = run["aggregation"]
    declared = replace(declared, **run_values, steps=int(run["total_steps"]))
    is_declared = (
        recipe_key(declared.to_dict(), "steps", "milestones", "evaluate_every")
        == run["recipe_but_length"]
    )
    return declared if is_declared else None


def _epochs(declared: Recipe) -> str:
    """Return the epochs or passes of a recipe, such as "10 epochs"; "" if the size of its data is not declared."""
    images = getattr(declared, "train_images", None)
    if images is None and hasattr(declared, "train_images"):
        images = TRAIN_IMAGES.get(declared.dataset.rstrip("/"), 0)
        images -= getattr(declared, "valid_images", 0) or 0
    if images and images > 0:
        epochs = declared.steps * declared.batch / images
        number = f"{epochs:,.0f}" if epochs >= 10 else f"{epochs:.2g}"
        return f"{number} epochs"

    text = baselines.training_text(declared)
    if text.endswith(" steps"):
        return ""
    return text.partition(" of ")[0]


def _baselines(runs: pd.DataFrame) -> list[str]:
    """Return one sentence per aggregation with the quality that full bits reach."""
    full = baselines.full_bits(runs[runs["q_max"] == runs["q_max"].max()])
    if (runs["kind"] == "deficit").all():
        shortest = full[full["total_steps"] == full["total_steps"].min()]
        quality = baselines.quality_text(shortest)
        text = baselines.baseline_text("training without a deficit", [quality])
        return [text] if text else []

    has_both_aggregations = runs["aggregation"].nunique() > 1
    texts = []
    for kind, part in full.groupby("aggregation"):
        name = f"static {part['q_max'].iloc[0]}"
        text = baselines.baseline_text(name, [baselines.quality_text(part)])
        if text and has_both_aggregations:
            text = f"{text} with {AGGREGATION_NAMES[kind]}"
        if text:
            texts.append(text)
    return texts


def _early_ends(runs: pd.DataFrame) -> list[str]:
    """Return sentences about schedules that end below q_max because their cycles are too short for a steep profile."""
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
    has_several_q_max = runs["q_max"].nunique() > 1
    texts = []
    for (q_max, last), names in sorted(arms.items(), reverse=True):
        where = f" at q_max {q_max}" if has_several_q_max else ""
        texts.append(
            f"{', '.join(dict.fromkeys(names))} end at {last} bits{where}, as their cycles are short"
        )
    return texts
