"""Rules of commit subjects: `area: Verb object`, imperative, at most 72 characters. `make lint` checks them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_CHECKED = "d832e543"  # earlier subjects are not checked
MAX_CHARACTERS = 72
AREAS = frozenset(
    {
        # the method
        "schedules",
        "quant",
        "bitops",
        "graphs",
        "models",
        "core",
        # beyond the method
        "int8",
        "kernels",
        "formats",
        "search",
        "diagnostics",
        "integrations",
        "operations",
        "extras",
        # the paper and the course
        "lab",
        "data",
        "studies",
        "notebooks",
        # everything else
        "docs",
        "tests",
        "bench",
        "book",
        "ci",
        "lint",
        "tree",  # all packages at once, such as a rename
    }
)
SUBJECT = re.compile(r"(?P<area>[\w-]+): (?P<verb>[A-Z][a-z]+)\b.*[^.\s]")
# Imperatives that look like another form of a verb.
IMPERATIVES = frozenset(
    "Address Pass Bypass Process Discuss Express Embed Feed Need Seed Speed "
    "Bring Exceed Proceed Compress Assess Focus Access".split()
)


def find_fault(subject: str) -> str:
    """Return what is wrong with a subject, "" if nothing is.

    >>> find_fault("docs: Explain the range test")
    ''
    >>> find_fault("docs: explained the range test")
    'expected "area: Verb object", such as "docs: Explain the range test"'
    """
    match = SUBJECT.fullmatch(subject)
    if match is None:
        return 'expected "area: Verb object", such as "docs: Explain the range test"'
    if match["area"] not in AREAS:
        return f"unknown area {match['area']!r}; choose from {', '.join(sorted(AREAS))}"
    if len(subject) > MAX_CHARACTERS:
        return f"{len(subject)} characters, at most {MAX_CHARACTERS} are allowed"
    verb = match["verb"]
    if verb not in IMPERATIVES and verb.endswith(("ed", "ing", "s")):
        return f"expected an imperative such as Add, got {verb!r}"
    return ""


def subjects(commits: str, root: Path = ROOT) -> list[tuple[str, str]]:
    """Return (abbreviated hash, subject) of a range of commits, without merges.

    Raises:
        OSError: where git, or the start of the range, is missing, as in a shallow clone.
    """
    command = ["git", "log", "--no-merges", "--format=%h %s", commits]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root
    )
    if process.returncode:
        raise OSError(process.stderr.partition("\n")[0])
    pairs = [line.partition(" ") for line in process.stdout.splitlines()]
    return [(commit, subject) for commit, _, subject in pairs]
