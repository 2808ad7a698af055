"""Date the rules of the claims that have changed, in ``data/paper/claims.csv``: ``python -m bench.rules``.

Lines whose rule is what it was keep their dates. Commit the file together with the change.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import pandas as pd

from cpt_lab.analysis.claims import claims
from cpt_lab.analysis.rules import renewed
from cpt_lab.paths import paper_dir


def main() -> None:
    """Rewrite the file, and say which lines have a new date."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    old = claims()
    new = [renewed(claim, now) for claim in old]
    lines = pd.DataFrame(map(asdict, new))
    lines["margin"] = [f"{margin:g}" if margin or test in ("more", "no_worse", "equal") else ""
                       for margin, test in zip(lines["margin"], lines["test"], strict=True)]  # fmt: skip
    lines.to_csv(paper_dir() / "claims.csv", index=False)
    changed = [b.id for a, b in zip(old, new, strict=True) if a != b]
    print(f"{len(changed)} of {len(new)} rules dated {now}: {', '.join(changed) or 'none has changed'}")


if __name__ == "__main__":
    main()
