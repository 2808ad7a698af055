"""Measure a training: the work that ran, and what rounding did to its tensors.  Beyond the paper.

The problem: a plan of the cost says what should run, and a loss curve says little about why low precision hurts.

The design: ``ledger`` counts bit operations while a model trains; it listens to the operations that the core reports.
``check`` runs one step, and lists the operations that are not quantised.
``recording`` samples steps and shows the tensors that are about to be rounded to ``rounding_stats``, which sums up
errors, shares of zeros and of clipped values on the device, per layer and role. Neither changes a number of the
training; a test compares the weights bit for bit.
``float32_weights``, ``added_modules``, ``empty_ranges``, ``small_gradients`` and ``missing_steps`` are the warnings
that conversion, training and evaluation give.

The trade-offs: a recorded step is slower, as every tensor is rounded a second time to be compared. Record every tenth
step, say. What a compiled model computes is not seen: recording works in eager mode.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.diagnostics.recording import Recording as Recording
    from cpt_extras.diagnostics.recording import record as record
    from cpt_extras.diagnostics.uncounted import (
        uncounted_functions as uncounted_functions,
    )
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
