"""Names of layers in a model that DDP, FSDP, ``torch.compile`` or activation checkpointing wraps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WRAPPER = re.compile(r"\b_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")


def unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state with the names that layers and patterns have in the model that nothing wraps."""
    prefix, names = "", [WRAPPER.sub("", f"{name}.") for name in state["layers"]]
    while names and all(name.startswith(f"{prefix}module.") for name in names):
        prefix += "module."

    def bare(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            WRAPPER.sub("", f"{name}.").removeprefix(prefix)[:-1]: value
            for name, value in values.items()
        }

    return {
        **state,
        **{key: bare(state[key]) for key in ("layers", "schedules", "ladders")},
    }
