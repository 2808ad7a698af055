"""Checks of sentence pairs and facts about them: sentences, labels, repeated pairs, and pairs in two splits.

``select_languages`` reads rows that hold a sentence in many languages, as XNLI's all_languages has them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
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
Pairs = Mapping[
    str, Mapping[str, pd.DataFrame]
]  # tables of pairs by split and language


def check_sentences(path: Path, rows: pd.DataFrame) -> None:
    """Raise ValueError for the first row with an empty sentence, or with a value that is no text.

    Args:
        path: file of the rows, for the error.
        rows: sentence pairs by their row number in the file.
    """
    for name in SENTENCES:
        column = rows[name]
        is_empty = column.map(_is_empty)
        if is_empty.any():
            raise ValueError(f"{path}, row {is_empty.idxmax()}: the {name} is empty")
        is_text = column.map(_is_text)
        if not is_text.all():
            row = (~is_text).idxmax()
            kind = _describe_type(column[row])
            hint = f"; {TYPE_HINTS[kind]}" if kind in TYPE_HINTS else ""
            raise ValueError(
                f"{path}, row {row}: the {name} is {kind}, not a sentence{hint}"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_empty(value: Any) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return blank or value is None or (isinstance(value, float) and math.isnan(value))


def _describe_type(value: Any) -> str:
    name = type(value).__name__
    return TYPE_NAMES.get(name) or (
        "a number" if isinstance(value, (int, float)) else name
    )


def split_label(split: str, language: str, parts: Mapping[str, Any]) -> str:
    """Return the name of a split in reports, with the language if the split has several.

    >>> split_label("test", "de", {"de": 1}), split_label("test", "de", {"de": 1, "en": 2})
    ('test', 'test, de')
    """
    return split if len(parts) == 1 else f"{split}, {language}"


def select_languages(rows: pd.DataFrame, languages: Iterable[str]) -> pd.DataFrame:
    """Return the rows of some languages, from rows that hold the sentences of many languages.

    XNLI's configuration all_languages has premises as {"de": ...} and hypotheses as {"language": ["de", ...],
    "translation": [...]}.

    Args:
        rows: rows as the file has them.
        languages: languages to select.

    Returns:
        Rows with the added column ``language``.
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
    """Return the languages of the first row of language tables."""
    first = rows["premise"].iloc[0]
    return {str(language) for language in first.get("language", first)}


def _translation(value: Mapping[str, Any], language: str) -> Any:
    """Return the sentence of a language from a table of languages, None without one."""
    if "translation" in value and "language" in value:
        translations = dict(zip(value["language"], value["translation"], strict=False))
        return translations.get(language)
    return value.get(language)


def report_labels(
    report: DataReport, dataset: str, splits: Pairs, refuse: bool
) -> None:
    """Add facts about the pairs per label of every split, and about repeated pairs.

    Args:
        report: gets the facts.
        dataset: name of the data set, for errors.
        splits: pairs by split and language.
        refuse: whether training pairs with a single label are an error.

    Raises:
        ValueError: for training pairs with a single label, if ``refuse``.
    """
    for split, parts in splits.items():
        for language, pairs in parts.items():
            label = split_label(split, language, parts)
            counts = Counter(pairs["label"])
            count_by_name = {
                PAIR_LABELS[number]: counts[number] for number in sorted(counts)
            }
            report.add("classes", f"{label}: {list_counts(count_by_name)}")
            num_repeated = int(pairs.duplicated([*SENTENCES]).sum())
            num_same_label = int(pairs.duplicated([*SENTENCES, "label"]).sum())
            if num_repeated:
                text = f"{label}: {pluralize(num_repeated, 'pair')} given again"
                if num_repeated > num_same_label:
                    text += f", {num_repeated - num_same_label:,} with another label"
                report.add("values", text)

    (train,) = splits["train"].values()
    if refuse and train["label"].nunique() == 1:
        only_label = PAIR_LABELS[train["label"].iloc[0]]
        raise ValueError(
            f"{dataset}: all {len(train):,} training pairs have the label {only_label}; there is nothing to learn"
        )


def check_overlap(
    report: DataReport, dataset: str, splits: Pairs, refuse: bool
) -> None:
    """Report pairs that are in two splits, or refuse them.

    Args:
        report: gets a fact for each two splits that share pairs, or premises.
        dataset: name of the data set, for errors.
        splits: pairs by split and language, with their row in the file as index.
        refuse: whether shared pairs are an error.

    Raises:
        ValueError: names the first row and the number of pairs.
    """
    names = {"train": "training", "valid": "validation", "test": "test"}
    for split, other_split in (
        ("test", "train"),
        ("valid", "train"),
        ("test", "valid"),
    ):
        other_keys = {
            key
            for pairs in splits[other_split].values()
            for key in _normalized_pairs(pairs)
        }
        other_premises = {premise for premise, _ in other_keys}
        for language, pairs in splits[split].items():
            keys = _normalized_pairs(pairs)
            pairs_name = f"{names[split]} pairs"
            if len(splits[split]) > 1:
                pairs_name += f" in {language}"
            shared_rows = [
                row
                for row, key in zip(pairs.index, keys, strict=True)
                if key in other_keys
            ]
            num_shared_premises = sum(premise in other_premises for premise, _ in keys)
            if shared_rows:
                text = f"{len(shared_rows):,} of {len(pairs):,} {pairs_name} are {names[other_split]} pairs, too"
                if refuse:
                    raise ValueError(
                        f"{dataset}: {text}, the first in row {shared_rows[0]} of the {split} file"
                    )
                report.add("overlap", text)
            elif num_shared_premises:
                report.add(
                    "overlap",
                    f"{num_shared_premises:,} of {len(pairs):,} {pairs_name} have the premise of a "
                    f"{names[other_split]} pair",
                )


def _normalized_pairs(pairs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return premise and hypothesis of every pair in lower case, with single blanks between words."""
    premises = [" ".join(text.casefold().split()) for text in pairs["premise"]]
    hypotheses = [" ".join(text.casefold().split()) for text in pairs["hypothesis"]]
    return list(zip(premises, hypotheses, strict=True))


def report_columns(report: DataReport, split: str, unused: Iterable[str]) -> None:
    """Add a fact about the columns of a split's files that are not read."""
    if names := sorted(set(unused)):
        noun = "column" if len(names) == 1 else "columns"
        report.add(
            "left out",
            f"{split}: the {noun} {list_first(names, 12)}, which nothing reads",
        )
