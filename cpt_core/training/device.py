"""Devices: which one a run takes, its name, its memory."""

from __future__ import annotations

import sys

import torch

from cpt_core.checks import choose
from cpt_core.experiments.spec import RunSpec

DEVICES = ("auto", "cpu", "cuda")


def device_name(device: str) -> str:
    """Return the name of the GPU, or the word itself."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def peak_memory(device: str) -> int:
    """Return the bytes that torch has reserved on the GPU, or the largest resident size of this process."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else host_memory()


def host_memory() -> int:
    """Return the largest resident size that this process had, in bytes."""
    import resource  # not on Windows

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def choose_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda"; ValueError for an unknown name, or for CUDA where there is none."""
    choose("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device")
    if spec.scale == "smoke" or device == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
