"""Result of a precision range test.

``evaluate_range_test`` computes q_min from the losses of the test; ``PrecisionRange`` holds, prints and
draws the answer.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from cpt_core.text_repr import show_text
from cpt_extras.files import nan_to_none
from cpt_extras.optional_libraries import import_optional

THRESHOLDS = {"reset": 0.8, "continuing": 0.05}  # on the shares, by mode


@dataclass(frozen=True)
class PrecisionRange:
    """The answer of a range test, with its evidence.

    Attributes:
        q_min: lowest bits to train with; None when the test has no answer, see ``reason``.
        reason: the share of q_min, or why there is no answer.
        warning: what makes the answer doubtful, or "".
        bits: precisions that were tried; the last one is q_max.
        start: loss before training at q_max, per seed.
        losses: mean loss in the window, per seed and precision; NaN where training diverged.
        shares: per seed and precision, what is compared with ``threshold``: f(q), or in mode "continuing" the fall of
            the loss since the precision before, as a share of the loss at the start.
        mode: argument of the test.
        threshold: argument of the test, or its default.
        dwell: argument of the test.
        title: name of the model.
    """

    q_min: int | None
    reason: str
    warning: str
    bits: tuple[int, ...]
    start: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    shares: tuple[tuple[float, ...], ...]
    mode: str
    threshold: float
    dwell: int
    title: str = ""

    def mean(self, bits: int) -> float:
        """Return the mean share over seeds at a precision; NaN when a seed diverged."""
        index = self.bits.index(bits)
        return _mean_std([seed_shares[index] for seed_shares in self.shares])[0]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON; a NaN becomes None."""
        return nan_to_none(asdict(self))

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        n = len(self.start)
        seeds = f"{n} seeds" if n > 1 else f"{n} seed"
        quantity = "fall of the loss"
        if self.mode == "reset":
            quantity = "share of q_max's loss reduction"

        lines = [f"no answer: {self.reason}"]
        if self.q_min:
            lines = [f"q_min = {self.q_min}: {self.reason}"]
        if self.warning:
            lines.append(f"warning: {self.warning}")
        lines.append(
            f"bits   mean loss   {quantity} (mean +- std, {seeds}, {self.dwell} steps each)"
        )
        for i, q in enumerate(self.bits):
            loss, _ = _mean_std([seed_losses[i] for seed_losses in self.losses])
            mean, std = _mean_std([seed_shares[i] for seed_shares in self.shares])
            row = f"{q:4d}   {loss:9.4f}   {mean:6.2f} +- {std:.2f}"
            if math.isnan(loss):
                row = f"{q:4d}   diverged"
            lines.append(f"{row}   <- q_min" if q == self.q_min else row)
        return "\n".join(lines)

    def figure(self) -> Any:
        """Draw the share of every seed against bits, their mean and the threshold: a matplotlib figure."""
        figures = import_optional("cpt_extras.figures", "lab")
        reset = self.mode == "reset"
        # f(q_max) is 1 by definition
        bits = list(self.bits[:-1]) if reset else list(self.bits)
        shares = np.array(self.shares, dtype=float)[:, : len(bits)]
        with figures.subplots(figsize=(6.4, 3.4)) as (figure, ((ax,),)):
            ax.axhline(
                self.threshold,
                color="#D55E00",
                linewidth=1,
                label=f"threshold {self.threshold:g}",
            )
            for row in shares:
                ax.plot(bits, row, "o", color="#222222", markersize=4, alpha=0.5)
            ax.plot(
                bits,
                shares.mean(0),
                color="#222222",
                linewidth=1.4,
                label=f"mean of {len(shares)} seeds",
            )
            if self.q_min in bits:
                ax.axvline(
                    self.q_min,
                    color="#0072B2",
                    linestyle=":",
                    label=f"q_min = {self.q_min}",
                )
            quantity = "fall of the loss\n(share of its start)"
            if reset:
                quantity = "share f(q) of the loss reduction\nat q_max"
            ax.set(xlabel="bits", ylabel=quantity)
            figures.integer_ticks(ax.xaxis)
            ax.legend(fontsize=8, loc="lower right")
            headline = "The test has no answer"
            if self.q_min:
                headline = f"{self.q_min} bits are the fewest that train enough"
            title = f"{headline}\n{self.title}: precision range test, {self.dwell} steps at each precision"
            figure.suptitle(title, fontsize=9, parse_math=False)
        return figure


def evaluate_range_test(
    losses_by_seed: list[list[list[float]]],
    bits: tuple[int, ...],
    mode: str,
    threshold: float,
    dwell: int,
    title: str,
) -> PrecisionRange:
    """Return the answer of a range test from its losses, [seed][precision][step]."""
    window = dwell // 2
    losses = [
        [_mean_std(step_losses[-window:])[0] for step_losses in seed]
        for seed in losses_by_seed
    ]
    # before any step q_max shows the loss of the untrained model best; a continuing test sees it at its lowest bits
    first_trained = -1 if mode == "reset" else 0
    start = [seed[first_trained][0] for seed in losses_by_seed]
    shares = [_shares(mode, a, row) for a, row in zip(start, losses, strict=True)]
    statistics = {q: _mean_std([row[i] for row in shares]) for i, q in enumerate(bits)}

    q_min, warning = None, ""
    reason = _no_answer_reason(losses_by_seed, losses, start, bits, mode, dwell)
    if not reason:
        q_min = next((q for q in bits if statistics[q][0] >= threshold), None)
        reason = _reason(statistics, q_min, bits[-1], mode, threshold)
    if q_min is not None:
        warning = _doubt(statistics, q_min, threshold, losses)
    return PrecisionRange(
        q_min,
        reason,
        warning,
        bits,
        tuple(start),
        tuple(map(tuple, losses)),
        tuple(map(tuple, shares)),
        mode,
        threshold,
        dwell,
        title,
    )


def _no_answer_reason(
    losses_by_seed: list[list[list[float]]],
    losses: list[list[float]],
    start: list[float],
    bits: tuple[int, ...],
    mode: str,
    dwell: int,
) -> str:
    """Return the reason why no precision can be judged; "" when they can."""
    top, lowest = bits[-1], bits[0]
    if mode == "continuing":
        if any(math.isnan(loss) for loss in (*[row[0] for row in losses], *start)):
            return (
                f"training diverges at {lowest} bits; lower the learning rate or clip"
            )
        if 0 in start:
            return "the loss starts at 0, of which no share can fall; take mode='reset'"
        return ""

    reference = [row[-1] for row in losses]
    if any(math.isnan(loss) for loss in (*reference, *start)):
        return f"training diverges at {top} bits; lower the learning rate or clip"

    window = dwell // 2
    for seed, first, last in zip(losses_by_seed, start, reference, strict=True):
        standard_error = _mean_std(seed[-1][-window:])[1] / math.sqrt(window)
        if first - last <= 2 * standard_error:
            return (
                f"training at {top} bits does not reduce the loss in {dwell} steps (from {_mean_std(start)[0]:.4g} to "
                f"{_mean_std(reference)[0]:.4g}); no precision can be judged: try a longer dwell or another rate"
            )
    return ""


def _reason(
    statistics: dict[int, tuple[float, float]],
    q_min: int | None,
    top: int,
    mode: str,
    threshold: float,
) -> str:
    """Return the reason of an answer: the share of ``q_min``."""
    if q_min is None:
        return f"at no precision the loss falls by {threshold:g} of what it was at the start"
    share = f"{statistics[q_min][0]:.2f}"
    if mode == "reset":
        return f"{share} of the loss reduction at {top} bits, at least {threshold:g}"
    return f"the first precision at which the loss falls, by {share} of its start (at least {threshold:g})"


def _shares(mode: str, start: float, losses: list[float]) -> list[float]:
    """Return the shares of one seed: f(q), or the fall of the loss since the precision before."""
    if mode == "reset":
        reduction = start - losses[-1]
        return [
            (start - loss) / reduction if reduction else math.nan for loss in losses
        ]
    losses_before = (start, *losses)
    return [
        (before - loss) / (abs(start) or math.nan)
        for before, loss in zip(losses_before, losses, strict=False)
    ]


def _doubt(
    statistics: dict[int, tuple[float, float]],
    q_min: int,
    threshold: float,
    losses: list[list[float]],
) -> str:
    """Name the precisions whose share could have fallen on the other side of the threshold."""
    if len(losses) == 1:
        return "one seed: the noise of the answer is unknown"
    if all(seed_losses == losses[0] for seed_losses in losses):
        return f"all {len(losses)} seeds saw the same batches: the noise of the answer is unknown; try another dwell"

    close = [
        f"f({q}) = {mean:.2f} +- {std:.2f}"
        for q, (mean, std) in statistics.items()
        if q <= q_min and abs(mean - threshold) < 2 * std
    ]
    if not close:
        return ""
    return f"{' and '.join(close)}: within two standard deviations of the threshold {threshold:g}"


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (n - 1; 0 for one value); NaN if any value is."""
    x = torch.tensor(values, dtype=torch.float64)
    return float(x.mean()), float(x.std()) if len(x) > 1 else 0.0
