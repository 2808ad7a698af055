"""What the processor is, as the system names it: kernels are chosen by it, and rows say it.

>>> sorted(cpu())
['cpu', 'instructions']
"""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")
WIDE = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "asimd",
    "sve",
)


def cpu() -> dict[str, Any]:
    """Return the model of the processor and its wide instructions, as the kernel of the system names them."""
    fields, there = _cpu_info()
    if not fields:  # not this system
        return {"cpu": platform.processor() or platform.machine(), "instructions": []}
    parts = [
        f"{name} {fields[name]}"
        for name in ("cpu family", "model", "stepping")
        if name in fields
    ]
    name = fields.get("model name") or platform.machine()
    return {
        "cpu": ", ".join([name, *parts]),
        "instructions": [one for one in WIDE if one in there],
    }


def processor() -> tuple[str, ...]:
    """Return the maker of the processor and its widest instructions, such as "AuthenticAMD", "AVX2"; () if unknown."""
    fields, there = _cpu_info()
    widest = next(
        (
            name
            for name, flag in (("AVX512", "avx512f"), ("AVX2", "avx2"))
            if flag in there
        ),
        None,
    )
    return (fields["vendor_id"], widest) if "vendor_id" in fields and widest else ()


def _cpu_info() -> tuple[dict[str, str], set[str]]:
    """Return what the kernel of the system says of the first processor, and its flags; nothing on other systems."""
    fields: dict[str, str] = {}
    try:
        text = CPU_INFO.read_text(encoding="utf-8")
    except OSError:
        return fields, set()
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields, set((fields.get("flags") or fields.get("Features") or "").split())


@lru_cache
def has_fast_int8(device: torch.device) -> bool:
    """Whether products of 8-bit integers are faster than float32 on a device: on a CPU with instructions for them.

    On a GPU none was found to be: a training step took 1.5 to 21 simulated ones on an H200 (docs/int8.md).
    """
    import torch  # rows of other machines are read without it

    return device.type == "cpu" and torch.cpu._is_vnni_supported()
