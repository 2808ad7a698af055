"""BitOps of a model: a plan before training, a ledger of what really ran.  Paper: section 4.1.

Every layer reports the multiply-accumulates (MACs) of its own call; a pass costs MACs * b_a * b_b / 32**2.
Two conventions price them:

- ``"paper"``: all counted work at the bits of the step, three products for every layer, BatchNorm included, as the
  authors price it, and the upsampling of feature pyramids;
- ``"per_op"``: what is quantised at its bits, the rest at 32, and only the products that are computed (the first
  layer, for example, needs no error product). It also counts what the authors leave out: the sums over neighbours in
  graph convolutions, an operation per edge and feature, and both products of attention.

>>> plan = count_bitops(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.ones(1, 4),))
>>> plan.forward_macs, plan.total
(8, 24.0)
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.convert import _Quantized, attention_kinds, layer_precisions, module_kind
from cpt_core.cost import FULL_PRECISION
from cpt_core.graph_layers import GraphConv, MatrixNorm, SAGEConv
from cpt_core.graph_ops import Graph, as_graph
from cpt_core.layers import LayerPrecision
from cpt_core.scheduler import Schedules, assign_schedules

CONVENTIONS = ("paper", "per_op")
PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy

# --- what a call costs ----------------------------------------------------------------------------


def conv_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a convolution: outputs times kernel elements times input channels per group (biases are free)."""
    return y.numel() * module.weight[0].numel()  # type: ignore[index]


def linear_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a linear layer: outputs times inputs of one output (the bias is free)."""
    return y.numel() * int(module.in_features)  # type: ignore[arg-type]


def layer_norm_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of a layer normalisation: 4 per element, as the counters of the authors have it."""
    return 4 * y.numel()


def lstm_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the first input product of an LSTM; those behind it are ``lstm_inner_macs``."""
    return _rows(y) * _units(module) // module.num_layers * 4 * module.input_size


def lstm_inner_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the products with hidden states, and of the input products of higher layers."""
    above = _units(module) // module.num_layers * (module.num_layers - 1) * y.shape[-1]  # y: what the layers hand on
    return _rows(y) * 4 * (_units(module) * module.hidden_size + above)


def lstm_gate_operations(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of the gates and cells of an LSTM.

    The authors add 15.2 million by hand for 35 steps of 20 sequences, 800 wide: 27 per unit and step, and 5 per unit
    and sequence that their rounded numbers have besides.
    """
    x = inputs[0]
    if isinstance(x, PackedSequence):
        sequences = int(x.batch_sizes[0])
    else:
        sequences = x.shape[0 if module.batch_first else 1] if x.dim() == 3 else 1
    return _units(module) * (27 * _rows(y) + 5 * sequences)


def _rows(y: Tensor) -> int:
    return y.numel() // y.shape[-1]


def _units(module: Any) -> int:
    return module.num_layers * (2 if module.bidirectional else 1) * module.hidden_size


def attention_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of both products of self-attention, (B, T, C) in: 2 B T T C."""
    hidden = next(x for x in inputs if isinstance(x, Tensor))
    return 2 * hidden.numel() * hidden.shape[1]


def norm_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of a normalisation: 5 per element, 4 without affine, 2 or 1 with fixed statistics."""
    affine = getattr(module, "weight", None) is not None
    fixed = not module.training and getattr(module, "running_mean", None) is not None
    return y.numel() * ((2 if affine else 1) if fixed else (5 if affine else 4))


def graph_conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a GCN layer's product; its rows are the sources where the product comes before the sum."""
    graph = as_graph(inputs[0])
    rows = graph.num_src if module._in_feats > module._out_feats else graph.num_dst
    return rows * module._in_feats * module._out_feats


def sage_conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the two products of a GraphSAGE layer."""
    graph = as_graph(inputs[0])
    rows = graph.num_src if module._in_src_feats > module._out_feats else graph.num_dst
    return (rows + graph.num_dst) * module._in_src_feats * module._out_feats


MACS: dict[type[nn.Module], Callable[[Any, tuple[Any, ...], Tensor], int]] = {
    nn.Conv1d: conv_macs,
    nn.Conv2d: conv_macs,
    nn.Conv3d: conv_macs,
    nn.Linear: linear_macs,
    nn.BatchNorm1d: norm_macs,
    nn.BatchNorm2d: norm_macs,
    nn.BatchNorm3d: norm_macs,
    nn.LayerNorm: layer_norm_macs,
    MatrixNorm: layer_norm_macs,
    nn.LSTM: lstm_macs,
    GraphConv: graph_conv_macs,
    SAGEConv: sage_conv_macs,
}


# Layers with a sum over neighbours, beside their product: the number of features that are summed.
AGGREGATED: dict[type[nn.Module], Callable[[Any], int]] = {
    GraphConv: lambda m: min(m._in_feats, m._out_feats),
    SAGEConv: lambda m: min(m._in_src_feats, m._out_feats),
}
AGGREGATION, ATTENTION, GATES, UPSAMPLING = "aggregation", "attention", "gates", "upsampling"
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


def pyramid_kinds() -> set[type[nn.Module]]:
    """Return torchvision's feature pyramid, if the program uses it."""
    module = sys.modules.get("torchvision.ops.feature_pyramid_network")
    return {module.FeaturePyramidNetwork} if module is not None else set()


def upsampled(module: Any, y: Mapping[str, Tensor]) -> int:
    """Return the elements that a feature pyramid makes by upsampling: all levels but the coarsest of its inputs'."""
    return sum(level.numel() for level in list(y.values())[: len(module.inner_blocks) - 1])


def _tensors(value: Any) -> list[Tensor]:
    """The floating tensors of a layer's output: a tensor, a tuple such as an LSTM's, a dict such as a pyramid's."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return _tensors(tuple(value.values()))
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


@contextmanager
def _watch(model: nn.Module, on_call: Callable[[nn.Module, Call, list[Tensor]], None]) -> Iterator[None]:
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
        graph, first = as_graph(inputs[0]), _sums_first(module)
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


def _sums_first(module: Any) -> bool:
    inputs = module._in_feats if hasattr(module, "_in_feats") else module._in_src_feats
    return inputs <= module._out_feats


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitOpsPlan:
    """BitOps of a training run, in units of one 32 x 32-bit MAC; ``print`` it for a table.

    Attributes:
        convention: "paper" or "per_op".
        steps: optimizer steps counted.
        macs: forward MACs of one step by layer.
        bitops: layer -> pass -> squared bits x MACs, exact integers.
        uncounted: operation -> output elements of one forward pass, for everything that is not priced: elementwise
            work, pooling, and products written as plain functions; by "paper" also "aggregation" and "attention", the
            operations of sums over neighbours and of attention's products; by "per_op" also "upsampling", which copies.
    """

    convention: str
    steps: int
    macs: Mapping[str, int]
    bitops: Mapping[str, Mapping[str, int]]
    uncounted: Mapping[str, int]

    @property
    def forward_macs(self) -> int:
        """MACs of the forward pass of one step."""
        return sum(self.macs.values())

    @property
    def by_layer(self) -> dict[str, float]:
        """BitOps of every layer."""
        return {layer: sum(passes.values()) / FULL_PRECISION**2 for layer, passes in self.bitops.items()}

    @property
    def by_pass(self) -> dict[str, float]:
        """BitOps of the forward, error and weight-gradient products."""
        return {p: sum(b.get(p, 0) for b in self.bitops.values()) / FULL_PRECISION**2 for p in PASSES}

    @property
    def total(self) -> float:
        """BitOps of the run."""
        return sum(sum(passes.values()) for passes in self.bitops.values()) / FULL_PRECISION**2

    def __str__(self) -> str:
        """Return a table by layer."""
        width = max([len(n) for n in self.macs] + [5])
        lines = [f"{'layer':<{width}}  {'MACs/step':>15}  {'BitOps':>12}"]
        lines += [f"{n:<{width}}  {self.macs[n]:>15,}  {b:>12.5g}" for n, b in self.by_layer.items()]
        lines.append(f"{'total':<{width}}  {self.forward_macs:>15,}  {self.total:>12.5g}")
        if self.uncounted:
            lines.append("not counted: " + ", ".join(f"{op} ({n:,} elements)" for op, n in self.uncounted.items()))
        return "\n".join(lines)


def count_bitops(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: Schedules | None = None,
    *,
    convention: str = "paper",
    q_grad: int | None = None,
) -> BitOpsPlan:
    """Count the BitOps of training ``model`` for a whole schedule, before it runs.

    The forward pass is traced once on the ``meta`` device: no data is computed and the model is not touched.

    Args:
        model: any module; converted by ``quantize_`` or not.
        inputs: the arguments of its forward for ONE optimizer step (the whole batch); only shapes matter.
        schedule: as for ``PrecisionScheduler``; None counts one step at 32 bits.
        convention: "paper" or "per_op", see the module.
        q_grad: gradient bits; None takes the schedule's ``q_max``.

    Raises:
        ValueError: for an unknown convention, or when nothing in the model can be counted.

    Paper: section 4.1.
    Differs: "paper" prices the float32 layers (classifier, BatchNorm) at q bits, as the authors' scripts do.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown convention {convention!r}; choose from {', '.join(CONVENTIONS)}")
    calls, uncounted = trace(model, inputs)
    return price(calls, uncounted, _bits_per_layer(model, calls, schedule, q_grad), convention)


def price(
    calls: list[Call],
    uncounted: Mapping[str, int],
    bits: Mapping[str, tuple[np.ndarray, np.ndarray]],
    convention: str,
) -> BitOpsPlan:
    """Price the calls of one step at the (forward bits, gradient bits) of every step, by layer; see ``count_bitops``.

    Layers that ``bits`` does not name are in float32; the key "" holds the bits at which "paper" prices them.
    """
    result: dict[str, Counter[str]] = {}
    macs: Counter[str] = Counter()
    left_out: Counter[str] = Counter(uncounted)
    for call in calls:
        if not call.passes(convention):
            left_out[call.kind] += call.macs
            continue
        result.setdefault(call.layer, Counter())
        macs[call.layer] += call.macs
        if call.owner is not None and call.owner in bits:
            q, g = bits[call.owner]
        else:
            q, g = bits[""] if convention == "paper" else _float32(bits[""])
        if call.once:
            q = np.unique(q)
        for name in call.passes(convention):
            result[call.layer][name] += call.macs * int((q * (q if name == "forward" else g)).sum())
    return BitOpsPlan(convention, len(bits[""][0]), dict(macs), {k: dict(v) for k, v in result.items()}, dict(left_out))


def _float32(like: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.full_like(like[0], FULL_PRECISION), np.full_like(like[1], FULL_PRECISION)


def _bits_per_layer(
    model: nn.Module, calls: list[Call], schedule: Schedules | None, q_grad: int | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    if schedule is None:
        one = np.array([FULL_PRECISION])
        return {"": (one, one)}
    converted = any(isinstance(m, LayerPrecision) for m in model.modules())
    names = list(layer_precisions(model)) if converted else list(dict.fromkeys(c.owner for c in calls if c.owner))
    bits = {}
    for s, layers in assign_schedules(schedule, names).values():
        pair = (s.bits(), np.full(s.total_steps, q_grad or s.q_max))
        bits.update(dict.fromkeys(layers, pair))
    # work outside the quantised layers has no bits of its own: "paper" takes the highest of each step
    pairs = list(bits.values())
    bits[""] = (np.max([q for q, _ in pairs], axis=0), np.max([g for _, g in pairs], axis=0))
    return bits


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Call], dict[str, int]]:
    """Return the calls of one forward pass and what no layer reported; runs a copy of the model on ``meta``."""
    shadow = copy.deepcopy(model).to("meta")
    for module in shadow.modules():
        if isinstance(module, LayerPrecision):
            module.set_bits(None, None)
    calls: list[Call] = []
    uncounted = _Uncounted(shadow)
    with _watch(shadow, lambda module, call, outputs: calls.append(call)), torch.enable_grad(), uncounted:
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


# --- the ledger -----------------------------------------------------------------------------------


class BitOpsLedger:
    """Count the BitOps that really run while a model trains, pass by pass and at the bits in force.

    Use it as a context manager around training. Forward passes count while the model is in training mode; error and
    weight-gradient products count when their backward pass runs, so skipped backward passes, recomputation and early
    stops show up. It reads Python numbers only and does not change the computation; it does not see inside a model
    that was compiled.

    >>> model = nn.Sequential(nn.Linear(4, 2))
    >>> with BitOpsLedger(model) as ledger:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> ledger.total("per_op")
    16.0
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch ``model``, converted or not."""
        self.model = model
        self._sums: dict[str, dict[str, Counter[str]]] = {c: {} for c in CONVENTIONS}
        self._once: set[tuple[str, tuple[int, int]]] = set()

    def __enter__(self) -> BitOpsLedger:
        """Start to count."""
        self._context = _watch(self.model, self._on_call)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting."""
        self._context.__exit__(*exception)

    def by_layer(self, convention: str = "paper") -> dict[str, float]:
        """Return the BitOps of every layer so far."""
        return {layer: sum(passes.values()) / FULL_PRECISION**2 for layer, passes in self._sums[convention].items()}

    def by_pass(self, convention: str = "paper") -> dict[str, float]:
        """Return the BitOps of the forward, error and weight-gradient products so far."""
        return {p: sum(b[p] for b in self._sums[convention].values()) / FULL_PRECISION**2 for p in PASSES}

    def total(self, convention: str = "paper") -> float:
        """Return the BitOps so far, in units of one 32 x 32-bit MAC."""
        return sum(sum(passes.values()) for passes in self._sums[convention].values()) / FULL_PRECISION**2

    def _on_call(self, module: nn.Module, call: Call, outputs: list[Tensor]) -> None:
        if not self.model.training:
            return
        own = _bits_in_force([module.precision]) if isinstance(module, _Quantized) and call.owner else None
        model = own or _bits_in_force([m for m in self.model.modules() if isinstance(m, LayerPrecision)])
        full = (FULL_PRECISION, FULL_PRECISION)
        bits = {"paper": model or full, "per_op": own or full}
        if call.once:
            if (call.layer, bits["per_op"]) in self._once:
                return
            self._once.add((call.layer, bits["per_op"]))
        self._add(call, bits, ("forward",))
        backward = iter([call])  # counted once, whichever of the outputs the gradient comes through first

        def on_gradient(gradient: Tensor) -> None:
            for found in backward:
                self._add(found, bits, ("error", "weight"))

        for output in outputs if call.trainable else ():
            if output.requires_grad:
                output.register_hook(on_gradient)

    def _add(self, call: Call, bits: Mapping[str, tuple[int, int]], passes: tuple[str, ...]) -> None:
        for convention, (q, g) in bits.items():
            for name in call.passes(convention):
                if name in passes:
                    sums = self._sums[convention].setdefault(call.layer, Counter())
                    sums[name] += call.macs * q * (q if name == "forward" else g)


def _bits_in_force(layers: list[LayerPrecision]) -> tuple[int, int] | None:
    if not layers:
        return None
    q = max(layer.bits or FULL_PRECISION for layer in layers)
    return q, max(layer.q_grad or FULL_PRECISION for layer in layers)
