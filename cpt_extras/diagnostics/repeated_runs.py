"""Runs of a model from one state: the same buffers, random numbers and bits before each, in float32 or quantised."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpt_core.bitops.counting import copy_inputs, tensors_in
from cpt_core.quantization.active_bits import AFFINE_GRIDS
from cpt_core.quantization.convert import all_precisions
from cpt_core.quantization.op_interception import HOOK, OP_HANDLERS, QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.schedule import RoleLevels
from cpt_extras.diagnostics.exact_sums import ExactSums
from cpt_extras.kernels.backend import reference

LEVELS = (
    4,
    3,
    5,
    6,
    2,
    8,
    7,
    *range(9, 24),
)  # the first that all layers can take: few bits show much


@dataclass(eq=False)
class LayerCall:
    """A call of a module: its floating-point inputs and outputs.

    Attributes:
        caller: the call inside of which it ran; None for the model itself.
    """

    layer: str
    caller: LayerCall | None
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class RepeatedRuns:
    """Runs a model in evaluation mode again and again; ``as_it_was`` has to put it back afterwards.

    Attributes:
        level: bits of the quantised runs.
        filled: names of layers whose running ranges were empty, and are filled from the inputs at hand.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], undo: ExitStack
    ) -> None:
        """Prepare a model; ``undo`` puts back what ``as_it_was`` does not."""
        self.model = model
        self.precisions = all_precisions(model)
        level = next(
            (q for q in LEVELS if all(_takes(p, q) for p in self.precisions.values())),
            None,
        )
        undo.enter_context(simulated(self.precisions, on_affine_grids=level is None))
        self.level = LEVELS[0] if level is None else level
        undo.enter_context(_evaluation_mode(model, self.precisions))
        undo.enter_context(reference())
        self._random_states = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._torch_state = torch.get_rng_state()
        self._devices = sorted(
            {
                t.device.index or 0
                for t in (*model.parameters(), *tensors_in(inputs))
                if t.is_cuda
            }
        )
        self._cuda_states = [
            torch.cuda.get_rng_state(device) for device in self._devices
        ]
        self.filled = self._fill_ranges(inputs)
        modules = [*model.modules(), *self.precisions.values()]
        self._buffers = [
            (
                m._buffers,
                {
                    name: (t, None if t is None else t.clone())
                    for name, t in m._buffers.items()
                },
            )
            for m in modules
            if not isinstance(m, torch.jit.ScriptModule)
        ]

    # --- runs -----------------------------------------------------------------------------------------------------

    def outputs(
        self,
        inputs: tuple[Any, ...],
        is_quantized: bool,
        calls: list[LayerCall] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> list[Tensor]:
        """Return the floating-point outputs of a forward pass; ``layers`` collects those of all modules.

        ``call``: what is called with the inputs instead of the model, and may call it several times.
        """
        self._reset()
        level: int | str = self.level if is_quantized else "float"
        recorded = nullcontext() if calls is None else self._recorded(calls)
        with (
            precision(self.model, level, level),
            torch.no_grad(),
            recorded,
            ExactSums(),
        ):
            return floating((call or self.model)(*copy_inputs(inputs, False, {})))

    def outputs_relaid(
        self, inputs: tuple[Any, ...], is_quantized: bool, calls: Any = None
    ) -> list[Tensor]:
        """Return the outputs where all operands that are no weights have another memory layout."""
        mode = next(
            getattr(m, HOOK).mode for m in self.model.modules() if hasattr(m, HOOK)
        )
        vars(mode)["run_function"] = partial(_run_relaid, mode, mode.run_function)
        try:
            return self.outputs(inputs, is_quantized, calls)
        finally:
            del vars(mode)["run_function"]

    def gradients(
        self,
        inputs: tuple[Any, ...],
        is_quantized: bool,
        is_checkpointed: bool,
        calls: list[LayerCall] | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs, and the gradients of all parameters by name, of a forward and a backward pass."""
        self._reset()
        level: int | str = self.level if is_quantized else "float"
        parameters = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        call = (
            partial(checkpoint, self.model, use_reentrant=False)
            if is_checkpointed
            else self.model
        )
        recorded = nullcontext() if calls is None else self._recorded(calls)
        with precision(self.model, level, level), torch.enable_grad(), recorded:
            outputs = floating(call(*copy_inputs(inputs, False, {})))
            losses = [(y * _pattern(y)).sum() for y in outputs if y.requires_grad]
            gradients: tuple[Tensor | None, ...] = ()
            if losses and parameters:
                gradients = torch.autograd.grad(
                    losses, list(parameters.values()), allow_unused=True
                )
        by_name = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        for name, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None:
                by_name[name] = gradient
        return by_name

    # --- state ----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Put buffers and random numbers back to where they were before the first run."""
        random.setstate(self._random_states[0])
        np.random.set_state(self._random_states[1])  # noqa: NPY002
        torch.set_rng_state(self._torch_state)
        for device, state in zip(self._devices, self._cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)
        for buffers, before in self._buffers:
            for name, (tensor, value) in before.items():
                buffers[name] = tensor
                if (
                    tensor is not None
                    and value is not None
                    and not torch.equal(tensor, value)
                ):
                    tensor.copy_(value)

    def _fill_ranges(self, inputs: tuple[Any, ...]) -> list[str]:
        """Fill empty running ranges with those of the inputs; return the names of their layers."""
        empty = {
            name: p
            for name, p in self.precisions.items()
            if any(float(r[2]) == 0 for r in p.ranges().values())
        }
        if not empty:
            return []
        modules = dict(self.model.named_modules())
        for name, p in empty.items():
            modules[name].training = p.training = True
        with precision(self.model, self.level, self.level), torch.no_grad():
            self.model(*copy_inputs(inputs, False, {}))
        filled = []
        for name, p in empty.items():
            for running in p.ranges().values():
                if float(running[2]) > 0:
                    running.div_(
                        running[2].clone()
                    )  # as if it had been seen long enough
                    filled.append(name)
            modules[name].training = False
            p.train(False)
        return list(dict.fromkeys(filled))

    @contextmanager
    def _recorded(self, calls: list[LayerCall]) -> Iterator[None]:
        """Collect the calls of all modules inside the block, in the order in which they end."""
        running: list[LayerCall] = []

        def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = [x.detach().clone() for x in floating((args, kwargs))]
            running.append(LayerCall(name, running[-1] if running else None, inputs))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            calls.append(running.pop())
            calls[-1].outputs.extend(y.detach().clone() for y in floating(output))

        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if not isinstance(module, (torch.jit.ScriptModule, LayerPrecision)):
                    hooks.enter_context(
                        module.register_forward_pre_hook(
                            partial(begin, name), with_kwargs=True
                        )
                    )
                    hooks.enter_context(module.register_forward_hook(end))
            yield


def floating(output: Any) -> list[Tensor]:
    """Return the real floating-point tensors of an output, complex ones as pairs."""
    tensors = [
        torch.view_as_real(y) if y.is_complex() else y
        for y in tensors_in(output)
        if y.layout == torch.strided
    ]
    return [y for y in tensors if y.is_floating_point() and y.numel()]


def relaid(x: Tensor) -> Tensor:
    """Return the same numbers in another memory layout: the last two dimensions swapped."""
    if x.dim() < 2 or x.layout != torch.strided:
        return x
    is_swapped = x.stride(-2) == 1 and x.shape[-2] > 1 and x.stride(-1) != 1
    return x.contiguous() if is_swapped else x.mT.contiguous().mT


def _run_relaid(
    mode: QuantizedOpsMode,
    run_function: Any,
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    if function not in OP_HANDLERS:
        return run_function(function, args, kwargs)

    def other_layout(x: Any) -> Any:
        is_activation = (
            isinstance(x, Tensor) and x.is_floating_point() and not mode.is_weight(x)
        )
        return relaid(x) if is_activation else x

    with torch._C.DisableTorchFunction():
        args = tuple(other_layout(x) for x in args)
        kwargs = {name: other_layout(x) for name, x in kwargs.items()}
    return run_function(function, args, kwargs)


def _pattern(y: Tensor) -> Tensor:
    """Return weights of a sum whose gradient is not the same everywhere."""
    return (
        torch.arange(1, y.numel() + 1, device=y.device, dtype=y.dtype)
        .cos()
        .reshape(y.shape)
    )


def _takes(layer: LayerPrecision, level: int) -> bool:
    try:
        layer.check_levels(RoleLevels(level, level, level, level))
    except ValueError:
        return False
    return True


@contextmanager
def _evaluation_mode(
    model: nn.Module, precisions: Mapping[str, LayerPrecision]
) -> Iterator[None]:
    """Evaluate inside the block, with gradients rounded to nearest."""
    modules = [m for m in model.modules() if not isinstance(m, LayerPrecision)]
    modes = [(m, m.training) for m in modules]
    layers = [
        (p, p.training, p.calibrated, p._roles, p.active_levels, p.is_fixed)
        for p in precisions.values()
    ]
    for m in modules:
        m.training = False
    for p in precisions.values():
        p.is_fixed = True  # schedulers wait
        p.train(False)
        p._roles = tuple((role, replace(q, rounding="nearest")) for role, q in p._roles)
        p.active_levels = p.active_levels
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
        for p, training, calibrated, roles, in_force, fixed in layers:
            p.training, p.calibrated, p._roles, p.is_fixed = (
                training,
                calibrated,
                roles,
                fixed,
            )
            p.active_levels = in_force


@contextmanager
def simulated(
    precisions: Mapping[str, LayerPrecision], on_affine_grids: bool = True
) -> Iterator[None]:
    """Simulate inside the block, on the paper's grids if asked for: a ladder may lack a level."""
    before = [
        (p, p.execution, p.grids, p.active_levels, p.zeros_unchecked, p.issued_warnings)
        for p in precisions.values()
    ]
    for p, *_ in before:
        p.issued_warnings = None
        p.execution, p.grids, p.active_levels = (
            "simulated",
            AFFINE_GRIDS if on_affine_grids else p.grids,
            None,
        )
    try:
        yield
    finally:
        for p, execution, grids, levels, zeros_unknown, given_warnings in before:
            p.execution, p.grids, p.active_levels = execution, grids, levels
            p.zeros_unchecked, p.issued_warnings = (
                zeros_unknown,
                given_warnings,
            )  # a warning is still to come
