"""Devices: which one a run takes, its name, its memory."""

from __future__ import annotations

import sys

import torch

from cpt_core.checks import choose
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.training.arithmetic import check_arithmetic

DEVICES = ("auto", "cpu", "cuda")
DRIVERS = {"12": 525, "13": 580}  # the oldest on Linux by the version of CUDA, from NVIDIA's table of compatibility


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


class DeviceNotFoundError(ValueError):
    """A run is for a GPU, and torch sees none; the message says why, and how to ask for the CPU."""


def choose_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda" for a run that is about to start: as ``usual_device``, but nothing long starts unasked.

    Raises:
        DeviceNotFoundError: for "auto" at paper scale where torch sees no GPU: a run takes days on a CPU.
        ValueError: as ``usual_device`` does.
    """
    if device == "auto" and spec.scale == "paper" and not torch.cuda.is_available():
        raise DeviceNotFoundError(
            f"{spec.recipe.model} on {spec.recipe.dataset} at paper scale takes a GPU, and {_why_no_gpu()}. On the CPU "
            "it runs when asked: --device cpu, device='cpu' in Python, -p device cpu for a notebook"
        )
    return usual_device(device, spec)


def usual_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda"; "auto" takes CUDA where there is one at paper scale, and at smoke scale nothing does.

    Demos are small: on a GPU most of a step is the launching of its kernels, thousands for an LSTM, and starting CUDA
    takes some seconds more; on the CPU they give the committed numbers.

    Raises:
        DeviceNotFoundError: for CUDA where there is none.
        ValueError: for an unknown name, and for a recipe that the device cannot follow.
    """
    choose("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceNotFoundError(f"device 'cuda' was asked for, but {_why_no_gpu()}")
    small = spec.scale == "smoke" or (spec.scale == "demo" and device == "auto")
    chosen = "cuda" if torch.cuda.is_available() and device != "cpu" and not small else "cpu"
    check_arithmetic(spec.recipe, torch.device(chosen))
    return chosen


def _why_no_gpu() -> str:
    """Say what torch sees instead of a GPU, and which driver it needs."""
    built = torch.version.cuda
    if built is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
        said = "there is none"
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition(". ")[0].strip().rstrip(".")
    driver = DRIVERS.get(built.partition(".")[0])
    needs = f", which needs a driver of NVIDIA's, {driver} or newer" if driver else ""
    return f"torch sees no CUDA device: {said} (torch {torch.__version__} is built for CUDA {built}{needs})"
