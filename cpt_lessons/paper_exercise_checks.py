"""Checks of the exercises in notebooks 03 to 08, which follow the paper."""

import numpy as np

from cpt_lessons.answer_parsing import Exercise, like

T_VALUES = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
}  # Student's t of 95 % intervals, by the number of seeds


def _slope(costs: list[float], accuracies: list[float]) -> float:
    return float(np.polyfit(np.log2(costs), accuracies, 1)[0])


def _gain(cost: float, accuracy: float, static: list[tuple[float, float]]) -> float:
    costs, accuracies = zip(*sorted(static), strict=True)
    return accuracy - float(np.interp(cost, costs, accuracies))


def _half_width(differences: list[float]) -> float:
    n = len(differences)
    return float(T_VALUES[n] * np.std(differences, ddof=1) / n**0.5)


def _share_of_sums(products: float, sums: float, q: int) -> float:
    exact = sums * 32**2
    return exact / (exact + products * q**2)


def _training_bitops(macs: float, bits: list[int], q_max: int) -> float:
    return macs * sum(q * q + 2 * q * q_max for q in bits) / 32**2


def _decay_steps(deficit: int, normal: int) -> list[float]:
    return [deficit + normal / 2, deficit + 3 * normal / 4]


def _cheapest(trainings: list[tuple[float, float]], margin: float) -> float:
    """Return the lowest cost with an accuracy within a margin of full cost."""
    full = max(trainings)[1]
    return min(cost for cost, accuracy in trainings if accuracy >= full - margin)


def _cheapest_near_best(trainings: list[tuple[float, float]], margin: float) -> float:
    best = max(accuracy for _, accuracy in trainings)
    return min(cost for cost, accuracy in trainings if accuracy >= best - margin)


def _cheapest_near_first(trainings: list[tuple[float, float]], margin: float) -> float:
    _, first = trainings[0]
    return min(cost for cost, accuracy in trainings if accuracy >= first - margin)


def _cheapest_two_sided(trainings: list[tuple[float, float]], margin: float) -> float:
    full = max(trainings)[1]
    return min(cost for cost, accuracy in trainings if abs(accuracy - full) <= margin)


def _cheapest_above_margin(
    trainings: list[tuple[float, float]], margin: float
) -> float:
    full = max(trainings)[1]
    return min(cost for cost, accuracy in trainings if accuracy > full - margin)


_STATIC = [(0.30, 70.0), (0.42, 74.0), (0.69, 75.0), (1.0, 75.5)]

EXERCISES: dict[str, Exercise] = {
    "03.1": Exercise(
        like(
            _slope,
            ([0.25, 0.5, 1.0], [70.0, 72.0, 74.0]),
            ([0.4, 0.63, 0.82, 1.0], [71.0, 74.5, 75.0, 74.0]),
            slips={
                "this is the slope over the cost itself, not over its logarithm to base 2": lambda costs, accuracies: (
                    np.polyfit(costs, accuracies, 1)[0]
                ),
                "this is the slope over the natural logarithm": lambda costs, accuracies: (
                    np.polyfit(np.log(costs), accuracies, 1)[0]
                ),
            },
        ),
        "take the logarithm to base 2 of every cost, then the slope of the least-squares line",
    ),
    "03.2": Exercise(
        like(
            _gain,
            (0.63, 73.0, _STATIC),
            (0.42, 75.0, _STATIC),
            (0.35, 70.0, _STATIC[::-1]),
        ),
        "between the two static precisions next to the cost the line is straight; their order in the list may be any",
    ),
    "04.1": Exercise(
        like(
            _half_width,
            ([1.0, 1.5, 0.5],),
            ([2.0, -1.0],),
            ([0.3, 0.1, 0.2, 0.6],),
            slips={
                "the standard deviation divides by n - 1": lambda d: (
                    T_VALUES[len(d)] * np.std(d) / len(d) ** 0.5
                ),
                "the standard deviation is divided by the root of n": lambda d: (
                    T_VALUES[len(d)] * np.std(d, ddof=1)
                ),
            },
        ),
        "t times the standard deviation (with n - 1) over the root of n",
    ),
    "05.1": Exercise(
        like(
            _share_of_sums,
            (1e9, 1e7, 8),
            (1e9, 1e7, 3),
            (100.0, 1.0, 32),
            slips={
                "32 and q count squared": lambda products, sums, q: (
                    32 * sums / (32 * sums + q * products)
                )
            },
        ),
        "a sum costs 32 * 32 bit operations, a product q * q",
    ),
    "06.1": Exercise(
        like(
            _training_bitops,
            (1e6, [8, 8], 8),
            (2e6, [5, 6, 7, 8], 8),
            (1e6, [3], 6),
            slips={
                "the two products of the backward pass are missing": lambda macs, bits, q_max: (
                    macs * sum(q * q for q in bits) / 32**2
                ),
                "it is not divided by 32 * 32": lambda macs, bits, q_max: (
                    macs * sum(q * q + 2 * q * q_max for q in bits)
                ),
            },
        ),
        "a step costs q * q + 2 * q * q_max per product, in units of a product of 32 by 32 bits",
    ),
    "07.1": Exercise(
        like(
            _decay_steps,
            (64_000, 256_000),
            (0, 64_000),
            slips={
                "these are 50 and 75 % of all steps": lambda deficit, normal: [
                    (deficit + normal) / 2,
                    3 * (deficit + normal) / 4,
                ]
            },
        ),
        "the normal training begins at step R: add R to the half and to three quarters of its length",
    ),
    "08.1": Exercise(
        like(
            _cheapest,
            ([(1.0, 75.0), (0.63, 74.6), (0.4, 73.0)], 0.5),
            ([(0.82, 75.2), (1.0, 75.0), (0.55, 74.9), (0.3, 70.0)], 0.5),
            ([(1.0, 75.0), (0.4, 73.0)], 0.5),
            ([(1.0, 75.0), (0.82, 76.0), (0.55, 74.8)], 0.5),
            ([(0.82, 74.0), (1.0, 75.0), (0.55, 74.8), (0.4, 73.6)], 0.5),
            ([(0.55, 74.8), (1.0, 75.0), (0.4, 76.0)], 0.5),
            ([(1.0, 75.0), (0.4, 74.5)], 0.5),
            slips={
                "this is the margin below the best training, not below static 8": _cheapest_near_best,
                "static 8 is the training of the highest cost, wherever it is in the list": _cheapest_near_first,
                "a training that is better than static 8 by more than the margin qualifies too": _cheapest_two_sided,
                "an accuracy that is exactly the margin below static 8 qualifies too": _cheapest_above_margin,
            },
        ),
        "keep those whose accuracy is at least that of the dearest training minus the margin; return the least cost",
    ),
}
