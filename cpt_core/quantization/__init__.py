"""Quantised training of any model: quantisers, layers, conversion in place, scheduler.  Paper: figure 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.quantization.roles import QUANTIZERS as QUANTIZERS
    from cpt_core.quantization.roles import Quantizer as Quantizer
else:
    from cpt_core.public import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
