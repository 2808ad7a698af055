"""What the exercises of the notebooks accept, by number, with a hint; kept apart, as a check gives its answer away."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cpt_core.analysis.quality_cost import paired_difference
from cpt_core.analysis.runs import committed
from cpt_core.quantization.fake_quantize import quantize
from cpt_core.schedules.cost import noise_exposure, relative_cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_core.teaching import playground
from cpt_core.teaching.answers import Exercise, Refused, like, near, number, of_the_suite, outcome, schedule, words
from cpt_core.teaching.demonstrations import tiny_problem


def _share(value: float, tolerance: float = 1e-3) -> Callable[[Any], bool]:
    """Return a check of a share: a number from 0 to 1, or a percentage that says so."""
    right = near(value, tolerance)

    def check(answer: Any) -> bool:
        percentage = isinstance(answer, str) and "%" in answer
        return right(number(answer) / (100 if percentage else 1))

    return check


def _costs(bits: Any, low: float, high: float) -> None:
    if not low <= (found := relative_cost(bits, 8)) <= high:
        raise Refused(f"it costs {found:.3f} of static 8")


def _cheap(answer: Any) -> bool:
    _costs(of_the_suite(answer).bits(), 0, 0.5)
    return True


def _falling(answer: Any) -> bool:
    s = of_the_suite(answer)
    _costs(s.bits(), 0.7, 0.9)
    if s(0) != s.q_max:
        raise Refused(f"it starts at {s(0)} bits, and rises")
    return True


def _seldom_at_q_min(answer: Any) -> bool:
    names = answer if isinstance(answer, list | tuple | set) else [answer]
    given = {word for name in names for word in re.findall("[a-z]+", words(name))} - {"and", "or"}
    return bool(given) and given <= {"er", "eth"}


def _own_curve(answer: Any) -> bool:
    bits = schedule(answer, 1000).bits()
    if bits[-1] != 8:
        raise Refused(f"it ends at {bits[-1]} bits")
    if bits.min() < 3:
        raise Refused(f"it goes down to {bits.min()} bits")
    _costs(bits, 0.50, 0.55)
    return True


def _own_loop(answer: Any) -> bool:
    def losses(train: Any, s: Schedule) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            model, batches, *others = tiny_problem()
            given = outcome(train, model, batches[: s.total_steps], *others, s)
        try:
            return [number(loss) for loss in given]
        except (TypeError, Refused):
            raise Refused(f"it returns a {type(given).__name__} that is no list of losses") from None

    s, flat = make_schedule("CR", q_min=3, q_max=8, total_steps=20, n_cycles=2), StaticSchedule(3, 20)
    given = losses(answer, s)
    if len(given) != s.total_steps:
        raise Refused(f"of {s.total_steps} batches it returns {len(given)} losses")
    if np.allclose(given, losses(playground.losses_of, flat), rtol=1e-5):
        raise Refused("the bits stay those of the first step")
    return np.allclose(given, losses(playground.losses_of, s), rtol=1e-5)


def _cheap_and_good(answer: Any) -> bool:
    s = schedule(answer, playground.STEPS)
    if s.q_max > playground.Q_MAX:
        raise Refused(f"it goes up to {s.q_max} bits")
    if (cost := playground.cost(s)) >= 0.5:
        raise Refused(f"it costs {cost:.3f} of static 8")
    right, static = playground.train(s).accuracy, playground.baseline(s).accuracy
    if right < static - 0.02:
        raise Refused(f"it has {right:.1%} of the held-out images right, static 8 {static:.1%}")
    return True


def _on_grid(x: torch.Tensor, n: int, round: Callable[..., torch.Tensor], shift: float = 1) -> torch.Tensor:
    step = (x.max() - x.min()) / n
    return round((x - x.min()) / step) * step + shift * x.min()


def _rows_on_grid(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack([_on_grid(row, n, torch.round) for row in x])


_SLIPS = {
    "all values are equal, so that the step is 0, and 0 / 0 is no number": lambda x, q: _on_grid(
        x, 2**q - 1, torch.round
    ),
    "2^q steps have one level more than 2^q": lambda x, q: _on_grid(x, 2**q, torch.round),
    "it rounds down, not to the nearest level": lambda x, q: _on_grid(x, 2**q - 1, torch.floor),
    "the minimum is taken away and not added again": lambda x, q: _on_grid(x, 2**q - 1, torch.round, 0),
    "these are the levels, 0 to 2^q - 1, not yet the values": lambda x, q: torch.round(
        (x - x.min()) / (x.max() - x.min()) * (2**q - 1)
    ),
}


def _between_ends(function: Any, v: torch.Tensor) -> torch.Tensor:
    """What 3 bits make of values between two that stay, so that the grid stays."""
    end = torch.ones(1)
    return function(torch.cat([-end, v, end]), 3)[1:-1]


def _gradient(function: Any, v: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    v = v.clone().requires_grad_()
    rounded = _between_ends(function, v)
    passed = torch.autograd.grad(rounded, v, arriving, allow_unused=True)[0] if rounded.requires_grad else None
    if passed is None:
        raise Refused("its values are right, but no gradient goes from them to x")
    return passed


def _straight_through(function: Any) -> bool:
    like(quantize, (_SPREAD, 2), (-_SPREAD, 3))(function)
    v, h, step = torch.linspace(-0.4, 0.4, 8), 0.5, 2 / 7
    wide = (_between_ends(function, v + h) - _between_ends(function, v - h)).detach() / (2 * h)
    slope = _gradient(function, v, torch.ones_like(v))
    if ((slope - wide).abs() > step / (2 * h)).any():
        raise Refused(f"its values are right; its gradient is {slope[0]:g} where a wide difference is {wide[0]:.2f}")
    arriving = v + 1
    passed, wanted = (_gradient(f, v, arriving) for f in (function, quantize))
    if not torch.allclose(passed, wanted):
        raise Refused(f"its values are right; of a gradient of {arriving[0]:g} that arrives it passes on {passed[0]:g}")
    return True


def _front(runs: list[tuple[float, float]]) -> list[bool]:
    return [not any(c <= cost and a > accuracy for c, a in runs) for cost, accuracy in runs]


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


def _anchors(height: int, width: int) -> int:
    return 9 * sum(-(-height // stride) * -(-width // stride) for stride in (8, 16, 32, 64, 128))


def _average_precision(hits: list[bool], objects: int) -> float:
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects


def _precision_at_hits(hits: list[bool], objects: int) -> float:
    return sum(sum(hits[: i + 1]) / (i + 1) for i, hit in enumerate(hits) if hit) / objects


def _normalised(adjacency: torch.Tensor) -> torch.Tensor:
    joined = adjacency + torch.eye(len(adjacency))
    scale = joined.sum(1).rsqrt()
    return scale[:, None] * joined * scale


def _counted(value: float, unit: str) -> Callable[[Any], bool]:
    """Return a check of a whole number that may have its unit behind it."""

    def right(answer: Any) -> bool:
        return near(value)(re.sub(rf"\s*{unit}s?\s*$", "", answer) if isinstance(answer, str) else answer)

    return right


def _window(answer: Any) -> bool:
    s = schedule(answer, 256_000)
    return bool(s.bits().sum() == 8 * 256_000 - 5 * 128_000 and s(15_999) == 8 and s(16_000) == 3)


def _both_ends(answer: Any) -> bool:
    return schedule(answer, 600).bits().tolist() == [2] * 100 + [8] * 400 + [2] * 100


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


def _static_of(budget: float) -> int:
    return max(q for q in range(1, 9) if (q * q + 16 * q) / 192 <= budget)


def _half_above_8(answer: Any) -> bool:
    s = schedule(answer, 64_000)
    if (s.q_min, s.q_max) != (4, 16):
        raise Refused(f"it goes from {s.q_min} to {s.q_max} bits")
    if abs((seconds := (1 + (s.bits() > 8).mean()) / 2) - 0.75) >= 1e-3:
        raise Refused(f"it takes {seconds:.3f} of the seconds")
    return True


def _intensity(rows: int, inputs: int, outputs: int) -> float:
    return 2 * rows * inputs * outputs / (rows * inputs + inputs * outputs + 4 * rows * outputs)


_SPREAD = torch.linspace(-1.0, 2.2, 33).square()
_MATRIX = _SPREAD[1:].view(4, 8) - torch.tensor([[0.0], [1.0], [2.0], [-5.0]])
_EQUAL = torch.full((3,), 0.7)
_ONE_ROW_EQUAL = torch.stack([_EQUAL, torch.tensor([0.0, 0.4, 1.0])])
_MESSAGES = torch.tensor([[0.1, 0.9, -0.4], [3.0, -2.0, 0.7], [0.0, 0.5, 5.0]])
_STAR = torch.tensor([[0.0, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]])
_CR = make_schedule("CR", q_min=3, q_max=8, total_steps=64_000, n_cycles=8)
_ETH = make_schedule("ETH", q_min=3, q_max=8, total_steps=64_000, n_cycles=8)

EXERCISES = {
    "00.1": Exercise(_cheap, "cpt.make_schedule, with a name of large savings"),
    "00.2": Exercise(_falling, "two have small savings; schedules.price_figure(...) shows which of them falls first"),
    "00.3": Exercise(_share(_CR.share_at(8), 2e-3), "schedule.bits() is an array: compare it with 8 and take the mean"),
    "00.4": Exercise(
        _own_loop, "section 2 has the loop: quantize_, PrecisionScheduler, and its step() after the optimizer's"
    ),
    "01.1": Exercise(_seldom_at_q_min, "the last column of section 3's table; share_at(q_min) of a schedule tells it"),
    "01.2": Exercise(_own_curve, "3 + 5 * u costs 0.628; a power of u stays low for longer"),
    "01.3": Exercise(
        like(_ETH.__call__, *[(t,) for t in (0, 500, 3000, 7000, 7999, 8000, 9000, 12_000, 20_500, 63_999)]),
        "section 1's lines: the 1st, 3rd, ... cycle takes f(1 - x), the others f(x) = 1 - e^(-4x); then round(...)",
    ),
    "01.4": Exercise(
        like(lambda s: s.share_at(s.q_min), (_CR,), (make_schedule("RTH", q_min=4, q_max=6, total_steps=800),)),
        "the mean of schedule.bits() == schedule.q_min",
    ),
    "01.5": Exercise(
        _cheap_and_good, "few bits for most of the steps, but not so few that the loss stays high: try RR"
    ),
    "02.1": Exercise(near(32), "2^q, which Python writes 2**q"),
    "02.2": Exercise(_share(48 / 192), "three products of 4 by 4 bits, by three of 8 by 8"),
    "02.4": Exercise(
        like(lambda q, q_max: (q * q + 2 * q * q_max) / (3 * q_max**2), (4, 8), (8, 8), (3, 6)),
        "three products: one of q by q bits, two of q by q_max; divide by what they cost at q_max",
    ),
    "02.5": Exercise(
        like(quantize, (_SPREAD, 2), (_SPREAD, 5), (-_SPREAD, 3), (_MATRIX, 4), (_EQUAL, 2), slips=_SLIPS),
        "n, s, the level and x_q, a line each, as in anatomy; what if s is 0? clamp(min=...) helps",
    ),
    "02.6": Exercise(near(4 * 32 * 32**2 * 16 * 9, 0), "cpt.count_bitops(layer, (pictures,)).forward_macs"),
    "02.7": Exercise(
        _straight_through,
        "add to x what is missing to x_q, and .detach() it: then autograd takes it for a constant",
    ),
    "02.8": Exercise(
        like(
            lambda x, q: quantize(x, q, "linear_weight"),
            *[(_MATRIX, 2), (_MATRIX.T, 3), (_ONE_ROW_EQUAL, 2)],
            slips={"the first row has a step of 0": lambda x, q: _rows_on_grid(x, 2**q - 1)},
        ),
        "x.amin(1, keepdim=True) is the minimum of every row; a step of 0 as in exercise 5",
    ),
    "03.1": Exercise(
        lambda g: words(g) in ("large", "large savings", "rr", "rth"), "if quality does not suffer, take the cheapest"
    ),
    "03.2": Exercise(_counted(5, "bit"), "notebook 02: what a step at q bits costs"),
    "03.3": Exercise(
        like(
            _front,
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
    "04.1": Exercise(_share(4 / 9, 5e-3), "the smaller box lies inside the larger"),
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
        like(_anchors, (608, 832), (224, 224), (33, 65), tolerance=0), "strides 8, 16, 32, 64, 128; math.ceil rounds up"
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
    "06.1": Exercise(lambda x: _share(0.063, 1e-3)(x) or _share(-0.063, 1e-3)(x), "1 minus the sum in its line"),
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
    "07.1": Exercise(_share((200 * 36 + 400 * 192) / (600 * 192), 5e-3), "2 bits cost 36/192 of a step at 8 bits"),
    "07.2": Exercise(_window, "cpt.DeficitSchedule(q_low, q_high, windows, total_steps)"),
    "07.3": Exercise(_counted(400, "step"), "section 2: damage is a loss against the good steps alone"),
    "07.5": Exercise(_both_ends, "windows are a list of (start, stop): two of them"),
    "07.6": Exercise(
        like(
            lambda low, total, q: (low * (q * q + 16 * q) / 192 + total - low) / total,
            (200, 600, 2),
            (0, 100, 3),
            (64, 64, 4),
        ),
        "the mean over the steps: low ones cost (q^2 + 16 q) / 192, the others 1",
    ),
    "08.1": Exercise(_half_with_cosine, 'cpt.solve_schedule(budget, q_min, q_max, total_steps, family="cosine")'),
    "08.2": Exercise(_share(80 / 192, 5e-3), "the cost of static 4 bits"),
    "08.3": Exercise(_counted(4, "bit"), "the q_min that was found"),
    "08.4": Exercise(
        lambda name: words(name) in ("rex", "r"), "s.noise_exposure() of cpt.solve_schedule(0.45, ..., family=name)"
    ),
    "08.5": Exercise(
        like(lambda s: noise_exposure(s.bits(), 8), (_CR,), (make_schedule("ER", q_min=2, q_max=8, total_steps=800),)),
        "the mean of 4.0 ** (8 - schedule.bits())",
    ),
    "08.6": Exercise(
        like(_static_of, (0.6,), (0.417,), (0.2,), (0.65,), (1.0,), tolerance=0),
        "the largest q with (q^2 + 16 q) / 192 no more than the budget",
    ),
    "09.1": Exercise(_share(0.8, 1e-3), "the mean of the steps' times, over 40 ms"),
    "09.2": Exercise(_half_above_8, "cpt.solve_schedule(..., cost=a function of bits: 20 or 40)"),
    "09.3": Exercise(
        like(_intensity, (512, 384, 1536), (1, 64, 8)),
        "2 M K N operations; M K and K N bytes are read, 4 M N written",
    ),
    "09.4": Exercise(
        like(lambda c: c[0::2] + 16 * c[1::2], (torch.tensor([1, 2, 15, 0], dtype=torch.uint8),), tolerance=0),
        "codes[0::2] are the first ones, codes[1::2] the second ones; 16 times a code is four bits further up",
    ),
}
