"""Text reader: splits, vocabularies, markers of sentences, reports and errors, downloads."""

import functools
import hashlib
import random
from pathlib import Path

import pytest
import torch
from dataset_layouts import (
    LINE_COUNTS,
    describe_cases,
    load_own,
    own_recipe,
    sentences,
    split_sizes,
    texts,
    write,
)
from helpers import refused

from cpt_lab import data
from cpt_lab.data import text
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.data.text import load_text
from cpt_lab.experiments.registry import recipe

pytestmark = pytest.mark.usefixtures("data_folder")
small = functools.partial(own_recipe, "language_model")
SENTENCES = {
    "train": "the cat sat\nthe dog sat\n\n   \na bird sang\n" * 20,
    "valid": "the cat sang\nthe fish sat\n" * 3,
    "test": "the dog sat\na bird sang\n" * 5,
}
TOY = {f"toy.{split}.txt": words.encode() for split, words in SENTENCES.items()}


def words_of(result, split):
    """Return the tokens of a split as words or characters."""
    return [result.vocabulary[i] for i in getattr(result, split)]


# --- tokens ---------------------------------------------------------------------------------------


def test_load_text_splits_words_and_marks_unknown(data_folder):
    result = load_own(data_folder, "language_model", TOY)
    assert len(result.train) == 20 * 12  # blank lines are skipped, the others get <eos>
    first_lines = "the cat sat <eos> the dog sat <eos> a".split()
    assert words_of(result, "train")[:9] == first_lines
    assert words_of(result, "valid")[4:8] == ["the", "<unk>", "sat", "<eos>"]
    assert result.vocabulary[result.start] == "<eos>"
    known = {*"the cat sat dog a bird sang".split(), "<eos>", "<unk>"}
    assert set(result.vocabulary) == known


def test_load_text_limits_vocabulary_to_frequent_words(data_folder):
    limits = {"vocabulary": 3, "train_tokens": 120}
    result = load_own(data_folder, "language_model", TOY, **limits)
    assert set(result.vocabulary) == {"<eos>", "<unk>", "the", "sat"}
    assert len(result.train) == 120
    assert result.title == "the first 120 words of mine, 3 words known"
    assert load_text(small(vocabulary=500)).title == "mine, 8 words known"


@pytest.mark.parametrize("dataset", ["mine/novel.txt", "mine/"])
def test_load_text_splits_single_text_by_lines(dataset, data_folder):
    lines = [f"line {i}" for i in range(30)]
    path = data_folder / "mine" / "novel.txt"
    write(path.parent, {"novel.txt": "\n\n".join(lines).encode(), "photo.heic": b"x"})
    result = load_text(small(dataset))
    assert result.title == "novel, cut 8 : 1 : 1"
    assert split_sizes(result) == [72, 9, 9]
    assert words_of(result, "train")[-3:] == ["line", "23", "<eos>"]
    facts = str(result.report)
    assert "30 lines of one text cut 8 : 1 : 1, in their order" in facts
    assert "novel.txt: 29 lines without words" in facts
    assert ("photo.heic" in facts) == (dataset == "mine/")
    path.write_text("\n".join(lines[:9]))
    message = (
        "novel.txt has 9 lines with words; one text is cut in three, and needs ten"
    )
    refused(message, load_text, small(dataset))


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
    result = load_own(data_folder, "language_model", files)
    check_data(small())
    assert_plain(result)
    assert all(f"{name}, " in str(result.report) for name in names)


# --- markers --------------------------------------------------------------------------------------


def assert_plain(result, splits=tuple(LINE_COUNTS)):
    """Assert that splits have the words of their sentences, and one <eos> for each."""
    for split in splits:
        words = [word for line in sentences(split) for word in (*line.split(), "<eos>")]
        assert words_of(result, split) == words, split


ALL_FORMS = {
    "at ends": [
        "{} <eos>\n",
        "{} </s>\n",
        "{} <EOS>\n",
        "{} <|endoftext|>\n",
        "{} [SEP]\n",
        "{} <end>\n",
        "{} __eos__\n",
        "{} EOS\n",
        "{} ¶\n",
        "{} </p>\n",
        "{} <|im_end|>\n",
        "{}<|endoftext|>\n",
        "{} <eos>  \n",
        "{} <eos> <eos>\n",
        "{} </s> <eos>\n",
        "{} [eos]\n",
        "{} {{eos}}\n",
        "{} <<EOS>>\n",
        "{} <br />\n",
        "{} &lt;eos&gt;\n",
        "{} EOS.\n",
        "{} ###\n",
        "{} |||\n",
    ],
    "at starts": [
        "<s> {}\n",
        "<eos> {}\n",
        "<bos> {}\n",
        "[CLS] {}\n",
        "<|startoftext|> {}\n",
        "BOS {}\n",
        "<eos>{}\n",
        "<s> {} </s>\n",
    ],
    "on lines": ["{}\n<|endoftext|>\n", "<s>\n{}\n", "{}\n\n<eos>\n"],
}
FORMS = [form for forms in ALL_FORMS.values() for form in forms]


@pytest.mark.parametrize("form", FORMS)
def test_text_reader_reads_final_marker_as_eos(form, data_folder):
    """Remove markers at the ends and starts of lines, and on lines of their own."""
    plain = load_own(data_folder, "language_model", texts())
    result = load_own(data_folder, "language_model", texts(form))
    assert_plain(result)
    facts = " ".join(str(result.report).split())
    if form in ALL_FORMS["on lines"]:
        assert "lines without words" in facts
    elif form in ALL_FORMS["at ends"]:
        assert "of 60 lines of train end in" in facts
        assert "taken as the end that every line gets" in facts
    else:
        assert "of 20 lines of test begin with" in facts
        assert "left out, as the line begins there" in facts
    assert result.checksum != plain.checksum  # of the files


def test_text_reader_splits_lines_at_eos(data_folder):
    files = {
        f"{split}.txt": " <eos> ".join(sentences(split)).encode()
        for split in LINE_COUNTS
    }
    result = load_own(data_folder, "language_model", files)
    assert_plain(result)
    assert "train: 59 times '<eos>' inside lines" in str(result.report)


def marked(marker, start="cat"):
    """Return texts with a marker after the lines that begin with a word."""
    files = {}
    for split in LINE_COUNTS:
        ends = [f" {marker}" if s.startswith(start) else "" for s in sentences(split)]
        lines = zip(sentences(split), ends, strict=True)
        files[f"{split}.txt"] = "".join(
            f"{line}{end}\n" for line, end in lines
        ).encode()
    return files


@pytest.mark.parametrize(
    ("files", "fact"),
    [
        (texts("{} </s>\n", ["test"]), "20 of 20 lines of test end in '</s>'"),
        (marked("<eos>"), "lines of train end in '<eos>': taken"),
    ],
    ids=["one split", "some lines"],
)
def test_text_reader_accepts_partial_eos_markers(files, fact, data_folder):
    result = load_own(data_folder, "language_model", files)
    assert_plain(result)
    assert fact in str(result.report)


@pytest.mark.parametrize("marker", ["</s>", "[MUSIC]", "<b>"])
def test_text_reader_keeps_partial_markers_as_words(marker, data_folder):
    lines = [line for split in LINE_COUNTS for line in sentences(split)]
    count = sum(line.startswith("cat") for line in lines)
    result = load_own(data_folder, "language_model", marked(marker))
    assert sum(words_of(result, split).count(marker) for split in LINE_COUNTS) == count
    facts = " ".join(str(result.report).split())
    message = "lines that end in what looks like a marker, but stays a word"
    assert f"{message}: {marker!r} {count}" in facts


@pytest.mark.parametrize("word", [".", "away", "<unk>", "N", "="])
def test_text_reader_keeps_repeated_final_words(word, data_folder):
    result = load_own(data_folder, "language_model", texts(f"{{}} {word}\n"))
    assert words_of(result, "train").count(word) >= 60


def test_text_reader_removes_markers_from_characters(data_folder):
    files = texts("{} <eos>\n")
    result = load_own(data_folder, "language_model", files, unit="characters")
    characters = "".join(f"{line}\n" for line in sentences("valid"))
    assert "".join(words_of(result, "valid")) == characters
    assert "60 of 60 lines of train end in '<eos>'" in str(result.report)


# --- reports and errors ---------------------------------------------------------------------------


def extended(addition):
    """Return texts with more at the end of the training text."""
    files = texts()
    return files | {"train.txt": files["train.txt"] + addition.encode()}


def partly_shared(split, other, share):
    """Return texts of which a split shares a part of its lines with another."""
    lines = sentences(split)
    count = round(share * len(lines))
    mixed = [*sentences(other)[:count], *lines[count:]]
    return texts() | {f"{split}.txt": "".join(f"{line}\n" for line in mixed).encode()}


def without_blanks(seed_letters, line_length):
    """Return three texts of one language without blanks, of which none has a line of another."""
    draw = random.Random(0)
    lines = [
        "".join(chr(0x4E00 + draw.randrange(seed_letters)) for _ in range(line_length))
        for _ in range(300)
    ]
    return {
        f"{split}.txt": "\n".join(lines[i::3]).encode()
        for i, split in enumerate(LINE_COUNTS)
    }


def text_cases():
    """Return texts, sound ones first, with the changes of their recipes."""
    files = texts()
    train, valid = files["train.txt"], files["valid.txt"]
    cut_anew = train.replace(b"\n", b" ").replace(b" mat ", b"\nmat ")
    foreign = without_blanks(500, 30)
    with_stops = {name: file + "\n。\n".encode() for name, file in foreign.items()}
    dense = without_blanks(50, 20)
    lines = {name: file.split(b"\n") for name, file in dense.items()}
    dense_overlap = [*lines["valid.txt"][:30], *lines["train.txt"][::2]]
    characters = {"unit": "characters"}
    return {
        "sound": files,
        "unknown words": texts("{} quokka\n", ["test"]),
        "unk in the file": extended("<unk> <unk> sat\n"),
        "another unk": extended("<UNK> [UNK] <UNK>\n"),
        "a vocabulary cut": (files, {"vocabulary": 5}),
        "tokens cut": (files, {"test_tokens": 100}),
        "columns": (files, {"batch": 7}),
        "blank lines": extended("\n \t\n\n"),
        "CR LF": texts("{}\r\n"),
        "CR": texts("{}\r", ["valid"]),
        "form feeds": extended("a mat\x0cdogs run\n"),
        "U+2028": extended("a\u2028b\u2028c\n"),
        "U+0085": extended("a\x85b\n"),
        "no-break and ideographic spaces": extended("a\xa0mat\u3000a\xa0dog\n"),
        "a byte order mark": texts(encoding="utf-8-sig"),
        "damaged characters": extended("a \ufffd\n"),
        "one shared line": extended(f"{sentences('valid')[0]}\n"),
        "half of the lines shared": partly_shared("test", "train", 0.5),
        "other files": files | {"readme.md": b"x", "notes.txt": b"x"},
        "files in folders": files | {"old/train.txt": b"x", "._train.txt": b"x"},
        "characters": (files, characters),
        "a language without blanks": (foreign, characters),
        "a language without blanks, by words": foreign,
        "a language without blanks, with stops": with_stops,
        "lines without blanks": (dense, characters),
        "shared lines without blanks": (
            dense | {"valid.txt": b"\n".join(dense_overlap)},
            characters,
        ),
        "valid is train": files | {"valid.txt": train},
        "test is train": files | {"test.txt": train},
        "test is valid": files | {"test.txt": valid},
        "test in train": partly_shared("test", "train", 1),
        "most of test in train": partly_shared("test", "train", 0.6),
        "most of valid in train": partly_shared("valid", "train", 0.6),
        "most of test in valid": partly_shared("test", "valid", 0.6),
        "lines cut anew": files | {"test.txt": cut_anew},
        "markers aside": files | {"test.txt": texts("{} <eos>\n")["train.txt"]},
        "no words": files | {"train.txt": b" \n\n"},
        "another encoding": files | {"train.txt": b"caf\xe9\n"},
        "three words to train on": files | {"train.txt": b"a b\n"},
        "three words to test on": (files | {"test.txt": b"a b\n"}, {"batch": 4}),
        "one word": files | {"train.txt": b"word word word\n" * 60},
        "nothing known": files | {"train.txt": b"un peu\n" * 20},
        "no valid text": {"train.txt": train, "test.txt": train},
        "two valid texts": files | {"dev.txt": b""},
        "two training texts": files | {"train.tokens": b"a"},
        "a packed text": {"train.txt.gz": b"", "valid.txt": valid, "test.txt": valid},
        "two texts": {"a.txt": b"a", "b.txt": b"b"},
    }


def test_text_reader_reports_unusual_content(data_folder, golden):
    cases = text_cases()
    golden("data/text.txt", describe_cases(data_folder, "language_model", cases))


def test_load_text_names_missing_folder():
    message = "there is no folder"
    refused(message, load_text, small("nowhere/"), error=DataNotFoundError)


# --- Penn Treebank --------------------------------------------------------------------------------


def test_load_text_checks_penn_treebank_counts(data_folder):
    files = {f"ptb.{split}.txt": SENTENCES[split].encode() for split in text.SPLITS}
    write(data_folder / "ptb", files)
    message = r"not the official Penn Treebank: \{'train': 240.*929589"
    refused(message, load_text, recipe("paper", "ptb", task="language_model"))


def test_download_checks_penn_treebank_hashes(monkeypatch):
    requests = []

    def fake_download(url, path, digest):
        requests.append((url.rsplit("/", 1)[1], len(digest)))
        Path(path).write_text("x")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fake_download)
    digest = hashlib.sha256(b"x").hexdigest()
    monkeypatch.setattr(text, "PTB_SHA256", {**text.PTB_SHA256, "test": digest})
    folder = data.download("ptb")
    names = [f"ptb.{split}.txt" for split in ("train", "valid", "test")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert requests == [(name, 64) for name in names]
    data.download("ptb")  # the file with the right hash stays
    assert len(requests) == 5
