"""Estimate of the sensitivity from the gradients and ranges of one training.  Beyond the paper.

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
    model: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, float]
) -> Iterator[None]:
    """Add the estimate of every quantised layer to ``sums`` in the steps inside a ``with`` block."""
    recorder = _GradientRecorder(model, optimizer, sums)
    with recorder.hooks:
        for name in recorder.layers:
            recorder.watch(name)
        yield


class _GradientRecorder:
    """Hooks on the weights and inputs of quantised layers that add up the estimate.

    Args:
        model: the converted model.
        optimizer: knows the learning rates.
        sums: of the estimate, by layer.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, float]
    ) -> None:
        self.sums = sums
        self.hooks = ExitStack()
        self.layers: dict[str, Any] = {
            name: m for name, m in model.named_modules() if precision_of(m) is not None
        }
        self.default_group = optimizer.param_groups[0]
        self.group_by_id: dict[int, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.group_by_id[id(parameter)] = group

    def watch(self, name: str) -> None:
        """Add hooks to the weights and the input of a layer."""
        layer = self.layers[name]
        roles = layer.precision.quantizers
        weights = _matmul_weights(layer)
        for weight in weights:
            if weight.requires_grad:
                role = _weight_role(layer, weight)
                add = partial(self._add, name, role, weight, weight)
                self.hooks.enter_context(weight.register_hook(add))

        input_role = next((r for r in roles if r in ("input", "input_l0")), "")
        if weights and input_role:
            watch_inputs = partial(self._watch_inputs, input_role, name, weights[0])
            hook = layer.register_forward_pre_hook(watch_inputs, with_kwargs=True)
            self.hooks.enter_context(hook)

    def _watch_inputs(
        self,
        role: str,
        name: str,
        weight: Tensor,
        layer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
                add = partial(self._add, name, role, weight, x.detach())
                self.hooks.enter_context(x.register_hook(add))

    @torch.no_grad()
    def _add(
        self, name: str, role: str, weight: Tensor, x: Tensor, gradient: Tensor
    ) -> None:
        """Add learning rate * sum(gradient**2 * range**2) / 12 of an operand ``x`` to the sum of its layer."""
        if x.numel() == 0:
            return

        layer = self.layers[name]
        if role == "input_l0":  # every step of an LSTM has its own range
            time = 1 if layer.batch_first and x.dim() == 3 else 0
            other_dims = [i for i in range(x.dim()) if i != time]
            width = x.amax(other_dims, keepdim=True) - x.amin(other_dims, keepdim=True)
        else:
            width = range_of(x.detach(), layer.precision.quantizers[role].grid)[1]
        rate = float(self.group_by_id.get(id(weight), self.default_group)["lr"])
        squares = float((gradient.float() * width).square().sum())
        self.sums[name] += rate * squares / 12


def _matmul_weights(layer: Any) -> list[nn.Parameter]:
    """List the parameters of a layer that are operands of its matmuls."""
    parameters = layer.named_parameters(recurse=False)
    if "weight" in layer.precision.quantizers:
        return [p for key, p in parameters if key.startswith("weight")]
    # an intercepted module has no role for its weights: biases and scales of norms are left out by their shape
    return [p for key, p in parameters if "weight" in key and p.dim() > 1]


def _weight_role(layer: Any, weight: Tensor) -> str:
    if "weight" in layer.precision.quantizers:
        return "weight"
    return "conv_weight" if weight.dim() > 2 else "linear_weight"
