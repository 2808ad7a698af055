"""Imports of optional libraries: an error names the extra that brings what is missing.

>>> import_optional("json", "lab").dumps([1])
'[1]'
"""

import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}  # whose names are not those of their modules


def import_optional(name: str, extra: str) -> Any:
    """Import an optional library, or "module:name" that needs one; ImportError names the extra as ``extra_named``."""
    try:
        return pkgutil.resolve_name(name if ":" in name else f"{name}:")
    except ImportError:
        with extra_named(extra, name):
            raise


@contextmanager
def extra_named(extra: str = "", name: str = "") -> Iterator[None]:
    """Let an ImportError inside name the extra that brings the module (``name``), by the metadata, else ``extra``."""
    try:
        yield
    except ImportError as error:
        from importlib.metadata import distributions

        missing = (error.name or name).partition(".")[0]
        needed = [
            line for d in distributions(name="cpt-core") for line in d.requires or ()
        ]
        package = PACKAGES.get(missing, missing).replace("_", "[-_]")
        known = re.findall(
            rf"^{package}\b.* extra == .(\w+)", "\n".join(needed), re.M | re.I
        )
        extra = extra if extra in known or not known else known[0]
        if not missing or not extra or missing.startswith("cpt_"):
            raise
        raise ImportError(
            f"{missing} cannot be imported; {install_hint(extra)}"
        ) from error


def install_hint(extra: str) -> str:
    """Return how to get an extra: the package is on no index, so it is installed again from a wheel or a checkout.

    >>> install_hint("lab")
    'install the wheel again with [lab]: pip install "$(ls cpt_core-*.whl)[lab]", or in a checkout: pip install ...'
    """
    wheel = f'pip install "$(ls cpt_core-*.whl)[{extra}]"'
    checkout = f'pip install -e ".[{extra}]"'
    return (
        f"install the wheel again with [{extra}]: {wheel}, or in a checkout: {checkout}"
    )
