"""Write docs/reproducing, and the README's figure, from the code and the committed rows: ``python -m book.results``.

Grids, kept rows, claims, and the ``Paper:`` and ``Differs:`` lines of the code. The text of all pages stands in
``results.md.j2``, a mark before each; what can be counted is filled in here.
"""

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from book import figures
from cpt_core.files import write_text
from cpt_core.schedules.profiles import SUITE
from cpt_lab import commands
from cpt_lab.analysis import claims, deficit_dates, levels, preregistered, reproduction
from cpt_lab.analysis.effects import quality_of
from cpt_lab.analysis.estimates import Estimate, holm, unit_of
from cpt_lab.analysis.metrics import counted, metric_named, metric_of
from cpt_lab.analysis.pages import markdown, render
from cpt_lab.analysis.report import harvest
from cpt_lab.analysis.runs import committed, load
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.experiments.grids import find_grids, grid_specs, studies
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import ROOT, paper_dir, results_dir
from cpt_lab.studies import prices, tuned
from cpt_lab.studies.h1_to_h4.outcome import decay_runs
from cpt_lab.studies.h5 import outcome as h5
from cpt_lab.studies.h7 import outcome as h7
from cpt_lab.studies.h10 import outcome as h10

KINDS = ("Differs", "Paper")
CALLED = {  # data sets, as pages call them
    "cifar10-jpeg": "CIFAR-10 copies", "digit-scenes": "scenes of digits", "facebook": "Facebook",
    "facebook_ogb_layout": "Facebook", "planetoid/cora": "Cora", "ptb": "Penn Treebank", "pydoc": "characters",
    "voc2007-first16": "Pascal VOC (16 pictures)", "voc2007-subset320": "Pascal VOC (320 pictures)", "xnli": "XNLI",
}  # fmt: skip
PAGES = ROOT / "docs" / "reproducing"

# page -> the words that a claim's name and task, or a place in the code, has; the first page that fits takes it
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


def pages() -> dict[Path, str]:
    """Return every page, and what ``cpt claims`` says, by file."""
    runs = committed()
    answers = preregistered.all_answers(runs)
    stored = set(runs.loc[runs["scale"] == "paper", "key"])
    judged = claims.judged(runs)
    told = [(topic_of(f"{e.claim.id} {e.claim.tasks}"), e, e.verdicts()) for e in judged]
    spending, switching = (study.tasks(runs)[0] for study in (h7, h10))
    lines = {kind: [(topic_of(place), f"`{place}`: {text}") for place, text in harvest(kind)] for kind in KINDS}
    whole = render(
        "results.md.j2",
        Path(__file__).parent,
        grids=_grids,
        stored=lambda *names: _stored(names, stored),
        kept=lambda *names: _filled(f"Kept: {'; '.join(map(_kept, names))}."),
        tally=lambda topic: _tally([entry for page, entry, _ in told if topic in (page, "all")]),
        claims={page: "\n\n".join(_claim(e, *words) for of, e, words in told if of == page) for page in TOPICS},
        beside=_beside,
        lines={kind: {page: _listed(x for of, x in lines[kind] if of == page) for page in TOPICS} for kind in KINDS},
        outcome=_listed(_called(sentence(a)) for a in answers),
        coverage=claims.coverage(judged),
        filled=_filled,
        rates_text=_rates_text,
        needed=_needed(judged),
        answers=preregistered.summary(answers)[["", "question", "outcome"]],
        by_rule=_outcomes_by_rule(answers),
        levels=_levels(runs),
        decays=deficit_dates.outcome(decay_runs(runs)),
        tables_of_decays=deficit_dates,
        equal_cost=_at_equal_cost(load(results_dir() / "at_found_q_min.jsonl")),
        won=h5.effects(h5.cases(runs)).set_index(["case", "arm"]).loc["characters", "over layers"],
        spent=h7.gains(spending),
        spent_by_rule=h7.gains_by_evaluation(spending),
        spent_prices=prices.price_table(
            h7.STUDY, "digits", [arm for b in h7.BUDGETS for arm in (f"{b}/8", h7.pays(b))]
        ),
        spent_rates=_rates(h7.STUDY),
        switched=h10.gains(switching),
        switched_by_rule=h10.gains_by_evaluation(switching),
        switched_prices=prices.price_table(h10.STUDY, "digits"),
        switched_rates=_rates(h10.STUDY),
        switches=h10.switches(switching),
        again=_again(answers),
        again_levels=_levels_of_effects(runs),
        unrun=[f"`{grid}`" for grid, found in _fresh().items() if found is None and "-rates/" not in grid],
    )
    parts = re.split(r"^<!-- page: (.*) -->\n\n?", whole, flags=re.M)[1:]
    found = {name: re.sub(r"\n{3,}", "\n\n", text).strip() for name, text in zip(*2 * [iter(parts)], strict=True)}
    said = "\n".join([commands.digest(sorted(results_dir().glob("*.jsonl"))), *commands.told(judged, answers)])
    return {PAGES / name: f"{text}\n" for name, text in found.items()} | {paper_dir() / "claims.txt": f"{said}\n"}


def topic_of(place: str) -> str:
    """Return the page that tells of a place in the code.

    >>> topic_of("cpt_lab/tasks/graph.py"), topic_of("cpt_core/kernels/reference.py")
    ('graphs', 'method')
    """
    return next(page for page, words in TOPICS.items() if re.search(words, place))


def sentence(a: preregistered.Answer) -> str:
    """Return what became of a question in words: what it asks, its outcome, its primary effects."""
    judged = f" {a.judged()}" if a.by_rule else ""
    if a.told:
        return f"{a.question}: {a.asks} {a.told[0].upper()}{a.told[1:]}.{judged}"
    word = re.sub("(confirmed|contradicted): ", "", a.word)
    effects = "; ".join(f"{e.what}: {e.shown()}, n = {len(e.values)}" for e in a.primary)
    if len(a.primary) > 2:  # too many for a sentence: how far they reach
        highest: dict[tuple[str, str], float] = {}
        for e in a.primary:
            ends = (f" {e.unit}".rstrip(), f" (margin {e.margin:g})" if e.margin == e.margin else "")
            highest[ends] = max(e.interval()[1], highest.get(ends, -math.inf))
        reach = " and ".join(f"{high:+.2f}{unit}{margin}" for (unit, margin), high in highest.items())
        seeds = {e.what.rpartition(", ")[0]: len(e.values) for e in a.primary}
        counts = ", ".join(f"{task}: n = {n}" for task, n in seeds.items())
        effects = f"the 95 % intervals reach up to {reach}; {counts}"
    said = [part for part in (word, effects) if part]
    return " ".join([f"{a.question}: {a.asks}", *(f"{part[0].upper()}{part[1:]}." for part in said)]) + judged


def _claim(entry: claims.Entry, at_paper: str, smaller: str) -> str:
    """A claim with its verdicts, what they rest on, and every effect."""
    c = entry.claim
    said = [f"{c.place[0].upper()}{c.place[1:]}.", f"At the paper's scale: **{_called(at_paper)}**."]
    said += [f"At smaller scales: **{_called(smaller)}**."] if smaller not in ("–", at_paper) else []
    said += [f"Rule of {entry.rule()}."]
    said += [f"Rows: {', '.join(f'`{name}`' for name in entry.stores())}."] if entry.stores() else []
    said += [] if entry.effects else [f"**{claims.needs(c)}**"]
    grids = c.grids.split() if c.test != "exact" else []
    said += [f"Settled by the grids {', '.join(f'`{grid}`' for grid in grids)}."] if grids else []
    effects = _listed(entry.evidence())
    return f"### {c.claim}\n\n{_filled(' '.join(said))}" + (f"\n\n{effects}" if effects else "")


def _beside(topic: str) -> str:
    """Return the claims of a section and the numbers that it prints, beside ours, as tables in Markdown."""
    tables = [markdown(reproduction.claims_table(topic))]
    numbers = reproduction.printed_table(topic)
    if len(numbers):
        tables += ["The numbers that the paper prints, and the nearest measured values:", markdown(numbers)]
    return _called("\n\n".join(tables))


def _called(words: str) -> str:
    """Call data sets what the other pages call them."""
    return re.sub(rf"\b({'|'.join(CALLED)})\b", lambda found: CALLED[found[0]], words)


def _tally(entries: list[claims.Entry]) -> str:
    """How many claims there are, and what was found of them at the paper's scale and below: cells of a table."""
    return f"{len(entries)} | {claims.tally(entries, True)} | {claims.tally(entries, False)}"


def _paper_scale(name: str) -> dict[str, set[str]]:
    """The keys of the runs of a grid or an artefact at paper scale, by grid."""
    at_paper = [key for key, grid in find_grids(name).items() if "paper" in grid.scales]
    return {key: {spec.key for spec in grid_specs(key, "paper")} for key in at_paper}


def _grids(*names: str) -> str:
    """Such as "`cifar10/resnet74` (66 runs), ...", filled into lines."""
    found = {grid: len(keys) for name in names for grid, keys in _paper_scale(name).items()}
    return _filled("Grids: " + ", ".join(f"`{grid}` ({counted(n, 'run')})" for grid, n in found.items()) + ".")


def _stored(names: tuple[str, ...], stored: set[str]) -> str:
    """How much of grids or artefacts was run at paper scale."""
    wanted = set().union(*(keys for name in names for keys in _paper_scale(name).values()))
    return f"{len(wanted & stored):,} of {len(wanted):,}"


def _at_equal_cost(runs: pd.DataFrame) -> pd.DataFrame:
    """What every schedule gains on static precision of its cost, by task: mean and 95 % interval over seeds.

    Static precision of a cost lies on the line between the two next to it, by seed. Bold stands after Holm's correction
    over all of them, by two-sided t tests at .05.
    """
    gains: dict[tuple[str, str], Estimate] = {}
    for dataset, rows in runs[runs["q_max"] == 8].groupby("dataset", sort=False):
        part = quality_of(rows)
        level = levels.stated("static 8", [levels.reached(levels.full_bits(part))])
        task = f"{_called(dataset.rstrip('/'))}, q_min {part['q_min'].iloc[0]}, n = {part['seed'].nunique()}, {level}"
        quality = part.pivot(index="seed", columns="arm", values="quality") * metric_named(metric_of(part)).factor
        cost = part.groupby("arm")["relative_cost"].first().sort_values()
        static = [arm for arm in cost.index if arm.startswith("static")]
        for arm in SUITE:
            rival = [np.interp(cost[arm], cost[static], seed) for seed in quality[static].to_numpy()]
            gains[task, arm] = Estimate(arm, unit_of(part), (quality[arm] - rival).to_numpy(float))
    adjusted = dict(zip(gains, holm([e.p() for e in gains.values()]), strict=True))
    shown = {of: f"**{e.shown()}**" if adjusted[of] < ALPHA else e.shown() for of, e in gains.items()}
    tasks = dict.fromkeys(task for task, _ in gains)
    return pd.DataFrame({"schedule": list(SUITE)} | {t: [shown[t, arm] for arm in SUITE] for t in tasks})


def _outcomes_by_rule(answers: list[preregistered.Answer]) -> pd.DataFrame:
    """The outcomes of questions whose models can be evaluated by two rules: a line per question and rule."""
    lines = [
        (a.question if i == 0 else "", f"both at {rule}", outcome)
        for a in answers
        for i, (rule, outcome) in enumerate(a.by_rule)
    ]
    return pd.DataFrame(lines, columns=["", "evaluated", "outcome"])


def _needed(entries: list[claims.Entry]) -> pd.DataFrame:
    """What the claims without any effect need: a line per grid, with how many claims it would settle."""
    grids = Counter(grid for e in entries if not e.effects for grid in e.claim.grids.split())
    lines = [(claims.needed_runs(grid), n) for grid, n in grids.items()]
    return pd.DataFrame(lines, columns=["needed", "claims"])


def _levels(runs: pd.DataFrame) -> pd.DataFrame:
    """What full bits reach in the task of every preregistered grid, and how long it trains."""
    lines: dict[tuple[str, str, str], None] = {}
    for grid, task, level, training in _levels_by_grid(runs):
        lines[grid.split("/")[0].upper(), f"{task}, {training}", level] = None
    return pd.DataFrame(list(lines), columns=["", "task and training", "level"])


def _levels_by_grid(runs: pd.DataFrame) -> Iterable[tuple[str, str, str, str]]:
    """Yield grid, task, level and training of every preregistered grid whose runs are stored."""
    for grid in _fresh():
        if "-rates/" in grid:
            continue
        by_recipe: dict[tuple[str, str, str], list[RunSpec]] = {}
        for spec in grid_specs(grid):
            r = spec.recipe
            by_recipe.setdefault((r.dataset, r.model, r.ladder), []).append(spec)
        for (dataset, model, ladder), specs in by_recipe.items():
            rows = runs[runs["key"].isin({spec.key for spec in specs})]
            if len(rows):
                formats = "" if ladder == "affine" else f", {ladder} formats"
                task = f"{model} on {_called(dataset.rstrip('/'))}{formats}"
                yield grid, task, levels.of_experiment(rows), _trained(specs)


def _trained(specs: list[RunSpec]) -> str:
    """How long the runs of a grid train: of several lengths, the shortest and the longest."""
    recipes = sorted({spec.recipe for spec in specs}, key=lambda r: r.steps)
    if recipes[0].steps == recipes[-1].steps:
        return levels.training_text(recipes[0])
    return f"{recipes[0].steps} to {levels.training_text(recipes[-1])}"


def _rates(study: tuned.Tuned) -> dict[str, Any]:
    """How many chosen learning rates lie at an end of the grid of three, in all and by task."""
    found = tuned.rates_at_ends(study)
    ends = int(found[["smallest rate", "largest rate"]].to_numpy().sum())
    return {"ends": ends, "arms": int(found["arms"].sum()), "table": found}


def _rates_text(found: dict[str, Any]) -> str:
    """Say how many rates lie at an end of the grid, from what ``_rates`` returned."""
    return _filled(
        "Every arm chose among three learning rates: half the recipe's, the recipe's, and twice it. "
        f"{found['ends']} of the {found['arms']} choices lie at an end of this grid, the smallest rate or the largest "
        'rate, so "chosen on held-out data" is not "tuned": a rate outside may be better still.'
    )


def _fresh() -> dict[str, Any]:
    """What ``bench.fresh_seeds`` kept, by grid; None of a grid that was not run with fresh seeds."""
    kept = json.loads((results_dir() / "fresh_seeds.json").read_text(encoding="utf-8"))["grids"]
    return {grid: kept.get(grid) for study in studies("arms") for grid in study.GRIDS}


def _again(answers: list[preregistered.Answer]) -> list[preregistered.Repeated]:
    """The effects with fresh seeds, beside those of the committed rows."""
    before = {e.what: e for a in answers for e in a.primary}
    pairs = [
        [(before[what], replace(before[what], values=np.array(values))) for what, values in grid["effects"].items()]
        for grid in filter(None, _fresh().values())
    ]
    return [one for of_grid in pairs for one in preregistered.compared(of_grid)]


def _levels_of_effects(runs: pd.DataFrame) -> dict[str, str]:
    """The level of the grid of every effect with fresh seeds, by what the effect compares."""
    by_grid: dict[str, list[str]] = {}
    for grid, _, level, _ in _levels_by_grid(runs):
        by_grid.setdefault(grid, []).append(level)
    return {
        what: "; ".join(dict.fromkeys(by_grid[grid]))
        for grid, kept in _fresh().items()
        if kept is not None
        for what in kept["effects"]
    }


def _kept(name: str) -> str:
    """Such as "mlp6: 85 runs, 17 arms, 5 seeds": what is kept under a name, by model."""
    runs = load(results_dir() / f"{name}.jsonl", every_rate=True)
    return "; ".join(
        f"{model}: {counted(len(part), 'run')}, {counted(len(part.drop_duplicates(['arm', 'q_grad'])), 'arm')}, "
        f"{counted(part['seed'].nunique(), 'seed')}"
        for model, part in runs.groupby("model", sort=False)
    )


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(_filled(f"- {line}", subsequent_indent="  ") for line in lines)


def _filled(text: str, **how: str) -> str:
    whole = text.replace(" %", "\0%")  # a line that begins with % is a comment of MyST
    return "\n".join(textwrap.wrap(whole, 118, break_on_hyphens=False, **how)).replace("\0", " ")


def main() -> None:
    """Write the pages and the figure."""
    for path, text in pages().items():
        write_text(path, text)
    for study, name in ((h7, "where_to_spend_bits"), (h10, "when_to_switch")):
        drawn = study.figure(study.tasks(committed(study.STUDY.name))[0])
        drawn.savefig(results_dir() / f"{name}.png", dpi=110)
    drawn = deficit_dates.decay_figure(decay_runs(committed("h3")))
    drawn.savefig(results_dir() / "learning_rate_decay.png", dpi=110)
    figures.paper_beside_ours().savefig(results_dir() / "figure_3.png", dpi=110)
    print("docs/reproducing, and four figures in data/results, written")


if __name__ == "__main__":
    main()
