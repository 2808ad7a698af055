"""Repeated runs of a model from one state of buffers, random numbers and bits, in float32 or quantised.

``RepeatedRuns`` runs the model; ``LayerCall`` records the inputs and outputs of a module in such a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cpt_core.quantization.feature_axes import mark_of, set_mark
from cpt_core.quantization.op_interception import HOOK, OP_HANDLERS, QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import SavedBits, precision
from cpt_core.schedules.schedule import RoleLevels
from cpt_core.validation import ForwardInputs, run_forward
from cpt_extras.diagnostics.exact_sums import ExactSums
from cpt_extras.kernels.backend import reference

# of which the first that all layers support is taken: few bits make faults large
PREFERRED_LEVELS = (4, 3, 5, 6, 2, 8, 7, *range(9, 24))


@dataclass(eq=False)
class LayerCall:
    """A call of a module: its floating-point inputs and outputs.

    Attributes:
        layer: name of the module.
        caller: call of the module that called this one; None for the model itself.
        inputs: copies of its inputs.
        outputs: copies of its outputs.
    """

    layer: str
    caller: LayerCall | None
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class RepeatedRuns:
    """Runs a model in evaluation mode from one state; ``preserve_state`` has to restore it afterwards.

    Attributes:
        level: bits of the quantised runs.
        on_affine_grids: whether they use the paper's grids in place of the model's formats, of which no level fits all
            layers.
        filled: names of layers whose running ranges were empty, and were filled from the inputs.
    """

    def __init__(
        self, model: nn.Module, inputs: ForwardInputs, undo: ExitStack
    ) -> None:
        """Prepare a model; ``undo`` restores what ``preserve_state`` does not."""
        self.model = model
        self.precisions = all_precisions(model)
        layers = list(self.precisions.values())
        level = next((q for q in PREFERRED_LEVELS if _all_support(layers, q)), None)
        self.on_affine_grids = level is None
        undo.enter_context(simulated(self.precisions, self.on_affine_grids))
        self.level = PREFERRED_LEVELS[0] if level is None else level
        undo.enter_context(_evaluation_mode(model, self.precisions))
        undo.enter_context(reference())

        self._random_states = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._torch_state = torch.get_rng_state()
        tensors = [*model.parameters(), *tensors_in(inputs)]
        self._devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
        self._cuda_states = [torch.cuda.get_rng_state(d) for d in self._devices]
        self.filled = self._fill_ranges(inputs)
        self._buffers = [
            (module._buffers, _clone_buffers(module))
            for module in (*model.modules(), *layers)
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    # --- runs -----------------------------------------------------------------------------------------------------

    def outputs(
        self,
        inputs: ForwardInputs,
        is_quantized: bool,
        calls: list[LayerCall] | None = None,
        call: Callable[..., Any] | None = None,
    ) -> list[Tensor]:
        """Return the floating-point outputs of a forward pass.

        Args:
            inputs: arguments of the forward.
            is_quantized: run at ``level``; False runs in float32.
            calls: gets the calls of all modules, in the order in which they end.
            call: called with the inputs instead of the model, which it may call several times.
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
            return floating(
                run_forward(call or self.model, copy_inputs(inputs, False, {}))
            )

    def outputs_in_other_layout(
        self, inputs: ForwardInputs, is_quantized: bool, calls: Any = None
    ) -> list[Tensor]:
        """Return the outputs of a pass in which all operands except weights have another memory layout."""
        modules = [m for m in self.model.modules() if hasattr(m, HOOK)]
        mode = getattr(modules[0], HOOK).mode
        vars(mode)["run_function"] = partial(
            _run_in_other_layout, mode, mode.run_function
        )
        try:
            return self.outputs(inputs, is_quantized, calls)
        finally:
            del vars(mode)["run_function"]

    def outputs_and_gradients(
        self,
        inputs: ForwardInputs,
        is_quantized: bool,
        is_checkpointed: bool,
        calls: list[LayerCall] | None = None,
    ) -> dict[str, Tensor]:
        """Run forward and backward; return outputs and parameter gradients by name."""
        self._reset()
        level: int | str = self.level if is_quantized else "float"
        parameters = {
            name: p for name, p in self.model.named_parameters() if p.requires_grad
        }
        call: Any = self.model
        if is_checkpointed:
            call = partial(checkpoint, self.model, use_reentrant=False)
        recorded = nullcontext() if calls is None else self._recorded(calls)
        with precision(self.model, level, level), torch.enable_grad(), recorded:
            outputs = floating(run_forward(call, copy_inputs(inputs, False, {})))
            losses = [(y * _loss_weights(y)).sum() for y in outputs if y.requires_grad]
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
        """Restore buffers and random numbers of the time before the first run."""
        random.setstate(self._random_states[0])
        np.random.set_state(self._random_states[1])  # noqa: NPY002
        torch.set_rng_state(self._torch_state)
        for device, state in zip(self._devices, self._cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)
        for buffers, original_buffers in self._buffers:
            for name, (tensor, value) in original_buffers.items():
                buffers[name] = tensor
                if tensor is None or value is None:
                    continue
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    def _fill_ranges(self, inputs: ForwardInputs) -> list[str]:
        """Fill empty running ranges from the inputs; return the names of their layers."""
        with_empty_range = {
            name: p for name, p in self.precisions.items() if _has_empty_range(p)
        }
        if not with_empty_range:
            return []

        modules = dict(self.model.named_modules())
        for name, p in with_empty_range.items():
            modules[name].training = p.training = True
        with precision(self.model, self.level, self.level), torch.no_grad():
            run_forward(self.model, copy_inputs(inputs, False, {}))
        filled = []
        for name, p in with_empty_range.items():
            for running in p.ranges().values():
                weight = running[2].clone()
                if float(weight) > 0:
                    running.div_(weight)  # weight 1, as after a long training
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
                if isinstance(module, (torch.jit.ScriptModule, LayerPrecision)):
                    continue
                begin_call = partial(begin, name)
                hooks.enter_context(
                    module.register_forward_pre_hook(begin_call, with_kwargs=True)
                )
                hooks.enter_context(module.register_forward_hook(end))
            yield


def _clone_buffers(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return the buffers of a module with copies of them, by name."""
    clones: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for name, buffer in module._buffers.items():
        clones[name] = (buffer, None if buffer is None else buffer.clone())
    return clones


def _has_empty_range(precision: LayerPrecision) -> bool:
    """Return whether a layer has a running range of weight 0."""
    return any(float(running[2]) == 0 for running in precision.ranges().values())


def floating(output: Any) -> list[Tensor]:
    """Return the real floating-point tensors of an output, complex ones as pairs."""
    tensors = [
        torch.view_as_real(y) if y.is_complex() else y
        for y in tensors_in(output)
        if y.layout == torch.strided
    ]
    return [y for y in tensors if y.is_floating_point() and y.numel()]


def change_layout(x: Tensor) -> Tensor:
    """Return a tensor with the last two dimensions swapped in memory."""
    if x.dim() < 2 or x.layout != torch.strided:
        return x
    is_swapped = x.stride(-2) == 1 and x.shape[-2] > 1 and x.stride(-1) != 1
    return x.contiguous() if is_swapped else x.mT.contiguous().mT


def _run_in_other_layout(
    mode: QuantizedOpsMode,
    run_function: Any,
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    if function not in OP_HANDLERS:
        return run_function(function, args, kwargs)

    def other_layout(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if mode.is_weight(x) or mode.is_constant(x):
            return x
        changed = change_layout(x)
        set_mark(changed, mark_of(x))
        return changed

    with torch._C.DisableTorchFunction():
        args = tuple(other_layout(x) for x in args)
        kwargs = {name: other_layout(x) for name, x in kwargs.items()}
    return run_function(function, args, kwargs)


def _loss_weights(y: Tensor) -> Tensor:
    """Return weights of a sum over ``y`` that give its elements different gradients."""
    indices = torch.arange(1, y.numel() + 1, device=y.device, dtype=y.dtype)
    return indices.cos().reshape(y.shape)


def _all_support(layers: Sequence[LayerPrecision], level: int) -> bool:
    """Return whether all layers have formats at a level."""
    levels = RoleLevels(level, level, level, level)
    try:
        for layer in layers:
            layer.check_levels(levels)
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
        (p, p.training, p.filled_roles, p._roles, p.grids, SavedBits.current(p))
        for p in precisions.values()
    ]
    for m in modules:
        m.training = False
    for p in precisions.values():
        p.is_fixed = True  # no scheduler changes the bits
        p.train(False)
        p._roles = tuple((role, replace(q, rounding="nearest")) for role, q in p._roles)
        p.grids = p.grids.to_nearest()
        p.active_levels = p.active_levels
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
        for p, training, filled_roles, roles, grids, saved in layers:
            p.training = training
            p.filled_roles = filled_roles
            p._roles = roles
            p.grids = grids
            saved.restore()


@contextmanager
def simulated(
    precisions: Mapping[str, LayerPrecision], on_affine_grids: bool = True
) -> Iterator[None]:
    """Run layers as a simulation inside the block, by default on the paper's grids: a ladder may lack a level."""
    former = [
        (p, p.execution, p.grids, p.active_levels, p.zeros_unchecked, p.issued_warnings)
        for p in precisions.values()
    ]
    for p in precisions.values():
        p.issued_warnings = None
        p.execution = "simulated"
        if on_affine_grids:
            p.grids = AFFINE_GRIDS
        p.active_levels = None
    try:
        yield
    finally:
        for p, execution, grids, levels, zeros_unchecked, issued_warnings in former:
            p.execution = execution
            p.grids = grids
            p.active_levels = levels
            # restored, so that a warning still to come is not lost
            p.zeros_unchecked = zeros_unchecked
            p.issued_warnings = issued_warnings
