"""Language model task: batches, state, perplexity, learning rates, and the paper's model."""

import itertools
import math

import pytest
import torch
from dataset_layouts import own_recipe, write

from cpt_core.models.lstm_lm import LanguageModel
from cpt_lab.data.text import evaluation_columns
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.language_model import LanguageModelTask
from cpt_lab.training.train import train

CPU = torch.device("cpu")
SENTENCES = {
    "train": "the cat sat\nthe dog sat\na bird sang\n" * 20,
    "valid": "the cat sang\nthe fish sat\n" * 3,
    "test": "the dog sat\na bird sang\n" * 5,
}
SMALL = {
    "steps": 20,
    "batch": 4,
    "length": 5,
    "embedding": 6,
    "hidden": 8,
    "n_cycles": 1,
    "evaluation_batch": 3,
}


@pytest.fixture(autouse=True)
def toy_text(data_folder):
    """Write a text of nine different words, 240 of them to train on."""
    files = {f"{split}.txt": words.encode() for split, words in SENTENCES.items()}
    write(data_folder / "mine", files)


def spec(arm="CR", **changes):
    config = own_recipe("language_model", **{**SMALL, **changes})
    return run_spec(config, arm, q_max=8, seed=0, scale="smoke")


def task(**changes):
    return LanguageModelTask(spec(**changes), CPU)


def test_language_model_batches_are_contiguous_columns():
    t = task()
    per_epoch = math.ceil((240 // 4 - 1) / 5)
    *epoch, again = itertools.islice(t.batches(0), per_epoch + 1)
    words = torch.cat([batch.words for batch in epoch])
    targets = torch.cat([batch.targets for batch in epoch])
    columns = t.data.train.view(4, 60).t()
    assert torch.equal(words, columns[:-1])
    assert torch.equal(targets, columns[1:])
    starts = [batch.starts_epoch for batch in epoch]
    assert starts == [True] + [False] * (per_epoch - 1)
    assert epoch[-1].words.shape == (4, 4)  # the last one is shorter
    assert again.starts_epoch
    assert torch.equal(again.words, epoch[0].words)
    late = next(t.batches(per_epoch + 3))
    assert torch.equal(late.words, epoch[3].words)


@pytest.mark.parametrize("count", [9, 10, 11, 1, 2])
def test_language_model_evaluates_every_token_once(count):
    tokens = torch.arange(100, 100 + count)
    columns = evaluation_columns(tokens, start=7, batch=3)
    words, targets = (column.t().flatten() for column in columns)
    counts = targets >= 0
    assert targets[counts].tolist() == tokens.tolist()
    assert words[counts].tolist() == [7, *tokens[:-1].tolist()]


def test_language_model_perplexity_equals_manual_computation():
    """Evaluate a model that predicts a word from the one before alone."""
    t = task()
    count = len(t.data.vocabulary)
    table = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) + 0.1
    table /= table.sum(1, keepdim=True)
    tokens = [t.data.start, *t.data.test.tolist()]
    losses = [-math.log(table[a, b]) for a, b in itertools.pairwise(tokens)]
    loss = sum(losses) / len(losses)
    result = t.evaluate(lambda words, state: (table.log()[words], state))["test"]
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_language_model_evaluation_carries_state():
    t = task()
    states = []

    def count_words(words, state):
        """Count the words so far in the state."""
        states.append(state)
        logits = torch.zeros(*words.shape, len(t.data.vocabulary))
        return logits, (state or 0) + len(words)

    t.evaluate(count_words)
    lengths = [math.ceil(len(part) / 3) for part in (t.data.valid, t.data.test)]
    assert states == [at or None for length in lengths for at in range(0, length, 5)]


def test_language_model_training_state_resets_per_epoch():
    t = task(dropout=0.0)
    model = t.build_model()
    stream, carry, has_state = t.batches(10), None, []
    forward = model.lstm.forward

    def record(x, state=None):
        has_state.append(state is not None)
        return forward(x, state)

    model.lstm.forward = record
    for _ in range(4):  # steps 10, 11, 12 of a new epoch, 13
        _, carry = t.loss(model, next(stream), carry)
        assert not carry[0].requires_grad
    assert has_state == [False, True, False, True]


def test_language_model_best_evaluation_has_lowest_perplexity():
    run = train(LanguageModelTask, spec("static 8", evaluate_every=4, lr=5.0))
    perplexities = {
        evaluation["valid"]["perplexity"]: evaluation["test"]["perplexity"]
        for evaluation in run.history["evaluations"]
    }
    best, worst = perplexities[min(perplexities)], perplexities[max(perplexities)]
    assert best != worst
    assert run.metric("perplexity", when="best_valid") == best


@pytest.mark.slow
def test_language_model_plateau_rate_follows_evaluations():
    """Derive the learning rate from the evaluations only, in a real training."""
    rule = {"lr_rule": "plateau", "evaluate_every": 2, "lr": 60.0}
    run = train(LanguageModelTask, spec("static 2", **rule))
    _, lr = task(**rule).optimizer(run.model)
    evaluations = run.history["evaluations"]
    rates = [lr(s, [e for e in evaluations if e["step"] <= s]) for s in range(20)]
    assert run.history["lr"] == rates
    assert len(set(rates)) > 2


@pytest.mark.slow
def test_language_model_learns_less_at_one_bit():
    runs = [
        train(LanguageModelTask, spec(arm, steps=120, lr=5.0, hidden=16))
        for arm in ("static 8", "static 1")
    ]
    fine, coarse = (run.metric("perplexity") for run in runs)
    assert fine < 2
    assert coarse > 1.3 * fine
    assert fine == pytest.approx(math.exp(runs[0].metric("loss")))
    assert runs[0].title == "LSTM (16 wide) on mine"


# --- the model ------------------------------------------------------------------------------------


def test_language_model_matches_paper():
    model = LanguageModel(10_000, 800, 800)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 2 * 10_000 * 800 + 10_000 + 2 * 3200 * 800 + 3200
    assert model.embedding.weight.abs().max() <= 0.1
    assert model.decoder.weight.abs().max() <= 0.1
    assert model.decoder.bias.abs().max() == 0
    assert model.lstm.weight_hh_l0.abs().max() <= 800**-0.5
    assert not model.lstm.bias_hh_l0.requires_grad
    assert model.lstm.bias_hh_l0.abs().max() == 0


@pytest.mark.parametrize(("drop", "low", "high"), [(True, 0.3, 0.7), (False, 0, 0)])
def test_language_model_embedding_dropout_is_optional(drop, low, high):
    torch.manual_seed(0)
    model = LanguageModel(9, 30, 5, dropout=0.5, drop_embedding=drop)
    shares = []

    def record(module, inputs):
        shares.append(float((inputs[0] == 0).float().mean()))

    model.lstm.register_forward_pre_hook(record)
    model(torch.randint(9, (4, 2)))
    assert low <= shares[0] <= high


@pytest.mark.parametrize(
    ("scale", "dataset", "words"), [("paper", "ptb", 10_000), ("demo", "pydoc", 100)]
)
def test_language_model_stand_in_needs_no_data(scale, dataset, words):
    config = run_spec(recipe(scale, dataset), "CR", q_max=8, seed=0)
    stand_in = LanguageModelTask(config, CPU, stand_in=True)
    batch = next(stand_in.batches(0))
    assert batch.words.shape == batch.targets.shape == (35, 20)
    assert batch.starts_epoch
    assert len(stand_in.data.vocabulary) == words
