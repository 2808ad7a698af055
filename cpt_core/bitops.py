"""BitOps of a model: a plan before training, a ledger of what really ran.  Paper: section 4.1.

Every layer reports the multiply-accumulates (MACs) of its own call; a pass costs MACs * b_a * b_b / 32**2.
Two conventions price them:

- ``"paper"``: all counted work at the bits of the step, three products for every layer, BatchNorm included, as the
  authors price it;
- ``"per_op"``: what is quantised at its bits, the rest at 32, and only the products that are computed (the first
  layer, for example, needs no error product).

>>> plan = count_bitops(torch.nn.Sequential(torch.nn.Linear(4, 2)), (torch.ones(1, 4),))
>>> plan.forward_macs, plan.total
(8, 24.0)
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_core.convert import _Quantized, layer_precisions
from cpt_core.cost import FULL_PRECISION
from cpt_core.layers import LayerPrecision
from cpt_core.scheduler import Schedules, assign_schedules

CONVENTIONS = ("paper", "per_op")
PASSES = ("forward", "error", "weight")  # y = x w;  dx = dy w;  dw = x dy

# --- what a call costs ----------------------------------------------------------------------------


def conv_macs(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """MACs of a convolution: outputs times kernel elements times input channels per group (biases are free)."""
    return y.numel() * module.weight[0].numel()  # type: ignore[index]


def linear_macs(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """MACs of a linear layer: outputs times inputs of one output (the bias is free)."""
    return y.numel() * int(module.in_features)  # type: ignore[arg-type]


def norm_macs(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """Elementwise operations of a normalisation: 5 per element, 4 without affine, 2 or 1 with fixed statistics."""
    affine = getattr(module, "weight", None) is not None
    fixed = not module.training and getattr(module, "running_mean", None) is not None
    return y.numel() * ((2 if affine else 1) if fixed else (5 if affine else 4))


MACS: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], int]] = {
    nn.Conv1d: conv_macs,
    nn.Conv2d: conv_macs,
    nn.Conv3d: conv_macs,
    nn.Linear: linear_macs,
    nn.BatchNorm1d: norm_macs,
    nn.BatchNorm2d: norm_macs,
    nn.BatchNorm3d: norm_macs,
    nn.LayerNorm: norm_macs,
}


@dataclass(frozen=True)
class Call:
    """One call of a layer in a forward pass."""

    layer: str
    kind: str
    macs: int
    trainable: bool  # the output needs a gradient: there is a backward pass at all
    error: bool  # the error product is computed: the input needs a gradient
    weight: bool  # the weight-gradient product is computed: the weight needs one

    def passes(self, convention: str) -> tuple[str, ...]:
        """Return the passes of a training step that this call causes."""
        if convention == "paper":
            return PASSES
        return ("forward", *(("error",) if self.error else ()), *(("weight",) if self.weight else ()))


def _counter_of(module: nn.Module) -> Callable[[nn.Module, Tensor, Tensor], int] | None:
    return next((macs for kind, macs in MACS.items() if isinstance(module, kind)), None)


@contextmanager
def _watch(model: nn.Module, on_call: Callable[[nn.Module, Call, Tensor], None]) -> Iterator[None]:
    """Report every call of a layer that can be counted, together with its output."""

    def report(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        macs = _counter_of(module)
        assert macs is not None
        grad = torch.is_grad_enabled()
        weight = module.weight
        assert weight is None or isinstance(weight, Tensor)
        call = Call(
            layer=name,
            kind=module.FLOAT.__name__ if isinstance(module, _Quantized) else type(module).__name__,
            macs=int(macs(module, inputs[0], output)),
            trainable=output.requires_grad,
            error=grad and inputs[0].requires_grad,
            weight=grad and weight is not None and weight.requires_grad,
        )
        on_call(module, call, output)

    handles = [
        module.register_forward_hook(partial(_call_hook, report, name))
        for name, module in model.named_modules()
        if _counter_of(module) is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call_hook(report: Callable[..., None], name: str, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
    report(name, module, inputs, out)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitOpsPlan:
    """BitOps of a training run, in units of one 32 x 32-bit MAC; ``print`` it for a table.

    Attributes:
        convention: "paper" or "per_op".
        steps: optimizer steps counted.
        macs: forward MACs of one step by layer.
        bitops: layer -> pass -> squared bits x MACs, exact integers.
        uncounted: operation -> output elements of one forward pass, for everything that no layer reports: elementwise
            work, pooling, and products written as plain functions.
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
    result: dict[str, Counter[str]] = {call.layer: Counter() for call in calls}
    macs: Counter[str] = Counter()
    for call in calls:
        macs[call.layer] += call.macs
        q, g = bits[call.layer] if call.layer in bits else bits[""] if convention == "paper" else _float32(bits[""])
        squares = {"forward": int((q * q).sum()), "error": int((q * g).sum()), "weight": int((q * g).sum())}
        for name in call.passes(convention):
            result[call.layer][name] += call.macs * squares[name]
    return BitOpsPlan(
        convention, len(bits[""][0]), dict(macs), {k: dict(v) for k, v in result.items()}, dict(uncounted)
    )


def _float32(like: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.full_like(like[0], FULL_PRECISION), np.full_like(like[1], FULL_PRECISION)


def _bits_per_layer(
    model: nn.Module, calls: list[Call], schedule: Schedules | None, q_grad: int | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    if schedule is None:
        one = np.array([FULL_PRECISION])
        return {"": (one, one)}
    converted = any(isinstance(m, LayerPrecision) for m in model.modules())
    names = list(layer_precisions(model)) if converted else list(dict.fromkeys(c.layer for c in calls))
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
    with _watch(shadow, lambda module, call, output: calls.append(call)), torch.enable_grad(), uncounted:
        shadow(*_to_meta(inputs))
    if not calls:
        raise ValueError(f"nothing to count in {type(model).__name__}: no {', '.join(k.__name__ for k in MACS)}")
    return calls, dict(uncounted.elements)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(_to_meta(v) for v in value)
    if isinstance(value, dict):
        return {k: _to_meta(v) for k, v in value.items()}
    return value


# Operations that move, rename or create data cost nothing by any convention.
_FREE = frozenset(
    "view _unsafe_view reshape expand permute transpose t detach alias clone copy contiguous slice select unbind "
    "squeeze unsqueeze flatten cat stack split split_with_sizes chunk narrow unfold as_strided _to_copy empty "
    "zeros ones full empty_like zeros_like ones_like arange new_zeros new_ones empty_strided lift_fresh".split()
)


class _Uncounted(TorchDispatchMode):
    """Collect the operations that run outside the layers which report their own MACs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.inside = 0
        for module in model.modules():  # the model is a throw-away copy: the hooks need no removal
            if _counter_of(module) is not None:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self.inside += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not self.inside and name not in _FREE and isinstance(first, Tensor):
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

    def _on_call(self, module: nn.Module, call: Call, output: Tensor) -> None:
        if not self.model.training:
            return
        own = _bits_in_force([module.precision]) if isinstance(module, _Quantized) else None
        model = own or _bits_in_force([m for m in self.model.modules() if isinstance(m, LayerPrecision)])
        full = (FULL_PRECISION, FULL_PRECISION)
        bits = {"paper": model or full, "per_op": own or full}
        self._add(call, bits, ("forward",))
        if call.trainable:
            output.register_hook(lambda gradient: self._add(call, bits, ("error", "weight")))

    def _add(self, call: Call, bits: Mapping[str, tuple[int, int]], passes: tuple[str, ...]) -> None:
        for convention, (q, g) in bits.items():
            sums = self._sums[convention].setdefault(call.layer, Counter())
            for name in call.passes(convention):
                if name in passes:
                    sums[name] += call.macs * q * (q if name == "forward" else g)


def _bits_in_force(layers: list[LayerPrecision]) -> tuple[int, int] | None:
    if not layers:
        return None
    q = max(layer.bits or FULL_PRECISION for layer in layers)
    return q, max(layer.q_grad or FULL_PRECISION for layer in layers)
