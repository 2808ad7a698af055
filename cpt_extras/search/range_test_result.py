"""The answer of a precision range test: how it is judged, printed and drawn."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from cpt_extras.files import nan_to_none
from cpt_extras.optional_libraries import import_optional

MODES = {"reset": 0.8, "continuing": 0.05}  # and their thresholds


@dataclass(frozen=True)
class PrecisionRange:
    """The answer of a range test, with its evidence.

    Attributes:
        q_min: lowest bits to train with; None when the test has no answer, see ``reason``.
        reason: how it was found, or why not.
        warning: what makes the answer doubtful, or "".
        bits: precisions that were tried; the last one is q_max.
        start: loss before training at q_max, per seed.
        losses: mean loss in the window, per seed and precision; NaN where training diverged.
        shares: per seed and precision, what is compared with ``threshold``: f(q), or in mode "continuing" the fall of
            the loss since the precision before, as a share of the loss at the start.
        mode, threshold, dwell: as given.
        title: what was trained.
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
        return _mean_std([row[self.bits.index(bits)] for row in self.shares])[0]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON; a NaN becomes None."""
        return nan_to_none(asdict(self))

    def __str__(self) -> str:
        seeds = f"{len(self.start)} seed{'s' * (len(self.start) > 1)}"
        what = (
            "share of q_max's loss reduction"
            if self.mode == "reset"
            else "fall of the loss"
        )
        lines = [
            f"q_min = {self.q_min}: {self.reason}"
            if self.q_min
            else f"no answer: {self.reason}"
        ]
        lines += [f"warning: {self.warning}"] if self.warning else []
        lines.append(
            f"bits   mean loss   {what} (mean +- std, {seeds}, {self.dwell} steps each)"
        )
        for i, q in enumerate(self.bits):
            loss, _ = _mean_std([row[i] for row in self.losses])
            mean, std = _mean_std([row[i] for row in self.shares])
            shown = (
                "diverged"
                if math.isnan(loss)
                else f"{loss:9.4f}   {mean:6.2f} +- {std:.2f}"
            )
            lines.append(f"{q:4d}   {shown}{'   <- q_min' if q == self.q_min else ''}")
        return "\n".join(lines)

    def figure(self) -> Any:
        """Draw the share of every seed against bits, their mean and the threshold: a matplotlib figure."""
        described = import_optional("cpt_extras.figures", "lab")
        reset = self.mode == "reset"
        bits = (
            list(self.bits[:-1]) if reset else list(self.bits)
        )  # f(q_max) is 1 by definition
        shares = np.array(self.shares, dtype=float)[:, : len(bits)]
        with described.subplots(figsize=(6.4, 3.4)) as (figure, ((ax,),)):
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
            what = (
                "share f(q) of the loss reduction\nat q_max"
                if reset
                else "fall of the loss\n(share of its start)"
            )
            ax.set(xlabel="bits", ylabel=what)
            described.integer_ticks(ax.xaxis)
            ax.legend(fontsize=8, loc="lower right")
            found = (
                f"{self.q_min} bits are the fewest that train enough"
                if self.q_min
                else "The test has no answer"
            )
            said = f"{found}\n{self.title}: precision range test, {self.dwell} steps at each precision"
            figure.suptitle(said, fontsize=9, parse_math=False)
        return figure


def judge(
    traces: list[list[list[float]]],
    bits: tuple[int, ...],
    mode: str,
    threshold: float,
    dwell: int,
    title: str,
) -> PrecisionRange:
    """Make the answer from the losses [seed][precision][step]."""
    window = dwell // 2
    losses = [[_mean_std(trace[-window:])[0] for trace in seed] for seed in traces]
    # before any step q_max shows the loss of the untrained model best; a continuing test sees it at its lowest bits
    start = [seed[-1 if mode == "reset" else 0][0] for seed in traces]
    shares = [_shares(mode, a, row) for a, row in zip(start, losses, strict=True)]

    def answer(q_min: int | None, reason: str, warning: str = "") -> PrecisionRange:
        evidence = tuple(start), tuple(map(tuple, losses)), tuple(map(tuple, shares))
        return PrecisionRange(
            q_min, reason, warning, bits, *evidence, mode, threshold, dwell, title
        )

    top = bits[-1]
    reference = (
        [row[-1] for row in losses] if mode == "reset" else [row[0] for row in losses]
    )
    if any(math.isnan(x) for x in (*reference, *start)):
        at = top if mode == "reset" else bits[0]
        return answer(
            None, f"training diverges at {at} bits; lower the learning rate or clip"
        )
    if mode == "continuing" and 0 in start:
        return answer(
            None, "the loss starts at 0, of which no share can fall; take mode='reset'"
        )
    if mode == "reset":
        noise = [
            _mean_std(seed[-1][-window:])[1] / math.sqrt(window) for seed in traces
        ]
        if any(a - b <= 2 * n for a, b, n in zip(start, reference, noise, strict=True)):
            return answer(
                None,
                f"training at {top} bits does not reduce the loss in {dwell} steps (from {_mean_std(start)[0]:.4g} to "
                f"{_mean_std(reference)[0]:.4g}); no precision can be judged: try a longer dwell or another rate",
            )
    of = {q: _mean_std([row[i] for row in shares]) for i, q in enumerate(bits)}
    q_min = next((q for q in bits if of[q][0] >= threshold), None)
    if q_min is None:
        return answer(
            None,
            f"at no precision the loss falls by {threshold:g} of what it was at the start",
        )
    share = f"{of[q_min][0]:.2f}"
    if mode == "reset":
        reason = f"{share} of the loss reduction at {top} bits, at least {threshold:g}"
    else:
        reason = f"the first precision at which the loss falls, by {share} of its start (at least {threshold:g})"
    return answer(q_min, reason, _doubt(of, q_min, threshold, losses))


def _shares(mode: str, start: float, losses: list[float]) -> list[float]:
    """Of one seed, what is compared with the threshold: f(q), or how far the loss fell since the precision before."""
    if mode == "reset":
        whole = start - losses[-1]
        return [(start - loss) / whole if whole else math.nan for loss in losses]
    return [
        (before - loss) / (abs(start) or math.nan)
        for before, loss in zip((start, *losses), losses, strict=False)
    ]


def _doubt(
    of: dict[int, tuple[float, float]],
    q_min: int,
    threshold: float,
    losses: list[list[float]],
) -> str:
    """Name the precisions whose share could have fallen on the other side of the threshold."""
    if len(losses) == 1:
        return "one seed: the noise of the answer is unknown"
    if all(of_seed == losses[0] for of_seed in losses):
        return f"all {len(losses)} seeds saw the same batches: the noise of the answer is unknown; try another dwell"
    close = [
        f"f({q}) = {mean:.2f} +- {std:.2f}"
        for q, (mean, std) in of.items()
        if q <= q_min and abs(mean - threshold) < 2 * std
    ]
    return (
        f"{' and '.join(close)}: within two standard deviations of the threshold {threshold:g}"
        if close
        else ""
    )


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1; 0 for one value); NaN if any value is."""
    x = torch.tensor(values, dtype=torch.float64)
    return float(x.mean()), float(x.std()) if len(x) > 1 else 0.0
