"""How the float32 work of a run is computed: in bfloat16 between layers, with TF32 products, channels last.

TF32 keeps 11 of the 24 bits of an operand, and a dequantised number needs all 24, however few bits its grid has. Torch
takes it in cuDNN's convolutions unless it is told not to, and not in cuBLAS: here both are told, before every forward.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import collect_env

from cpt_lab.experiments.recipe import Recipe

TF32_SINCE = (8, 0)  # compute capability


def check_arithmetic(recipe: Recipe, device: torch.device) -> None:
    """Raise ValueError where the recipe asks for what this device would not do: no row may say that it had it."""
    if not recipe.tf32:
        return
    if device.type != "cuda":
        raise ValueError(f"tf32 is for CUDA; this run of {recipe.model} on {recipe.dataset} is on device {device}")
    if torch.cuda.is_available() and (there := torch.cuda.get_device_capability(device)) < TF32_SINCE:
        wanted, found = (".".join(map(str, version)) for version in (TF32_SINCE, there))
        raise ValueError(
            f"tf32 needs a GPU of compute capability {wanted}; {torch.cuda.get_device_name(device)} has {found}"
        )


def lay_out(model: nn.Module, recipe: Recipe) -> None:
    """Put the weights of convolutions channels last, whose results then are too; ValueError for a model without any."""
    if not recipe.channels_last:
        return
    if not any(p.dim() == 4 for p in model.parameters()):
        raise ValueError(f"channels_last is for convolutions in two dimensions; {recipe.model} has none")
    model.to(memory_format=torch.channels_last)


def fix_order_of_sums() -> None:
    """Let torch refuse, in this process, what sums in another order each time, where ``CPT_DETERMINISTIC=1`` asks."""
    if os.environ.get("CPT_DETERMINISTIC") == "1":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks of cuBLAS then
        torch.use_deterministic_algorithms(True)


def set_tf32(recipe: Recipe) -> None:
    """Let cuBLAS and cuDNN take TF32, or not, for the whole process, as torch has it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.tf32


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
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),  # as nvidia-smi has it; None without that
        "tf32": {"cublas": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
    }
