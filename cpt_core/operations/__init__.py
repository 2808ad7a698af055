"""Functions of torch that few models use: ``contractions`` and ``recurrences``, which register themselves."""

from cpt_core.operations import recurrences as recurrences
from cpt_core.operations.contractions import register_library_operators as register_library_operators
