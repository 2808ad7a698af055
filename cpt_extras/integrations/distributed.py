"""Ranges synchronised over processes, so that data-parallel training rounds on the whole batch.  Beyond the paper.

Data-parallel training shares a batch out to processes. Without synchronisation each process rounds on ranges of its own
part. Inside ``synced_ranges`` each takes the ends of all: so N processes train as one process with the whole batch
does, up to the order of sums (and the noise of stochastic rounding, which every process has of its own).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from cpt_core.quantization.rounding import Range, clips
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend
from cpt_extras.kernels.grids import parse_grid

PER_EXAMPLE_GRID = (
    "per_row"  # a row belongs to one example, or to a weight: nothing to agree on
)


@contextmanager
def synced_ranges() -> Iterator[None]:
    """Round on ranges over all processes of the default group; around a training with its backward passes.

    Every process must run the same layers on parts of one size. Each rounding of a tensor with one range for several
    examples waits for the others: two numbers a range go around. So a process may evaluate alone only what rounds on
    running ranges, as the authors' layers do, or outside of the block. Layers run uncompiled.

    Raises:
        RuntimeError: without a group of processes; from layers whose operators find ranges of several examples inside
            (LSTM and graph layers as the authors round them), and from compiled ones.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "ranges are agreed on between processes: call torch.distributed.init_process_group first"
        )
    backend()
    before = operators.active
    operators.active = _SyncedOperators(
        before, distributed.new_group()
    )  # a group of its own: DDP's is busy in backward passes
    try:
        yield
    finally:
        operators.active = before


@contextmanager
def own_ranges() -> Iterator[None]:
    """Inside ``synced_ranges``, round on ranges of this process's part again: what one of them computes alone."""
    before = operators.active
    operators.active = getattr(before, "ops", before)
    try:
        yield
    finally:
        operators.active = before


class _SyncedOperators:
    """Operators ``ops`` with ranges over all processes of a group."""

    def __init__(self, ops: Any, group: Any) -> None:
        self.ops, self.group = ops, group

    def range(self, x: Tensor, granularity: str) -> Range:
        """Return the ranges of ``x`` over all processes."""
        if torch.compiler.is_compiling():
            raise RuntimeError("inside synced_ranges layers run uncompiled")
        low, width = self.ops.range(x, granularity)
        kind = parse_grid(granularity)[0]
        if kind == PER_EXAMPLE_GRID:
            return low, width
        high = -self.ops.range(-x, granularity)[0]  # exactly: low + width is rounded
        if kind == "per_sample_mean":
            ends = (
                self._reduced(low, high, distributed.ReduceOp.SUM) / self.group.size()
            )
            return ends[0], ends[1] - ends[0]
        ends = self._reduced(-low, high, distributed.ReduceOp.MAX)
        return -ends[0], ends[1] + ends[0]

    def _reduced(self, low: Tensor, high: Tensor, how: Any) -> Tensor:
        ends = torch.stack([low, high])
        distributed.all_reduce(ends, how, self.group)
        return ends

    def fake_quantize(
        self, x: Tensor, levels: Tensor, granularity: str, key: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_weight = isinstance(x, nn.Parameter) or isinstance(
            x._base, nn.Parameter
        )  # the same in all processes
        find_range = self.ops.range if is_weight else self.range
        low, width = find_range(x.detach(), granularity)
        clip = clips(granularity, key is not None)
        return (
            operators.round_in_range(x, low, width, levels, granularity, key, clip),
            low,
            width,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return any other operator, which finds no range of several examples inside."""

        def local(*arguments: Any) -> Any:
            grids = [
                g
                for g in arguments
                if isinstance(g, str) and parse_grid(g)[0] != PER_EXAMPLE_GRID
            ]
            if name.startswith("round_scale") or (grids and name != "round_in_range"):
                raise RuntimeError(
                    f"{name} finds the ranges of several examples inside, on which processes cannot agree; give the "
                    "layer quantizers with granularity='per_row', leave it in float32, or train without synced_ranges"
                )
            return getattr(self.ops, name)(*arguments)

        return local


def __getattr__(name: str) -> Any:
    """Return ``synced_ranges`` for its former name, with a warning."""
    if name == "agreed_ranges":
        warnings.warn(
            f"{__name__}.agreed_ranges is now {__name__}.synced_ranges",
            DeprecationWarning,
            stacklevel=2,
        )
        return synced_ranges
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
