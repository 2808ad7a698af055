"""Cyclic precision in the Trainer of Hugging Face transformers.

::

    model = cpt.quantize_(AutoModelForSequenceClassification.from_pretrained(name))
    args = TrainingArguments("out", max_steps=1000, eval_strategy="steps")
    schedule = cpt.make_schedule("CR", q_min=4, q_max=8, total_steps=args.max_steps)
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, callbacks=[PrecisionCallback(schedule)])
    trainer.train()  # at the bits of the schedule
    trainer.evaluate()  # at q_max
"""

from __future__ import annotations

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from cpt_core.quantization.convert import all_precisions
from cpt_core.quantization.scheduler import EvalBits, Schedules, check_eval_bits
from cpt_core.validation import check_int
from cpt_extras.files import write_atomically
from cpt_extras.integrations.trainer_precision import TrainerPrecision
from cpt_extras.optional_libraries import explain_missing_extra

with explain_missing_extra("text"):
    from transformers import TrainerCallback
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Arguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

FILE = "precision.pt"  # beside the files that the Trainer writes into a checkpoint
UNREADABLE = (
    EOFError,
    RuntimeError,
    UnpicklingError,
)  # what torch.load raises for a file of another kind


class PrecisionCallback(TrainerCallback):
    """Set the bits of a converted model at every optimizer step of a ``Trainer``, and others while it evaluates.

    Args:
        schedule: one schedule, or a mapping from patterns of layer names to schedules (``PrecisionScheduler``). Its
            ``total_steps`` are the optimizer steps of the run, ``state.max_steps``: accumulated batches are one step.
        q_grad: gradient bits; None takes each schedule's ``q_max``.
        eval_bits: precision of ``evaluate()`` and ``predict()``, during and after training: "q_max", "current" (of the
            schedule), "float" (no quantisation) or 1 to 32. It may be assigned later: ``callback.eval_bits = 4``.
        resume_from: the checkpoint folder that a resumed run continues from, where that is not
            ``<output_dir>/checkpoint-<step>``.
        record_every: record what quantisation did, one optimizer step of so many (``cpt.diagnostics.record``); None
            for never. The log gets the last recorded step, of every role the median over layers, such as
            "grad/snr_db"; ``callback.precision.recording`` has every layer.

    Raises:
        ValueError: for other ``eval_bits``; when the Trainer is made with a model that is not converted; at the start
            of training, when the steps differ or a resumed run finds no state of its own in the checkpoint.

    The switch between the two precisions is the model's own ``train()`` and ``eval()``, which the Trainer calls before
    every batch and every evaluation. ``remove()`` ends that. A checkpoint of the Trainer gains ``precision.pt``
    (running ranges, rounding noise, step), so that a resumed run is the uninterrupted one; those of a hyperparameter
    search do not. Entries of the log gain ``bits`` and ``relative_cost`` (so far, to static ``q_max``), evaluations
    also ``eval_bits``. Reporters named by ``report_to`` are called before this callback and miss them: give a
    reporter in ``callbacks`` after this one instead.
    """

    precision: Any = None  # a TrainerPrecision, once there is a model

    def __init__(
        self,
        schedule: Schedules,
        q_grad: int | None = None,
        eval_bits: int | str = "q_max",
        resume_from: str | os.PathLike[str] | None = None,
        record_every: int | None = None,
    ) -> None:
        self.schedule, self.q_grad = schedule, q_grad
        self.eval_bits = eval_bits
        self.resume_from = resume_from
        self.record_every = (
            None if record_every is None else check_int("record_every", record_every, 1)
        )

    @property
    def eval_bits(self) -> EvalBits:
        """Precision of evaluations; may be assigned."""
        return self._eval_bits

    @eval_bits.setter
    def eval_bits(self, value: EvalBits) -> None:
        self._eval_bits = check_eval_bits(value)
        if self.precision is not None:
            self.precision.eval_bits = value

    def remove(self) -> None:
        """Leave the model at the bits of training, also in evaluation, and take recording off."""
        if self.precision is not None:
            self.precision.stop_recording()
            self.precision.evaluate_as_it_trains()

    def _attach(self, model: nn.Module, total_steps: int | None = None) -> None:
        self.remove()
        self.precision = TrainerPrecision(
            model, self.schedule, self.q_grad, total_steps, self.eval_bits
        )

    def on_init_end(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Take hold of the model, which may be evaluated before it is trained."""
        self._attach(kwargs["model"])

    def on_train_begin(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Start at step 0, or where the checkpoint was written."""
        self._attach(kwargs["model"], state.max_steps)
        if state.global_step:
            path = Path(self.resume_from or _folder(args, state)) / FILE
            try:
                self.precision.load_state_dict(saved := _read(path))
                if saved["last_step"] != state.global_step:
                    raise ValueError(
                        f"it is of step {saved['last_step']}, the Trainer is at {state.global_step}"
                    )
            except (OSError, ValueError, *UNREADABLE) as error:
                raise ValueError(
                    f"cannot continue from {path}: {error}; give the checkpoint folder of this very run as "
                    "resume_from, or start again without resume_from_checkpoint"
                ) from error
        self.precision.start_recording(self.record_every, state.global_step)

    def on_step_end(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Go to the bits of the next optimizer step."""
        self.precision.step()

    def on_save(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Add our state to the checkpoint that the Trainer has just written."""
        if args.should_save and not state.is_hyper_param_search:
            path, content = _folder(args, state) / FILE, self.precision.state_dict()
            write_atomically(path, lambda temporary: torch.save(content, temporary))

    def on_train_end(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Restore the running ranges of the best checkpoint, if the Trainer has restored its weights."""
        self.precision.stop_recording()
        if (
            args.load_best_model_at_end
            and state.best_model_checkpoint
            and not state.is_hyper_param_search
        ):
            ranges = _read(Path(state.best_model_checkpoint) / FILE)["layers"]
            layers = all_precisions(self.precision.model)
            for name, layer_ranges in ranges.items():
                layers[name].set_running(layer_ranges)

    def on_log(
        self, args: Arguments, state: State, control: Control, **kwargs: Any
    ) -> None:
        """Add bits and cost to what is printed and to the history, which already holds a copy of it."""
        logs = kwargs["logs"]
        entries = self.precision.logs(state.global_step)
        if (
            not {"loss", "train_loss"} & logs.keys()
        ):  # those two are in entries of training only
            entries |= self.precision.eval_logs()
        else:
            entries |= self.precision.recorded()
        logs.update(entries)
        state.log_history[-1].update(entries)


def _folder(args: Arguments, state: State) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _read(path: Path) -> dict[str, Any]:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if not (isinstance(saved, dict) and "schedules" in saved):
        raise ValueError("it holds no state of a precision")
    return saved
