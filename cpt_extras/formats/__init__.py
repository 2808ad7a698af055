"""Number formats as values, ladders of them for schedules to climb, and what a product of two formats costs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.formats.costs import COSTS as COSTS
    from cpt_extras.formats.costs import Cost as Cost
    from cpt_extras.formats.costs import Operands as Operands
else:
    from cpt_core.lazy_imports import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
