"""Where a bit matters, estimated from one training: gradients and ranges instead of further runs.  Beyond the paper.

An operand x of a layer, rounded at q bits, gets an error of variance range**2 * 4**-q / 12. To second order, and with
the squared gradient in place of the curvature (the Fisher information of a likelihood), the loss of a step grows by
g**2 * range**2 * 4**-q / 24, summed over the elements of x: the measure FIT (Zandonati et al., arXiv 2210.08502), which
takes weights and activations alike; HAWQ (Dong et al., arXiv 1911.03852) has the curvature itself. A step moves the
weights by its learning rate, so we weigh each step with it:

    w(t, l) = lr_t * sum over the inputs and weights of l of g**2 * range**2 / 12

with the rate of the weights' own group. That is a heuristic: it knows nothing of how later steps undo an error, which
measured responses do. Biases, hidden states, what deeper layers of an LSTM get, inputs that need no gradient (those of
the first layer) and what attention and other modules multiply besides parameters that are called weights are not in it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpt_core.quantization.convert import precision_of
from cpt_extras.kernels.operators import range_of


@contextmanager
def gradients_recorded(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, float]
) -> Iterator[None]:
    """Add the estimate of every quantised layer to ``found`` for the steps inside a ``with`` block."""
    layers: dict[str, Any] = {
        name: m for name, m in model.named_modules() if precision_of(m) is not None
    }
    group_of = {
        id(p): group for group in optimizer.param_groups for p in group["params"]
    }
    hooks = ExitStack()

    @torch.no_grad()
    def add(name: str, role: str, weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        if x.numel() == 0:
            return
        width = range_of(x.detach(), layers[name].precision.quantizers[role].grid)[1]
        if role == "input_l0":  # a range at every step of an LSTM
            time = 1 if layers[name].batch_first and x.dim() == 3 else 0
            rest = [i for i in range(x.dim()) if i != time]
            width = x.amax(rest, keepdim=True) - x.amin(rest, keepdim=True)
        rate = float(group_of.get(id(weight), optimizer.param_groups[0])["lr"])
        found[name] += rate * float((gradient.float() * width).square().sum()) / 12

    def inputs(
        role: str,
        name: str,
        weight: Tensor,
        layer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
                hooks.enter_context(
                    x.register_hook(partial(add, name, role, weight, x.detach()))
                )

    with hooks:
        for name, layer in layers.items():
            own = (
                "weight" in layer.precision.quantizers
            )  # else it is of no kind that has a role for its weights
            held = layer.named_parameters(recurse=False)
            weights = [
                p
                for key, p in held
                if (
                    key.startswith("weight") if own else "weight" in key and p.dim() > 1
                )
            ]
            for weight in weights:
                role = (
                    "weight"
                    if own
                    else "conv_weight"
                    if weight.dim() > 2
                    else "linear_weight"
                )
                if weight.requires_grad:
                    hooks.enter_context(
                        weight.register_hook(partial(add, name, role, weight, weight))
                    )
            role = next(
                (r for r in layer.precision.quantizers if r in ("input", "input_l0")),
                "",
            )
            if weights and role:
                seen = partial(inputs, role, name, weights[0])
                hooks.enter_context(
                    layer.register_forward_pre_hook(seen, with_kwargs=True)
                )
        yield
