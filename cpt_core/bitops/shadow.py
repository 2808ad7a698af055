"""Running a copy of a model, without data where shapes are enough, and leaving a model as it was."""

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
    """Return a copy of a model in float32 that nobody counts, on the ``meta`` device if asked for.

    Raises:
        ValueError: when the model holds something that cannot be copied, or is sharded.
    """
    extensions.services("processes").check_unsharded(model, "count and check")
    # a tensor that the model keeps from its last forward pass has a history, with which it cannot be copied
    cached = [
        t
        for m in model.modules()
        for value in vars(m).values()
        for t in tensors_in(value)
        if t.grad_fn
    ]
    memo: dict[int, Any] = {id(t): detached_copy(t, on_meta) for t in cached}
    try:
        shadow = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as problem:
        raise ValueError(
            f"cannot copy {type(model).__name__}, and operations are counted on a copy: {problem}; remove what the "
            "model keeps from an earlier forward pass, or count while it trains, with BitOpsLedger"
        ) from problem
    for module in shadow.modules():
        module._backward_hooks, module._backward_pre_hooks = (
            {},
            {},
        )  # the copy's gradients are nobody's
        precision = precision_of(module)
        if precision is not None:
            precision.set_bits(None, None)
    return shadow.to("meta") if on_meta else shadow


@contextmanager
def preserve_state(model: nn.Module, inputs: Any = ()) -> Iterator[None]:
    """Run eager code with gradients, and put the state of a model, and random numbers, back afterwards."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    precisions = [p for p in map(precision_of, modules) if p is not None]
    modules += [
        p for p in precisions if all(p is not m for m in modules)
    ]  # of modules without weights
    buffers = [(m._buffers, dict(m._buffers)) for m in modules]
    tensors = [t for _, own in buffers for t in own.values() if t is not None]
    tensors += [t for p in precisions for t in (p.noise_key, *p.ranges().values())]
    parameters = [
        p
        for m in modules
        for p in m._parameters.values()
        if p is not None and p.is_leaf
    ]
    values = [(t, t.detach().clone()) for t in tensors + parameters if not is_lazy(t)]
    gradients = [(p, p.grad) for p in parameters]
    devices = {
        t.device.index or 0 for t in (*parameters, *tensors_in(inputs)) if t.is_cuda
    }
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        for p in parameters:
            p.grad = None
        forked = (
            sorted(devices) if torch.cuda.is_initialized() else []
        )  # else nothing has drawn there yet
        with (
            torch.random.fork_rng(forked),
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for p, gradient in gradients:
            p.grad = gradient
        for own, before in buffers:
            own.update(before)
        with torch.no_grad():
            for tensor, value in values:
                if not (tensor.is_meta or torch.equal(tensor, value)):
                    tensor.copy_(value)
