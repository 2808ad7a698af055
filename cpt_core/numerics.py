"""Version number of the numerics.

Within one version a seed gives the same bits on one machine, in the layers of the paper:

1 (release 0.1): a pool of random numbers for every model;
2 (0.2, 0.3): one hash of a key and a position, the same in every kernel.

If ``tests/compatibility/test_losses.py`` fails because of an intended change, raise ``NUMERICS`` and run
``python -m bench.pinned_losses``.
"""

NUMERICS = 2
# releases whose files, at least the first ones, hold no version
NUMERICS_OF_RELEASES = {
    "0.1.0": 1,
    "0.2.0": 2,
    "0.3.0": 2,
}
NUMERICS_WITHOUT_VERSION = 2  # numerics of loadable checkpoints that hold no version
