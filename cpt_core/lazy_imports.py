"""Public names of a package, resolved on first use: what it imports for type checkers is the only list of them.

Those of ``cpt_extras`` are collected in ``extensions``, so that ``cpt_core`` names what stands beside it in one file.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

COLLECTED = "cpt_core.extensions"
FORMER_NAMES = {
    "choosing": "search",
    "inspecting": "diagnostics",
}  # of subpackages, until the release after 0.4


def _explain_missing(name: str, path: Any = None, target: Any = None) -> None:
    """Explain a missing module of the package: a model that was pickled whole may name it."""
    if name.startswith("cpt_core.") and not name.endswith(".__main__"):
        said = f"No module named {name!r} in this release, see CHANGELOG.md. A model that was pickled whole, as by "
        said += "torch.save(model), loads only in the release that wrote it: keep its state_dict() or export it there"
        raise ModuleNotFoundError(said, name=name)


sys.meta_path.append(SimpleNamespace(find_spec=_explain_missing))  # asked last


def defining_modules(package: str) -> dict[str, str]:
    """Return the public names of an imported package, and the module of each: its imports ``if TYPE_CHECKING``.

    The home of a subpackage is the package above it.
    """
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [
        node for block in blocks for node in block if isinstance(node, ast.ImportFrom)
    ]
    found = {alias.name: str(node.module) for node in imports for alias in node.names}
    if COLLECTED in found.values():
        collected = defining_modules(import_module(COLLECTED).__name__)
        found = {
            name: collected[name] if home == COLLECTED else home
            for name, home in found.items()
        }
    return found


def is_top_level(home: str) -> bool:
    """Return whether the home of a public name is a whole package, so that the name is a subpackage of it."""
    return "." not in home


def attach(
    package: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__all__``, ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use."""
    home = defining_modules(package)
    module = sys.modules[package]

    def get(name: str) -> Any:
        if FORMER_NAMES.get(name) in home:
            warnings.warn(
                f"{package}.{name} is now {package}.{FORMER_NAMES[name]}",
                DeprecationWarning,
                stacklevel=2,
            )
            name = FORMER_NAMES[name]
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if is_top_level(home[name]):
            return import_module(f"{home[name]}.{name}")
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return list(home), get, lambda: sorted({*vars(module), *home})
