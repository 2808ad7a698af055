"""Lazy imports of public names: a package imports a submodule when one of its names is first used.

A package lists its public names once, as imports under ``if TYPE_CHECKING`` for type checkers.  ``attach`` reads
the same imports from the source and returns the module's ``__all__``, ``__getattr__`` and ``__dir__``.  Names of
``cpt_extras`` are listed in ``cpt_core.extensions``, so that one file of ``cpt_core`` depends on that package.

On import this module also adds an explanation to failing imports of modules that earlier releases had.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

COLLECTING_MODULE = "cpt_core.extensions"
# former name -> current name of subpackages and classes, accepted until the release after 0.4
FORMER_NAMES = {
    "choosing": "search",
    "inspecting": "diagnostics",
    "Tried": "PrecisionSearchResult",
}


def _explain_missing(name: str, path: Any = None, target: Any = None) -> None:
    """Raise ModuleNotFoundError for a missing module of the package, which a whole-model pickle may name."""
    if name.startswith("cpt_core.") and not name.endswith(".__main__"):
        raise ModuleNotFoundError(
            f"No module named {name!r} in this release, see CHANGELOG.md. A model that was pickled whole, as by "
            "torch.save(model), loads only in the release that wrote it: keep its state_dict() or export it there",
            name=name,
        )


sys.meta_path.append(
    SimpleNamespace(find_spec=_explain_missing)
)  # the last finder that is tried


def defining_modules(package: str) -> dict[str, str]:
    """Return public name -> module of an imported package: its imports ``if TYPE_CHECKING``.

    The module of a subpackage is the package above it.
    """
    source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
    modules: dict[str, str] = {}
    for block in ast.parse(source).body:
        if not isinstance(block, ast.If):
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom):
                modules |= {alias.name: str(node.module) for alias in node.names}

    if COLLECTING_MODULE not in modules.values():
        return modules
    collected = defining_modules(import_module(COLLECTING_MODULE).__name__)
    return {
        name: collected[name] if module == COLLECTING_MODULE else module
        for name, module in modules.items()
    }


def is_top_level(module: str) -> bool:
    """Return whether ``module`` is a whole package, so that a name imported from it is a subpackage."""
    return "." not in module


def attach(
    package: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package with lazy names."""
    modules = defining_modules(package)
    package_module = sys.modules[package]

    def get_attribute(name: str) -> Any:
        if FORMER_NAMES.get(name) in modules:
            warnings.warn(
                f"{package}.{name} is now {package}.{FORMER_NAMES[name]}",
                DeprecationWarning,
                stacklevel=2,
            )
            name = FORMER_NAMES[name]
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if is_top_level(modules[name]):
            return import_module(f"{modules[name]}.{name}")
        value = getattr(import_module(modules[name]), name)
        setattr(package_module, name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(package_module), *modules})

    return list(modules), get_attribute, list_names
