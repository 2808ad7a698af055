"""Check of commit subjects: `area: Verb object`, imperative, at most 72 characters.

    python -m bench.commit_subjects             all commits after FIRST_CHECKED
    python -m bench.commit_subjects HEAD~3..    those of a range

`make lint` runs it. Where git or the history is missing, as in a shallow clone or a source archive, it says so and
ends with 0; a subject that breaks a rule is printed with the reason, and the status is 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_CHECKED = "d832e543"  # subjects up to this commit follow no rule
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


def subjects(commits: str) -> list[tuple[str, str]] | None:
    """Return (abbreviated hash, subject) of a range of commits, without merges.

    None where git, or the start of the range, is missing.
    """
    command = ["git", "log", "--no-merges", "--format=%h %s", commits]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
    except FileNotFoundError:
        return None
    if process.returncode:
        return None
    lines = process.stdout.splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def main(arguments: list[str]) -> int:
    """Print the faults of a range of commits."""
    commits = arguments[0] if arguments else f"{FIRST_CHECKED}.."
    pairs = subjects(commits)
    if pairs is None:
        print(f"commit subjects: not checked, git does not know {commits}")
        return 0

    faults = [(commit, subject, find_fault(subject)) for commit, subject in pairs]
    faults = [fault for fault in faults if fault[-1]]
    for commit, subject, fault in faults:
        print(f"{commit} {subject!r}: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
