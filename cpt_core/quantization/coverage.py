"""What of a model is quantised, what stays in float32 and why, and what was converted in vain.

>>> sorted(kind.__name__ for kind in conversions() if kind.__module__.startswith("torch"))
['Conv1d', 'Conv2d', 'Conv3d', 'LSTM', 'Linear']
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cpt_core.quantization import graph_layers, layers, lstm
from cpt_core.quantization.layers import QuantizedLayer
from cpt_core.quantization.precision import LayerPrecision

NOTABLE = 0.1  # share of a model's weights that does not stay in float32 without a word


class QuantizationWarning(UserWarning):
    """Something runs in float32 that a user of ``quantize_`` may believe to be quantised."""


def conversions() -> dict[type[nn.Module], type[QuantizedLayer]]:
    """Return what can be converted: float32 class -> quantised class.

    With the layers of DGL and the models of transformers that the program uses.
    """
    found = {**layers.CONVERSIONS, **lstm.CONVERSIONS, **graph_layers.CONVERSIONS}
    if "dgl.nn" in sys.modules:
        found |= importlib.import_module("cpt_core.quantization.dgl_layers").CONVERSIONS
    # versions of transformers without this name (before 5) have other attention modules, which stay in float32
    if hasattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS"):
        found |= importlib.import_module("cpt_core.quantization.attention").conversions()
    return found


def attention_kinds() -> set[type[nn.Module]]:
    """Return the classes of self-attention that can be converted, of the models that the program uses."""
    return {kind for kind, quantized in conversions().items() if quantized.KIND == "attention"}


def module_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or the one it had before it was converted."""
    return module.FLOAT if isinstance(module, QuantizedLayer) else type(module)


def convertible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that ``quantize_`` can convert, by name."""
    # nn.TransformerEncoderLayer reads the weights of its Linear modules past their forward in evaluation
    fused = {
        id(m) for layer in model.modules() if isinstance(layer, nn.TransformerEncoderLayer) for m in layer.modules()
    }
    found, parts = conversions(), parts_of_wholes(model)
    for name, module in model.named_modules():
        if type(module) in found and id(module) not in fused and name not in parts:
            if not found[type(module)].why_not(module):
                yield name, module


def parts_of_wholes(model: nn.Module) -> dict[str, str]:
    """Modules inside a layer that is quantised as a whole: name of the part -> name of that layer."""
    found = conversions()
    whole = {kind for kind, quantized in found.items() if quantized.WHOLE}
    out: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = module_kind(module)
        if kind in whole and not found[kind].why_not(module):
            out |= {f"{name}.{part}".lstrip("."): name for part, _ in module.named_modules() if part}
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

    Weights are tensors of two or more dimensions that are no embedding: how many products a weight has part in is not
    known before there is an input.
    """
    parts, left_out = parts_of_wholes(model), {id(m) for _, m in convertible(model)}
    weights = quantized = 0
    kinds: Counter[str] = Counter()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        own = sum(p.numel() for p in module.parameters(recurse=False) if not is_lazy(p) and _is_weight(p))
        layer = parts.get(name, name)
        if own and not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and layer not in asked:
            weights += own
            if isinstance(modules[layer], QuantizedLayer):
                quantized += own
            else:
                reason = float32_reason(modules[layer], id(modules[layer]) in left_out)
                kinds[f"{module_kind(module).__name__} ({reason})"] += 1
    return (1 - quantized / weights if weights else 0.0), kinds


def _is_weight(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and len(parameter) > 1  # positions and tokens to add are (1, T, C)


def float32_reason(module: nn.Module, left_out: bool) -> str:
    """Return why a module with parameters is not quantised; ``left_out``: it could have been converted."""
    if left_out:
        return "left out"
    found = conversions()
    if type(module) in found:
        why_not = found[type(module)].why_not(module)
        return why_not or "inside nn.TransformerEncoderLayer, whose fused path bypasses it"
    for kind in found:
        if isinstance(module, kind):
            return f"a subclass of {kind.__name__}"
    return "no quantised form"


def own_layers(module: nn.Module) -> Iterator[LayerPrecision]:
    """Yield the precisions of the quantised layers that a module itself has to call."""
    for child in module.children():
        if isinstance(child, QuantizedLayer):
            yield child.precision
        elif not callable_(child):
            yield from own_layers(child)


def callable_(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dictionaries of modules have none."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is not nn.Module.forward


class FirstPass:
    """Watches the first forward passes of modules above quantised layers, for layers that they do not call.

    Their weights may have been used all the same, past their forward and in float32. One warning names them all, when
    the outermost of these modules is through; whatever has run by then is not watched any more.
    """

    def __init__(self, model: nn.Module) -> None:
        """Put hooks on a converted model."""
        self.running, self.ran = 0, dict[nn.Module, None]()
        for module in model.modules():
            if callable_(module) and not isinstance(module, QuantizedLayer) and _quantized_inside(module):
                module.register_forward_pre_hook(self.enter)
                module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: object) -> None:
        """Forward hook: count how deep the pass is."""
        if not torch.compiler.is_compiling():  # cpt_core.check sees what a compiled model does
            self.running += 1

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """Forward hook: after the outermost see what was called; ``output`` is None of a pass that failed."""
        if torch.compiler.is_compiling():
            return
        self.running -= 1
        if output is not None:
            self.ran[module] = None
        if self.running == 0:
            ran, self.ran = self.ran, {}
            _warn_of_missed(ran)


def _quantized_inside(module: nn.Module) -> bool:
    return any(isinstance(m, QuantizedLayer) for m in module.modules())


def _warn_of_missed(ran: Iterable[nn.Module]) -> None:
    parents, names = dict[str, None](), []
    for module in ran:
        forget_first_pass(module)
        for precision in own_layers(module):
            if not precision.called:
                precision.called = False
                parents[type(module).__name__] = None
                names.append(precision.name)
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{', '.join(parents)} did not call {len(names)} quantised layer{'s' * (len(names) > 1)} {listed}: where "
            "their weights are used all the same, that product runs in float32; summary(model) lists them, "
            f"check(model, inputs) tells. Leave such layers out: QuantConfig(float32=({names[0]!r}, ...))",
            QuantizationWarning,
            stacklevel=3,
        )


def forget_first_pass(module: nn.Module) -> None:
    """Take the hooks away."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), FirstPass)]:
            hooks.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
