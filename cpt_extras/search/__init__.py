"""Choose bits: precision search, range test, sensitivity, allocation, solver.  Mostly beyond the paper.

The problem: the paper leaves three choices to the user: q_min, the schedule, and what to spend.

- ``precision_search`` (``try_precision``) trains your own loop at several precisions within a time budget, and reports
  the least bits that keep quality, and whether a schedule beats a static precision of the same cost.
- ``range_test`` finds q_min as section 3.3 of the original CPT paper does.
- ``sensitivity_analysis`` measures what a bit less costs, by part of training, layer and role; ``allocation`` spends a
  budget by it, in ``layered`` schedules or ``role_schedules``.
- ``solver`` bends a schedule until it costs what it may (``solved_schedules``).
- ``custom_schedules`` are made from a table or a function.

All of them train the same model again and again from one start (``restartable``). Results are values that print, draw
and store themselves; those need no torch.
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
