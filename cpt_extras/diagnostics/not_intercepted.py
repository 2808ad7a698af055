"""Matmuls and convolutions that no handler intercepted, for ``check``.

``NotInterceptedCounter`` counts them, ``count_forward`` those of a forward pass; ``macs_of`` returns the
multiply-accumulates of an operator of torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cpt_core.quantization.op_interception import HOOK, QuantizedOpsMode


class NotInterceptedCounter(TorchDispatchMode):
    """Mode that counts the matmuls and convolutions that torch executes outside of the handlers of the model's mode.

    Inside handlers torch functions are disabled, which distinguishes their operations from others. A backward pass is
    identified by its autograd node: a node that was made inside a handler belongs to an intercepted operation.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, total: Counter[Any]) -> None:
        """Add the MACs of ``model`` to ``total`` when the mode ends."""
        super().__init__()
        self.macs: Counter[tuple[str, str, bool, bool, bool]] = Counter()
        self._total = total
        modes = (getattr(m, HOOK).mode for m in model.modules() if hasattr(m, HOOK))
        # None for a model that is not converted
        self._mode: QuantizedOpsMode | None = next(modes, None)
        # by sequence number of an autograd node: its module, and whether it was made in a handler
        self._origins: dict[int, tuple[str, bool]] = {}

    def __exit__(self, *exception: Any) -> None:
        """End the mode."""
        self._total.update(self.macs)
        super().__exit__(*exception)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        stack = [] if self._mode is None else self._mode.running.stack
        # a module that runs in a backward pass recomputes its forward pass
        node = None if stack else torch._C._current_autograd_node()
        if node is None:
            is_intercepted = not torch._C._is_torch_function_enabled()
            layer = stack[-1].interception.name if stack else ""
            last_node = torch.autograd._get_sequence_nr() - 1
            self._origins.setdefault(last_node, (layer, is_intercepted))
        else:
            layer, is_intercepted = self._origins.get(node._sequence_nr(), ("", False))
            function = getattr(type(node), "_forward_cls", None)
            # the backward pass of an autograd.Function of this project, or of a user
            if function is not None and not function.__module__.startswith("torch."):
                own_packages = ("cpt_core.", "cpt_extras.")
                is_intercepted = function.__module__.startswith(own_packages)
        output = func(*args, **kwargs)
        if not is_intercepted:
            macs = macs_of(func, args, kwargs, output)
            if macs:
                self.macs[layer, _name(func), node is not None, False, False] += macs
        return output


@contextmanager
def count_forward(model: nn.Module, macs: Counter[str]) -> Iterator[None]:
    """Add the MACs of a forward pass that are not intercepted to ``macs``, layer -> MACs."""
    total: Counter[Any] = Counter()
    with NotInterceptedCounter(model, total):
        yield
    for (layer, *_), count in total.items():
        macs[layer] += count


def _name(func: Any) -> str:
    name = func.name() if isinstance(func, HigherOrderOperator) else func._schema.name
    return str(name).removeprefix("aten::").removesuffix("_")


def macs_of(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Return the multiply-accumulates of an operator of torch; 0 for one that does not multiply."""
    formula = OPERATOR_MACS.get(_name(func))
    if formula is not None:
        return int(formula(args, output))
    if isinstance(func, HigherOrderOperator):
        return 0
    # torch counts addmm, and not addmm_
    out_of_place = getattr(torch.ops.aten, _name(func), None)
    flops = flop_registry.get(func._overloadpacket) or flop_registry.get(out_of_place)
    return 0 if flops is None else int(flops(*args, **kwargs, out_val=output)) // 2


def _attention_macs(args: Any, output: Any) -> int:
    query, key, value = args[:3]
    score_macs = query.numel() * key.shape[-2]
    num_queries = query.numel() // query.shape[-1]
    output_macs = num_queries * value.shape[-2] * value.shape[-1]
    return int(score_macs + output_macs)


def _row_sum_macs(args: Any, output: Any) -> int:
    """Return the MACs of an operator that sums over the last dimension of its first operand."""
    return int(output.numel() * args[0].shape[-1])


# of operators that torch's own counter does not know: function of arguments and output
OPERATOR_MACS = {
    **dict.fromkeys(
        ("linear", "_euclidean_dist", "_cdist_forward", "mkldnn::_linear_pointwise"),
        _row_sum_macs,
    ),
    **dict.fromkeys(("mv", "dot", "vdot"), lambda args, output: args[0].numel()),
    "addmv": lambda args, output: args[1].numel(),
    "_cdist_backward": lambda args, output: args[0].numel() * args[1].shape[-1],
    "conv_tbc": lambda args, output: output.numel() * args[1][..., 0].numel(),
    # small matrices take five products
    "linalg_matrix_exp": lambda args, output: 5 * output.numel() * output.shape[-1],
    "_sparse_addmm": lambda args, output: args[1]._nnz() * args[2].shape[-1],
    "torchvision::deform_conv2d": lambda args, output: (
        output.numel() * args[1][0].numel()
    ),
    "_trilinear": lambda args, output: (
        math.prod(args[1].shape) * (args[0].numel() // max(1, args[0].shape[-1]))
    ),
    "flex_attention": _attention_macs,
}
