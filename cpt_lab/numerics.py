"""Numerics version of result rows, and a warning for rows of several versions in one table. Without torch.

Rows have the version as ``numerics``. The version of older rows follows from the release that they name, see
``cpt_core.numerics``.

>>> numerics_of({"numerics": 2})
2
>>> numerics_of({"provenance": {"versions": {"cpt-core": "0.1.0"}}})
1
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cpt_core.numerics import NUMERICS, NUMERICS_OF_RELEASES

RELEASES_WITHOUT_VERSION = (
    "0.1.0",
    "0.2.0",
)  # whose rows never hold a version of their own
Counts = dict[int | None, int]


class OtherNumericsWarning(UserWarning):
    """Warning about rows that were made with another numerics version than this package's."""


def numerics_of(row: Mapping[str, Any]) -> int | None:
    """Return the version of the numerics that made a row, or None where it cannot be known."""
    source = row.get("provenance", {})
    release = source.get("versions", {}).get("cpt-core")
    stated = row.get("numerics")
    if type(stated) is int and release not in RELEASES_WITHOUT_VERSION:
        return stated
    if "machine" in source and "kernels" not in source:
        return 1  # on the way to 0.2.0: kernels are named since all of them share one noise
    if release in NUMERICS_OF_RELEASES:
        return NUMERICS_OF_RELEASES[release]
    return 2 if "kernels" in source else None  # of a checkout that was not installed


def is_comparable(row: Mapping[str, Any]) -> bool:
    """Return whether a row was made with the numerics of this package."""
    return numerics_of(row) == NUMERICS


def count_numerics(rows: Iterable[Mapping[str, Any]]) -> Counts:
    """Return how many rows every version made, the newest first; failed rows hold no numbers and are left out."""
    counts = Counter(numerics_of(row) for row in rows if row.get("status") != "failed")
    return dict(sorted(counts.items(), key=lambda item: -(item[0] or 0)))


def name_numerics(version: int | None) -> str:
    """Return a version in words: "numerics 2", or "unknown numerics"."""
    return "unknown numerics" if version is None else f"numerics {version}"


def describe_counts(counts: Counts) -> str:
    """Return counts in words: "2 of numerics 2, 10 of numerics 1"."""
    return ", ".join(
        f"{count} of {name_numerics(version)}" for version, count in counts.items()
    )


def warn_of_other_numerics(
    rows: Iterable[Mapping[str, Any]], stacklevel: int = 2
) -> None:
    """Warn if rows of one table were not all made with the numerics of this package."""
    rows = list(rows)
    counts = count_numerics(rows)
    if set(counts) <= {NUMERICS}:
        return
    old_rows = [
        row for row in rows if row.get("status") != "failed" and not is_comparable(row)
    ]
    stores = sorted({row["store"] for row in old_rows if row.get("store")})
    where = ""
    if stores:
        more = " and more" if len(stores) > 3 else ""
        where = f" (the others in {', '.join(stores[:3])}{more})"

    warnings.warn(
        f"rows of other numerics than today's, {NUMERICS}: {describe_counts(counts)}{where}; equal seeds "
        "gave other noise there, so that such rows are neither paired nor reruns of each other. The column numerics "
        "tells them apart; `cpt run GRID --rerun-old` makes them again",
        OtherNumericsWarning,
        stacklevel=stacklevel + 1,
    )
