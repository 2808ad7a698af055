"""Map from mutants to all tests that turn red: ``python -m bench.mutants --all-red``.

The map answers which tests protect something alone, and which protect nothing that another test does not. It is made
in two steps, each of which goes on where it stopped, in a folder of ``build/mutant_map`` that is named by the commit,
and by the changes of the working tree:

1. The tests of ``make test`` run once under line coverage with a context per test (``coverage/``).
2. For every mutant, all tests that execute a changed line run, and those that the table names (``red.jsonl``). For a
   line outside functions, which runs once at import, these are the tests that execute any function of its file.

The summary then lists the mutants that no test notices, and the tests in the order of a greedy set cover: tests after
the last one of the cover notice nothing more. ``--changed`` adds generated mutants to those of the table.

Child processes are not measured: lines that run in them alone count as lines of the tests that the table names.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bench import PACKAGES
from bench.mutants import GREEN, RED, ROOT, Mutant, find_problem, run
from bench.mutation_operators import git

RED_TEST = re.compile(
    r"^(?:FAILED|ERROR) tests/(\S+\.py(?:::\w+)*(?:\[.*?\])?)(?: - |$)", re.M
)


class RedTests(NamedTuple):
    """Tests that turned red for one mutant.

    Attributes:
        mutant: file and description.
        number_run: number of tests that ran.
        red: ids of the tests that failed, relative to ``tests``.
        status: exit status of pytest; -1 for a run that was stopped.
    """

    mutant: str
    number_run: int
    red: tuple[str, ...]
    status: int


class LineContexts:
    """Tests by the product lines that they execute.

    Args:
        tests_by_line: for every file, ids of tests (relative to ``tests``) by line number.
    """

    def __init__(self, tests_by_line: Mapping[str, Mapping[int, Iterable[str]]]):
        self._tests_by_line = {
            file: {line: set(tests) for line, tests in lines.items()}
            for file, lines in tests_by_line.items()
        }

    @classmethod
    def read(cls, path: Path, root: Path = ROOT) -> LineContexts:
        """Read the data file that coverage wrote with a context per test."""
        from coverage import CoverageData

        data = CoverageData(str(path))
        data.read()
        tests_by_line = {}
        for file in data.measured_files():
            name = Path(file).resolve().relative_to(root.resolve()).as_posix()
            tests_by_line[name] = {
                line: {_test_of(context) for context in contexts} - {""}
                for line, contexts in data.contexts_by_lineno(file).items()
            }
        return cls(tests_by_line)

    def tests_of(self, mutant: Mutant, root: Path = ROOT) -> list[str]:
        """Return the tests that execute changed lines of a mutant, and those that it names."""
        source = (root / mutant.file).read_text(encoding="utf-8")
        first = source[: source.index(mutant.before)].count("\n") + 1
        changed = range(first, first + mutant.before.rstrip("\n").count("\n") + 1)

        lines = self._tests_by_line.get(mutant.file, {})
        inside = function_lines(source) if mutant.file.endswith(".py") else set()
        selected = changed if inside.issuperset(changed) else inside
        tests = set().union(*(lines.get(line, set()) for line in selected))

        named = set(mutant.tests)
        others = [test for test in tests if named.isdisjoint(_names_of(test))]
        return sorted([*named, *others])


def _test_of(context: str) -> str:
    """Return the id of a test from a context such as "tests/test_a.py::test_b[1]|run"."""
    return context.rpartition("|")[0].removeprefix("tests/")


def _names_of(test: str) -> set[str]:
    """Return the ids that select a test: with its parameters, without them, and its file."""
    return {test, test.partition("[")[0], test.partition("::")[0]}


def function_lines(source: str) -> set[int]:
    """Return the numbers of the lines in bodies of functions."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            end = node.end_lineno or node.lineno
            lines.update(range(node.body[0].lineno, end + 1))
    return lines


def tree_name(root: Path = ROOT) -> str:
    """Return the commit of a working tree, and a hash of what differs from it, if anything does."""
    commit = git(root, "rev-parse", "--short=12", "HEAD").strip()
    changes = hashlib.sha256(git(root, "diff", "--binary", "HEAD").encode())
    new_files = git(root, "ls-files", "-z", "--others", "--exclude-standard")
    for name in new_files.split("\0")[:-1]:
        if (root / name).is_file():
            changes.update(name.encode() + (root / name).read_bytes())
    is_clean = changes.digest() == hashlib.sha256().digest()
    return commit if is_clean else f"{commit}-{changes.hexdigest()[:8]}"


def record_coverage(folder: Path, jobs: int, root: Path = ROOT) -> Path:
    """Run the suite under coverage unless that was done; return the data file."""
    data = folder / "coverage" / "data"
    if data.is_file():
        return data
    data.parent.mkdir(parents=True, exist_ok=True)
    config = data.with_name("config")
    config.write_text(
        f"[run]\nsource_pkgs = {','.join(PACKAGES)}\ndata_file = {data}.unfinished\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--cov"]
    options = [f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    suite = ["-m", "not weekly", "tests"]
    process = subprocess.run([*command, *options, *suite], cwd=root)
    if process.returncode != GREEN:
        sys.exit("the suite is not green without a mutant, or did not run")
    data.with_name("data.unfinished").rename(data)
    return data


def find_red_tests(
    mutant: Mutant, contexts: LineContexts, root: Path = ROOT
) -> RedTests:
    """Run all tests that reach a mutant; return those that turn red."""
    tests = contexts.tests_of(mutant, root)
    status, output = run(tests, mutant, root, options=("-rfE",))
    summary = output.rstrip().rpartition("\n")[2]
    number_run = sum(map(int, re.findall(r"(\d+) (?:passed|failed|error)", summary)))
    return RedTests(str(mutant), number_run, tuple(RED_TEST.findall(output)), status)


def read_map(path: Path) -> dict[str, RedTests]:
    """Return the red tests of the mutants that were run, by mutant; an unfinished last line does not count."""
    rows = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                row = RedTests(**json.loads(line))
                rows[row.mutant] = row._replace(red=tuple(row.red))
    return rows


def make_map(
    mutants: Sequence[Mutant], folder: Path, jobs: int, root: Path = ROOT
) -> dict[str, RedTests]:
    """Complete the map of some mutants in a folder and return it."""
    stale = []
    for mutant in mutants:
        if reason := find_problem(mutant, root):
            stale.append(f"{mutant}: {reason}")
    if stale:
        sys.exit("\n".join(stale))
    contexts = LineContexts.read(record_coverage(folder, jobs, root), root)
    path = folder / "red.jsonl"
    rows = read_map(path)
    remaining = [mutant for mutant in mutants if str(mutant) not in rows]
    print(f"{len(rows)} mutants are in {path}, {len(remaining)} remain", flush=True)
    with ThreadPoolExecutor(jobs) as pool, path.open("a", encoding="utf-8") as file:
        for row in pool.map(lambda m: find_red_tests(m, contexts, root), remaining):
            rows[row.mutant] = row
            file.write(json.dumps(row._asdict()) + "\n")
            file.flush()
            print(f"{row.mutant}: {len(row.red)} of {row.number_run} red", flush=True)
    return {str(mutant): rows[str(mutant)] for mutant in mutants}


def greedy_cover(red_by_mutant: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return tests that notice all mutants, most useful first, each with the mutants that it adds."""
    remaining = {mutant: set(red) for mutant, red in red_by_mutant.items() if red}
    cover: dict[str, list[str]] = {}
    while remaining:
        counts: dict[str, int] = {}
        for tests in remaining.values():
            for test in tests:
                counts[test] = counts.get(test, 0) + 1
        best = min(counts, key=lambda test: (-counts[test], test))
        cover[best] = sorted(m for m, tests in remaining.items() if best in tests)
        for mutant in cover[best]:
            del remaining[mutant]
    return cover


def summarize_map(rows: Mapping[str, RedTests]) -> str:
    """Return the summary of a map: unnoticed mutants, tests that notice alone, and the cover."""
    unnoticed = [name for name, row in rows.items() if row.status == GREEN]
    stopped = [name for name, row in rows.items() if row.status not in (GREEN, RED)]
    alone: dict[str, int] = {}
    for row in rows.values():
        if len(row.red) == 1:
            alone[row.red[0]] = alone.get(row.red[0], 0) + 1
    cover = greedy_cover({name: row.red for name, row in rows.items()})
    red_tests = {test for row in rows.values() for test in row.red}

    lines = [
        f"{len(rows)} mutants: {len(rows) - len(unnoticed) - len(stopped)} turn tests red,"
        f" {len(unnoticed)} none, {len(stopped)} end without a result",
        f"{len(red_tests)} tests turn red for a mutant, {len(alone)} of them alone for some,"
        f" {len(cover)} suffice for all",
        *(f"no test notices: {name}" for name in unnoticed),
        *(f"no result: {name}" for name in stopped),
        "tests of the cover, with the mutants that each adds:",
        *(f"{len(added):4d} {test}" for test, added in cover.items()),
    ]
    return "\n".join(lines)
