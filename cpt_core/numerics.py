"""The version of the numerics: within one, a seed gives the same bits on one machine, in layers of the paper.

1 (release 0.1): a pool of random numbers for every model;
2 (0.2, 0.3): one hash of a key and a position, the same in every kernel.

If ``tests/compatibility/test_losses.py`` fails for a change that is meant: raise it, ``python -m bench.pinned_losses``.
"""

NUMERICS = 2
NUMERICS_OF_RELEASES = {
    "0.1.0": 1,
    "0.2.0": 2,
    "0.3.0": 2,
}  # of those that wrote, at least at first, no version
NUMERICS_WITHOUT_VERSION = (
    2  # of checkpoints and states that have none and can be loaded
)
