"""Devices: which one a run takes, its name, its memory; and how the float32 work of a run is computed there.

That is in bfloat16 between layers, with TF32 products, channels last. TF32 keeps 11 of the 24 bits of an operand, and a
dequantised number needs all 24, however few bits its grid has. Torch takes it in cuDNN's convolutions unless it is told
not to, and not in cuBLAS: here both are told, before every forward.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import collect_env

from cpt_core.validation import check_choice
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.resources import DRIVERS

DEVICES = ("auto", "cpu", "cuda")
TF32_SINCE = (8, 0)


def device_name(device: str) -> str:
    """Return the name of the GPU, or the word itself."""
    return (
        torch.cuda.get_device_name()
        if device == "cuda" and torch.cuda.is_available()
        else device
    )


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


def check_device(device: str) -> None:
    """Refuse "cuda" where torch sees none, by a DeviceNotFoundError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceNotFoundError(f"device 'cuda' was asked for, but {_why_no_gpu()}")


def usual_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda"; "auto" takes CUDA where there is one at paper scale, and at smoke scale nothing does.

    Demos are small: on a GPU most of a step is the launching of its kernels, thousands for an LSTM, and starting CUDA
    takes some seconds more; on the CPU they give the committed numbers.

    Raises:
        DeviceNotFoundError: for CUDA where there is none.
        ValueError: for an unknown name, and for a recipe that the device cannot follow.
    """
    check_choice("device", device, DEVICES)
    check_device(device)
    small = spec.scale == "smoke" or (spec.scale == "demo" and device == "auto")
    chosen = (
        "cuda" if torch.cuda.is_available() and device != "cpu" and not small else "cpu"
    )
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


def check_arithmetic(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError where the recipe asks for what this device would not do: no row may say that it had it."""
    if not recipe.tf32:
        return
    if device.type != "cuda":
        raise ValueError(
            f"tf32 is for CUDA; this run of {recipe.model} on {recipe.dataset} is on device {device}"
        )
    if (
        torch.cuda.is_available()
        and (there := torch.cuda.get_device_capability(device)) < TF32_SINCE
    ):
        wanted, found = (".".join(map(str, version)) for version in (TF32_SINCE, there))
        raise ValueError(
            f"tf32 needs a GPU of compute capability {wanted}; {torch.cuda.get_device_name(device)} has {found}"
        )


def lay_out(model: nn.Module, recipe: Recipe) -> None:
    """Put the weights of convolutions channels last, whose results then are too; ValueError for a model without any."""
    if not recipe.channels_last:
        return
    if not any(p.dim() == 4 for p in model.parameters()):
        raise ValueError(
            f"channels_last is for convolutions in two dimensions; {recipe.model} has none"
        )
    model.to(memory_format=torch.channels_last)


def fix_order_of_sums() -> None:
    """Let torch refuse, in this process, what sums in another order each time, where ``CPT_DETERMINISTIC=1`` asks."""
    if os.environ.get("CPT_DETERMINISTIC") == "1":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # what torch asks of cuBLAS then
        torch.use_deterministic_algorithms(True)


def set_tf32(recipe: Recipe) -> None:
    """Let cuBLAS and cuDNN take TF32, or not, for the whole process, as torch has it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        recipe.tf32
    )


@contextmanager
def arithmetic(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Compute a forward pass as the recipe says; TF32 stays as it was set, for the backward pass."""
    if device.type == "cuda":
        set_tf32(recipe)
    with torch.autocast(device.type, torch.bfloat16, enabled=bool(recipe.autocast)):
        yield


def cuda_provenance(recipe: Recipe) -> dict[str, Any]:
    """Return what computes a run on CUDA: GPU, versions, and whether cuBLAS and cuDNN take TF32, as they are set."""
    set_tf32(recipe)
    return {
        "gpu": torch.cuda.get_device_name(),
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": collect_env.get_nvidia_driver_version(
            collect_env.run
        ),  # as nvidia-smi has it; None without that
        "tf32": {
            "cublas": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
