"""The claims of the paper, and what the runs at hand say about them. No verdict is typed by hand; the rules stand here.

``data/paper/claims.csv`` names for every claim a *measure*, a function of ``MEASURES`` that takes runs and returns
effects in the claim's direction, and a *test*, which turns the interval of an effect into a word (``verdict``):

- ``more``: *confirmed* when the interval lies above 0 and reaches the margin; *smaller than claimed* when it lies below
  the margin, but not below 0; *contradicted* when it lies below 0.
- ``no_worse``: confirmed when it lies above minus the margin, contradicted when it lies below it.
- ``equal``: confirmed inside +- margin, contradicted outside of it.
- ``correlation``, ``majority``: as ``more``, of a rank correlation; ``predictor``: of what one is stronger than that of
  cost.
- ``exact``: confirmed or contradicted by computation.

Anything else is *open*, and so is an effect of fewer than three seeds; the arms of a correlation are no seeds.

- Runs that diverged count, with the worst value of their task; an arm that diverges everywhere has lost. A seed at
  which both sides diverged compares nothing. Runs that failed for a reason outside of them are missing until they are
  run again (``runs.table``).
- Intervals hold 95 %: Student's t of differences paired by seed, in points of the metric (percent of the perplexity);
  for correlations the percentiles of a bootstrap over seeds and arms. A test at level alpha asks what the interval of
  1 - alpha says; there are no other p-values.
- An effect against two controls has the word on which both agree. Where they decide differently it is *mixed*.
- The experiments of one claim, those at paper scale and the smaller ones, are tested together, by Holm's step-down
  (``holm``): of m experiments a word stands when the interval of 1 - 0.05 / m says it too, then of those left.
- Over its experiments a claim has the word of those that decide, and is *mixed* where they disagree. A correlation is
  claimed for every domain: all experiments have to confirm it; ``majority`` asks for more than half of the tasks, and
  for three. A better predictor needs two domains.
- Smaller scales settle no claim of the paper. They have words of their own (``SMALLER_SCALES``), which say no more than
  the rows do: the same sign on this task at this q_min with n seeds.
- Preregistered runs are pooled with no others. Two claims, on the date and on the decay of deficits, have an experiment
  of their own there (``deficit_dates``), whose effects the preregistration calls secondary.
- ``since`` is when a rule was changed last. Entries are marked where rows that they rest on were there before: who
  changed the rule could have known them. ``rules.fingerprint`` tells when a line needs a new date.

>>> verdict("more", 0.0, (1.2, 0.4, 2.0), n=5)
'confirmed'
>>> verdict("more", 3.0, (1.2, 0.4, 2.0), n=5)
'smaller than claimed'
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd

from cpt_core.validation import check_choice
from cpt_lab.analysis import levels, run_groups
from cpt_lab.analysis.claim_measures import BOTH_AGGREGATIONS, MEASURES
from cpt_lab.analysis.effects import LEAST_SEEDS, Claim, Effect, Interval
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.experiments.grids import GRIDS
from cpt_lab.experiments.registry import DATASETS
from cpt_lab.paths import paper_dir

CONFIRMED, SMALLER, CONTRADICTED = "confirmed", "smaller than claimed", "contradicted"
MIXED, OPEN = "mixed", "open"
# what smaller scales say instead of confirmed and contradicted
SMALLER_SCALES = {
    "more": ("same sign", "opposite sign"),
    "no_worse": ("no worse", "worse"),
    "equal": ("equal", "not equal"),
    "correlation": ("same sign", "opposite sign"),
    "majority": ("same sign", "opposite sign"),
    "predictor": ("better predictor", "worse predictor"),
}
TESTS = (*SMALLER_SCALES, "exact")
ASKED_TOO = (
    "deficit_decay",
    "deficit_window",
)  # measures that read preregistered runs, see ``deficit_dates``
UNREAD = (  # columns that no claim is about
    r".*_(current|best_valid|best_test|degree\d+)|commit|device|error|torch|dirty|data_checksum|seconds|"
    r"(first|last)_loss|learning_rates|bitops_per_op|map|map50_11point"
)


def verdict(test: str, margin: float, effect: Interval, n: int) -> str:
    """Return the word for one effect over n seeds; the rules are those of the module's docstring."""
    mean, low, high = effect
    if check_choice("test", test, TESTS) == "exact":
        return CONFIRMED if mean > 0 else CONTRADICTED
    if n < LEAST_SEEDS or not (low <= mean <= high):
        return OPEN
    if test in ("more", "correlation", "majority", "predictor"):
        return (
            CONTRADICTED
            if high < 0
            else SMALLER
            if high < margin
            else CONFIRMED
            if low > 0
            else OPEN
        )
    if test == "no_worse":
        return CONFIRMED if low > -margin else CONTRADICTED if high < -margin else OPEN
    inside, outside = -margin < low and high < margin, low > margin or high < -margin
    return CONFIRMED if inside else CONTRADICTED if outside else OPEN


def effect_verdict(claim: Claim, effect: Effect, alpha: float = ALPHA) -> str:
    """Return the word for one effect by itself, against all of its controls."""
    words = {
        verdict(claim.test, claim.margin, e.at(alpha), e.n)
        for e in (effect, *effect.others)
    }
    return words.pop() if len(words) == 1 else OPEN if OPEN in words else MIXED


def holm(words: Sequence[Callable[[float], str]]) -> list[str]:
    """Return the words that stand of several experiments, each given as a function of the level that it is tested at.

    The least level at which an experiment says its word is its p-value: the smallest has to be below alpha / m, the
    next one below alpha / (m - 1), and so on until one is not.
    """
    alone, stands = [word(ALPHA) for word in words], [OPEN] * len(words)
    left = set(range(len(words)))
    while passed := {
        i for i in left if alone[i] != OPEN and words[i](ALPHA / len(left)) == alone[i]
    }:
        for i in passed:
            stands[i] = alone[i]
        left -= passed
    return stands


def combined(votes: Iterable[tuple[str, str]], test: str = "more") -> str:
    """Return the word of several experiments of one scale, given as (task, word), by the rule of the test."""
    votes = list(votes)
    found = {v for _, v in votes}
    decided = found - {OPEN}
    if test == "majority":
        return _majority(votes)
    if len(decided) != 1:
        return MIXED if decided else OPEN
    if test == "correlation" and found == {CONFIRMED, OPEN}:
        return OPEN
    if test == "predictor" and len({task for task, v in votes if v != OPEN}) < 2:
        return OPEN
    return decided.pop()


def _majority(votes: list[tuple[str, str]]) -> str:
    """The word of more than half of the tasks, at least three; a task has the word of its experiments that decide.

    Differs: that cost and quality are correlated in the majority of domains (section 4.5) stands beside sections 4.2 to
        4.4, by which schedules are alike on Pascal VOC and OGBN-Products, and cheap ones better on Penn Treebank.
    """
    of = {task: {v for t, v in votes if t == task} - {OPEN} for task, _ in votes}
    words = [word for found in of.values() if len(found) == 1 for word in found]
    most = [
        word for word in (CONFIRMED, CONTRADICTED) if words.count(word) > len(of) / 2
    ]
    return most[0] if most and len(of) > 2 else OPEN


@dataclass(frozen=True)
class Entry:
    """A claim with every effect that the runs show, and the word for each that stands."""

    claim: Claim
    effects: tuple[tuple[Effect, str], ...] = ()

    def verdict(self, paper_scale: bool) -> str:
        """Return the word for the experiments at paper scale (exact ones are), or for the smaller ones."""
        return combined(
            ((e.task, v) for e, v in self._tested(paper_scale)), self.claim.test
        )

    def verdicts(self) -> tuple[str, str]:
        """Return what is found at paper scale and at smaller scales in words; "–" where only one of them can be.

        They name the data: smaller scales use stand-ins, also for claims that name a data set of the paper.
        """
        if any(e.scale == "exact" for e, _ in self.effects):
            return f"{self.verdict(True)}, exact", "–"
        return self._words(True), self._words(False)

    def evidence(self) -> list[str]:
        """Return every effect in words after the word that it has."""
        return [f"{word}: {effect}" for effect, word in self.worded()]

    def worded(self) -> list[tuple[Effect, str]]:
        """Return every effect with its word, and the word that it has by itself where Holm's correction takes it."""
        found = []
        for e, v in self.effects:
            alone = effect_verdict(self.claim, e)
            if v != alone:
                v = f"{v} ({self._named(alone, e)} by itself, not among {len(self._tested(_of_paper(e)))})"
            found.append((e, self._named(v, e)))
        return found

    def rule(self) -> str:
        """Return the date of the rule, and whether rows are older; a line that was just written has no date yet."""
        if not self.claim.since:
            return "undated"
        starts = [
            start
            for e, _ in self.effects
            for part in (e, *e.others)
            for start in part.started
        ]
        older = pd.to_datetime(
            pd.Series(starts), utc=True, format="ISO8601"
        ) < pd.Timestamp(self.claim.since)
        mark = (
            "; rows older than the rule"
            if len(older) and older.all()
            else "; some rows older than the rule"
        )
        return f"{pd.Timestamp(self.claim.since):%Y-%m-%d %H:%M} UTC" + (
            mark if older.any() else ""
        )

    def _tested(self, paper_scale: bool) -> list[tuple[Effect, str]]:
        return [
            (e, v)
            for e, v in self.effects
            if _of_paper(e) == paper_scale and _testable(e)
        ]

    def _named(self, word: str, effect: Effect) -> str:
        """A word as the scale has it."""
        own = SMALLER_SCALES.get(self.claim.test) if not _of_paper(effect) else None
        return (
            dict(zip((CONFIRMED, CONTRADICTED), own, strict=True)).get(word, word)
            if own
            else word
        )

    def _words(self, paper_scale: bool) -> str:
        tested, parts = self._tested(paper_scale), []
        for word in dict.fromkeys(v for _, v in tested if v != OPEN):
            there = [e for e, v in tested if v == word]
            places = ", ".join(f"{e.place} ({e.bits}, n {e.n})" for e in there)
            of = f"in {len(there)} of {plural(len(tested), 'experiment')}"
            parts.append(f"{self._named(word, there[0])} {of}: {places}")
        whole = self.verdict(paper_scale)
        head = "" if len(parts) == 1 and whole != OPEN else f"{whole}: "
        undecided = dict.fromkeys(e.dataset for e, v in tested if v == OPEN)
        few = dict.fromkeys(
            e.dataset
            for e, _ in self.effects
            if _of_paper(e) == paper_scale and not _testable(e)
        )
        parts += (
            [f"{'undecided' if head else 'open'} on {', '.join(undecided)}"]
            if undecided
            else []
        )
        parts += [f"fewer than {LEAST_SEEDS} seeds on {', '.join(few)}"] if few else []
        return head + "; ".join(parts) if parts else "open (not run)"


def _of_paper(effect: Effect) -> bool:
    return effect.scale in ("paper", "exact")


def _testable(effect: Effect) -> bool:
    return effect.n >= LEAST_SEEDS


def claims() -> list[Claim]:
    """Return the claims of ``data/paper/claims.csv``; ValueError for an unknown measure or test."""
    table = pd.read_csv(paper_dir() / "claims.csv", keep_default_na=False, dtype=str)
    found = [
        Claim(**{**line, "margin": float(line["margin"] or 0)})
        for line in table.to_dict("records")
    ]
    for c in found:
        check_choice(f"measure of claim {c.id}", c.measure, MEASURES)
        verdict(c.test, c.margin, (0.0, 0.0, 0.0), LEAST_SEEDS)
    return found


def runs_for_claim(runs: pd.DataFrame, claim: Claim) -> pd.DataFrame:
    """Return the runs that a claim is about: none at smoke scale, at paper scale those on the data of its grids."""
    datasets = {grid.split("/")[0] for grid in claim.grids.split()}
    mine = runs["scale"] != "smoke"
    if datasets:
        mine &= (runs["scale"] != "paper") | runs["dataset"].isin(datasets)
    conditions = dict(condition.split("=") for condition in claim.only.split())
    if claim.tasks:
        conditions["task"] = claim.tasks
    if "aggregation" not in conditions and claim.measure not in BOTH_AGGREGATIONS:
        mine &= runs["aggregation"].isin(["", "fp"])
    for name, value in conditions.items():
        mine &= runs[name].astype("string") == value
    return runs[mine]


def judge_claims(runs: pd.DataFrame, only: Collection[str] = ()) -> list[Entry]:
    """Return an entry per claim, judged by runs; those at smoke scale do not count.

    Preregistered runs are read by the measures of ``ASKED_TOO`` alone, which say so. Every effect has its level.

    Args:
        runs: as of ``runs.table``.
        only: ids of claims; none of them for all.
    """
    asked = runs["key"].isin(run_groups.preregistered())
    read = runs.loc[
        :, ~runs.columns.str.fullmatch(UNREAD)
    ]  # all rows and columns take twice as long
    others = read[~asked]
    full_bits = levels.full_bits(read)
    entries = []
    for claim in claims():
        if only and claim.id not in only:
            continue
        entry = judge(claim, read if claim.measure in ASKED_TOO else others)
        entries.append(_with_levels(entry, full_bits))
    return entries


def _with_levels(entry: Entry, full_bits: pd.DataFrame) -> Entry:
    """Return an entry whose effects say what full bits reach in their experiments."""
    effects = []
    for effect, word in entry.effects:
        level = levels.level_of(full_bits, effect.compared)
        effects.append((replace(effect, level=level), word))
    return replace(entry, effects=tuple(effects))


def judge(claim: Claim, runs: pd.DataFrame) -> Entry:
    """Return what runs say about one claim."""
    effects = list(MEASURES[claim.measure](runs_for_claim(runs, claim), claim))
    words = {
        i: effect_verdict(claim, e) for i, e in enumerate(effects) if e.scale == "exact"
    }
    for paper_scale in (True, False):
        part = [
            i
            for i, e in enumerate(effects)
            if i not in words and _testable(e) and _of_paper(e) == paper_scale
        ]
        tests = [
            lambda alpha, e=effects[i]: effect_verdict(claim, e, alpha) for i in part
        ]
        words |= dict(zip(part, holm(tests), strict=True))
    return Entry(claim, tuple((e, words.get(i, OPEN)) for i, e in enumerate(effects)))


def coverage(entries: Iterable[Entry]) -> tuple[int, int]:
    """Return how many claims have a measured or computed effect at some scale, and how many have none."""
    there = [bool(entry.effects) for entry in entries]
    return sum(there), len(there) - sum(there)


def needs(claim: Claim) -> str:
    """Return in a sentence what a claim without evidence needs, from the grids that settle it."""
    parts = [needed_runs(name) for name in claim.grids.split() if name in GRIDS]
    return (
        f"Not run: needs {', or '.join(parts)}."
        if parts
        else "Not run: needs runs that no grid lists."
    )


@cache
def needed_runs(grid: str) -> str:
    """Return model, data set and number of runs of a grid, such as "sage on OGBN-Products, 66 runs at paper scale"."""
    found = GRIDS[grid]
    specs = found.make(found.scales[0])
    recipe = specs[0].recipe
    dataset = (
        DATASETS[recipe.dataset].title if recipe.dataset in DATASETS else recipe.dataset
    )
    return f"{recipe.model} on {dataset}, {plural(len(specs), 'run')} at {found.scales[0]} scale (`{grid}`)"


def summary(entries: Iterable[Entry]) -> pd.DataFrame:
    """Return the claims for people: verdicts, dates of rules, evidence as a list."""
    lines = [
        (e.claim.claim, e.claim.place, *e.verdicts(), e.rule(), e.evidence())
        for e in entries
    ]
    columns = [
        "claim",
        "where",
        "at paper scale",
        "at smaller scales",
        "rule of",
        "evidence",
    ]
    return pd.DataFrame(lines, columns=columns)


def tally(entries: Iterable[Entry], paper_scale: bool) -> str:
    """Return how many claims have which word, such as "6 as claimed, 1 against": those that are not open."""
    found = Counter(entry.verdict(paper_scale) for entry in entries)
    words = {
        CONFIRMED: "as claimed",
        SMALLER: SMALLER,
        CONTRADICTED: "against",
        MIXED: MIXED,
    }
    return (
        ", ".join(
            f"{found[word]} {said}" for word, said in words.items() if found[word]
        )
        or "none"
    )


def claims_headline(entries: list[Entry]) -> str:
    """Return what was found of all of them, in a line."""
    at_paper, less = (tally(entries, paper_scale) for paper_scale in (True, False))
    return f"{len(entries)} claims, exactly or at the paper's scale: {at_paper}; at smaller ones: {less}; others: open"


def section(runs: pd.DataFrame) -> Section:
    """Return the claims as a part of a page."""
    entries = judge_claims(runs)
    note = (
        "Made by written rules (docstring of `cpt_lab/analysis/claims.py`) from the rows of this page; 'rule of' is "
        "when a rule was written last. Only runs at paper scale confirm or contradict. Smaller scales have small "
        "models, and stand-ins for the data that a claim or the paper names: they say what was found there, with which "
        "lowest bits and how many seeds n. Of several experiments, words stand after Holm's correction; runs that "
        "diverged count with the worst value of their task."
    )
    return Section(
        "Claims of the paper",
        (f"{claims_headline(entries)}.", note),
        table=summary(entries),
        style="left claims",
    )
