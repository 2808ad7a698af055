"""Quantised training of any model: quantisers, layers, conversion in place, scheduler.  Paper: figure 1."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_core.formats.quantizer import Quantizer as Quantizer
    from cpt_core.quantization.quantizers import QUANTIZERS as QUANTIZERS
else:
    from cpt_core.public import lazily

    __all__, __getattr__, __dir__ = lazily(__name__)
