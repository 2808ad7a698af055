"""Sections of the paper compared with stored runs: settings, figures, claims and printed numbers.  No torch.

``SECTIONS`` lists the sections that need training runs, each with its notebook. For each of them

- ``settings_table`` compares the paper's settings with those of runs and marks every difference,
- ``claims_table`` has the measured effect of every claim, its data, the quality of its baseline, and the verdict,
- ``printed_table`` has every number that the paper prints and the nearest measured value.

Notebooks 03 to 08, the pages under ``docs/reproducing``, ``make reproduce`` and ``cpt report`` show these tables.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_core.validation import check_choice
from cpt_lab.analysis import claims, paper_comparison, paper_numbers
from cpt_lab.analysis.effects import MIN_SEEDS, Effect
from cpt_lab.analysis.estimates import INCONCLUSIVE, NOT_RUN
from cpt_lab.analysis.figure_data import best_rows as best_rows
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.run_table import committed
from cpt_lab.experiments.registry import DATASETS, deficits, recipe
from cpt_lab.experiments.schema import CYCLIC_RULES, SCALES, Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.experiments.stand_ins import STAND_IN_TITLES

DIFFERENCE_MARK = "≠"


@dataclass(frozen=True)
class PaperSection:
    """A section of the paper that needs training runs.

    Attributes:
        number: its notebook, such as "03".
        title: its heading.
        place: section and figures in the paper.
        artefacts: its figures and tables as ``data/paper/numbers.csv`` and the grids name them.
        claims: pattern of the claims in ``data/paper/claims.csv`` that belong to it, for their id and task.
        settings: data sets and models of the paper whose settings are shown.
    """

    number: str
    title: str
    place: str
    artefacts: tuple[str, ...]
    claims: str
    settings: tuple[tuple[str, str], ...] = ()


# A claim belongs to the first section whose pattern matches it.
SECTIONS: dict[str, PaperSection] = {
    "critical-periods": PaperSection(
        "07",
        "Critical learning periods",
        "section 5, figure 8, table 1",
        ("table_1", "figure_8"),
        "deficit",
        (("cifar10", "resnet74"), ("imagenet", "resnet18"), ("ogbn-arxiv", "gcn")),
    ),
    "detection": PaperSection(
        "04",
        "Object detection",
        "section 4.2, figure 4",
        ("figure_4",),
        "detection",
        (("voc2012", "retinanet"),),
    ),
    "entailment": PaperSection(
        "06",
        "Entailment",
        "section 4.4, figure 7 right",
        ("figure_7",),
        "entailment",
        (("xnli", "bert"),),
    ),
    "language": PaperSection(
        "06",
        "Language modelling",
        "section 4.4, figure 7 left",
        ("figure_7",),
        "language|ptb",
        (("ptb", "lstm"),),
    ),
    "graphs": PaperSection(
        "05",
        "Node classification",
        "section 4.3, figures 5 and 6",
        ("figure_5", "figure_6"),
        "graph|gnn|aggregation",
        (("ogbn-arxiv", "gcn"), ("ogbn-products", "sage")),
    ),
    "images": PaperSection(
        "03",
        "Image classification",
        "section 4.2, figure 3",
        ("figure_3",),
        "image|cifar",
        (("cifar10", "resnet74"), ("imagenet", "resnet18")),
    ),
    "schedules": PaperSection(
        "08", "Choosing a schedule", "sections 3 and 4.5", (), ""
    ),
}


def section_of_claim(claim: claims.Claim) -> str:
    """Return the key of the section of a claim."""
    words = f"{claim.id} {claim.tasks}"
    return next(
        key for key, section in SECTIONS.items() if re.search(section.claims, words)
    )


# --- settings -----------------------------------------------------------------------------------------

_SHOWN_FIRST = {
    "dataset": "data set",
    "model": "network",
    "optimizer": "optimizer",
    "lr": "learning rate",
    "lr_decay": "learning-rate decay",
    "weight_decay": "weight decay",
    "batch": "batch",
    "steps": "optimizer steps",
    "q_min": "q_min",
    "q_max": "q_max",
    "q_grad": "bits of gradients",
    "n_cycles": "cycles",
    "seeds": "seeds",
    "arms": "schedules and static bits",
}
_LABELS = {
    "clip": "gradient clipping (norm)",
    "crop": "crop padding (pixels)",
    "evaluate_every": "evaluation interval (steps; 0: at the end only)",
    "hidden": "hidden units",
    "length": "sequence length",
    "size": "image size (pixels)",
}
# Fields about the computation or monitoring of a run, and fields that are part of another line.
_NOT_SHOWN = {
    "task",
    "seeds",
    "milestones",
    "lr_rule",
    "final_lr",
    "momentum",
    "lr_division",
    "learning_rates",
}
_OPTIMIZERS = {
    "image": "SGD",
    "detection": "Adam",
    "graph": "Adam",
    "language_model": "SGD",
    "entailment": "AdamW",
}


def settings_table(
    topic: str, specs: Sequence[RunSpec], figure_specs: Sequence[RunSpec] = ()
) -> pd.DataFrame:
    """Return the settings of the paper and of runs, a line per setting; differences are marked with "≠".

    The values come from the recipes. The paper's are those of its text, corrected where a ``Differs:`` line of the
    recipe says so; for critical periods they are those of the authors' code. After the main settings follow all
    fields of the recipes that differ.

    Args:
        topic: a key of ``SECTIONS``.
        specs: the runs of this notebook, of one task; without any they have no column.
        figure_specs: the runs of the figure below, of the same task; without any they have no column.

    Returns:
        Columns: setting, one per data set of the paper that has this task, "figure below", "this run". A mark says that
        a value differs from the paper's column of the same network, or from the first one.

    Raises:
        ValueError: for an unknown topic, without any runs, and for a task that the section does not have.
    """
    section = SECTIONS[check_choice("topic", topic, SECTIONS)]
    all_specs = [*figure_specs, *specs]
    if not all_specs:
        raise ValueError("specs: expected at least one run here or in drawn, got none")
    task, model = all_specs[0].recipe.task, all_specs[0].recipe.model
    paper_columns, reference = {}, None
    for dataset, name in section.settings:
        paper_recipe, arms = _paper_recipe(topic, dataset, name)
        if paper_recipe.task != task:
            continue
        values = _settings([paper_recipe], None) | arms
        paper_columns[f"paper: {DATASETS[dataset].title}"] = values
        if reference is None or paper_recipe.model == model:
            reference = values
    if reference is None:
        raise ValueError(
            f"topic: {topic!r} of the paper has no experiment of task {task!r}"
        )

    run_columns = {}
    if figure_specs:
        recipes = [spec.recipe for spec in figure_specs]
        run_columns["figure below"] = _settings(recipes, figure_specs)
    if specs:
        recipes = [spec.recipe for spec in specs]
        run_columns["this run"] = _settings(recipes, specs)

    lines = []
    for name in _setting_names(reference, run_columns.values()):
        paper_values = [values[name] for values in paper_columns.values()]
        measured = [
            _mark_difference(values[name], reference[name])
            for values in run_columns.values()
        ]
        label = _SHOWN_FIRST.get(name) or _LABELS.get(name) or name.replace("_", " ")
        lines.append((label, *paper_values, *measured))
    return pd.DataFrame(lines, columns=["setting", *paper_columns, *run_columns])


def _setting_names(
    reference: dict[str, str], columns: Iterable[dict[str, str]]
) -> list[str]:
    """Return the settings to show: the main ones, then all others in which a column differs from the reference."""
    columns = list(columns)
    names = list(_SHOWN_FIRST)
    for name, printed in reference.items():
        is_different = any(column[name] != printed for column in columns)
        if name not in _SHOWN_FIRST and is_different:
            names.append(name)
    return names


def _paper_recipe(
    topic: str, dataset: str, model: str
) -> tuple[Recipe, dict[str, str]]:
    """Return the paper's recipe of a section, and the settings of its runs if they are deficits, not schedules."""
    if topic != "critical-periods":
        return recipe("paper", dataset, model), {}
    deficit_recipe, settings = deficits("paper", dataset, model)
    steps = [f"{length:,}" for length in settings.lengths if length]
    arms = f"no deficit, deficits of {', '.join(steps)} steps"
    if settings.starts:
        arms += f", {plural(len(settings.starts), 'window')}"
    return deficit_recipe, {"q_max": "8", "arms": arms}


def _mark_difference(value: str, printed: str) -> str:
    return value if value == printed else f"{value} {DIFFERENCE_MARK}"


def _settings(
    recipes: Iterable[Recipe], specs: Sequence[RunSpec] | None
) -> dict[str, str]:
    """Return all settings of recipes in words, several values as a list; without specs those of the paper's runs."""
    recipes = list(dict.fromkeys(recipes))
    words: dict[str, str] = dict.fromkeys(_SHOWN_FIRST, "")
    for field in fields(recipes[0]):
        if field.name not in _NOT_SHOWN:
            values = [_text(getattr(r, field.name), field.name) for r in recipes]
            words[field.name] = _join_values(values)
    batches = ["full graph" if r.batch == 0 else f"{r.batch:,}" for r in recipes]
    words["dataset"] = _join_values(_dataset(r.dataset) for r in recipes)
    words["optimizer"] = _join_values(_optimizer(r) for r in recipes)
    words["lr"] = _join_values(_rates(r) for r in recipes)
    words["lr_decay"] = _join_values(_decay(r) for r in recipes)
    words["batch"] = _join_values(batches)
    if specs is None:
        return words | {
            "q_max": "6, 8",
            "q_grad": "q_max",
            "seeds": "3",
            "arms": "10 schedules, static q_max",
        }
    return words | _run_settings(specs)


def _run_settings(specs: Sequence[RunSpec]) -> dict[str, str]:
    """Return the settings of runs that their recipes do not have: bits, seeds and arms."""
    schedules = dict.fromkeys(spec.arm for spec in specs if spec.arm in SUITE)
    other_arms = dict.fromkeys(spec.arm for spec in specs if spec.arm not in SUITE)
    static = [
        arm.removeprefix("static ") for arm in other_arms if arm.startswith("static ")
    ]
    is_static_q_max = all(
        spec.arm in SUITE or spec.arm == f"static {spec.q_max}" for spec in specs
    )
    if static and is_static_q_max:
        static = ["q_max"]
    num_deficit_arms = sum(not arm.startswith("static ") for arm in other_arms)

    q_max = sorted({spec.q_max for spec in specs})
    q_grad = "q_max"
    if any(spec.q_grad != spec.q_max for spec in specs):
        q_grad = _join_values(str(spec.q_grad) for spec in specs)
    return {
        "q_max": _join_values(map(str, q_max)),
        "q_grad": q_grad,
        "seeds": _seeds(specs),
        "arms": _arms(list(schedules), static, num_deficit_arms),
    }


def _seeds(specs: Sequence[RunSpec]) -> str:
    """Return the number of seeds of the arms, such as "4" or "5 to 8"."""
    seeds_by_arm: dict[tuple[str, int], set[int]] = {}
    for spec in specs:
        seeds_by_arm.setdefault((spec.arm, spec.q_max), set()).add(spec.seed)
    counts = [len(seeds) for seeds in seeds_by_arm.values()]
    min_seeds, max_seeds = min(counts), max(counts)
    if min_seeds == max_seeds:
        return str(min_seeds)
    return f"{min_seeds} to {max_seeds}"


def _arms(schedules: list[str], static: list[str], num_deficit_arms: int) -> str:
    schedule_text = (
        ", ".join(schedules)
        if len(schedules) < len(SUITE)
        else f"{len(SUITE)} schedules"
    )
    parts = [schedule_text] if schedules else []
    if static:
        parts.append(
            f"static {', '.join(sorted(static, key=lambda bits: (len(bits), bits)))}"
        )
    if num_deficit_arms:
        parts.append(plural(num_deficit_arms, "arm") + " with and without a deficit")
    return ", ".join(parts)


def _dataset(name: str) -> str:
    if name in DATASETS:
        return DATASETS[name].title
    return STAND_IN_TITLES.get(name, f"own data ({name.rstrip('/')})")


def _optimizer(r: Recipe) -> str:
    if getattr(r, "optimizer", "") == "adamw":
        return "AdamW"
    momentum = getattr(r, "momentum", 0.0)
    return _OPTIMIZERS[r.task] + (f", momentum {momentum:g}" if momentum else "")


def _rates(r: Recipe) -> str:
    rates = getattr(r, "learning_rates", ()) or (r.lr,)
    return " or ".join(f"{rate:g}" for rate in rates)


def _decay(r: Recipe) -> str:
    rule = getattr(r, "lr_rule", "")
    final = getattr(r, "final_lr", None)
    if rule == "plateau":
        return f"divided by {r.lr_division:g} after an epoch without progress"  # type: ignore[attr-defined]
    if rule == "constant":
        return "none"
    if rule == "wsd":
        return "rises from 0 in the first 5 %, falls to 0 in the last 20 %"
    if rule == "step":
        shares = "80 and 90" if r.task == "language_model" else "50 and 75"
        return f"a tenth at {shares} %"
    if rule in CYCLIC_RULES:
        change = "rises from 0" if rule == "cyclic_rising" else "falls to 0"
        return f"{change} in every cycle"
    if rule == "milestones":
        shares = " and ".join(f"{100 * share:g}" for share in r.milestones)  # type: ignore[attr-defined]
        return f"a tenth at {shares} %" if shares else "none"
    if rule == "cosine":
        return "cosine to 0" if final is None else f"cosine to {final:g} of it"
    if rule:
        raise ValueError(f"lr_rule: no words for {rule!r}")

    # Recipes without a rule have a constant rate or a line to ``final_lr``.
    return "none" if final is None else f"linear to {final:g} of it"


def _text(value: object, name: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none" if name == "clip" else "all"
    if value == "":
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "–"
    return str(value)


def _join_values(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


# --- claims -------------------------------------------------------------------------------------------

CLAIM_COLUMNS = ["the paper says", "measured", "data and scale", "baseline", "verdict"]


def claims_table(topic: str, runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the claims of a section with their measured effects, a line per claim.

    Args:
        topic: a key of ``SECTIONS``.
        runs: None uses all committed rows.

    Returns:
        Columns: "the paper says" with its place; "measured", the effect in the direction of the claim with its 95 %
        interval and n, from the most informative experiment; "data and scale"; "baseline", the quality of static q_max
        (or of training without a deficit) there; "verdict" by the rules of ``claims``, over all experiments.
    """
    check_choice("topic", topic, SECTIONS)
    if runs is None:
        return _claims_table(topic, _committed_entries(topic))
    return _claims_table(topic, claims.judge_claims(runs, only=_claim_ids(topic)))


def claims_tables(entries: Sequence[claims.Entry]) -> dict[str, pd.DataFrame]:
    """Return ``claims_table`` of every section, from judged claims."""
    return {topic: _claims_table(topic, entries) for topic in SECTIONS}


def _claims_table(topic: str, entries: Iterable[claims.Entry]) -> pd.DataFrame:
    lines = []
    for entry in entries:
        if section_of_claim(entry.claim) == topic:
            place = entry.claim.place.partition(";")[0]
            lines.append((f"{entry.claim.claim} ({place})", *_measured(entry)))
    return pd.DataFrame(lines, columns=CLAIM_COLUMNS)


@cache
def _committed_entries(topic: str) -> list[claims.Entry]:
    """Return the claims of a section judged by the committed rows."""
    return claims.judge_claims(committed(), only=_claim_ids(topic))


def _claim_ids(topic: str) -> list[str]:
    """Return the ids of the claims of a section; corrections are within a claim."""
    return [c.id for c in claims.claims() if section_of_claim(c) == topic]


class _Measured(NamedTuple):
    """Cells of ``claims_table`` after the claim."""

    effect: str
    data_and_scale: str
    baseline: str
    verdict: str


def _measured(entry: claims.Entry) -> _Measured:
    """Return effect, data and scale, baseline and verdict of a claim, from its most informative experiment."""
    if not entry.effects:
        return _Measured("–", _needs(entry.claim), "–", NOT_RUN)
    effects = [effect for effect, _ in entry.effects]
    if effects[0].scale == "exact":
        verdict = entry.verdict(paper_scale=True)
        return _Measured(effects[0].comparison, "computed", "–", verdict)

    effect = max(effects, key=_effect_relevance)
    numbers = [part.number() for part in (effect, *effect.other_controls)]
    data_and_scale = f"{effect.experiment}, {effect.scale} scale"
    num_others = len(effects) - 1
    if num_others:
        data_and_scale += f" (and {plural(num_others, 'other experiment')})"
    at_paper, smaller = entry.verdicts()
    is_undecided = at_paper.startswith((INCONCLUSIVE, NOT_RUN))
    words = smaller if is_undecided else at_paper
    verdict = words.partition(": ")[0]
    return _Measured(
        "; ".join(numbers), data_and_scale, effect.baseline or "–", verdict
    )


def _needs(claim: claims.Claim) -> str:
    return claims.needs(claim).removeprefix("Not run: ").removesuffix(".")


def _effect_relevance(effect: Effect) -> tuple[bool, int, bool, int]:
    """Return the sort key of an effect by its information: enough seeds for an interval, scale, real data, seeds."""
    is_embedded = effect.dataset in DATASETS and bool(DATASETS[effect.dataset].embedded)
    return (
        effect.n >= MIN_SEEDS,
        SCALES.index(effect.scale),
        not is_embedded,
        effect.n,
    )


# --- printed numbers ------------------------------------------------------------------------------------


def printed_table(topic: str = "", runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the numbers that the paper prints, each with the nearest measured value.

    Args:
        topic: a key of ``SECTIONS``; "" for all numbers.
        runs: None uses all committed rows.
    """
    all_runs = committed() if runs is None else runs
    numbers = paper_numbers.numbers()
    if topic:
        section = SECTIONS[check_choice("topic", topic, SECTIONS)]
        datasets = {dataset for dataset, _ in section.settings}
        is_artefact = numbers["artefact"].isin(section.artefacts)
        numbers = numbers[is_artefact & numbers["dataset"].isin(datasets)]
    return paper_comparison.summary(all_runs, numbers)
