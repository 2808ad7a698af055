"""Run the checks of the repository: `python -m bench.lint`; words select checks by name."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from bench import commit_subjects, style_debt
from bench.lint import imports, notebooks, packaging, pages
from bench.lint.repository import Problem, Repository

Check = Callable[[Repository], Iterator[Problem]]


def check_style_debt(repository: Repository) -> Iterator[Problem]:
    """Check that the list at the end of ruff.toml has violations that exist, sorted."""
    settings, listed = style_debt.split_config(repository.text("ruff.toml"))
    debt = style_debt.parse_debt(listed) & style_debt.find_violations(settings)
    if listed != style_debt.format_debt(debt):
        yield Problem(
            "ruff.toml", 1, "some violations are gone: python -m bench.style_debt"
        )


def check_commit_subjects(repository: Repository) -> Iterator[Problem]:
    """Check that commits have the subject `area: Verb object`; a tree without git has none."""
    if not (repository.root / ".git").exists():
        return
    first = commit_subjects.FIRST_CHECKED
    try:
        commits = commit_subjects.subjects(f"{first}..", repository.root)
    except OSError as error:
        advice = "a shallow clone needs git fetch --unshallow"
        yield Problem(
            ".git", 1, f"no commit after {first} is checked ({error}): {advice}"
        )
        return
    for commit, subject in commits:
        if fault := commit_subjects.find_fault(subject):
            yield Problem(commit, 1, f"{subject!r}: {fault}")


def all_checks() -> dict[str, Check]:
    """Return every check by its name, such as "links"."""
    functions = {}
    for module in (imports, packaging, pages, notebooks):
        functions |= {n: f for n, f in vars(module).items() if n.startswith("check_")}
    functions |= {f.__name__: f for f in (check_style_debt, check_commit_subjects)}
    return {name.removeprefix("check_"): f for name, f in functions.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the problems, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "words", nargs="*", default=[""], help="Parts of names of checks."
    )
    words = parser.parse_args(arguments).words
    known = all_checks()
    for word in words:
        if not any(word in name for name in known):
            parser.error(f"no check has {word!r} in its name: {', '.join(known)}")
    checks = {n: f for n, f in known.items() if any(word in n for word in words)}
    repository, start = Repository(), time.monotonic()
    problems = [problem for check in checks.values() for problem in check(repository)]
    for problem in dict.fromkeys(problems):
        print(problem)
    seconds = time.monotonic() - start
    print(
        f"bench.lint: {len(checks)} checks, {len(problems)} problems, {seconds:.1f} s"
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
