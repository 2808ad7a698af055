"""What training costs in bit operations: a plan before it runs, a ledger of what ran.  Paper: section 4.1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.bitops.plan import BitOpsPlan as BitOpsPlan
else:
    from cpt_core.public import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
