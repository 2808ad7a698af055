"""Sentence pairs for natural language inference: XNLI, your own, and embedded ones from a small grammar.

Your own pairs, as ``dataset``, a folder in one of three layouts (the first that is found is read):

- XNLI's official files: ``XNLI-1.0/xnli.dev.tsv`` and ``xnli.test.tsv`` with the columns ``language``, ``gold_label``,
  ``sentence1``, ``sentence2``, and ``XNLI-MT-1.0*/multinli/multinli.train.<language>.tsv`` with ``premise``, ``hypo``,
  ``label``;
- the Hugging Face hub's: ``<language>/train-*.parquet``, ``validation-*.parquet`` and ``test-*.parquet`` with
  ``premise``, ``hypothesis``, ``label``;
- flat files ``train``, ``validation`` (or ``valid``, ``dev``) and ``test`` with the ending ``.parquet``, ``.jsonl``,
  ``.json``, ``.csv`` or ``.tsv`` and the columns ``premise``, ``hypothesis``, ``label``, and, for several languages,
  ``language``; without that column all text counts as the recipe's language, and the title names none.

Labels are names or numbers: entailment (0), neutral (1), contradiction (2); "contradictory", as XNLI's training files
spell it, is the same. Rows whose label is "-" or -1, on which the annotators did not agree, are left out and counted in
the log. Quotes mean nothing in ``.tsv`` files, as in XNLI's, and the usual in ``.csv`` files. Errors name rows as a
spreadsheet without its header does: the first is 1.

XNLI is looked up in ``CPT_DATA_DIR``, then ``data/cache``, as ``xnli/``, in any of these layouts.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cpt_core.checks import library
from cpt_lab.data.common import generator_of
from cpt_lab.data.files import DataNotFoundError, own_path, reading
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.entailment import EXPERIMENT, EntailmentRecipe
from cpt_lab.paths import command, data_dir

log = logging.getLogger(__name__)
LABELS = ("entailment", "neutral", "contradiction")
SPLITS = ("train", "valid", "test")
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


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs of one split and language, n of them.

    Attributes:
        premises: n sentences.
        hypotheses: n sentences.
        labels: (n,) int64, positions in ``LABELS``.
    """

    premises: list[str]
    hypotheses: list[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class EntailmentData:
    """A data set of sentence pairs.

    Attributes:
        train, valid: in the recipe's language.
        test: by language, in the recipe's order.
        title: what the numbers are measured on, as figures must call it.
        checksum: of all of this.
    """

    train: Pairs
    valid: Pairs
    test: dict[str, Pairs]
    title: str
    checksum: str


def load_entailment(recipe: EntailmentRecipe) -> EntailmentData:
    """Load and check the data of a recipe.

    A limit such as ``train_pairs`` takes a fixed random choice, the same in every run, as rows may be sorted.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when they have none of the documented layouts, or wrong contents: names the file and the row.
        ImportError: without the libraries of the extra ``text``.
    """
    wanted = {"train": (recipe.language,), "valid": (recipe.language,), "test": recipe.test_languages}
    if recipe.dataset == "templates":
        found, title = _templates(wanted), "synthetic sentence pairs"
    else:
        folder = _folder(recipe.dataset)
        read = {split: _read(folder, split, languages, recipe.language) for split, languages in wanted.items()}
        found = {split: parts for split, (parts, _) in read.items()}
        title = "XNLI" if recipe.dataset == "xnli" else f"own pairs ({folder.name})"
        title += f", {recipe.language}" if read["train"][1] else ""  # else the recipe's language is a mere name
    limits = {"train": recipe.train_pairs, "valid": recipe.valid_pairs, "test": recipe.test_pairs}
    digest = hashlib.sha256()
    for split, parts in found.items():
        for language, pairs in parts.items():
            parts[language] = pairs = _limited(pairs, limits[split])
            digest.update(repr((split, language, pairs.premises, pairs.hypotheses, pairs.labels.tolist())).encode())
    train, valid = found["train"][recipe.language], found["valid"][recipe.language]
    title += f", {len(train):,} training pairs"
    return EntailmentData(train, valid, found["test"], title, digest.hexdigest()[:16])


def _limited(pairs: Pairs, limit: int | None) -> Pairs:
    if limit is None or limit >= len(pairs):
        return pairs
    chosen = torch.randperm(len(pairs), generator=generator_of(0))[:limit].sort().values
    rows = chosen.tolist()
    return Pairs([pairs.premises[i] for i in rows], [pairs.hypotheses[i] for i in rows], pairs.labels[chosen])


def _templates(wanted: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Pairs]]:
    if others := {language for languages in wanted.values() for language in languages} - {"en"}:
        raise ValueError(f"templates: no language {', '.join(sorted(others))}; there is en")
    made, out = sentence_pairs(sum(TEMPLATES.values())), {}
    for split, count in TEMPLATES.items():
        premises, hypotheses, labels = zip(*made[:count], strict=True)
        out[split] = {"en": Pairs(list(premises), list(hypotheses), torch.tensor(labels))}
        made = made[count:]
    return out


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file of a split: what its columns are called (ours -> its), and its language where all of it has one."""

    path: Path
    columns: dict[str, str]
    language: str | None = None


COLUMNS = {name: name for name in ("premise", "hypothesis", "label")}


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


READERS: dict[str, tuple[str, dict[str, Any]]] = {  # ending -> loader of ``datasets`` and its options
    "parquet": ("parquet", {}),
    "jsonl": ("json", {}),
    "json": ("json", {}),
    "csv": ("csv", {}),
    "tsv": ("csv", {"sep": "\t", "quoting": csv.QUOTE_NONE}),
}


def _flat(folder: Path, split: str) -> list[_File]:
    names = {"valid": ("validation", "valid", "dev")}.get(split, (split,))
    found = [path for name in names for ending in READERS if (path := folder / f"{name}.{ending}").exists()]
    if len(found) > 1:
        raise ValueError(f"{folder} needs one file for {split}, it has {', '.join(path.name for path in found)}")
    return [_File(path, COLUMNS) for path in found]


LAYOUTS: dict[str, Callable[[Path, str], list[_File]]] = {
    "XNLI-1.0/xnli.{dev,test}.tsv with XNLI-MT-1.0*/multinli/multinli.train.<language>.tsv": _official,
    "<language>/{train,validation,test}-*.parquet": _hub,
    "{train,validation,test}.{parquet,jsonl,json,csv,tsv}": _flat,
}


def _folder(dataset: str) -> Path:
    EXPERIMENT.check_dataset(dataset)
    folder = data_dir() / "xnli" if dataset == "xnli" else own_path(dataset)
    if folder.is_dir():
        return folder
    hint = f"; get it with: {command('download xnli')}" if dataset == "xnli" else ""
    raise DataNotFoundError(f"there is no folder {folder}{hint}")


def _read(folder: Path, split: str, languages: tuple[str, ...], default: str) -> tuple[dict[str, Pairs], bool]:
    """Return the pairs of a split by language, and whether the files say what language they are in."""
    layouts = {form: find for form, find in LAYOUTS.items() if any(find(folder, s) for s in SPLITS)}
    if not layouts:
        raise ValueError(f"{folder} holds no sentence pairs; it needs one of: {'; '.join(LAYOUTS)}")
    form, find = next(iter(layouts.items()))
    files = find(folder, split)
    if not files:
        raise ValueError(f"{folder} has no {split} split; its layout is {form}")
    there = {file.language for file in files if file.language}
    parts: dict[str, list[pd.DataFrame]] = {}
    said = False
    for file in files:
        if file.language is None or file.language in languages:
            whole, in_file = _rows(file, default)
            said |= in_file
            for language, rows in whole.groupby("language", sort=False):
                there.add(language)
                if language in languages:
                    parts.setdefault(language, []).append(_checked(file, rows))
    if missing := [language for language in languages if language not in parts]:
        raise ValueError(f"{folder}: no {split} pairs in {', '.join(missing)}; there is {', '.join(sorted(there))}")
    out = {}
    for language in languages:
        rows = pd.concat(parts[language])
        if rows.empty:
            raise ValueError(f"{folder}: no {split} pair in {language} has a label")
        out[language] = Pairs(list(rows.premise), list(rows.hypothesis), torch.tensor(list(rows.label)))
    return out, said


def _rows(file: _File, default: str) -> tuple[pd.DataFrame, bool]:
    """Return a file's rows with the columns language, premise, hypothesis, label, numbered from 1; see ``_read``."""
    reader, options = READERS[file.path.suffix[1:]]
    datasets = library("datasets", "text")
    if reader == "csv":  # all columns are text: "007" stays what it is, and an empty field is no missing number
        with reading(file.path), file.path.open(encoding="utf-8", newline="") as text:
            plain = {"delimiter": options.get("sep", ","), "quoting": options.get("quoting", csv.QUOTE_MINIMAL)}
            lines = csv.reader(text, **plain)
            header = next(lines, [])
            _check_columns(file, header)
            for fields in lines:  # with one field too many in every row, pandas would shift all columns
                if len(fields) > len(header):
                    line = f"{file.path}, line {lines.line_num}"
                    raise ValueError(f"{line}: {len(fields)} fields under {len(header)} names; are quotes missing?")
        kinds = datasets.Features({name: datasets.Value("string") for name in header})
        options = {**options, "keep_default_na": False, "na_filter": False, "features": kinds}
    with tempfile.TemporaryDirectory(prefix="cpt-pairs-") as cache:  # the library's own cache would be in the home
        quiet = datasets.utils.logging
        bars, level = datasets.is_progress_bar_enabled(), quiet.get_verbosity()
        datasets.disable_progress_bars()
        quiet.set_verbosity(quiet.CRITICAL)
        try:
            loaded = datasets.load_dataset(
                reader,
                data_files={"rows": str(file.path)},
                split="rows",
                cache_dir=cache,
                keep_in_memory=True,
                **options,
            )
        except Exception as error:
            reason = "it has no rows" if "corresponds to no data" in str(error) else error.__cause__ or error
            raise ValueError(f"{file.path}: cannot be read: {reason}") from error
        finally:
            quiet.set_verbosity(level)
            if bars:
                datasets.enable_progress_bars()
        _check_columns(file, loaded.column_names)
        frame = loaded.to_pandas()
    named = {ours: frame[theirs] for ours, theirs in file.columns.items()}
    if "language" not in named:
        named["language"] = (
            frame["language"] if file.language is None and "language" in frame else (file.language or default)
        )
    out = pd.DataFrame(named)
    out.index = pd.RangeIndex(1, len(out) + 1)
    return out, file.language is not None or "language" in file.columns or "language" in frame


def _check_columns(file: _File, header: list[str]) -> None:
    if lacking := [name for name in file.columns.values() if name not in header]:
        raise ValueError(
            f"{file.path}: needs the columns {', '.join(lacking)}; it has {', '.join(header)[:200] or 'none'}"
        )


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


# --- downloads ------------------------------------------------------------------------------------


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
