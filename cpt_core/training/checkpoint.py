"""Checkpoints of a training run: all that changes, written so that a reader sees a whole one."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpt_core.checks import write_atomically
from cpt_core.training.session import Session


@dataclass
class State:
    """How far a run is and what happened so far; with what changes in its session, this is what a checkpoint holds."""

    step: int = 0
    seconds: float = 0.0
    status: str = "ok"
    history: dict[str, list[Any]] = field(
        default_factory=lambda: {"step": [], "loss": [], "bits": [], "lr": [], "evaluations": []}
    )


def save_checkpoint(path: Path, session: Session, state: State) -> None:
    """Write all that changes during training, replacing an older file in one go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "key": session.spec.key,
        "state": {**vars(state), "carry": session.carry},
        "model": session.model.state_dict(),
        "optimizer": session.optimizer.state_dict(),
        "precision": session.scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # of this run's GPU
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))


def load_checkpoint(path: Path, session: Session) -> State:
    """Put the session back as a checkpoint has it; ValueError for a broken file, or one of another run."""
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read; remove it to start the run again") from error
    if content["key"] != session.spec.key:
        raise ValueError(f"{path} belongs to run {content['key']}, not to {session.spec.key}")
    session.carry = content["state"].pop("carry")
    session.model.load_state_dict(content["model"])
    session.optimizer.load_state_dict(content["optimizer"])
    session.scheduler.load_state_dict(content["precision"])
    torch.set_rng_state(content["random"])
    if content["random_cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(content["random_cuda"])
    return State(**content["state"])
