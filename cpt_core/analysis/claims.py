"""The ledger of claims: what the paper says, and what the rows at hand say about it. Nothing in it is typed by hand.

``data/paper/claims.csv`` names for every claim a *measure*, a function that takes rows and returns effects in the
claim's direction, and a *test*, the rule that turns an effect into a verdict:

- ``more``: confirmed when the 95 % interval of the effect lies above 0; contradicted when it lies below 0, or below the
  margin if there is one (then the effect is smaller than the claim says); else open.
- ``no_worse``: confirmed when the interval lies above minus the margin, contradicted when it lies below it, else open.
- ``equal``: confirmed inside +- margin, contradicted outside of it, else open.
- ``correlation``: as ``more``; the interval is a bootstrap over seeds and arms. ``predictor`` too.
- ``exact``: confirmed or contradicted by computation.

Intervals are Student's t of differences paired by seed, in points of the metric (percent of the perplexity). With fewer
than three seeds the verdict is open. Over the experiments of one scale a claim is confirmed or contradicted when at
least one experiment says so and none the opposite; where they disagree it is open. A correlation is claimed for every
domain: it is confirmed when all experiments confirm it; a better predictor needs two domains. Many comparisons are
made: of twenty intervals one misses by chance.

>>> verdict("more", 0.0, (1.2, 0.4, 2.0), n=5)
'confirmed'
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from cpt_core.analysis.effects import LEAST_SEEDS, MEASURES, Claim, Effect, Interval
from cpt_core.paths import paper_dir
from cpt_core.sweeps.stores import Row

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


@dataclass
class Entry:
    """A claim with what the rows say, by scale."""

    claim: Claim
    effects: list[tuple[Effect, str]] = field(default_factory=list)

    def verdict(self, paper_scale: bool) -> str:
        """Return the verdict of the experiments at paper scale (exact ones are), or of the smaller ones."""
        at = [(e.domain, v) for e, v in self.effects if (e.scale in ("paper", "exact")) == paper_scale]
        return combined(at, self.claim.test)

    def verdicts(self) -> tuple[str, str]:
        """Return the verdicts at paper scale and at smaller scales in words; "–" where only one of them can be."""
        if any(e.scale == "exact" for e, _ in self.effects):
            return f"{self.verdict(True)}, exact", "–"
        words = []
        for paper_scale in (True, False):
            said = Counter(v for e, v in self.effects if (e.scale == "paper") == paper_scale)
            counts = ", ".join(f"{n} {word}" for word, n in sorted(said.items()))
            words.append(f"{self.verdict(paper_scale)} ({counts})" if said else "open (not run)")
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
        if c.measure not in MEASURES:
            raise ValueError(f"claim {c.id}: unknown measure {c.measure!r}; choose from {', '.join(MEASURES)}")
        verdict(c.test, c.margin, (0.0, 0.0, 0.0), LEAST_SEEDS)
    return found


def ledger(stores: Mapping[str, Iterable[Row]]) -> list[Entry]:
    """Return an entry per claim, judged by the rows of stores, by name; smoke runs do not count."""
    held = {row["key"]: {**row, "store": name} for name, part in stores.items() for row in part}
    return [judge(claim, list(held.values())) for claim in claims()]


def judge(claim: Claim, rows: Iterable[Row]) -> Entry:
    """Return what rows say about one claim; each may carry the name of its store as "store"."""
    mine = [
        row for row in rows if row["spec"]["scale"] != "smoke" and claim.tasks in ("", row["spec"]["recipe"]["task"])
    ]
    effects = MEASURES[claim.measure](mine, claim)
    return Entry(claim, [(e, verdict(claim.test, claim.margin, e.interval, e.n)) for e in effects])


def claims_section(of: dict[Path, list[Row]]) -> list[str]:
    """The ledger of the paper's claims."""
    entries = ledger({path.name: rows for path, rows in of.items()})
    lines = []
    for entry in entries:
        evidence = "".join(f"<li>{html.escape(line)}</li>" for line in entry.evidence())
        details = f"<details><summary>{len(entry.effects)} effects</summary><ul>{evidence}</ul></details>"
        lines.append(
            (html.escape(entry.claim.claim), entry.claim.place, *entry.verdicts(), details if evidence else "")
        )
    columns = ["claim", "paper", "at paper scale", "at smaller scales", "evidence"]
    frame = pd.DataFrame(lines, columns=columns)
    return [
        "<h2>Claims of the paper</h2>",
        "<p class='note'>Confirmed, contradicted or open by written rules (docstring of cpt_core/analysis/claims.py), "
        "from the rows of this page. What small runs contradict may hold at the paper's scale.</p>",
        frame.to_html(index=False, border=0, classes="left claims", escape=False),
    ]
