"""Rules of the learning rate: functions of the optimizer step and of the evaluations so far.

>>> rate = cosine(0.1, final=0.5, steps=100)
>>> [round(rate(step, []), 3) for step in (0, 50, 100)]
[0.1, 0.075, 0.05]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cpt_lab.tasks.base import Evaluation

LearningRate = Callable[[int, Sequence[Evaluation]], float]


def constant(lr: float) -> LearningRate:
    """``lr`` at every step."""
    return lambda step, evaluations: lr


def milestones(lr: float, at: Sequence[float], steps: int) -> LearningRate:
    """Times 0.1 at every milestone, a share of ``steps``, rounded to a whole step."""
    drops = [round(share * steps) for share in at]
    return lambda step, evaluations: lr * 0.1 ** sum(step >= drop for drop in drops)


def linear(lr: float, final: float, steps: int) -> LearningRate:
    """A line from ``lr`` to ``final`` times that after ``steps`` steps."""
    return lambda step, evaluations: lr * (1 - (1 - final) * step / steps)


def cosine(lr: float, final: float, steps: int) -> LearningRate:
    """Half a cosine from ``lr`` to ``final`` times that after ``steps`` steps."""
    return lambda step, evaluations: lr * (final + (1 - final) * (1 + math.cos(math.pi * step / steps)) / 2)


def plateau(lr: float, division: float) -> LearningRate:
    """Divided by ``division`` after every evaluation whose validation loss is not the best so far."""

    def rate(step: int, evaluations: Sequence[Evaluation]) -> float:
        best, cuts = math.inf, 0
        for evaluation in evaluations:
            loss = evaluation["valid"]["loss"]
            cuts += not loss < best
            best = min(best, loss)
        return lr / division**cuts

    return rate
