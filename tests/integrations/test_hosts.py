"""Training loops of other libraries: each trains as the plain loop does, bit for bit, and resumes so."""

import contextlib
import copy
import functools
import io
import math
import shutil
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import WITH_CUDA, identical, make, quietly, refused, state_of
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import cpt_core as cpt
from cpt_core.quantization.convert import all_precisions, layer_precisions
from cpt_extras.formats.ladder import LADDERS, MatmulLadders
from cpt_extras.integrations.trainer_precision import (
    LOGGED_STATISTICS,
    TrainerPrecision,
)

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from cpt_extras.integrations import hf, lightning  # noqa: E402
from cpt_extras.search.custom_schedules import TableSchedule  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

STEPS, ACCUMULATED, EPOCHS = 12, 2, 3  # optimizer steps, each of two batches of 2 rows
STOP = (
    4  # optimizer steps before the checkpoint: inside a cycle, at the end of an epoch
)
Q_GRAD = 6


def schedule_of(name="CR", **changes):
    return make(name, **{"total_steps": STEPS, "n_cycles": 2} | changes)


class Mixing(nn.Module):
    """A layer that multiplies without weights, as attention does."""

    def forward(self, x):
        x = x.unflatten(1, (4, 4))
        return (x @ x.transpose(1, 2)).flatten(1)


class ForwardPass(NamedTuple):
    """Mode, loss, and the bits and gradient bits of all layers in one forward pass."""

    training: bool
    loss: float
    bits: set
    q_grad: set


class Net(nn.Module):
    """Three layers that run, one that does not, and a record of all forward passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mixing, self.last = (
            nn.Linear(6, 16),
            Mixing(),
            nn.Linear(16, 2),
        )
        self.unused = nn.Linear(4, 4)
        self.passes = []

    def forward(self, x, labels):
        logits = self.last(self.mixing(self.first(x).relu()))
        loss = nn.functional.cross_entropy(logits, labels)
        layers = [self.first.precision, self.mixing.precision, self.last.precision]
        self.passes.append(
            ForwardPass(
                self.training,
                loss.item(),
                {layer.bits for layer in layers},
                {layer.q_grad for layer in layers},
            )
        )
        return {"loss": loss, "logits": logits}

    def bits(self, training):
        return [p.bits for p in self.passes if p.training == training]


def rows_of(n, seed):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": int(row[0] > 0)} for row in x]


def loader_of(rows):
    return torch.utils.data.DataLoader(rows, batch_size=2)


TRAIN, TEST = rows_of(16, 0), rows_of(2, 1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def per_batch(bits):
    return [{int(b)} for b in bits for _ in range(ACCUMULATED)]


# --- loops of one's own ---------------------------------------------------------------------------


class OwnLoop:
    """A training loop written in torch; ``wrap`` makes what is called from the model."""

    follows, needs_group = False, False

    def __init__(self, folder):
        self.net = cpt.quantize_(Net())
        self.model = self.wrap(self.net)
        self.optimizer = self.given_optimizer = sgd(self.model)
        if self.follows:
            self.given_optimizer = self.wrap_optimizer(self.optimizer)
        self.scheduler = cpt.PrecisionScheduler(
            self.model,
            schedule_of(),
            Q_GRAD,
            optimizer=self.given_optimizer if self.follows else None,
        )
        self.checkpoint = folder / "checkpoint.pt"

    def wrap(self, net):
        return net

    def parts(self):
        parts = {"model": self.model, "optimizer": self.optimizer}
        return parts if self.follows else parts | {"precision": self.scheduler}

    def resume(self):
        state = torch.load(self.checkpoint, weights_only=False)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.train()

    def train(self):
        batches = list(loader_of(TRAIN)) * EPOCHS
        for step in range(self.scheduler.last_step, STEPS):
            self.optimizer.zero_grad()
            for batch in batches[ACCUMULATED * step : ACCUMULATED * (step + 1)]:
                (self.model(**batch)["loss"] / ACCUMULATED).backward()
            self.optimizer.step()
            if not self.follows:
                self.scheduler.step()
            if step + 1 == STOP:
                states = {name: p.state_dict() for name, p in self.parts().items()}
                torch.save(states, self.checkpoint)


class Following(OwnLoop):
    follows = True

    def wrap_optimizer(self, optimizer):
        return optimizer


class Accelerate(Following):
    def wrap_optimizer(self, optimizer):
        return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


class DataParallel(OwnLoop):
    needs_group = True

    def wrap(self, net):
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)


class Sharded(OwnLoop):
    needs_group = True

    def wrap(self, net):
        mesh = distributed.init_device_mesh("cpu", (1,))
        for layer in (net.first, net.last, net):
            fully_shard(layer, mesh=mesh)
        return net


# --- trainers -------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, index):
        self.log("eval_loss", self.net(**batch)["loss"])

    test_step = validation_step
    predict_step = training_step

    def configure_optimizers(self):
        return sgd(self)


class Log(DummyLogger):
    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append(metrics)


class Lightning:
    """A Trainer of Lightning with its callback."""

    @classmethod
    def at_checkpoint(cls, folder, checkpoint):
        """Return a host that can resume from a checkpoint in another folder."""
        return cls(folder)

    def __init__(
        self,
        folder,
        net=None,
        schedule=None,
        device="cpu",
        epochs=EPOCHS,
        trainer=None,
        module=Module,
        **options,
    ):
        self.net = cpt.quantize_(Net()) if net is None else net
        self.module = module(self.net)
        schedule = schedule or schedule_of()
        self.callback = lightning.PrecisionCallback(schedule, Q_GRAD, **options)
        self.folder, self.checkpoint = folder, folder / f"step={STOP}.ckpt"
        self.log = Log()
        settings = {
            "accelerator": device,
            "max_epochs": epochs,
            "accumulate_grad_batches": ACCUMULATED,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [self.callback],
            "default_root_dir": folder,
            "logger": self.log,
            "enable_checkpointing": False,
        }
        self.settings = settings | (trainer or {})

    def trainer(self, **changes):
        return pl.Trainer(**self.settings | changes)

    def train(self, resume_from=None, save=False):
        keeper = ModelCheckpoint(
            self.folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1
        )
        saving = {
            "callbacks": [*self.settings["callbacks"], keeper],
            "enable_checkpointing": True,
        }
        trainer = self.trainer(**saving if save else {})
        trainer.fit(
            self.module, loader_of(TRAIN), loader_of(TEST), ckpt_path=resume_from
        )
        return trainer

    def evaluate(self, checkpoint=None):
        (metrics,) = self.trainer().test(
            self.module, loader_of(TEST), ckpt_path=checkpoint, verbose=False
        )
        return metrics

    def predict(self):
        self.trainer().predict(self.module, loader_of(TEST))

    def entries(self):
        return self.log.entries

    def step_logs(self):
        return [e for e in self.entries() if "bits" in e]


class InOrder(transformers.Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Transformers:
    """A Trainer of transformers with its callback."""

    @classmethod
    def at_checkpoint(cls, folder, checkpoint):
        """Return a host that can resume from a checkpoint in another folder."""
        return cls(folder, resume_from=checkpoint)

    def __init__(
        self,
        folder,
        net=None,
        schedule=None,
        device="cpu",
        epochs=EPOCHS,
        trainer=None,
        callbacks=(),
        **options,
    ):
        self.net = cpt.quantize_(Net()) if net is None else net
        schedule = schedule or schedule_of()
        self.callback = hf.PrecisionCallback(schedule, Q_GRAD, **options)
        self.checkpoint = folder / f"checkpoint-{STOP}"
        self.printed = io.StringIO()
        settings = {
            "output_dir": str(folder),
            "num_train_epochs": epochs,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": ACCUMULATED,
            "max_grad_norm": 0,
            "use_cpu": device == "cpu",
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "eval_on_start": True,
            "save_strategy": "no",
            "save_steps": STOP,
            "dataloader_pin_memory": False,
        }
        optimizer = sgd(self.net)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self.trainer = InOrder(
            self.net.to(device),
            transformers.TrainingArguments(**settings | (trainer or {})),
            train_dataset=TRAIN,
            eval_dataset=TEST,
            callbacks=[self.callback, *callbacks],
            optimizers=(optimizer, constant),
        )

    def train(self, resume_from=None, save=False):
        self.trainer.args.save_strategy = "steps" if save else "no"
        with contextlib.redirect_stdout(self.printed):
            self.trainer.train(resume_from_checkpoint=resume_from and str(resume_from))

    def evaluate(self):
        return self.trainer.evaluate()

    def predict(self):
        self.trainer.predict(TEST)

    def entries(self):
        return self.trainer.state.log_history

    def step_logs(self):
        return [e for e in self.entries() if "loss" in e]


# --- every host as the plain loop -----------------------------------------------------------------

LOOPS = [Following, Accelerate, DataParallel, Sharded]
TRAINERS = [Lightning, Transformers]
RECORD_EVERY = 5


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Return the network of the plain loop."""
    loop = OwnLoop(tmp_path_factory.mktemp("plain"))
    loop.train()
    return loop.net


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a function that trains by a Trainer, once each, with checkpoints, evaluations and recording."""

    @functools.cache
    def train(trainer):
        host = trainer(tmp_path_factory.mktemp("trained"), record_every=RECORD_EVERY)
        host.train(save=True)
        return host

    return train


def is_same_run(net, plain, start=0):
    """Return whether a network has the bits, losses, weights and ranges of the plain loop from a step on."""
    passes, expected = ([p for p in n.passes if p.training] for n in (net, plain))
    return passes == expected[ACCUMULATED * start :] and identical(
        map(whole, state_of(net)), state_of(plain)
    )


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_trains_and_resumes_as_plain_loop(loop, plain, tmp_path, request):
    if loop.needs_group:
        request.getfixturevalue("group")
    host, resumed = loop(tmp_path), loop(tmp_path)
    host.train()
    resumed.resume()
    assert plain.bits(training=True) == per_batch(schedule_of().bits())
    assert is_same_run(host.net, plain)
    assert is_same_run(resumed.net, plain, STOP)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_trains_as_plain_loop(trainer, plain, trained):
    """Train as the plain loop, also with evaluations and recording in between."""
    host = trained(trainer)
    assert is_same_run(host.net, plain)
    assert host.net.bits(training=False) == [{8}] * (1 + EPOCHS)
    assert set(host.net.state_dict()) == set(Net().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_resumes_as_plain_loop(trainer, plain, trained, tmp_path):
    host = trainer.at_checkpoint(tmp_path, trained(trainer).checkpoint)
    host.train(trained(trainer).checkpoint)
    assert is_same_run(host.net, plain, STOP)
    assert not list(trained(trainer).checkpoint.parent.rglob("*.tmp"))


@pytest.mark.parametrize(
    "trainer", [pytest.param(trainer, marks=WITH_CUDA) for trainer in TRAINERS]
)
def test_trainer_sets_bits_on_gpu(trainer, tmp_path):
    host = trainer(tmp_path, device="cuda")
    host.train()
    assert host.net.bits(training=True) == per_batch(schedule_of().bits())


# --- both trainers --------------------------------------------------------------------------------


class Peek(transformers.TrainerCallback):
    """Callback that runs the model at 2 bits after every step."""

    def on_step_end(self, args, state, control, model, **kwargs):
        with cpt.precision(model.eval(), 2), torch.no_grad():
            model(**next(iter(loader_of(TEST))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "options", "times"),
    [
        # before, the sanity check, twice an epoch, after, the prediction
        (Lightning, {"trainer": {"val_check_interval": 3}}, 1 + 1 + 2 * EPOCHS + 2),
        (Transformers, {"callbacks": [Peek()]}, 1 + 1 + EPOCHS + 2),
    ],
)
def test_trainer_evaluates_at_eval_bits(trainer, options, times, tmp_path):
    """Evaluate at ``eval_bits`` in any order, also after a precision context has ended."""
    host = trainer(tmp_path, eval_bits=5, **options)
    host.evaluate()
    host.train()
    host.evaluate()
    host.predict()
    host.callback.eval_bits = "float"
    assert host.evaluate()["eval_bits"] == 32
    assert host.net.bits(training=True) == per_batch(schedule_of().bits())
    evaluations = host.net.bits(training=False)
    assert [b for b in evaluations if b != {2}] == [{5}] * times + [{None}]
    assert evaluations.count({2}) == (STEPS if "callbacks" in options else 0)
    host.net.train()
    assert host.net.first.precision.bits == 8


def logged(host, name):
    return [entry[name] for entry in host.entries() if name in entry]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_logs_bits_and_cost(trainer, trained):
    schedule, logs = schedule_of(), trained(trainer).step_logs()
    assert [e["bits"] for e in logs] == schedule.bits().tolist()
    costs = [e["relative_cost"] for e in logs]
    assert costs[0] == pytest.approx((3 * 3 + 2 * 3 * Q_GRAD) / (3 * 8 * 8))
    assert costs[-1] == pytest.approx(schedule.relative_cost(Q_GRAD))
    assert not any("eval_bits" in e for e in logs)
    evaluations = logged(trained(trainer), "eval_bits")
    assert evaluations[-EPOCHS:] == [8] * EPOCHS


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_logs_rounding_statistics(trainer, trained):
    """Log the median over layers of every role once per recorded step."""
    host = trained(trainer)
    recording = host.callback.precision.recording
    assert recording.steps == [0, 5, 10]
    for name in ("grad/gradient_to_noise", "input/snr_db"):
        medians = []
        for step in recording.steps:
            scalars = recording.scalars(step).items()
            medians.append(np.median([v for k, v in scalars if k.endswith(f"/{name}")]))
        assert logged(host, name) == medians
        assert len(set(medians)) == 3
    names = {name for entry in host.entries() for name in entry if "/" in name}
    assert {name.split("/")[1] for name in names} == set(LOGGED_STATISTICS)
    assert not recording.open
    assert not any(p.observer for p in all_precisions(host.net).values())


EVAL_BITS = (
    r"eval_bits: expected 'q_max', 'current', 'float' or an integer .* got 'max'"
)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_bits": "max"}, EVAL_BITS),
        ({"record_every": "often"}, "record_every must be .* at least 1, got 'often'"),
        ({"convert": False}, r"call quantize_\(model\) before the Trainer is made"),
        (
            {"schedule": schedule_of(total_steps=24)},
            "total_steps = 24, but the Trainer will take 12 optimizer steps",
        ),
    ],
)
def test_trainer_rejects_mismatched_settings(trainer, options, message, tmp_path):
    options = dict(options)
    net = Net() if options.pop("convert", True) is False else cpt.quantize_(Net())
    refused(message, lambda: trainer(tmp_path, net, **options).train())
    assert not any(net.bits(training=True))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_restarts_for_second_training(trainer, tmp_path):
    schedule = schedule_of(total_steps=4, n_cycles=1, q_min=6)
    host = trainer(tmp_path, schedule=schedule, epochs=1, eval_bits=5)
    for _ in range(2):
        host.train()
        host.evaluate()
    assert host.net.bits(training=True) == 2 * per_batch(schedule.bits())


# --- Lightning ------------------------------------------------------------------------------------


def test_lightning_callback_stops_recording_on_error(tmp_path):
    class Failing(Callback):
        def on_train_batch_end(self, *args):
            raise KeyError

    host = Lightning(tmp_path, record_every=1)
    host.settings["callbacks"].append(Failing())
    with pytest.raises(KeyError):
        host.train()
    assert not host.callback.precision.recording.open


def test_lightning_callback_evaluates_with_stored_ranges(trained, tmp_path):
    host, source = Lightning(tmp_path), trained(Lightning)
    assert not identical(state_of(host.net), state_of(source.net))
    host.evaluate(source.folder / f"step={STEPS}.ckpt")
    assert identical(state_of(host.net), state_of(source.net))
    assert host.net.passes[-1].bits == {8}


def test_lightning_callback_rejects_foreign_checkpoints(trained, tmp_path):
    checkpoint, without = trained(Lightning).checkpoint, tmp_path / "without.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    del content["callbacks"]["PrecisionCallback"]
    torch.save(content, without)
    for name, path, message in (
        ("ER", checkpoint, "the checkpoint has schedules"),
        ("CR", without, "starts at step 4, but its checkpoint has no state of Precis"),
    ):
        host = Lightning(tmp_path, schedule=schedule_of(name))
        refused(message, host.train, path)
        assert host.net.passes == []


def test_lightning_callback_discards_unused_state(trained, tmp_path):
    host = Lightning(tmp_path, epochs=EPOCHS + 1)
    refused("the two must be equal", host.train, trained(Lightning).checkpoint)
    host.settings["max_epochs"] = EPOCHS
    host.train()
    assert host.net.bits(training=True) == per_batch(schedule_of().bits())


class TwoOptimizers(Module):
    """Manual optimisation with two steps per batch, as in a GAN."""

    automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(**batch)["loss"])
            optimizer.step()

    def configure_optimizers(self):
        return [sgd(self.net.first), sgd(self.net.last)]


def test_lightning_callback_steps_with_manual_optimization(tmp_path):
    schedule = TableSchedule(((3, 1), (8, 1)) * 8)
    host = Lightning(tmp_path, schedule=schedule, epochs=1, module=TwoOptimizers)
    host.settings["accumulate_grad_batches"] = 1
    trainer = host.train()
    assert host.net.bits(training=True) == [{3}, {8}] * 8
    assert host.callback.precision.last_step == trainer.global_step == 16
    assert not any(o._optimizer_step_post_hooks for o in trainer.optimizers)


# --- transformers ---------------------------------------------------------------------------------


def test_hf_callback_adds_to_every_log_entry(trained):
    host, schedule = trained(Transformers), schedule_of()
    history = host.entries()
    evaluations = [(e["step"], e.get("bits")) for e in history if "eval_bits" in e]
    assert evaluations == [(0, None), *((t, schedule(t - 1)) for t in (4, 8, 12))]
    assert "train_loss" in history[-1]
    assert history[-1]["relative_cost"] == schedule.relative_cost(Q_GRAD)
    assert host.printed.getvalue().count("'relative_cost'") == len(history) - 1


def begin_training(callback, folder, step=0, net=None):
    """Call a callback as a Trainer does that begins at a step."""
    arguments = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[])
    state = transformers.TrainerState(max_steps=STEPS, global_step=step)
    callback.on_train_begin(arguments, state, None, model=net or cpt.quantize_(Net()))


def test_hf_callback_finds_checkpoint_in_output_folder(trained, tmp_path):
    shutil.copytree(trained(Transformers).checkpoint, tmp_path / f"checkpoint-{STOP}")
    callback = hf.PrecisionCallback(schedule_of(), Q_GRAD)
    begin_training(callback, tmp_path, STOP)
    assert callback.precision.last_step == STOP


@pytest.mark.parametrize(
    ("content", "schedule", "message"),
    [
        (None, "CR", "No such file"),
        (b"nonsense", "CR", "cannot continue from"),
        (b"", "CR", "cannot continue from"),
        ([1, 2], "CR", "it holds no state of a precision"),
        ("same", "ER", "the checkpoint has schedules"),
        ("step", "CR", "it is of step 3, the Trainer is at 4"),
    ],
)
def test_hf_callback_rejects_foreign_checkpoints(
    trained, tmp_path, content, schedule, message
):
    path = tmp_path / hf.FILE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        saved = torch.load(trained(Transformers).checkpoint / hf.FILE)
        saved["last_step"] -= content == "step"
        torch.save(saved if isinstance(content, str) else content, path)
    callback = hf.PrecisionCallback(schedule_of(schedule), Q_GRAD, resume_from=tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        begin_training(callback, tmp_path, STOP)
    assert str(path) in str(error.value)
    assert "resume_from" in str(error.value)


@pytest.mark.slow
def test_hf_callback_restores_ranges_of_best_model(tmp_path):
    settings = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": STOP,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the worst, in fact
    }
    host = Transformers(tmp_path, trainer=settings)
    host.train(save=True)
    assert host.trainer.state.best_global_step < STEPS
    assert host.evaluate()["eval_loss"] == host.trainer.state.best_metric


def test_hf_callback_releases_previous_models(tmp_path):
    """Leave a model to a later callback, to its own training bits after ``remove``, and if another one is trained."""
    first = Transformers(tmp_path, eval_bits=5)
    net = first.net.eval()
    layers = layer_precisions(net).values()
    second = Transformers(tmp_path, net, eval_bits=6)
    assert second.evaluate()["eval_bits"] == 6
    first.callback.remove()
    assert {p.bits for p in layers} == {6}
    twin = copy.deepcopy(net).eval()
    assert not any(p.active_bits.is_set for p in layer_precisions(twin).values())
    begin_training(second.callback, tmp_path, net=(other := cpt.quantize_(Net())))
    assert {p.bits for p in layers} == {3}
    others = layer_precisions(other.eval()).values()
    assert {p.bits for p in others} == {6}
    second.callback.remove()
    assert {p.bits for p in others} == {3}


def test_hf_callback_skips_hyperparameter_search(tmp_path):
    best = {"save_strategy": "epoch", "load_best_model_at_end": True}
    host = Transformers(tmp_path, trainer=best)
    host.trainer.state.is_hyper_param_search = True
    host.trainer.state.best_model_checkpoint = str(tmp_path)
    host.callback.on_save(host.trainer.args, host.trainer.state, None)
    host.callback.on_train_end(host.trainer.args, host.trainer.state, None)
    assert not list(tmp_path.rglob(hf.FILE))


# --- the scheduler of both callbacks --------------------------------------------------------------


def linear_layers(*sizes, **config):
    layers = [nn.Linear(4, size) for size in sizes]
    return cpt.quantize_(nn.Sequential(*layers), cpt.QuantConfig(**config))


@pytest.mark.parametrize(
    ("name", "q_min", "q_max"), [("affine", 3, 8), ("minifloat", 4, 8), ("mx", 1, 4)]
)
def test_trainer_precision_logs_cost_of_ladder(name, q_min, q_max):
    ladder, steps = LADDERS[name], {"total_steps": 40, "n_cycles": 2}
    schedule = quietly(cpt.make_schedule, "CR", q_min=q_min, q_max=q_max, **steps)
    roles = cpt.RoleSchedules(weight=schedule, activation=q_max, gradient="float32")
    for any_schedule in (schedule, roles):
        logs = TrainerPrecision(
            linear_layers(4, ladder=ladder), any_schedule, None
        ).logs(40)
        expected = any_schedule.relative_cost(ladder=ladder)
        assert logs["relative_cost"] == pytest.approx(expected, rel=1e-12)
    is_priced_as_bits = (
        schedule.relative_cost(ladder=ladder) == schedule.relative_cost()
    )
    assert is_priced_as_bits == (name != "mx")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("is_by_config", [False, True])
def test_trainer_precision_logs_cost_of_recipe(name, is_by_config):
    """Both operands of a backward matmul are priced at its level; the baseline is static q_max."""
    recipe = cpt.recipes[name]
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(7)))
    if is_by_config:
        model = nn.Sequential(nn.Conv1d(64, 64, 1), model)
        cpt.quantize_(model, cpt.QuantConfig(ladder=recipe.ladders))
    else:
        recipe.quantize_(model)
    schedule = TableSchedule(((4, 8), (8, 2)))
    roles = cpt.RoleSchedules(weight=schedule, activation=schedule, gradient=8)
    for any_schedule, q_grad in ((schedule, 4), (schedule, 8), (roles, None)):
        logs = TrainerPrecision(model, any_schedule, q_grad).logs(10)
        expected = any_schedule.relative_cost(q_grad, 8, ladder=recipe.ladders)
        assert logs["relative_cost"] == pytest.approx(expected, rel=1e-12)


def test_matmul_ladders_survive_rounding_to_nearest():
    model = linear_layers(4, ladder=cpt.recipes["nvfp4"].ladders)
    grids = model[0].precision.grids
    assert type(grids.ladders) is type(grids.to_nearest().ladders) is MatmulLadders


def test_trainer_precision_logs_each_layer_schedule():
    first, rest = schedule_of("ER", q_max=6), schedule_of()
    model = linear_layers(4, 2)
    trained = TrainerPrecision(model, {"0": first, "*": rest}, None, eval_bits="q_max")
    logs = [trained.logs(step) for step in range(1, STEPS + 1)]
    assert [e["bits/0"] for e in logs] == first.bits().tolist()
    assert [e["bits/*"] for e in logs] == rest.bits().tolist()
    assert logs[-1]["relative_cost/*"] == rest.relative_cost()
    model.eval()
    assert trained.eval_logs() == {"eval_bits/0": 6, "eval_bits/*": 8}


def test_trainer_precision_omits_infinite_values():
    """Omit values that are not finite, since the state of a trainer is JSON."""
    model = linear_layers(4)
    nn.init.zeros_(model[0].bias)
    trained = TrainerPrecision(model, cpt.StaticSchedule(4, 9), None)
    trained.start_recording(1, 0)
    model(torch.randn(8, 4)).square().sum().backward()
    trained.stop_recording()
    assert math.isinf(trained.recording.scalars()["0/bias/snr_db"])
    logged = trained.recorded()
    assert "bias/snr_db" not in logged
    assert {"weight/snr_db", "bias/level"} <= set(logged)
    assert all(map(math.isfinite, logged.values()))
