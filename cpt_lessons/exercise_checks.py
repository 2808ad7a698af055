"""Checks and hints of the exercises in notebooks 00 to 02 and 09 to 18.

``EXERCISES`` maps the number of an exercise to its ``Exercise``. Most checks compare the reader's function with a
reference on samples, and recognise common mistakes. They are not in the notebooks, because a check contains the answer.
"""

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import linear

from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.tensor_rounding import quantize
from cpt_lab.analysis.quality_cost import pareto
from cpt_lab.data.loading import one_thread
from cpt_lessons.answer_parsing import (
    Exercise,
    Refused,
    like,
    schedule,
    share,
    suite_schedule,
    words,
)
from cpt_lessons.demonstrations import held_out, tiny_problem


def _costs(bits: Any, low: float, high: float) -> bool:
    if not low <= (cost := relative_cost(bits, 8)) <= high:
        raise Refused(f"it costs {cost:.3f} of static 8")
    return True


def _static_baseline(answer: Any) -> bool:
    s = schedule(answer, 64_000)
    if s.q_min != s.q_max:
        raise Refused(f"it goes from {s.q_min} to {s.q_max} bits: it is not static")
    return _costs(s.bits(), 0.5, _CR.relative_cost())


def _rising_curve(answer: Any) -> bool:
    bits = schedule(answer, 1000).bits()
    if bits[-1] != 8:
        raise Refused(f"it ends at {bits[-1]} bits")
    if bits.min() < 3:
        raise Refused(f"it goes down to {bits.min()} bits")
    return _costs(bits, 0.50, 0.55)


def library_layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, bits: int
) -> torch.Tensor:
    """Return the output of the library's linear layer, with gradients of 8 bits."""
    outputs, inputs = weight.shape
    model = quantize_(torch.nn.Sequential(torch.nn.Linear(inputs, outputs)))
    with precision(model, bits, q_grad=8):
        return torch.func.functional_call(
            model, {"0.weight": weight, "0.bias": bias}, (x,)
        )


def _gradients(layer: Any) -> list[torch.Tensor]:
    """Return the gradients of input, weight and bias at 3 bits, under 400 draws of the noise, shape (400, ...)."""
    y = layer(*LAYER_OPERANDS, 3)
    arriving = torch.linspace(0.0, 9.0, y.numel()).sin().view(y.shape)
    samples = [
        torch.autograd.grad(y, LAYER_OPERANDS, arriving, True, allow_unused=True)
        for _ in range(400)
    ]
    if any(gradient is None for gradient in samples[0]):
        fault = "its values are right, but no gradient goes from them to all of its operands"
        raise Refused(fault, "quantize alone loses the gradient, rounded keeps it")
    return [torch.stack(gradient) for gradient in zip(*samples, strict=True)]


def _quantized_layer(answer: Any) -> bool:
    like(
        library_layer, (*LAYER_OPERANDS, 2), (*LAYER_OPERANDS, 5), slips=_LAYER_MISTAKES
    )(answer)
    names = ("input", "weight", "bias")
    for name, gradients, expected in zip(
        names, _gradients(answer), _gradients(library_layer), strict=True
    ):
        noise, usual = gradients.std(0), expected.std(0)
        fault = f"its values are right; the gradient of the {name}"
        if not noise.any():
            hook = "y.register_hook(...) with quantize(gradient, 8, noise=torch.rand_like(gradient) - 0.5)"
            raise Refused(f"{fault} is the same in every backward pass", hook)
        if (
            (gradients - expected).mean(0).abs() > 0.4 * (noise + usual) + 1e-5
        ).any():  # eight standard errors
            slope = "rounded(...) has the slope 1, and the hook rounds the gradient, no more"
            raise Refused(f"{fault} is another one, also in the mean", slope)
        if not 0.5 < noise.mean() / usual.mean() < 2:
            bits = "gradients have 8 bits, however many the operands have"
            raise Refused(f"{fault} has not the noise of 8 bits", bits)
    return True


@lru_cache(64)
def trained(schedule: Schedule) -> float:
    """Return the share of held-out digits that a small network has right once trained, with gradients of 8 bits."""
    with (
        torch.random.fork_rng(devices=[]),
        one_thread(),
    ):  # with more threads, so short a training ends elsewhere
        model, batches, loss_fn, optimizer = tiny_problem()
        scheduler = PrecisionScheduler(quantize_(model), schedule, q_grad=8)
        for x, y in itertools.islice(itertools.cycle(batches), schedule.total_steps):
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        images, labels = held_out()
        with precision(model.eval(), "q_max"), torch.no_grad():
            return float((model(images).argmax(1) == labels).float().mean())


def _cheap_and_good(answer: Any) -> bool | str:
    s = schedule(answer, 400)
    if s.q_max > 8:
        raise Refused(f"it goes up to {s.q_max} bits")
    if (cost := s.relative_cost(q_grad=8, q_max=8)) >= 0.5:
        raise Refused(f"it costs {cost:.3f} of static 8")
    right, static = trained(s), trained(StaticSchedule(8, 400))
    if right < static - 0.02:
        raise Refused(
            f"it has {right:.1%} of the held-out images right, static 8 {static:.1%}"
        )
    best = f"{right:.1%} right at a cost of {cost:.2f}, without any cycle. This is the lesson to keep: try static first"
    return best if s.q_min == s.q_max else True


def _on_grid(
    x: torch.Tensor, n: int, round: Callable[..., torch.Tensor], shift: float = 1
) -> torch.Tensor:
    step = (x.max() - x.min()) / n
    return round((x - x.min()) / step) * step + shift * x.min()


def _quantize_equal_values_to_nan(x: torch.Tensor, q: int) -> torch.Tensor:
    return _on_grid(x, 2**q - 1, torch.round)


def _quantize_with_one_step_too_many(x: torch.Tensor, q: int) -> torch.Tensor:
    return _on_grid(x, 2**q, torch.round)


def _quantize_rounding_down(x: torch.Tensor, q: int) -> torch.Tensor:
    return _on_grid(x, 2**q - 1, torch.floor)


def _quantize_without_minimum(x: torch.Tensor, q: int) -> torch.Tensor:
    return _on_grid(x, 2**q - 1, torch.round, 0)


def _quantize_to_integers(x: torch.Tensor, q: int) -> torch.Tensor:
    return torch.round((x - x.min()) / (x.max() - x.min()) * (2**q - 1))


# Common mistakes: the sentence that a reader gets, and a function that makes the mistake.
_QUANTIZE_MISTAKES = {
    "all values are equal, so that the step is 0, and 0 / 0 is no number": _quantize_equal_values_to_nan,
    "2^q steps have one level more than 2^q": _quantize_with_one_step_too_many,
    "it rounds down, not to the nearest level": _quantize_rounding_down,
    "the minimum is taken away and not added again": _quantize_without_minimum,
    "these are the levels, 0 to 2^q - 1, not yet the values": _quantize_to_integers,
}


def _between_ends(function: Any, v: torch.Tensor) -> torch.Tensor:
    """Return values rounded to 3 bits on the fixed range from -1 to 1."""
    end = torch.ones(1)
    return function(torch.cat([-end, v, end]), 3)[1:-1]


def _gradient(function: Any, v: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    v = v.clone().requires_grad_()
    rounded = _between_ends(function, v)
    passed = (
        torch.autograd.grad(rounded, v, arriving, allow_unused=True)[0]
        if rounded.requires_grad
        else None
    )
    if passed is None:
        raise Refused("its values are right, but no gradient goes from them to x")
    return passed


def _uses_library_quantizer(node: Any) -> bool:
    """Return whether a gradient passes through a quantiser of the library."""
    if node is None:
        return False
    is_quantizer = "fakequantize" in node.name().replace("_", "").lower()
    return is_quantizer or any(
        _uses_library_quantizer(next_node) for next_node, _ in node.next_functions
    )


def _straight_through(function: Any) -> bool:
    like(quantize, (_FEW, 2), (-_SQUARES, 3))(function)
    if _uses_library_quantizer(
        getattr(function(_SQUARES.clone().requires_grad_(), 2), "grad_fn", None)
    ):
        raise Refused(
            "its gradient is that of cpt.quantize: detach x before, and write the gradient yourself"
        )
    v, h, step = torch.linspace(-0.4, 0.4, 8), 0.5, 2 / 7
    wide = (
        _between_ends(function, v + h) - _between_ends(function, v - h)
    ).detach() / (2 * h)
    slope = _gradient(function, v, torch.ones_like(v))
    if ((slope - wide).abs() > step / (2 * h)).any():
        raise Refused(
            f"its values are right; its gradient is {slope[0]:g} where a wide difference is {wide[0]:.2f}"
        )
    arriving = v + 1
    passed, expected = (_gradient(f, v, arriving) for f in (function, quantize))
    if not torch.allclose(passed, expected):
        raise Refused(
            f"its values are right; of a gradient of {arriving[0]:g} that arrives it passes on {passed[0]:g}"
        )
    return True


def _ladder(answer: Any) -> bool:
    if not isinstance(answer, FormatLadder):
        raise Refused("it is no FormatLadder")
    expected = FormatLadder({4: "mxfp4", 6: "affine6", 8: "affine8"})
    if answer.levels != expected.levels:
        raise Refused(f"its levels are {', '.join(map(str, answer.levels))}")
    return answer == expected


def _paired(a: dict[int, float], b: dict[int, float]) -> float:
    common_seeds = a.keys() & b.keys()
    return sum(a[seed] - b[seed] for seed in common_seeds) / len(common_seeds)


def _average_precision(hits: list[bool], objects: int) -> float:
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    return sum(max(precisions[i:]) for i, hit in enumerate(hits) if hit) / objects


def _half_with_cosine(answer: Any) -> bool:
    s = schedule(answer, 64_000, 3, 8)
    profile = getattr(
        getattr(s, "schedule", s), "profile", None
    )  # a few steps may have been adjusted
    name = getattr(profile, "base", type(profile).__name__.lower())
    if name != "cosine":
        raise Refused(
            f"its profile is {name}, not cosine" if profile else "it has no profile"
        )
    if abs((cost := s.relative_cost()) - 0.5) >= 5e-4:
        raise Refused(f"it costs {cost:.4f} of static 8")
    return True


def _half_above_8(answer: Any) -> bool:
    s = schedule(answer, 64_000, 4, 16)
    if abs((seconds := (1 + (s.bits() > 8).mean()) / 2) - 0.75) >= 1e-3:
        raise Refused(f"it takes {seconds:.3f} of the seconds")
    return True


_MESSAGES = torch.tensor([[0.1, 0.9, -0.4], [3.0, -2.0, 0.7], [0.0, 0.5, 5.0]])
_SQUARES = torch.arange(-10.0, 23.0).square() / 100
_MATRIX = _SQUARES[1:].view(4, 8) - torch.tensor([[0.0], [1.0], [2.0], [-5.0]])
_FEW = torch.tensor([0.3, 1.0, 1.9, 3.5])
_EQUAL = torch.full((3,), 0.7)
_ONE_ROW_EQUAL = torch.stack([_EQUAL, torch.tensor([0.0, 0.4, 1.0])])
LAYER_OPERANDS = [
    v.clone().requires_grad_()
    for v in (_MATRIX[:, :6], _MATRIX[:3, 2:], _MATRIX[3, :3])
]  # x, weight, bias


def _layer_without_rounding(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, bits: int
) -> torch.Tensor:
    return linear(x, weight, bias)


def _layer_with_one_range(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, bits: int
) -> torch.Tensor:
    return linear(quantize(x, bits), quantize(weight, bits), quantize(bias, bits))


def _layer_without_rounded_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, bits: int
) -> torch.Tensor:
    return linear(quantize(x, bits), quantize(weight, bits, "linear_weight"), bias)


_LAYER_MISTAKES = {
    "nothing is rounded: multiply rounded(x, bits), and the weight and the bias likewise": _layer_without_rounding,
    "the weight has one range, and not one for each row: rounded(weight, bits, dim=1)": _layer_with_one_range,
    "the bias is not rounded: rounded(bias, bits)": _layer_without_rounded_bias,
}
_CR = make_schedule("CR", q_min=3, q_max=8, total_steps=64_000, n_cycles=8)
_ETH = make_schedule("ETH", q_min=3, q_max=8, total_steps=64_000, n_cycles=8)


def _costs_less_than_half(answer: Any) -> bool:
    return _costs(suite_schedule(answer).bits(), 0, 0.5)


def _backward_share(q: int, q_grad: int) -> float:
    """Return the share of the backward matmuls in the cost of a step."""
    return 2 * q_grad / (q + 2 * q_grad)


def _forward_share(q: int, q_grad: int) -> float:
    return q / (q + 2 * q_grad)


def _on_front(trainings: list[tuple[float, float]]) -> list[bool]:
    """Return which (cost, accuracy) are on the Pareto front."""
    arms = pd.DataFrame(trainings, columns=["relative_cost", "mean"])
    return pareto(arms).tolist()


def _on_front_without_cheaper_ties(trainings: list[tuple[float, float]]) -> list[bool]:
    return [
        not any(c <= cost and a > accuracy for c, a in trainings)
        for cost, accuracy in trainings
    ]


def _on_front_without_better_ties(trainings: list[tuple[float, float]]) -> list[bool]:
    return [
        not any(c < cost and a >= accuracy for c, a in trainings)
        for cost, accuracy in trainings
    ]


def _on_front_without_ties(trainings: list[tuple[float, float]]) -> list[bool]:
    return [
        not any(c < cost and a > accuracy for c, a in trainings)
        for cost, accuracy in trainings
    ]


def _on_front_unless_alike(trainings: list[tuple[float, float]]) -> list[bool]:
    return [
        sum(c <= cost and a >= accuracy for c, a in trainings) == 1
        for cost, accuracy in trainings
    ]


def _on_front_unless_itself(trainings: list[tuple[float, float]]) -> list[bool]:
    return [False for _ in trainings]


def _affordable_bits(budget: float) -> int:
    """Return the most bits of a static precision within a budget, relative to 8 bits."""
    return max(q for q in range(1, 9) if (q * q + 16 * q) / 192 <= budget)


def _rounding_variance(cost: float) -> float:
    """Return the variance of the rounding error at a cost, relative to 8 bits."""
    return 4 ** (16 - (64 + 192 * cost) ** 0.5)


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return pairs of 4-bit codes as bytes, the first one in the low half."""
    return codes[0::2] + 16 * codes[1::2]


def _quantize_rows(x: torch.Tensor, q: int) -> torch.Tensor:
    return quantize(x, q, "linear_weight")


def _quantize_rows_without_zero_step(x: torch.Tensor, q: int) -> torch.Tensor:
    return torch.stack([_on_grid(row, 2**q - 1, torch.round) for row in x])


def _quantize_symmetric(x: torch.Tensor, q: int) -> torch.Tensor:
    return quantize(x, format=f"symmetric{q}")


def _quantize_symmetric_with_one_bit_more(x: torch.Tensor, q: int) -> torch.Tensor:
    return quantize(x, format=f"symmetric{q + 1}")


def _is_rex(name: Any) -> bool:
    return words(name) in ("rex", "r")


def _mean_precision(hits: list[bool], objects: int) -> float:
    precisions = [
        sum(hits[: i + 1]) / (i + 1) for i, is_hit in enumerate(hits) if is_hit
    ]
    return sum(precisions) / objects


def _precision_per_hit(hits: list[bool], objects: int) -> float:
    return _average_precision(hits, max(1, sum(hits)))


def _aggregate(messages: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the sum of the quantised messages of a node's neighbours."""
    return quantize(messages, bits, "graph_aggregation").sum(0)


def _aggregate_without_rounding(messages: torch.Tensor, bits: int) -> torch.Tensor:
    return messages.sum(0)


def _aggregate_with_one_range(messages: torch.Tensor, bits: int) -> torch.Tensor:
    return quantize(messages, bits).sum(0)


def _aggregate_then_round(messages: torch.Tensor, bits: int) -> torch.Tensor:
    return quantize(messages.sum(0), bits)


def _aggregate_mean(messages: torch.Tensor, bits: int) -> torch.Tensor:
    return quantize(messages, bits, "graph_aggregation").mean(0)


def _perplexity(probabilities: list[float]) -> float:
    return math.exp(-sum(map(math.log, probabilities)) / len(probabilities))


def _deficit_cost(low_steps: int, total_steps: int, q: int) -> float:
    """Return the mean cost of a step, relative to 8 bits, with some steps at q bits."""
    low_cost = low_steps * (q * q + 16 * q) / 192
    return (low_cost + total_steps - low_steps) / total_steps


EXERCISES = {
    "00.1": Exercise(
        _costs_less_than_half,
        "cpt.make_schedule, with a name of large savings",
    ),
    "00.2": Exercise(
        _static_baseline,
        "section 1 has the cost of a step, to be divided by that of a step at 8 bits, 192",
    ),
    "00.3": Exercise(
        share(_CR.share_at(8), 2e-3),
        "from 0 to 1, to three digits: the mean of schedule.bits() == 8",
    ),
    "00.4": Exercise(
        _quantized_layer,
        "rounded(...) of all three, with dim=1 for the weight; multiply; y.register_hook(...); return y",
    ),
    "01.1": Exercise(
        _rising_curve, "3 + 5 * u costs 0.628; a power of u stays low for longer"
    ),
    "01.2": Exercise(
        like(
            _ETH.__call__,
            *[
                (t,)
                for t in (0, 500, 3000, 7000, 7999, 8000, 9000, 12_000, 20_500, 63_999)
            ],
        ),
        "as bits_at in section 2, with mirror H and f(x) = 1 - e^(-4x)",
    ),
    "01.3": Exercise(
        _cheap_and_good,
        "few bits for most of the steps, but not so few that the loss stays high: try RR in one cycle",
    ),
    "02.1": Exercise(
        like(
            quantize,
            (_FEW, 2),
            (_SQUARES, 5),
            (-_SQUARES, 3),
            (_MATRIX, 4),
            (_EQUAL, 2),
            slips=_QUANTIZE_MISTAKES,
        ),
        "s and x_q, a line each, as above; what if s is 0? clamp(min=...) helps",
    ),
    "02.2": Exercise(
        _straight_through,
        "add to x what is missing to x_q, and .detach() it: then autograd takes it for a constant",
    ),
    "02.3": Exercise(
        like(
            _backward_share,
            *[(3, 8), (8, 8), (4, 6)],
            slips={"this is the share of the forward matmul": _forward_share},
        ),
        "three products: one of q by q bits, two of q by q_grad",
    ),
    "09.1": Exercise(
        like(
            _paired,
            ({0: 80.0, 1: 82.0}, {0: 79.0, 1: 83.5}),
            ({0: 80.0, 1: 82.0, 2: 90.0}, {1: 81.0, 0: 77.0}),
            ({3: 60.0}, {2: 10.0, 3: 61.0}),
        ),
        "a seed that one of them lacks does not count: a.keys() & b.keys() are those of both",
    ),
    "09.2": Exercise(
        like(
            _on_front,
            ([(0.4, 80.0), (0.63, 83.0), (0.55, 84.0), (1.0, 86.0)],),
            ([(1.0, 90.0), (0.2, 91.0)],),
            ([(0.5, 1.0), (0.4, 0.5), (0.3, 0.75)],),
            ([(0.55, 83.0), (0.55, 84.0), (1.0, 84.0)],),
            ([(0.5, 80.0), (0.5, 80.0), (0.4, 79.0)],),
            slips={
                "a cheaper training of the same accuracy beats it too": _on_front_without_cheaper_ties,
                "a more accurate training of the same cost beats it too": _on_front_without_better_ties,
                "a training of equal cost or accuracy, better in the other, beats it too": _on_front_without_ties,
                "two trainings that are alike in both do not beat each other": _on_front_unless_alike,
                "a training does not beat itself": _on_front_unless_itself,
            },
        ),
        "a training is on the front unless another one is cheaper and no less accurate, or more accurate and no dearer",
    ),
    "10.1": Exercise(
        like(
            _affordable_bits,
            *[(0.6,), (0.417,), (0.2,), (0.65,), (1.0,)],
            tolerance=0,
        ),
        "the largest q with (q^2 + 16 q) / 192 no more than the budget",
    ),
    "10.2": Exercise(
        like(
            _rounding_variance,
            (1.0,),
            (80 / 192,),
            (57 / 192,),
        ),
        "first q from 192 c = q^2 + 16 q, which is (64 + 192 c) ** 0.5 - 8, then 4 ** (8 - q)",
    ),
    "11.1": Exercise(
        _half_above_8, "cpt.solve_schedule(..., cost=a function of bits: 20 or 40)"
    ),
    "11.2": Exercise(
        like(
            _pack_codes,
            (torch.tensor([1, 2, 15, 0], dtype=torch.uint8),),
            tolerance=0,
        ),
        "codes[0::2] are the first ones, codes[1::2] the second ones; 16 times a code is four bits further up",
    ),
    "12.1": Exercise(
        like(
            _quantize_rows,
            *[(_MATRIX, 2), (_MATRIX.T, 3), (_ONE_ROW_EQUAL, 2)],
            slips={"the first row has a step of 0": _quantize_rows_without_zero_step},
        ),
        "x.amin(1, keepdim=True) is the minimum of every row; a step of 0 as in notebook 02",
    ),
    "12.2": Exercise(
        like(
            _quantize_symmetric,
            *[(_SQUARES, 3), (-_SQUARES, 4), (_MATRIX, 5)],
            slips={"n is 2^(q - 1) - 1": _quantize_symmetric_with_one_bit_more},
        ),
        "s = x.abs().max() / n; round x / s, and go back",
    ),
    "12.3": Exercise(
        _ladder, 'cpt.FormatLadder({4: "mxfp4", ...}): a format for every level'
    ),
    "13.1": Exercise(
        _half_with_cosine,
        'cpt.solve_schedule(budget, q_min, q_max, total_steps, family="cosine")',
    ),
    "13.2": Exercise(share(80 / 192, 5e-3), "the cost of static 4 bits"),
    "13.3": Exercise(
        _is_rex,
        "s.noise_exposure() of cpt.solve_schedule(0.45, ..., family=name)",
    ),
    "15.1": Exercise(
        like(
            _average_precision,
            ([True, True, False, True, False, False], 4),
            ([False, True, True, False], 2),
            ([False, False], 3),
            slips={
                "every hit counts the precision at its place, not the best one from there on": _mean_precision,
                "it divides by the hits, not by all the objects": _precision_per_hit,
            },
        ),
        "for every hit the best precision from there on; their sum over the number of objects",
    ),
    "16.1": Exercise(
        like(
            _aggregate,
            (_MESSAGES, 2),
            (_MESSAGES, 4),
            (-_MESSAGES[:1], 3),
            slips={
                "nothing is rounded": _aggregate_without_rounding,
                "all messages have one range together": _aggregate_with_one_range,
                "the sum is rounded, and not what is summed": _aggregate_then_round,
                "this is the mean": _aggregate_mean,
            },
        ),
        'cpt.quantize(messages, bits, "graph_aggregation") first, then the sum over the neighbours, .sum(0)',
    ),
    "17.1": Exercise(
        like(
            _perplexity,
            ([0.5, 0.25],),
            ([0.1] * 7,),
            ([1.0, 1.0],),
        ),
        "e to the power of the mean of -log p",
    ),
    "18.1": Exercise(
        like(
            _deficit_cost,
            (200, 600, 2),
            (0, 100, 3),
            (64, 64, 4),
        ),
        "the mean over the steps: low ones cost (q^2 + 16 q) / 192, the others 1",
    ),
}
