"""Devices of runs: the choice of one, its name and memory, and the float32 arithmetic of a run on it.

A recipe may ask for bfloat16 autocast between layers, for TF32 matmuls and for the channels-last memory format. TF32
keeps 11 of the 24 significant bits of an operand, and a dequantised number needs all 24, however few bits its grid has.
By default torch uses TF32 in cuDNN convolutions and not in cuBLAS matmuls: both are set here before every forward pass.
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
MIN_TF32_CAPABILITY = (8, 0)


def device_name(device: str) -> str:
    """Return the name of the GPU for "cuda", else ``device``."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return device


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes: reserved by torch on a GPU, resident on a CPU.

    The peak of a CPU is that of the whole process (``ru_maxrss``), which nothing resets between runs.
    """
    return torch.cuda.max_memory_reserved() if device == "cuda" else host_memory()


def host_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    import resource  # this module does not exist on Windows

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


class DeviceNotFoundError(ValueError):
    """Error of a run that needs a GPU where torch sees none; says why, and how to choose the CPU."""


def choose_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda" for a run that is about to start.

    "auto" is resolved by ``resolve_device``, but never starts a run of several days on a CPU.

    Raises:
        DeviceNotFoundError: for "auto" at paper scale where torch sees no GPU, and for "cuda" without a GPU.
        ValueError: for an unknown device, and for a recipe that the device cannot follow.
    """
    if device == "auto" and spec.scale == "paper" and not torch.cuda.is_available():
        raise DeviceNotFoundError(
            f"{spec.recipe.model} on {spec.recipe.dataset} at paper scale takes a GPU, and {_missing_gpu_reason()}. "
            "On the CPU it runs when asked: --device cpu, device='cpu' in Python, -p device cpu for a notebook"
        )
    return resolve_device(device, spec)


def check_device(device: str) -> None:
    """Raise DeviceNotFoundError for "cuda" if torch sees no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceNotFoundError(
            f"device 'cuda' was asked for, but {_missing_gpu_reason()}"
        )


def resolve_device(device: str, spec: RunSpec) -> str:
    """Return "cpu" or "cuda" for the device of a spec, resolving "auto".

    "auto" is CUDA at paper scale where there is a GPU, and the CPU at demo scale. Runs at smoke scale always use the
    CPU. Demos are small: on a GPU most of a step is kernel launches (thousands for an LSTM), and starting CUDA takes
    some seconds more; on the CPU they give the committed numbers.

    Raises:
        DeviceNotFoundError: for CUDA where there is none.
        ValueError: for an unknown name, and for a recipe that the device cannot follow.
    """
    check_choice("device", device, DEVICES)
    check_device(device)

    is_small = spec.scale == "smoke" or (spec.scale == "demo" and device == "auto")
    use_cuda = torch.cuda.is_available() and device != "cpu" and not is_small
    resolved = "cuda" if use_cuda else "cpu"
    check_arithmetic(spec.recipe, torch.device(resolved))
    return resolved


def _missing_gpu_reason() -> str:
    """Return the reason why torch sees no GPU, and the driver that it needs."""
    cuda_version = torch.version.cuda
    if cuda_version is None:
        return f"torch {torch.__version__} is built without CUDA"

    try:
        torch.cuda.init()
        reason = "there is none"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition(". ")[0].strip().rstrip(".")
    driver = DRIVERS.get(cuda_version.partition(".")[0])
    needs = f", which needs a driver of NVIDIA's, {driver} or newer" if driver else ""
    return f"torch sees no CUDA device: {reason} (torch {torch.__version__} is built for CUDA {cuda_version}{needs})"


def check_arithmetic(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError if a recipe asks for TF32 on a device without it.

    Otherwise a result row would claim TF32 that the run did not use.
    """
    if not recipe.tf32:
        return
    if device.type != "cuda":
        raise ValueError(
            f"tf32 is for CUDA; this run of {recipe.model} on {recipe.dataset} is on device {device}"
        )
    if not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_TF32_CAPABILITY:
        required = ".".join(map(str, MIN_TF32_CAPABILITY))
        present = ".".join(map(str, capability))
        raise ValueError(
            f"tf32 needs a GPU of compute capability {required}; {torch.cuda.get_device_name(device)} has {present}"
        )


def set_memory_format(model: nn.Module, recipe: Recipe) -> None:
    """Put convolution weights in channels-last format if the recipe asks for it.

    The outputs of these convolutions then are channels last, too.

    Raises:
        ValueError: for a model without two-dimensional convolutions.
    """
    if not recipe.channels_last:
        return
    if not any(p.dim() == 4 for p in model.parameters()):
        raise ValueError(
            f"channels_last is for convolutions in two dimensions; {recipe.model} has none"
        )
    model.to(memory_format=torch.channels_last)


def enforce_determinism() -> None:
    """Make torch refuse nondeterministic operations in this process if ``CPT_DETERMINISTIC=1``."""
    if os.environ.get("CPT_DETERMINISTIC") == "1":
        # Deterministic algorithms require this setting of cuBLAS.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def set_tf32(recipe: Recipe) -> None:
    """Allow or forbid TF32 in cuBLAS and cuDNN for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        recipe.tf32
    )


@contextmanager
def arithmetic(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Compute a forward pass with the autocast and TF32 settings of a recipe.

    TF32 stays set after the block, for the backward pass.
    """
    if device.type == "cuda":
        set_tf32(recipe)
    with torch.autocast(device.type, torch.bfloat16, enabled=bool(recipe.autocast)):
        yield


def cuda_provenance(recipe: Recipe) -> dict[str, Any]:
    """Return the GPU, the CUDA library versions and the TF32 settings of a run."""
    set_tf32(recipe)
    # The driver's version as nvidia-smi reports it; None if that program is missing.
    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    return {
        "gpu": torch.cuda.get_device_name(),
        "runtime": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver,
        "tf32": {
            "cublas": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
