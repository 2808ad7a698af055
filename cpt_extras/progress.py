"""Bars of progress for those who wait: one way to show them, or not."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def progress_bar(
    what: str,
    items: Iterable[Any] | None = None,
    *,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Return tqdm's bar over ``items``, or one to be updated by hand.

    Args:
        what: stands before the bar.
        progress: show the bar; None shows it to people only, in a terminal or a notebook.
        options: of tqdm, such as ``total``.
    """
    return tqdm(
        items, desc=what, disable=None if progress is None else not progress, **options
    )
