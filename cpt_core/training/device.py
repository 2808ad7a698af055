"""Devices: which one a run takes, its name, its memory."""

from __future__ import annotations

import sys

import torch

from cpt_core.checks import choose
from cpt_core.experiments.spec import RunSpec
from cpt_core.training.arithmetic import check_arithmetic

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
    """Return "cpu" or "cuda"; "auto" takes CUDA where there is one at paper scale, and at smoke scale nothing does.

    Demos are small: on a GPU most of a step is the launching of its kernels, thousands for an LSTM, and starting CUDA
    takes some seconds more; on the CPU they give the committed numbers.

    Raises:
        ValueError: for an unknown name, for CUDA where there is none, and for a recipe that the device cannot follow.
    """
    choose("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device")
    small = spec.scale == "smoke" or (spec.scale == "demo" and device == "auto")
    chosen = "cuda" if torch.cuda.is_available() and device != "cpu" and not small else "cpu"
    check_arithmetic(spec.recipe, torch.device(chosen))
    return chosen
