"""Imports of optional libraries, whose errors name the extra that installs them.

>>> import_optional("json", "lab").dumps([1])
'[1]'
"""

import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# module -> package, where the names differ
PACKAGE_NAMES = {"PIL": "pillow", "sklearn": "scikit-learn"}


def import_optional(name: str, extra: str) -> Any:
    """Import an optional module, or the object "module:name".

    Raises:
        ImportError: when it is missing; the message names the extra that installs it.
    """
    try:
        return pkgutil.resolve_name(name if ":" in name else f"{name}:")
    except ImportError:
        with explain_missing_extra(extra, name):
            raise


@contextmanager
def explain_missing_extra(extra: str = "", name: str = "") -> Iterator[None]:
    """Add the extra that installs a module to any ImportError raised in a ``with`` block.

    Args:
        extra: name of the extra, used where the metadata of the package does not list the module.
        name: name of the module, used where the ImportError has none.
    """
    try:
        yield
    except ImportError as error:
        from importlib.metadata import distributions

        missing = (error.name or name).partition(".")[0]
        requirements = [
            line for d in distributions(name="cpt-core") for line in d.requires or ()
        ]
        package = PACKAGE_NAMES.get(missing, missing).replace("_", "[-_]")
        extras = re.findall(
            rf"^{package}\b.* extra == .(\w+)", "\n".join(requirements), re.M | re.I
        )
        if extras and extra not in extras:
            extra = extras[0]
        if not missing or not extra or missing.startswith("cpt_"):
            raise
        raise ImportError(
            f"{missing} cannot be imported; {install_hint(extra)}"
        ) from error


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, from a wheel or a checkout, as the package is on no index.

    >>> install_hint("lab")
    'install the wheel again with [lab]: pip install "$(ls cpt_core-*.whl)[lab]", or in a checkout: pip install ...'
    """
    wheel = f'pip install "$(ls cpt_core-*.whl)[{extra}]"'
    checkout = f'pip install -e ".[{extra}]"'
    return (
        f"install the wheel again with [{extra}]: {wheel}, or in a checkout: {checkout}"
    )
