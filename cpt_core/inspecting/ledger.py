"""The ledger: BitOps that really ran, and their other costs, counted while a model trains.  Paper: section 4.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpt_core.bitops import tally
from cpt_core.bitops.tally import IN_FLOAT32, Tally, widest
from cpt_core.bitops.trace import CONVENTIONS, Call, Calls
from cpt_core.checks import choose, declared
from cpt_core.formats.costs import FLOAT32, Operands
from cpt_core.quantization.layers import PASSES, QuantizedLayer
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.schedules.cost import FULL_PRECISION

if TYPE_CHECKING:
    import pandas as pd


class BitOpsLedger:
    """Count the BitOps that really run while a model trains, pass by pass and at the bits in force.

    Use it as a context manager around training. Forward passes count while the model is in training mode; error and
    weight-gradient products count when their backward pass runs, so skipped backward passes, recomputation and early
    stops show up. It reads Python numbers only and does not change the computation. Of products inside a
    ``torch.autograd.Function`` it sees the forward pass alone, as the plan does. Where a layer's ``forward`` is called
    directly, past its hooks, it takes its products for float32; the plan does not.

    Attributes:
        unpriced: layer -> forward MACs so far that "paper" leaves out and "per_op" prices, see ``BitOpsPlan``.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> with BitOpsLedger(model) as ledger:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> ledger.total(), ledger.total("paper")  # the paper prices three products of every layer
    (16.0, 24.0)
    >>> ledger.float32
    {'0': 1.0}
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch ``model``, converted or not."""
        declared(type(self).__init__, locals())
        self.model = model
        self._work = {convention: Tally() for convention in CONVENTIONS}
        self._once: set[tuple[str, Operands]] = set()
        self.unpriced: Counter[str] = Counter()

    def __enter__(self) -> BitOpsLedger:
        """Start to count."""
        self._context = Calls(self.model, self._on_call, unseen=self.unseen).on()
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting."""
        self._context.__exit__(*exception)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names of the modules that are compiled: it does not see inside them.

        In a model that holds one it sees layers alone: other products are missing from "per_op" and ``unpriced``.
        """
        return compiled_parts(self.model)

    @property
    def float32(self) -> dict[str, float]:
        """Layer -> share of the forward MACs so far that ran in float32 there."""
        return self._work["per_op"].float32()

    def bitops(self, convention: str = "per_op") -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs so far, exact integers."""
        return self._of(convention).squared_bits()

    def by_layer(self, convention: str = "per_op") -> dict[str, float]:
        """Return the BitOps of every layer so far."""
        return {layer: sum(passes.values()) / FULL_PRECISION**2 for layer, passes in self.bitops(convention).items()}

    def by_pass(self, convention: str = "per_op") -> dict[str, float]:
        """Return the BitOps of the forward, error and weight-gradient products so far."""
        found = self.bitops(convention)
        return {p: sum(b[p] for b in found.values()) / FULL_PRECISION**2 for p in PASSES}

    def total(self, convention: str = "per_op") -> float:
        """Return the BitOps so far, in units of one 32 x 32-bit MAC."""
        return self._of(convention).total()

    def costs(self, convention: str = "per_op") -> dict[str, float]:
        """Return the totals so far by every cost of ``COSTS``, each in its unit."""
        return {**tally.totals(self._of(convention).prices()), "bitops": self.total(convention)}

    def table(self, convention: str = "per_op") -> pd.DataFrame:
        """Return all costs so far: a line per layer, and the total."""
        return tally.table(self._of(convention).prices())

    def _of(self, convention: str) -> Tally:
        return self._work[choose("convention", convention, CONVENTIONS)]

    def _on_call(self, module: Any, call: Call, outputs: list[Tensor]) -> None:
        if not self.model.training:
            return
        quantized = isinstance(module, QuantizedLayer) and call.owner is not None
        own = _in_force(module.precision) if quantized else None
        formats = {"per_op": own or IN_FLOAT32}
        if call.passes("paper"):
            everywhere = [m for m in self.model.modules() if isinstance(m, LayerPrecision)]
            formats["paper"] = own or widest([_in_force(m) for m in everywhere] or [IN_FLOAT32])
        if call.once:
            if (call.layer, formats["per_op"]) in self._once:
                return
            self._once.add((call.layer, formats["per_op"]))
        if "paper" not in formats:
            self.unpriced[call.layer] += call.macs
        self._add(call, formats, ("forward",))
        seen = set[int]()  # backward passes: each counts once, whichever of the outputs its gradient comes through

        def on_gradient(gradient: Tensor) -> None:
            if (now := torch._C._current_graph_task_id()) not in seen:
                seen.add(now)
                self._add(call, formats, ("error", "weight"))

        for output in outputs:
            output.register_hook(on_gradient)

    def _add(self, call: Call, formats: Mapping[str, Operands], passes: tuple[str, ...]) -> None:
        for convention, operands in formats.items():
            ran = tuple(name for name in call.passes(convention) if name in passes)
            self._work[convention].add(call, ran, operands)


def _in_force(layer: LayerPrecision) -> Operands:
    """Return the formats of a layer's operands now."""
    if layer.in_force is None:
        return IN_FLOAT32
    roles = zip(layer.now.formats, layer.in_force, layer.ladders, strict=True)
    return Operands(*(f or (FLOAT32 if level is None else ladder.priced(level)) for f, level, ladder in roles))


def compiled_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that ``torch.compile`` has wrapped or compiles in place."""
    modules = model.named_modules()
    return tuple(n for n, m in modules if hasattr(m, "_orig_mod") or m._compiled_call_impl is not None)
