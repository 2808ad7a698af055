"""Progress bars of long computations, shown in terminals and notebooks only."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def progress_bar(
    description: str,
    items: Iterable[Any] | None = None,
    *,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Return a tqdm bar over ``items``, or one to be updated by hand.

    Args:
        description: text before the bar.
        items: what to iterate over; None for a bar that is updated by hand.
        progress: whether to show the bar; None shows it in a terminal or a notebook only.
        options: further arguments of tqdm, such as ``total``.
    """
    disable = None if progress is None else not progress
    return tqdm(items, desc=description, disable=disable, **options)
