"""PrecisionCallback in a transformers Trainer with a small BERT."""

import contextlib
import copy
import io
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import identical, make, refused, state_of

import cpt_core as cpt

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from cpt_core.quantization.convert import all_precisions  # noqa: E402
from cpt_extras.integrations.hf import FILE, PrecisionCallback  # noqa: E402

pytestmark = pytest.mark.slow

STEPS, ACCUMULATED = 12, 2
CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
LAYERS = 8  # linear ones


schedule_of = partial(make, total_steps=STEPS, n_cycles=2)


def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **CONFIG, vocab_size=20, max_position_embeddings=8, num_labels=2
        )
    )


def sentences(n, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(20, (n, 6), generator=generator)
    return [
        {"input_ids": w, "attention_mask": torch.ones_like(w), "labels": int(w[0]) % 2}
        for w in words
    ]


TRAIN, TEST = (
    sentences(24, 0),
    sentences(8, 1),
)  # two epochs of 6 optimizer steps of 2 batches of 2


def trainer_of(folder, callback, model=None, callbacks=(), **changes):
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": 0.01,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    model = cpt.quantize_(bert()) if model is None else model
    arguments = transformers.TrainingArguments(**settings | changes)
    return transformers.Trainer(
        model, arguments, None, TRAIN, TEST, callbacks=[callback, *callbacks]
    )


def precisions_of(model):
    """Return the precision of every layer that holds weights."""
    return [p for p in all_precisions(model).values() if p.has_weights]


def probe(model):
    """Return a list that records mode, bits and gradient bits of every forward pass."""
    seen = []
    layers = precisions_of(model)
    assert len(layers) == LAYERS
    attention = model.bert.encoder.layer[0].attention.self
    layers.append(attention.precision)  # which holds no weights, and runs now
    attention.register_forward_pre_hook(
        lambda *_: seen.append(
            (model.training, {p.bits for p in layers}, {p.q_grad for p in layers})
        )
    )
    return seen


def per_batch(schedule):
    return [{b} for b in schedule.bits().tolist() for _ in range(ACCUMULATED)]


def test_hf_callback_sets_bits_per_step(tmp_path, device):
    schedule = schedule_of()
    trainer = trainer_of(
        tmp_path, PrecisionCallback(schedule, q_grad=6), use_cpu=device.type == "cpu"
    )
    seen = probe(trainer.model)
    trainer.train()
    assert trainer.model.device.type == device.type
    assert trainer.state.global_step == STEPS
    assert seen == [(True, bits, {6}) for bits in per_batch(schedule)]


class Peek(transformers.TrainerCallback):
    """Callback that runs the model at 2 bits after every step."""

    def on_step_end(self, args, state, control, model, **kwargs):
        with cpt.precision(model.eval(), 2), torch.no_grad():
            model(**{k: torch.as_tensor(v)[None] for k, v in TEST[0].items()})


def test_hf_callback_sets_evaluation_bits(
    tmp_path,
):
    """Evaluate at `eval_bits` in any order, also after a precision context has ended."""
    callback = PrecisionCallback(schedule_of(), eval_bits=5)
    how = {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}
    trainer = trainer_of(tmp_path, callback, callbacks=[Peek()], **how)
    seen = probe(trainer.model)
    trainer.evaluate()  # before any training
    trainer.train()
    trainer.evaluate()
    trainer.predict(TEST)
    callback.eval_bits = "float"
    assert trainer.evaluate()["eval_bits"] == 32
    assert seen.pop()[1] == {None}
    assert [bits for training, bits, _ in seen if training] == per_batch(schedule_of())
    evaluations = [bits for training, bits, _ in seen if not training]
    assert evaluations.count({2}) == STEPS
    times = (
        1 + 1 + 3 + 2
    )  # one batch of 8 each: before, at the start, at 5, 10, 12, after
    assert [bits for bits in evaluations if bits != {2}] == [{5}] * times


# --- resuming -------------------------------------------------------------------------------------

STOP = 4  # inside the first cycle and inside the first epoch
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 6,
    "eval_on_start": True,
}  # which draws random numbers of torch


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Train without interruption, and return the trainer, a checkpoint, the log and the printed text."""
    folder, printed = tmp_path_factory.mktemp("straight"), io.StringIO()
    how = {"save_strategy": "steps", "save_steps": STOP, **EVALUATED}
    trainer = trainer_of(folder, PrecisionCallback(schedule_of()), **how)
    with contextlib.redirect_stdout(printed):
        trainer.train()
    history = list(trainer.state.log_history)
    return SimpleNamespace(
        trainer=trainer,
        checkpoint=folder / f"checkpoint-{STOP}",
        history=history,
        printed=printed,
    )


def losses_in(history):
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_hf_callback_resumes_bit_exactly(straight, tmp_path, elsewhere):
    whole, checkpoint = straight.trainer, straight.checkpoint
    callback = PrecisionCallback(
        schedule_of(), resume_from=checkpoint if elsewhere else None
    )
    trainer = trainer_of(
        tmp_path if elsewhere else checkpoint.parent, callback, **EVALUATED
    )
    seen = probe(trainer.model)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert [b for training, b, _ in seen if training] == per_batch(schedule_of())[
        STOP * ACCUMULATED :
    ]
    assert identical(state_of(trainer.model), state_of(whole.model))
    assert losses_in(trainer.state.log_history) == losses_in(straight.history)
    assert whole.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert not list(checkpoint.glob("*.tmp"))


@pytest.mark.parametrize(
    ("content", "schedule", "message"),
    [
        (None, schedule_of(), "No such file"),
        (b"nonsense", schedule_of(), "cannot continue from"),
        (b"", schedule_of(), "cannot continue from"),
        ([1, 2], schedule_of(), "it holds no state of a precision"),
        ("same", schedule_of("ER"), "the checkpoint has schedules"),
        ("step", schedule_of(), "it is of step 3, the Trainer is at 4"),
    ],
    ids=["missing", "bytes", "empty", "other object", "other schedule", "other step"],
)
def test_hf_callback_rejects_foreign_checkpoints(
    straight, tmp_path, content, schedule, message
):
    path = tmp_path / FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        saved = torch.load(straight.checkpoint / FILE, weights_only=True)
        saved["last_step"] -= content == "step"
        torch.save(saved if isinstance(content, str) else content, path)
    callback = PrecisionCallback(schedule, resume_from=tmp_path)
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[]
    )
    state = transformers.TrainerState(
        max_steps=STEPS, global_step=STOP
    )  # as the Trainer read it
    with pytest.raises(ValueError, match=message) as error:
        callback.on_train_begin(arguments, state, None, model=cpt.quantize_(bert()))
    assert str(path) in str(error.value)
    assert "resume_from" in str(error.value)


def test_hf_callback_restores_ranges_of_best_model(tmp_path):
    changes = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
    }
    settings = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    trainer = trainer_of(
        tmp_path, PrecisionCallback(schedule_of()), **changes | settings
    )  # the worst, in fact
    trainer.train()
    assert trainer.state.best_global_step < STEPS
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


# --- what is wrong, what is logged ----------------------------------------------------------------


def test_hf_callback_rejects_mismatched_settings(tmp_path):
    eval_bits = (
        r"eval_bits: expected 'q_max', 'current', 'float' or an integer .* got 'max'"
    )
    refused(eval_bits, PrecisionCallback, schedule_of(), eval_bits="max")
    refused(
        "record_every must be .* at least 1, got 'often'",
        PrecisionCallback,
        schedule_of(),
        record_every="often",
    )
    convert = r"call quantize_\(model\) before the Trainer is made"
    refused(convert, trainer_of, tmp_path, PrecisionCallback(schedule_of()), bert())
    trainer = trainer_of(tmp_path, PrecisionCallback(schedule_of(total_steps=24)))
    seen = probe(trainer.model)
    refused(
        "total_steps = 24, but the Trainer will take 12 optimizer steps", trainer.train
    )
    assert seen == []


def test_hf_callback_logs_bits_and_cost(straight):
    schedule, history = schedule_of(), straight.history
    steps = [e for e in history if "loss" in e]
    assert [e["bits"] for e in steps] == schedule.bits().tolist()
    assert steps[0]["relative_cost"] == (3 * 3 + 2 * 3 * 8) / (
        3 * 8 * 8
    )  # one forward, two backward products
    assert steps[-1]["relative_cost"] == schedule.relative_cost()
    assert all("eval_bits" not in e for e in history if "eval_loss" not in e)
    evaluations = [
        (e["step"], e.get("bits"), e["eval_bits"]) for e in history if "eval_loss" in e
    ]
    assert evaluations == [(0, None, 8), (6, schedule(5), 8), (12, 8, 8)]
    assert "train_loss" in history[-1]
    assert history[-1]["relative_cost"] == schedule.relative_cost()
    assert straight.printed.getvalue().count("'relative_cost'") == len(history) - 1


def test_hf_callback_logs_rounding_statistics(straight, tmp_path):
    callback = PrecisionCallback(schedule_of(), record_every=4)
    trainer = trainer_of(tmp_path, callback, **EVALUATED)
    trainer.train()
    steps = [e for e in trainer.state.log_history if "loss" in e]
    assert losses_in(steps) == losses_in(straight.history)
    assert [e["step"] for e in steps if "input/snr_db" in e] == [
        1,
        5,
        9,
    ]  # steps 0, 4 and 8 have ended
    assert max(map(len, steps)) < 40  # every layer has as many again
    recording = callback.precision.recording
    assert recording.steps == [0, 4, 8]
    of_layers = [
        value
        for name, value in recording.scalars(4).items()
        if name.endswith("/input/snr_db")
    ]
    assert len(of_layers) > 5
    assert steps[4]["input/snr_db"] == np.median(of_layers)
    assert not recording.open
    assert not any(p.observer for p in precisions_of(trainer.model))


# --- the switch -----------------------------------------------------------------------------------


def test_hf_callback_restarts_for_second_training(tmp_path):
    """Start anew in a second training, and detach from the model on `remove`."""
    schedule = schedule_of(total_steps=STEPS // 2, n_cycles=1)
    callback = PrecisionCallback(schedule, eval_bits=5)
    trainer = trainer_of(tmp_path, callback, num_train_epochs=1)
    keys = set(trainer.model.state_dict())
    assert keys == set(bert().state_dict())
    trainer.train()
    trainer.evaluate()
    seen = probe(trainer.model)
    trainer.train()
    assert [b for _, b, _ in seen] == per_batch(schedule)
    model = copy.deepcopy(trainer.model).eval()  # which nobody drives
    assert not any(p.active_bits.is_set for p in precisions_of(model))
    callback.remove()
    trainer.model.eval()
    assert {p.bits for p in precisions_of(trainer.model)} == {8}


def test_hf_callback_accepts_model_of_previous_trainer(tmp_path):
    model = cpt.quantize_(bert())
    first, second = (
        PrecisionCallback(schedule_of(), eval_bits=5),
        PrecisionCallback(schedule_of(), eval_bits=6),
    )
    trainer_of(tmp_path, first, model)
    trainer = trainer_of(tmp_path, second, model)
    assert trainer.evaluate()["eval_bits"] == 6
    first.remove()
    assert {p.bits for p in precisions_of(model)} == {6}


def test_hf_callback_releases_replaced_model(tmp_path):
    made = []

    def model_init():
        made.append(cpt.quantize_(bert()))
        return made[-1]

    callback = PrecisionCallback(schedule_of(), eval_bits=5)
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=STEPS, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(
        args=settings, model_init=model_init, train_dataset=TRAIN, callbacks=[callback]
    )
    callback.on_train_begin(
        settings,
        transformers.TrainerState(max_steps=STEPS),
        None,
        model=trainer.call_model_init(),
    )
    first, second = made
    second.train()
    first.eval()
    assert {p.bits for p in precisions_of(second)} == {3}
    second.eval()
    assert {p.bits for p in precisions_of(second)} == {5}


class Pooled(torch.nn.Module):
    """Classifier with a layer that never runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bert, self.pooler = bert(), torch.nn.Linear(4, 4)

    def forward(self, input_ids, attention_mask, labels):
        return self.bert(
            input_ids=input_ids, attention_mask=attention_mask, labels=labels
        )


def test_hf_callback_saves_unused_layers(tmp_path):
    saving = {
        "save_strategy": "epoch",
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
    }
    trainer = trainer_of(
        tmp_path, PrecisionCallback(schedule_of()), cpt.quantize_(Pooled()), **saving
    )
    trainer.train()
    again = trainer_of(
        tmp_path, PrecisionCallback(schedule_of()), cpt.quantize_(Pooled()), **saving
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.state.global_step == STEPS


def test_hf_callback_skips_hyperparameter_search(tmp_path):
    callback = PrecisionCallback(schedule_of())
    trainer = trainer_of(
        tmp_path,
        callback,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
    )

    class Searching(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            state.is_hyper_param_search = True

    trainer.add_callback(Searching())
    trainer.train()
    assert not list(tmp_path.rglob(FILE))
