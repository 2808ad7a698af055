"""What the exercises of notebooks 03 to 11 accept, with hints; kept apart, as a check gives its answer away."""

from __future__ import annotations

import math
from typing import Any

import torch

from cpt_core.quantization.fake_quantize import quantize
from cpt_lessons.answers import Exercise, Refused, like, schedule, share, words


def _paired(a: dict[int, float], b: dict[int, float]) -> float:
    both = a.keys() & b.keys()
    return sum(a[seed] - b[seed] for seed in both) / len(both)


def _average_precision(hits: list[bool], objects: int) -> float:
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects


def _precision_at_hits(hits: list[bool], objects: int) -> float:
    return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit) / objects


def _half_with_cosine(answer: Any) -> bool:
    s = schedule(answer, 64_000, 3, 8)
    profile = getattr(getattr(s, "schedule", s), "profile", None)  # a few steps may have been adjusted
    name = getattr(profile, "base", type(profile).__name__.lower())
    if name != "cosine":
        raise Refused(f"its profile is {name}, not cosine" if profile else "it has no profile")
    if abs((cost := s.relative_cost()) - 0.5) >= 5e-4:
        raise Refused(f"it costs {cost:.4f} of static 8")
    return True


def _half_above_8(answer: Any) -> bool:
    s = schedule(answer, 64_000, 4, 16)
    if abs((seconds := (1 + (s.bits() > 8).mean()) / 2) - 0.75) >= 1e-3:
        raise Refused(f"it takes {seconds:.3f} of the seconds")
    return True


_MESSAGES = torch.tensor([[0.1, 0.9, -0.4], [3.0, -2.0, 0.7], [0.0, 0.5, 5.0]])

EXERCISES = {
    "03.1": Exercise(
        like(
            _paired,
            ({0: 80.0, 1: 82.0}, {0: 79.0, 1: 83.5}),
            ({0: 80.0, 1: 82.0, 2: 90.0}, {1: 81.0, 0: 77.0}),
            ({3: 60.0}, {2: 10.0, 3: 61.0}),
        ),
        "a seed that one of them lacks does not count: a.keys() & b.keys() are those of both",
    ),
    "03.2": Exercise(
        like(
            lambda runs: [not any(c <= cost and a > accuracy for c, a in runs) for cost, accuracy in runs],
            ([(0.4, 80.0), (0.63, 83.0), (0.55, 84.0), (1.0, 86.0)],),
            ([(1.0, 90.0), (0.2, 91.0)],),
            ([(0.5, 1.0), (0.4, 0.5), (0.3, 0.75)],),
            ([(0.55, 83.0), (0.55, 84.0), (1.0, 84.0)],),
            slips={
                "a run of the same cost that is more accurate costs no more either": lambda runs: [
                    not any(c < cost and a > accuracy for c, a in runs) for cost, accuracy in runs
                ],
            },
        ),
        "a run is on the front unless another one costs no more and is more accurate",
    ),
    "04.1": Exercise(
        like(
            _average_precision,
            ([True, True, False, True, False, False], 4),
            ([False, True, True, False], 2),
            ([False, False], 3),
            slips={
                "every hit counts the precision at its place, not the best one from there on": _precision_at_hits,
                "it divides by the hits, not by all the objects": lambda hits, objects: _average_precision(
                    hits, max(1, sum(hits))
                ),
            },
        ),
        "for every hit the best precision from there on; their sum over the number of objects",
    ),
    "05.1": Exercise(
        like(
            lambda messages, bits: quantize(messages, bits, "graph_aggregation").sum(0),
            (_MESSAGES, 2),
            (_MESSAGES, 4),
            (-_MESSAGES[:1], 3),
            slips={
                "nothing is rounded": lambda m, bits: m.sum(0),
                "all messages have one range together": lambda m, bits: quantize(m, bits).sum(0),
                "the sum is rounded, and not what is summed": lambda m, bits: quantize(m.sum(0), bits),
                "this is the mean": lambda m, bits: quantize(m, bits, "graph_aggregation").mean(0),
            },
        ),
        'cpt.quantize(messages, bits, "graph_aggregation") first, then the sum over the neighbours, .sum(0)',
    ),
    "06.1": Exercise(
        like(lambda p: math.exp(-sum(map(math.log, p)) / len(p)), ([0.5, 0.25],), ([0.1] * 7,), ([1.0, 1.0],)),
        "e to the power of the mean of -log p",
    ),
    "07.1": Exercise(
        like(
            lambda low, total, q: (low * (q * q + 16 * q) / 192 + total - low) / total,
            (200, 600, 2),
            (0, 100, 3),
            (64, 64, 4),
        ),
        "the mean over the steps: low ones cost (q^2 + 16 q) / 192, the others 1",
    ),
    "08.1": Exercise(
        like(
            lambda budget: max(q for q in range(1, 9) if (q * q + 16 * q) / 192 <= budget),
            *[(0.6,), (0.417,), (0.2,), (0.65,), (1.0,)],
            tolerance=0,
        ),
        "the largest q with (q^2 + 16 q) / 192 no more than the budget",
    ),
    "08.2": Exercise(
        like(lambda cost: 4 ** (16 - (64 + 192 * cost) ** 0.5), (1.0,), (80 / 192,), (57 / 192,)),
        "first q from 192 c = q^2 + 16 q, which is (64 + 192 c) ** 0.5 - 8, then 4 ** (8 - q)",
    ),
    "09.1": Exercise(_half_above_8, "cpt.solve_schedule(..., cost=a function of bits: 20 or 40)"),
    "09.2": Exercise(
        like(lambda c: c[0::2] + 16 * c[1::2], (torch.tensor([1, 2, 15, 0], dtype=torch.uint8),), tolerance=0),
        "codes[0::2] are the first ones, codes[1::2] the second ones; 16 times a code is four bits further up",
    ),
    "11.1": Exercise(_half_with_cosine, 'cpt.solve_schedule(budget, q_min, q_max, total_steps, family="cosine")'),
    "11.2": Exercise(share(80 / 192, 5e-3), "the cost of static 4 bits"),
    "11.3": Exercise(
        lambda name: words(name) in ("rex", "r"), "s.noise_exposure() of cpt.solve_schedule(0.45, ..., family=name)"
    ),
}
