"""Interception of matmuls and convolutions: one function mode per converted model.

Hooks on the modules of a model enable a ``TorchFunctionMode`` while the model runs, and maintain the stack of running
modules. The mode receives every call of a torch function; ``OP_HANDLERS`` maps matmuls and convolutions to handlers,
which pass their operands to ``QuantizedOpsMode.run``, the one place where operands are rounded, work is counted
and the gradient is rounded:

    y = f(q(a), q(b))        dy -> q(dy)

The bits, ranges and noise of an operation are those of the layer that holds its *parameter*, whichever module uses the
weight. An operation of two activations belongs to the innermost running module. Of several converted models that run
inside each other, as a teacher in a student, the innermost one decides: its mode is the last one on torch's stack of
function modes, and takes those of the others off while it works.

The trade-offs: while the mode is enabled every torch function costs one Python call, also if it is not intercepted; and
a ``forward`` that is called directly, without its hooks, is intercepted only inside a module that was called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.weak import WeakIdKeyDictionary

from cpt_core import extensions
from cpt_core.quantization.feature_axes import (
    ALWAYS_FOLLOWED,
    ATTACHED_MARKS,
    adds_column,
    fixed_tensors,
    follow_marks,
    has_weights,
    is_constant,
    moves_last_dimension,
    tensor_arguments,
)
from cpt_core.quantization.precision import LayerPrecision

# context manager in which no function mode receives torch functions
without_modes = torch._C.DisableTorchFunction
# attribute of a hooked module that holds its ``Interception``
HOOK = "_interception"
# torch function -> ``handler(mode, function, *args, **kwargs)``, which returns None to let torch compute it
OP_HANDLERS: dict[Any, Callable[..., Any]] = {}
# (execution, operation) -> alternative implementation: ``executor(precision, operands, roles, along, options)``
OP_EXECUTORS: dict[tuple[str, str], Callable[..., Any]] = {}
# function -> ``composite(mode, *args, **kwargs)``, which computes it through functions that the mode can intercept
COMPOSITE_OPS: dict[Any, Callable[..., Any]] = {}
# torch function -> ``counter(mode, output, *args, **kwargs) -> operations``, called while operations are reported; it
# counts the function as a whole, and replaces the reports of its handler
COUNTED_FUNCTIONS: dict[Any, Callable[..., Iterable[Operation]]] = {}
# (first operand, second operand, bias)
Operands = tuple[Tensor, Tensor, Tensor | None]


class Operation(NamedTuple):
    """Report of an intercepted operation that has run, passed to ``QuantizedOpsMode.on_operation``.

    Attributes:
        layer: name of the layer that the operation belongs to.
        function: name of the operation, such as "linear" or "conv2d".
        macs: multiply-accumulates, or elementwise operations, of the forward pass.
        elements: numbers of elements read of the first and second operand and written of the output.
        error: whether the backward pass computes an input gradient (dgrad).
        weight: whether the backward pass computes a weight gradient (wgrad).
        precision: precision of the layer; None for an operation that is not quantised at any bits of it.
        part: "" for a matmul or convolution; otherwise the kind of work, such as "aggregation", see ``bitops``.
        once: computed once per bit width in a whole run, as the sum of constant features over neighbours.
        owner: layer whose bits determine the price, see ``bitops.counting``; None for float32.
        is_recomputed: whether the backward pass recomputed it.
    """

    layer: str
    function: str
    macs: int
    elements: tuple[int, int, int]
    error: bool
    weight: bool
    precision: LayerPrecision | None
    part: str = ""
    once: bool = False
    owner: str | None = None
    is_recomputed: bool = False


class Interception(NamedTuple):
    """Record of a hooked module, stored in its attribute ``HOOK``.

    Attributes:
        mode: function mode of its model.
        name: name of the module in the model.
        precision: its bits and ranges; None if it is not converted.
        kind: "linear", "conv", "lstm", "graph", or "attention" for modules of any other class.
        is_paper_attention: whether it runs the paper's attention, see ``QuantConfig.attention``.
    """

    mode: QuantizedOpsMode
    name: str
    precision: LayerPrecision | None
    kind: str
    is_paper_attention: bool


def describe_operation(
    layer: str,
    function: str,
    macs: int,
    first: Tensor,
    second: Tensor,
    output: Tensor,
    precision: LayerPrecision | None,
    part: str = "",
    once: bool = False,
) -> Operation:
    """Return the report of an operation with these operands, before rounding, and output."""
    # in a matmul with a vector, the gradient of the other operand is an outer product, which sums nothing
    is_matmul = function == "matmul"
    return Operation(
        layer=layer,
        function=function,
        macs=int(macs),
        elements=(first.numel(), second.numel(), output.numel()),
        error=first.requires_grad and not (is_matmul and second.dim() < 2),
        weight=second.requires_grad and not (is_matmul and first.dim() < 2),
        precision=precision,
        part=part,
        once=once,
    )


@dataclass(slots=True, eq=False)
class RunningModule:
    """Entry of the stack of running modules.

    Attributes:
        module: the module.
        interception: its record.
        switched_on: whether the module switched the mode on.
        fixed_tensors: of the outermost module, see ``QuantizedOpsMode.fixed_tensors``; None if not collected yet.
    """

    module: nn.Module
    interception: Interception
    switched_on: bool = field(default=False, kw_only=True)
    fixed_tensors: dict[int, Tensor] | None = field(default=None, init=False)


class _RunningModules(threading.local):
    """Stack of running modules of one thread, the innermost one last."""

    def __init__(self) -> None:
        self.stack: list[RunningModule] = []


class QuantizedOpsMode(TorchFunctionMode):
    """Function mode that quantises and reports the operations of one model while it runs.

    Attributes:
        running: stack of running modules.
        on_operation: callback for every ``Operation`` and its output, used by the plan, ``check`` and the ledger.
        owners: parameter -> record of the layer that holds it, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        extensions.load_optional("operations")
        self.running = _RunningModules()
        self.on_operation: Callable[[Operation, Any], None] | None = None
        self.owners: Any = WeakIdKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Exclude running modules, callback and owners from copies and pickles."""
        return type(self), ()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one torch function, quantised if it has a handler."""
        kwargs = kwargs or {}
        # torch has taken this mode off its stack
        if torch._C._len_torch_function_stack() and has_models_on_stack():
            if not self.is_inside():
                return function(*args, **kwargs)
            return call_without_models(
                self.__torch_function__, function, types, args, kwargs
            )
        if self.on_operation is None:
            # most functions take this path
            if function not in OP_HANDLERS and function not in COMPOSITE_OPS:
                return self.run_as_torch(function, args, kwargs)
        elif function in COUNTED_FUNCTIONS:
            return self._count_whole(function, args, kwargs)
        return self.run_function(function, args, kwargs)

    def run_function(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function by its handler if it has one, unless there is nothing to round or report."""
        # torch functions written in Python pass out=None on
        if "out" in kwargs and kwargs["out"] is None:
            del kwargs["out"]
        handler = None if "out" in kwargs else OP_HANDLERS.get(function)
        if handler is not None and self.is_inside():
            if not is_quantizable(args, kwargs):
                self.check_not_nested(args, kwargs)
            elif not self.is_idle(args, kwargs):
                with without_modes():
                    output = self.call_handler(handler, function, args, kwargs)
                if output is not None:
                    return output
        if (
            function in COMPOSITE_OPS
            and self.is_inside()
            and not self.is_idle(args, kwargs)
        ):
            with self:
                return COMPOSITE_OPS[function](self, *args, **kwargs)
        return self.run_as_torch(function, args, kwargs)

    def run_as_torch(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the torch function itself, and track the marks of its tensors."""
        output = function(*args, **kwargs)
        # compilers cannot trace marks
        if torch.compiler.is_compiling():
            return output
        fixed = self.fixed_tensors()
        if (
            ATTACHED_MARKS
            or function in ALWAYS_FOLLOWED
            or has_weights(args, kwargs, fixed)
            or moves_last_dimension(function, args)
            or adds_column(function, output)
        ):
            follow_marks(function, args, kwargs, output, fixed)
        return output

    def fixed_tensors(self) -> dict[int, Tensor]:
        """Return the tensors that were attributes of modules when the outermost module started: {id: tensor}."""
        if not self.running.stack:
            return {}
        outermost = self.running.stack[0]
        if outermost.fixed_tensors is None:
            outermost.fixed_tensors = fixed_tensors(outermost.module)
        return outermost.fixed_tensors

    def call_handler(
        self, handler: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Return the result of a handler; subclasses may wrap it."""
        return handler(self, function, *args, **kwargs)

    def check_not_nested(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for nested operands of a quantised layer, which would run in float32."""
        operands = tensor_arguments(args, kwargs)
        if not any(x.is_nested for x in operands):
            return
        top = self.running.stack[-1].interception
        for layer in (self.find_owner(x) or top for x in operands):
            if layer.precision is not None and self.is_active(layer.precision):
                raise ValueError(
                    f"layer {layer.name!r} is given a nested tensor, which cannot be quantised: give it a padded one, "
                    "x.to_padded_tensor(0.0) or torch.nested.to_padded_tensor(x, 0.0)"
                )

    def _count_whole(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function of ``COUNTED_FUNCTIONS``, and report the operations of its counter."""
        report = self.on_operation
        self.on_operation = _ignore_operation  # the handler reports nothing itself
        try:
            output = self.run_function(function, args, kwargs)
        finally:
            self.on_operation = report
        if (
            report is not None
            and self.running.stack
            and not torch.compiler.is_compiling()
        ):
            for operation in COUNTED_FUNCTIONS[function](self, output, *args, **kwargs):
                report(operation, output)
        return output

    # --- stack of running modules ---

    def enter(self, module: nn.Module, interception: Interception) -> None:
        """Push a module on the stack, and enable the mode unless it is the innermost one."""
        entry = RunningModule(module, interception, switched_on=not self.is_innermost())
        self.running.stack.append(entry)
        if entry.switched_on:
            self.__enter__()

    def leave(self, module: nn.Module) -> None:
        """Pop a module off the stack; the one that enabled the mode disables it."""
        stack = self.running.stack
        if not stack or stack[-1].module is not module:
            return  # a hook failed before the module was entered
        if stack.pop().switched_on:
            self.__exit__(None, None, None)

    def is_innermost(self) -> bool:
        """Return whether the last mode of a converted model on torch's stack is this one."""
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, QuantizedOpsMode):
                return mode is self
        return False

    def is_inside(self) -> bool:
        """Return whether a module of the model is running."""
        return bool(self.running.stack)

    def is_idle(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call needs no report and no layer involved in it is quantised."""
        if self.on_operation is not None:
            return False
        top = self.running.stack[-1].interception
        if top.precision is not None and top.precision.active_bits.has_quantized_roles:
            return False
        owners = []
        for x in tensor_arguments(args, kwargs):
            owner = self.find_owner(x)
            if owner is not None:
                owners.append(owner)
        return not any(
            layer.precision is not None and self.is_active(layer.precision)
            for layer in owners or [top]
        )

    def record_of_excluded(self, module: nn.Module, name: str) -> Interception | None:
        """Return a record without precision for a module that the conversion would leave in float32, or None."""
        return None

    # --- layer of an operation ---

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter, or a view of one."""
        return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)

    def is_constant(self, x: Tensor) -> bool:
        """Return whether a tensor is a buffer or another constant of the model, or is computed from these alone."""
        return is_constant(x, self.fixed_tensors())

    def find_layer(self, weight: Tensor) -> Interception:
        """Return the layer that holds a weight, or the innermost running module if none does."""
        top = self.running.stack[-1]
        if top.module._parameters.get("weight") is weight:
            return top.interception
        return self.find_owner(weight) or top.interception

    def find_owner(self, weight: Tensor) -> Interception | None:
        """Return the layer of the parameter that ``weight`` is, or is a view of; None if there is none."""
        parameter = weight if weight._base is None else weight._base
        if not isinstance(parameter, nn.Parameter):
            return None
        # compilers cannot trace the weak dictionary
        if torch.compiler.is_compiling():
            for tensor, layer in self.find_owners():
                if tensor is parameter or tensor is weight:
                    return layer
            return None
        if parameter not in self.owners:
            self.owners[parameter] = None
            # reversed: of several layers that share a parameter, the first one owns it
            self.owners.update(reversed(self.find_owners()))
        return self.owners[parameter]

    def find_owners(self) -> list[tuple[Tensor, Interception]]:
        """Return the parameters of the model, each with its layer."""
        return parameters_with_layers(self.running.stack[0].module)

    # --- quantisation of an operation ---

    def run(
        self,
        layer: Interception,
        name: str,
        compute: Callable[..., Tensor],
        operands: Operands,
        roles: tuple[str | None, str | None],
        macs: Callable[[Tensor, Tensor, Tensor], int],
        gradient: str,
        *,
        along: tuple[int | None, int | None] = (None, None),
        options: Any = None,
    ) -> Tensor:
        """Run an operation with rounded operands and a rounded output gradient, and report it.

        Args:
            layer: layer whose bits apply.
            name: name of the operation in reports and ``OP_EXECUTORS``.
            compute: ``compute(first, second, bias)``, linear in each operand; other tensors that it uses need no
                gradient where a layer has separate formats for the error and the weight gradient.
            operands: first operand, second operand, bias or None.
            roles: roles of the first and second operand, keys of ``QUANTIZERS``; None for one that is not rounded.
            macs: function of first operand, second operand and output: multiply-accumulates of the forward pass.
            gradient: role of the output gradient.
            along: dimension of the first and second operand over which the operation sums; None for the role's own.
            options: arguments for ``OP_EXECUTORS``, such as the geometry of a convolution.
        """
        precision = layer.precision
        if precision is None or not self.is_active(precision):
            output: Any = compute(*operands)
        else:
            if precision.zeros_unchecked:
                precision.warn_of_exact_zeros(roles[1], operands[1])
            executor = OP_EXECUTORS.get((precision.execution, name))
            output = None
            if executor is not None:
                output = executor(precision, operands, roles, along, options)
            if output is None:
                output = precision.quantized(compute, operands, roles, gradient, along)
        if self.on_operation is not None and not torch.compiler.is_compiling():
            first, second, _ = operands
            work = macs(first, second, output)
            self.on_operation(
                describe_operation(
                    layer.name, name, work, first, second, output, precision
                ),
                output,
            )
        return output

    def is_active(self, precision: LayerPrecision) -> bool:
        """Return whether a layer quantises any role; RuntimeError if no bits are set."""
        precision.require_bits()
        return precision.active_bits.has_quantized_roles


def has_models_on_stack() -> bool:
    """Return whether modes of converted models are on torch's stack."""
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, QuantizedOpsMode) for mode in modes)


def call_without_models(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while the modes of converted models are off torch's stack; other modes stay on it."""
    modes = _get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, QuantizedOpsMode)]
    try:
        _replace_modes(others)
        return function(*args)
    finally:
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    """Make ``modes`` torch's stack of function modes."""
    while torch._C._len_torch_function_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def run_uncompiled(code: CodeType) -> None:
    """Make ``torch.compile`` leave the frames of a function, and those that it calls, to Python.

    The compiler still traces the function into a graph. But behind a graph break torch calls the mode itself, and the
    compiler takes such a frame for a function of its own: of ``x.dtype`` it returns an integer, and it recompiles for
    every other torch function.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    if not hasattr(compiler, "set_code_exec_strategy"):  # before torch 2.8
        compiler.skip_code(code)
        return
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(skip, skip))


run_uncompiled(QuantizedOpsMode.__torch_function__.__code__)


def _ignore_operation(operation: Operation, output: Any) -> None:
    """Do nothing (``on_operation`` while a function is counted as a whole)."""


def is_quantizable(args: Any, kwargs: Any) -> bool:
    """Return whether all tensor arguments are dense and real, and the first is floating-point."""
    tensors = tensor_arguments(args, kwargs)
    for x in tensors:
        if x.layout is not torch.strided or x.is_complex() or x.is_nested:
            return False
    return bool(tensors) and tensors[0].is_floating_point()


def interception_mode_class() -> type[QuantizedOpsMode]:
    """Return the class of function modes: ``GuardedMode`` of ``cpt_extras`` if installed."""
    guarded_mode = extensions.load_optional("guarded_mode")
    return QuantizedOpsMode if guarded_mode is None else guarded_mode.GuardedMode


def parameters_with_layers(root: nn.Module) -> list[tuple[Tensor, Interception]]:
    """Return (parameter, layer) of all modules below ``root``, converted layers first."""
    converted: list[tuple[Tensor, Interception]] = []
    unconverted: list[tuple[Tensor, Interception]] = []
    for module in root.modules():
        interception = getattr(module, HOOK, None)
        if interception is None:
            continue
        for child, record in excluded_children(module, interception):
            unconverted += [(p, record) for p in child.parameters(recurse=False)]
        pairs = unconverted if interception.precision is None else converted
        for parameter in module._parameters.values():
            if parameter is not None:
                pairs.append((parameter, interception))
    return converted + unconverted


def excluded_children(
    module: nn.Module, interception: Interception
) -> list[tuple[nn.Module, Interception]]:
    """Return modules below a hooked one that were added to the model later and stay in float32, with records."""
    # compilers cannot trace the search, and modules that a scheduler has met have records of their own
    if torch.compiler.is_compiling():
        return []
    children = []
    pending = list(module.named_children())
    while pending:
        path, child = pending.pop()
        if HOOK in vars(child) or isinstance(child, LayerPrecision):
            continue
        name = f"{interception.name}.{path}".lstrip(".")
        record = interception.mode.record_of_excluded(child, name)
        if record is not None:
            children.append((child, record))
        pending += [(f"{path}.{part}", m) for part, m in child.named_children()]
    return children


# --- hooks ---


def enter_module(module: nn.Module, args: Any) -> None:
    """Push a module on the stack of its mode (forward pre-hook)."""
    interception: Any = module._interception
    precision = interception.precision
    # a precision that is no child of the module does not follow its mode
    if precision is not None and precision.training != module.training:
        precision.train(module.training)
    interception.mode.enter(module, interception)


def leave_module(module: nn.Module, args: Any, output: Any) -> None:
    """Pop a module that has run, or failed, off the stack of its mode (forward hook)."""
    interception: Any = module._interception
    interception.mode.leave(module)
    precision = interception.precision
    has_failed = output is None
    if precision is None or has_failed or torch.compiler.is_compiling():
        return
    if not precision.has_run and precision.active_bits.has_quantized_roles:
        precision.is_silent = True
