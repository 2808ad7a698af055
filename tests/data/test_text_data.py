"""Text reader: every defect of a file is a fact or an error, and no marker counts twice."""

import logging
import random
from dataclasses import replace

import pytest
from dataset_layouts import write
from helpers import refused

from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.data.text import load_text
from cpt_lab.data.text_lines import long_lines
from cpt_lab.experiments.registry import recipe

WORDS = "the cat sat on a mat and saw dogs run far away home".split()
COUNTS = {"train": 60, "valid": 20, "test": 20}
pytestmark = pytest.mark.usefixtures("data_folder")


def sentences(split):
    """Return distinct lines of eight words."""
    draw = random.Random(split)
    return [" ".join(draw.choices(WORDS, k=8)) for _ in range(COUNTS[split])]


def texts(change=lambda line: f"{line}\n", splits=tuple(COUNTS), encoding="utf-8"):
    """Return three texts, with the lines of the named splits passed through ``change``."""
    made = {}
    for split in COUNTS:
        form = change if split in splits else (lambda line: f"{line}\n")
        made[f"{split}.txt"] = "".join(map(form, sentences(split))).encode(encoding)
    return made


def load(folder, files, dataset="mine/", **changes):
    """Load texts, and return the tokens of the splits, the facts by topic and the data."""
    write(folder / "mine", files)
    defaults = {
        "batch": 2,
        "vocabulary": None,
        "train_tokens": None,
        "valid_tokens": None,
        "test_tokens": None,
    }
    data = load_text(
        replace(
            recipe("smoke", dataset, task="language_model"), **{**defaults, **changes}
        )
    )
    parts = {
        split: [data.vocabulary[i] for i in getattr(data, split)] for split in COUNTS
    }
    return (
        parts,
        "\n".join(f"{topic}: {text}" for topic, text in data.report.facts),
        data,
    )


def plain(split):
    return [word for line in sentences(split) for word in (*line.split(), "<eos>")]


# --- markers --------------------------------------------------------------------------------------

AT_ENDS = [
    "<eos>",
    "</s>",
    "<EOS>",
    "<|endoftext|>",
    "[SEP]",
    "<end>",
    "__eos__",
    "EOS",
    "¶",
    "</p>",
    "<|im_end|>",
]


@pytest.mark.parametrize("marker", AT_ENDS)
def test_text_reader_reads_final_marker_as_eos(marker, data_folder):
    parts, facts, data = load(data_folder, texts(lambda line: f"{line} {marker}\n"))
    assert parts == {split: plain(split) for split in COUNTS}
    assert (
        f"markers: 60 of 60 lines of train end in {marker!r}: taken as the end that every line gets"
        in facts
    )
    assert data.checksum != load(data_folder, texts())[2].checksum  # that of the files


@pytest.mark.parametrize(
    "marker", ["<s>", "<eos>", "<bos>", "[CLS]", "<|startoftext|>", "BOS"]
)
def test_text_reader_removes_leading_markers(marker, data_folder):
    parts, facts, _ = load(data_folder, texts(lambda line: f"{marker} {line}\n"))
    assert parts == {split: plain(split) for split in COUNTS}
    assert (
        f"20 of 20 lines of test begin with {marker!r}: left out, as the line begins there"
        in facts
    )


@pytest.mark.parametrize(
    "form",
    [
        "{} <eos> <eos>\n",
        "<s> {} </s>\n",
        "{} </s> <eos>\n",
        "{}<|endoftext|>\n",
        "<eos>{}\n",
        "{} <eos>  \n",
    ],
)
def test_text_reader_removes_combined_markers(form, data_folder):
    parts, _, _ = load(data_folder, texts(form.format))
    assert parts == {split: plain(split) for split in COUNTS}


@pytest.mark.parametrize("form", ["{}\n<|endoftext|>\n", "<s>\n{}\n", "{}\n\n<eos>\n"])
def test_text_reader_removes_marker_lines(form, data_folder):
    parts, facts, _ = load(data_folder, texts(form.format))
    assert parts == {split: plain(split) for split in COUNTS}
    assert "lines without words" in facts


def test_text_reader_removes_markers_of_one_split(data_folder):
    parts, facts, _ = load(
        data_folder, texts(lambda line: f"{line} </s>\n", splits=["test"])
    )
    assert parts == {split: plain(split) for split in COUNTS}
    assert "20 of 20 lines of test end in '</s>'" in facts


def test_text_reader_accepts_partial_eos_markers(data_folder):
    parts, facts, _ = load(
        data_folder,
        texts(lambda line: f"{line} <eos>\n" if "cat" in line else f"{line}\n"),
    )
    assert parts["train"] == plain("train")
    assert "lines of train end in '<eos>': taken" in facts


@pytest.mark.parametrize("marker", ["</s>", "[MUSIC]", "<b>"])
def test_text_reader_keeps_partial_markers_as_words(marker, data_folder):
    some = [
        line for split in COUNTS for line in sentences(split) if line.startswith("cat")
    ]
    files = texts(
        lambda line: f"{line} {marker}\n" if line.startswith("cat") else f"{line}\n"
    )
    parts, facts, _ = load(data_folder, files)
    assert sum(part.count(marker) for part in parts.values()) == len(some)
    assert (
        f"lines that end in what looks like a marker, but stays a word: {marker!r} {len(some)}"
        in facts
    )


@pytest.mark.parametrize("ending", [" .", " away", " <unk>", " N", " ="])
def test_text_reader_keeps_repeated_final_words(ending, data_folder):
    parts, _, _ = load(data_folder, texts(lambda line: f"{line}{ending}\n"))
    assert parts["train"].count(ending.strip()) >= 60


def test_text_reader_splits_lines_at_eos(data_folder):
    whole = {
        f"{split}.txt": " <eos> ".join(sentences(split)).encode() for split in COUNTS
    }
    parts, facts, _ = load(data_folder, whole)
    assert parts == {split: plain(split) for split in COUNTS}
    assert "train: 59 times '<eos>' inside lines" in facts


def test_text_reader_removes_markers_from_characters(data_folder):
    parts, facts, _ = load(
        data_folder, texts(lambda line: f"{line} <eos>\n"), unit="characters"
    )
    assert "".join(parts["valid"]) == "".join(
        f"{line}\n" for line in sentences("valid")
    )
    assert "60 of 60 lines of train end in '<eos>'" in facts


# --- defects that are facts -----------------------------------------------------------------------


def mixed(*lines, **options):
    """Return texts with extra lines at the end of the training text."""
    files = texts(**options)
    return {**files, "train.txt": files["train.txt"] + "".join(lines).encode()}


FACTS = {  # files, what the recipe changes, facts
    "unknown words": (
        texts(lambda line: f"{line} {line[:1]}x\n", ["test"]),
        {},
        ["changed: test: ", "became <unk>"],
    ),
    "unk in the file": (
        mixed("<unk> <unk> sat\n"),
        {},
        ["markers: train: 2 times '<unk>' in the file itself"],
    ),
    "another unk": (
        mixed("<UNK> [UNK] <UNK>\n"),
        {},
        ["beside '<unk>': '<UNK>' 2, '[UNK]' 1"],
    ),
    "a vocabulary cut": (
        texts(),
        {"vocabulary": 5},
        ["left out: all but the 5 most frequent of 14 different words"],
    ),
    "tokens cut": (
        texts(),
        {"test_tokens": 100},
        ["left out: test: all but the first 100 of 180 words"],
    ),
    "columns": (
        texts(),
        {"batch": 7},
        ["left out: train: the last 1 of 540 words, too few for all columns"],
    ),
    "blank lines": (
        mixed("\n", " \t\n", "\n"),
        {},
        ["left out: train: 3 lines without words"],
    ),
    "CR LF": (
        texts(lambda line: f"{line}\r\n"),
        {},
        ["changed: test.txt: 20 lines ended in CR LF"],
    ),
    "CR": (
        texts(lambda line: f"{line}\r", ["valid"]),
        {},
        ["changed: valid.txt: 20 lines ended in CR,"],
    ),
    "form feeds": (
        mixed("a mat\x0cdogs run\n"),
        {},
        ["train: lines end at these characters, too: form feeds 1"],
    ),
    "U+2028": (mixed("a\u2028b\u2028c\n"), {}, ["too: U+2028 2"]),
    "U+0085": (mixed("a\x85b\n"), {}, ["too: U+0085 1"]),
    "a byte order mark": (
        texts(encoding="utf-8-sig"),
        {},
        ["changed: train.txt: the byte order mark is left out"],
    ),
    "damaged characters": (
        mixed("a \ufffd\n"),
        {},
        ["markers: train.txt: 1 character U+FFFD"],
    ),
    "shared lines": (
        mixed(sentences("valid")[0], "\n"),
        {},
        ["overlap: 1 of 20 lines of at least 5 words of"],
    ),
    "another file": (
        {**texts(), "readme.md": b"x"},
        {},
        ["left out: 1 file .md: no text of a split", "readme.md"],
    ),
    "another text": (
        {**texts(), "notes.txt": b"x"},
        {},
        ["left out: 1 file .txt: no text of a split", "notes.txt"],
    ),
    "a folder": ({**texts(), "old/train.txt": b"x"}, {}, ["(old/train.txt)"]),
    "a hidden text": (
        {**texts(), "._train.txt": b"x"},
        {},
        ["hidden", "(._train.txt)"],
    ),
    "characters": (texts(), {"unit": "characters"}, ["split: train: "]),
}


@pytest.mark.parametrize("case", FACTS)
def test_text_reader_reports_skipped_and_changed_text(case, data_folder, caplog):
    files, changes, wanted = FACTS[case]
    with caplog.at_level(logging.INFO):
        _, facts, data = load(data_folder, files, **changes)
    assert not [words for words in wanted if words not in facts], facts
    for topic, text in data.report.notices:
        assert f"mine/: {topic}: {text}" in caplog.messages
    again = load(data_folder, files, **changes)[2].report
    assert again.digest == data.report.digest
    assert str(data_folder) not in facts


def test_text_reader_reports_plain_text_unchanged(data_folder):
    _, facts, data = load(data_folder, texts())
    assert data.report.notices == ()
    assert "read: train: 60 lines, 540 words with an <eos> for each line" in facts


def test_text_reader_reports_split_of_one_text(data_folder):
    lines = "".join(f"{line}\n\n" for split in COUNTS for line in sentences(split))
    _, facts, data = load(data_folder, {"novel.txt": lines.encode()}, "mine/novel.txt")
    assert "split: 100 lines of one text cut 8 : 1 : 1, in their order" in facts
    assert "left out: novel.txt: 100 lines without words" in facts
    _, of_folder, _ = load(data_folder, {"photo.heic": b"x"}, "mine/")
    assert (
        "left out: 1 file .heic: no text of a split by its name (photo.heic)"
        in of_folder
    )
    assert data.title == "novel, cut 8 : 1 : 1"


# --- names of files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt", "dev.txt", "test.txt"),
        ("train.txt", "validation.txt", "test.txt"),
        ("a-train.txt", "a-val.txt", "a-test.txt"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
    ],
)
def test_text_reader_finds_usual_file_names(names, data_folder):
    files = dict(zip(names, texts().values(), strict=True))
    parts, facts, _ = load(data_folder, files)
    check_data(recipe("smoke", "mine/", task="language_model"))
    assert parts == {split: plain(split) for split in COUNTS}
    assert all(f"read: {name}, " in facts for name in names)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"train.txt": b"a", "test.txt": b"a"},
            r"no file that ends in valid\.txt \(or val\.txt, validation\.txt, dev",
        ),
        (
            {"train.txt": b"", "dev.txt": b"", "valid.txt": b"", "test.txt": b""},
            r"several texts for valid: dev\.txt",
        ),
        (
            {"train.txt": b"a", "train.tokens": b"a"},
            r"several texts for train: train\.tokens, train\.txt; keep one",
        ),
        (
            {"train.txt.gz": b"", "valid.txt": b"a", "test.txt": b"a"},
            r"; it has test\.txt, train\.txt\.gz, valid\.txt",
        ),
        (
            {"a.txt": b"a", "b.txt": b"b"},
            r"no file that ends in train\.txt; a text needs one for train, valid, test",
        ),
    ],
)
def test_text_reader_rejects_missing_or_several_texts(files, message, data_folder):
    refused(message, load, data_folder, files, error=(DataNotFoundError, ValueError))


# --- errors ---------------------------------------------------------------------------------------


def part_of(split, other, share):
    """Return texts that share a given part of the lines between two splits."""
    lines, there = sentences(split), sentences(other)
    count = round(share * len(lines))
    return {
        **texts(),
        f"{split}.txt": "".join(
            f"{line}\n" for line in [*there[:count], *lines[count:]]
        ).encode(),
    }


ERRORS = {
    "valid is train": (
        {**texts(), "valid.txt": texts()["train.txt"]},
        "the valid text is the training text",
    ),
    "test is valid": (
        {**texts(), "test.txt": texts()["valid.txt"]},
        "the test text is the valid text; a test needs",
    ),
    "test in train": (
        part_of("test", "train", 1),
        "the test text is a part of the training text; a test needs",
    ),
    "most of test": (
        part_of("test", "train", 0.6),
        "12 of 20 lines .* test text stand in the training text, too",
    ),
    "most of valid": (
        part_of("valid", "train", 0.6),
        "12 of 20 lines .* valid text stand in the training text, too",
    ),
    "most of test in valid": (
        part_of("test", "valid", 0.6),
        "12 of 20 lines .* test text stand in the valid text",
    ),
    "lines cut anew": (
        {
            **texts(),
            "test.txt": texts()["train.txt"]
            .replace(b"\n", b" ")
            .replace(b" mat ", b"\nmat "),
        },
        "the test text is a part of the training text",
    ),
    "markers aside": (
        {**texts(), "test.txt": texts(lambda line: f"{line} <eos>\n")["train.txt"]},
        "the test text is the training text",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_text_reader_rejects_shared_lines(case, data_folder):
    files, message = ERRORS[case]
    refused(f"mine/: {message}", load, data_folder, files)


def test_text_reader_allows_half_shared_lines(data_folder):
    _, facts, _ = load(data_folder, part_of("test", "train", 0.5))
    assert (
        "overlap: 10 of 20 lines of at least 5 words of the test text stand in the training text, too"
        in facts
    )
    assert long_lines("a b c d\na  b\tc d e\n") == ["a b c d e"]


def test_text_reader_finds_overlap_without_blanks(data_folder):
    draw = random.Random(0)
    lines = [
        "".join(chr(0x4E00 + draw.randrange(50)) for _ in range(20)) for _ in range(300)
    ]
    files = {
        f"{split}.txt": "\n".join(lines[i::3]).encode()
        for i, split in enumerate(COUNTS)
    }
    load(data_folder, files, unit="characters")
    files["valid.txt"] = "\n".join([*lines[1::3][:30], *lines[0::3][::2]]).encode()
    refused(
        "50 of 80 lines .* valid text stand in the training text",
        load,
        data_folder,
        files,
        unit="characters",
    )


def test_text_reader_rejects_text_without_blanks(data_folder):
    """Suggest characters as units if the words of a text are too long."""
    draw = random.Random(0)
    lines = [
        "".join(chr(0x4E00 + draw.randrange(500)) for _ in range(30))
        for _ in range(300)
    ]
    files = {
        f"{split}.txt": "\n".join(lines[i::3]).encode()
        for i, split in enumerate(COUNTS)
    }
    refused(
        'nothing of the valid text is in the training text; its words have 30 letters .*unit="characters"',
        load,
        data_folder,
        files,
    )
    parts, _, _ = load(data_folder, files, unit="characters")
    assert len(parts["train"]) == 3_099
    mostly = {name: content + "\n。\n".encode() for name, content in files.items()}
    _, facts, _ = load(data_folder, mostly)
    assert (
        "changed: valid: 100 of 202 words became <unk>; its words have 30 letters"
        in facts
    )


@pytest.mark.parametrize("dataset", ["pydoc"])
def test_text_reader_reports_overlap_of_named_texts(dataset):
    found = load_text(recipe("demo", dataset, task="language_model"))
    assert "overlap" in [fact.topic for fact in found.report.facts]
