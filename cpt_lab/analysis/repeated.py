"""Do the effects of a preregistered question repeat?  Its grid is run again with fresh seeds, on this machine.

Single runs do not repeat between processors; the difference of two arms over seeds does, where it is one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pandas as pd
from scipy import stats

from cpt_core.checks import choose
from cpt_lab.analysis.estimates import Estimate, holm
from cpt_lab.analysis.preregistered import LEVEL
from cpt_lab.analysis.runs import committed, table
from cpt_lab.experiments.grids import grid_specs, studies
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.lines import Row

FRESH = 1000  # what is added to the seeds of a question


@dataclass(frozen=True)
class Repeated:
    """An effect of the committed rows, ``before``, and of fresh seeds, ``now``.

    ``p`` is that of Welch's test that they differ, by Holm over the effects of the grid.
    """

    before: Estimate
    now: Estimate
    p: float

    @property
    def word(self) -> str:
        """ "repeats", "no effect, again", "DIFFERS", or "cannot be told" with these seeds."""
        signs = [(low > 0) - (high < 0) for low, high in (self.before.interval(), self.now.interval())]
        if self.p < LEVEL:
            return "DIFFERS"
        return "cannot be told" if signs[0] != signs[1] else "repeats" if signs[0] else "no effect, again"

    def __str__(self) -> str:
        n = f"n = {len(self.before.values)} and {len(self.now.values)}"
        return f"{self.before.what}: {self.word}: {self.now.shown()}, stored {self.before.shown()}, {n}"


def fresh(grid: str) -> list[RunSpec]:
    """Return the runs of a preregistered grid, such as "h5/characters", with seeds that nothing committed has.

    Raises:
        ValueError: for another grid, naming those that there are.
    """
    choose("verdict", grid, [name for study in studies("arms") for name in study.GRIDS])
    return [replace(spec, seed=spec.seed + FRESH) for spec in grid_specs(grid)]


def repeated(grid: str, rows: Iterable[Row]) -> list[Repeated]:
    """Return the primary effects that rest on a grid, from committed rows and from those of ``fresh(grid)``."""
    known, keys = committed(), [spec.key for spec in grid_specs(grid)]
    again = table(rows)
    of = {spec.key: key for spec, key in zip(fresh(grid), keys, strict=True)}
    again = again.assign(key=again["key"].map(of), seed=again["seed"] - FRESH)
    mixed = pd.concat([known[~known["key"].isin(keys)], again])
    both = zip(studies("arms"), studies("outcome"), strict=True)
    (study,) = (outcome for arms, outcome in both if grid in arms.GRIDS)
    before, now = ({(a.question, e.what): e for a in study.answers(runs) for e in a.primary} for runs in (known, mixed))
    pairs = [(e, now[name]) for name, e in before.items() if name in now and list(e.values) != list(now[name].values)]
    p = holm([float(stats.ttest_ind(a.values, b.values, equal_var=False).pvalue) for a, b in pairs])
    return [Repeated(a, b, found) for (a, b), found in zip(pairs, p, strict=True)]
