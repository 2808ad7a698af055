"""Effects that the prose of docs/reproducing states, by source and description.

A source is a study such as "H13", a study with fresh seeds or extended learning rates, or the id of a claim. Templates
look up one effect with ``StatedEffects.find``, and several, for ranges and counts, with ``StatedEffects.select``. The
name of no effect is an error, so that prose cannot outlive its numbers.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from book.claim_tables import experiment_name
from cpt_lab.analysis.claims import Entry
from cpt_lab.analysis.effects import Effect
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.metrics import interval_text


class StatedEffect(NamedTuple):
    """An effect as pages state it.

    Attributes:
        mean: mean over seeds.
        low: lower bound of the 95 % interval.
        high: upper bound.
        unit: such as "points"; "" if the prose has to name it.
        n: number of seeds.
    """

    mean: float
    low: float
    high: float
    unit: str
    n: int

    def text(self, unit: str = "") -> str:
        """Return the mean with its interval and unit, such as "-0.60 [-0.80, -0.30] points"."""
        interval = interval_text(self.mean, self.low, self.high)
        return f"{interval} {unit or self.unit}".strip()

    def text_with_seeds(self, unit: str = "") -> str:
        """Return ``text`` with the number of seeds, such as "-0.60 [-0.80, -0.30] points (n = 5)"."""
        return f"{self.text(unit)} (n = {self.n})"


class EffectGroup:
    """Effects whose range or count a sentence states.

    Args:
        effects: at least one effect.
    """

    def __init__(self, effects: Iterable[StatedEffect]) -> None:
        self.effects = list(effects)

    def __len__(self) -> int:
        return len(self.effects)

    @property
    def num_above(self) -> int:
        """Number of effects whose interval lies above 0."""
        return sum(effect.low > 0 for effect in self.effects)

    @property
    def num_below(self) -> int:
        """Number of effects whose interval lies below 0."""
        return sum(effect.high < 0 for effect in self.effects)

    def sizes(self, digits: int = 1) -> str:
        """Return the smallest and the largest absolute mean, such as "2.0 to 4.3".

        Raises:
            ValueError: if the means have both signs, because "better by" would be wrong for some.
        """
        means = [effect.mean for effect in self.effects]
        if min(means) < 0 < max(means):
            raise ValueError(f"effects: expected means of one sign, got {means}")
        sizes = sorted(map(abs, means))
        low, high = (f"{size:.{digits}f}" for size in (sizes[0], sizes[-1]))
        return low if low == high else f"{low} to {high}"


class StatedEffects:
    """Collection of the effects that templates may state.

    Intervals are computed on lookup, as there are thousands of effects and prose states few.
    """

    def __init__(self) -> None:
        self._by_source: dict[str, dict[str, Estimate | Effect]] = {}

    def add(self, source: str, estimates: Iterable[Estimate]) -> None:
        """Add the effects of a study under their descriptions.

        Raises:
            ValueError: if the source has another effect of the same description.
        """
        known = self._by_source.setdefault(source, {})
        for estimate in estimates:
            former = known.setdefault(estimate.description, estimate)
            is_same = isinstance(former, Estimate) and np.array_equal(
                former.values, estimate.values
            )
            if not is_same:
                raise ValueError(
                    f"{source}: expected one effect called {estimate.description!r}, got two"
                )

    def add_claims(self, entries: Iterable[Entry]) -> None:
        """Add the effects of claims: the id of the claim is the source, the experiment the description."""
        for entry in entries:
            known = self._by_source.setdefault(entry.claim.id, {})
            for effect, _ in entry.effects:
                if effect.scale != "exact":
                    known.setdefault(experiment_name(effect), effect)

    def find(self, source: str, description: str) -> StatedEffect:
        """Return an effect; KeyError if there is none."""
        return _stated(self._by_source[source][description])

    def select(self, source: str, pattern: str) -> EffectGroup:
        """Return the effects whose whole description matches a regular expression; KeyError if none does."""
        effects = [
            _stated(effect)
            for description, effect in self._by_source[source].items()
            if re.fullmatch(pattern, description)
        ]
        if not effects:
            raise KeyError(f"no effect of {source} matches {pattern!r}")
        return EffectGroup(effects)


def _stated(effect: Estimate | Effect) -> StatedEffect:
    """Return the numbers of an effect; those of claims have no unit."""
    if isinstance(effect, Effect):
        return StatedEffect(*effect.interval, "", effect.n)
    low, high = effect.interval()
    return StatedEffect(effect.mean, low, high, effect.unit, len(effect.values))
