"""Sentence pairs for natural language inference: XNLI, the user's own, and embedded ones from a small grammar.

``load_entailment`` reads and checks the pairs of a recipe; the layouts and the labels they may have are described in
``data/cards/own-pairs.md``. XNLI is the folder ``xnli/`` in the data folder, in any of these layouts. Errors number
rows from 1, without the header.
"""

import csv
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
    SENTENCES,
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
# Labels by the words and numbers that files have for them.
LABEL_SPELLINGS = {
    "contradictory": PAIR_LABELS.index("contradiction"),
    "-": UNDECIDED_LABEL,
    "-1": UNDECIDED_LABEL,
    "-1.0": UNDECIDED_LABEL,
}
for _number, _name in enumerate(PAIR_LABELS):
    # pandas reads numbers as floats where a label of the column is missing.
    LABEL_SPELLINGS |= {_name: _number, str(_number): _number, f"{_number}.0": _number}
TEMPLATE_PAIRS = {
    "train": 4998,
    "valid": 999,
    "test": 999,
}  # numbers of pairs, a third of them of each label
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
    """Tables of sentence pairs, with the columns premise, hypothesis and label, a position in ``PAIR_LABELS``.

    Attributes:
        train: training pairs in the recipe's language.
        valid: validation pairs in the recipe's language.
        test: test pairs by language, in the recipe's order.
        title: name of the data in figures and rows.
        checksum: checksum of all pairs.
        report: what was read, left out and changed.
    """

    train: pd.DataFrame
    valid: pd.DataFrame
    test: dict[str, pd.DataFrame]
    title: str
    checksum: str
    report: DataReport = field(default_factory=empty_report)


def load_entailment(recipe: EntailmentRecipe) -> EntailmentData:
    """Load and check the sentence pairs of a recipe.

    A limit such as ``train_pairs`` takes a fixed random choice, the same in every run, as rows may be sorted.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when they have none of the documented layouts, or wrong contents: names the file and the row.
    """
    languages_by_split = {
        "train": (recipe.language,),
        "valid": (recipe.language,),
        "test": recipe.test_languages,
    }
    report = DataReport(recipe.dataset)
    if recipe.dataset == "templates":
        splits, title = _template_pairs(languages_by_split), "synthetic sentence pairs"
        report.add(
            "read", f"{sum(TEMPLATE_PAIRS.values()):,} pairs of a grammar of 48 words"
        )
    else:
        splits, title = _read_files(recipe, languages_by_split, report)
    refuse = is_own(recipe.dataset)
    report_labels(report, recipe.dataset, splits, refuse=refuse)
    check_overlap(report, recipe.dataset, splits, refuse=refuse)

    limits = {
        "train": recipe.train_pairs,
        "valid": recipe.valid_pairs,
        "test": recipe.test_pairs,
    }
    digest = hashlib.sha256()
    for split, parts in splits.items():
        for language, pairs in parts.items():
            label = split_label(split, language, parts)
            used = _limit_pairs(pairs, limits[split], label, report)
            parts[language] = used
            columns = [used[name].tolist() for name in PAIR_COLUMNS]
            digest.update(repr((split, language, *columns)).encode())
    if not recipe.checkpoint:
        report.add(
            "changed",
            "letters become small and lose their accents before they are cut into word pieces",
        )
    report.log_notices(log)
    train, valid = splits["train"][recipe.language], splits["valid"][recipe.language]
    title += f", {len(train):,} training pairs"
    return EntailmentData(
        train, valid, splits["test"], title, digest.hexdigest()[:16], report
    )


def _read_files(
    recipe: EntailmentRecipe,
    languages_by_split: dict[str, tuple[str, ...]],
    report: DataReport,
) -> tuple[dict[str, dict[str, pd.DataFrame]], str]:
    """Return the pairs of files by split and language, and their title."""
    EXPERIMENT.check_dataset(recipe.dataset)
    is_xnli = recipe.dataset == "xnli"
    folder = data_dir() / "xnli" if is_xnli else own_path(recipe.dataset)
    if not folder.is_dir():
        raise (
            missing_data_error("xnli")
            if is_xnli
            else DataNotFoundError(f"there is no folder {folder}")
        )

    reader = _PairReader(folder, recipe.language, report)
    splits = {
        split: reader.read(split, languages)
        for split, languages in languages_by_split.items()
    }
    reader.report_other_files()
    title = "XNLI" if is_xnli else f"own pairs ({folder.name})"
    if reader.has_language:  # otherwise the recipe's language is only a name
        title += f", {recipe.language}"
    return splits, title


def _limit_pairs(
    pairs: pd.DataFrame, limit: int | None, label: str, report: DataReport
) -> pd.DataFrame:
    """Return at most ``limit`` pairs of a split; report its name, ``label``, and the numbers of pairs."""
    used = pairs.iloc[choose_samples(len(pairs), limit)]
    if len(used) < len(pairs):
        report.add(
            "left out",
            f"all but {len(used):,} of {len(pairs):,} pairs of {label}, a fixed random choice",
        )
    report.add("split", f"{label}: {pluralize(len(used), 'pair')}")
    return used


def _template_pairs(
    languages_by_split: dict[str, tuple[str, ...]],
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return pairs from the grammar by split and language; ValueError for another language than "en"."""
    unknown = set().union(*languages_by_split.values()) - {"en"}
    if unknown:
        raise ValueError(
            f"templates: no language {', '.join(sorted(unknown))}; there is en"
        )
    pairs, splits = sentence_pairs(sum(TEMPLATE_PAIRS.values())), {}
    for split, count in TEMPLATE_PAIRS.items():
        splits[split] = {"en": pd.DataFrame(pairs[:count], columns=list(PAIR_COLUMNS))}
        pairs = pairs[count:]
    return splits


@dataclass(frozen=True)
class _PairFile:
    """A file of a split.

    Attributes:
        path: path of the file.
        columns: name in the file of each column of ``PAIR_COLUMNS``.
        language: language of all pairs in the file; None if it has a column of languages, or does not say.
    """

    path: Path
    columns: dict[str, str]
    language: str | None = None


def _find_official_files(folder: Path, split: str) -> list[_PairFile]:
    if split == "train":
        paths = sorted(folder.glob("XNLI-MT-1.0*/multinli/multinli.train.*.tsv"))
        return [
            _PairFile(
                path, {**PAIR_COLUMNS, "hypothesis": "hypo"}, path.name.split(".")[2]
            )
            for path in paths
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
    """Return the files of a split as the hub stores them: in a folder for each language, in one folder, or in none."""
    name = {"valid": "validation"}.get(split, split)
    paths = [
        *sorted(folder.glob(f"*/{name}-*.parquet")),
        *sorted(folder.glob(f"{name}-*.parquet")),
    ]
    paths = [path for path in paths if not is_below_hidden(path.relative_to(folder))]
    in_language_folders = [
        path
        for path in paths
        if path.parent != folder and is_language(path.parent.name)
    ]
    if in_language_folders:
        return [
            _PairFile(path, PAIR_COLUMNS, path.parent.name)
            for path in in_language_folders
        ]

    parents = {path.parent for path in paths}
    if len(parents) > 1:
        names = sorted(f"{path.relative_to(folder).as_posix()}/" for path in parents)
        raise ValueError(
            f"{folder} has pairs for {split} in several folders: {', '.join(names)}; keep one"
        )
    return [_PairFile(path, PAIR_COLUMNS) for path in paths]


def is_language(name: str) -> bool:
    """Return whether a folder has a name that stands for a language.

    >>> is_language("de"), is_language("zh-Hans"), is_language("data"), is_language("plain_text")
    (True, True, False, False)
    """
    return (
        LANGUAGE_PATTERN.fullmatch(name) is not None
        and name not in NON_LANGUAGE_FOLDERS
    )


PAIR_FILE_ENDINGS = ("parquet", "jsonl", "json", "csv", "tsv")


def _find_flat_files(folder: Path, split: str) -> list[_PairFile]:
    """Return the file of a split that lies directly in a folder; ValueError for several."""
    names = {"valid": ("validation", "valid", "dev")}.get(split, (split,))
    candidates = [
        folder / f"{name}.{ending}" for name in names for ending in PAIR_FILE_ENDINGS
    ]
    paths = [path for path in candidates if path.exists()]
    if len(paths) > 1:
        raise ValueError(
            f"{folder} needs one file for {split}, it has {', '.join(path.name for path in paths)}"
        )
    return [_PairFile(path, PAIR_COLUMNS) for path in paths]


LAYOUTS: dict[str, Callable[[Path, str], list[_PairFile]]] = {
    "XNLI-1.0/xnli.{dev,test}.tsv with XNLI-MT-1.0*/multinli/multinli.train.<language>.tsv": _find_official_files,
    "<language>/{train,validation,test}-*.parquet": _find_hub_files,
    "{train,validation,test}.{parquet,jsonl,json,csv,tsv}": _find_flat_files,
}


class _PairReader:
    """Reads the splits of a folder, and reports what of it is not read.

    Args:
        folder: folder with files in one of ``LAYOUTS``; the first that fits is read.
        default: language of files that do not say theirs.
        report: gets the facts.

    Attributes:
        has_language: whether the training files say what language they are in.
        used_files: files that were read, or that a fact names.
    """

    def __init__(self, folder: Path, default: str, report: DataReport) -> None:
        self.folder, self.default, self.report = folder, default, report
        self.layout, self.find = self._choose_layout()
        self.has_language = False
        self.used_files: set[Path] = set()

    def _choose_layout(self) -> tuple[str, Callable[[Path, str], list[_PairFile]]]:
        """Return the first layout in which the folder has files, and its function that finds them."""
        for layout, find in LAYOUTS.items():
            if any(find(self.folder, split) for split in SPLITS):
                return layout, find
        raise ValueError(
            f"{self.folder} holds no sentence pairs; it needs one of: {'; '.join(LAYOUTS)}"
        )

    def read(self, split: str, languages: tuple[str, ...]) -> dict[str, pd.DataFrame]:
        """Return the pairs of a split by language."""
        files = self._find_split(split)
        _check_shards(self.folder, split, files)
        self.used_files |= {file.path for file in files}
        available = {file.language for file in files if file.language}
        tables, unused_columns, says_language = [], set[str](), False
        for file in files:
            if file.language not in (None, *languages):
                continue
            content = _read_rows(file, self.default, languages)
            rows = content.rows
            says_language |= content.says_language
            available |= content.languages
            unused_columns |= content.unused_columns
            num_without = int(rows.language.isna().sum())
            if num_without:
                pairs = f"{pluralize(num_without, 'pair')} of {file.path.name}"
                self.report.add("left out", f"{split}: {pairs} without a language")
            selected = rows[rows.language.isin(languages)]
            if len(selected):
                tables.append(_check_rows(file, selected, split, self.report))
        missing = [language for language in languages if language not in available]
        if missing:
            raise ValueError(
                f"{self.folder}: no {split} pairs in {', '.join(missing)}; there is {', '.join(sorted(available))}"
            )
        self._report_split(split, files, languages, available, unused_columns)
        if split == "train":
            self.has_language = says_language

        table = pd.concat(tables)
        pairs_by_language = {
            language: table[table.language == language] for language in languages
        }
        for language, rows in pairs_by_language.items():
            if rows.empty:
                raise ValueError(
                    f"{self.folder}: no {split} pair in {language} has a label"
                )
        return pairs_by_language

    def _find_split(self, split: str) -> list[_PairFile]:
        """Return the files of a split; ValueError without any."""
        files = self.find(self.folder, split)
        if files:
            return files
        folders = set()
        for other_split in SPLITS:
            folders |= {
                file.path.parent for file in self.find(self.folder, other_split)
            }
        names = sorted(path.name for folder in folders for path in folder.iterdir())
        raise ValueError(
            f"{self.folder} has no {split} split; its layout is {self.layout}; it has {list_first(names, 6)}"
        )

    def _report_split(
        self,
        split: str,
        files: list[_PairFile],
        languages: tuple[str, ...],
        available: set[str],
        unused_columns: Collection[str],
    ) -> None:
        read = [file.path for file in files if file.language in (None, *languages)]
        names = [path.relative_to(self.folder).as_posix() for path in read]
        self.report.add("read", f"{split}: {list_first(names)}")
        report_columns(self.report, split, unused_columns)
        unused_languages = sorted(available - set(languages))
        if unused_languages:
            self.report.add(
                "left out",
                f"{split}: pairs in {list_first(unused_languages, 20)}; the recipe takes {', '.join(languages)}",
            )

    def report_other_files(self) -> None:
        """Report the files of the folder that belong to no split."""
        report_unread(self.report, self.folder, self.used_files, UNREAD_REASON)


def _check_shards(folder: Path, split: str, files: list[_PairFile]) -> None:
    """Refuse an incomplete download, and two files for one language of the official layout."""
    names_by_folder: dict[Path, list[str]] = {}
    for file in files:
        names_by_folder.setdefault(file.path.parent, []).append(file.path.name)
    for parent, names in names_by_folder.items():
        matches = [match for name in names if (match := SHARD_PATTERN.search(name))]
        for count in {match[2] for match in matches}:
            present = {int(match[1]) for match in matches if match[2] == count}
            missing = sorted(set(range(int(count))) - present)
            if missing:
                raise ValueError(
                    f"{folder}: {parent.relative_to(folder).as_posix()}/ lacks part {missing[0]} of {int(count)} of "
                    f"the {split} split"
                )

    official = [file for file in files if file.path.suffix == ".tsv" and file.language]
    counts = Counter(str(file.language) for file in official)
    duplicate_languages = sorted(
        language for language, count in counts.items() if count > 1
    )
    if duplicate_languages:
        raise ValueError(
            f"{folder} has several files for {split} in {', '.join(duplicate_languages)}; keep one folder XNLI-MT-1.0*"
        )


class _FileContent(NamedTuple):
    """Content of a file of sentence pairs.

    Attributes:
        rows: pairs with the columns language, premise, hypothesis and label, numbered from 1.
        languages: languages of the pairs in the file.
        says_language: whether the file says the language of its pairs.
        unused_columns: columns that are not read.
    """

    rows: pd.DataFrame
    languages: set[str]
    says_language: bool
    unused_columns: set[str]


def _read_rows(
    file: _PairFile, default: str, languages: Collection[str]
) -> _FileContent:
    """Return the pairs of a file.

    Args:
        file: the file.
        default: language of pairs if the file does not say it.
        languages: languages to select if the rows hold sentences of many languages.
    """
    with explain_read_errors(file.path):
        table = _read_table(file.path)
    columns = _columns(file, table)
    if table.empty:
        raise ValueError(f"{file.path} has no rows")
    rows = pd.DataFrame(
        {name: table[column] for name, column in columns.items()}
    ).astype(object)
    rows.index = pd.RangeIndex(1, len(rows) + 1)
    label_names = _label_names(file.path, columns["label"])
    if label_names:
        numbers = range(len(label_names))
        rows["label"] = [
            label_names[int(value)] if value in numbers else value
            for value in rows["label"]
        ]

    has_language_column = file.language is None and "language" in table
    unused_columns = set(map(str, table.columns)) - set(columns.values())
    if has_language_column:
        unused_columns.discard("language")
    if has_language_tables(rows):
        available = row_languages(rows)
        says_language = True
        rows = select_languages(rows, languages)
    else:
        says_language = has_language_column or file.language is not None
        if has_language_column:
            rows["language"] = table["language"].to_numpy()
        else:
            rows["language"] = file.language or default
        rows["language"] = rows["language"].map(_language_name)
        available = set(rows.language.dropna())
    return _FileContent(rows, set(map(str, available)), says_language, unused_columns)


def _language_name(value: Any) -> str | None:
    """Return the name of a language in a table, None for an empty one."""
    return value.strip() or None if isinstance(value, str) else None


def _columns(file: _PairFile, table: pd.DataFrame) -> dict[str, str]:
    """Return the name in a table of each column of ``PAIR_COLUMNS``; ValueError if one is missing."""
    columns = dict(file.columns)
    if file.columns is PAIR_COLUMNS:
        for name, snli_name in SNLI_COLUMNS.items():
            if name not in table and snli_name in table:
                columns[name] = snli_name
    missing = [column for column in columns.values() if column not in table]
    if missing:
        present = ", ".join(map(str, table.columns))[:200] or "none"
        raise ValueError(
            f"{file.path}: needs the columns {', '.join(missing)}; it has {present}"
        )
    return columns


def _label_names(path: Path, column: str) -> list[str]:
    """Return the names of a column's labels that Hugging Face's datasets stores in .parquet, [] for other files."""
    if path.suffix != ".parquet":
        return []
    from pyarrow import parquet

    with explain_read_errors(path):
        metadata = (parquet.read_schema(path).metadata or {}).get(b"huggingface", b"{}")
        features = json.loads(metadata).get("info", {}).get("features", {})
        return [str(name) for name in features.get(column, {}).get("names") or []]


def _read_table(path: Path) -> pd.DataFrame:
    """Return the table in a file. Values of .csv and .tsv stay text, such as "007", and none counts as missing."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    if path.suffix in (".jsonl", ".json"):
        text = path.read_text(encoding="utf-8").strip()
        if text.startswith("["):
            return pd.DataFrame(json.loads(text))
        return pd.DataFrame(_read_json_lines(path, text))

    options: dict[str, Any] = (
        {"sep": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    )
    table = pd.read_csv(path, dtype=str, keep_default_na=False, **options)
    # pandas takes surplus fields of the first row for an index.
    if not isinstance(table.index, pd.RangeIndex):
        raise ValueError(
            "row 1 has more fields than the header has names; are quotes missing?"
        )
    return table


def _read_json_lines(path: Path, text: str) -> list[dict[str, Any]]:
    """Return the objects of a text, one per line; ValueError names the line of another value."""
    objects = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {error}; a row is a JSON object in a line of its own"
            ) from error
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a sentence pair, got {line:.60}"
            )
        objects.append(value)
    return objects


def _check_rows(
    file: _PairFile, rows: pd.DataFrame, split: str, report: DataReport
) -> pd.DataFrame:
    """Return the rows that have a label, with labels as numbers; ValueError for wrong labels and sentences."""

    def normalize(value: Any) -> str:
        return str(value).strip().lower()

    def starts_with_digit(value: Any) -> bool:
        return normalize(value)[:1].isdigit()

    labels = rows.label.map(normalize).map(LABEL_SPELLINGS)
    is_wrong = labels.isna()
    if is_wrong.any():
        row = is_wrong.idxmax()
        raise ValueError(
            f"{file.path}, row {row}: label {rows.label[row]!r}; allowed are {', '.join(PAIR_LABELS)}, or 0, 1, 2, "
            "and - for pairs to leave out"
        )
    is_decided = labels != UNDECIDED_LABEL
    num_undecided = int((~is_decided).sum())
    if num_undecided:
        log.info(
            "%s: %d pairs without an agreed label left out", file.path, num_undecided
        )
        report.add(
            "left out",
            f"{split}: {pluralize(num_undecided, 'pair')} of {file.path.name} without an agreed label",
        )
    if rows.label.map(starts_with_digit).any():
        report.add(
            "markers", f"{split}: labels 0, 1, 2 are read as {', '.join(PAIR_LABELS)}"
        )
    rows = rows.assign(label=labels.astype("int64"))[is_decided]
    check_sentences(file.path, rows)
    _check_line_breaks(file.path, rows, split, report)
    return rows


def _check_line_breaks(
    path: Path, rows: pd.DataFrame, split: str, report: DataReport
) -> None:
    """Report sentences with line breaks; ValueError where rows of a .csv file have become one sentence."""
    broken = []
    for row, *sentences in rows[list(SENTENCES)].itertuples(name=None):
        for sentence in sentences:
            lines = sentence.strip().split("\n")
            if len(lines) == 1:
                continue
            broken.append(row)
            if path.suffix == ".csv" and any(
                line.count(",") >= len(SENTENCES) for line in lines[1:]
            ):
                raise ValueError(
                    f"{path}, row {row}: a sentence of {len(lines)} lines that look like rows; is a quote not closed?"
                )
    if broken:
        report.add(
            "values",
            f"{split}: {pluralize(len(broken), 'sentence')} of {path.name} with line breaks, the first in row "
            f"{broken[0]}",
        )


def download(name: str, language: str = "de") -> Path:
    """Download one language of "xnli", or a pretrained model, with the client of the Hugging Face hub."""
    if name == "xnli":
        repository, kind, files = XNLI_REPOSITORY, "dataset", [f"{language}/*"]
    else:
        repository, kind, files = CHECKPOINTS[name], "model", CHECKPOINT_FILES
    folder = data_dir() / name
    import_optional("huggingface_hub", "text").snapshot_download(
        repository, repo_type=kind, allow_patterns=files, local_dir=folder
    )
    return folder
