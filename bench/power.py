"""The power of the tests of PREREGISTRATION.md: ``python -m bench.power``.

Every test is a Student's t over seeds. Effects and standard deviations are those of earlier rows and pilots, as the
document names them. Power is that at the level of the test alone, and at a fifth of it, the hardest that Holm's
correction over five tests may ask for.
"""

from __future__ import annotations

import math

from scipy import stats


def power(effect: float, sd: float, n: int, level: float, sides: int = 2) -> float:
    """Return the probability that a t-test over n differences finds an effect (of the right sign) at a level."""
    t = stats.t.ppf(1 - level / sides, n - 1)
    return float(stats.nct.sf(t, n - 1, effect / sd * math.sqrt(n)))


def equivalence(margin: float, sd: float, n: int, level: float) -> float:
    """Return the probability that two one-sided t-tests find differences within +-margin when there is none.

    A lower bound: the two tests are taken to fail separately.
    """
    return max(0.0, 2 * power(margin, sd, n, level, sides=1) - 1)


CASES = {  # what: effect, standard deviation, seeds, level, sides
    "H1 Facebook, slope 0.25 points a doubling": (0.25, 0.10, 8, 0.01, 2),
}

if __name__ == "__main__":
    for name, (effect, sd, n, level, sides) in CASES.items():
        alone, hardest = power(effect, sd, n, level, sides), power(effect, sd, n, level / 5, sides)
        print(f"{name}: n = {n}, power {alone:.2f} at {level:g}, {hardest:.2f} at {level / 5:g}")
