"""Public names of a package, resolved on first use: what it imports for type checkers is the only list of them.

>>> homes("cpt_core.formats")["COSTS"]
'cpt_core.formats.costs'
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def homes(package: str) -> dict[str, str]:
    """Return the public names of an imported package, and the module of each: its imports ``if TYPE_CHECKING``."""
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def reference(package: str) -> dict[str, str]:
    """Return the public names of a package and those of its rooms, as ``choosing.allocate``, and the module of each."""
    found: dict[str, str] = {}
    for name, home in homes(package).items():
        if home == package:
            room = import_module(f"{package}.{name}").__name__
            found |= {f"{name}.{inner}": module for inner, module in homes(room).items()}
        else:
            found[name] = home
    return found


def lazily(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__all__``, ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use."""
    home = homes(package)
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home[name] == package:  # a room
            return import_module(f"{package}.{name}")
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return list(home), get, lambda: sorted({*vars(module), *home})
