"""Cyclic precision in the Trainer of Lightning.

::

    module = MyLightningModule()
    cpt.quantize_(module)
    schedule = cpt.make_schedule("CR", q_min=4, q_max=8, total_steps=1000)
    trainer = lightning.pytorch.Trainer(max_steps=1000, callbacks=[PrecisionCallback(schedule)])
    trainer.fit(module, train, val)  # training at the bits of the schedule, validation at q_max
    trainer.test(module, test)  # at q_max
"""

from __future__ import annotations

from typing import Any

from cpt_core.quantization.scheduler import Schedules, check_eval_bits
from cpt_core.validation import check_int
from cpt_extras.integrations.trainer_precision import TrainerPrecision
from cpt_extras.optional_libraries import explain_missing_extra

with explain_missing_extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer


class PrecisionCallback(Callback):
    """Set the bits of a converted module at every optimizer step of a ``Trainer``, and others while it evaluates.

    Args:
        schedule: one schedule, or a mapping from patterns of layer names to schedules (``PrecisionScheduler``). Its
            ``total_steps`` are the optimizer steps of the run, ``trainer.estimated_stepping_batches``: accumulated
            batches are one step. In manual optimization steps of all optimizers count, as in ``trainer.global_step``;
            how many there will be is known to nobody, and not checked.
        q_grad: gradient bits; None takes each schedule's ``q_max``.
        eval_bits: precision of validation, test and prediction: "q_max", "current" (of the schedule), "float" (no
            quantisation) or 1 to 32. It may be assigned later: ``callback.eval_bits = 4``.
        record_every: record what quantisation did, one optimizer step of so many (``cpt.diagnostics.record``); None
            for never. Loggers get of every role the median over layers, ``callback.precision.recording`` every layer.

    Raises:
        ValueError: for other ``eval_bits``; at the start of training, when the module is not converted, the steps
            differ or a resumed run finds no state of its own in the checkpoint.

    Lightning's checkpoints carry the state (running ranges, rounding noise, step). They do not carry torch's random
    numbers: a resumed run is the uninterrupted one up to dropout and shuffling, which are Lightning's to restore.
    Loggers get ``bits`` and ``relative_cost`` (so far, to static ``q_max``) after every optimizer step, and
    ``eval_bits`` with every validation and test.
    """

    def __init__(
        self,
        schedule: Schedules,
        q_grad: int | None = None,
        eval_bits: int | str = "q_max",
        record_every: int | None = None,
    ) -> None:
        self.schedule, self.q_grad = schedule, q_grad
        self.eval_bits = check_eval_bits(eval_bits)
        self.record_every = (
            None if record_every is None else check_int("record_every", record_every, 1)
        )
        self.precision: TrainerPrecision | None = None
        self._saved: dict[str, Any] | None = (
            None  # Lightning loads states before there is a scheduler
        )
        self._hooks: list[Any] = []  # on optimizers, in manual optimization

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's checkpoint."""
        return {} if self.precision is None else self.precision.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the module is there."""
        self._saved = state_dict

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget a state that a run before this one left unused."""
        self._saved = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the scheduler, before the first validation."""
        steps = (
            trainer.estimated_stepping_batches
            if pl_module.automatic_optimization
            else None
        )
        self.precision = TrainerPrecision(pl_module, self.schedule, self.q_grad, steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start at step 0, or where the checkpoint was written."""
        if trainer.global_step and self._saved is None:
            raise ValueError(
                f"training starts at step {trainer.global_step}, but its checkpoint has no state of {self.state_key}; "
                "give one that was written with this callback, or start again without ckpt_path"
            )
        precision = self._follow(trainer, pl_module)
        precision.start_recording(self.record_every, trainer.global_step)
        if not pl_module.automatic_optimization:  # a batch may have several steps
            step = lambda *_: precision.step()  # noqa: E731
            self._hooks = [
                optimizer.register_step_post_hook(step)
                for optimizer in trainer.optimizers
            ]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Set the bits of the next optimizer step after one was taken, and log the bits of the last one."""
        precision = self._follow(
            trainer, pl_module
        )  # nothing moves while gradients accumulate
        pl_module.log_dict(precision.logs(trainer.global_step))
        if scalars := precision.recorded():
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=precision.recording.steps[-1])  # type: ignore[union-attr]

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Take recording off the module, and hooks off optimizers, also after an error."""
        while self._hooks:
            self._hooks.pop().remove()
        if self.precision is not None:
            self.precision.stop_recording()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop recording and remove hooks after an error."""
        self.teardown(trainer, pl_module, "fit")

    def _follow(self, trainer: Trainer, pl_module: LightningModule) -> TrainerPrecision:
        precision = self._restored(pl_module)
        while precision.last_step < trainer.global_step:
            precision.step()
        return precision

    def _restored(self, pl_module: LightningModule) -> TrainerPrecision:
        """Return the scheduler of this module, with the state of the checkpoint if one has been read."""
        if (
            self.precision is None or self.precision.model is not pl_module
        ):  # evaluated without having been trained
            self.precision = TrainerPrecision(pl_module, self.schedule, self.q_grad)
        if self._saved is not None:
            self.precision.load_state_dict(self._saved)
            self._saved = None
        return self.precision

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the bits of evaluation, and log them."""
        self.on_predict_start(trainer, pl_module)
        pl_module.log_dict(self._restored(pl_module).eval_logs(), sync_dist=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the bits of training: Lightning calls no ``train()`` of the layers."""
        self._restored(pl_module).eval_bits = "current"

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the bits of evaluation; Lightning does not log here."""
        self._restored(pl_module).eval_bits = self.eval_bits

    on_test_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
