"""Power of the primary tests of docs/preregistration.md: ``python -m bench.power``.

Every test is a Student's t over seeds. Standard deviations are those of earlier rows and of pilots, as the document
says. Power is given at the level of a single test, and at a fifth of it, the strictest level of Holm's correction over
five tests.
"""

from __future__ import annotations

import math

from scipy import stats


def power(effect: float, sd: float, n: int, level: float, sides: int = 2) -> float:
    """Return the probability that a t-test over n differences finds an effect with the right sign."""
    t = stats.t.ppf(1 - level / sides, n - 1)
    return float(stats.nct.sf(t, n - 1, effect / sd * math.sqrt(n)))


def equivalence(margin: float, sd: float, n: int, level: float = 0.05) -> float:
    """Return a lower bound of the probability that a true difference of 0 tests as within +-margin."""
    return max(0.0, 2 * power(margin, sd, n, level, sides=1) - 1)


# what: effect, standard deviation over seeds, seeds, level, sides
CASES = {
    "H1 Facebook, 0.13 points a doubling": (0.13, 0.07, 8, 0.01, 2),
    "H1 characters, 1.3 % a doubling": (1.3, 1.0, 16, 0.01, 2),
    "H2 Facebook, true difference 0, margin 0.2 points": (0.2, 0.17, 10, 0.05, 1),
    "H2 characters, true difference 0, margin 2 %": (2.0, 2.0, 20, 0.05, 1),
    "H2 GraphSAGE, true difference 0, margin 0.2 points": (0.2, 0.25, 20, 0.05, 1),
    "H3, 0.4 points from the earliest to the latest": (0.4, 0.30, 10, 0.05, 2),
    "H4a, 0.16 %": (0.16, 0.15, 13, 0.05, 2),
    "H4b, 0.5 points": (0.5, 0.60, 20, 0.05, 2),
}
MARGINS = {  # of "no effect worth naming", tested at .05 on both sides: margin, standard deviation, seeds
    "H1 Facebook, within 0.1 points": (0.1, 0.07, 8),
    "H1 characters, within 1.6 %": (1.6, 1.0, 16),
    "H3, within 0.25 points": (0.25, 0.30, 10),
    "H4a, within 0.15 %": (0.15, 0.15, 13),
    "H4b, within 0.5 points": (0.5, 0.60, 20),
}

if __name__ == "__main__":
    for name, (effect, sd, n, level, sides) in CASES.items():
        alone, hardest = (
            power(effect, sd, n, level, sides),
            power(effect, sd, n, level / 5, sides),
        )
        print(
            f"{name}: sd {sd:g}, n {n}: {alone:.2f} at {level:g}, {hardest:.2f} at {level / 5:g}"
        )
    for name, (margin, sd, n) in MARGINS.items():
        print(
            f"{name} when there is none: sd {sd:g}, n {n}: {equivalence(margin, sd, n):.2f}"
        )
