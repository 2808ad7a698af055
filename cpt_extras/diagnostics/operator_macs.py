"""Multiply-accumulates of operators that torch's own counter does not know, for ``check``."""

from __future__ import annotations

import math
from typing import Any

from cpt_core.bitops.check import OPERATOR_MACS


def _attention_macs(args: Any, output: Any) -> int:
    query, key, value = args[:3]
    return int(query.numel() * key.shape[-2] + query.numel() // query.shape[-1] * value.shape[-2] * value.shape[-1])


def _rows_macs(args: Any, output: Any) -> int:
    """Return those of sums over the last dimension of the first operand."""
    return int(output.numel() * args[0].shape[-1])


OPERATOR_MACS.update(
    {
        **dict.fromkeys(("linear", "_euclidean_dist", "_cdist_forward", "mkldnn::_linear_pointwise"), _rows_macs),
        **dict.fromkeys(("mv", "dot", "vdot"), lambda args, output: args[0].numel()),
        "addmv": lambda args, output: args[1].numel(),
        "_cdist_backward": lambda args, output: args[0].numel() * args[1].shape[-1],
        "conv_tbc": lambda args, output: output.numel() * args[1][..., 0].numel(),
        "linalg_matrix_exp": lambda args, output: 5 * output.numel() * output.shape[-1],  # of small matrices
        "_sparse_addmm": lambda args, output: args[1]._nnz() * args[2].shape[-1],
        "torchvision::deform_conv2d": lambda args, output: output.numel() * args[1][0].numel(),
        "_trilinear": lambda args, output: math.prod(args[1].shape) * (args[0].numel() // max(1, args[0].shape[-1])),
        "flex_attention": _attention_macs,
    }
)
