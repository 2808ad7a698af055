"""Checkpoints of a training run: all that changes, used whole or not at all. The one before stays beside the newest.

A file is what ``torch.save`` writes, then the SHA-256 of that: torch itself does not notice a changed byte.
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
from cpt_lab.training import processes
from cpt_lab.training.session import Session

log = logging.getLogger(__name__)


class DamagedError(ValueError):
    """The bytes of a checkpoint are not those that were written, or the data is not that of the run so far."""

    label = "damaged"  # of the file that is set aside


class OtherNumericsError(DamagedError):
    """A checkpoint was written with other numerics: training that goes on from it would mix two of them."""

    label = "other_numerics"


@dataclass
class State:
    """How far a run is and what happened so far; with what changes in its session, this is what a checkpoint holds."""

    step: int = 0  # optimizer steps that are done
    seconds: float = (
        0.0  # time spent training and evaluating, over all sessions of a resumed run
    )
    # "ok", or "diverged" when anything was not finite: the training loss, a metric of an evaluation, a weight (training
    # stops there)
    status: str = "ok"
    error: str = ""  # of a run that diverged, after how many updates and in what
    captured: int = (
        0  # optimizer steps that were replayed from a recording, see ``capture``
    )
    # columns ``step``, ``loss``, ``bits`` (the highest of any layer), ``lr`` of every step, and ``evaluations``, a list
    # of dicts
    history: dict[str, list[Any]] = field(
        default_factory=lambda: {
            "step": [],
            "loss": [],
            "bits": [],
            "lr": [],
            "evaluations": [],
        }
    )

    def diverge(self, where: str) -> None:
        """End the run: after ``step`` updates, something there was not finite."""
        self.status, self.error = (
            "diverged",
            f"diverged at step {self.step}, in {where}",
        )


def previous(path: Path) -> Path:
    """Return where the checkpoint before the newest one is kept."""
    return path.with_suffix(f".previous{path.suffix}")


def save_checkpoint(path: Path, session: Session, state: State) -> None:
    """Write all that changes during training, replacing an older file in one go; that one becomes ``previous``.

    Several processes call it together, and the first one writes.
    """
    on_gpu = (
        torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    )  # on this run's
    random = processes.gathered((torch.get_rng_state(), on_gpu))
    if processes.rank():
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
        "random": random[0][0],
        "random_cuda": random[0][1],
        "random_of_others": random[1:],
    }

    def write(temporary: Path) -> None:
        torch.save(content, temporary)
        with open(temporary, "rb+") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0, os.SEEK_END)
            file.write(digest)

    write_atomically(path, write, previous(path))


def resume(path: Path, make: Callable[[], Session]) -> tuple[Session, State]:
    """Return a session and how far it is: as the newest whole checkpoint has it, or at its start.

    A damaged checkpoint is set aside beside the others, with ``.damaged`` in its name, and one of other numerics with
    ``.other_numerics``.

    Raises:
        ValueError: for a checkpoint of another run, or one that this version of torch or of the model cannot use.
    """
    session, state = make(), State()
    for file in (path, previous(path)):
        if not file.exists():
            continue
        try:
            state = load_checkpoint(file, session)
            break
        except DamagedError as error:
            aside = file.with_suffix(f".{error.label}{file.suffix}")
            if not processes.rank():
                os.replace(file, aside)
            log.warning(
                "%s: kept as %s; the run goes back to the checkpoint before, or to step 0",
                error,
                aside.name,
            )
    return session, state


def load_checkpoint(path: Path, session: Session) -> State:
    """Put the session back as a checkpoint has it.

    Raises:
        DamagedError: when it is not as it was written, of other data or other numerics; the session is then as before.
        ValueError: for one of another run, or one that torch cannot read.
    """
    _verify(path)
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
    if (
        content.get("data_checksum", session.task.data.checksum)
        != session.task.data.checksum
    ):
        raise DamagedError(f"{path} was trained on other data than is there now")
    if (numerics := content.get("numerics", NUMERICS_WITHOUT_VERSION)) != NUMERICS:
        raise OtherNumericsError(
            f"{path} was written with numerics {numerics}, and today's is {NUMERICS}"
        )
    written = [
        (content["random"], content["random_cuda"]),
        *content.get("random_of_others", []),
    ]
    if len(written) != processes.count():
        raise ValueError(
            f"{path} was written by {len(written)} processes, and {processes.count()} would go on from it"
        )
    for saved, own in zip(
        content["optimizer"]["param_groups"],
        session.optimizer.param_groups,
        strict=False,
    ):
        saved["fused"] = own.get("fused")  # of this device, which may be another one
    session.model.load_state_dict(content["model"])
    session.optimizer.load_state_dict(content["optimizer"])
    session.scheduler.load_state_dict(content["precision"])
    session.carry = tree_map_only(
        torch.Tensor, lambda x: x.to(session.device), content["state"].pop("carry")
    )
    random, random_cuda = written[processes.rank()]
    torch.set_rng_state(random)
    if random_cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(random_cuda)
    return State(**content["state"])


def _verify(path: Path) -> None:
    """Compare the digest at the end of a file with what stands before it."""
    digest, size = hashlib.sha256(), hashlib.sha256().digest_size
    try:
        with open(path, "rb") as file:
            left = max(0, path.stat().st_size - size)
            while block := file.read(min(left, 2**20)):
                digest.update(block)
                left -= len(block)
            whole = file.read() == digest.digest()
    except OSError as error:
        raise DamagedError(
            f"{path} cannot be read ({error.strerror or error})"
        ) from error
    if not whole:
        raise DamagedError(f"{path} is damaged")
