"""Cache of the results that graph convolutions compute of input features that never change.

``Graph.set_constant`` makes one. A quantised aggregation stores one table per bit width, (D, F) float32 each, and int8
matmuls store the codes of their input, a byte each. A layer with fewer outputs than inputs sums over neighbours behind
its matmul, whose output is not constant. Compiled code uses no cache, since every bit width would compile it again.

>>> cache = ConstantFeatures(torch.ones(2, 1))
>>> cache.keep(cache.features, "sum", lambda: "computed"), cache.keep(cache.features, "sum", lambda: "again")
('computed', 'computed')
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor


class ConstantFeatures:
    """Constant features (S, F) of a graph, with the results computed of them."""

    def __init__(self, features: Tensor) -> None:
        self.features, self.version = features, features._version
        self.results: dict[Hashable, Any] = {}

    def keep(self, features: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return the cached result of ``key``, computed by ``compute()`` at the first call.

        Args:
            features: the constant features, or an earlier result; for any others nothing is cached.
            key: identifies the computation.
            compute: called without a gradient.
        """
        if self.features._version != self.version:  # changed in place after all
            self.results, self.version = {}, self.features._version
        if features is not self.features:
            sources = [k for k, result in self.results.items() if result is features]
            if not sources:
                return compute()
            key = sources[0], key
        if key not in self.results:
            # no inference tensors: training may use what evaluation computed
            with torch.inference_mode(False), torch.no_grad():
                self.results[key] = compute()
        return self.results[key]
