"""How many bits at which optimizer step, what it costs, a schedule for a budget.  Paper: sections 3-5. No torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.schedules.profiles import PROFILES as PROFILES
    from cpt_core.schedules.profiles import Cosine as Cosine
    from cpt_core.schedules.profiles import Exponential as Exponential
    from cpt_core.schedules.profiles import Linear as Linear
    from cpt_core.schedules.profiles import Rex as Rex
    from cpt_core.schedules.profiles import Warped as Warped
    from cpt_core.schedules.schedule import TableSchedule as TableSchedule
else:
    from cpt_core.public import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
