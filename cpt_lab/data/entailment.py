"""Sentence pairs for natural language inference: XNLI, your own, and embedded ones from a small grammar.

The layouts and what labels may be called: ``data/cards/own-pairs.md``. XNLI is ``xnli/`` in the data folder, in any of
these layouts. Errors name rows as a spreadsheet without its header does: the first is 1.
"""

import csv
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_extras.optional_libraries import library
from cpt_lab.data.common import SPLITS, some_of
from cpt_lab.data.files import DataNotFoundError, not_here, own_path, reading
from cpt_lab.data.report import DataReport, empty_report
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.entailment import EXPERIMENT, EntailmentRecipe
from cpt_lab.paths import data_dir

log = logging.getLogger(__name__)
LABELS = ("entailment", "neutral", "contradiction")
UNDECIDED = -1
# what a file may say -> label
SPELLINGS = {
    **{name: i for i, name in enumerate(LABELS)}, **{str(i): i for i in range(len(LABELS))},
    "contradictory": LABELS.index("contradiction"), "-": UNDECIDED, "-1": UNDECIDED,
}  # fmt: skip
TEMPLATES = {"train": 4998, "valid": 999, "test": 999}  # pairs, a third of every label
XNLI = "facebook/xnli"
CHECKPOINTS = {"bert-base-multilingual-cased": "google-bert/bert-base-multilingual-cased"}
CHECKPOINT_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
COLUMNS = {name: name for name in ("premise", "hypothesis", "label")}  # of pairs: ours -> a file's


@dataclass(frozen=True)
class EntailmentData:
    """Tables of sentence pairs, with the columns premise, hypothesis and label, a position in ``LABELS``."""

    # train, valid: in the recipe's language
    train: pd.DataFrame
    valid: pd.DataFrame
    test: dict[str, pd.DataFrame]  # by language, in the recipe's order
    title: str  # what the numbers are measured on, as figures must call it
    checksum: str  # of all of this
    report: DataReport = field(default_factory=empty_report)  # what was read, left out and changed


def load_entailment(recipe: EntailmentRecipe) -> EntailmentData:
    """Load and check the data of a recipe.

    A limit such as ``train_pairs`` takes a fixed random choice, the same in every run, as rows may be sorted.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when they have none of the documented layouts, or wrong contents: names the file and the row.
    """
    wanted = {"train": (recipe.language,), "valid": (recipe.language,), "test": recipe.test_languages}
    if recipe.dataset == "templates":
        found, title = _templates(wanted), "synthetic sentence pairs"
    else:
        EXPERIMENT.check_dataset(recipe.dataset)
        folder = data_dir() / "xnli" if recipe.dataset == "xnli" else own_path(recipe.dataset)
        if not folder.is_dir():
            raise not_here("xnli") if recipe.dataset == "xnli" else DataNotFoundError(f"there is no folder {folder}")
        read = {split: _read(folder, split, languages, recipe.language) for split, languages in wanted.items()}
        found = {split: parts for split, (parts, _) in read.items()}
        title = "XNLI" if recipe.dataset == "xnli" else f"own pairs ({folder.name})"
        title += f", {recipe.language}" if read["train"][1] else ""  # else the recipe's language is a mere name
    limits = {"train": recipe.train_pairs, "valid": recipe.valid_pairs, "test": recipe.test_pairs}
    digest = hashlib.sha256()
    for split, parts in found.items():
        for language, pairs in parts.items():
            parts[language] = pairs = pairs.iloc[some_of(len(pairs), limits[split])]
            digest.update(repr((split, language, *(pairs[name].tolist() for name in COLUMNS))).encode())
    train, valid = found["train"][recipe.language], found["valid"][recipe.language]
    title += f", {len(train):,} training pairs"
    return EntailmentData(train, valid, found["test"], title, digest.hexdigest()[:16])


def _templates(wanted: dict[str, tuple[str, ...]]) -> dict[str, dict[str, pd.DataFrame]]:
    if others := {language for languages in wanted.values() for language in languages} - {"en"}:
        raise ValueError(f"templates: no language {', '.join(sorted(others))}; there is en")
    made, out = sentence_pairs(sum(TEMPLATES.values())), {}
    for split, count in TEMPLATES.items():
        out[split] = {"en": pd.DataFrame(made[:count], columns=list(COLUMNS))}
        made = made[count:]
    return out


@dataclass(frozen=True)
class _File:
    """A file of a split: what its columns are called (ours -> its), and its language where all of it has one."""

    path: Path
    columns: dict[str, str]
    language: str | None = None


def _official(folder: Path, split: str) -> list[_File]:
    if split == "train":
        found = sorted(folder.glob("XNLI-MT-1.0*/multinli/multinli.train.*.tsv"))
        return [_File(path, {**COLUMNS, "hypothesis": "hypo"}, path.name.split(".")[2]) for path in found]
    path = folder / "XNLI-1.0" / {"valid": "xnli.dev.tsv", "test": "xnli.test.tsv"}[split]
    gold = {"language": "language", "premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
    return [_File(path, gold)] if path.exists() else []


def _hub(folder: Path, split: str) -> list[_File]:
    name = {"valid": "validation"}.get(split, split)
    return [_File(path, COLUMNS, path.parent.name) for path in sorted(folder.glob(f"*/{name}-*.parquet"))]


ENDINGS = ("parquet", "jsonl", "json", "csv", "tsv")


def _flat(folder: Path, split: str) -> list[_File]:
    names = {"valid": ("validation", "valid", "dev")}.get(split, (split,))
    found = [path for name in names for ending in ENDINGS if (path := folder / f"{name}.{ending}").exists()]
    if len(found) > 1:
        raise ValueError(f"{folder} needs one file for {split}, it has {', '.join(path.name for path in found)}")
    return [_File(path, COLUMNS) for path in found]


LAYOUTS: dict[str, Callable[[Path, str], list[_File]]] = {
    "XNLI-1.0/xnli.{dev,test}.tsv with XNLI-MT-1.0*/multinli/multinli.train.<language>.tsv": _official,
    "<language>/{train,validation,test}-*.parquet": _hub,
    "{train,validation,test}.{parquet,jsonl,json,csv,tsv}": _flat,
}


def _read(folder: Path, split: str, languages: tuple[str, ...], default: str) -> tuple[dict[str, pd.DataFrame], bool]:
    """Return the pairs of a split by language, and whether the files say what language they are in."""
    layouts = {form: find for form, find in LAYOUTS.items() if any(find(folder, s) for s in SPLITS)}
    if not layouts:
        raise ValueError(f"{folder} holds no sentence pairs; it needs one of: {'; '.join(LAYOUTS)}")
    form, find = next(iter(layouts.items()))
    files = find(folder, split)
    if not files:
        raise ValueError(f"{folder} has no {split} split; its layout is {form}")
    there = {file.language for file in files if file.language}
    checked, said = [], False
    for file in files:
        if file.language in (None, *languages):
            rows, in_file = _rows(file, default)
            said |= in_file
            there |= set(rows.language.dropna())
            checked.append(_checked(file, rows[rows.language.isin(languages)]))
    if missing := [language for language in languages if language not in there]:
        raise ValueError(f"{folder}: no {split} pairs in {', '.join(missing)}; there is {', '.join(sorted(there))}")
    whole, out = pd.concat(checked), {}
    for language in languages:
        rows = whole[whole.language == language]
        if rows.empty:
            raise ValueError(f"{folder}: no {split} pair in {language} has a label")
        out[language] = rows
    return out, said


def _rows(file: _File, default: str) -> tuple[pd.DataFrame, bool]:
    """Return a file's rows with the columns language, premise, hypothesis, label, numbered from 1; see ``_read``."""
    with reading(file.path):
        table = _table(file.path)
    if lacking := [name for name in file.columns.values() if name not in table]:
        there = ", ".join(map(str, table.columns))[:200] or "none"
        raise ValueError(f"{file.path}: needs the columns {', '.join(lacking)}; it has {there}")
    if table.empty:
        raise ValueError(f"{file.path} has no rows")
    rows = pd.DataFrame({ours: table[theirs] for ours, theirs in file.columns.items()})
    said = file.language is None and "language" in table
    rows["language"] = table["language"] if said else file.language or default
    rows.index = pd.RangeIndex(1, len(rows) + 1)
    return rows, said or file.language is not None


def _table(path: Path) -> pd.DataFrame:
    """Return all that a file holds. What .csv and .tsv hold is text: "007" stays what it is, and nothing is missing."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    if path.suffix in (".jsonl", ".json"):
        whole = path.read_text(encoding="utf-8").strip()
        if whole.startswith("["):
            return pd.DataFrame(json.loads(whole))
        return pd.DataFrame([json.loads(line) for line in whole.split("\n") if line.strip()])
    form: dict[str, Any] = {"sep": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    table = pd.read_csv(path, dtype=str, keep_default_na=False, **form)
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes what is too much in the first row for its name
        raise ValueError("row 1 has more fields than the header has names; are quotes missing?")
    return table


def _checked(file: _File, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a label, as a number; ValueError for a wrong label or an empty sentence."""
    labels = rows.label.map(lambda value: SPELLINGS.get(str(value).strip().lower()))
    if (wrong := labels.isna()).any():
        row = wrong.idxmax()
        raise ValueError(
            f"{file.path}, row {row}: label {rows.label[row]!r}; allowed are {', '.join(LABELS)}, or 0, 1, 2, "
            "and - for pairs to leave out"
        )
    keep = labels != UNDECIDED
    if not keep.all():
        log.info("%s: %d pairs without an agreed label left out", file.path, int((~keep).sum()))
    rows = rows.assign(label=labels.astype("int64"))[keep]
    for name in ("premise", "hypothesis"):
        empty = rows[name].isna() | (rows[name].astype(str).str.strip() == "")
        if empty.any():
            raise ValueError(f"{file.path}, row {empty.idxmax()}: the {name} is empty")
    return rows


def download(name: str, language: str = "de") -> Path:
    """Get one language of "xnli", or a pretrained model, through the Hugging Face hub's own client."""
    if name == "xnli":
        repository, kind, files = XNLI, "dataset", [f"{language}/*"]
    else:
        repository, kind, files = CHECKPOINTS[name], "model", CHECKPOINT_FILES
    folder = data_dir() / name
    library("huggingface_hub", "text").snapshot_download(
        repository, repo_type=kind, allow_patterns=files, local_dir=folder
    )
    return folder
