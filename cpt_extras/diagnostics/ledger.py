"""Ledger of the BitOps that really ran in a training, and their other prices.  Paper: section 4.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from cpt_core.bitops.conventions import (
    CONVENTIONS,
    priced_passes,
    row_name,
)
from cpt_core.bitops.counting import report_operations
from cpt_core.bitops.tally import IN_FLOAT32, Formats, Tally, widest
from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.op_interception import Operation
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.schedules.cost import FULL_PRECISION
from cpt_core.schedules.schedule import PASS_OPERANDS
from cpt_core.validation import check_choice, check_types
from cpt_extras.diagnostics.native_counting import NativeCountingMode
from cpt_extras.formats.prices import price_table, total_prices
from cpt_extras.former_names import FormerName

if TYPE_CHECKING:
    import pandas as pd


class BitOpsLedger:
    """Count the BitOps that really run while a model trains, pass by pass and at the active bits.

    Use it as a context manager around training. Forward passes count while the model is in training mode; input and
    weight gradients count when their backward pass runs, so skipped backward passes, recomputation and early stops show
    up. Where a backward pass runs, the weight gradient counts even if ``torch.autograd.grad`` was called for the inputs
    alone. The ledger reads Python numbers only and does not change the computation. Compiled code is not counted, see
    ``compiled_modules``.

    Attributes:
        unpriced: layer -> forward MACs so far that "paper" leaves out and "per_op" prices, see ``BitOpsPlan``.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    >>> with BitOpsLedger(model) as ledger:
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> ledger.total(), ledger.total("paper")  # the paper prices three passes of every layer
    (16.0, 24.0)
    >>> ledger.float32
    {'0': 1.0}
    """

    unseen = FormerName("unseen", "compiled_modules")

    def __init__(self, model: nn.Module) -> None:
        """Count ``model``, converted or not."""
        check_types(type(self).__init__, locals())
        self.model = model
        self._tallies = {convention: Tally() for convention in CONVENTIONS}
        self._computed_once: set[tuple[str, Formats]] = set()
        # widest formats of all layers, with the number of bit changes when they were read
        self._widest: tuple[int, Formats] | None = None
        self.unpriced: Counter[str] = Counter()

    def __enter__(self) -> BitOpsLedger:
        """Start to count."""
        self._widest = None  # layers may have been converted or restored
        compiled = frozenset(self.compiled_modules)
        names = [name for name, _ in self.model.named_modules()]
        skipped = {name for name in names if is_within(name, compiled)}
        self._context = report_operations(
            self.model, self._report, skipped, NativeCountingMode
        )
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting."""
        self._context.__exit__(*exception)

    @property
    def compiled_modules(self) -> tuple[str, ...]:
        """Names of the compiled modules, whose operations are not counted."""
        return compiled_parts(self.model)

    @property
    def float32(self) -> dict[str, float]:
        """Layer -> share of the forward MACs so far that ran in float32 there."""
        return self._tallies["per_op"].forward.float32_shares()

    def bitops(self, convention: str = "per_op") -> dict[str, Counter[str]]:
        """Return layer -> pass -> squared bits x MACs so far, exact integers."""
        return self._tally(convention).squared_bits()

    def by_layer(self, convention: str = "per_op") -> dict[str, float]:
        """Return the BitOps of every layer so far."""
        return {
            layer: sum(passes.values()) / FULL_PRECISION**2
            for layer, passes in self.bitops(convention).items()
        }

    def by_pass(self, convention: str = "per_op") -> dict[str, float]:
        """Return the BitOps so far of the forward pass, of input gradients ("error") and of weight gradients."""
        squared_bits: Counter[str] = Counter()
        for passes in self.bitops(convention).values():
            squared_bits.update(passes)
        return {name: squared_bits[name] / FULL_PRECISION**2 for name in PASS_OPERANDS}

    def total(self, convention: str = "per_op") -> float:
        """Return the BitOps so far, in units of one 32 x 32-bit MAC."""
        return self._tally(convention).total()

    def costs(self, convention: str = "per_op") -> dict[str, float]:
        """Return the totals so far by every price, each in its unit."""
        return total_prices(self._tally(convention))

    def table(self, convention: str = "per_op") -> pd.DataFrame:
        """Return all prices so far: a row per layer, and the total."""
        return price_table(self._tally(convention))

    def _tally(self, convention: str) -> Tally:
        return self._tallies[check_choice("convention", convention, CONVENTIONS)]

    def _report(self, operation: Operation) -> Callable[[], None] | None:
        """Count the forward pass of an operation; return a function that counts its backward passes."""
        if not self.model.training:
            return None

        precision = operation.precision
        formats_by_convention = {"per_op": _executed_formats(precision)}
        if operation.once:
            computed = row_name(operation), formats_by_convention["per_op"]
            if computed in self._computed_once:
                return None
            self._computed_once.add(computed)
        if priced_passes(operation, "paper"):
            formats_by_convention["paper"] = (
                self._widest_formats()
                if precision is None
                else _formats_of_levels(precision)
            )
        else:
            self.unpriced[row_name(operation)] += operation.macs

        def count(passes: Iterable[str]) -> None:
            for convention, formats in formats_by_convention.items():
                priced = [
                    p for p in priced_passes(operation, convention) if p in passes
                ]
                self._tallies[convention].add(operation, priced, formats)

        count(["forward"])
        return partial(count, ["error", "weight"])

    def _widest_formats(self) -> Formats:
        """Return the widest formats of all layers, read again only after a change: a model may have 10,000 layers."""
        num_changes = LayerPrecision.num_bit_changes
        if self._widest is None or self._widest[0] != num_changes:
            precisions = [precision_of(module) for module in self.model.modules()]
            formats = [_formats_of_levels(p) for p in precisions if p is not None]
            self._widest = (num_changes, widest(formats or [IN_FLOAT32]))
        return self._widest[1]


def _executed_formats(precision: LayerPrecision | None) -> Formats:
    """Return the formats in which the operations of a layer run."""
    if precision is None or precision.active_levels is None:
        return IN_FLOAT32
    return precision.grids.executed(precision.active_levels)


def _formats_of_levels(precision: LayerPrecision) -> Formats:
    """Return the formats of the active levels, which "paper" prices."""
    if precision.active_levels is None:
        return IN_FLOAT32
    return precision.grids.priced(precision.active_levels)


def compiled_parts(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that ``torch.compile`` has wrapped or compiles in place."""
    return tuple(
        name
        for name, module in model.named_modules()
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    )


def is_within(name: str, outer: Collection[str]) -> bool:
    """Return whether a module is one of the ``outer`` ones, or inside one, by their names."""
    if not outer:
        return False
    if "" in outer:
        return True
    parts = name.split(".")
    depths = range(1, len(parts) + 1)
    return any(".".join(parts[:depth]) in outer for depth in depths)
