"""Generator of docs/reproducing and of figures in data/results: ``python -m book.results``.

The text of the pages is the template ``results.md.j2``, in which a mark precedes each page. This module fills in the
tables: claims with their verdicts and effects, grids, stored rows, and the ``Differs:`` lines of the code.
"""

import itertools
import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from book import figures
from book.claim_tables import ClaimTables, last_bits, printed_numbers, with_titles
from book.stated_effects import StatedEffects
from cpt_core.schedules.profiles import SUITE
from cpt_extras.files import write_text
from cpt_lab import commands
from cpt_lab.analysis import baselines, claims, deficit_dates, preregistered
from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.estimates import EVALUATION_RULES, Estimate, holm, unit_of
from cpt_lab.analysis.metrics import interval_text, metric_named, metric_of, plural
from cpt_lab.analysis.preregistered import Answer, ReplicatedEffect
from cpt_lab.analysis.rendering import render
from cpt_lab.analysis.report import differences
from cpt_lab.analysis.run_table import committed, load
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.experiments.grids import find_grids, grid_specs, studies
from cpt_lab.experiments.spec import NotMeasuredError, RunSpec
from cpt_lab.paths import ROOT, paper_dir, results_dir
from cpt_lab.studies import prices, tuned
from cpt_lab.studies.h1_to_h4.outcome import decay_runs
from cpt_lab.studies.h5 import outcome as h5
from cpt_lab.studies.h7 import outcome as h7
from cpt_lab.studies.h10 import outcome as h10
from cpt_lab.studies.h11 import outcome as h11
from cpt_lab.studies.h12 import outcome as h12
from cpt_lab.studies.h13 import outcome as h13
from cpt_lab.studies.tuned import FULL_BITS_ARM
from cpt_lab.studies.tuned_outcome import Task, compare_rate_grids, complete

PAGES = ROOT / "docs" / "reproducing"
# page -> pattern of the ids and tasks of its claims and of its places in the code; the first page that matches counts
TOPICS = {
    "critical-periods": "deficit|critical_periods",
    "detection": "detection|retinanet",
    "entailment": "entailment",
    "language": "language|lstm|ptb",
    "graphs": "graph|gnn|aggregation|q_agg|fanout",
    "images": "image|resnet|mobilenet",
    "schedules": "^[a-z_]* $|schedules|quality_cost|equal_cost|predictors|cycles",
    "method": "",
}
GRIDS = {  # page -> artefacts of the paper, or grids, that hold its runs at paper scale
    "images": ["figure_3"],
    "detection": ["figure_4"],
    "graphs": ["figure_5", "figure_6"],
    "language": ["ptb/lstm"],
    "entailment": ["xnli/bert"],
    "critical-periods": ["table_1", "figure_8"],
}
NEW_QUESTIONS = ("H11", "H12", "H13")  # the others are in the appendix
MAX_SHOWN_EFFECTS = (
    2  # of a question; of more, the highest ends of the intervals are shown
)


def pages() -> dict[Path, str]:
    """Return the text of every page, and of ``data/paper/claims.txt``, by path."""
    runs = committed()
    entries = claims.judge_claims(runs)
    answers = preregistered.all_answers(runs)
    by_topic: dict[str, list[claims.Entry]] = {topic: [] for topic in TOPICS}
    for entry in entries:
        by_topic[topic_of(f"{entry.claim.id} {entry.claim.tasks}")].append(entry)
    differing: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for place, text in differences():
        differing[topic_of(place)].append(_wrap(f"- `{place}`: {text}", "  "))

    spending, switching = h7.tasks(runs)[0], h10.tasks(runs)[0]
    ordered, order_missing = h11.tasks(runs)
    damages, damage_missing = h12.damages(runs)
    by_recipe = h13.tasks(runs)[0]
    spending_alike = h7.gains_by_evaluation(spending)
    replications = replicated_effects(answers)
    again = [one.replication for one in replications]
    extended_answers = {
        "h7": h7.extended_answers(runs),
        "h10": h10.extended_answers(runs),
    }
    tuned_tasks = {
        "H7": spending,
        "H10": switching,
        "H11": ordered,
        "H13": by_recipe,
    }
    stated = stated_effects(answers, tuned_tasks, damages, again)
    stated.add_claims(entries)
    for name, study_answers in extended_answers.items():
        stated.add(f"{name.upper()}, extended rates", _effects(study_answers))
    tasks = list(_tasks_by_grid(runs))
    stored_at_paper = set(runs.loc[runs["scale"] == "paper", "key"])
    ends = last_bits(runs)
    claim_tables = {
        topic: ClaimTables(topic_entries, ends)
        for topic, topic_entries in by_topic.items()
    }
    stored = {
        name: _stored_text(grids, stored_at_paper) for name, grids in GRIDS.items()
    }
    price_arms = []
    for bits in h7.BUDGETS:
        price_arms += [f"{bits}/8", h7.reduced_gradient_arm(bits)]
    h5_effects = h5.effects(h5.cases(runs)).set_index(["case", "arm"])

    rendered = render(
        "results.md.j2",
        Path(__file__).parent,
        at_equal_cost=_at_equal_cost(load(results_dir() / "at_found_q_min.jsonl")),
        of_paper={
            topic: list(filter(_is_of_paper, topic_entries))
            for topic, topic_entries in {**by_topic, "all": entries}.items()
        },
        own_claims=list(itertools.filterfalse(_is_of_paper, entries)),
        claim_tables=claim_tables,
        coverage=claims.coverage(filter(_is_of_paper, entries)),
        decays=deficit_dates.outcome(decay_runs(runs)),
        deficit_dates=deficit_dates,
        damage_missing=damage_missing,
        damages=h12.damage_table(damages),
        differences=differing,
        effect=stated.find,
        effects=stated.select,
        filled=_wrap,
        grids={name: _grids_text(grids) for name, grids in GRIDS.items()},
        h5_gains=_h5_gains(runs),
        kept=_rows_text,
        baselines=_baselines_table(tasks),
        needed=_needed_table(entries),
        new_answers=_answers_table(filter(_is_new, answers)),
        not_run_again=_unreplicated_grids(),
        printed_numbers=printed_numbers,
        old_answers=_answers_table(itertools.filterfalse(_is_new, answers)),
        order_gains=h11.gains(ordered),
        order_missing=order_missing,
        outcomes=Counter(replication.outcome for replication in replications),
        answers={answer.question: answer for answer in answers},
        repeated=replications,
        replications={one.original.description: one for one in replications},
        repeated_baselines=_replication_baselines(tasks),
        rates=tuned.rates_at_ends,
        extended_rates={
            name: compare_rate_grids(study.answers(runs), extended_answers[name])
            for name, study in (("h7", h7), ("h10", h10))
        },
        changed_gains=_changed_effects(answers, extended_answers["h7"]),
        num_gains=len(spending) * len(h7.BUDGETS),
        extended_gains={
            # task and effects, without the columns of the training, as above
            name: study.gains(complete(study.EXTENDED_STUDY, runs)[0]).iloc[:, :4]
            for name, study in (("h7", h7), ("h10", h10))
        },
        extended_studies={"h7": h7.EXTENDED_STUDY, "h10": h10.EXTENDED_STUDY},
        recipe_gains=h13.gains(by_recipe),
        recipe_switches=h13.comparisons(by_recipe),
        spending=h7.gains(spending).assign(n=_num_seeds(spending)),
        spending_alike=spending_alike.iloc[:, [0, 2, 3]],
        spending_chosen=spending_alike.iloc[-1, 1],
        spending_prices=price_arms,
        stored=stored,
        studies={"h7": h7.STUDY, "h10": h10.STUDY, "h11": h11.STUDY},
        price_table=prices.price_table,
        robust_verdicts=prices.robust_verdicts(runs),
        verdict_prices=prices.verdict_table(runs),
        switches=h10.switches(switching),
        switching=h10.gains(switching).assign(n=_num_seeds(switching)),
        switching_alike=h10.gains_by_evaluation(switching).iloc[:, [0, 2, 3]],
        tally=claims.tally,
        won=h5_effects.loc["characters", "over layers"],
    )
    texts = _split_pages(rendered)
    claims_text = "\n".join(
        [
            commands.digest(sorted(results_dir().glob("*.jsonl"))),
            *commands.claims_lines(entries, answers),
        ]
    )
    return texts | {paper_dir() / "claims.txt": f"{claims_text}\n"}


def _is_of_paper(entry: claims.Entry) -> bool:
    return entry.claim.is_of_paper


def _is_new(answer: preregistered.Answer) -> bool:
    return answer.question.startswith(NEW_QUESTIONS)


def _split_pages(rendered: str) -> dict[Path, str]:
    """Return the text of every page of the rendered template, by path."""
    parts = re.split(r"^<!-- page: (.*) -->\n\n?", rendered, flags=re.M)[1:]
    texts = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        texts[PAGES / name] = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return texts


def _num_seeds(tasks: Iterable[Any]) -> list[int]:
    """Return the number of seeds of every task."""
    return [len(task.quality(FULL_BITS_ARM)) for task in tasks]


def _unreplicated_grids() -> list[str]:
    """Return the preregistered grids with rows, but without runs on fresh seeds, in backticks."""
    return [
        f"`{grid}`"
        for grid, effects in _fresh_seeds().items()
        if not effects
        and "-rates/" not in grid
        and (results_dir() / f"{grid.partition('/')[0]}.jsonl").exists()
    ]


def topic_of(place: str) -> str:
    """Return the page of a place in the code, or of a claim.

    >>> topic_of("cpt_lab/tasks/graph.py"), topic_of("cpt_extras/kernels/backend.py")
    ('graphs', 'method')
    """
    return next(page for page, pattern in TOPICS.items() if re.search(pattern, place))


def _needed_table(entries: Iterable[claims.Entry]) -> pd.DataFrame:
    """Return the runs that undecided claims need, and how many claims each would settle."""
    grids = Counter(
        grid
        for entry in entries
        if not entry.effects
        for grid in entry.claim.grids.split()
    )
    lines = [(claims.needed_runs(grid), n) for grid, n in grids.items()]
    return pd.DataFrame(lines, columns=["needed", "claims"])


# --- grids and stored rows ----------------------------------------------------------------------------


def _paper_scale(name: str) -> dict[str, set[str]]:
    """Return the keys of the runs of a grid or an artefact at paper scale, by grid."""
    at_paper = [
        grid
        for grid, definition in find_grids(name).items()
        if "paper" in definition.scales
    ]
    return {grid: {spec.key for spec in grid_specs(grid, "paper")} for grid in at_paper}


def _grids_text(names: Iterable[str]) -> str:
    """Return grids with their numbers of runs, such as "`cifar10/resnet74` (66 runs), ..."."""
    counts = {
        grid: len(keys) for name in names for grid, keys in _paper_scale(name).items()
    }
    return ", ".join(f"`{grid}` ({plural(n, 'run')})" for grid, n in counts.items())


def _stored_text(names: Iterable[str], stored_keys: set[str]) -> str:
    """Return how many runs of grids or artefacts are among the stored keys."""
    keys: set[str] = set()
    for name in names:
        keys = keys.union(*_paper_scale(name).values())
    return f"{len(keys & stored_keys):,} of {len(keys):,}"


def _rows_text(name: str) -> str:
    """Return the contents of a file of rows by model, such as "mlp6: 85 runs, 17 arms, 5 seeds"."""
    texts = []
    for model, part in load(results_dir() / f"{name}.jsonl", every_rate=True).groupby(
        "model", sort=False
    ):
        arms = len(part.drop_duplicates(["arm", "q_grad"]))
        counts = (
            plural(len(part), "run"),
            plural(arms, "arm"),
            plural(part["seed"].nunique(), "seed"),
        )
        texts.append(f"{model}: {', '.join(counts)}")
    return "; ".join(texts)


def _at_equal_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of every schedule over static precision of equal cost, by task: mean and 95 % interval.

    Static precision is interpolated between the two nearest costs, seed by seed. Bold gains are significant after
    Holm's correction over all gains, by two-sided t tests at .05.
    """
    gains: dict[tuple[str, str], Estimate] = {}
    for dataset, rows in runs[runs["q_max"] == 8].groupby("dataset", sort=False):
        part = quality_of(rows)
        baseline = baselines.baseline_text(
            "static 8", [baselines.quality_text(baselines.full_bits(part))]
        )
        title, num_seeds = with_titles(dataset.rstrip("/")), part["seed"].nunique()
        task = f"{title}, q_min {part['q_min'].iloc[0]}, n = {num_seeds}, {baseline}"
        quality = (
            part.pivot(index="seed", columns="arm", values="quality")
            * metric_named(metric_of(part)).factor
        )
        cost = part.groupby("arm")["relative_cost"].first().sort_values()
        static = [arm for arm in cost.index if arm.startswith("static")]
        for arm in SUITE:
            baseline = [
                np.interp(cost[arm], cost[static], seed)
                for seed in quality[static].to_numpy()
            ]
            gains[task, arm] = Estimate(
                arm, unit_of(part), (quality[arm] - baseline).to_numpy(float)
            )
    adjusted = dict(
        zip(gains, holm([gain.p() for gain in gains.values()]), strict=True)
    )
    cells = {
        key: f"**{gain.text()}**" if adjusted[key] < ALPHA else gain.text()
        for key, gain in gains.items()
    }
    tasks = dict.fromkeys(task for task, _ in gains)
    columns = {"schedule": list(SUITE)}
    for task in tasks:
        columns[task] = [cells[task, arm] for arm in SUITE]
    return pd.DataFrame(columns)


# --- preregistered questions --------------------------------------------------------------------------


def _answers_table(answers: Iterable[Answer]) -> pd.DataFrame:
    """Return the questions with outcomes, effects, and outcomes if both sides are evaluated at equal bits."""
    lines = []
    for answer in answers:
        outcome = answer.outcome.partition("; depends on the rule")[0]
        by_rule = dict(answer.by_rule)
        outcomes_by_rule = [
            _outcome_at_equal_bits(by_rule[rule], outcome) if rule in by_rule else "–"
            for rule in EVALUATION_RULES
        ]
        lines.append(
            (
                answer.question,
                answer.question_text,
                outcome,
                _primary_text(answer),
                *outcomes_by_rule,
            )
        )
    columns = ["", "question", "outcome", "primary effects [95 %], or upper bounds"]
    columns += [
        f"outcome if both are evaluated at {rule}, p with Holm's correction"
        for rule in EVALUATION_RULES
    ]
    return pd.DataFrame(lines, columns=columns)


def _outcome_at_equal_bits(rule_outcome: str, outcome: str) -> str:
    """Return an outcome at equal evaluation bits; "the same" if it equals the registered one."""
    verdict, separator, p = rule_outcome.partition("; p ")
    if verdict == re.sub(r" \([^()]*\)", "", outcome):
        verdict = "the same"
    verdict = re.sub(r"^(confirmed|contradicted): [^;]*", r"\1", verdict)
    return verdict + separator + p.removesuffix(" after Holm's correction")


def _primary_text(answer: Answer) -> str:
    """Return the primary effects of a question; for many, the highest ends of their 95 % intervals."""
    if answer.question == "H5":
        return "see below"
    if len(answer.primary) <= MAX_SHOWN_EFFECTS:
        return "; ".join(
            f"{effect.description}: {effect.text()}, n = {len(effect.values)}"
            for effect in answer.primary
        )
    highest: dict[str, float] = {}
    for effect in answer.primary:
        margin = "" if math.isnan(effect.margin) else f" (margin {effect.margin:g})"
        unit = f" {effect.unit}".rstrip() + margin
        highest[unit] = max(effect.interval()[1], highest.get(unit, -math.inf))
    reach = ", ".join(f"{high:+.2f}{unit}" for unit, high in highest.items())
    seeds = sorted({len(effect.values) for effect in answer.primary})
    n = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    return f"up to {reach}; n = {n}"


def _h5_gains(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the gains of H5 over static precision, a line per arm and a column per task."""
    gains = h5.effects(h5.cases(runs))
    cells: dict[str, dict[str, str]] = {}
    for gain in gains.itertuples():
        column = f"{with_titles(gain.case)}, n = {gain.n}"
        cell = (
            f"{interval_text(gain.mean, gain.low, gain.high)} {gain.unit}, {gain.word}"
        )
        if max(abs(gain.bitops - 1), abs(gain.bitops_per_op - 1)) >= 0.005:
            cell += f" (BitOps {gain.bitops:.2f} of static's)"
        cells.setdefault(column, {})[gain.arm] = cell
    table = pd.DataFrame(cells)
    return table.rename_axis("arm").reset_index()


def _effects(answers: Iterable[Answer]) -> Iterator[Estimate]:
    """Yield the primary and secondary effects of answers."""
    for answer in answers:
        yield from answer.primary
        yield from answer.secondary


def stated_effects(
    answers: Iterable[Answer],
    tuned_tasks: Mapping[str, Sequence[Task]],
    damages: Iterable[h12.Damages],
    replications: Sequence[Estimate],
) -> StatedEffects:
    """Return the effects of all studies: those of the answers, differences of any two arms, damages of deficits.

    Args:
        answers: answers of all studies.
        tuned_tasks: study -> its complete tasks.
        damages: tasks of H12.
        replications: effects of fresh seeds.
    """
    stated = StatedEffects()
    for answer in answers:
        study = answer.question.rstrip("abc")
        stated.add(study, _effects([answer]))
    for study, tasks in tuned_tasks.items():
        for task in tasks:
            pairs = itertools.permutations(task.settings, 2)
            stated.add(study, itertools.starmap(task.gain, pairs))
    stated.add("H11", _gains_of_decay(tuned_tasks["H11"]))
    for part in damages:
        for rule, date in itertools.product(h12.RULES, h12.DATES):
            stated.add("H12", [part.damage(rule, h12.EQUAL_RECOVERY, date)])
        stated.add("H12", [_early_under_decay(part)])
    stated.add("fresh seeds", [*replications, _fresh_date_effect(replications)])
    return stated


def _gains_of_decay(tasks: Iterable[Task]) -> list[Estimate]:
    """Return what step and cosine decay gain on a constant rate at full bits, by task of H11."""
    by_name = {task.name: task for task in tasks}
    gains = []
    for name, task in by_name.items():
        title, _, rule = name.rpartition(", ")
        if rule in h11.DECAYS:
            constant = by_name[f"{title}, {h11.CONSTANT}"].quality(FULL_BITS_ARM)
            values = task.quality(FULL_BITS_ARM) - constant
            description = f"{title}, {FULL_BITS_ARM}: {rule} minus {h11.CONSTANT}"
            gains.append(Estimate(description, task.unit, values))
    return gains


def _early_under_decay(part: h12.Damages) -> Estimate:
    """Return the mean over step and cosine decay of the damage of an early minus that of a late deficit."""
    values = np.mean([part.date_effect(rule).values for rule in h12.DECAYS], axis=0)
    return Estimate(f"{part.name}, early minus late under decay", part.unit, values)


def _fresh_date_effect(replications: Iterable[Estimate]) -> Estimate:
    """Return the damage of an early minus that of a late deficit under decay, on digits with fresh seeds."""
    by_name = {effect.description: effect for effect in replications}
    constant = by_name["digits, constant, equal recovery: early minus late"]
    by_decay = by_name["digits, early minus late, under decay minus constant"]
    return replace(
        constant,
        description="digits, early minus late under decay",
        values=constant.values + by_decay.values,
    )


def _changed_effects(
    answers: Iterable[Answer], extended: Iterable[Answer]
) -> list[tuple[Estimate, Estimate]]:
    """Return the primary effects of H7 that extended learning rates change as printed: (registered, extended)."""
    registered = {
        effect.description: effect
        for answer in answers
        if answer.question.startswith("H7")
        for effect in answer.primary
    }
    changed = []
    for answer in extended:
        for effect in answer.primary:
            former = registered.get(effect.description, effect)
            if former.text() != effect.text():
                changed.append((former, effect))
    return changed


class TaskOfGrid(NamedTuple):
    """A task of a preregistered grid.

    Attributes:
        grid: name of the grid.
        task: model, data set, number formats, and how long it trains.
        baseline: what full bits reach.
        seeds: number of seeds of the stored rows.
    """

    grid: str
    task: str
    baseline: str
    seeds: int


def _baselines_table(tasks: Iterable[TaskOfGrid]) -> pd.DataFrame:
    """Return baseline, seeds and training length of the tasks of every preregistered grid."""
    questions: dict[tuple[str, str, int], dict[str, None]] = {}
    for part in tasks:
        question = part.grid.split("/")[0].upper()
        if question not in ("H7", "H10", *NEW_QUESTIONS):  # their own pages have them
            task = part.task, part.baseline, part.seeds
            questions.setdefault(task, {})[question] = None
    lines = [(", ".join(names), *task) for task, names in questions.items()]
    return pd.DataFrame(lines, columns=["", "task and training", "baseline", "n"])


def _tasks_by_grid(runs: pd.DataFrame) -> Iterable[TaskOfGrid]:
    """Yield the tasks of the preregistered grids that have stored runs."""
    for grid in _fresh_seeds():
        if "-rates/" in grid:
            continue
        by_recipe: dict[tuple[str, str, str], list[RunSpec]] = {}
        try:
            specs_of_grid = grid_specs(grid)
        except NotMeasuredError:  # the rates of its arms are not chosen yet
            continue
        for spec in specs_of_grid:
            r = spec.recipe
            by_recipe.setdefault((r.dataset, r.model, r.ladder), []).append(spec)
        for (dataset, model, ladder), specs in by_recipe.items():
            rows = runs[runs["key"].isin({spec.key for spec in specs})]
            if len(rows):
                formats = "" if ladder == "affine" else f", {ladder} formats"
                task = f"{model} on {with_titles(dataset.rstrip('/'))}{formats}, {_training_text(specs)}"
                yield TaskOfGrid(
                    grid,
                    task,
                    baselines.experiment_baseline(rows),
                    rows["seed"].nunique(),
                )


def _training_text(specs: Sequence[RunSpec]) -> str:
    """Return the training length of the runs of a grid, or the shortest and the longest."""
    recipes = sorted({spec.recipe for spec in specs}, key=lambda r: r.steps)
    if recipes[0].steps == recipes[-1].steps:
        return baselines.training_text(recipes[0])
    return f"{recipes[0].steps} to {baselines.training_text(recipes[-1])}"


# --- effects with fresh seeds -------------------------------------------------------------------------


def _fresh_seeds() -> dict[str, dict[str, list[float]]]:
    """Return the effects that ``bench.fresh_seeds`` stored, by grid; empty for grids that were not run again."""
    effects_by_grid = json.loads(
        (results_dir() / "fresh_seeds.json").read_text(encoding="utf-8")
    )["grids"]
    grids = [grid for study in studies("arms") for grid in study.GRIDS]
    return {
        grid: effects_by_grid[grid]["effects"] if grid in effects_by_grid else {}
        for grid in grids
    }


def replicated_effects(answers: Iterable[Answer]) -> list[ReplicatedEffect]:
    """Return pairs of committed effects and their replications with fresh seeds."""
    committed_effects = {
        effect.description: effect for answer in answers for effect in answer.primary
    }
    effect_pairs = []
    for effects in _fresh_seeds().values():
        pairs = [
            (
                committed_effects[what],
                replace(committed_effects[what], values=np.array(values)),
            )
            for what, values in effects.items()
        ]
        effect_pairs += preregistered.pair_effects(pairs)
    return effect_pairs


def _replication_baselines(tasks: Iterable[TaskOfGrid]) -> dict[str, str]:
    """Return the baseline of every replicated effect, by its comparison."""
    by_grid: dict[str, list[str]] = {}
    for part in tasks:
        by_grid.setdefault(part.grid, []).append(part.baseline)
    baseline_by_effect: dict[str, str] = {}
    for grid, effects in _fresh_seeds().items():
        baseline_by_effect |= dict.fromkeys(
            effects, "; ".join(dict.fromkeys(by_grid.get(grid, [])))
        )
    return baseline_by_effect


# --- text ---------------------------------------------------------------------------------------------


def _wrap(text: str, indent: str = "") -> str:
    """Wrap text at 118 columns, and indent its continuation lines."""
    protected = text.replace(
        " %", "\0%"
    )  # a line that begins with % is a comment of MyST
    return "\n".join(
        textwrap.wrap(protected, 118, break_on_hyphens=False, subsequent_indent=indent)
    ).replace("\0", " ")


def main() -> None:
    """Write the pages and the figures."""
    for path, text in pages().items():
        write_text(path, text)
    for study, name in (
        (h7, "where_to_spend_bits"),
        (h10, "when_to_switch"),
        (h11, "order_of_bits"),
        (h13, "late_switch_by_recipe"),
    ):
        figure = study.figure(study.tasks(committed(study.STUDY.name))[0])
        figure.savefig(results_dir() / f"{name}.png", dpi=110)
    figure = deficit_dates.decay_figure(decay_runs(committed("h3")))
    figure.savefig(results_dir() / "learning_rate_decay.png", dpi=110)
    figures.paper_beside_ours().savefig(results_dir() / "figure_3.png", dpi=110)
    print("docs/reproducing, and figures in data/results, written")


if __name__ == "__main__":
    main()
