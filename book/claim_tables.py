"""Tables of docs/reproducing about the paper's claims: verdicts with all effects, and the experiments behind them."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable

import pandas as pd

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_lab.analysis import reproduction
from cpt_lab.analysis.claims import Entry
from cpt_lab.analysis.effects import MIN_SEEDS, Effect
from cpt_lab.analysis.estimates import INCONCLUSIVE, NOT_RUN
from cpt_lab.analysis.metrics import interval_text
from cpt_lab.analysis.rendering import markdown

FEW_SEEDS = f"fewer than {MIN_SEEDS} seeds"
ONLY_ARMS = r" \([^()]* alone\)"  # the arms that stand for a group of savings of which some were not run
DATA_TITLES = {
    "cifar10-jpeg": "CIFAR-10 copies",
    "digit-scenes": "scenes of digits",
    "facebook": "Facebook",
    "facebook_ogb_layout": "Facebook",
    "planetoid/cora": "Cora",
    "ptb": "Penn Treebank",
    "pydoc": "characters",
    "voc2007-first16": "Pascal VOC (16 pictures)",
    "voc2007-subset320": "Pascal VOC (320 pictures)",
    "xnli": "XNLI",
}
# store, data set and model, lowest and highest bits -> schedule -> its bits at the last step, below the highest
LastBits = dict[tuple[str, str, str], dict[str, set[int]]]


def last_bits(runs: pd.DataFrame) -> LastBits:
    """Return the bits at which schedules end in every experiment, for those that do not end at q_max.

    A cycle of few steps does not reach the steep end of REX.
    """
    columns = ["store", "dataset", "model", "q_min", "q_max"]
    columns += ["arm", "total_steps", "n_cycles"]
    schedules = runs.loc[runs["arm"].isin(SUITE), columns].drop_duplicates()
    found: LastBits = {}
    for run in schedules.itertuples():
        steps = int(run.total_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShortCycleWarning)
            schedule = make_schedule(run.arm, run.q_min, run.q_max, steps, run.n_cycles)
        bits = schedule(steps - 1)
        if bits < run.q_max:
            place = f"{run.dataset.rstrip('/')}/{run.model}"
            store = run.store.rpartition("/")[2]
            experiment = found.setdefault(
                (store, place, f"{run.q_min} to {run.q_max}"), {}
            )
            experiment.setdefault(run.arm, set()).add(bits)
    return found


class ClaimTables:
    """The claims of a page as two tables in Markdown: claims with their effects, and experiments.

    Args:
        entries: the claims with their effects.
        last_bits: a result of ``last_bits``.
    """

    def __init__(self, entries: Iterable[Entry], last_bits: LastBits) -> None:
        self.entries = list(entries)
        self.last_bits = last_bits
        self.effects: dict[str, list[Effect]] = {}  # by experiment
        for entry in self.entries:
            for effect, _ in entry.effects:
                if effect.scale != "exact":
                    self.effects.setdefault(experiment_name(effect), []).append(effect)

    def claims(self) -> str:
        """Return a table with a line per claim: verdict, effects, date of the rule, and whether rows are older."""
        lines = []
        for entry in self.entries:
            date = entry.rule().partition(" ")[0]
            older = re.search(r"(some )?rows older", entry.rule())
            rule = date
            if older:
                rule += " (some)" if older[1] else " (all)"
            claim = f"{entry.claim.claim} ({entry.claim.place})"
            lines.append(
                (claim, f"**{verdict_text(entry)}**", self._measured(entry), rule)
            )
        return markdown(
            pd.DataFrame(
                lines,
                columns=[
                    "the paper says",
                    "verdict",
                    "measured",
                    "rule last changed (older rows)",
                ],
            )
        )

    def verdict(self, claim_id: str) -> str:
        """Return the verdict on a claim, such as "same sign in 9 of 12 experiments"."""
        (entry,) = (entry for entry in self.entries if entry.claim.id == claim_id)
        return verdict_text(entry)

    def experiments(self) -> str:
        """Return a table with a line per experiment: training, baseline, and files of its rows."""
        lines = []
        for name, effects in self.effects.items():
            trained = effects[0].experiment.rpartition(", ")[0]
            if effects[0].higher_range_test():
                trained += f"; range test finds {effects[0].higher_range_test()} bits"
            trained += self._last_bits_text(effects)
            baseline = (
                "see the effects"
                if self._has_several_baselines(name)
                else effects[0].baseline
            )
            files = dict.fromkeys(
                store.removesuffix(".jsonl")
                for effect in effects
                for store in effect.stores
            )
            lines.append(
                (name, trained, baseline, " ".join(f"`{file}`" for file in files))
            )
        return markdown(
            pd.DataFrame(lines, columns=["experiment", "trained", "baseline", "rows"])
        )

    def has_short_cycles(self) -> bool:
        """Return whether a schedule ends below q_max in one of the experiments."""
        return any(map(self._last_bits_text, self.effects.values()))

    def _last_bits_text(self, effects: Iterable[Effect]) -> str:
        """Return the schedules of an experiment that end below q_max, such as "; RR ends at 6 bits"."""
        arms_by_bits: dict[str, list[str]] = {}
        bits_by_arm: dict[str, set[int]] = {}
        for effect in effects:
            q_range = effect.experiment.rpartition(", ")[2].removesuffix(" bits")
            for store in effect.stores:
                experiment = self.last_bits.get((store, effect.place, q_range), {})
                for arm, bits in experiment.items():
                    bits_by_arm.setdefault(arm, set()).update(bits)
        for arm in filter(bits_by_arm.__contains__, SUITE):
            bits_text = " or ".join(map(str, sorted(bits_by_arm[arm])))
            arms_by_bits.setdefault(bits_text, []).append(arm)
        return "".join(
            f"; {', '.join(arms)} end{'s' * (len(arms) == 1)} at {bits_text} bits"
            for bits_text, arms in arms_by_bits.items()
        )

    def _has_several_baselines(self, name: str) -> bool:
        return len({effect.baseline for effect in self.effects[name]}) > 1

    def _measured(self, entry: Entry) -> str:
        """Return the effects of a claim, one per line and grouped by verdict, below their most common comparison."""
        if not entry.effects:
            return "–"
        if entry.effects[0][0].scale == "exact":
            return "<br>".join(effect.comparison for effect, _ in entry.effects)
        comparisons = Counter(_comparison(effect) for effect, _ in entry.effects)
        shared, count = comparisons.most_common(1)[0]
        if count == 1 < len(entry.effects):
            shared = ""

        texts_by_verdict: dict[str, list[str]] = {}
        for effect, word in entry.worded():
            verdict = word if effect.n >= MIN_SEEDS else FEW_SEEDS
            text = self._effect_text(effect, shared)
            texts_by_verdict.setdefault(verdict, []).append(text)

        lines = [f"{shared}:"] if shared else []
        for verdict in sorted(texts_by_verdict, key=_verdict_order):
            # A single verdict is in the column before already.
            if len(texts_by_verdict) > 1 or verdict == FEW_SEEDS:
                lines.append(f"*{verdict}*")
            lines += texts_by_verdict[verdict]
        return "<br>".join(lines)

    def _effect_text(self, effect: Effect, shared: str) -> str:
        """Return an effect with its experiment, and with its comparison unless all effects share it."""
        name = experiment_name(effect)
        baseline = f" ({effect.baseline})" if self._has_several_baselines(name) else ""
        first = _comparison(effect)
        values = []
        for part in (effect, *effect.other_controls):
            comparison = _comparison(part)
            head, _, tail = comparison.rpartition(", ")
            if re.sub(ONLY_ARMS, "", comparison) == shared:
                comparison = " ".join(re.findall(ONLY_ARMS, comparison)).strip()
            elif part is not effect and first.startswith(f"{head}, "):
                comparison = tail
            diverged = ""
            if part.diverged:
                runs = len(part.start_times)
                diverged = f", {part.diverged} of {runs} runs diverged"
            if math.isnan(part.interval[0]):
                value = f"no seed to compare{diverged}"
            else:
                value = f"{interval_text(*part.interval)} ({part.n}{diverged})"
            values.append(f"{comparison} {value}".strip())
        return f"{name}{baseline}: {' and '.join(values)}"


def _verdict_order(verdict: str) -> tuple[bool, bool]:
    """Return a sort key: inconclusive verdicts after the others, too few seeds last."""
    return verdict == FEW_SEEDS, verdict.startswith(INCONCLUSIVE)


def verdict_text(entry: Entry) -> str:
    """Return the verdict at the paper's scale, and at smaller scales unless it is exact, without the experiments."""
    at_paper, smaller = (words.partition(": ")[0] for words in entry.verdicts())
    if smaller == "–":
        return at_paper
    if at_paper == NOT_RUN:
        return smaller
    return f"paper's scale: {at_paper}; smaller scales: {smaller}"


def experiment_name(effect: Effect) -> str:
    """Return data, model, lowest and highest bits of an effect, such as "digits/mlp6 3-8"."""
    bits = (
        effect.experiment.rpartition(", ")[2].removesuffix(" bits").replace(" to ", "-")
    )
    name = with_titles(effect.place)
    if "(Q-Agg)" in effect.experiment:
        name += " Q-Agg"
    elif effect.task == "graph" and "(FP-Agg)" not in effect.experiment:
        name += " FP-Agg/Q-Agg"
    return (
        f"{name} {bits}, paper scale" if effect.scale == "paper" else f"{name} {bits}"
    )


def _comparison(effect: Effect) -> str:
    """Return the comparison of an effect, with "static q_max" instead of its bits."""
    q_max = effect.experiment.rpartition(" to ")[2].removesuffix(" bits")
    return re.sub(rf"\bstatic {q_max}\b(?! bits|,)", "static q_max", effect.comparison)


def printed_numbers(topic: str) -> tuple[str, str]:
    """Return a table of the paper's printed numbers beside ours, and a sentence with its constant columns.

    Args:
        topic: a key of ``reproduction.SECTIONS``.
    """
    table = reproduction.printed_table(topic)
    shared = []
    for column in list(table.columns):
        values = set(table[column])
        if values == {""} or (len(values) == 1 and len(table) > 1):
            (value,) = values
            table = table.drop(columns=column)
            shared += [f"{column}: {value}"] if value else []
    sentence = f"In all lines: {'; '.join(shared)}." if shared else ""
    return with_titles(markdown(table)), with_titles(sentence)


def with_titles(text: str) -> str:
    """Replace the names of data sets by their titles, except in code.

    >>> with_titles("ptb/lstm of `ptb/lstm`")
    'Penn Treebank/lstm of `ptb/lstm`'
    """
    pattern = rf"`[^`]*`|\b(?:{'|'.join(DATA_TITLES)})\b"
    return re.sub(pattern, lambda match: DATA_TITLES.get(match[0], match[0]), text)
