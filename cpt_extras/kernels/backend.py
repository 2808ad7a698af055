"""Which backend of the quantised operator is active, and why.

>>> backend().cpu in ("cpp", "reference")
True

``CPT_KERNELS=reference`` (or ``cpp``, ``triton``) forces one; what is forced and not there is an error. Which library
multiplies float32 matrices on a CPU is said in ``gemm_backend.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cpt_core.validation import check_choice
from cpt_extras.kernels import gemm_backend, operators

BACKENDS = ("reference", "cpp", "triton")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """What runs the quantised operator; ``print`` it."""

    cpu: str  # "cpp" or "reference", for tensors on the CPU
    cuda: str  # "triton" or "reference", for those on a GPU
    why: dict[str, str]  # the reason of either, and of ``products``
    products: str = "torch"  # or "onednn", the library of float32 products on the CPU

    def __str__(self) -> str:
        """Return a line for each."""
        parts = {"on a CPU": "cpu", "on CUDA": "cuda", "products on a CPU": "products"}
        return "\n".join(
            f"{name}: {getattr(self, part)} ({self.why[part]})"
            for name, part in parts.items()
        )


def backend() -> Backend:
    """Return the active backend; builds or loads the kernels if no quantised layer has done so yet.

    Raises:
        ValueError: for an unknown name in ``CPT_KERNELS`` or ``CPT_PRODUCTS``.
        RuntimeError: when one of them names what is not there.
    """
    global _active
    if _active is None:
        asked = os.environ.get("CPT_KERNELS", "")
        if asked:
            check_choice("CPT_KERNELS", asked, BACKENDS)
        plain = "reference", "CPT_KERNELS=reference"
        cpu, why_cpu = plain if asked == "reference" else _cpp(asked == "cpp")
        cuda, why_cuda = plain if asked == "reference" else _triton(asked == "triton")
        library, why = gemm_backend.choose_library(os.environ.get("CPT_PRODUCTS", ""))
        gemm_backend.use(library)
        _active = Backend(
            cpu, cuda, {"cpu": why_cpu, "cuda": why_cuda, "products": why}, library
        )
        operators.use("cpt_reference" if asked == "reference" else "cpt")
        log.info("quantised operator: %s", str(_active).replace("\n", "; "))
    return _active


def kernels_on(device: torch.device) -> str:
    """Return the name of what runs the quantised operator on a device now; "not loaded" before any was asked for."""
    if _active is None:
        return "not loaded"
    found = _active.cuda if device.type == "cuda" else _active.cpu
    return (
        found if operators.active is torch.ops.cpt else "reference"
    )  # inside ``reference``, too


@contextmanager
def reference() -> Iterator[None]:
    """Run the plain backend inside a ``with`` block, whatever is active outside: for comparisons."""
    backend()
    before = operators.active
    operators.use("cpt_reference")
    try:
        yield
    finally:
        operators.active = before


_active: Backend | None = None
operators.describe_device = kernels_on


def _cpp(forced: bool) -> tuple[str, str]:
    from cpt_extras.kernels.cpp import build

    try:
        try:
            where = build.load()
        except build.UnusableError as error:
            where = importlib.import_module(
                "cpt_extras.kernels.cpp.spare_folders"
            ).load(str(error))
        operators.has_cpp_gradient = True
        importlib.import_module("cpt_extras.kernels.layers")  # registers itself
        return "cpp", where
    except build.NoKernelsError as error:
        if forced:
            raise RuntimeError(
                f"CPT_KERNELS=cpp asks for the C++ kernels, but {error}"
            ) from None
        return "reference", f"no C++ kernels: {error}"


def _triton(forced: bool) -> tuple[str, str]:
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
