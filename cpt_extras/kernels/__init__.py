"""The quantised operator and its backends: plain torch, C++ on a CPU, Triton on a GPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.kernels.backend import Backend as Backend
else:
    from cpt_core.lazy_imports import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
