"""Profiles, the growth curves of one cycle, and the suite of the paper's ten schedules.  Paper: sections 3.1, 3.2."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpt_core.validation import check_types

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """A growth curve f over one cycle, with its two reflections.  Paper: section 3.1."""

    def growth(self, x: Array) -> Array:
        """Return f(x)."""
        raise NotImplementedError

    def horizontal(self, x: Array) -> Array:
        """Return f(1 - x): the curve read from right to left."""
        return self.growth(1.0 - x)

    def vertical(self, x: Array) -> Array:
        """Return 1 - f(x): the curve turned upside down."""
        return 1.0 - self.growth(x)


@dataclass(frozen=True)
class Linear(Profile):
    """f(x) = x."""

    def growth(self, x: Array) -> Array:
        """Return x."""
        return x


@dataclass(frozen=True)
class Cosine(Profile):
    """f(x) = (1 - cos(pi x)) / 2; repeated, this is the schedule of the original CPT paper."""

    def growth(self, x: Array) -> Array:
        """Return (1 - cos(pi x)) / 2."""
        return (1.0 - np.cos(np.pi * x)) / 2.0


@dataclass(frozen=True)
class Exponential(Profile):
    """f(x) = 1 - exp(-rate x): rises at once, saves little.

    Differs: with rate 4 the limit is 0.982, not 1, as the authors ran it; rounding hides it while q_max - q_min < 28.
    """

    rate: float = 4.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be positive, got {self.rate}")
        # a plain float, since checkpoints would store a numpy number
        object.__setattr__(self, "rate", float(self.rate))

    def growth(self, x: Array) -> Array:
        """Return 1 - exp(-rate x)."""
        return 1.0 - np.exp(-self.rate * x)

    def vertical(self, x: Array) -> Array:
        """Return exp(-rate x)."""
        return np.exp(-self.rate * x)


@dataclass(frozen=True)
class Rex(Profile):
    """f(x) = 1 - (1 - x) / (1 - d + d (1 - x)): rises late, saves much.

    Differs: d = 0.9 as the authors ran it and as the costs in the paper's text require; the REX paper has d = 0.5.
    """

    d: float = 0.9

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if not 0 <= self.d < 1:
            raise ValueError(f"d must satisfy 0 <= d < 1, got {self.d}")
        object.__setattr__(self, "d", float(self.d))

    def growth(self, x: Array) -> Array:
        """Return f(x)."""
        return 1.0 - self.vertical(x)

    def horizontal(self, x: Array) -> Array:
        """Return 1 - x / (1 - d + d x)."""
        return 1.0 - x / ((1.0 - self.d) + self.d * x)

    def vertical(self, x: Array) -> Array:
        """Return (1 - x) / (1 - d + d (1 - x)), from the closed form so that rounding ties fall as the authors' do."""
        z = 1.0 - x
        return z / ((1.0 - self.d) + self.d * z)


PROFILES: dict[str, type[Profile]] = {
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
    "rex": Rex,
}


@dataclass(frozen=True)
class SuiteEntry:
    """Entry of the suite of named schedules.

    Attributes:
        profile: name of the growth curve, a key of ``PROFILES``.
        triangular: whether the 1st, 3rd, ... cycle runs downwards.
        mirror: reflection for cycles that run downwards, see ``CyclicSchedule``.
        savings: the paper's group by cost reduction; "own" for schedules outside of its ten.
    """

    profile: str
    triangular: bool = False
    mirror: str = "horizontal"
    savings: str = "own"


# Linear and cosine are their own mirror images, so they have one triangular form.  Paper: sections 3.1 and 3.2.
SUITE: dict[str, SuiteEntry] = {
    "LR": SuiteEntry("linear", False, "horizontal", "medium"),
    "LT": SuiteEntry("linear", True, "vertical", "medium"),
    "CR": SuiteEntry("cosine", False, "horizontal", "medium"),
    "CT": SuiteEntry("cosine", True, "vertical", "medium"),
    "RR": SuiteEntry("rex", False, "horizontal", "large"),
    "RTV": SuiteEntry("rex", True, "vertical", "medium"),
    "RTH": SuiteEntry("rex", True, "horizontal", "large"),
    "ER": SuiteEntry("exponential", False, "horizontal", "small"),
    "ETV": SuiteEntry("exponential", True, "vertical", "medium"),
    "ETH": SuiteEntry("exponential", True, "horizontal", "small"),
}

# Every name that ``make_schedule`` accepts.  Add a schedule here, such as ``"PR": SuiteEntry("parabola")``, and a new
# profile to ``PROFILES``.  The paper's grids, claims and figure 2 use ``SUITE`` alone.
SCHEDULES: dict[str, SuiteEntry] = {**SUITE}

STATIC = "STATIC"
