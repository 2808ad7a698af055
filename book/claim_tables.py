"""Tables of docs/reproducing about the paper's claims: verdicts with all effects, and the experiments behind them."""

import math
import re
from collections import Counter
from collections.abc import Iterable

import pandas as pd

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


class ClaimTables:
    """The claims of a page as two tables in Markdown: claims with their effects, and experiments.

    Args:
        entries: the claims with their effects.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
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
                    "rule of (older rows)",
                ],
            )
        )

    def experiments(self) -> str:
        """Return a table with a line per experiment: training, baseline, and files of its rows."""
        lines = []
        for name, effects in self.effects.items():
            trained = effects[0].experiment.rpartition(", ")[0]
            if effects[0].higher_range_test():
                trained += f"; range test finds {effects[0].higher_range_test()} bits"
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

    def _has_several_baselines(self, name: str) -> bool:
        return len({effect.baseline for effect in self.effects[name]}) > 1

    def _measured(self, entry: Entry) -> str:
        """Return the effects of a claim, one per line and grouped by verdict, below their most common comparison."""
        if not entry.effects:
            return "–"
        if entry.effects[0][0].scale == "exact":
            return entry.effects[0][0].comparison
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
