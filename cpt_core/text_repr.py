"""Display of results in notebooks as their text."""

from typing import Any


def show_text(result: Any, printer: Any, cycle: bool) -> None:
    """Print ``str(result)`` where a result is the last line of a notebook cell.

    It is the ``_repr_pretty_`` of a class, see ``IPython.lib.pretty``. IPython prefers the ``__repr__`` that
    ``dataclass`` makes to a method of a base class.
    """
    printer.text(str(result))
