"""Which bits, and when: a try of all that matters, range test, sensitivity, allocation, schedules of one cost."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.choosing.allocation import allocate as allocate
    from cpt_core.choosing.measuring import sensitivity as sensitivity
    from cpt_core.choosing.precision_range import PrecisionRange as PrecisionRange
    from cpt_core.choosing.range_test import RangeTestWarning as RangeTestWarning
    from cpt_core.choosing.range_test import precision_range_test as precision_range_test
    from cpt_core.choosing.sensitivities import Sensitivity as Sensitivity
    from cpt_core.choosing.solved_schedules import Warped as Warped
    from cpt_core.choosing.tried import Tried as Tried
    from cpt_core.choosing.trying import try_precision as try_precision
else:
    from cpt_core.public import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
