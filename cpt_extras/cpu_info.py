"""Facts about the processor: its model and instructions, recorded in result rows and used to choose kernels.

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
REPORTED_INSTRUCTIONS = (
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
    """Return the model of the processor and its vector instructions, as the operating system reports them."""
    fields, flags = _cpu_info()
    if not fields:  # a system without /proc/cpuinfo
        return {"cpu": platform.processor() or platform.machine(), "instructions": []}
    parts = [
        f"{name} {fields[name]}"
        for name in ("cpu family", "model", "stepping")
        if name in fields
    ]
    name = fields.get("model name") or platform.machine()
    return {
        "cpu": ", ".join([name, *parts]),
        "instructions": [name for name in REPORTED_INSTRUCTIONS if name in flags],
    }


def processor() -> tuple[str, ...]:
    """Return (vendor, widest vector instructions), such as ("AuthenticAMD", "AVX2"); () if unknown."""
    fields, flags = _cpu_info()
    if "vendor_id" not in fields:
        return ()
    if "avx512f" in flags:
        return fields["vendor_id"], "AVX512"
    if "avx2" in flags:
        return fields["vendor_id"], "AVX2"
    return ()


def _cpu_info() -> tuple[dict[str, str], set[str]]:
    """Return the fields and the flags of the first processor in /proc/cpuinfo; both empty on other systems."""
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
    """Return whether int8 matmuls are faster than float32 on a device: on CPUs with VNNI instructions.

    They were not on a GPU: a training step took 1.5 to 21 times a simulated one on an H200 (docs/int8.md).
    """
    import torch  # imported late: reading result rows must not need torch

    return device.type == "cpu" and torch.cpu._is_vnni_supported()
