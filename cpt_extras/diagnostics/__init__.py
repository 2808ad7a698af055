"""Look at a model and its training: which products ran quantised, and what rounding did."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.diagnostics.recording import Recording as Recording
    from cpt_extras.diagnostics.recording import record as record
    from cpt_extras.diagnostics.uncounted import uncounted_functions as uncounted_functions
else:
    from cpt_core.lazy_imports import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
