"""Diagnostics of a training: the operations that ran, and the rounding errors of its tensors.  Beyond the paper.

The problem: a plan of the cost says what should run, and a loss curve says little about why low precision hurts. A
model may bypass quantisation, keep stale bits, or let rounding connect samples that should be independent, and still
train.

The parts:

- ``ledger`` counts the bit operations of a training as they run, from the operations that the core reports;
  ``native_counting`` does so for models that are not converted, ``uncounted`` lists functions that no cost counts.
- ``check`` runs one step, lists the operations that are not quantised (``not_intercepted``), and tests ``invariances``:
  outputs that an input change does not move in float32 must not move at low precision. ``repeated_runs``,
  ``input_changes`` and ``exact_sums`` make the runs comparable.
- ``recording`` samples steps. For every rounded tensor ``rounding_stats`` sums up errors, zeros and clipped values on
  the device, per layer and role.
- ``float32_weights``, ``added_modules``, ``empty_ranges``, ``exact_zeros``, ``small_gradients`` and ``missing_steps``
  are the warnings of conversion, training and evaluation.

The design: diagnostics observe and never change a number of the training; a test compares the weights bit for bit. They
attach to the observers and reports of the core, and cost nothing when they are off.

The trade-offs: a recorded step is slower, as every tensor is rounded a second time to be compared; recording every
tenth step is usually enough. Compiled code is not observed: recording and counting work in eager mode.
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
