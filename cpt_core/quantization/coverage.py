"""What of a model is quantised, what stays in float32 and why, and what was converted in vain.

>>> own_form(nn.Linear).__name__, own_form(nn.GRU)
('QuantLinear', None)
>>> names_a_product(nn.Bilinear(2, 2, 2)), names_a_product(nn.LayerNorm(2))
(True, False)
"""

from __future__ import annotations

import dis
import pkgutil
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from inspect import getattr_static
from threading import Lock
from traceback import walk_stack
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from cpt_core.quantization.layers import Changed, QuantizedLayer

# classes with a quantised form of their own -> that form; none of it is loaded before a model has the class
FORMS = {
    "torch.nn.modules.linear.Linear": "quantization.layers:QuantLinear",
    **{f"torch.nn.modules.conv.Conv{n}d": f"quantization.layers:QuantConv{n}d" for n in (1, 2, 3)},
    "torch.nn.modules.rnn.LSTM": "quantization.lstm:QuantLSTM",
    "cpt_core.graphs.layers.GraphConv": "quantization.graph_layers:QuantGraphConv",
    "cpt_core.graphs.layers.SAGEConv": "quantization.graph_layers:QuantSAGEConv",
    "dgl.nn.pytorch.conv.graphconv.GraphConv": "integrations.dgl:QuantDGLGraphConv",
    "dgl.nn.pytorch.conv.sageconv.SAGEConv": "integrations.dgl:QuantDGLSAGEConv",
}
# functions of torch that multiply and have a rule in ``operations``, and of libraries that do so; those that have none.
# By ``_nested_tensor_from_mask`` an encoder leaves for a path without its layers, which it does not where it is caught.
NAMES = frozenset(
    "__matmul__ __rmatmul__ _grouped_mm _nested_tensor_from_mask _transformer_encoder_layer_fwd addmm addmv baddbmm "
    "bilinear bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot einsum "
    "grouped_mm grouped_mm_fallback gru gru_cell inner linalg_matmul linalg_multi_dot linear linear_cross_entropy "
    "lstm lstm_cell matmul mm multi_dot multi_head_attention_forward mv rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell "
    "scaled_dot_product_attention tensordot vdot".split()
)
UNRULED = tuple(
    "_sparse_addmm _sparse_mm addbmm addbmm_ addmm_ addmv_ baddbmm_ cdist conv_tbc convolution corrcoef cov "
    "linalg_matrix_exp linalg_matrix_power matrix_exp matrix_power".split()
)
UNSEEN = frozenset({"flex_attention"})  # functions that multiply and that no mode sees: known by name alone
NOTABLE = 0.1  # share of a model's weights that does not stay in float32 without a word


class QuantizationWarning(UserWarning):
    """Something runs in float32 that a user of ``quantize_`` may believe to be quantised."""


def own_form(kind: type[nn.Module]) -> type[QuantizedLayer] | None:
    """Return the quantised form of a class, None where it has none of its own."""
    place = FORMS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if place is None else pkgutil.resolve_name(f"cpt_core.{place}")


def form_of(module: nn.Module) -> type[QuantizedLayer] | None:
    """Return what a module is converted to: a form of its own, or itself with its products caught; None for neither."""
    own = own_form(type(module))
    if own is not None and not own.why_not(module):
        return own
    if isinstance(module, LazyModuleMixin) or not names_a_product(module):
        return None
    from cpt_core.quantization.operations import QuantOperations, made

    return made(QuantOperations, type(module))


def module_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or the one it had before it was converted."""
    return module.FLOAT if isinstance(module, Changed) else type(module)


def convertible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that ``quantize_`` can convert, by name."""
    parts = parts_of_wholes(model)
    for name, module in model.named_modules():
        if name not in parts and not isinstance(module, QuantizedLayer) and form_of(module) is not None:
            yield name, module


def parts_of_wholes(model: nn.Module) -> dict[str, str]:
    """Return modules -> the layer they are part of: quantised as a whole, or around what only holds parameters."""
    out: dict[str, str] = {}
    for name, module in (modules := dict(model.named_modules())).items():
        form = own_form(module_kind(module))
        if form is not None and form.WHOLE and not form.why_not(module):
            out |= {f"{name}.{part}".lstrip("."): name for part, _ in module.named_modules() if part}
        user = name
        while user and getattr_static(type(modules[user]), "forward") is nn.Module.forward:
            user = user.rpartition(".")[0]
        if user != name and module._parameters and name not in out:
            out[name] = str(out.get(user, user))
    return out


def warn_of_float32(model: nn.Module, asked: Collection[str]) -> None:
    """Say in one line what stays in float32 when that is more than a tenth of the weights; ``asked``: by the user."""
    share, left = in_float32(model, asked)
    if share > NOTABLE:
        listed = ", ".join(f"{count} {what}" for what, count in left.items())
        warnings.warn(
            f"{share:.0%} of the weights stay in float32: {listed}; summary(model) lists them, "
            "check(model, inputs) counts their products",
            QuantizationWarning,
            stacklevel=3,
        )


def in_float32(model: nn.Module, asked: Collection[str]) -> tuple[float, Counter[str]]:
    """The share of the weights that stay in float32 unasked, and the modules that have them by kind and reason.

    Weights are tensors of two or more dimensions that are no embedding, nor (1, T, C) as positions and tokens to add:
    how many products a weight has part in is not known before there is an input.
    """
    parts, left_out = parts_of_wholes(model), {id(m) for _, m in convertible(model)}
    weights = quantized = 0
    kinds: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        held = [p for p in module._parameters.values() if p is not None]  # parameters() may be the user's own
        own = sum(p.numel() for p in held if not is_lazy(p) and p.dim() > 1 and len(p) > 1)
        layer = f".{parts.get(name, name)}".partition(".parametrizations")[0][1:]
        if own and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and layer not in asked:
            weights += own
            if isinstance(modules[layer], QuantizedLayer):
                quantized += own
            else:
                reason = float32_reason(modules[layer], id(modules[layer]) in left_out)
                kinds[f"{module_kind(module).__name__} ({reason})"] += 1
    return (1 - quantized / weights if weights else 0.0), kinds


def float32_reason(module: nn.Module, left_out: bool) -> str:
    """Return why a module with parameters is not quantised; ``left_out``: it could have been converted."""
    if left_out or (isinstance(module, Changed) and not isinstance(module, QuantizedLayer)):
        return "left out"
    if isinstance(module, LazyModuleMixin):
        return "lazy: run the model once before it is converted"
    if names_a_product(module, UNSEEN):
        return f"no quantised form of {', '.join(UNSEEN)}"
    own = own_form(type(module))
    return (own.why_not(module) if own else "") or "its forward names no product"


class FirstPass(TorchFunctionMode):
    """Watches the first forward pass of a converted model for products that no converted module catches.

    What is caught is not seen here. One warning names the modules; layers that the pass did not use are no longer
    listed as quantised. Compiled passes are not watched: ``cpt_core.check`` sees what they do.
    """

    def __init__(self, model: nn.Module, asked: Collection[str] = (), unseen: Collection[str] = ()) -> None:
        """Put hooks on the model; names of modules: ``asked`` to stay in float32, and ``unseen``, which call those."""
        super().__init__()
        self.model, self.asked = model, frozenset(asked)
        self.seen = dict.fromkeys(unseen, f"{', '.join(UNSEEN)} (if it runs)")
        self.passes, self.done = 0, False  # running, in all threads; whether one has not failed
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: object) -> None:
        """Forward hook: start to watch."""
        if torch.compiler.is_compiling():
            return
        with _counting:
            if self.done:
                return
            self.passes += 1
        frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code.co_name == "_call_impl")
        running = [frame.f_locals.get("self") for frame in frames][1:]  # without this pass
        while (modes := _get_current_function_mode_stack()) and isinstance(left := modes[-1], FirstPass):
            if modes.count(left) <= running.count(left.model):
                break
            left.leave(left.model, (), None)  # of a pass that was interrupted: no hook runs then
        self.__enter__()

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """Forward hook: stop; after a pass that has not failed (``output`` is None then) say what was seen."""
        if torch.compiler.is_compiling() or _get_current_function_mode_stack()[-1:] != [self]:
            return
        self.__exit__(None, None, None)
        with _counting:
            self.passes -= 1
            self.done = self.done or output is not None
            if self.passes or not self.done:
                return
        forget_first_pass(module)
        for m in module.modules():
            if isinstance(m, QuantizedLayer) and not m.precision.called:
                m.precision.called = False
        if self.seen:
            some = list(self.seen.items())
            listed = ", ".join(f"{function} in {name or 'the model'}" for name, function in some[:3])
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            warnings.warn(
                f"products in float32 that nobody asked for: {listed}{more}; check(model, inputs) counts them",
                QuantizationWarning,
                stacklevel=3,
            )

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").partition(".")[0]  # "mm" of aten.mm.default
        if name not in NAMES and name not in UNRULED:
            return function(*args, **(kwargs or {}))
        from cpt_core.quantization import operations

        if function in operations.INSIDE:
            with self:
                return operations.INSIDE[function](*args, **(kwargs or {}))
        if function in operations.RULES or function in operations.UNRULED:
            factors = operations.factors(function, args, kwargs or {})
            vector = any(isinstance(x, torch.Tensor) and x.dim() == 1 for x in factors)  # the norms of weights are such
            if not vector and not operations.only_scales(function, factors):
                running = _running(self.model)
                if not any(running == a or running.startswith(f"{a}.") for a in self.asked):
                    self.seen.setdefault(running, getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


_counting = Lock()


def _running(model: nn.Module) -> str:
    """Return the name of the innermost module of a model that is running."""
    names = {id(module): name for name, module in model.named_modules()}
    running = (id(frame.f_locals.get("self")) for frame, _ in walk_stack(sys._getframe(2)))
    return next((names[module] for module in running if module in names), "")


def forget_first_pass(module: nn.Module) -> None:
    """Take the hooks away."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), FirstPass)]:
            hooks.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def names_a_product(module: nn.Module, names: frozenset[str] = NAMES) -> bool:
    """Whether the forward of a module, or a function, method or object that it calls by name, names a product of torch.

    What its child modules do in forwards of their own is theirs. A product that is found in no name, such as one in a
    table of functions, is not known here; the first forward pass tells of it.
    """
    seen: set[CodeType] = set()
    own = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    left: list[Any] = [vars(kind)["forward"] for kind in own if "forward" in vars(kind)]  # some call those above them
    while left:
        function = left.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        with suppress(ValueError):  # a cell may be empty still
            left += [c.cell_contents for c in function.__closure__ or () if not isinstance(c.cell_contents, type)]
        for code in _with_inner(function.__code__):
            for name, of in _names(code):
                if of and of in function.__code__.co_varnames[:1]:  # self
                    held = vars(module).get(name)  # a function, or an object that is called; no child
                    if name in names and callable(held):
                        return True
                    found = getattr(type(module), name, held)
                    if not isinstance(found, FunctionType | MethodType):
                        found = vars(type(found)).get("__call__")
                else:
                    if name in names or (name == "@" and names is NAMES):
                        return True
                    owner = function.__globals__.get(of)
                    inside = isinstance(owner, ModuleType | type) and not owner.__name__.startswith("torch")
                    found = vars(owner).get(name) if inside else function.__globals__.get(name)
                    if getattr(found, "__name__", "") in names:  # imported by another name
                        return True
                if isinstance(found, FunctionType | MethodType | staticmethod):
                    left.append(found)
    return False


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _names(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the names that a code uses, each with the variable that it is an attribute of; "@" is the operator."""
    before = ""
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            yield str(value), before
        elif kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            yield str(value), ""
        elif kind == "BINARY_OP" and instruction.argrepr.startswith("@"):
            yield "@", ""
        if kind != "CACHE":
            last = value[-1] if isinstance(value, tuple) and value else value
            before = str(last) if kind.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF")) else ""
