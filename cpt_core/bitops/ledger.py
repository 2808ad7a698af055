"""The ledger: BitOps that really ran, counted while a model trains.  Paper: section 4.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cpt_core.bitops.trace import CONVENTIONS, PASSES, Call, Watch, compiled_parts
from cpt_core.quantization.layers import QuantizedLayer
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.schedules.cost import FULL_PRECISION


class BitOpsLedger:
    """Count the BitOps that really run while a model trains, pass by pass and at the bits in force.

    Use it as a context manager around training. Forward passes count while the model is in training mode; error and
    weight-gradient products count when their backward pass runs, so skipped backward passes, recomputation and early
    stops show up. It reads Python numbers only and does not change the computation. Of products inside a
    ``torch.autograd.Function`` it sees the forward pass alone, as the plan does.

    Attributes:
        unpriced: layer -> forward MACs so far that "paper" leaves out and "per_op" prices, see ``BitOpsPlan``.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
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
        self.unpriced: Counter[str] = Counter()

    def __enter__(self) -> BitOpsLedger:
        """Start to count."""
        self._context = Watch(self.model, self._on_call, unseen=self.unseen).on()
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

    def by_layer(self, convention: str = "paper") -> dict[str, float]:
        """Return the BitOps of every layer so far."""
        return {layer: sum(passes.values()) / FULL_PRECISION**2 for layer, passes in self._sums[convention].items()}

    def by_pass(self, convention: str = "paper") -> dict[str, float]:
        """Return the BitOps of the forward, error and weight-gradient products so far."""
        return {p: sum(b[p] for b in self._sums[convention].values()) / FULL_PRECISION**2 for p in PASSES}

    def total(self, convention: str = "paper") -> float:
        """Return the BitOps so far, in units of one 32 x 32-bit MAC."""
        return sum(sum(passes.values()) for passes in self._sums[convention].values()) / FULL_PRECISION**2

    def _on_call(self, module: Any, call: Call, outputs: list[Tensor]) -> None:
        if not self.model.training:
            return
        quantized = isinstance(module, QuantizedLayer) and call.owner is not None
        own = _bits_in_force([module.precision]) if quantized else None
        full = (FULL_PRECISION, FULL_PRECISION)
        bits = {"per_op": own or full}
        if call.passes("paper"):
            everywhere = [m for m in self.model.modules() if isinstance(m, LayerPrecision)]
            bits["paper"] = own or _bits_in_force(everywhere) or full
        if call.once:
            if (call.layer, bits["per_op"]) in self._once:
                return
            self._once.add((call.layer, bits["per_op"]))
        if "paper" not in bits:
            self.unpriced[call.layer] += call.macs
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
