"""The version of the numerics: what a seed gives, bit for bit on one machine, is the same within a version.

It covers the layers of the paper (linear, convolution, LSTM, graph convolution): the grids, the rounding, its noise and
the order of a training step. Rows, checkpoints, states of schedulers and exported programs carry it.

===  ========  ===================================================================
1    0.1       a pool of random numbers for every model
2    0.2, 0.3  one hash of a key and a position, the same in every kernel
===  ========  ===================================================================

``tests/compatibility/test_losses.py`` fails when a change moves the losses. Where that is meant, add a line here, raise
``NUMERICS`` and run ``python -m bench.pinned_losses``.
"""

NUMERICS = 2
NUMERICS_OF_RELEASES = {"0.1.0": 1, "0.2.0": 2, "0.3.0": 2}  # of those that wrote, at least at first, no version
NUMERICS_WITHOUT_VERSION = 2  # of checkpoints and states without one that today's code can load
