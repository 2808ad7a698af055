"""Where products on codes are: a room of its own, ``cpt_core.codes``, opened when a layer is asked for them."""

from __future__ import annotations

from typing import Any

import torch

from cpt_core.checks import library

PRODUCTS = {
    "linear": "cpt_core.codes.layers:linear_on_codes",
    "conv2d": "cpt_core.codes.layers:conv2d_on_codes",
    "matmul": "cpt_core.codes.layers:product_on_codes",
    "lstm": "cpt_core.codes.lstm:cell_on_codes",
    "graph": "cpt_core.codes.graph_layers:product_on_codes",
    "aggregation": "cpt_core.codes.graph_layers:sum_on_codes",
}


@torch.compiler.disable
def on_codes(product: str, *operands: Any) -> Any:
    """Compute one of ``PRODUCTS``; the operands are those of its function."""
    return library(PRODUCTS[product], "")(*operands)
