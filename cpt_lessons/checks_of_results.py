"""What the exercises of notebooks 03 to 09 accept, with hints; kept apart, as a check gives its answer away."""

from __future__ import annotations

import math
from typing import Any

import torch

from cpt_core.quantization.fake_quantize import quantize
from cpt_core.schedules.cost import noise_exposure
from cpt_core.schedules.make import make_schedule
from cpt_lab.analysis.quality_cost import paired_difference
from cpt_lab.analysis.runs import committed
from cpt_lessons.answers import (
    Exercise,
    Refused,
    counted,
    like,
    near,
    number,
    schedule,
    share,
    words,
)


def _rr_below_static_8() -> float:
    rows = committed("image_digits").query("model == 'mlp6' and q_min == 3").groupby("arm").accuracy.mean()
    return 100 * (rows["static 8"] - rows["RR"])


def _rr_above_static_3() -> float:
    eight = committed("language_pydoc").query("q_max == 8")
    return float(paired_difference(eight, "RR", "static 3", metric="loss").mean())


def _paired(a: dict[int, float], b: dict[int, float]) -> float:
    both = a.keys() & b.keys()
    return sum(a[seed] - b[seed] for seed in both) / len(both)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    def area(x1: float, y1: float, x2: float, y2: float) -> float:
        return max(0, x2 - x1) * max(0, y2 - y1)

    common = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return common / (area(*a) + area(*b) - common)


def _average_precision(hits: list[bool], objects: int) -> float:
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects


def _precision_at_hits(hits: list[bool], objects: int) -> float:
    return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit) / objects


def _normalised(adjacency: torch.Tensor) -> torch.Tensor:
    joined = adjacency + torch.eye(len(adjacency))
    scale = joined.sum(1).rsqrt()
    return scale[:, None] * joined * scale


def _half_with_cosine(answer: Any) -> bool:
    s = schedule(answer, 64_000)
    if (s.q_min, s.q_max) != (3, 8):
        raise Refused(f"it goes from {s.q_min} to {s.q_max} bits")
    profile = getattr(getattr(s, "schedule", s), "profile", None)  # a few steps may have been adjusted
    name = getattr(profile, "base", type(profile).__name__.lower())
    if name != "cosine":
        raise Refused(f"its profile is {name}, not cosine" if profile else "it has no profile")
    if abs((cost := s.relative_cost()) - 0.5) >= 5e-4:
        raise Refused(f"it costs {cost:.4f} of static 8")
    return True


def _half_above_8(answer: Any) -> bool:
    s = schedule(answer, 64_000)
    if (s.q_min, s.q_max) != (4, 16):
        raise Refused(f"it goes from {s.q_min} to {s.q_max} bits")
    if abs((seconds := (1 + (s.bits() > 8).mean()) / 2) - 0.75) >= 1e-3:
        raise Refused(f"it takes {seconds:.3f} of the seconds")
    return True


_MESSAGES = torch.tensor([[0.1, 0.9, -0.4], [3.0, -2.0, 0.7], [0.0, 0.5, 5.0]])
_STAR = torch.tensor([[0.0, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]])
_CR = make_schedule("CR", q_min=3, q_max=8, total_steps=64_000, n_cycles=8)

EXERCISES = {
    "03.1": Exercise(
        lambda g: words(g) in ("large", "large savings", "rr", "rth"), "if quality does not suffer, take the cheapest"
    ),
    "03.2": Exercise(counted(5, "bit"), "notebook 02: what a step at q bits costs"),
    "03.3": Exercise(
        like(
            lambda runs: [not any(c <= cost and a > accuracy for c, a in runs) for cost, accuracy in runs],
            ([(0.4, 80.0), (0.63, 83.0), (0.55, 84.0), (1.0, 86.0)],),
            ([(1.0, 90.0), (0.2, 91.0)],),
            ([(0.5, 1.0), (0.4, 0.5), (0.3, 0.75)],),
        ),
        "a run is on the front unless another one costs no more and is more accurate",
    ),
    "03.4": Exercise(
        lambda x: near(_rr_below_static_8(), 0.06)(abs(number(x))),
        'network.groupby("arm").accuracy.mean(), in points: times 100',
    ),
    "03.6": Exercise(
        like(
            _paired,
            ({0: 80.0, 1: 82.0}, {0: 79.0, 1: 83.5}),
            ({0: 80.0, 1: 82.0, 2: 90.0}, {1: 81.0, 0: 77.0}),
            ({3: 60.0}, {2: 10.0, 3: 61.0}),
        ),
        "a seed that one of them lacks does not count: a.keys() & b.keys() are those of both",
    ),
    "04.1": Exercise(share(4 / 9, 5e-3), "the smaller box lies inside the larger"),
    "04.2": Exercise(
        like(
            _overlap,
            ((10, 10, 40, 50), (10, 10, 42, 42)),
            ((0, 0, 2, 2), (1, 1, 4, 3)),
            ((0, 0, 1, 1), (2, 2, 3, 3)),
            ((0, 0, 4, 4), (1, 5, 3, 9)),
        ),
        "boxes apart share nothing: a width or height below 0 counts as 0",
    ),
    "04.3": Exercise(
        like(
            lambda height, width: 9 * sum(-(-height // n) * -(-width // n) for n in (8, 16, 32, 64, 128)),
            *[(608, 832), (224, 224), (33, 65)],
            tolerance=0,
        ),
        "strides 8, 16, 32, 64, 128; math.ceil rounds up",
    ),
    "04.5": Exercise(
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
    "05.1": Exercise(near(8**0.5, 0.03), "degrees 4 and 2, with the self-loops"),
    "05.2": Exercise(lambda x: near(59.3, 0.5)(x) or near(0.593, 5e-3)(x), "the line of 2 bits, under FP-Agg"),
    "05.3": Exercise(near(-math.inf), "can a logit be too large?"),
    "05.4": Exercise(
        like(_normalised, (_STAR,), (torch.ones(3, 3) - torch.eye(3),)),
        "add torch.eye for the self-loops, then divide rows and columns by the root of the degrees",
    ),
    "05.5": Exercise(
        like(
            lambda logits, label: -logits[label],
            (torch.tensor([2.0, -1.0, 0.5]), 0),
            (torch.tensor([2.0, -1.0, 0.5]), 1),
        ),
        "as nll_loss, but of raw logits: no softmax before it",
    ),
    "05.7": Exercise(
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
    "06.1": Exercise(lambda x: share(0.063, 1e-3)(x) or share(-0.063, 1e-3)(x), "1 minus the sum in its line"),
    "06.2": Exercise(
        like(
            lambda inputs, units: 4 * units * (inputs + units),
            (800, 800),
            (64, 32),
            tolerance=0,
            slips={
                "these are those of one gate": lambda inputs, units: units * (inputs + units),
                "a bias is added, not multiplied": lambda inputs, units: 4 * units * (inputs + units + 1),
                "these are those of a step of 35 x 20 words": lambda inputs, units: 2800 * units * (inputs + units),
            },
        ),
        "four gates, each with a matrix for the input and one for the hidden state; of the 3,584,000,000 of a step "
        "35 x 20 words have a share each",
    ),
    "06.3": Exercise(near(10_000, 1), "e to the power of log(10000)"),
    "06.4": Exercise(
        like(lambda p: math.exp(-sum(map(math.log, p)) / len(p)), ([0.5, 0.25],), ([0.1] * 7,), ([1.0, 1.0],)),
        "e to the power of the mean of -log p",
    ),
    "06.5": Exercise(
        lambda x: near(_rr_above_static_3(), 2e-3)(x),
        "only the seeds that both have count: section 5 prints it, and its cell shows how to compute it",
    ),
    "06.6": Exercise(
        like(
            lambda tokens, width: 2 * tokens**2 * width,
            (128, 768),
            (7, 3),
            tolerance=0,
            slips={"these are those of one product": lambda tokens, width: tokens**2 * width},
        ),
        "queries by keys is a table of tokens by tokens, and each of its numbers takes as many as the heads are wide, "
        "together; probabilities by values takes as many again",
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
    "08.1": Exercise(_half_with_cosine, 'cpt.solve_schedule(budget, q_min, q_max, total_steps, family="cosine")'),
    "08.2": Exercise(share(80 / 192, 5e-3), "the cost of static 4 bits"),
    "08.3": Exercise(counted(4, "bit"), "the q_min that was found"),
    "08.4": Exercise(
        lambda name: words(name) in ("rex", "r"), "s.noise_exposure() of cpt.solve_schedule(0.45, ..., family=name)"
    ),
    "08.5": Exercise(
        like(lambda s: noise_exposure(s.bits(), 8), (_CR,), (make_schedule("ER", q_min=2, q_max=8, total_steps=800),)),
        "the mean of 4.0 ** (8 - schedule.bits())",
    ),
    "08.6": Exercise(
        like(
            lambda budget: max(q for q in range(1, 9) if (q * q + 16 * q) / 192 <= budget),
            *[(0.6,), (0.417,), (0.2,), (0.65,), (1.0,)],
            tolerance=0,
        ),
        "the largest q with (q^2 + 16 q) / 192 no more than the budget",
    ),
    "09.1": Exercise(_half_above_8, "cpt.solve_schedule(..., cost=a function of bits: 20 or 40)"),
    "09.2": Exercise(
        like(lambda c: c[0::2] + 16 * c[1::2], (torch.tensor([1, 2, 15, 0], dtype=torch.uint8),), tolerance=0),
        "codes[0::2] are the first ones, codes[1::2] the second ones; 16 times a code is four bits further up",
    ),
}
