"""The paper's figures, from schedules and from result rows.  Needs matplotlib, not torch.

Savings groups keep their colour everywhere; what is printed on an axis is always relative to static q_max.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from cpt_core.analysis.quality_cost import figure_3
from cpt_core.sweeps.stores import Row


def figure_4(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw mean average precision against cost for object detection; arguments as for ``figure_3``.

    Paper: figure 4.
    """
    return figure_3(rows, **options)


def figure_6(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw accuracy against cost for node classification; arguments as for ``figure_3``.

    Paper: figure 6.
    """
    return figure_3(rows, **options)


def figure_7(rows: Iterable[Row], **options: Any) -> Figure:
    """Draw perplexity or accuracy against cost for language tasks; arguments as for ``figure_3``.

    Paper: figure 7.
    """
    return figure_3(rows, **options)
