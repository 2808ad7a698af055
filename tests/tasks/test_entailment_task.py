"""Entailment task by the common training loop: learning, resuming, padding, checkpoints, operation counts."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers
from dataset_layouts import write
from helpers import refused, run_command, same_parameters, smoke_spec

import cpt_core as cpt
from cpt_lab.data.entailment import EntailmentData
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import entailment as entailment_task
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.entailment import EntailmentTask
from cpt_lab.training.train import train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = {
    "hidden": 16,
    "layers": 1,
    "train_pairs": 300,
    "valid_pairs": 60,
    "test_pairs": 60,
}
spec = partial(smoke_spec, "templates", steps=12, **TINY)


def test_entailment_training_learns():
    """Exceed chance, 1/3, clearly on the grammar's sentence pairs."""
    r = replace(recipe("smoke", "templates"), layers=1, hidden=64)
    run = train(EntailmentTask, run_spec(r, "static 8", q_max=8, seed=0))
    assert run.status == "ok"
    assert run.metric("accuracy") > 0.42
    assert run.metric("accuracy", "valid") > 0.42
    assert run.metric("loss") < 1.09  # log 3
    assert run.title.startswith(
        "small BERT from scratch, WordPiece of its own, on synthetic sentence pairs"
    )
    assert load_task_class(run.spec) is EntailmentTask


def test_entailment_epoch_has_every_pair_once():
    task = EntailmentTask(spec(batch=128), CPU)
    epoch = [next(task.batches(step)) for step in range(3)]
    assert [len(batch[-1]) for batch in epoch] == [128, 128, 44]
    seen = {tuple(row[row > 0].tolist()) for batch in epoch for row in batch[0]}
    assert seen == {tuple(row[row > 0].tolist()) for row in task.data.train.tensors[0]}
    assert not torch.equal(
        next(task.batches(3))[0], epoch[0][0]
    )  # another order in the next epoch


def test_entailment_padding_is_neutral_in_float32():
    wide, narrow = (
        EntailmentTask(spec(padding=padding), CPU) for padding in ("max", "longest")
    )
    assert (wide.cost_batches, narrow.cost_batches) == (1, 8)
    model = wide.build_model().eval()
    a, b = next(wide.batches(0)), next(narrow.batches(0))
    assert a[0].shape[1] == 24 > b[0].shape[1]
    torch.testing.assert_close(
        model(*a[:3]).logits, model(*b[:3]).logits, atol=1e-5, rtol=0
    )
    left, right = wide.evaluate(model), narrow.evaluate(model)
    for split in left:
        assert left[split] == pytest.approx(right[split], abs=1e-5)
    masked = list(a)
    masked[1] = torch.zeros_like(a[1])  # attention to padding would be seen
    assert not torch.allclose(
        model(*a[:3]).logits, model(*masked[:3]).logits, atol=1e-5
    )


def test_entailment_mask_equals_mask_of_bert():
    task = EntailmentTask(spec(), CPU)
    model = task.build_model().eval()
    pieces, mask, sentence, _ = next(task.batches(0))
    plain = model(pieces, (mask[:, 0, 0] == 0).long(), sentence).logits
    torch.testing.assert_close(
        model(pieces, mask, sentence).logits, plain, atol=1e-6, rtol=0
    )


def test_entailment_word_pieces_come_from_training_text(tmp_path):
    task = EntailmentTask(spec(train_pairs=None), CPU)
    again = entailment_task._tokenizer(
        task.recipe, entailment_task.load_entailment(task.recipe)
    )
    premise, hypothesis, _ = sentence_pairs(7)[0]
    pieces, sentence, length, _ = task.data.train[0]
    row = pieces[:length].tolist()
    assert again.decode(row) == f"{premise} {hypothesis}"
    found = [again.id_to_token(i) for i in row]
    assert (found[0], found[-1], found.count("[SEP]")) == ("[CLS]", "[SEP]", 2)
    middle = found.index("[SEP]") + 1
    assert sentence.tolist() == [0] * middle + [1] * (len(row) - middle) + [0] * (
        24 - len(row)
    )
    folder = write_pairs(tmp_path / "mine", test="quokka")
    r = replace(
        recipe("smoke", str(folder), task="entailment"),
        language="en",
        test_languages=("en",),
    )
    own = entailment_task._tokenizer(r, entailment_task.load_entailment(r))
    assert "##uo" not in own.get_vocab()
    assert "[UNK]" in own.encode("a quokka").tokens


def test_entailment_word_pieces_are_equal_across_processes():
    code = """
from dataclasses import replace
from cpt_lab.experiments.registry import recipe
from cpt_lab.tasks.entailment import _tokenizer, load_entailment
r = replace(recipe("smoke", "templates"), vocabulary=120)
print(_tokenizer(r, load_entailment(r)).to_str())
"""
    there = json.loads(run_command(sys.executable, "-c", code))["model"]["vocab"]
    r = replace(recipe("smoke", "templates"), vocabulary=120)
    here = entailment_task._tokenizer(r, entailment_task.load_entailment(r)).get_vocab()
    assert there == here
    assert len(here) == 120


def test_entailment_tokenizer_handles_any_script():
    text = ("ΟΔΟΣ İstanbul naïve ##a 日本語", "don't [x] ##a ##ab")
    pairs = pd.DataFrame({"premise": text, "hypothesis": text, "label": 0})
    learned = entailment_task._tokenizer(
        recipe("smoke", "templates"), EntailmentData(pairs, pairs, {}, "", "")
    )
    assert learned.encode("##a", add_special_tokens=False).tokens == ["#", "#", "a"]
    assert learned.decode(learned.encode("a", "a").ids) == "a a"
    assert not {"[UNK]"} & set(learned.encode(*text).tokens)


def _facts(task):
    return "\n".join(f"{topic}: {text}" for topic, text in task.data.report.facts)


def test_entailment_report_counts_unknown_words(tmp_path):
    folder = write_pairs(tmp_path / "mine", test="\u732b")
    asked = replace(
        recipe("smoke", str(folder), task="entailment"),
        language="en",
        test_languages=("en",),
    )
    found = _facts(EntailmentTask(run_spec(asked, "static 8", q_max=8, seed=0), CPU))
    assert "changed: test en: 12 words without word pieces became [UNK]" in found
    assert "changed: train: " not in found


def test_entailment_report_counts_truncated_pairs(caplog):
    with caplog.at_level("INFO"):
        task = EntailmentTask(spec(length=9), CPU)
    assert int(task.data.train.tensors[2].max()) == 9
    assert "train: " in caplog.text
    cut = int(
        caplog.text.split("train: ")[1].split(
            " of 300 pairs are longer than 9 word pieces"
        )[0]
    )
    assert (
        f"left out: train: word pieces of {cut} of 300 pairs behind the first 9"
        in _facts(task)
    )
    whole = EntailmentTask(spec(), CPU)
    assert "word pieces of" not in _facts(whole)
    assert cut == int((whole.data.train.tensors[2] > 9).sum()) > 0


def write_pairs(folder, languages=("en",), test=""):
    folder.mkdir()
    pairs = sentence_pairs(84)
    for split, part in (
        ("train", pairs[:60]),
        ("dev", pairs[60:72]),
        ("test", pairs[72:]),
    ):
        lines = ["premise,hypothesis,label,language"]
        for i, language in enumerate(languages):
            extra = f" {test}" if split == "test" else ""
            lines += [
                f"{p}{extra},{h},{(label + i) % 3},{language}" for p, h, label in part
            ]
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_entailment_evaluates_every_test_language(tmp_path):
    folder = write_pairs(
        tmp_path / "mine", ("en", "es")
    )  # in "es" all labels are off by one
    r = replace(
        recipe("smoke", str(folder), task="entailment"),
        language="en",
        test_languages=("en", "es"),
        steps=2,
    )
    task = EntailmentTask(run_spec(r, "static 8", q_max=8, seed=0), CPU)
    task.data.test["en"].tensors[3][:6] = 0
    found = task.evaluate(
        lambda pieces, *_: SimpleNamespace(logits=torch.eye(3)[[0] * len(pieces)])
    )  # always 0
    assert set(found) == {"valid", "test"}
    assert set(found["test"]) == {"accuracy", "loss", "accuracy_es"}
    assert found["test"]["accuracy"] == pytest.approx(8 / 12)
    assert (
        found["test"]["accuracy_es"]
        == found["valid"]["accuracy"]
        == pytest.approx(4 / 12)
    )


# --- checkpoints ----------------------------------------------------------------------------------


def write_checkpoint(folder, labels):
    torch.manual_seed(5)
    known = {
        word
        for premise, hypothesis, _ in sentence_pairs(300)
        for word in f"{premise} {hypothesis}".split()
    }
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
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("labels", [3, 2])
def test_entailment_loads_checkpoint_and_replaces_wrong_classifier(tmp_path, labels):
    folder = write_checkpoint(tmp_path / "saved", labels)
    task = EntailmentTask(spec(checkpoint=str(folder)), CPU)
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    torch.manual_seed(0)
    model = task.build_model()
    assert same_parameters(model.bert, saved.bert)
    assert model.classifier.out_features == 3
    assert (labels == 3) == (
        labels == 3 and torch.equal(model.classifier.weight, saved.classifier.weight)
    )
    torch.manual_seed(0)
    assert same_parameters(
        model, task.build_model()
    )  # also a new classifier depends on the seed alone
    torch.manual_seed(1)
    assert same_parameters(model, task.build_model()) == (labels == 3)
    assert model.config._attn_implementation == "eager"
    assert str(folder) in task.title
    run = train(EntailmentTask, spec(checkpoint=str(folder), steps=3))
    assert run.status == "ok"
    assert task.data.vocabulary == model.config.vocab_size


def test_entailment_rejects_unusable_checkpoints(data_folder):
    (data_folder / "empty").mkdir()
    write(data_folder / "gpt", {"config.json": b'{"model_type": "gpt2"}'})
    for name, error, message in (
        (
            "bert-base-multilingual-cased",
            DataNotFoundError,
            r"with: .*python -m cpt_lab download bert-base-multi",
        ),
        ("nowhere", DataNotFoundError, r"no pretrained model in .*nowhere$"),
        (
            "empty",
            ValueError,
            r"empty holds no pretrained model: it has no config\.json",
        ),
        (
            "gpt",
            ValueError,
            r"gpt holds a model of type 'gpt2'; only 'bert' can be used",
        ),
    ):
        refused(message, EntailmentTask, spec(checkpoint=name), CPU, error=error)


def test_entailment_counts_and_quantizes_linear_layers():
    task = EntailmentTask(spec(padding="max"), CPU)
    model = cpt.quantize_(task.build_model())
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert (
        len(linear) == 6 + 2
    )  # of one layer: query, key, value, output, two of the feed-forward; pooler, classifier
    assert linear == {
        row.name for row in cpt.summary(model).quantized if row.kind == "Linear"
    }
    plan = cpt.count_bitops(model, task.inputs(next(task.batches(0))))
    tokens, h = 32 * 24, 16
    assert sum(plan.macs[name] for name in linear) == tokens * (
        4 * h * h + 8 * h * h
    ) + 32 * (h * h + 3 * h)


@pytest.mark.parametrize("checkpoint", ["", "bert-base-multilingual-cased"])
def test_entailment_stand_in_needs_no_data(monkeypatch, checkpoint):
    for name in ("load_entailment", "_tokenizer", "checkpoint_folder"):
        monkeypatch.setattr(
            entailment_task, name, lambda *args: pytest.fail("a stand-in needs nothing")
        )
    small = spec(
        checkpoint=checkpoint,
        dataset="xnli",
        test_languages=("de",),
        batch=4,
        length=16,
        padding="max",
    )
    task = EntailmentTask(small, CPU, stand_in=True)
    batch = next(task.batches(0))
    assert batch[0].shape == batch[2].shape == (4, 16)
    with torch.device("meta"):  # the large one takes 700 MB otherwise
        task.device = torch.device("meta")
        model = task.build_model()
    assert model.config.vocab_size == (119_547 if checkpoint else 500)
    assert model.config.num_hidden_layers == (12 if checkpoint else 1)
    assert cpt.count_bitops(model, task.inputs(batch)).forward_macs > 0
