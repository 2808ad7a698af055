"""Interception of matmuls and convolutions: one function mode per converted model.

Hooks on the modules of a model switch a ``TorchFunctionMode`` on while the model runs, and keep the stack
of running modules. The mode sees every function of torch that is called; ``OP_HANDLERS`` maps those that multiply to
handlers, and a handler hands its operands to ``QuantizedOpsMode.run``, the one place where operands are rounded,
work is counted and the gradient is rounded:

    y = f(q(a), q(b))        dy -> q(dy)

Whose bits, ranges and noise apply follows the *parameter*: a weight belongs to the layer that holds it, whichever
module uses it. An operation of two activations belongs to the innermost running module.

The trade-offs: a function costs a call of Python while the mode is on, also where nothing is intercepted; and a
``forward`` that is called directly, past its hooks, is intercepted only inside a module that was called as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from cpt_core import extensions
from cpt_core.quantization.feature_axes import MOVES, FeatureAxes
from cpt_core.quantization.precision import LayerPrecision

without_modes = (
    torch._C.DisableTorchFunction
)  # inside, no function of torch is shown to any mode
HOOK = "_interception"  # name of the attribute that a hooked module has
# function of torch -> ``handler(mode, function, *args, **kwargs)``, which returns None where it leaves that to torch
OP_HANDLERS: dict[Any, Callable[..., Any]] = {}
# (execution, operation) -> what computes it instead: ``executor(precision, operands, roles, along, options)``
OP_EXECUTORS: dict[tuple[str, str], Callable[..., Any]] = {}
# function -> ``composite(mode, *args, **kwargs)``, the same function with its inner ones visible
COMPOSITE_OPS: dict[Any, Callable[..., Any]] = {}
# function of torch -> ``counter(mode, output, *args, **kwargs) -> operations``, asked only while operations are
# reported: of functions that are counted as a whole, instead of what their handler reports, if they have one
COUNTED_FUNCTIONS: dict[Any, Callable[..., Iterable[Operation]]] = {}
Operands = tuple[Tensor, Tensor, Tensor | None]  # first operand, second operand, bias


class Operation(NamedTuple):
    """An intercepted operation that has run, as it is reported to ``QuantizedOpsMode.on_operation``.

    Attributes:
        layer: name of the layer that the operation belongs to.
        function: name of the operation, such as "linear" or "conv2d".
        macs: multiply-accumulates, or elementwise operations, of the forward pass.
        elements: how many of the first operand, the second and the output are moved.
        error: whether the input gradient is computed if a gradient comes back.
        weight: whether the weight gradient is.
        precision: bits in effect; None where the operation ran in float32, whatever the bits of the layer.
        part: "" for a matmul or convolution; else what a layer does besides, such as "aggregation", see ``bitops``.
        once: computed once per bit width in a whole run, as the sum of constant features over neighbours.
        owner: the layer whose bits price it, see ``bitops.counting``; None for float32.
        is_recomputed: computed again in the backward pass.
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
    """What a hooked module knows: the mode of its model, its name, and its precision where it is converted."""

    mode: QuantizedOpsMode
    name: str
    precision: LayerPrecision | None
    kind: str  # "linear", "conv", "lstm", "graph", or "attention" for modules of any other class
    is_paper_attention: (
        bool  # whether it runs the paper's attention, see ``QuantConfig.attention``
    )


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
    """Describe an operation by its operands, as they were before rounding, and its output."""
    elements = first.numel(), second.numel(), output.numel()
    is_matmul = function == "matmul"  # the gradient of a vector's partner sums nothing
    error = first.requires_grad and not (is_matmul and second.dim() < 2)
    weight = second.requires_grad and not (is_matmul and first.dim() < 2)
    return Operation(
        layer, function, int(macs), elements, error, weight, precision, part, once
    )


@dataclass(slots=True, eq=False)
class RunningModule:
    """An entry of the stack of running modules.

    Attributes:
        module: that runs.
        interception: what it knows.
        scores: (rows, columns) of the scores of tokens that it has computed, see ``op_handlers.find_token_weights``.
        probabilities: (rows, columns) of the results of softmax.
    """

    module: nn.Module
    interception: Interception
    scores: list[tuple[int, int]] = field(default_factory=list, kw_only=True)
    probabilities: list[tuple[int, int]] = field(default_factory=list, kw_only=True)

    def take_shapes(self, other: RunningModule) -> None:
        """Know the shapes that a module inside this one has computed."""
        self.scores.extend(other.scores)
        self.probabilities.extend(other.probabilities)


class _RunningModules(threading.local):
    """The stack of running modules of one thread.

    Attributes:
        stack: the running modules, the innermost one last.
        features: where the features of its tensors are.
    """

    def __init__(self) -> None:
        self.stack: list[RunningModule] = []
        self.features = FeatureAxes()


class QuantizedOpsMode(TorchFunctionMode):
    """Quantises and reports the operations of one model while it runs.

    Attributes:
        on_operation: called with every ``Operation`` and its output; the plan, ``check`` and the ledger count with it.
    """

    def __init__(self) -> None:
        super().__init__()
        extensions.load_optional("operations")
        self.running = _RunningModules()
        self.on_operation: Callable[[Operation, Any], None] | None = None
        self.owners: Any = WeakIdKeyDictionary()  # parameter -> its layer, or None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a new mode for copies and pickles: with no running module, callback or table of parameters."""
        return type(self), ()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function of torch, and report its operations where they are asked for."""
        kwargs = kwargs or {}
        if self.on_operation is None:
            if (
                function not in OP_HANDLERS and function not in COMPOSITE_OPS
            ):  # as most functions
                return self.run_as_torch(function, args, kwargs)
        elif function in COUNTED_FUNCTIONS:
            return self._count_whole(function, args, kwargs)
        return self.run_function(function, args, kwargs)

    def run_function(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function by its handler where it has one; as torch has it where nothing is rounded or reported."""
        if (
            "out" in kwargs and kwargs["out"] is None
        ):  # functions of torch that are written in Python pass it on
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
        """Run a function as torch has it, and follow the features of its tensors."""
        output = function(*args, **kwargs)
        if function in MOVES or self.running.features.has_moved:
            self.running.features.follow(function, args, kwargs, output)
        return output

    def call_handler(
        self, handler: Callable[..., Any], function: Any, args: Any, kwargs: Any
    ) -> Any:
        """Let a handler compute a function."""
        return handler(self, function, *args, **kwargs)

    def check_not_nested(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for nested operands of a layer that quantises: they would be multiplied in float32."""
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
        """Run a function of ``COUNTED_FUNCTIONS``, and report what its counter says."""
        report, self.on_operation = self.on_operation, lambda operation, output: None
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

    # --- the stack of running modules -------------------------------------------------------------------------------

    def enter(self, module: nn.Module, interception: Interception) -> None:
        """Put a module on the stack; the first one switches the mode on."""
        self.running.stack.append(RunningModule(module, interception))
        if len(self.running.stack) == 1:
            self.__enter__()

    def leave(self, module: nn.Module) -> None:
        """Take a module off the stack; the first one switches the mode off."""
        stack = self.running.stack
        if not stack or stack[-1].module is not module:
            return  # a hook failed before the module was entered
        left = stack.pop()
        if not stack:
            self.running.features.clear()
            self.__exit__(None, None, None)
        else:  # a module may compute the scores of another
            stack[-1].take_shapes(left)

    def is_inside(self) -> bool:
        """Return whether code of a running module calls."""
        return bool(self.running.stack)

    def is_idle(self, args: Any, kwargs: Any) -> bool:
        """Return whether a function is neither reported nor quantised, by layers of its weights or the running one."""
        top = self.running.stack[-1].interception
        if self.on_operation is not None or (
            top.precision is not None and top.precision.active_bits.has_quantized_roles
        ):
            return False
        owners = [
            owner
            for x in tensor_arguments(args, kwargs)
            if (owner := self.find_owner(x)) is not None
        ]
        return not any(
            layer.precision is not None and self.is_active(layer.precision)
            for layer in owners or [top]
        )

    # --- whose operation it is --------------------------------------------------------------------------------------

    def is_weight(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter, or a view of one."""
        return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)

    def find_layer(self, weight: Tensor) -> Interception:
        """Return the layer that holds a weight; the innermost running one where none is known to hold it."""
        top = self.running.stack[-1]
        if top.module._parameters.get("weight") is weight:
            return top.interception
        return self.find_owner(weight) or top.interception

    def find_owner(self, weight: Tensor) -> Interception | None:
        """Return the layer that holds the parameter that a tensor is, or is a view of."""
        held = weight if weight._base is None else weight._base
        if not isinstance(held, nn.Parameter):
            return None
        if torch.compiler.is_compiling():  # which knows no table of parameters
            return next(
                (
                    layer
                    for tensor, layer in self.find_owners()
                    if tensor is held or tensor is weight
                ),
                None,
            )
        if held not in self.owners:
            self.owners[held] = None
            self.owners.update(
                reversed(self.find_owners())
            )  # the first one of several that share a parameter
        return self.owners[held]

    def find_owners(self) -> list[tuple[Tensor, Interception]]:
        """Return the parameters of the model, each with its layer."""
        return parameters_with_layers(self.running.stack[0].module)

    # --- the one place where operations are quantised ---------------------------------------------------------------

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
        """Round the operands, compute, count, and round the gradient that comes back.

        Args:
            layer: whose precision applies.
            name: of the operation, for reports.
            compute: ``compute(first, second, bias)``, linear in each operand.
            operands: see ``Operands``.
            roles: of the first and second operand, keys of ``QUANTIZERS``; None for one that is not to be rounded.
            macs: first, second, output -> multiply-accumulates of the forward pass.
            gradient: role of the output's gradient.
            along: dimension of the first and second operand over which the operation sums; None for that of the role.
            options: of the operation, such as the geometry of a convolution, for ``OP_EXECUTORS``.
        """
        precision = layer.precision
        if precision is None or not self.is_active(precision):
            output = compute(*operands)
        else:
            if precision.zeros_unchecked:
                precision.warn_of_exact_zeros(roles[1], operands[1])
            executor = OP_EXECUTORS.get((precision.execution, name))
            found = (
                None
                if executor is None
                else executor(precision, operands, roles, along, options)
            )
            output = (
                precision.quantized(compute, operands, roles, gradient, along)
                if found is None
                else found
            )
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
        """Return whether a layer quantises now; RuntimeError as long as it has no bits."""
        precision.require_bits()
        return precision.active_bits.has_quantized_roles


def is_quantizable(args: Any, kwargs: Any) -> bool:
    """Return whether all operands are dense real tensors, and the first one floating."""
    tensors = tensor_arguments(args, kwargs)
    for x in tensors:
        if x.layout is not torch.strided or x.is_complex() or x.is_nested:
            return False
    return bool(tensors) and tensors[0].is_floating_point()


def tensor_arguments(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among arguments, and in lists and tuples of them."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, Tensor)]
    return tensors


def interception_mode_class() -> type[QuantizedOpsMode]:
    """Return the class of modes of models; that of ``cpt_extras`` serves models that run in unusual ways."""
    unusual = extensions.load_optional("guarded_mode")
    return QuantizedOpsMode if unusual is None else unusual.GuardedMode


def parameters_with_layers(root: nn.Module) -> list[tuple[Tensor, Interception]]:
    """Return what all modules below one hold as parameters, each with its layer; converted layers come first."""
    converted: list[tuple[Tensor, Interception]] = []
    others: list[tuple[Tensor, Interception]] = []
    for module in root.modules():
        interception = getattr(module, HOOK, None)
        if interception is not None:
            held = [
                (tensor, interception)
                for tensor in module._parameters.values()
                if tensor is not None
            ]
            (others if interception.precision is None else converted).extend(held)
    return converted + others


# --- hooks ------------------------------------------------------------------------------------------------------------


def enter_module(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: note that a module runs."""
    interception: Any = module._interception
    precision = interception.precision
    if (
        precision is not None and precision.training != module.training
    ):  # it is no child of the module
        precision.train(module.training)
    interception.mode.enter(module, interception)


def leave_module(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: note that a module has run, or failed."""
    interception: Any = module._interception
    interception.mode.leave(module)
