"""Interception of models that run inside wrappers, compilers or checkpoints: a mode that replaces the core's.

- ``torch.func.functional_call`` puts plain tensors in the place of parameters: they are weights, too.
- ``DataParallel`` makes replicas of a model, whose layers have ranges and noise of their own.
- A forward pass that is interrupted, as from the keyboard, leaves modules on the stack: no hook runs then.
- Code that computes a weight from its parameters, and code that was compiled with its quantisation inside, run inside
  of modules, and are not to be quantised once more.
- Compilers meet the hooks of the model by themselves, outside of the code that they compile.
- Checkpoints of functions compute again when the module has ended, see ``recomputation``.

Frames of Python tell which code runs inside of which module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import _pop_mode, _push_mode

from cpt_core import extensions
from cpt_core.quantization.op_interception import (
    HOOK,
    Interception,
    QuantizedOpsMode,
    RunningModule,
    enter_module,
    leave_module,
    parameters_with_layers,
)
from cpt_core.quantization.precision import LayerPrecision
from cpt_extras.operations.recomputation import CheckpointedFunction, active_checkpoints

# code that computes a weight from its parameters
PARAMETRIZATION, SPECTRAL_NORM = (
    ParametrizationList.forward.__code__,
    SpectralNorm.__call__.__code__,
)
PLAIN_STATE = (
    None,
    True,
)  # of autograd: tensors are saved as they are, and gradients are on
# files of compiled code: what calls it, and what modules that are made of graphs have
COMPILED_RUNTIME = str(Path(torch.__file__).parent / "_functorch" / "aot_autograd.py")
GRAPH_FILES = "<eval_with_key>"


@dataclass(slots=True, eq=False)
class GuardedModule(RunningModule):
    """An entry of the stack of running modules.

    Attributes:
        frame: of Python, in which the module runs; None in compiled code.
        autograd_state: of torch when the module was entered, see ``_autograd_state``; None in compiled code.
        checkpoints: in which the module was entered.
        inner_state: of torch when the module last computed in a checkpoint of its own.
        inner_checkpoints: those, and ``checkpoints``.
        stand_ins: tensors in the place of parameters; None until they are wanted.
    """

    frame: Any
    autograd_state: Any
    checkpoints: tuple[CheckpointedFunction, ...] = ()
    inner_state: Any = None
    inner_checkpoints: tuple[CheckpointedFunction, ...] = ()
    stand_ins: list[tuple[Tensor, Interception]] | None = None


class GuardedMode(QuantizedOpsMode):
    """Interception mode that also handles replicas, interruptions, compiled code and checkpoints."""

    def enter(
        self, module: nn.Module, interception: Interception, frame: Any = None
    ) -> None:
        """Put a module on the stack, and switch the mode on where it is not the innermost one.

        Args:
            module: that begins to run.
            interception: what it knows.
            frame: in which it runs; None for the caller of the hook that calls this.
        """
        stack: list[Any] = self.running.stack
        if "_is_replica" in vars(module):
            interception = _with_own_precision(module, interception)
        if torch.compiler.is_compiling():
            entry = GuardedModule(
                module, interception, None, None, switched_on=not self.is_innermost()
            )
        else:
            frame = sys._getframe(2) if frame is None else frame
            self._drop_interrupted(frame)
            switches_on = not self.is_innermost()
            if not stack and DistributedDataParallel._active_ddp_module is not None:
                extensions.services("processes").share_ranges_of_active()
            state = _autograd_state()
            checkpoints = self._checkpoints_around(frame, state)
            entry = GuardedModule(
                module,
                interception,
                frame,
                state,
                checkpoints,
                switched_on=switches_on,
            )
            if interception.precision is not None:
                for checkpoint in checkpoints:
                    checkpoint.note(interception.precision)
        stack.append(entry)
        if entry.switched_on:
            self.__enter__()

    def _checkpoints_around(
        self, frame: Any, state: Any
    ) -> tuple[CheckpointedFunction, ...]:
        """Return the checkpoints in which a module is entered, in a frame and at a state of autograd."""
        stack: list[Any] = self.running.stack
        if not stack or stack[-1].frame is None:
            return (
                ()
                if state == PLAIN_STATE
                else active_checkpoints(self, None, frame, None)
            )
        return self._checkpoints_inside(stack[-1], frame, state)

    def _checkpoints_inside(
        self, entry: GuardedModule, frame: Any, state: Any
    ) -> tuple[CheckpointedFunction, ...]:
        """Return the checkpoints in which the forward of a module computes, in a frame and at a state of autograd."""
        if state == entry.autograd_state:
            return entry.checkpoints
        if state != entry.inner_state:
            inner = active_checkpoints(self, entry, frame, entry.frame)
            entry.inner_checkpoints = tuple(dict.fromkeys(entry.checkpoints + inner))
            # reentrant checkpoints, which switch gradients off, cannot be told from each other
            entry.inner_state = state if torch.is_grad_enabled() else None
        return entry.inner_checkpoints

    def leave(self, module: nn.Module) -> None:
        """Take a module off the stack; the one that switched the mode on switches it off."""
        stack: list[Any] = self.running.stack
        if not stack or stack[-1].module is not module:
            if not any(entry.module is module for entry in stack):
                return  # a hook failed before the module was entered
            while (
                stack[-1].module is not module
            ):  # the forward of another was interrupted
                self._drop()
        self._drop()

    def _drop(self) -> None:
        """Take the uppermost module off the stack."""
        entry: Any = self.running.stack.pop()
        if entry.switched_on:
            self._switch_off()

    def _drop_interrupted(self, frame: Any) -> None:
        """Remove modules whose forward was interrupted from the stack."""
        stack: list[Any] = self.running.stack
        while (
            stack
            and stack[-1].frame is not None
            and not _is_running(stack[-1].frame, frame)
        ):
            self._drop()

    def _switch_off(self) -> None:
        """Take the mode off the modes of this thread, also from below others."""
        if torch.compiler.is_compiling():
            self.__exit__(None, None, None)
            return
        above = []
        while torch._C._len_torch_function_stack():
            mode = _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def is_inside(self) -> bool:
        """Return whether code of a running module calls; an interrupted forward pass leaves the mode on."""
        stack: list[Any] = self.running.stack
        if not stack or stack[-1].frame is None or torch.compiler.is_compiling():
            return bool(stack)
        return _runs_in(stack[-1].frame, sys._getframe(2))

    def call_handler(
        self, handler: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Let a handler compute a function; say clearly which tensors of other classes it cannot serve."""
        try:
            return super().call_handler(handler, function, args, kwargs)
        except Exception as error:
            from cpt_extras.operations import unsupported_tensors  # seldom needed

            if not unsupported_tensors.belong_to_torch(self, error, args, kwargs):
                raise
            return None

    def run_inside(
        self,
        entry: RunningModule,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function as if it ran in the forward of a module."""
        self.enter(entry.module, entry.interception, sys._getframe())
        try:
            return function(*args, **kwargs)
        finally:
            self.leave(entry.module)

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is a weight, or stands in for one."""
        if super().is_weight(x):
            return True
        if torch.compiler.is_compiling():
            return False
        return any(tensor is x or tensor is x._base for tensor, _ in self._stand_ins())

    def find_owner(self, weight: Tensor) -> Interception | None:
        """Return the layer that holds a weight, or what stands in for one."""
        base = weight if weight._base is None else weight._base
        if isinstance(base, nn.Parameter) or torch.compiler.is_compiling():
            return super().find_owner(weight)
        return next(
            (
                layer
                for tensor, layer in self._stand_ins()
                if tensor is base or tensor is weight
            ),
            None,
        )

    def _stand_ins(self) -> list[tuple[Tensor, Interception]]:
        """Return tensors in the place of parameters, as ``functional_call`` and replicas have them, of the module."""
        entry: Any = self.running.stack[-1]
        if entry.stand_ins is None:
            parameters = parameters_with_layers(entry.module)
            entry.stand_ins = [
                (tensor, layer)
                for tensor, layer in parameters
                if not isinstance(tensor, nn.Parameter)
            ]
            entry.stand_ins += _replicated_tensors(entry.module)
        return entry.stand_ins

    def is_active(self, precision: LayerPrecision) -> bool:
        """Return whether a layer quantises now, and note its state in the checkpoints in which it computes."""
        is_active = super().is_active(precision)
        if not torch.compiler.is_compiling():
            entry: Any = self.running.stack[-1]
            for checkpoint in self._checkpoints_inside(
                entry, sys._getframe(), _autograd_state()
            ):
                checkpoint.note(precision)
        return is_active


def _with_own_precision(replica: nn.Module, interception: Interception) -> Interception:
    """Return the interception of a ``DataParallel`` replica, with the replica's own precision."""
    precision: Any = replica._modules.get("precision", interception.precision)
    if precision is interception.precision is not None:
        precision = interception.precision._replicate_for_data_parallel()
    return interception._replace(precision=precision)


def _replicated_tensors(root: nn.Module) -> list[tuple[Tensor, Interception]]:
    """Return the tensors that a replica of ``DataParallel`` has as parameters, each with its layer."""
    replicated: list[tuple[Tensor, Interception]] = []
    for module in root.modules():
        interception = getattr(module, HOOK, None)
        tensors = vars(module).get("_former_parameters")
        if interception is not None and tensors:
            replica = _with_own_precision(module, interception)
            replicated += [(tensor, replica) for tensor in tensors.values()]
    return replicated


def _autograd_state() -> tuple[Any, bool]:
    """Return hooks on saved tensors, and whether gradients are on: a checkpoint changes one of them."""
    return torch._C._autograd._top_saved_tensors_default_hooks(
        True
    ), torch.is_grad_enabled()


def _is_running(frame: Any, current: Any) -> bool:
    """Return whether a frame is among the callers of the current one."""
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def _runs_in(frame: Any, current: Any) -> bool:
    """Return whether code that is to be intercepted runs in a frame.

    That is neither what computes a weight from its parameters, nor compiled code: the mode was at work when it was
    made.
    """
    while current is not frame:
        if current is None:
            return False
        code = current.f_code
        if (
            code is PARAMETRIZATION
            or code is SPECTRAL_NORM
            or code.co_filename == COMPILED_RUNTIME
        ):
            return False
        if code.co_filename.startswith(GRAPH_FILES) and "self" in code.co_varnames:
            if "dynamo_compile_id" in getattr(current.f_locals["self"], "meta", {}):
                return False
        current = current.f_back
    return True


def _exclude_from_compilation(hook: Callable[..., Any]) -> None:
    """Exclude a hook from compilation as a function of its own; inside other code it is still traced."""
    evaluation = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "skip_code"):  # of older torch
        evaluation.skip_code(hook.__code__)
    else:
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(
            hook.__code__, evaluation._FrameExecStrategy(skip, skip)
        )


_exclude_from_compilation(enter_module)
_exclude_from_compilation(leave_module)
