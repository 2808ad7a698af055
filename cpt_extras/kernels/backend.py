"""Backend of the rounding operators: plain torch, C++ or Triton, chosen when the first layer needs it.

>>> backend().cpu in ("cpp", "reference")
True

``CPT_KERNELS=reference`` (or ``cpp``, ``triton``) forces a backend; it is an error if that is not available. The
library of float32 matmuls on a CPU is chosen in ``gemm_backend.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from cpt_core.validation import check_choice
from cpt_extras.former_names import FormerName
from cpt_extras.kernels import gemm_backend, grids, operators

BACKENDS = ("reference", "cpp", "triton")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """The active backends; ``print`` it.

    Attributes:
        cpu: "cpp" or "reference", for tensors on the CPU.
        cuda: "triton" or "reference", for tensors on a GPU.
        reasons: reason for each choice, by the names of the other attributes.
        products: "torch" or "onednn", the library of float32 matmuls on the CPU.
    """

    cpu: str
    cuda: str
    reasons: dict[str, str]
    products: str = "torch"

    why = FormerName("why", "reasons")

    def __str__(self) -> str:
        """Return a line for each backend, with its reason."""
        lines = (
            f"on a CPU: {self.cpu} ({self.reasons['cpu']})",
            f"on CUDA: {self.cuda} ({self.reasons['cuda']})",
            f"products on a CPU: {self.products} ({self.reasons['products']})",
        )
        return "\n".join(lines)


def backend() -> Backend:
    """Return the active backend; build or load the kernels if no quantised layer has done so yet.

    Raises:
        ValueError: for an unknown name in ``CPT_KERNELS`` or ``CPT_PRODUCTS``.
        RuntimeError: if one of them names a backend that is not available.
    """
    global _active
    if _active is None:
        forced = os.environ.get("CPT_KERNELS", "")
        if forced:
            check_choice("CPT_KERNELS", forced, BACKENDS)
        reasons = {}
        if forced == "reference":
            cpu = cuda = "reference"
            reasons["cpu"] = reasons["cuda"] = "CPT_KERNELS=reference"
        else:
            cpu, reasons["cpu"] = _load_cpp(forced == "cpp")
            cuda, reasons["cuda"] = _load_triton(forced == "triton")
        library, reasons["products"] = gemm_backend.choose_library(
            os.environ.get("CPT_PRODUCTS", "")
        )
        gemm_backend.use(library)
        _active = Backend(cpu, cuda, reasons, library)
        operators.use("cpt_reference" if forced == "reference" else "cpt")
        log.info("quantised operator: %s", str(_active).replace("\n", "; "))
    return _active


def kernels_on(device: torch.device) -> str:
    """Return the name of the backend that rounds on a device now; "not loaded" before the first use."""
    if _active is None:
        return "not loaded"
    if operators.active is not torch.ops.cpt:  # inside a ``reference`` block, too
        return "reference"
    return _active.cuda if device.type == "cuda" else _active.cpu


@contextmanager
def reference() -> Iterator[None]:
    """Use the plain torch backend inside a ``with`` block, for comparisons."""
    backend()
    before = operators.active
    operators.use("cpt_reference")
    try:
        yield
    finally:
        operators.active = before


_active: Backend | None = None
operators.describe_device = kernels_on


def _load_cpp(forced: bool) -> tuple[str, str]:
    from cpt_extras.kernels.cpp import build

    try:
        try:
            where = build.load()
        except build.UnusableError as error:
            where = importlib.import_module(
                "cpt_extras.kernels.cpp.spare_folders"
            ).load(str(error))
        if not operators.has_cpp_gradient:  # an operator is registered once
            round_in_range = partial(
                grids.round_in_range, in_blocks=grids.round_blocks_in_cpp
            )
            operators.LIBRARIES["cpt"].impl("round_in_range", round_in_range, "CPU")
        operators.has_cpp_gradient = True
        importlib.import_module("cpt_extras.kernels.layers")  # registers executors
        return "cpp", where
    except build.NoKernelsError as error:
        if forced:
            raise RuntimeError(
                f"CPT_KERNELS=cpp asks for the C++ kernels, but {error}"
            ) from None
        return "reference", f"no C++ kernels: {error}"


def _load_triton(forced: bool) -> tuple[str, str]:
    if not torch.cuda.is_available():
        why_not = "torch sees no CUDA device"
    elif importlib.util.find_spec("triton") is None:
        why_not = "triton is not installed"
    else:
        from cpt_extras.kernels.triton import operators as kernels

        why_not = kernels.unsupported_reason()
    if not why_not:
        kernels.register(operators.LIBRARIES["cpt"])
        return "triton", torch.cuda.get_device_name()
    if forced:
        raise RuntimeError(
            f"CPT_KERNELS=triton asks for the Triton kernels, but {why_not}"
        )
    return "reference", why_not
