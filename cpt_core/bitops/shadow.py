"""Copies of a model for counting, and a context manager that restores a model afterwards.

``meta_copy`` copies a model, on the ``meta`` device if shapes are enough.  ``preserve_state`` restores buffers,
parameters, gradients and random states after a run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cpt_core import extensions
from cpt_core.bitops.counting import detached_copy, tensors_in
from cpt_core.quantization.convert import precision_of


def meta_copy(model: nn.Module, on_meta: bool) -> nn.Module:
    """Return a copy of a model without bits or backward hooks, on the ``meta`` device with ``on_meta``.

    Raises:
        ValueError: when the model holds something that cannot be copied, or is sharded.
    """
    extensions.services("processes").check_unsharded(model, "count and check")
    # a tensor that a module stored in its last forward pass has an autograd history and cannot be copied
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            for tensor in tensors_in(value):
                if tensor.grad_fn:
                    memo[id(tensor)] = detached_copy(tensor, on_meta)
    try:
        shadow = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as problem:
        raise ValueError(
            f"cannot copy {type(model).__name__}, and operations are counted on a copy: {problem}; remove what the "
            "model keeps from an earlier forward pass, or count while it trains, with BitOpsLedger"
        ) from problem
    for module in shadow.modules():
        # hooks must not receive gradients of the copy
        module._backward_hooks, module._backward_pre_hooks = {}, {}
        precision = precision_of(module)
        if precision is not None:
            precision.set_bits(None, None)
            precision.issued_warnings = None
    return shadow.to("meta") if on_meta else shadow


@contextmanager
def preserve_state(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Run a block in eager mode with gradients, then restore model and random states."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    precisions = [p for p in map(precision_of, modules) if p is not None]
    # precisions of modules without weights are no child modules
    for precision in precisions:
        if all(precision is not module for module in modules):
            modules.append(precision)

    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    tensors = [
        tensor
        for _, values in buffers
        for tensor in values.values()
        if tensor is not None
    ]
    for precision in precisions:
        tensors += [precision.noise_key, *precision.ranges().values()]
    parameters = [
        parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None and parameter.is_leaf
    ]
    values = [
        (tensor, tensor.detach().clone())
        for tensor in tensors + parameters
        if not is_lazy(tensor)
    ]
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    cuda_devices = {
        tensor.device.index or 0
        for tensor in (*parameters, *tensors_in(inputs))
        if tensor.is_cuda
    }
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        for parameter in parameters:
            parameter.grad = None
        # before CUDA is initialised nothing has been drawn there
        forked = sorted(cuda_devices) if torch.cuda.is_initialized() else []
        with (
            torch.random.fork_rng(forked),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module_buffers, former_buffers in buffers:
            module_buffers.update(former_buffers)
        with torch.no_grad():
            for tensor, value in values:
                if not (tensor.is_meta or torch.equal(tensor, value)):
                    tensor.copy_(value)
