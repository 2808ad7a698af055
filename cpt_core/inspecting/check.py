"""Look before training: which products of a step run quantised, and which do not.

``summary`` lists what was converted and ``count_bitops`` prices shapes; neither sees what a program does with a
weight. ``check`` runs one step and watches every product that torch executes.

>>> from cpt_core.quantization.convert import QuantConfig, quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> found = check(model, (torch.ones(5, 4),))
>>> found.ok, f"{found.quantized_share:.0%}", [p.layer for p in found.float32]
(True, '67%', ['1'])
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef

from cpt_core.bitops.macs import PRODUCTS, part_of
from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.products import ADDS, Product, name_of
from cpt_core.bitops.watch import Watch, as_it_was, floating_in, tensors_in, within
from cpt_core.checks import arguments, unsharded
from cpt_core.formats.ladder import AFFINE
from cpt_core.kernels import graph
from cpt_core.kernels.operators import FAMILIES, LOOPS
from cpt_core.quantization.convert import QuantizationWarning, layer_precisions
from cpt_core.quantization.precision import HALF, LayerPrecision
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import Levels

BITS = 8  # any number would do: what is watched is whether an operand was rounded


@dataclass(frozen=True)
class Executed:
    """The products of one kind that a layer executed in one step.

    Attributes:
        layer: the innermost module in whose forward it ran; "" is the model itself.
        operation: torch's name of it, such as "addmm" or "convolution".
        backward: an error or weight-gradient product; else one of the forward pass.
        quantized: all of its operands came from a grid.
        reads: parameters that it takes as they are, by name: float32 weights.
        macs: multiply-accumulates of a step.
    """

    layer: str
    operation: str
    backward: bool
    quantized: bool
    reads: tuple[str, ...]
    macs: int


@dataclass(frozen=True)
class Check:
    """What ran in one step; ``print`` it.

    Attributes:
        products: all products, forward and backward, in the order in which they first ran.
        bypassed: layers that ``summary`` lists as quantised and whose weight took part in the step without a quantised
            product, or with others besides, each with the module that used it in float32; "?" where a tensor was made
            from the weight first.
        unused: layers that took no part in the step.
        mispriced: layer -> (MACs executed, MACs that ``count_bitops`` prices) of the forward pass, where they differ;
            "(backward)" -> those of the backward pass of all layers.
        no_gradient: parameters need gradients, and no backward pass was seen.
        backward_alone: layers, "" of none, with float32 products in the backward pass and none in the forward pass, as
            of a ``torch.autograd.Function`` whose ``backward`` multiplies.
    """

    products: tuple[Executed, ...]
    bypassed: Mapping[str, str]
    unused: tuple[str, ...]
    mispriced: Mapping[str, tuple[int, int]]
    no_gradient: bool = False
    backward_alone: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether both passes were seen, all layers listed as quantised ran quantised, and every product is priced."""
        return not (self.bypassed or self.mispriced or self.no_gradient or self.backward_alone)

    @property
    def float32(self) -> list[Executed]:
        """The products of the forward pass that ran unquantised, the largest first."""
        return sorted((p for p in self.products if not p.backward and not p.quantized), key=lambda p: -p.macs)

    @property
    def quantized_share(self) -> float:
        """MACs of the forward pass that ran quantised, of all."""
        forward = [p for p in self.products if not p.backward]
        return sum(p.macs for p in forward if p.quantized) / max(1, sum(p.macs for p in forward))

    def __str__(self) -> str:
        names = {
            p: (p.layer or "(model)") + (f" (reads {', '.join(p.reads)})" if p.reads else "") for p in self.products
        }
        width = max([len(n) for n in names.values()] + [5])
        lines = [f"{'layer':<{width}}  {'product':<24} {'pass':<8}  {'MACs':>15}  precision"]
        for p, name in names.items():
            pass_, kind = "backward" if p.backward else "forward", "quantised" if p.quantized else "float32"
            lines.append(f"{name:<{width}}  {p.operation:<24} {pass_:<8}  {p.macs:>15,}  {kind}")
        macs = sum(p.macs for p in self.products if not p.backward)
        lines.append(f"quantised: {self.quantized_share:.1%} of the {macs:,} MACs of the products of a forward pass")
        for layer, reader in self.bypassed.items():
            lines.append(f"listed as quantised, but used in float32: {layer} (by {reader or 'the model'})")
        if self.unused:
            lines.append(f"took no part in the step: {', '.join(self.unused)}")
        for layer, (ran, priced) in self.mispriced.items():
            lines.append(f"executed and priced MACs differ: {layer or '(model)'}: {ran:,} ran, {priced:,} priced")
        if self.backward_alone:
            names_alone = ", ".join(name or "(model)" for name in self.backward_alone)
            lines.append(f"float32 products in the backward pass alone, as of an autograd.Function: {names_alone}")
        if self.no_gradient:
            lines.append("no parameter got a gradient: no backward pass was seen from the tensors that forward returns")
        return "\n".join(lines)


def check(model: nn.Module, inputs: tuple[Any, ...]) -> Check:
    """Run one step of a converted model and tell which of its products were quantised.

    A forward pass at 8 bits in the mode the model is in, and the backward pass of the sum of its outputs, both eager.
    Parameters, gradients, statistics, ranges, bits and random numbers are afterwards what they were. What is computed
    on codes, or in other formats than the paper's, is checked as the paper's simulation, which has the same operands;
    ``summary`` says which products are on codes.

    Args:
        model: converted by ``quantize_``; on the device of the inputs.
        inputs: the arguments of its forward; real data of any batch size.

    Raises:
        ValueError: when nothing in the model is quantised, it is sharded, or it has a reentrant checkpoint.
    """
    arguments(inputs)
    layers = layer_precisions(model)
    unsharded(model, "check it")
    watch = _Grids(model)
    with as_it_was(model), watch.undone(), _simulated(layers.values()), precision(model, BITS, BITS):
        modules = dict(model.named_modules())
        with warnings.catch_warnings(), watch.following(modules), watch.calling(modules), watch:
            warnings.simplefilter("ignore", QuantizationWarning)  # the answer says it, and the summary from now on
            used = _step(model, inputs, watch)
    products = tuple(Executed(*key, macs) for key, macs in watch.macs.items() if macs)  # an expert may have no token
    ran = {p.layer for p in products if p.quantized and not p.backward}
    plain = {p.layer: p.layer for p in products if not p.quantized}
    unexplained = any(not p.backward and p.layer not in layers for p in products if not p.quantized)
    read = {parameter: p.layer for p in products if not p.backward for parameter in p.reads}
    bypassed, unused = {}, []
    holders: defaultdict[int, list[str]] = defaultdict(list)  # all names of a parameter, several where modules share it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders[id(parameter)].append(name)
    for name in layers:
        # of whose parameters nobody outside has a share
        own = {names[0] for names in holders.values() if all(within(n, [name]) for n in names)}
        reader = plain.get(name, next((read[n] for n in own if n in read), None))
        if reader is not None:
            bypassed[name] = reader
        elif name not in ran and own & used - watch.rounded and unexplained:
            bypassed[name] = "?"
        elif name not in ran and not own & used:
            unused.append(name)
    no_gradient = any(p.requires_grad for p in model.parameters()) and not (used or any(p.backward for p in products))
    forward = {p.layer for p in products if not (p.quantized or p.backward)}
    alone = dict.fromkeys(p.layer for p in products if p.backward and not p.quantized and p.layer not in forward)
    return Check(products, bypassed, tuple(unused), _mispriced(model, inputs, products), no_gradient, tuple(alone))


@contextmanager
def _simulated(layers: Iterable[LayerPrecision]) -> Iterator[None]:
    """Multiply in float32, on the paper's grids, inside the block.

    Codes are other tensors than those that were rounded to a grid; a ladder may lack the level, and rotations of its
    formats are products themselves.
    """
    before = [(p, (p.execution, p.ladders, p.in_force)) for p in layers]
    try:
        for p, _ in before:
            p.execution, p.ladders, p.in_force = "simulated", Levels(*[AFFINE] * 4), None
        yield
    finally:
        for p, state in before:
            p.execution, p.ladders, p.in_force = state  # in this order: bits are in force by ladders


def _mispriced(model: nn.Module, inputs: tuple[Any, ...], products: Sequence[Executed]) -> dict[str, tuple[int, int]]:
    """Compare the MACs with the plan that prices every operation by itself: forward by layer, backward in sum."""
    ran: Counter[str] = Counter()
    for p in products:
        ran[p.layer] += 0 if p.backward else p.macs
    plan = count_bitops(model, inputs, convention="per_op")
    names = {layer: {layer, part_of(layer, PRODUCTS)} for layer in ran}
    names |= {n: {n} for n in plan.macs.keys() - set().union(*names.values()) if n.endswith(f"({PRODUCTS})")}
    found = {layer: (ran[layer], sum(plan.macs.get(n, 0) for n in of)) for layer, of in names.items()}
    passes = [plan.bitops.get(n, {}) for of in names.values() for n in of]
    priced = sum(p.get("error", 0) + p.get("weight", 0) for p in passes) // FULL_PRECISION**2
    found["(backward)"] = sum(p.macs for p in products if p.backward), priced
    return {layer: both for layer, both in found.items() if both[0] != both[1]}


def _step(model: nn.Module, inputs: tuple[Any, ...], watch: _Grids) -> set[str]:
    """Run forward and backward; return the names of the parameters that took part."""
    sums = [y.real.float().sum() for y in tensors_in(model(*inputs)) if y.requires_grad]
    watch.backward = True
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = [*trained.values(), *(x for x in tensors_in(inputs) if x.requires_grad)]
    if not sums or not wanted:
        return set()
    try:
        with torch.autocast(sums[0].device.type, enabled=False):  # as in training: the block is around the forward pass
            gradients = torch.autograd.grad(sums, wanted, allow_unused=True)
    except RuntimeError as problem:
        if "use_reentrant" not in str(problem):
            raise
        raise ValueError("a reentrant checkpoint hides its products; give it use_reentrant=False") from problem
    return {name for name, gradient in zip(trained, gradients, strict=False) if gradient is not None}


class _Grids(Watch):
    """Collect every product, and follow the tensors that were rounded to a grid.

    A storage counts as quantised from the rounding on, through what only moves or scales its values; one that is
    made from it by moving values counts as well.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backward = False
        self.macs: Counter[tuple[str, str, bool, bool, tuple[str, ...]]] = Counter()
        self._rounded: set[StorageWeakRef] = set()
        self._layer_of: dict[StorageWeakRef, str] = {}  # whose operand a storage was, for the backward pass
        self._written: list[tuple[Tensor, Tensor]] = []  # parts of parameters, and what they were
        self.rounded: set[str] = set()  # parameters that a grid was made from
        self._parameters = {storage_of(p): name for name, p in model.named_parameters() if storage_of(p) is not None}

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put parameters that were written to back afterwards."""
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in reversed(self._written):
                    tensor.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            written = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            self._written += [(t, t.clone()) for t in tensors_in(written) if storage_of(t) in self._parameters]
        if (loop := LOOPS.get(func._schema.name)) is not None:  # its plain execution, which gives the same bits
            with self:
                return loop(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def product(self, operation: Any, args: Sequence[Any], found: list[Product], out: Any) -> None:
        """Count a product, and see whether its operands are quantised."""
        name = name_of(operation)
        operands = [a for a in args if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex())]
        if name in ADDS:
            operands = operands[1:]
        elif name in _BIASED:
            operands = operands[:2]
        keys = [storage_of(a) for a in operands]
        known = [self._layer_of[k] for k in keys if k in self._layer_of]
        layer = self.names[-1] if self.names else known[0] if known else ""
        backward = self.backward and not self.names  # else it is recomputed there
        if not backward:
            self._layer_of |= dict.fromkeys((k for k in keys if k is not None), layer)
        on_grid = [k in self._rounded and a.dtype not in HALF for k, a in zip(keys, operands, strict=True)]
        quantized = bool(operands) and all(on_grid)
        reads = tuple(self._parameters[k] for k in keys if k in self._parameters)
        self.macs[layer, name, backward, quantized, reads] += sum(product.macs for product in found)

    def other(self, operation: Any, args: Sequence[Any], out: Any) -> None:
        """Follow what was rounded."""
        name, in_place = name_of(operation), operation._schema.name.endswith("_")
        target = next(map(storage_of, floating_in(out)), None)
        if target is None:
            return
        sources = [k for a in floating_in(args) if (k := storage_of(a)) is not None]
        if name in _ROUNDS:
            self._rounded.add(target)
            self.rounded |= {self._parameters[k] for k in sources if k in self._parameters}
        elif name in _MOVES or (name in _SCALES and not in_place and len(sources) == 1):
            sources = sources[1:] if name == "copy" else sources  # copy_(target, source)
            if sources and all(k in self._rounded for k in sources):
                self._rounded.add(target)
                if known := [self._layer_of[k] for k in sources if k in self._layer_of]:
                    self._layer_of[target] = known[0]
        elif in_place and name not in _SCALES:
            self._rounded.discard(target)


_ROUNDS = frozenset(
    f"{family}::{name}"
    for family in FAMILIES
    for name in ("round_to_grid", "round_in_range", "fake_quantize", *graph.ON_GRID)
)
# the third is added
_BIASED = "convolution conv_tbc linear mkldnn::_linear_pointwise torchvision::deform_conv2d".split()

# what moves values without changing them (to a wider type at most: products in half precision do not count) ...
_MOVES = frozenset(
    "copy clone contiguous _to_copy cat stack index index_select gather expand constant_pad_nd reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d im2col".split()
)
_SCALES = frozenset(("mul", "div", "add", "sub"))  # ... and what takes a grid to a grid, in place


def storage_of(x: Tensor) -> StorageWeakRef | None:
    """Return a key of the memory of a tensor; None for a sparse tensor, which has no memory of its own."""
    try:
        return StorageWeakRef(x.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
