"""Checkpoints of a training run: everything that changes, restored whole or not at all.

``save_checkpoint`` keeps the checkpoint before the newest one beside it; ``resume`` goes back to that one if the newest
is damaged. A file is the output of ``torch.save`` followed by the SHA-256 of these bytes, because torch itself does not
notice a changed byte.
"""

import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cpt_core.numerics import NUMERICS, NUMERICS_WITHOUT_VERSION
from cpt_extras.files import write_atomically
from cpt_lab.training import process_group
from cpt_lab.training.session import Session

log = logging.getLogger(__name__)


class DamagedError(ValueError):
    """Error of a checkpoint with changed bytes, or of a run that was trained on other data so far."""

    label = "damaged"  # added to the name of the file when it is set aside


class OtherNumericsError(DamagedError):
    """Error of a checkpoint with other numerics: training that continues from it would mix two of them."""

    label = "other_numerics"


def _empty_history() -> dict[str, list[Any]]:
    return {column: [] for column in ("step", "loss", "bits", "lr", "evaluations")}


@dataclass
class RunState:
    """Progress and history of a run; with the changing parts of its session, the content of a checkpoint.

    Attributes:
        step: optimizer steps that are done.
        seconds: time spent training and evaluating, over all sessions of a resumed run.
        status: "ok", or "diverged" when the training loss, a metric of an evaluation or a weight was not finite;
            training stops there.
        error: after how many updates, and in what, a run diverged.
        captured: optimizer steps that were replayed from a CUDA graph, see ``cuda_graphs``.
        history: columns ``step``, ``loss``, ``bits`` (the highest of any layer) and ``lr`` of every step, and
            ``evaluations``, a list of dicts.
    """

    step: int = 0
    seconds: float = 0.0
    status: str = "ok"
    error: str = ""
    captured: int = 0
    history: dict[str, list[Any]] = field(default_factory=_empty_history)

    def diverge(self, where: str) -> None:
        """Mark the run as diverged after ``step`` updates; ``where`` names what was not finite."""
        self.status = "diverged"
        self.error = f"diverged at step {self.step}, in {where}"


def previous_path(path: Path) -> Path:
    """Return the path of the checkpoint before the newest one."""
    return path.with_suffix(f".previous{path.suffix}")


def save_checkpoint(path: Path, session: Session, state: RunState) -> None:
    """Write a checkpoint atomically; the file that it replaces becomes the previous checkpoint.

    All processes of a run call this together, and the first one writes.
    """
    cuda_rng_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    rng_states = process_group.gather((torch.get_rng_state(), cuda_rng_state))
    if process_group.rank():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "key": session.spec.key,
        "numerics": NUMERICS,
        "data_checksum": session.task.data.checksum,
        "state": {**vars(state), "carry": session.carry},
        "model": session.model.state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "precision": session.scheduler.state_dict(),
        "random": rng_states[0][0],
        "random_cuda": rng_states[0][1],
        "random_of_others": rng_states[1:],
    }

    def write(temporary: Path) -> None:
        torch.save(content, temporary)
        with open(temporary, "rb+") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0, os.SEEK_END)
            file.write(digest)

    write_atomically(path, write, previous_path(path))


def resume(path: Path, make: Callable[[], Session]) -> tuple[Session, RunState]:
    """Return a new session and its progress: restored from the newest intact checkpoint, or at the start.

    A damaged checkpoint is set aside with ``.damaged`` in its name, one of other numerics with ``.other_numerics``.

    Args:
        path: file of the newest checkpoint; it need not exist.
        make: returns a session at its start.

    Raises:
        ValueError: for a checkpoint of another run, or one that this version of torch or of the model cannot use.
    """
    session, state = make(), RunState()
    for file in (path, previous_path(path)):
        if not file.exists():
            continue
        try:
            state = load_checkpoint(file, session)
            break
        except DamagedError as error:
            aside = file.with_suffix(f".{error.label}{file.suffix}")
            if not process_group.rank():
                os.replace(file, aside)
            log.warning(
                "%s: kept as %s; the run goes back to the checkpoint before, or to step 0",
                error,
                aside.name,
            )
    return session, state


def load_checkpoint(path: Path, session: Session) -> RunState:
    """Restore the session from a checkpoint; return the progress of the run.

    Raises:
        DamagedError: if the file changed after it was written, or has other data or numerics; the session is unchanged.
        ValueError: for a checkpoint of another run or number of processes, or one that torch cannot read.
    """
    _check_digest(path)
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} cannot be read; remove it to start the run again"
        ) from error
    if content["key"] != session.spec.key:
        raise ValueError(
            f"{path} belongs to run {content['key']}, not to {session.spec.key}"
        )
    checksum = session.task.data.checksum
    if content.get("data_checksum", checksum) != checksum:
        raise DamagedError(f"{path} was trained on other data than is there now")
    numerics = content.get("numerics", NUMERICS_WITHOUT_VERSION)
    if numerics != NUMERICS:
        raise OtherNumericsError(
            f"{path} was written with numerics {numerics}, and today's is {NUMERICS}"
        )
    rng_states = [
        (content["random"], content["random_cuda"]),
        *content.get("random_of_others", []),
    ]
    if len(rng_states) != process_group.size():
        raise ValueError(
            f"{path} was written by {len(rng_states)} processes, and {process_group.size()} would go on from it"
        )

    # Whether the optimizer is fused depends on this device, which may differ from that of the checkpoint.
    saved_groups = content["optimizer"]["param_groups"]
    for saved, current in zip(
        saved_groups, session.optimizer.param_groups, strict=False
    ):
        saved["fused"] = current.get("fused")
    session.model.load_state_dict(content["model"])
    session.optimizer.load_state_dict(content["optimizer"])
    session.scheduler.load_state_dict(content["precision"])
    session.carry = tree_map_only(
        torch.Tensor, lambda x: x.to(session.device), content["state"].pop("carry")
    )
    rng_state, cuda_rng_state = rng_states[process_group.rank()]
    torch.set_rng_state(rng_state)
    if cuda_rng_state is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda_rng_state)
    return RunState(**content["state"])


def _check_digest(path: Path) -> None:
    """Raise DamagedError unless the digest at the end of a file fits the bytes before it."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            bytes_left = max(0, path.stat().st_size - digest.digest_size)
            while block := file.read(min(bytes_left, 2**20)):
                digest.update(block)
                bytes_left -= len(block)
            is_intact = file.read() == digest.digest()
    except OSError as error:
        raise DamagedError(
            f"{path} cannot be read ({error.strerror or error})"
        ) from error
    if not is_intact:
        raise DamagedError(f"{path} is damaged")
