"""PrecisionCallback in a Lightning Trainer with a small network."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers import identical, make, refused, state_of
from torch import nn

import cpt_core as cpt

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from cpt_extras.integrations.lightning import PrecisionCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The '.*_dataloader' does not have many workers"
    ),  # nor do they need them
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`"
    ),  # resumed runs here keep no checkpoints
]

STEPS, ACCUMULATED, EPOCHS, LAYERS = 12, 2, 3, 2


schedule_of = partial(make, total_steps=STEPS, n_cycles=2)


class Small(pl.LightningModule):
    """Two linear layers; ``seen`` records stage, bits and gradient bits of every forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        self.seen = []

    def _loss(self, stage, batch):
        layers = [m.precision for m in self.net.modules() if hasattr(m, "precision")]
        assert len(layers) == LAYERS
        self.seen.append((stage, {p.bits for p in layers}, {p.q_grad for p in layers}))
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, index):
        return self._loss("train", batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self._loss("val", batch))

    def test_step(self, batch, index):
        self.log("test_loss", self._loss("test", batch))

    def predict_step(self, batch, index):
        return self._loss("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def bits(self, stage):
        return [bits for name, bits, _ in self.seen if name == stage]


def module_of():
    return cpt.quantize_(Small())


def loader_of(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return torch.utils.data.DataLoader(
        list(zip(x, (x[:, 0] > 0).long(), strict=True)), batch_size=2
    )


TRAIN, TEST = (
    loader_of(16, 0),
    loader_of(2, 1),
)  # three epochs of 4 optimizer steps of 2 batches of 2


class Log(DummyLogger):
    """Logger that stores all metrics."""

    def __init__(self):
        super().__init__()
        self.entries = []

    def log_metrics(self, metrics, step=None):
        self.entries.append(metrics)

    def of(self, name):
        return [entry[name] for entry in self.entries if name in entry]


def trainer_of(folder, *callbacks, **changes):
    settings = {
        "default_root_dir": folder,
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": ACCUMULATED,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **settings | changes)


def per_batch(bits):
    return [{int(b)} for b in bits for _ in range(ACCUMULATED)]


def test_lightning_callback_logs_rounding_statistics(straight, tmp_path):
    callback, log, module = (
        PrecisionCallback(schedule_of(), record_every=5),
        Log(),
        module_of(),
    )
    trainer_of(tmp_path, callback, logger=log).fit(module, TRAIN, TEST)
    recording = callback.precision.recording
    assert recording.steps == [0, 5, 10]
    names = [f"net.{layer}/grad/gradient_to_noise" for layer in (0, 2)]
    of_layers = [
        [recording.scalars(step)[name] for name in names] for step in recording.steps
    ]
    assert log.of("grad/gradient_to_noise") == [
        np.mean(two) for two in of_layers
    ]  # the median of two
    assert not recording.open
    assert torch.equal(straight[0].net[0].weight, module.net[0].weight)


def test_lightning_callback_stops_recording_on_error(tmp_path):
    class Failing(Callback):
        def on_train_batch_end(self, *args):
            raise KeyError

    callback = PrecisionCallback(schedule_of(), record_every=1)
    with pytest.raises(KeyError):
        trainer_of(tmp_path, callback, Failing()).fit(module_of(), TRAIN, TEST)
    assert not callback.precision.recording.open


def test_lightning_callback_sets_bits_per_step(tmp_path, device):
    schedule, module = schedule_of(), module_of()
    trainer = trainer_of(
        tmp_path, PrecisionCallback(schedule, q_grad=6), accelerator=device.type
    )
    trainer.fit(module, TRAIN, TEST)
    assert trainer.global_step == STEPS
    assert [entry for entry in module.seen if entry[0] == "train"] == [
        ("train", bits, {6}) for bits in per_batch(schedule.bits())
    ]


def test_lightning_callback_sets_evaluation_bits(tmp_path):
    module, callback = module_of(), PrecisionCallback(schedule_of(), eval_bits=5)
    trainer = trainer_of(
        tmp_path, callback, val_check_interval=3
    )  # in the middle of an accumulation, too
    trainer.validate(module, TEST, verbose=False)  # before any training
    trainer.fit(module, TRAIN, TEST)
    trainer.test(module, TEST, verbose=False)
    trainer.predict(module, TEST)
    callback.eval_bits = "float"
    (metrics,) = trainer.test(module, TEST, verbose=False)
    assert metrics["eval_bits"] == 32
    assert module.bits("train") == per_batch(schedule_of().bits())
    assert module.bits("val") == [{5}] * (
        1 + 1 + 2 * EPOCHS
    )  # before, the sanity check, twice an epoch
    assert (module.bits("predict"), module.bits("test")) == ([{5}], [{5}, {None}])
    assert callback.precision.get_last_bits() == [8]
    assert {m.precision.bits for m in (module.net[0], module.net[2])} == {
        8
    }  # those of training again


# --- resuming -------------------------------------------------------------------------------------

STOP = 4  # inside the first cycle, at the end of the first epoch


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Train without interruption, and return the module, a checkpoint and the log."""
    folder, module, log = tmp_path_factory.mktemp("straight"), module_of(), Log()
    keeper = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=STOP, save_top_k=-1
    )
    trainer_of(folder, PrecisionCallback(schedule_of()), keeper, logger=log).fit(
        module, TRAIN, TEST
    )
    return module, folder / f"step={STOP}.ckpt", log


def test_lightning_callback_resumes_bit_exactly(straight, tmp_path):
    whole, checkpoint, _ = straight
    module = module_of()
    trainer_of(tmp_path, PrecisionCallback(schedule_of())).fit(
        module, TRAIN, TEST, ckpt_path=checkpoint
    )
    assert module.bits("train") == per_batch(schedule_of().bits()[STOP:])
    assert identical(state_of(module), state_of(whole))


def test_lightning_callback_evaluates_with_stored_ranges(straight, tmp_path):
    whole, checkpoint, _ = straight
    found, callback, path = (
        [],
        PrecisionCallback(schedule_of()),
        checkpoint.with_name(f"step={STEPS}.ckpt"),
    )
    for module in (whole, module_of()):  # one callback for both
        found += trainer_of(tmp_path, callback).test(
            module, TEST, ckpt_path=path, verbose=False
        )
    assert found[0]["test_loss"] == found[1]["test_loss"]
    assert identical(state_of(module), state_of(whole))


def test_lightning_callback_rejects_foreign_checkpoints(straight, tmp_path):
    checkpoint, module = straight[1], module_of()
    content, without = (
        torch.load(checkpoint, weights_only=True),
        tmp_path / "without.ckpt",
    )
    del content["callbacks"]["PrecisionCallback"]
    torch.save(content, without)
    for schedule, path, message in (
        (schedule_of("ER"), checkpoint, "the checkpoint has schedules"),
        (
            schedule_of(),
            without,
            "starts at step 4, but its checkpoint has no state of PrecisionCallback",
        ),
    ):
        trainer = trainer_of(tmp_path, PrecisionCallback(schedule))
        refused(message, trainer.fit, module, TRAIN, TEST, ckpt_path=path)
    assert module.seen == []


def test_lightning_callback_discards_unused_state(straight, tmp_path):
    module, callback = module_of(), PrecisionCallback(schedule_of())
    longer = trainer_of(tmp_path, callback, max_epochs=EPOCHS + 1)
    refused(
        "the two must be equal", longer.fit, module, TRAIN, TEST, ckpt_path=straight[1]
    )
    trainer_of(tmp_path, callback).fit(module, TRAIN, TEST)
    assert module.bits("train") == per_batch(schedule_of().bits())


# --- what is wrong, what is logged ----------------------------------------------------------------


def test_lightning_callback_rejects_mismatched_settings(tmp_path):
    eval_bits = (
        r"eval_bits: expected 'q_max', 'current', 'float' or an integer .* got 'max'"
    )
    refused(eval_bits, PrecisionCallback, schedule_of(), eval_bits="max")
    for module, steps, message in (
        (Small(), STEPS, r"call quantize_\(model\) before the Trainer is made"),
        (
            module_of(),
            24,
            "total_steps = 24, but the Trainer will take 12 optimizer steps",
        ),
    ):
        trainer = trainer_of(
            tmp_path, PrecisionCallback(schedule_of(total_steps=steps))
        )
        refused(message, trainer.fit, module, TRAIN, TEST)
        assert module.seen == []


def test_lightning_callback_logs_bits_and_cost(straight):
    schedule, log = schedule_of(), straight[2]
    assert log.of("bits") == schedule.bits().tolist()
    costs = log.of("relative_cost")
    assert costs[0] == pytest.approx(
        (3 * 3 + 2 * 3 * 8) / (3 * 8 * 8)
    )  # one forward, two backward products
    assert costs[-1] == pytest.approx(schedule.relative_cost())
    assert len(costs) == STEPS
    assert log.of("eval_bits") == [8] * EPOCHS


def test_lightning_callback_restarts_for_second_training(tmp_path):
    module, callback = module_of(), PrecisionCallback(schedule_of(), eval_bits=5)
    for _ in range(2):
        trainer = trainer_of(tmp_path, callback)
        trainer.fit(module, TRAIN, TEST)
        trainer.test(module, TEST, verbose=False)
    assert module.bits("train") == 2 * per_batch(schedule_of().bits())


class Twofold(Small):
    """Manual optimisation with two steps per batch, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self._loss("train", batch))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def test_lightning_callback_steps_with_manual_optimization(tmp_path):
    schedule = cpt.FunctionSchedule(
        lambda u: 3 if round(15 * u) % 2 == 0 else 8, total_steps=16
    )
    module = cpt.quantize_(Twofold())
    callback = PrecisionCallback(schedule)
    trainer = trainer_of(tmp_path, callback, max_epochs=1, accumulate_grad_batches=1)
    trainer.fit(module, TRAIN, TEST)
    assert module.bits("train") == [{3}, {8}] * 8
    assert callback.precision.last_step == trainer.global_step == 16
    assert not any(o._optimizer_step_post_hooks for o in trainer.optimizers)
