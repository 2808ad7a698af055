"""Entailment task: batches and masks, word pieces, evaluation, pretrained checkpoints, cost."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers
from dataset_layouts import own_recipe, report_lines, write
from helpers import refused, same_parameters, smoke_spec

import cpt_core as cpt
from cpt_lab.data.entailment import EntailmentData, load_entailment
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import entailment as entailment_task
from cpt_lab.tasks.entailment import EntailmentTask
from cpt_lab.training.train import train

pytestmark = pytest.mark.slow  # transformers takes seconds to import

CPU = torch.device("cpu")
TINY = {
    "hidden": 16,
    "layers": 1,
    "train_pairs": 300,
    "valid_pairs": 60,
    "test_pairs": 60,
}
spec = partial(smoke_spec, "templates", steps=12, **TINY)


def write_pairs(folder, *languages, test_word=""):
    """Write 84 pairs as a data set of the user; every language has its labels one further."""
    pairs = sentence_pairs(84)
    splits = {"train": pairs[:60], "dev": pairs[60:72], "test": pairs[72:]}
    for split, part in splits.items():
        word = f" {test_word}" if split == "test" else ""
        lines = ["premise,hypothesis,label,language"]
        for i, language in enumerate(languages):
            for premise, hypothesis, label in part:
                row = (f"{premise}{word}", hypothesis, (label + i) % 3, language)
                lines.append(",".join(map(str, row)))
        write(folder / "mine", {f"{split}.csv": "\n".join(lines).encode()})


def own_spec(**changes):
    return run_spec(own_recipe("entailment", **changes), "static 8", q_max=8, seed=0)


def test_entailment_training_learns():
    """Exceed chance, 1/3, clearly on the grammar's sentence pairs."""
    config = replace(recipe("smoke", "templates"), layers=1, hidden=64)
    run = train(EntailmentTask, run_spec(config, "static 8", q_max=8, seed=0))
    assert run.status == "ok"
    assert run.metric("accuracy") > 0.42
    assert run.metric("accuracy", "valid") > 0.42
    assert run.metric("loss") < 1.09  # log 3
    title = "small BERT from scratch, WordPiece of its own, on synthetic sentence pairs"
    assert run.title.startswith(title)


# --- batches --------------------------------------------------------------------------------------


def words_of(rows):
    """Return rows of word pieces without padding."""
    return {tuple(row[row > 0].tolist()) for row in rows}


def test_entailment_padding_is_neutral_in_float32():
    """Return equal logits for any padding, and for the mask that BERT makes itself."""
    wide, narrow = (
        EntailmentTask(spec(padding=padding), CPU) for padding in ("max", "longest")
    )
    assert (wide.cost_batches, narrow.cost_batches) == (1, 8)
    model = wide.build_model().eval()
    a, b = next(wide.batches(0)), next(narrow.batches(0))
    assert a.pieces.shape[1] == 24 > b.pieces.shape[1]
    logits = model(*wide.inputs(a)).logits
    short = model(*narrow.inputs(b)).logits
    torch.testing.assert_close(logits, short, atol=1e-5, rtol=0)
    attended = (a.mask[:, 0, 0] == 0).long()
    plain = model(a.pieces, attended, a.sentences).logits
    torch.testing.assert_close(logits, plain, atol=1e-6, rtol=0)
    unmasked = model(a.pieces, torch.zeros_like(a.mask), a.sentences).logits
    assert not torch.allclose(logits, unmasked, atol=1e-5)
    left, right = wide.evaluate(model), narrow.evaluate(model)
    for split in left:
        assert left[split] == pytest.approx(right[split], abs=1e-5)


# --- word pieces ----------------------------------------------------------------------------------


def tokenizer_of(config):
    return entailment_task._tokenizer(config, load_entailment(config))


def test_entailment_word_pieces_encode_both_sentences():
    task = EntailmentTask(spec(), CPU)
    tokenizer = tokenizer_of(task.recipe)
    pairs = load_entailment(task.recipe).train
    pieces, sentences, length, _ = task.data.train[0]
    row = pieces[:length].tolist()
    assert (
        tokenizer.decode(row) == f"{pairs.premise.iloc[0]} {pairs.hypothesis.iloc[0]}"
    )
    tokens = [tokenizer.id_to_token(i) for i in row]
    assert (tokens[0], tokens[-1], tokens.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    first = tokens.index("[SEP]") + 1
    second, padding = len(row) - first, 24 - len(row)
    assert sentences.tolist() == [0] * first + [1] * second + [0] * padding


def test_entailment_word_pieces_come_from_training_text(data_folder):
    write_pairs(data_folder, "en", test_word="quokka")
    tokenizer = tokenizer_of(own_recipe("entailment"))
    assert "##uo" not in tokenizer.get_vocab()
    assert "[UNK]" in tokenizer.encode("a quokka").tokens


def test_entailment_word_pieces_are_reproducible():
    """Learn equal numbers of word pieces, although the library's tables have a new order each time."""
    config = replace(recipe("smoke", "templates"), vocabulary=120)
    vocabularies = [tokenizer_of(config).get_vocab() for _ in range(4)]
    assert len(vocabularies[0]) == 120
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)


def test_entailment_tokenizer_handles_any_script():
    text = ("ΟΔΟΣ İstanbul naïve ##a 日本語", "don't [x] ##a ##ab")
    pairs = pd.DataFrame({"premise": text, "hypothesis": text, "label": 0})
    data = EntailmentData(pairs, pairs, {}, "", "")
    tokenizer = entailment_task._tokenizer(recipe("smoke", "templates"), data)
    tokens = tokenizer.encode("##a", add_special_tokens=False).tokens
    assert tokens == ["#", "#", "a"]
    assert tokenizer.decode(tokenizer.encode("a", "a").ids) == "a a"
    assert "[UNK]" not in tokenizer.encode(*text).tokens


def test_entailment_report_counts_unknown_words(data_folder):
    write_pairs(data_folder, "en", test_word="\u732b")
    facts = report_lines(EntailmentTask(own_spec(), CPU).data)
    assert "changed: test en: 12 words without word pieces became [UNK]" in facts
    assert not [fact for fact in facts if "changed: train" in fact]


def test_entailment_report_counts_truncated_pairs(caplog):
    whole = EntailmentTask(spec(), CPU)
    assert not [fact for fact in report_lines(whole.data) if "word pieces of" in fact]
    count = int((whole.data.train.tensors[2] > 9).sum())
    assert count > 0
    with caplog.at_level("INFO"):
        cut = EntailmentTask(spec(length=9), CPU)
    assert int(cut.data.train.tensors[2].max()) == 9
    assert f"train: {count} of 300 pairs are longer than 9 word pieces" in caplog.text
    fact = f"left out: train: word pieces of {count} of 300 pairs behind the first 9"
    assert fact in report_lines(cut.data)


# --- evaluation -----------------------------------------------------------------------------------


def test_entailment_evaluates_every_test_language(data_folder):
    """Evaluate a model that always answers 0; in "es" all labels are one further."""
    write_pairs(data_folder, "en", "es")
    task = EntailmentTask(own_spec(test_languages=("en", "es")), CPU)
    task.data.test["en"].tensors[3][:6] = 0

    def answer_zero(pieces, *_):
        return SimpleNamespace(logits=torch.eye(3)[[0] * len(pieces)])

    result = task.evaluate(answer_zero)
    assert set(result) == {"valid", "test"}
    assert set(result["test"]) == {"accuracy", "loss", "accuracy_es"}
    assert result["test"]["accuracy"] == pytest.approx(8 / 12)
    assert result["test"]["accuracy_es"] == pytest.approx(4 / 12)
    assert result["valid"]["accuracy"] == pytest.approx(4 / 12)


# --- checkpoints ----------------------------------------------------------------------------------


def write_checkpoint(folder, labels):
    torch.manual_seed(5)
    sentences = [text for pair in sentence_pairs(84) for text in pair[:2]]
    known = {word for sentence in sentences for word in sentence.split()}
    words = [*entailment_task.SPECIAL_TOKENS, "[MASK]", *sorted(known)]
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=labels,
    )
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return model


@pytest.mark.parametrize("labels", [3, 2])
def test_entailment_loads_checkpoint_and_replaces_wrong_classifier(labels, data_folder):
    saved = write_checkpoint(data_folder / "saved", labels)
    write_pairs(data_folder, "en")
    config = own_spec(checkpoint="saved", length=24, steps=2)
    task = EntailmentTask(config, CPU)
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(task.build_model())
    model, again, other = models
    assert same_parameters(model.bert, saved.bert)
    assert model.classifier.out_features == 3
    if labels == 3:
        assert torch.equal(model.classifier.weight, saved.classifier.weight)
    assert same_parameters(model, again)  # a new classifier depends on the seed alone
    assert same_parameters(model, other) == (labels == 3)
    assert model.config._attn_implementation == "eager"
    assert task.data.vocabulary == model.config.vocab_size
    assert "saved on own pairs" in task.title
    assert train(EntailmentTask, config).status == "ok"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "bert-base-multilingual-cased",
            DataNotFoundError,
            r"with: .*python -m cpt_lab download bert-base-multi",
        ),
        ("nowhere", DataNotFoundError, r"no pretrained model in .*nowhere$"),
        ("empty", ValueError, r"empty holds no pretrained model: it has no config\."),
        ("gpt", ValueError, r"gpt holds a model of type 'gpt2'; only 'bert' can be"),
    ],
)
def test_entailment_rejects_unusable_checkpoints(name, error, message, data_folder):
    (data_folder / "empty").mkdir()
    write(data_folder / "gpt", {"config.json": b'{"model_type": "gpt2"}'})
    write_pairs(data_folder, "en")
    refused(message, EntailmentTask, own_spec(checkpoint=name), CPU, error=error)


# --- cost -----------------------------------------------------------------------------------------


def test_entailment_counts_and_quantizes_linear_layers():
    task = EntailmentTask(spec(padding="max"), CPU)
    model = cpt.quantize_(task.build_model())
    modules = dict(model.named_modules())
    linear = {n for n, module in modules.items() if isinstance(module, torch.nn.Linear)}
    # Of one layer: query, key, value, output, two of the feed-forward; then pooler and classifier.
    assert len(linear) == 6 + 2
    quantized = cpt.summary(model).quantized
    assert linear == {row.name for row in quantized if row.kind == "Linear"}
    counted = cpt.count_bitops(model, task.inputs(next(task.batches(0))))
    tokens, h = 32 * 24, 16
    macs = tokens * (4 * h * h + 8 * h * h) + 32 * (h * h + 3 * h)
    assert sum(counted.macs[name] for name in linear) == macs


@pytest.mark.parametrize("checkpoint", ["", "bert-base-multilingual-cased"])
def test_entailment_stand_in_needs_no_data(monkeypatch, checkpoint):
    for name in ("load_entailment", "_tokenizer", "checkpoint_folder"):
        monkeypatch.setattr(entailment_task, name, pytest.fail)
    config = spec(
        checkpoint=checkpoint,
        dataset="xnli",
        test_languages=("de",),
        batch=4,
        length=16,
        padding="max",
    )
    task = EntailmentTask(config, CPU, stand_in=True)
    batch = next(task.batches(0))
    assert batch.pieces.shape == batch.sentences.shape == (4, 16)
    with torch.device("meta"):  # the large model would take 700 MB
        task.device = torch.device("meta")
        model = task.build_model()
    assert model.config.vocab_size == (119_547 if checkpoint else 500)
    assert model.config.num_hidden_layers == (12 if checkpoint else 1)
    assert cpt.count_bitops(model, task.inputs(batch)).forward_macs > 0
