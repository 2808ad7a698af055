"""Sentence pairs for natural language inference: XNLI, your own, and embedded ones from a small grammar.

The layouts and what labels may be called: ``data/cards/own-pairs.md``. XNLI is ``xnli/`` in the data folder, in any of
these layouts. Errors name rows as a spreadsheet without its header does: the first is 1.
"""

import csv
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import (
    DataNotFoundError,
    explain_read_errors,
    missing_data_error,
    own_path,
)
from cpt_lab.data.pair_facts import (
    PAIR_LABELS,
    check_overlap,
    check_sentences,
    has_language_tables,
    report_columns,
    report_labels,
    row_languages,
    select_languages,
    split_label,
)
from cpt_lab.data.report import DataReport, empty_report, list_first, pluralize
from cpt_lab.data.splits import SPLITS, choose_samples
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.data.unread_files import is_below_hidden, report_unread
from cpt_lab.experiments.entailment import EXPERIMENT, EntailmentRecipe
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import data_dir

log = logging.getLogger(__name__)
UNDECIDED_LABEL = -1
# what a file may say -> label
LABEL_SPELLINGS = {
    **{name: i for i, name in enumerate(PAIR_LABELS)},
    **{str(i): i for i in range(len(PAIR_LABELS))},
    **{
        f"{i}.0": i for i in range(len(PAIR_LABELS))
    },  # a column in which a label is missing has fractions
    "contradictory": PAIR_LABELS.index("contradiction"),
    "-": UNDECIDED_LABEL,
    "-1": UNDECIDED_LABEL,
    "-1.0": UNDECIDED_LABEL,
}
TEMPLATE_PAIRS = {
    "train": 4998,
    "valid": 999,
    "test": 999,
}  # pairs, a third of every label
XNLI_REPOSITORY = "facebook/xnli"
CHECKPOINTS = {
    "bert-base-multilingual-cased": "google-bert/bert-base-multilingual-cased"
}
CHECKPOINT_FILES = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
]
PAIR_COLUMNS = {
    name: name for name in ("premise", "hypothesis", "label")
}  # of pairs: ours -> a file's
SNLI_COLUMNS = {
    "premise": "sentence1",
    "hypothesis": "sentence2",
    "label": "gold_label",
}  # SNLI's and MultiNLI's
LANGUAGE_PATTERN = re.compile(
    r"[a-z]{2,3}([-_][A-Za-z]{2,8})?"
)  # a folder of this name holds pairs of a language
NON_LANGUAGE_FOLDERS = ("all", "raw", "csv", "tmp", "new", "old")
SHARD_PATTERN = re.compile(r"-(\d+)-of-(\d+)\.parquet$")
UNREAD_REASON = "no file of the layout that is read"


@dataclass(frozen=True)
class EntailmentData:
    """Tables of sentence pairs, with the columns premise, hypothesis and label, a position in ``LABELS``."""

    # train, valid: in the recipe's language
    train: pd.DataFrame
    valid: pd.DataFrame
    test: dict[str, pd.DataFrame]  # by language, in the recipe's order
    title: str  # what the numbers are measured on, as figures must call it
    checksum: str  # of all of this
    report: DataReport = field(
        default_factory=empty_report
    )  # what was read, left out and changed


def load_entailment(recipe: EntailmentRecipe) -> EntailmentData:
    """Load and check the data of a recipe.

    A limit such as ``train_pairs`` takes a fixed random choice, the same in every run, as rows may be sorted.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when they have none of the documented layouts, or wrong contents: names the file and the row.
    """
    wanted = {
        "train": (recipe.language,),
        "valid": (recipe.language,),
        "test": recipe.test_languages,
    }
    report = DataReport(recipe.dataset)
    if recipe.dataset == "templates":
        found, title = _template_pairs(wanted), "synthetic sentence pairs"
        report.add(
            "read", f"{sum(TEMPLATE_PAIRS.values()):,} pairs of a grammar of 48 words"
        )
    else:
        found, title = _read_files(recipe, wanted, report)
    own = is_own(recipe.dataset)
    report_labels(report, recipe.dataset, found, refuse=own)
    check_overlap(report, recipe.dataset, found, refuse=own)
    limits = {
        "train": recipe.train_pairs,
        "valid": recipe.valid_pairs,
        "test": recipe.test_pairs,
    }
    digest = hashlib.sha256()
    for split, parts in found.items():
        for language, pairs in parts.items():
            parts[language] = _limit_pairs(
                pairs, limits[split], split_label(split, language, parts), report
            )
            digest.update(
                repr(
                    (
                        split,
                        language,
                        *(parts[language][name].tolist() for name in PAIR_COLUMNS),
                    )
                ).encode()
            )
    if not recipe.checkpoint:
        report.add(
            "changed",
            "letters become small and lose their accents before they are cut into word pieces",
        )
    report.log_notices(log)
    train, valid = found["train"][recipe.language], found["valid"][recipe.language]
    title += f", {len(train):,} training pairs"
    return EntailmentData(
        train, valid, found["test"], title, digest.hexdigest()[:16], report
    )


def _read_files(
    recipe: EntailmentRecipe, wanted: dict[str, tuple[str, ...]], report: DataReport
) -> tuple[dict[str, dict[str, pd.DataFrame]], str]:
    """Return the pairs of files by split and language, and their title."""
    EXPERIMENT.check_dataset(recipe.dataset)
    folder = (
        data_dir() / "xnli" if recipe.dataset == "xnli" else own_path(recipe.dataset)
    )
    if not folder.is_dir():
        raise (
            missing_data_error("xnli")
            if recipe.dataset == "xnli"
            else DataNotFoundError(f"there is no folder {folder}")
        )
    reader = _PairReader(folder, recipe.language, report)
    found = {
        split: reader.read(split, languages) for split, languages in wanted.items()
    }
    reader.report_rest()
    title = "XNLI" if recipe.dataset == "xnli" else f"own pairs ({folder.name})"
    title += (
        f", {recipe.language}" if reader.has_language else ""
    )  # else the recipe's language is a mere name
    return found, title


def _limit_pairs(
    pairs: pd.DataFrame, limit: int | None, where: str, report: DataReport
) -> pd.DataFrame:
    """Return as many pairs as a recipe wants, and report the rest."""
    used = pairs.iloc[choose_samples(len(pairs), limit)]
    if len(used) < len(pairs):
        report.add(
            "left out",
            f"all but {len(used):,} of {len(pairs):,} pairs of {where}, a fixed random choice",
        )
    report.add("split", f"{where}: {pluralize(len(used), 'pair')}")
    return used


def _template_pairs(
    wanted: dict[str, tuple[str, ...]],
) -> dict[str, dict[str, pd.DataFrame]]:
    if others := {
        language for languages in wanted.values() for language in languages
    } - {"en"}:
        raise ValueError(
            f"templates: no language {', '.join(sorted(others))}; there is en"
        )
    made, out = sentence_pairs(sum(TEMPLATE_PAIRS.values())), {}
    for split, count in TEMPLATE_PAIRS.items():
        out[split] = {"en": pd.DataFrame(made[:count], columns=list(PAIR_COLUMNS))}
        made = made[count:]
    return out


@dataclass(frozen=True)
class _PairFile:
    """A file of a split: what its columns are called (ours -> its), and its language where all of it has one."""

    path: Path
    columns: dict[str, str]
    language: str | None = None


def _find_official_files(folder: Path, split: str) -> list[_PairFile]:
    if split == "train":
        found = sorted(folder.glob("XNLI-MT-1.0*/multinli/multinli.train.*.tsv"))
        return [
            _PairFile(
                path, {**PAIR_COLUMNS, "hypothesis": "hypo"}, path.name.split(".")[2]
            )
            for path in found
        ]
    path = (
        folder / "XNLI-1.0" / {"valid": "xnli.dev.tsv", "test": "xnli.test.tsv"}[split]
    )
    gold = {
        "language": "language",
        "premise": "sentence1",
        "hypothesis": "sentence2",
        "label": "gold_label",
    }
    return [_PairFile(path, gold)] if path.exists() else []


def _find_hub_files(folder: Path, split: str) -> list[_PairFile]:
    """Return the hub's files, in a folder for each language, in one for all, or in none."""
    name = {"valid": "validation"}.get(split, split)
    found = [
        *sorted(folder.glob(f"*/{name}-*.parquet")),
        *sorted(folder.glob(f"{name}-*.parquet")),
    ]
    files = [path for path in found if not is_below_hidden(path.relative_to(folder))]
    by_language = [
        path
        for path in files
        if path.parent != folder and is_language(path.parent.name)
    ]
    if by_language:
        return [_PairFile(path, PAIR_COLUMNS, path.parent.name) for path in by_language]
    if len(parents := {path.parent for path in files}) > 1:
        names = ", ".join(
            sorted(f"{path.relative_to(folder).as_posix()}/" for path in parents)
        )
        raise ValueError(
            f"{folder} has pairs for {split} in several folders: {names}; keep one"
        )
    return [_PairFile(path, PAIR_COLUMNS) for path in files]


def is_language(name: str) -> bool:
    """Return whether a folder is called as a language is.

    >>> is_language("de"), is_language("zh-Hans"), is_language("data"), is_language("plain_text")
    (True, True, False, False)
    """
    return (
        LANGUAGE_PATTERN.fullmatch(name) is not None
        and name not in NON_LANGUAGE_FOLDERS
    )


PAIR_FILE_ENDINGS = ("parquet", "jsonl", "json", "csv", "tsv")


def _find_flat_files(folder: Path, split: str) -> list[_PairFile]:
    names = {"valid": ("validation", "valid", "dev")}.get(split, (split,))
    found = [
        path
        for name in names
        for ending in PAIR_FILE_ENDINGS
        if (path := folder / f"{name}.{ending}").exists()
    ]
    if len(found) > 1:
        raise ValueError(
            f"{folder} needs one file for {split}, it has {', '.join(path.name for path in found)}"
        )
    return [_PairFile(path, PAIR_COLUMNS) for path in found]


LAYOUTS: dict[str, Callable[[Path, str], list[_PairFile]]] = {
    "XNLI-1.0/xnli.{dev,test}.tsv with XNLI-MT-1.0*/multinli/multinli.train.<language>.tsv": _find_official_files,
    "<language>/{train,validation,test}-*.parquet": _find_hub_files,
    "{train,validation,test}.{parquet,jsonl,json,csv,tsv}": _find_flat_files,
}


class _PairReader:
    """Reads the splits of a folder, and reports what of it is not read.

    Args:
        folder: with files in one of ``LAYOUTS``; the first that fits is read.
        default: language of files that do not say theirs.
        report: gets the facts.

    Attributes:
        has_language: whether the training files say what language they are in.
    """

    def __init__(self, folder: Path, default: str, report: DataReport) -> None:
        layouts = {
            form: find
            for form, find in LAYOUTS.items()
            if any(find(folder, s) for s in SPLITS)
        }
        if not layouts:
            raise ValueError(
                f"{folder} holds no sentence pairs; it needs one of: {'; '.join(LAYOUTS)}"
            )
        self.form, self.find = next(iter(layouts.items()))
        self.folder, self.default, self.report = folder, default, report
        self.has_language = False
        self.named: set[Path] = set()  # files that were read, or that a fact names

    def read(self, split: str, languages: tuple[str, ...]) -> dict[str, pd.DataFrame]:
        """Return the pairs of a split by language."""
        files = self.find(self.folder, split)
        if not files:
            places = {
                file.path.parent
                for other in SPLITS
                for file in self.find(self.folder, other)
            }
            found = list_first(
                sorted(path.name for place in places for path in place.iterdir()), 6
            )
            raise ValueError(
                f"{self.folder} has no {split} split; its layout is {self.form}; it has {found}"
            )
        _check_shards(self.folder, split, files)
        self.named |= {file.path for file in files}
        there = {file.language for file in files if file.language}
        checked, unused_columns, said = [], set[str](), False
        for file in files:
            if file.language not in (None, *languages):
                continue
            rows, in_file, unused = _read_rows(file, self.default, languages)
            said |= in_file
            there |= set(rows.attrs["languages"])
            unused_columns |= unused
            if without := int(rows.language.isna().sum()):
                pairs = f"{pluralize(without, 'pair')} of {file.path.name}"
                self.report.add("left out", f"{split}: {pairs} without a language")
            wanted = rows[rows.language.isin(languages)]
            if len(wanted):
                checked.append(_check_rows(file, wanted, split, self.report))
        if missing := [language for language in languages if language not in there]:
            others = ", ".join(sorted(there))
            raise ValueError(
                f"{self.folder}: no {split} pairs in {', '.join(missing)}; there is {others}"
            )
        self._report_split(split, files, languages, there, unused_columns)
        if split == "train":
            self.has_language = said
        whole = pd.concat(checked)
        out = {language: whole[whole.language == language] for language in languages}
        for language, rows in out.items():
            if rows.empty:
                raise ValueError(
                    f"{self.folder}: no {split} pair in {language} has a label"
                )
        return out

    def _report_split(
        self,
        split: str,
        files: list[_PairFile],
        languages: tuple[str, ...],
        there: set[str],
        unused: Collection[str],
    ) -> None:
        read = [file.path for file in files if file.language in (None, *languages)]
        names = [path.relative_to(self.folder).as_posix() for path in read]
        self.report.add("read", f"{split}: {list_first(names)}")
        report_columns(self.report, split, unused)
        if others := sorted(there - set(languages)):
            self.report.add(
                "left out",
                f"{split}: pairs in {list_first(others, 20)}; the recipe takes {', '.join(languages)}",
            )

    def report_rest(self) -> None:
        """Report the files of the folder that are of no split."""
        report_unread(self.report, self.folder, self.named, UNREAD_REASON)


def _check_shards(folder: Path, split: str, files: list[_PairFile]) -> None:
    """Refuse a download that lacks parts, and two files for one language of the official layout."""
    by_folder: dict[Path, list[str]] = {}
    for file in files:
        by_folder.setdefault(file.path.parent, []).append(file.path.name)
    for place, names in by_folder.items():
        numbers = [match for name in names if (match := SHARD_PATTERN.search(name))]
        for count in {match[2] for match in numbers}:
            there = {int(match[1]) for match in numbers if match[2] == count}
            if lacking := sorted(set(range(int(count))) - there):
                where = place.relative_to(folder).as_posix()
                raise ValueError(
                    f"{folder}: {where}/ lacks part {lacking[0]} of {int(count)} of the {split} split"
                )
    official = [
        file.path for file in files if file.path.suffix == ".tsv" and file.language
    ]
    languages = [file.language for file in files if file.path in official]
    if twice := sorted(
        {str(language) for language in languages if languages.count(language) > 1}
    ):
        raise ValueError(
            f"{folder} has several files for {split} in {', '.join(twice)}; keep one folder XNLI-MT-1.0*"
        )


def _read_rows(
    file: _PairFile, default: str, languages: Collection[str]
) -> tuple[pd.DataFrame, bool, set[str]]:
    """Return a file's rows, whether it says their language, and its columns that are not read.

    Rows have the columns language, premise, hypothesis and label, are numbered from 1, and have the languages that are
    there in ``attrs``.
    """
    with explain_read_errors(file.path):
        table = _read_table(file.path)
    columns = _columns(file, table)
    if table.empty:
        raise ValueError(f"{file.path} has no rows")
    rows = pd.DataFrame(
        {ours: table[theirs] for ours, theirs in columns.items()}
    ).astype(object)
    rows.index = pd.RangeIndex(1, len(rows) + 1)
    if names := _label_names(file.path, columns["label"]):
        rows["label"] = [
            names[int(value)] if value in range(len(names)) else value
            for value in rows["label"]
        ]
    said = file.language is None and "language" in table
    unused = (
        set(map(str, table.columns))
        - set(columns.values())
        - ({"language"} if said else set())
    )
    if has_language_tables(rows):
        there, said = row_languages(rows), True
        rows = select_languages(rows, languages)
    else:
        rows["language"] = (
            table["language"].to_numpy() if said else file.language or default
        )
        rows["language"] = rows["language"].map(_language_name)
        there = set(rows.language.dropna())
    rows.attrs["languages"] = sorted(map(str, there))
    return rows, said or file.language is not None, unused


def _language_name(value: Any) -> str | None:
    """Return the name of a language as a table has it, None where there is none."""
    return value.strip() or None if isinstance(value, str) else None


def _columns(file: _PairFile, table: pd.DataFrame) -> dict[str, str]:
    """Return what the columns of a file are called, ours -> its; ValueError where one is missing."""
    columns = file.columns
    if columns is PAIR_COLUMNS:  # SNLI's names, where ours are not there
        replaced = {
            name: other
            for name, other in SNLI_COLUMNS.items()
            if name not in table and other in table
        }
        columns = {**PAIR_COLUMNS, **replaced}
    if lacking := [name for name in columns.values() if name not in table]:
        there = ", ".join(map(str, table.columns))[:200] or "none"
        raise ValueError(
            f"{file.path}: needs the columns {', '.join(lacking)}; it has {there}"
        )
    return columns


def _label_names(path: Path, column: str) -> list[str]:
    """Return the names of a column's labels as Hugging Face's datasets store them in .parquet, else none."""
    if path.suffix != ".parquet":
        return []
    from pyarrow import parquet

    with explain_read_errors(path):
        stored = (parquet.read_schema(path).metadata or {}).get(b"huggingface", b"{}")
        features = json.loads(stored).get("info", {}).get("features", {})
        return [str(name) for name in features.get(column, {}).get("names") or []]


def _read_table(path: Path) -> pd.DataFrame:
    """Return all that a file holds. What .csv and .tsv hold is text: "007" stays what it is, and nothing is missing."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    if path.suffix in (".jsonl", ".json"):
        whole = path.read_text(encoding="utf-8").strip()
        if whole.startswith("["):
            return pd.DataFrame(json.loads(whole))
        return pd.DataFrame(
            [json.loads(line) for line in whole.split("\n") if line.strip()]
        )
    form: dict[str, Any] = (
        {"sep": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    )
    table = pd.read_csv(path, dtype=str, keep_default_na=False, **form)
    if not isinstance(
        table.index, pd.RangeIndex
    ):  # pandas takes what is too much in the first row for its name
        raise ValueError(
            "row 1 has more fields than the header has names; are quotes missing?"
        )
    return table


def _check_rows(
    file: _PairFile, rows: pd.DataFrame, split: str, report: DataReport
) -> pd.DataFrame:
    """Return the rows that have a label, as a number; ValueError for a wrong label or what is no sentence."""
    labels = rows.label.map(
        lambda value: LABEL_SPELLINGS.get(str(value).strip().lower())
    )
    if (wrong := labels.isna()).any():
        row = wrong.idxmax()
        raise ValueError(
            f"{file.path}, row {row}: label {rows.label[row]!r}; allowed are {', '.join(PAIR_LABELS)}, or 0, 1, 2, "
            "and - for pairs to leave out"
        )
    keep = labels != UNDECIDED_LABEL
    if undecided := int((~keep).sum()):
        log.info("%s: %d pairs without an agreed label left out", file.path, undecided)
        report.add(
            "left out",
            f"{split}: {pluralize(undecided, 'pair')} of {file.path.name} without an agreed label",
        )
    if rows.label.map(lambda value: str(value).strip()[:1].isdigit()).any():
        report.add(
            "markers", f"{split}: labels 0, 1, 2 are read as {', '.join(PAIR_LABELS)}"
        )
    rows = rows.assign(label=labels.astype("int64"))[keep]
    check_sentences(file.path, rows)
    return rows


def download(name: str, language: str = "de") -> Path:
    """Get one language of "xnli", or a pretrained model, through the Hugging Face hub's own client."""
    if name == "xnli":
        repository, kind, files = XNLI_REPOSITORY, "dataset", [f"{language}/*"]
    else:
        repository, kind, files = CHECKPOINTS[name], "model", CHECKPOINT_FILES
    folder = data_dir() / name
    import_optional("huggingface_hub", "text").snapshot_download(
        repository, repo_type=kind, allow_patterns=files, local_dir=folder
    )
    return folder
