"""Language model task: texts, batches, perplexity, learning rates and the paper's model."""

import hashlib
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dataset_layouts import write
from helpers import refused

from cpt_core.models.lstm_lm import LanguageModel
from cpt_lab import data
from cpt_lab.data import text
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.language_model import LanguageModelTask
from cpt_lab.training.train import train

SENTENCES = {
    "train": "the cat sat\nthe dog sat\n\n   \na bird sang\n" * 20,
    "valid": "the cat sang\nthe fish sat\n" * 3,
    "test": "the dog sat\na bird sang\n" * 5,
}


@pytest.fixture
def folder(data_folder):
    return write(
        data_folder / "toy",
        {f"toy.{split}.txt": words.encode() for split, words in SENTENCES.items()},
    )


SMALL = dict(
    steps=20,
    batch=4,
    length=5,
    embedding=6,
    hidden=8,
    n_cycles=1,
    vocabulary=None,
    train_tokens=None,
    valid_tokens=None,
    test_tokens=None,
    evaluation_batch=3,
)


def toy(**changes):
    base = recipe("demo", "toy/", task="language_model")
    return replace(base, **{**SMALL, **changes})


def spec(arm="CR", seed=0, **changes):
    return run_spec(toy(**changes), arm, q_max=8, seed=seed, scale="smoke")


def task(**changes):
    return LanguageModelTask(spec(**changes), torch.device("cpu"))


# --- text -----------------------------------------------------------------------------------------


def test_load_text_splits_words_and_marks_unknown(folder):
    found = text.load_text(toy())
    assert (
        len(found.train) == 20 * 12
    )  # blank lines are skipped, every other one ends in <eos>
    words = [found.vocabulary[i] for i in found.train[:9]]
    assert words == ["the", "cat", "sat", "<eos>", "the", "dog", "sat", "<eos>", "a"]
    assert [found.vocabulary[i] for i in found.valid[4:8]] == [
        "the",
        "<unk>",
        "sat",
        "<eos>",
    ]  # no fish in training
    assert found.vocabulary[found.start] == "<eos>"
    assert set(found.vocabulary) == {
        "<eos>",
        "<unk>",
        "the",
        "cat",
        "sat",
        "dog",
        "a",
        "bird",
        "sang",
    }
    assert found.title == "toy"


@pytest.mark.parametrize("dataset", ["novel.txt", "novel/"])
def test_load_text_splits_single_text_by_lines(folder, dataset):
    lines = [f"line {i}" for i in range(30)]
    for path in (folder.parent / "novel.txt", folder.parent / "novel" / "novel.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n\n".join(lines))
    found = text.load_text(toy(dataset=dataset))
    assert found.title == "novel, cut 8 : 1 : 1"
    assert [len(part) for part in (found.train, found.valid, found.test)] == [72, 9, 9]
    assert [found.vocabulary[i] for i in found.train[-3:]] == ["line", "23", "<eos>"]
    for path in (folder.parent / "novel.txt", folder.parent / "novel" / "novel.txt"):
        path.write_text("\n".join(lines[:9]))
    with pytest.raises(
        ValueError,
        match=r"novel.txt has 9 lines with words; one text is cut in three, and needs ten",
    ):
        text.load_text(toy(dataset=dataset))


def test_load_text_accepts_split_named_val(folder):
    (folder / "toy.valid.txt").rename(folder / "toy.val.txt")
    assert len(text.load_text(toy()).valid) > 20


def test_load_text_limits_vocabulary_to_frequent_words(folder):
    found = text.load_text(toy(vocabulary=3, train_tokens=120))
    assert set(found.vocabulary) == {"<eos>", "<unk>", "the", "sat"}
    assert len(found.train) == 120
    assert found.title == "the first 120 words of toy, 3 words known"
    assert (
        text.load_text(toy(vocabulary=500)).title == "toy, 8 words known"
    )  # it has no more


def test_load_text_by_characters(folder):
    found = text.load_text(toy(unit="characters"))
    assert "".join(found.vocabulary[i] for i in found.train[:11]) == "the cat sat"
    assert found.vocabulary[found.start] == "\n"
    assert found.title == "characters of toy"


def test_load_text_of_python_reference():
    found = text.load_text(recipe("demo", "pydoc", task="language_model"))
    assert (len(found.train), len(found.valid), len(found.test)) == (
        270_000,
        10_000,
        20_000,
    )
    assert 80 < len(found.vocabulary) < 200
    assert found.title == "characters of Python's reference text"


def test_load_text_names_missing_and_ambiguous_files(folder):
    refused(
        "there is no folder",
        text.load_text,
        toy(dataset="nowhere/"),
        error=DataNotFoundError,
    )
    (folder / "other.train.txt").write_text("x")
    refused(
        r"several texts for train: other.train.txt, toy.train.txt",
        text.load_text,
        toy(),
    )
    (folder / "other.train.txt").unlink()
    (folder / "toy.test.txt").unlink()
    refused(
        r"no file that ends in test.txt", text.load_text, toy(), error=DataNotFoundError
    )


@pytest.mark.parametrize(
    ("split", "content", "message"),
    [
        ("train", b" \n\n", "has no words"),
        ("train", b"caf\xe9\n", "cannot be read: 'utf-8' codec .*; save it as UTF-8$"),
        ("train", b"a b\n", "3 words, too few"),
        (
            "train",
            b"word word word\n" * 60,
            "toy/: the training text is one word over and over; nothing can be learnt",
        ),
        (
            "train",
            b"un peu\n" * 20,
            "toy/: nothing of the valid text is in the training text",
        ),
        ("test", b"a b\n", "toy/: the test text has 3 words, too few for a batch of "),
        (
            "test",
            SENTENCES["train"].encode(),
            "toy/: the test text is the training text; a test needs another",
        ),
    ],
)
def test_load_text_rejects_unreadable_text(folder, split, content, message):
    (folder / f"toy.{split}.txt").write_bytes(content)
    refused(message, text.load_text, toy())


def test_load_text_checks_penn_treebank_counts(folder):
    ptb = folder.parent / "ptb"
    ptb.mkdir()
    for split in text.SPLITS:
        (ptb / f"ptb.{split}.txt").write_text(SENTENCES[split])
    with pytest.raises(
        ValueError, match=r"not the official Penn Treebank: \{'train': 240.*929589"
    ):
        text.load_text(recipe("paper", "ptb", task="language_model"))


def test_download_checks_penn_treebank_hashes(folder, monkeypatch):
    asked = []

    def fake(url, path, digest):
        asked.append((url, digest))
        Path(path).write_text("x")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fake)
    monkeypatch.setattr(
        text,
        "PTB_SHA256",
        {**text.PTB_SHA256, "test": hashlib.sha256(b"x").hexdigest()},
    )
    where = data.download("ptb")
    assert sorted(p.name for p in where.iterdir()) == [
        "ptb.test.txt",
        "ptb.train.txt",
        "ptb.valid.txt",
    ]
    assert [url.rsplit("/", 1)[1] for url, _ in asked] == [
        "ptb.train.txt",
        "ptb.valid.txt",
        "ptb.test.txt",
    ]
    assert all(len(digest) == 64 for _, digest in asked)
    data.download("ptb")  # what is right already stays
    assert len(asked) == 5


# --- batches and perplexity -----------------------------------------------------------------------


def test_language_model_batches_are_contiguous_columns(folder):
    t = task()
    per_epoch = math.ceil((240 // 4 - 1) / 5)
    stream = t.batches(0)
    epoch = [next(stream) for _ in range(per_epoch)]
    words, targets = (torch.cat([b[k] for b in epoch]) for k in (0, 1))
    column = t.data.train.view(4, 60).t()
    assert torch.equal(words, column[:-1])
    assert torch.equal(targets, column[1:])
    assert [first for _, _, first in epoch] == [True] + [False] * (per_epoch - 1)
    assert epoch[-1][0].shape == (4, 4)  # the last one is shorter
    again = next(stream)
    assert again[2]
    assert torch.equal(again[0], epoch[0][0])
    late = next(t.batches(per_epoch + 3))
    assert torch.equal(late[0], epoch[3][0])


@pytest.mark.parametrize("count", [9, 10, 11, 1, 2])
def test_language_model_evaluates_every_token_once(count):
    tokens = torch.arange(100, 100 + count)
    words, targets = text.evaluation_columns(tokens, start=7, batch=3)
    pairs = [
        (int(w), int(t))
        for w, t in zip(words.t().flatten(), targets.t().flatten(), strict=True)
        if t >= 0
    ]
    assert [t for _, t in pairs] == tokens.tolist()
    assert [w for w, _ in pairs] == [7, *tokens[:-1].tolist()]


def test_language_model_perplexity_equals_manual_computation(folder):
    t = task()
    n = len(t.data.vocabulary)
    table = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) + 0.1
    table /= table.sum(1, keepdim=True)
    sequence = [t.data.start, *t.data.test.tolist()]
    nll = [-math.log(table[a, b]) for a, b in itertools.pairwise(sequence)]
    found = t.evaluate(lambda words, state: (table.log()[words], state))[
        "test"
    ]  # by the word before alone
    assert found["loss"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)


def test_language_model_evaluation_carries_state(folder):
    t = task()
    seen = []

    def counting(words, state):
        """Count the words seen so far in the state."""
        seen.append(state)
        return torch.zeros(*words.shape, len(t.data.vocabulary)), (state or 0) + len(
            words
        )

    t.evaluate(counting)
    lengths = [
        math.ceil(len(part) / 3) for part in (t.data.valid, t.data.test)
    ]  # in three columns
    assert seen == [at or None for length in lengths for at in range(0, length, 5)]


def test_language_model_best_evaluation_has_lowest_perplexity(folder):
    run = train(LanguageModelTask, spec("static 8", evaluate_every=4, lr=5.0))
    by_valid = sorted(
        run.history["evaluations"], key=lambda e: e["valid"]["perplexity"]
    )
    assert by_valid[0]["test"]["perplexity"] != by_valid[-1]["test"]["perplexity"]
    assert (
        run.metric("perplexity", when="best_valid") == by_valid[0]["test"]["perplexity"]
    )


def test_language_model_training_state_resets_per_epoch(folder):
    t = task(dropout=0.0)
    torch.manual_seed(0)
    model = t.build_model()
    stream = t.batches(10)
    carry, seen = None, []
    forward = model.lstm.forward
    model.lstm.forward = lambda x, state=None: seen.append(state) or forward(x, state)
    for _ in range(4):
        _, carry = t.loss(model, next(stream), carry)
        assert not carry[0].requires_grad
    assert [s is None for s in seen] == [
        True,
        False,
        True,
        False,
    ]  # steps 10, 11, 12 (a new epoch), 13


def test_language_model_plateau_rate_follows_evaluations(folder):
    """Derive the learning rate from the evaluations only, in a real training."""
    run = train(
        LanguageModelTask,
        spec("static 2", lr_rule="plateau", evaluate_every=2, lr=60.0),
    )
    _, lr = task(lr_rule="plateau", evaluate_every=2, lr=60.0).optimizer(run.model)
    history = run.history
    assert history["lr"] == [
        lr(s, [e for e in history["evaluations"] if e["step"] <= s]) for s in range(20)
    ]
    assert len(set(history["lr"])) > 2  # it was cut


# --- runs -----------------------------------------------------------------------------------------


def test_language_model_learns_less_at_one_bit(folder):
    runs = {
        arm: train(LanguageModelTask, spec(arm, steps=120, lr=5.0, hidden=16))
        for arm in ("static 8", "static 1")
    }
    assert runs["static 8"].metric("perplexity") < 2
    assert runs["static 1"].metric("perplexity") > 1.3 * runs["static 8"].metric(
        "perplexity"
    )
    assert runs["static 8"].metric("perplexity") == pytest.approx(
        math.exp(runs["static 8"].metric("loss"))
    )
    assert runs["static 8"].title == "LSTM (16 wide) on toy"


def test_language_model_matches_paper():
    model = LanguageModel(10_000, 800, 800)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == (
        2 * 10_000 * 800 + 10_000 + 2 * 3200 * 800 + 3200
    )
    assert model.embedding.weight.abs().max() <= 0.1
    assert model.decoder.weight.abs().max() <= 0.1
    assert model.decoder.bias.abs().max() == 0
    assert model.lstm.weight_hh_l0.abs().max() <= 800**-0.5
    assert not model.lstm.bias_hh_l0.requires_grad
    assert model.lstm.bias_hh_l0.abs().max() == 0


def test_language_model_embedding_dropout_is_optional():
    torch.manual_seed(0)
    words = torch.randint(9, (4, 2))
    seen = []
    for drop in (True, False):
        model = LanguageModel(9, 30, 5, dropout=0.5, drop_embedding=drop)
        model.lstm.register_forward_pre_hook(
            lambda module, inputs: seen.append((inputs[0] == 0).float().mean())
        )
        model(words)
    assert 0.3 < seen[0] < 0.7
    assert seen[1] == 0


def test_language_model_stand_in_needs_no_data():
    for scale, dataset in (("paper", "ptb"), ("demo", "pydoc")):
        r = recipe(scale, dataset, task="language_model")
        made = LanguageModelTask(
            run_spec(r, "CR", q_max=8, seed=0), torch.device("cpu"), stand_in=True
        )
        x, y, first = next(made.batches(0))
        assert x.shape == y.shape == (35, 20)
        assert first
        assert len(made.data.vocabulary) == (10_000 if dataset == "ptb" else 100)
