"""Claims of the paper, judged by written rules from the stored runs.

``data/paper/claims.csv`` names for every claim a *measure*, a function of ``MEASURES`` that turns runs into effects
in the claim's direction, and a *test*, which turns the interval of an effect into a verdict (``verdict``):

- ``more``: *confirmed* when the interval lies above 0 and reaches the margin; *below the margin* when it lies below
  the margin, but not below 0 (the effect is smaller than claimed, none, or of the other sign); *contradicted* when it
  lies below 0.
- ``no_worse``: confirmed when it lies above minus the margin, contradicted when it lies below it.
- ``equal``: confirmed inside +- margin, contradicted outside of it.
- ``correlation``, ``majority``: as ``more``, for a rank correlation; ``predictor``: for the strength of a predictor
  minus that of cost.
- ``exact``: confirmed or contradicted by computation.

Anything else is *inconclusive*, and so is an effect of fewer than three seeds. The arms of a correlation do not
count as seeds.

- Runs that diverged count, with the worst value of their task; an arm that diverges everywhere has lost. A seed at
  which both sides diverged is left out. Runs that failed for an external reason are missing until they are run again
  (``run_table.table``).
- Intervals hold 95 %: Student's t of differences paired by seed, in points of the metric (percent of the perplexity);
  for correlations the percentiles of a bootstrap over seeds and arms. A test at level alpha uses the interval of
  1 - alpha; there are no other p-values.
- An effect against two controls has the verdict on which both agree. If they decide differently it is *mixed*.
- The experiments of one claim are tested together, those at paper scale apart from the smaller ones, by Holm's
  step-down (``holm``): of m experiments a verdict is significant when the interval of 1 - 0.05 / m has it too, and so
  on for the remaining experiments.
- Over its experiments a claim has the verdict of those that decide, and is *mixed* if they disagree. A correlation is
  claimed for every domain, so all experiments have to confirm it; ``majority`` needs more than half of the tasks, and
  at least three. A better predictor needs two domains.
- Smaller scales settle no claim of the paper. They have verdicts of their own (``SMALLER_SCALES``), which claim no more
  than the rows show: the same sign on this task at this q_min with n seeds.
- Preregistered runs are not pooled with other runs. Two claims, on the date and on the decay of deficits, have an
  experiment of their own there (``deficit_dates``), whose effects the preregistration calls secondary.
- ``since`` is the time at which a rule was changed last. Entries are marked if their rows are older: whoever changed
  the rule could have known these rows. ``bench.date_claim_rules`` tells when a line needs a new date.

>>> verdict("more", 0.0, (1.2, 0.4, 2.0), n=5)
'confirmed'
>>> verdict("more", 3.0, (1.2, 0.4, 2.0), n=5)
'below the margin'
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pandas as pd

from cpt_core.validation import check_choice
from cpt_lab.analysis import baselines, run_groups
from cpt_lab.analysis.claim_measures import BOTH_AGGREGATIONS, MEASURES
from cpt_lab.analysis.effects import MIN_SEEDS, Claim, Effect, Interval
from cpt_lab.analysis.estimates import INCONCLUSIVE, NOT_RUN
from cpt_lab.analysis.metrics import plural
from cpt_lab.analysis.rendering import Section
from cpt_lab.analysis.statistics import ALPHA
from cpt_lab.experiments.grids import GRIDS
from cpt_lab.experiments.registry import DATASETS
from cpt_lab.paths import paper_dir

CONFIRMED, BELOW_MARGIN, CONTRADICTED = "confirmed", "below the margin", "contradicted"
MIXED = "mixed"
# test -> the verdicts of smaller scales in place of confirmed and contradicted
SMALLER_SCALES = {
    "more": ("same sign", "opposite sign"),
    "no_worse": ("no worse", "worse"),
    "equal": ("equal", "not equal"),
    "correlation": ("same sign", "opposite sign"),
    "majority": ("same sign", "opposite sign"),
    "predictor": ("better predictor", "worse predictor"),
}
TESTS = (*SMALLER_SCALES, "exact")
# measures that also read preregistered runs, see ``deficit_dates``
PREREGISTERED_MEASURES = ("deficit_decay", "deficit_window")
# pattern of the columns that no claim reads
UNUSED_COLUMNS = (
    r".*_(current|best_valid|best_test|degree\d+)|commit|device|error|torch|dirty|data_checksum|seconds|"
    r"(first|last)_loss|learning_rates|bitops_per_op|map|map50_11point"
)


def verdict(test: str, margin: float, effect: Interval, n: int) -> str:
    """Return the verdict on one effect over n seeds, by the rules in the module's docstring."""
    mean, low, high = effect
    if check_choice("test", test, TESTS) == "exact":
        return CONFIRMED if mean > 0 else CONTRADICTED
    if n < MIN_SEEDS or not (low <= mean <= high):
        return INCONCLUSIVE
    if test == "no_worse":
        return _no_worse_verdict(margin, low, high)
    if test == "equal":
        return _equal_verdict(margin, low, high)
    return _more_verdict(margin, low, high)


def _more_verdict(margin: float, low: float, high: float) -> str:
    if high < 0:
        return CONTRADICTED
    if high < margin:
        return BELOW_MARGIN
    return CONFIRMED if low > 0 else INCONCLUSIVE


def _no_worse_verdict(margin: float, low: float, high: float) -> str:
    if low > -margin:
        return CONFIRMED
    return CONTRADICTED if high < -margin else INCONCLUSIVE


def _equal_verdict(margin: float, low: float, high: float) -> str:
    if -margin < low and high < margin:
        return CONFIRMED
    is_outside = low > margin or high < -margin
    return CONTRADICTED if is_outside else INCONCLUSIVE


def effect_verdict(claim: Claim, effect: Effect, alpha: float = ALPHA) -> str:
    """Return the verdict on one effect at a level, before Holm's correction, against all of its controls."""
    verdicts = {
        verdict(claim.test, claim.margin, e.interval_at(alpha), e.n)
        for e in (effect, *effect.other_controls)
    }
    if len(verdicts) == 1:
        return verdicts.pop()
    return INCONCLUSIVE if INCONCLUSIVE in verdicts else MIXED


def corrected_verdicts(tests: Sequence[Callable[[float], str]]) -> list[str]:
    """Return the verdicts of several experiments after Holm's correction.

    The smallest level at which an experiment has its verdict is its p-value: the smallest p-value has to be below
    alpha / m, the next one below alpha / (m - 1), and so on until one is not.

    Args:
        tests: one function per experiment, from the level of the test to the verdict.
    """
    uncorrected = [test(ALPHA) for test in tests]
    verdicts = [INCONCLUSIVE] * len(tests)
    remaining = {i for i in range(len(tests)) if uncorrected[i] != INCONCLUSIVE}
    num_tests = len(tests)
    while True:
        level = ALPHA / max(1, num_tests)
        passed = {i for i in remaining if tests[i](level) == uncorrected[i]}
        if not passed:
            return verdicts
        for i in passed:
            verdicts[i] = uncorrected[i]
        remaining -= passed
        num_tests -= len(passed)


def combined(votes: Iterable[tuple[str, str]], test: str = "more") -> str:
    """Return the verdict over several experiments of one scale, given as (task, verdict), by the rule of the test."""
    votes = list(votes)
    if test == "majority":
        return _majority(votes)

    verdicts = {verdict for _, verdict in votes}
    decided = verdicts - {INCONCLUSIVE}
    if len(decided) != 1:
        return MIXED if decided else INCONCLUSIVE
    if test == "correlation" and verdicts == {CONFIRMED, INCONCLUSIVE}:
        return INCONCLUSIVE
    decided_tasks = {task for task, verdict in votes if verdict != INCONCLUSIVE}
    if test == "predictor" and len(decided_tasks) < 2:
        return INCONCLUSIVE
    return decided.pop()


def _majority(votes: list[tuple[str, str]]) -> str:
    """Return the verdict of more than half of the tasks, of which there have to be at least three.

    A task has the verdict of its experiments that decide, if these agree.

    Differs: that cost and quality are correlated in the majority of domains (section 4.5) stands beside sections 4.2 to
        4.4, by which schedules are alike on Pascal VOC and OGBN-Products, and cheap ones better on Penn Treebank.
    """
    decided_by_task: dict[str, set[str]] = {task: set() for task, _ in votes}
    for task, verdict in votes:
        if verdict != INCONCLUSIVE:
            decided_by_task[task].add(verdict)
    task_verdicts = [
        verdict
        for decided in decided_by_task.values()
        if len(decided) == 1
        for verdict in decided
    ]

    num_tasks = len(decided_by_task)
    if num_tasks < 3:
        return INCONCLUSIVE
    for verdict in (CONFIRMED, CONTRADICTED):
        if task_verdicts.count(verdict) > num_tasks / 2:
            return verdict
    return INCONCLUSIVE


@dataclass(frozen=True)
class Entry:
    """A claim with all its effects, each with its verdict after Holm's correction."""

    claim: Claim
    effects: tuple[tuple[Effect, str], ...] = ()

    def verdict(self, paper_scale: bool) -> str:
        """Return the verdict over the experiments at paper scale (computed ones included), or over the smaller ones."""
        votes = [(effect.task, word) for effect, word in self._tested(paper_scale)]
        return combined(votes, self.claim.test)

    def verdicts(self) -> tuple[str, str]:
        """Return the verdicts at paper scale and at smaller scales in words; "–" for a scale that cannot have one.

        They name the data: smaller scales use stand-ins, also for claims that name a data set of the paper.
        """
        if any(e.scale == "exact" for e, _ in self.effects):
            return f"{self.verdict(True)}, exact", "–"
        return self._verdict_text(True), self._verdict_text(False)

    def evidence(self) -> list[str]:
        """Return every effect in words, after its verdict."""
        return [f"{word}: {effect}" for effect, word in self.worded()]

    def worded(self) -> list[tuple[Effect, str]]:
        """Return every effect with its verdict; also the uncorrected verdict if Holm's correction changed it."""
        worded_effects = []
        for effect, word in self.effects:
            uncorrected = effect_verdict(self.claim, effect)
            text = self._scale_word(word, effect)
            if word != uncorrected:
                num_tests = len(self._tested(_is_paper_scale(effect)))
                alone = self._scale_word(uncorrected, effect)
                text = f"{word} ({alone} by itself, not among {num_tests})"
            worded_effects.append((effect, text))
        return worded_effects

    def rule(self) -> str:
        """Return the date of the rule, with a mark if rows are older; "undated" for a new line without a date."""
        if not self.claim.since:
            return "undated"
        rule_date = pd.Timestamp(self.claim.since)
        starts = [
            start
            for effect, _ in self.effects
            for part in (effect, *effect.other_controls)
            for start in part.start_times
        ]
        times = pd.to_datetime(pd.Series(starts), utc=True, format="ISO8601")
        is_older = times < rule_date
        text = f"{rule_date:%Y-%m-%d %H:%M} UTC"
        if not is_older.any():
            return text
        if is_older.all():
            return f"{text}; rows older than the rule"
        return f"{text}; some rows older than the rule"

    def _tested(self, paper_scale: bool) -> list[tuple[Effect, str]]:
        """Return the effects with enough seeds of one scale, with their verdicts."""
        return [
            (effect, word)
            for effect, word in self.effects
            if _is_paper_scale(effect) == paper_scale and _testable(effect)
        ]

    def _scale_word(self, word: str, effect: Effect) -> str:
        """Return a verdict in the words of the effect's scale."""
        if _is_paper_scale(effect) or self.claim.test not in SMALLER_SCALES:
            return word
        confirmed, contradicted = SMALLER_SCALES[self.claim.test]
        return {CONFIRMED: confirmed, CONTRADICTED: contradicted}.get(word, word)

    def _verdict_text(self, paper_scale: bool) -> str:
        """Return the verdict at a scale with the experiments behind it, such as "mixed: ... in 2 of 5 experiments"."""
        tested = self._tested(paper_scale)
        parts = []
        for word in dict.fromkeys(word for _, word in tested if word != INCONCLUSIVE):
            effects = [effect for effect, other in tested if other == word]
            places = ", ".join(f"{e.place} ({e.bits}, n {e.n})" for e in effects)
            count = f"in {len(effects)} of {plural(len(tested), 'experiment')}"
            parts.append(f"{self._scale_word(word, effects[0])} {count}: {places}")

        verdict = self.verdict(paper_scale)
        head = "" if len(parts) == 1 and verdict != INCONCLUSIVE else f"{verdict}: "
        undecided = dict.fromkeys(
            e.dataset for e, word in tested if word == INCONCLUSIVE
        )
        if undecided:
            word = "undecided" if head else INCONCLUSIVE
            parts.append(f"{word} on {', '.join(undecided)}")
        few_seeds = dict.fromkeys(
            effect.dataset
            for effect, _ in self.effects
            if _is_paper_scale(effect) == paper_scale and not _testable(effect)
        )
        if few_seeds:
            parts.append(f"fewer than {MIN_SEEDS} seeds on {', '.join(few_seeds)}")
        return head + "; ".join(parts) if parts else NOT_RUN


def _is_paper_scale(effect: Effect) -> bool:
    return effect.scale in ("paper", "exact")


def _testable(effect: Effect) -> bool:
    return effect.n >= MIN_SEEDS


def claims() -> list[Claim]:
    """Return the claims of ``data/paper/claims.csv``; ValueError for an unknown measure or test."""
    table = pd.read_csv(paper_dir() / "claims.csv", keep_default_na=False, dtype=str)
    all_claims = [
        Claim(**{**line, "margin": float(line["margin"] or 0)})
        for line in table.to_dict("records")
    ]
    for claim in all_claims:
        check_choice(f"measure of claim {claim.id}", claim.measure, MEASURES)
        verdict(claim.test, claim.margin, (0.0, 0.0, 0.0), MIN_SEEDS)
    return all_claims


def runs_for_claim(runs: pd.DataFrame, claim: Claim) -> pd.DataFrame:
    """Return the runs that a claim is about: none at smoke scale, at paper scale those on the data of its grids."""
    datasets = {grid.split("/")[0] for grid in claim.grids.split()}
    selected = runs["scale"] != "smoke"
    if datasets:
        selected &= (runs["scale"] != "paper") | runs["dataset"].isin(datasets)
    conditions = dict(condition.split("=") for condition in claim.only.split())
    if claim.tasks:
        conditions["task"] = claim.tasks
    if "aggregation" not in conditions and claim.measure not in BOTH_AGGREGATIONS:
        selected &= runs["aggregation"].isin(["", "fp"])
    for name, value in conditions.items():
        selected &= runs[name].astype("string") == value
    return runs[selected]


def judge_claims(runs: pd.DataFrame, only: Collection[str] = ()) -> list[Entry]:
    """Return an entry per claim, judged by runs; those at smoke scale do not count.

    Preregistered runs are read by the measures of ``PREREGISTERED_MEASURES`` alone. Every effect has its quality at
    full bits (``Effect.baseline``).

    Args:
        runs: a table of ``run_table.table``.
        only: ids of claims; empty for all claims.
    """
    is_preregistered = runs["key"].isin(run_groups.preregistered())
    # With all columns the judging takes twice as long.
    read_columns = runs.loc[:, ~runs.columns.str.fullmatch(UNUSED_COLUMNS)]
    pooled_runs = read_columns[~is_preregistered]
    full_bits = baselines.full_bits(read_columns)
    entries = []
    for claim in claims():
        if only and claim.id not in only:
            continue
        entry = judge(
            claim,
            read_columns if claim.measure in PREREGISTERED_MEASURES else pooled_runs,
        )
        entries.append(_add_full_bits_quality(entry, full_bits))
    return entries


def _add_full_bits_quality(entry: Entry, full_bits: pd.DataFrame) -> Entry:
    """Add the quality of training at full bits to every effect."""
    effects = []
    for effect, word in entry.effects:
        baseline = baselines.baseline_of(full_bits, effect.baseline_keys)
        effects.append((replace(effect, baseline=baseline), word))
    return replace(entry, effects=tuple(effects))


def judge(claim: Claim, runs: pd.DataFrame) -> Entry:
    """Return the effects of runs on one claim with their verdicts."""
    effects = list(MEASURES[claim.measure](runs_for_claim(runs, claim), claim))
    words = {}
    for i, effect in enumerate(effects):
        if effect.scale == "exact":
            words[i] = effect_verdict(claim, effect)
    for paper_scale in (True, False):
        tested = [
            i
            for i, effect in enumerate(effects)
            if i not in words
            and _testable(effect)
            and _is_paper_scale(effect) == paper_scale
        ]
        tests = [partial(effect_verdict, claim, effects[i]) for i in tested]
        words.update(zip(tested, corrected_verdicts(tests), strict=True))
    effect_verdicts = [
        (effect, words.get(i, INCONCLUSIVE)) for i, effect in enumerate(effects)
    ]
    return Entry(claim, tuple(effect_verdicts))


def coverage(entries: Iterable[Entry]) -> tuple[int, int]:
    """Return the number of claims with a measured or computed effect at any scale, and the number without one."""
    has_effects = [bool(entry.effects) for entry in entries]
    return sum(has_effects), len(has_effects) - sum(has_effects)


def needs(claim: Claim) -> str:
    """Return a sentence about the runs that a claim without evidence needs, from its grids."""
    parts = [needed_runs(name) for name in claim.grids.split() if name in GRIDS]
    if not parts:
        return "Not run: needs runs that no grid lists."
    return f"Not run: needs {', or '.join(parts)}."


@cache
def needed_runs(grid: str) -> str:
    """Return model, data set and number of runs of a grid, such as "sage on OGBN-Products, 66 runs at paper scale"."""
    declared = GRIDS[grid]
    specs = declared.make(declared.scales[0])
    recipe = specs[0].recipe
    dataset = (
        DATASETS[recipe.dataset].title if recipe.dataset in DATASETS else recipe.dataset
    )
    return f"{recipe.model} on {dataset}, {plural(len(specs), 'run')} at {declared.scales[0]} scale (`{grid}`)"


def summary(entries: Iterable[Entry]) -> pd.DataFrame:
    """Return a printable table of the claims: verdicts, dates of the rules, evidence as a list."""
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
    """Return how many claims have which verdict, such as "6 as claimed, 1 against", without inconclusive ones."""
    counts = Counter(entry.verdict(paper_scale) for entry in entries)
    texts = {
        CONFIRMED: "as claimed",
        BELOW_MARGIN: BELOW_MARGIN,
        CONTRADICTED: "against",
        MIXED: MIXED,
    }
    parts = [f"{counts[word]} {text}" for word, text in texts.items() if counts[word]]
    return ", ".join(parts) or "none"


def claims_headline(entries: Sequence[Entry]) -> str:
    """Return the verdicts on the claims of the paper in one line."""
    of_paper = [entry for entry in entries if entry.claim.is_of_paper]
    at_paper_scale = tally(of_paper, paper_scale=True)
    at_smaller_scales = tally(of_paper, paper_scale=False)
    return (
        f"{len(of_paper)} claims of the paper, exactly or at its scale: {at_paper_scale}; "
        f"at smaller ones: {at_smaller_scales}; others: {INCONCLUSIVE} or {NOT_RUN}"
    )


def section(entries: Sequence[Entry]) -> Section:
    """Return the table of judged claims as a section of a page."""
    note = (
        "Verdicts follow written rules (docstring of `cpt_lab/analysis/claims.py`) from the rows of this page; 'rule "
        "of' is the date of the last change of a rule. Only runs at paper scale confirm or contradict. Smaller scales "
        "have small models, and stand-ins for the data that a claim or the paper names: their verdicts are about "
        "these runs, and name the lowest bits and the number of seeds n. Verdicts on several experiments are after "
        "Holm's correction; runs that diverged count with the worst value of their task."
    )
    return Section(
        "Claims of the paper",
        (f"{claims_headline(entries)}.", note),
        table=summary(entries),
        style="left claims",
    )
