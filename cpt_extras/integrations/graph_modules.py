"""Modules that torch made of a graph (``torch.fx``): a copy of a converted one is converted, and none is stored whole.

torch copies neither forward hooks of such a module nor attributes that it does not know.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from cpt_core.quantization.convert import add_hooks, attach_precision
from cpt_core.quantization.op_interception import HOOK


class _GraphCopyHook:
    """Hook on copies of a converted module."""

    def __call__(self, copied: nn.Module) -> None:
        """Add precision and hooks to a copy, which has a copied interception."""
        precision = getattr(copied, HOOK).precision
        if precision is not None:
            attach_precision(copied, precision)
        add_hooks(copied)

    def __deepcopy__(self, memo: Any) -> _GraphCopyHook:
        """Return this hook itself for copies of copies."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be stored: torch calls nothing when it reads the module."""
        raise ValueError(
            "a converted graph cannot be stored whole; store its state_dict, or call restore_(model) first"
        )


def convert_copies(module: fx.GraphModule) -> None:
    """Register a hook that converts deep copies of a converted GraphModule."""
    for name, empty in (
        ("meta", {}),
        ("_deepcopy_hooks", []),
    ):  # torchvision's graphs lack them
        vars(module).setdefault(name, empty)
    module._register_deepcopy_hook(_GraphCopyHook())
    module.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {})[HOOK] = getattr(
        module, HOOK
    )


def forget_copies(module: fx.GraphModule) -> None:
    """Undo ``convert_copies``."""
    if "_deepcopy_hooks" in vars(module):
        module.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {}).pop(HOOK, None)
        module._deepcopy_hooks = [
            hook
            for hook in module._deepcopy_hooks
            if not isinstance(hook, _GraphCopyHook)
        ]
