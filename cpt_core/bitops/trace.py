"""Watch a forward pass: every call of a layer that reports operations, and what no layer reports."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.bitops.macs import (
    AGGREGATED,
    AGGREGATION,
    ATTENTION,
    GATES,
    MACS,
    UPSAMPLING,
    attention_macs,
    lstm_gate_operations,
    lstm_inner_macs,
    pyramid_kinds,
    sums_before_product,
    upsampled,
)
from cpt_core.graphs.graph import Graph, as_graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.coverage import attention_kinds, module_kind
from cpt_core.quantization.precision import LayerPrecision

CONVENTIONS = ("paper", "per_op")
PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy

# what a convention does not price: the authors' counters do not see some products, and see copies as operations
LEFT_OUT = {"paper": (AGGREGATION, ATTENTION), "per_op": (UPSAMPLING,)}


@dataclass(frozen=True)
class Call:
    """One call of a layer in a forward pass, or a part of it that is priced by itself."""

    layer: str
    kind: str
    macs: int
    trainable: bool  # the output needs a gradient: there is a backward pass at all
    error: bool  # the error product is computed: the input needs a gradient
    weight: bool  # the weight-gradient product is computed: the weight needs one
    owner: str | None = None  # the layer at whose bits it runs; None: float32 (FP-Agg)
    once: bool = False  # computed once per bit width in a whole run: the sum of constant features

    def passes(self, convention: str) -> tuple[str, ...]:
        """Return the passes of a training step that this call causes."""
        if self.kind in LEFT_OUT[convention]:
            return ()
        if convention == "paper":
            return PASSES
        return ("forward", *(("error",) if self.error else ()), *(("weight",) if self.weight else ()))


def _entry(table: Mapping[type[nn.Module], Any], module: nn.Module) -> Any:
    """Look a module up by class; DGL's layers count as ours of the same name."""
    if getattr(module, "_aggre_type", "mean") != "mean":  # other GraphSAGE layers of DGL: their parts are counted
        return None
    if (dgl := sys.modules.get("dgl.nn")) is not None:
        for ours, theirs in ((GraphConv, dgl.GraphConv), (SAGEConv, dgl.SAGEConv)):
            if isinstance(module, theirs):
                return table.get(ours)
    return next((entry for kind, entry in table.items() if isinstance(module, kind)), None)


def _counted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that report their MACs, without those inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if not inside and _entry(MACS, module) is not None:
            found[name] = module
    return found


def _beside(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have operations of their own beside the layers inside them: attention, feature pyramids."""
    kinds = attention_kinds() | pyramid_kinds()
    return {name: module for name, module in model.named_modules() if module_kind(module) in kinds}


def _tensors(value: Any) -> list[Tensor]:
    """The floating tensors of a layer's output: a tensor, a tuple such as an LSTM's, a dict such as a pyramid's."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return _tensors(tuple(value.values()))
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


@contextmanager
def watch(model: nn.Module, on_call: Callable[[nn.Module, Call, list[Tensor]], None]) -> Iterator[None]:
    """Report every call of a layer that can be counted, together with its outputs."""

    def report(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = _tensors(output)
        for call in _calls_of(name, module, (*args, *kwargs.values()), output, outputs[0]):
            on_call(module, call, outputs)

    handles = [
        module.register_forward_hook(partial(report, name), with_kwargs=True)
        for name, module in (_counted(model) | _beside(model)).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _calls_of(name: str, module: nn.Module, inputs: tuple[Any, ...], whole: Any, output: Tensor) -> Iterator[Call]:
    """Yield the calls of one forward pass; ``output`` is the first tensor of the ``whole`` that it returned."""
    grad = torch.is_grad_enabled()
    parts = (v.values() if isinstance(v, Mapping) else v if isinstance(v, tuple) else (v,) for v in inputs)
    features = next(x for part in parts for x in part if isinstance(x, Tensor))
    weights = (p for n, p in module.named_parameters() if n.rpartition(".")[2].startswith("weight"))
    call = Call(
        layer=name,
        kind=module_kind(module).__name__,
        macs=0,
        trainable=output.requires_grad,
        error=grad and features.requires_grad,
        weight=grad and any(p.requires_grad for p in weights),
        owner=name,
    )
    if (macs := _entry(MACS, module)) is not None:
        yield replace(call, macs=int(macs(module, inputs, output)))
    if (summed := _entry(AGGREGATED, module)) is not None:
        graph, first = as_graph(inputs[0]), sums_before_product(module)
        yield replace(
            call,
            layer=f"{name} ({AGGREGATION})".lstrip(),
            kind=AGGREGATION,
            macs=graph.num_edges * summed(module),
            error=call.error or (call.weight and not first),  # the sum comes behind the product
            weight=False,
            owner=name if getattr(module, "quantizes_aggregation", False) else None,
            once=first and features is graph.constant,
        )
    if isinstance(module, nn.LSTM):
        inner = replace(call, error=call.error or call.weight)  # the products behind the first
        yield replace(inner, macs=lstm_inner_macs(module, inputs, output))
        gates = lstm_gate_operations(module, inputs, output)
        yield replace(inner, layer=f"{name} ({GATES})".lstrip(), kind=GATES, macs=gates, weight=False, owner=None)
    if module_kind(module) in pyramid_kinds():
        copies = replace(call, layer=f"{name} ({UPSAMPLING})".lstrip(), kind=UPSAMPLING, weight=False, owner=None)
        yield replace(copies, macs=upsampled(module, whole))
    if module_kind(module) in attention_kinds():
        products = replace(call, layer=f"{name} ({ATTENTION})".lstrip(), kind=ATTENTION)
        yield replace(
            products, macs=attention_macs(module, inputs, output), error=call.trainable, weight=call.trainable
        )


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Call], dict[str, int]]:
    """Return the calls of one forward pass and what no layer reported; runs a copy of the model on ``meta``."""
    shadow = copy.deepcopy(model).to("meta")
    for module in shadow.modules():
        if isinstance(module, LayerPrecision):
            module.set_bits(None, None)
    calls: list[Call] = []
    uncounted = _Uncounted(shadow)
    with watch(shadow, lambda module, call, outputs: calls.append(call)), torch.enable_grad(), uncounted:
        shadow(*_to_meta(inputs, {}))
    if not calls:
        raise ValueError(f"nothing to count in {type(model).__name__}: no {', '.join(k.__name__ for k in MACS)}")
    return calls, dict(uncounted.elements)


def _to_meta(value: Any, memo: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), value.detach().to("meta").requires_grad_(value.requires_grad))
    if isinstance(value, Graph):  # the edges stay where they are: only their numbers matter
        shadow = copy.copy(value)
        constant = value.constant
        return shadow.set_constant(None if constant is None else _to_meta(constant, memo))
    if isinstance(value, (tuple, list)):
        return type(value)(_to_meta(v, memo) for v in value)
    if isinstance(value, dict):
        return {k: _to_meta(v, memo) for k, v in value.items()}
    return value


# Operations that move, rename or create data cost nothing by any convention.
_FREE = frozenset(
    "view _unsafe_view reshape expand permute transpose t detach alias clone copy contiguous slice select unbind "
    "squeeze unsqueeze flatten cat stack split split_with_sizes chunk narrow unfold as_strided _to_copy empty "
    "zeros ones full empty_like zeros_like ones_like arange new_zeros new_ones empty_strided lift_fresh".split()
)

BESIDE = ("bmm", "_scaled_dot_product", "upsample_nearest")  # what attention and pyramids report themselves


class _Uncounted(TorchDispatchMode):
    """Collect the operations that run outside the layers which report their own MACs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.inside = self.beside = 0
        for what, modules in (("inside", _counted(model)), ("beside", _beside(model))):
            for module in modules.values():  # the model is a throw-away copy: the hooks need no removal
                module.register_forward_pre_hook(partial(self._count, what, 1))
                module.register_forward_hook(partial(self._count, what, -1))

    def _count(self, what: str, by: int, module: nn.Module, *_: Any) -> None:
        setattr(self, what, getattr(self, what) + by)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return False  # without data, "is all of this mask true?" cannot be known: the general case is counted
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        reported = self.inside or (self.beside and name.startswith(BESIDE))
        if not reported and name not in _FREE and isinstance(first, Tensor):
            self.elements[name] += first.numel()
        return out
