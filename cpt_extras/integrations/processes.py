"""Rounding noise of several processes that train one model: every one has its own."""

from __future__ import annotations

from torch import distributed

KEY_BITS = 51  # of the keys that ``quantize_`` makes
MAX_PROCESSES = 2 ** (63 - KEY_BITS)  # with noise of their own


def key_offset() -> int:
    """Return how far the keys of this process are behind those of the first one of its group.

    ``quantize_`` makes keys below 2**51, so that those of two processes never meet; there is room for 4,096.
    """
    return distributed.get_rank() % MAX_PROCESSES << KEY_BITS
