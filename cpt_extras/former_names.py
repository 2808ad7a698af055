"""Deprecated attribute names, for one release after an attribute was renamed."""

import warnings
from typing import Any


class FormerName:
    """A former name of an attribute, property or method: warns, then returns what the new name holds."""

    def __init__(self, former_name: str, new_name: str) -> None:
        self.former_name = former_name
        self.new_name = new_name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self

        warnings.warn(
            f"{type(instance).__name__}.{self.former_name} is now {self.new_name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self.new_name)
