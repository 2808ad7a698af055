"""Which bits, and when: a try of all that matters, range test, sensitivity, allocation, schedules of one cost."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.search.allocation import allocate as allocate
    from cpt_extras.search.precision_search import try_precision as try_precision
    from cpt_extras.search.range_test import RangeTestWarning as RangeTestWarning
    from cpt_extras.search.range_test import precision_range_test as precision_range_test
    from cpt_extras.search.range_test_result import PrecisionRange as PrecisionRange
    from cpt_extras.search.search_result import Tried as Tried
    from cpt_extras.search.sensitivity_analysis import sensitivity as sensitivity
    from cpt_extras.search.sensitivity_result import Sensitivity as Sensitivity
    from cpt_extras.search.solved_schedules import Warped as Warped
else:
    from cpt_core.lazy_imports import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
