"""Watch a forward pass: every call of a layer that reports operations, and what no layer reports."""

from __future__ import annotations

import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cpt_core.bitops import macs as counted
from cpt_core.bitops.macs import AGGREGATION, GATES, MACS, PARTS, PLAIN, PRODUCTS, UPSAMPLING, Elements, part_of
from cpt_core.bitops.products import Product, first_of, name_of
from cpt_core.bitops.watch import (
    Watch,
    another,
    as_it_was,
    floating_in,
    inputs_of,
    shadow_of,
    tensors_in,
    within,
)
from cpt_core.checks import arguments
from cpt_core.graphs.graph import as_graph
from cpt_core.quantization.coverage import module_kind
from cpt_core.quantization.layers import PASSES
from cpt_core.quantization.operations import QuantOperations

CONVENTIONS = ("paper", "per_op")

# what a convention does not price: the authors' counters do not see some products, and see copies as operations
LEFT_OUT = {"paper": (AGGREGATION, PRODUCTS), "per_op": (UPSAMPLING,)}


@dataclass(frozen=True)
class Call:
    """One call of a layer in a forward pass, or a part of it that is priced by itself."""

    layer: str
    kind: str
    macs: int
    error: bool  # the error product is computed, if a gradient comes back: the input needs one
    weight: bool  # the weight-gradient product likewise: the weight needs one
    owner: str | None = None  # the layer at whose bits it runs; None: float32 (FP-Agg)
    once: bool = False  # computed once per bit width in a whole run: the sum of constant features
    elements: Elements = (0, 0, 0)  # of the first operand, of the second (the weight), of the result
    again: bool = False  # recomputed in the backward pass, which the paper does not price

    @property
    def module(self) -> str:
        """The name of the module, without that of a part."""
        return self.layer if self.kind not in PARTS else self.layer.rpartition("(")[0].rstrip()

    def part(self, kind: str, **changes: Any) -> Call:
        """Return the call of a part of the layer."""
        return replace(self, layer=part_of(self.module, kind), kind=kind, **changes)

    def passes(self, convention: str) -> tuple[str, ...]:
        """Return the passes of a training step that this call causes."""
        if self.kind in LEFT_OUT[convention] or (self.again and convention == "paper"):
            return ()
        if convention == "paper":
            return PASSES
        return ("forward", *(("error",) if self.error else ()), *(("weight",) if self.weight else ()))

    def moved(self, name: str) -> Elements:
        """Return the elements of a pass's product: operands, as ``costs.PASSES`` orders them, and result."""
        x, w, y = self.elements
        return {"forward": (x, w, y), "error": (y, w, x), "weight": (y, x, w)}[name]


def _count_of(module: nn.Module) -> Any:
    """Look a module up in ``MACS`` by class; one with a forward of its own is no layer, but what runs in it."""
    kind = module_kind(module)
    return next((c for k, c in MACS.items() if issubclass(kind, k) and k.forward is kind.forward), None)


def _counted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that report their MACs, without those inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not within(name, found) and (_count_of(module) or counted.graph_form(module)) is not None:
            found[name] = module
    return found


# Operations that move, rename or create data cost nothing by any convention.
_FREE = frozenset(
    "view _unsafe_view reshape expand permute transpose t detach alias clone copy contiguous slice select unbind "
    "squeeze unsqueeze flatten cat stack split split_with_sizes chunk narrow unfold as_strided _to_copy empty "
    "zeros ones full empty_like zeros_like ones_like arange new_zeros new_ones empty_strided lift_fresh".split()
)

BESIDE = "upsample_nearest"  # what pyramids report themselves


class Calls(Watch):
    """Reports every call of a layer that can be counted, and every product that runs in the model outside of them.

    Layers report through hooks. Other products are seen as operations of torch while a module of the model runs; the
    innermost module gives them their name. Use ``with calls.on():``.

    Args:
        model: what to watch.
        on_call: called with the module, the call and those of its outputs that need a gradient.
        on_other: called with the name and the output elements of every operation that nothing reports.
        unseen: modules not to look into. What runs in them cannot be told from what runs around them, so if there are
            any, only layers are reported.
        answer: to a model on ``meta`` that asks whether something of its data is true.
    """

    def __init__(
        self,
        model: nn.Module,
        on_call: Callable[[nn.Module, Call, list[Tensor]], None],
        on_other: Callable[[str, int], None] = lambda name, elements: None,
        unseen: Collection[str] = (),
        answer: bool = False,
    ) -> None:
        super().__init__()
        self.answer, self.asked = answer, False
        self.model, self.on_call, self.on_other, self.unseen = model, on_call, on_other, unseen
        self.layers = _counted(model)
        # feature pyramids have operations of their own beside the layers inside them
        self.wholes = {n: m for n, m in model.named_modules() if module_kind(m) in counted.pyramid_kinds()}
        self.looking = self.inside = self.beside = False
        self.last: tuple[list[Call], Tensor] | None = None  # autograd marks an output after its operation has run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions inside the model stay compiled."""
        return True

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch inside a ``with`` block."""
        inner = {} if self.unseen else dict(self.model.named_modules())
        with ExitStack() as hooks:
            for name, module in (self.layers | self.wholes).items():
                if not within(name, self.unseen):
                    report = partial(self._report, name)
                    hooks.enter_context(module.register_forward_hook(report, with_kwargs=True))
            hooks.enter_context(self.following(inner))
            for name, module in inner.items():
                if isinstance(module, QuantOperations):
                    hooks.callback(setattr, module.catching, "report", module.catching.report)
                    module.catching.report = partial(self._on_codes, name)
            yield

    def _report(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if another(module, (self.layers | self.wholes)[name]):
            return
        outputs = floating_in(output)
        given = signature(module.forward).bind(*args, **kwargs)
        given.apply_defaults()
        for call in _calls_of(name, module, given.args, output, outputs[0]):
            self.on_call(module, call, [y for y in outputs if y.requires_grad])

    def ended(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Report a layer whose forward was called directly."""
        if name in self.layers or name in self.wholes:
            self._report(name, module, args, kwargs, output)

    def pause(self) -> None:
        """Report what has run."""
        self._report_last()

    def resume(self) -> None:
        """Look for operations while a module runs, but not inside a layer: there the mode only takes time."""
        self.inside = any(name in self.layers for name in self.names)
        self.beside = any(name in self.wholes for name in self.names)
        wanted = bool(self.names) and not self.inside
        if wanted and not self.looking:
            self.__enter__()
        elif self.looking and not wanted and (not self.names or _get_current_dispatch_mode() is self):
            self.__exit__(None, None, None)
        else:
            return
        self.looking = wanted

    def _on_codes(self, name: str, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Report a product on codes."""
        self._report_last()
        macs, elements = a.numel() * b.shape[-1], (a.numel(), b.numel(), y.numel())
        call = Call(part_of(name, PRODUCTS), PRODUCTS, macs, a.requires_grad, b.requires_grad, name, elements=elements)
        self.on_call(self.model.get_submodule(name), call, [y] * y.requires_grad)

    def _catcher(self) -> tuple[str | None, bool]:
        """Return the name of the module that quantises the product that is running, None where none does.

        And whether the product is one on codes, which reports itself.
        """
        for name in reversed(self.names):
            module = self.model.get_submodule(name)
            if isinstance(module, QuantOperations) and module.catching.multiplying:
                return name, module.catching.on_codes
        return None, False

    def _report_last(self) -> None:
        """Report the operation that ran last."""
        if self.last is not None:
            (calls, output), self.last = self.last, None
            for call in calls:
                self.on_call(self.model.get_submodule(call.owner or ""), call, [output] * output.requires_grad)

    def product(self, operation: Any, args: Sequence[Any], found: list[Product], out: Any) -> None:
        """Keep a product that no layer reports, until the next operation."""
        owner, on_codes = (None, True) if self.inside else self._catcher()
        if not on_codes:
            layer = part_of(self.names[-1], PRODUCTS)
            of = [Call(layer, PRODUCTS, p.macs, p.error, p.weight, owner, elements=p.elements) for p in found]
            self.last = of, first_of(out)

    def other(self, operation: Any, args: Sequence[Any], out: Any) -> None:
        """Report an operation that nothing reports and that is not free."""
        name, first = name_of(operation), first_of(out)
        reported = self.inside or (self.beside and name.startswith(BESIDE))
        if not reported and name not in _FREE and isinstance(first, Tensor):
            self.on_other(name, first.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._report_last()
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            self.asked = True  # without data, "is all of this mask true?" cannot be known
            return self.answer
        return super().__torch_dispatch__(func, types, args, kwargs)


def _calls_of(name: str, module: nn.Module, inputs: tuple[Any, ...], whole: Any, output: Tensor) -> Iterator[Call]:
    """Yield the calls of one forward pass; ``output`` is the first tensor of the ``whole`` that it returned."""
    features = next(tensors_in(inputs))
    weights = [p for n, p in module.named_parameters() if any(w.startswith("weight") for w in n.split("."))]
    stored = sum(p.numel() for p in weights)
    call = Call(
        layer=name,
        kind=module_kind(module).__name__,
        macs=0,
        error=features.requires_grad,
        weight=any(p.requires_grad for p in weights),
        owner=name,
        elements=(features.numel(), stored, output.numel()),
    )
    if isinstance(module, nn.RNNBase):
        first_elements, inner_elements = counted.recurrent_elements(module, features, output)
        call = replace(call, elements=first_elements)
    if isinstance(module, PLAIN):
        call = call.part(PRODUCTS)
    if (form := counted.graph_form(module)) is not None:
        graph = as_graph(inputs[0])
        inside, out = form.lengths(module).activation
        width, first = min(inside, out), inside <= out  # the narrower side is summed
        rows, root = graph.num_dst if first else graph.num_src, graph.num_dst * form.ROOT
        read = rows * inside + root * getattr(module, "_in_dst_feats", inside)  # DGL's destinations may have others
        yield replace(call, macs=read * out, elements=(read, stored, (rows + root) * out))
        yield call.part(
            AGGREGATION,
            macs=graph.num_edges * width,
            error=call.error or (call.weight and not first),  # the sum comes behind the product
            weight=False,
            owner=name if getattr(module, "quantizes_aggregation", False) else None,
            once=first and features is graph.constant,
            elements=(graph.num_src * width, graph.num_edges, graph.num_dst * width),
        )
    elif (count := _count_of(module)) is not None:
        yield replace(call, macs=int(count(module, inputs, output)))
    if isinstance(module, nn.RNNBase):
        inner = replace(call, error=call.error or call.weight, elements=inner_elements)  # behind the first
        macs, started = counted.rows_of(output) * inner_elements[1], counted.started_macs(module, inputs)
        yield replace(inner, macs=macs - started)
        yield replace(inner, macs=started, error=False, elements=(0, 0, 0))  # they are moved with the others
    if isinstance(module, nn.LSTM):
        operations, units = counted.lstm_gate_operations(module, inputs, output), counted.units_of(module)
        states = counted.rows_of(output) * units
        moved = (4 * states, 0, 2 * states)  # what the products left; cell and hidden state
        yield inner.part(GATES, macs=operations, weight=False, owner=None, elements=moved)
    if module_kind(module) in counted.pyramid_kinds():
        moved = counted.upsampled_elements(module, whole)
        yield call.part(UPSAMPLING, macs=moved[-1], weight=False, owner=None, elements=moved)


def trace(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Call], dict[str, int]]:
    """Return the calls of one forward pass, and the output elements of operations that nothing reports.

    A copy of the model runs: on ``meta``, where nothing is computed; a model that needs data to run, or whose products
    depend on them, runs on the data given, and a warning says so.
    """
    arguments(inputs)
    given = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    without = any(t.is_meta for t in given)
    shadow = model
    calls: list[Call] = []
    others: dict[str, int] = {}
    try:
        shadow = shadow_of(model, meta=True)
        calls, others, depends = _on_shapes(model, shadow, inputs)
        why = f"what {type(model).__name__} multiplies depends on its data" if depends else ""
    except Exception as problem:
        said = textwrap.shorten(str(problem) or type(problem).__name__, 160)
        why = f"{_where(problem, shadow)} does not run on shapes alone ({said})"
        if without:
            raise ValueError(f"{why}; give the model and its inputs real data, on a device that computes") from problem
    if why and without:
        warnings.warn(f"{why}; without data it was counted as if nothing that it asks for were true", stacklevel=3)
    elif why:
        on_data, others, _ = _run(model, shadow_of(model, meta=False), inputs, meta=False)
        if on_data != calls:
            warnings.warn(f"{why}; a copy of it was counted on the data given", stacklevel=3)
        calls = on_data
    if not calls:
        raise ValueError(f"nothing to count in {type(model).__name__}: no {', '.join(k.__name__ for k in MACS)}")
    return calls, others


def _on_shapes(model: nn.Module, shadow: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Call], dict[str, int], bool]:
    """Run on ``meta``; also return whether the calls depend on the data, which may be asked "is all of it true?"."""
    calls, others, asked = _run(model, shadow, inputs, meta=True)
    try:
        return calls, others, asked and calls != _run(model, shadow, inputs, meta=True, answer=True)[0]
    except Exception:  # it needs data there, or refuses what it has asked for
        return calls, others, True


def _run(
    model: nn.Module, shadow: nn.Module, inputs: tuple[Any, ...], meta: bool, answer: bool = False
) -> tuple[list[Call], dict[str, int], bool]:
    """Run a copy of a model; return the calls, the other operations, and whether it asked for data that are not there.

    The model itself is put back as it was: a closure that is a forward or a hook runs it and not its copy.
    """
    calls, others, reached = list[Call](), Counter[str](), set[int]()

    def on_call(_: nn.Module, call: Call, outputs: list[Tensor]) -> None:
        calls.append(call)
        for y in outputs:
            y.register_hook(lambda _: reached.add(id(call)))

    watch = Calls(shadow, on_call, lambda name, n: others.update({name: n}), answer=answer)
    modules = dict(shadow.named_modules())
    with watch.on(), watch.calling(modules), as_it_was(model, inputs):
        returned = list(tensors_in(shadow(*inputs_of(inputs, meta, {}))))
        found, before, first = calls.copy(), dict(others), len(calls)
        with suppress(Exception):  # where no backward pass runs, or none is known, every call is taken to have one
            torch.autograd.backward([y.real.float().sum() for y in returned if y.requires_grad])
            for i, c in enumerate(calls if returned else ()):
                got = id(c) in reached
                found[i : i + 1] = [replace(c, error=got and c.error, weight=got and c.weight, again=i >= first)]
    return found, before, watch.asked


def _where(problem: Exception, model: nn.Module) -> str:
    """Name the innermost module that was running when an exception was raised."""
    names = {id(m): f"{type(m).__name__} {name!r}" if name else type(m).__name__ for name, m in model.named_modules()}
    frames = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(problem.__traceback__)]
    return next((names[i] for i in reversed(frames) if i in names), type(model).__name__)
