"""The paper's sections beside what was measured: settings, figures, claims and printed numbers.  Needs no torch.

``SECTIONS`` lists the sections that rest on training runs, each with its notebook. For each of them

- ``settings_table`` puts the paper's settings beside those of a list of runs and marks every difference,
- ``claims_table`` says of every claim what was measured, on which data, at which level of quality, and the verdict,
- ``printed_table`` puts every number that the paper prints beside the nearest value that was measured.

Notebooks 03 to 08, the pages under ``docs/reproducing``, ``make reproduce`` and ``cpt report`` show these tables.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache

import pandas as pd

from cpt_core.schedules.profiles import SUITE
from cpt_core.validation import check_choice
from cpt_lab.analysis import claims, paper_comparison, paper_numbers
from cpt_lab.analysis.effects import LEAST_SEEDS, Effect
from cpt_lab.analysis.figure_data import all_committed
from cpt_lab.analysis.figure_data import best_rows as best_rows
from cpt_lab.analysis.metrics import plural
from cpt_lab.experiments.registry import DATASETS, deficits, recipe
from cpt_lab.experiments.schema import SCALES, Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.experiments.stand_ins import STAND_IN_TITLES

DIFFERENT = "≠"


@dataclass(frozen=True)
class PaperSection:
    """A section of the paper that rests on training runs.

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


# A claim belongs to the first section whose pattern it has.
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
    """Return the key of the section that a claim belongs to."""
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
# Fields that say how a run is computed or watched, not what is trained, or that stand in another line already.
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
    topic: str, specs: Sequence[RunSpec], drawn: Sequence[RunSpec] = ()
) -> pd.DataFrame:
    """Return the paper's settings beside those of runs, a line per setting; differences are marked with "≠".

    The values come from the recipes. The paper's are those of its text, corrected where a ``Differs:`` line of the
    recipe says so; for critical periods they are those of the authors' code. After the main settings follow all other
    fields of the recipes that differ.

    Args:
        topic: a key of ``SECTIONS``.
        specs: the runs of this notebook, of one task; none leaves their column out.
        drawn: the runs that the figure below shows, of the same task; none leaves their column out.

    Returns:
        Columns: setting, one per data set of the paper that has this task, "figure below", "this run". A mark says that
        a value differs from the paper's column of the same network, or from the first one.

    Raises:
        ValueError: for an unknown topic, without any runs, and for a task that the section does not have.
    """
    section = SECTIONS[check_choice("topic", topic, SECTIONS)]
    shown = [*drawn, *specs]
    if not shown:
        raise ValueError("specs: expected at least one run here or in drawn, got none")
    task, model = shown[0].recipe.task, shown[0].recipe.model
    theirs, reference = {}, None
    for dataset, name in section.settings:
        found, arms = _paper_recipe(topic, dataset, name)
        if found.task != task:
            continue
        values = _settings([found], None) | arms
        theirs[f"paper: {DATASETS[dataset].title}"] = values
        if reference is None or found.model == model:
            reference = values
    if reference is None:
        raise ValueError(
            f"topic: {topic!r} of the paper has no experiment of task {task!r}"
        )

    ours = (
        {"figure below": _settings([spec.recipe for spec in drawn], drawn)}
        if drawn
        else {}
    )
    if specs:
        ours["this run"] = _settings([spec.recipe for spec in specs], specs)
    further = [name for name in reference if name not in _SHOWN_FIRST]
    names = [
        *_SHOWN_FIRST,
        *(
            n
            for n in further
            if any(values[n] != reference[n] for values in ours.values())
        ),
    ]
    lines = []
    for name in names:
        of_paper = [values[name] for values in theirs.values()]
        measured = [_marked(values[name], reference[name]) for values in ours.values()]
        label = _SHOWN_FIRST.get(name) or _LABELS.get(name) or name.replace("_", " ")
        lines.append((label, *of_paper, *measured))
    return pd.DataFrame(lines, columns=["setting", *theirs, *ours])


def _paper_recipe(
    topic: str, dataset: str, model: str
) -> tuple[Recipe, dict[str, str]]:
    """Return the paper's recipe of a section, and what its runs are where they are no schedules."""
    if topic != "critical-periods":
        return recipe("paper", dataset, model), {}
    found, settings = deficits("paper", dataset, model)
    lengths = f"deficits of {', '.join(f'{n:,}' for n in settings.lengths if n)} steps"
    windows = f", {plural(len(settings.starts), 'window')}" if settings.starts else ""
    return found, {"q_max": "8", "arms": f"no deficit, {lengths}{windows}"}


def _marked(value: str, printed: str) -> str:
    return value if value == printed else f"{value} {DIFFERENT}"


def _settings(
    recipes: Iterable[Recipe], specs: Sequence[RunSpec] | None
) -> dict[str, str]:
    """Return all settings of recipes in words; several values are listed. Without specs they are the paper's runs."""
    recipes = list(dict.fromkeys(recipes))
    words: dict[str, str] = {}
    for name in _SHOWN_FIRST:
        words[name] = ""
    for field in fields(recipes[0]):
        if field.name not in _NOT_SHOWN:
            words[field.name] = _listed(
                _text(getattr(r, field.name), field.name) for r in recipes
            )
    words["dataset"] = _listed(_dataset(r.dataset) for r in recipes)
    words["optimizer"] = _listed(_optimizer(r) for r in recipes)
    words["lr"] = _listed(_rates(r) for r in recipes)
    words["lr_decay"] = _listed(_decay(r) for r in recipes)
    words["batch"] = _listed(
        "full graph" if r.batch == 0 else f"{r.batch:,}" for r in recipes
    )
    if specs is None:
        words |= {
            "q_max": "6, 8",
            "q_grad": "q_max",
            "seeds": "3",
            "arms": "10 schedules, static q_max",
        }
        return words
    schedules = dict.fromkeys(spec.arm for spec in specs if spec.arm in SUITE)
    others = dict.fromkeys(spec.arm for spec in specs if spec.arm not in SUITE)
    static = [
        arm.removeprefix("static ") for arm in others if arm.startswith("static ")
    ]
    if static and all(
        spec.arm in SUITE or spec.arm == f"static {spec.q_max}" for spec in specs
    ):
        static = ["q_max"]
    same = all(spec.q_grad == spec.q_max for spec in specs)
    words["q_max"] = _listed(str(q) for q in sorted({spec.q_max for spec in specs}))
    words["q_grad"] = "q_max" if same else _listed(str(spec.q_grad) for spec in specs)
    words["seeds"] = _seeds(specs)
    deficits = [arm for arm in others if not arm.startswith("static ")]
    words["arms"] = _arms(list(schedules), static, len(deficits))
    return words


def _seeds(specs: Sequence[RunSpec]) -> str:
    """Return how many seeds the arms have, such as "4" or "5 to 8"."""
    seeds: dict[tuple[str, int], set[int]] = {}
    for spec in specs:
        seeds.setdefault((spec.arm, spec.q_max), set()).add(spec.seed)
    counts = sorted(map(len, seeds.values()))
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _arms(schedules: list[str], static: list[str], others: int) -> str:
    named = (
        ", ".join(schedules)
        if len(schedules) < len(SUITE)
        else f"{len(SUITE)} schedules"
    )
    parts = [named] if schedules else []
    if static:
        parts.append(
            f"static {', '.join(sorted(static, key=lambda bits: (len(bits), bits)))}"
        )
    if others:
        parts.append(plural(others, "arm") + " with and without a deficit")
    return ", ".join(parts)


def _dataset(name: str) -> str:
    if name in DATASETS:
        return DATASETS[name].title
    return STAND_IN_TITLES.get(name, f"own data ({name.rstrip('/')})")


def _optimizer(r: Recipe) -> str:
    momentum = getattr(r, "momentum", 0.0)
    return _OPTIMIZERS[r.task] + (f", momentum {momentum:g}" if momentum else "")


def _rates(r: Recipe) -> str:
    rates = getattr(r, "learning_rates", ()) or (r.lr,)
    return " or ".join(f"{rate:g}" for rate in rates)


def _decay(r: Recipe) -> str:
    rule = getattr(r, "lr_rule", "")
    milestones = getattr(r, "milestones", ())
    final = getattr(r, "final_lr", None)
    if rule == "plateau":
        return f"divided by {r.lr_division:g} after an epoch without progress"  # type: ignore[attr-defined]
    if rule in ("constant", "step"):
        return {"constant": "none", "step": "a tenth at 50 and 75 %"}[rule]
    if milestones and rule != "cosine":
        return (
            f"a tenth at {' and '.join(f'{100 * share:g}' for share in milestones)} %"
        )
    if rule == "cosine" and final is None:
        return "cosine to 0"
    if final is not None:
        shape = "linear" if r.task == "entailment" else "cosine"
        return f"{shape} to {final:g} of it"
    return "none"


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


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


# --- claims -------------------------------------------------------------------------------------------

CLAIM_COLUMNS = ["the paper says", "measured", "data and scale", "level", "verdict"]


def claims_table(topic: str, runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the claims of a section beside what was measured, a line per claim.

    Args:
        topic: a key of ``SECTIONS``.
        runs: None takes all committed rows.

    Returns:
        Columns: "the paper says" with its place; "measured", the effect in the direction of the claim with its 95 %
        interval and n, of the experiment that shows most; "data and scale"; "level", the quality that static q_max (or
        training without a deficit) reaches there; "verdict" by the rules of ``claims``, over all experiments.
    """
    check_choice("topic", topic, SECTIONS)
    return _claims_table(
        topic, _committed_entries() if runs is None else claims.judge_claims(runs)
    )


def claims_tables(runs: pd.DataFrame | None = None) -> dict[str, pd.DataFrame]:
    """Return ``claims_table`` of every section; the runs are judged once, which takes seconds."""
    entries = _committed_entries() if runs is None else claims.judge_claims(runs)
    return {topic: _claims_table(topic, entries) for topic in SECTIONS}


def _claims_table(topic: str, entries: Iterable[claims.Entry]) -> pd.DataFrame:
    lines = []
    for entry in entries:
        if section_of_claim(entry.claim) == topic:
            place = entry.claim.place.partition(";")[0]
            lines.append((f"{entry.claim.claim} ({place})", *_measured(entry)))
    return pd.DataFrame(lines, columns=CLAIM_COLUMNS)


@cache
def _committed_entries() -> list[claims.Entry]:
    return claims.judge_claims(all_committed())


def _measured(entry: claims.Entry) -> tuple[str, str, str, str]:
    """Return effect, data and scale, level and verdict of a claim, by the experiment that shows most."""
    if not entry.effects:
        return "–", _needs(entry.claim), "–", "not run"
    effects = [effect for effect, _ in entry.effects]
    if effects[0].scale == "exact":
        return effects[0].what, "computed", "–", _plain(entry.verdict(paper_scale=True))
    effect = max(effects, key=_effect_shows)
    rest = len(effects) - 1
    measured = "; ".join(part.number() for part in (effect, *effect.others))
    more = f" (and {plural(rest, 'other experiment')})" if rest else ""
    where = f"{effect.experiment}, {effect.scale} scale{more}"
    at_paper, smaller = entry.verdicts()
    words = smaller if at_paper.startswith("open") else at_paper
    return measured, where, effect.level or "–", _plain(words.partition(": ")[0])


def _needs(claim: claims.Claim) -> str:
    return claims.needs(claim).removeprefix("Not run: ").removesuffix(".")


def _effect_shows(effect: Effect) -> tuple[bool, int, bool, int]:
    """Return how much an effect shows, as a key: enough seeds for an interval, scale, real data, number of seeds."""
    is_embedded = effect.dataset in DATASETS and bool(DATASETS[effect.dataset].embedded)
    return (
        effect.n >= LEAST_SEEDS,
        SCALES.index(effect.scale),
        not is_embedded,
        effect.n,
    )


def _plain(words: str) -> str:
    """Return a verdict without the house word "open"."""
    return re.sub(r"\bopen\b", "inconclusive", words)


# --- printed numbers ------------------------------------------------------------------------------------


def printed_table(topic: str = "", runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the numbers that the paper prints beside the nearest values that were measured.

    Args:
        topic: a key of ``SECTIONS``; "" takes all numbers.
        runs: None takes all committed rows.
    """
    found = all_committed() if runs is None else runs
    numbers = paper_comparison.summary(found)
    if not topic:
        return numbers
    section = SECTIONS[check_choice("topic", topic, SECTIONS)]
    datasets = {dataset for dataset, _ in section.settings}
    mine = [
        p.artefact in section.artefacts and p.dataset in datasets
        for p in paper_numbers.numbers().itertuples()
    ]
    return numbers[mine]
