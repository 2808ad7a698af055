"""Search for precisions and schedules: precision search, range test, sensitivity, allocation, solver.

The problem: the paper leaves three choices to the user: q_min, the schedule, and the budget. Each depends on the model,
the data and the length of the training, so that no table of defaults can make it. Mostly beyond the paper.

The parts, each usable alone:

- ``precision_search`` (``try_precision``) trains a model with the user's own loop at several precisions within a time
  limit. Its ``search_result`` says which fewest bits keep the quality, and whether a schedule beats static precision
  of equal cost; ``search_loop`` chooses what to train next.
- ``range_test`` finds q_min as section 3.3 of the original CPT paper does.
- ``sensitivity_analysis`` measures the quality lost by one bit less, by part of the training, layer and role;
  ``sensitivity_estimate`` estimates it from gradients. ``allocation`` turns a ``sensitivity_result`` and a budget into
  the schedule that loses least: a ``layered`` schedule, ``role_schedules``, or both.
- ``solver`` warps the profile of a cyclic schedule until it costs a budget (``solved_schedules``).
- ``custom_schedules`` are schedules from a table or a function.

The design: everything that trains, trains one model again and again from one start (``restartable``): equal weights,
batches and random numbers, so that only the bits differ and differences are taken seed by seed. Results are values that
print, draw and store themselves; results, schedules and solver need no torch.

The trade-offs: a search costs a dozen short trainings or more, and its answer holds for trainings of that length. The
intervals are those of single comparisons: a clear difference is a good hint, not a test.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.search.allocation import allocate as allocate
    from cpt_extras.search.precision_search import try_precision as try_precision
    from cpt_extras.search.range_test import RangeTestWarning as RangeTestWarning
    from cpt_extras.search.range_test import (
        precision_range_test as precision_range_test,
    )
    from cpt_extras.search.range_test_result import PrecisionRange as PrecisionRange
    from cpt_extras.search.search_result import (
        PrecisionSearchResult as PrecisionSearchResult,
    )
    from cpt_extras.search.sensitivity_analysis import sensitivity as sensitivity
    from cpt_extras.search.sensitivity_result import Sensitivity as Sensitivity
    from cpt_extras.search.solved_schedules import Warped as Warped
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
