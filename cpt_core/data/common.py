"""What all data share: the error for data that is not there, paths of the user's own, random numbers by key."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

import torch

from cpt_core.paths import data_dir, work_dir


class DataNotFoundError(FileNotFoundError):
    """A data set is not on this machine; the message names the command that gets it."""


def own_path(path: str) -> Path:
    """Resolve a path of the user's: relative ones are looked up in the data folder, then in ``work_dir()``."""
    given = Path(path.strip()).expanduser()
    if given.is_absolute() or (data_dir() / given).exists():
        return data_dir() / given
    return work_dir() / given


def generator_of(*numbers: int) -> torch.Generator:
    """Return a generator whose stream is a function of the numbers alone, such as (seed, step, purpose)."""
    seed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7])
    return torch.Generator().manual_seed(seed)


def library(name: str, extra: str) -> Any:
    """Import an optional library when it is needed; ImportError names the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported; get it with: pip install 'cpt-core[{extra}]'") from error
