"""The claims of the paper, and what the runs at hand say about them. No verdict is typed by hand.

``data/paper/claims.csv`` names for every claim a *measure*, a function of ``EFFECTS`` that takes runs and returns
effects in the claim's direction, and a *test*, the rule that turns an effect into a verdict:

- ``more``: confirmed when the 95 % interval of the effect lies above 0; contradicted when it lies below 0, or below the
  margin if there is one (then the effect is smaller than the claim says); else open.
- ``no_worse``: confirmed when the interval lies above minus the margin, contradicted when it lies below it, else open.
- ``equal``: confirmed inside +- margin, contradicted outside of it, else open.
- ``correlation``: as ``more``; the interval is a bootstrap over seeds and arms. ``predictor`` too.
- ``exact``: confirmed or contradicted by computation.

Intervals are Student's t of differences paired by seed, in points of the metric (percent of the perplexity). With fewer
than three seeds the verdict is open; correlations need ten arms and two seeds (``predictors.predictors``). Over the
experiments of one scale a claim is confirmed or contradicted when at least one experiment says so and none the
opposite; where they disagree it is open. A correlation is claimed for every domain: it is confirmed when all
experiments confirm it; a better predictor needs two domains. Many comparisons are made: of twenty intervals one misses
by chance.

>>> verdict("more", 0.0, (1.2, 0.4, 2.0), n=5)
'confirmed'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from cpt_core.analysis.effects import EFFECTS, LEAST_SEEDS, Claim, Effect, Interval
from cpt_core.analysis.pages import Section
from cpt_core.paths import paper_dir

CONFIRMED, CONTRADICTED, OPEN = "confirmed", "contradicted", "open"


def verdict(test: str, margin: float, effect: Interval, n: int) -> str:
    """Return "confirmed", "contradicted" or "open" for one effect; the rules are those of the module's docstring."""
    mean, low, high = effect
    if test == "exact":
        return CONFIRMED if mean > 0 else CONTRADICTED
    if n < LEAST_SEEDS or not (low <= mean <= high):
        return OPEN
    if test in ("more", "correlation", "predictor"):
        return CONFIRMED if low > 0 else CONTRADICTED if high < margin or high < 0 else OPEN
    if test == "no_worse":
        return CONFIRMED if low > -margin else CONTRADICTED if high < -margin else OPEN
    if test == "equal":
        inside, outside = -margin < low and high < margin, low > margin or high < -margin
        return CONFIRMED if inside else CONTRADICTED if outside else OPEN
    raise ValueError(f"unknown test {test!r}; choose from more, no_worse, equal, correlation, predictor, exact")


def combined(votes: Iterable[tuple[str, str]], test: str = "more") -> str:
    """Return the verdict of several experiments of one scale, given as (domain, verdict), by the rule of the test."""
    votes = list(votes)
    found = {v for _, v in votes}
    if test == "correlation" and CONTRADICTED not in found:
        return CONFIRMED if found == {CONFIRMED} else OPEN
    decided = found - {OPEN}
    if len(decided) != 1 or (test == "predictor" and len({domain for domain, v in votes if v != OPEN}) < 2):
        return OPEN
    return decided.pop()


def _on(votes: Iterable[tuple[str, str]], word: str) -> str:
    """The data sets on which a verdict was reached, each once."""
    return ", ".join(dict.fromkeys(dataset for verdict, dataset in votes if verdict == word))


@dataclass(frozen=True)
class Entry:
    """A claim with every effect that the runs show, and its verdict."""

    claim: Claim
    effects: tuple[tuple[Effect, str], ...] = ()

    def verdict(self, paper_scale: bool) -> str:
        """Return the verdict of the experiments at paper scale (exact ones are), or of the smaller ones."""
        at = [(e.domain, v) for e, v in self.effects if (e.scale in ("paper", "exact")) == paper_scale]
        return combined(at, self.claim.test)

    def verdicts(self) -> tuple[str, str]:
        """Return the verdicts at paper scale and at smaller scales in words; "–" where only one of them can be.

        They name the data: smaller scales use stand-ins, also for claims that name a data set of the paper.
        """
        if any(e.scale == "exact" for e, _ in self.effects):
            return f"{self.verdict(True)}, exact", "–"
        words = []
        for paper_scale in (True, False):
            at = [(v, e.dataset) for e, v in self.effects if (e.scale == "paper") == paper_scale]
            counts = [f"{n} {word} on {_on(at, word)}" for word, n in sorted(Counter(v for v, _ in at).items())]
            words.append(f"{self.verdict(paper_scale)} ({'; '.join(counts)})" if at else "open (not run)")
        return words[0], words[1]

    def evidence(self) -> list[str]:
        """Return every effect in words, with its verdict."""
        return [f"{v}: {e}" for e, v in self.effects]

    def stores(self) -> list[str]:
        """Return the names of the stores that the effects come from."""
        return sorted({name for e, _ in self.effects for name in e.stores})


def claims() -> list[Claim]:
    """Return the claims of ``data/paper/claims.csv``; ValueError for an unknown measure or test."""
    table = pd.read_csv(paper_dir() / "claims.csv", keep_default_na=False)
    found = [Claim(**{**line, "margin": float(line["margin"] or 0)}) for line in table.to_dict("records")]
    for c in found:
        if c.measure not in EFFECTS:
            raise ValueError(f"claim {c.id}: unknown measure {c.measure!r}; choose from {', '.join(EFFECTS)}")
        verdict(c.test, c.margin, (0.0, 0.0, 0.0), LEAST_SEEDS)
    return found


def judged(runs: pd.DataFrame) -> list[Entry]:
    """Return an entry per claim, judged by runs; those at smoke scale do not count."""
    return [judge(claim, runs) for claim in claims()]


def judge(claim: Claim, runs: pd.DataFrame) -> Entry:
    """Return what runs say about one claim."""
    mine = runs[(runs["scale"] != "smoke") & ((runs["task"] == claim.tasks) | (claim.tasks == ""))]
    effects = EFFECTS[claim.measure](mine, claim)
    return Entry(claim, tuple((e, verdict(claim.test, claim.margin, e.interval, e.n)) for e in effects))


def summary(entries: Iterable[Entry]) -> pd.DataFrame:
    """Return the claims for people: verdicts, rows that they rest on, commands that settle them, evidence as a list."""
    lines = []
    for e in entries:
        rows = ", ".join(f"`{name}`" for name in e.stores()) or "–"
        settled = ", ".join(f"`python -m cpt_core run {grid}`" for grid in e.claim.grids.split()) or "–"
        lines.append((e.claim.claim, e.claim.place, *e.verdicts(), rows, settled, e.evidence()))
    columns = ["claim", "where", "at paper scale", "at smaller scales", "rows", "settled by", "evidence"]
    return pd.DataFrame(lines, columns=columns)


def section(runs: pd.DataFrame) -> Section:
    """Return the claims as a part of a page."""
    note = (
        "Confirmed, contradicted or open by written rules (docstring of `cpt_core/analysis/claims.py`), from the rows "
        "of this page. Smaller scales have small models, and stand-ins for the data that a claim or the paper names: "
        "what they contradict may hold at the paper's scale."
    )
    shown = summary(judged(runs)).drop(columns=["rows", "settled by"])
    return Section("Claims of the paper", (note,), table=shown, style="left claims")
