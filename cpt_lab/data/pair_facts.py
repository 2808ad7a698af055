"""Checks and facts of sentence pairs: what is no sentence, labels, pairs that stand twice or in two splits."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize

PAIR_LABELS = ("entailment", "neutral", "contradiction")
SENTENCES = ("premise", "hypothesis")
TYPE_NAMES = {
    "dict": "a table",
    "list": "a list",
    "ndarray": "a list",
    "bytes": "bytes",
    "bool": "a truth value",
}
TYPE_HINTS = {
    "a table": "of a table of languages as in XNLI's all_languages, save the rows of a language in a file of their own",
    "a list": "join its words with blanks",
    "bytes": "decode it",
}
Pairs = Mapping[str, Mapping[str, pd.DataFrame]]  # split -> language -> pairs


def check_sentences(path: Path, rows: pd.DataFrame) -> None:
    """Raise ValueError for the first row, by its number in the file, whose sentences are empty or no text."""
    for name in SENTENCES:
        column = rows[name]
        empty = column.map(_is_empty)
        if empty.any():
            raise ValueError(f"{path}, row {empty.idxmax()}: the {name} is empty")
        other = ~column.map(lambda value: isinstance(value, str))
        if other.any():
            value = column[other.idxmax()]
            kind = _describe_type(value)
            way = f"; {TYPE_HINTS[kind]}" if kind in TYPE_HINTS else ""
            raise ValueError(
                f"{path}, row {other.idxmax()}: the {name} is {kind}, not a sentence{way}"
            )


def _is_empty(value: Any) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return blank or value is None or (isinstance(value, float) and math.isnan(value))


def _describe_type(value: Any) -> str:
    name = type(value).__name__
    return TYPE_NAMES.get(name) or (
        "a number" if isinstance(value, (int, float)) else name
    )


def split_label(split: str, language: str, parts: Mapping[str, Any]) -> str:
    """Return how a report calls a part of a split: by its language where there are several.

    >>> where_of("test", "de", {"de": 1}), where_of("test", "de", {"de": 1, "en": 2})
    ('test', 'test, de')
    """
    return split if len(parts) == 1 else f"{split}, {language}"


def select_languages(rows: pd.DataFrame, languages: Iterable[str]) -> pd.DataFrame:
    """Return the rows of some languages where the sentences of all languages stand in one row.

    XNLI's configuration all_languages has premises as {"de": ...} and hypotheses as {"language": ["de", ...],
    "translation": [...]}.

    Args:
        rows: as the file has them.
        languages: those that are wanted.

    Returns:
        Rows with the column language, in which they are.
    """
    parts = [rows.iloc[:0].assign(language="")]
    for language in languages:
        premises = [_translation(value, language) for value in rows["premise"]]
        hypotheses = [_translation(value, language) for value in rows["hypothesis"]]
        if any(premises):
            parts.append(
                rows.assign(premise=premises, hypothesis=hypotheses, language=language)
            )
    return pd.concat(parts)


def has_language_tables(rows: pd.DataFrame) -> bool:
    """Return whether all sentences are tables of languages."""
    return all(isinstance(value, Mapping) for name in SENTENCES for value in rows[name])


def row_languages(rows: pd.DataFrame) -> set[str]:
    """Return the languages of the first row, see ``of_languages``."""
    first = rows["premise"].iloc[0]
    return {str(language) for language in first.get("language", first)}


def _translation(value: Mapping[str, Any], language: str) -> Any:
    """Return the sentence of a language from a table of languages, None where there is none."""
    if "translation" in value and "language" in value:
        return dict(zip(value["language"], value["translation"], strict=False)).get(
            language
        )
    return value.get(language)


def report_labels(report: DataReport, dataset: str, found: Pairs, refuse: bool) -> None:
    """Add the pairs per label of every split, and pairs that stand in a split more than once.

    Raises:
        ValueError: for training pairs of one label alone, if ``refuse``.
    """
    for split, parts in found.items():
        for language, pairs in parts.items():
            where = split_label(split, language, parts)
            counts = Counter(pairs["label"])
            report.add(
                "classes",
                f"{where}: {list_counts({PAIR_LABELS[label]: counts[label] for label in sorted(counts)})}",
            )
            repeated = int(pairs.duplicated([*SENTENCES]).sum())
            differing = int(
                pairs.duplicated([*SENTENCES]).sum()
                - pairs.duplicated([*SENTENCES, "label"]).sum()
            )
            if repeated:
                labels = f", {differing:,} with another label" if differing else ""
                report.add(
                    "values",
                    f"{where}: {pluralize(repeated, 'pair')} given again{labels}",
                )
    (train,) = found["train"].values()
    if refuse and train["label"].nunique() == 1:
        label = PAIR_LABELS[train["label"].iloc[0]]
        raise ValueError(
            f"{dataset}: all {len(train):,} training pairs have the label {label}; there is nothing to learn"
        )


def check_overlap(report: DataReport, dataset: str, found: Pairs, refuse: bool) -> None:
    """Report pairs that stand in two splits.

    Args:
        report: gets a fact for each two splits that share pairs, or premises.
        dataset: name of the data set, for errors.
        found: all pairs of the splits, with their row in the file as index.
        refuse: raise for shared pairs.

    Raises:
        ValueError: names the first row and the number of pairs.
    """
    names = {"train": "training", "valid": "validation", "test": "test"}
    for part, other in (("test", "train"), ("valid", "train"), ("test", "valid")):
        known = {
            key for pairs in found[other].values() for key in _normalized_pairs(pairs)
        }
        premises = {key[0] for key in known}
        for language, pairs in found[part].items():
            keys = _normalized_pairs(pairs)
            where = (
                f"{names[part]} pairs"
                if len(found[part]) == 1
                else f"{names[part]} pairs in {language}"
            )
            shared = [
                row for row, key in zip(pairs.index, keys, strict=True) if key in known
            ]
            if shared:
                said = f"{len(shared):,} of {len(pairs):,} {where} are {names[other]} pairs, too"
                if refuse:
                    raise ValueError(
                        f"{dataset}: {said}, the first in row {shared[0]} of the {part} file"
                    )
                report.add("overlap", said)
            elif same := sum(key[0] in premises for key in keys):
                report.add(
                    "overlap",
                    f"{same:,} of {len(pairs):,} {where} have the premise of a {names[other]} pair",
                )


def _normalized_pairs(pairs: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """Return premise and hypothesis of every pair, with single blanks between words."""
    texts = ([" ".join(text.split()) for text in pairs[name]] for name in SENTENCES)
    return list(zip(*texts, strict=True))


def report_columns(report: DataReport, split: str, unused: Iterable[str]) -> None:
    """Add the columns of a split's files that are not read."""
    if names := sorted(set(unused)):
        noun = "column" if len(names) == 1 else "columns"
        report.add(
            "left out",
            f"{split}: the {noun} {list_first(names, 12)}, which nothing reads",
        )
