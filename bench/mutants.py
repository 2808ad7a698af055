"""Mutation tests: every small wrong change of the package must make a test fail: ``python -m bench.mutants``.

``mutants.toml`` lists them: in which file which text becomes which other one, and the tests that must notice. Every
mutant is put into a copy of the checkout, where those tests run; the working tree is left alone. The same tests run
once without a mutant: they must be green then, or their red says nothing. Tests run in forks of a process that has
torch imported.

    python -m bench.mutants                     # all of them
    python -m bench.mutants --only bitops lstm  # those whose file or description holds a word
    python -m bench.mutants --tests search      # those that name a test below tests/search
    python -m bench.mutants --changed [COMMIT]  # made from the lines that a commit, or HEAD, does not have
    python -m bench.mutants --all-red           # map of all tests that turn red, see bench.mutant_map

The list was written by hand and does not cover new code. ``--changed`` therefore generates mutants from changed lines
(``bench.mutation_operators``): at most ``--most`` of them, drawn with ``--seed``, for the tests nearest to their file.
A survivor needs a test or a closer look: some mutants do not change what the code does.

Ends with 1 when a mutant survives, when its text is not in its file exactly once, or when its tests do not run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import PACKAGES
from bench.mutation_operators import changed_lines, changes

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LEFT_OUT = (
    ".*",
    "*.egg-info",
    "build",
    "dist",
    "runs",
    "cache",
)  # made by machines, or not read by tests
SECONDS = 900  # after this long a test hangs
NEAREST = 4  # files of tests for a mutant that was made
OWN_PACKAGES = ("bench", "book", *PACKAGES)
PRELOADED = ("torch", "torchvision", "pytest", "hypothesis", "scipy.stats", "pandas")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(PRELOADED))
GREEN, RED = 0, 1  # what pytest ends with; all else is a test that did not run


@dataclass(frozen=True)
class Mutant:
    """A small wrong change of the code, and the tests that must notice it.

    Attributes:
        file: path from the root of the checkout, such as "cpt_core/validation.py".
        description: what goes wrong, in words.
        before: text that the file contains exactly once.
        after: text that replaces it.
        tests: files or single tests below ``tests``, of which at least one must fail.
        is_generated: whether the mutant was generated; it then counts as noticed, too, if tests cannot run or hang.
    """

    file: str
    description: str
    before: str
    after: str
    tests: tuple[str, ...]
    is_generated: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.description}"

    def difference(self) -> str:
        """Return the changed lines as a patch."""
        lines = difflib.ndiff(self.before.splitlines(), self.after.splitlines())
        return "\n".join(line for line in lines if line[0] in "+-")


def read_mutants(path: Path = TABLE) -> list[Mutant]:
    """Return the mutants of a TOML file, which has a table per source file and a line per mutant."""
    files = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Mutant(file, description, before, after, tuple(tests))
        for file, mutants in files.items()
        for description, (before, after, *tests) in mutants.items()
    ]


def make_mutants(ref: str, root: Path = ROOT) -> list[Mutant]:
    """Return generated mutants of the lines that a commit does not have."""
    texts = {
        p.relative_to(root / "tests").as_posix(): p.read_text("utf-8")
        for p in root.glob("tests/**/test_*.py")
    }
    mutants = []
    for file, lines in changed_lines(ref, root).items():
        tests = nearest_tests(file, dict(sorted(texts.items())))
        source = (root / file).read_text(encoding="utf-8")
        mutants += [
            Mutant(file, *change, tests, is_generated=True)
            for change in changes(source, lines)
        ]
    return mutants


def nearest_tests(file: str, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tests nearest to a file of the package: at most ``NEAREST``, from ``texts`` by file.

    Tests that the list names for the file come first, then tests of its package with its name, then tests that import
    it. Without any, tests of its package are taken.
    """
    module, name = file.removesuffix(".py").replace("/", "."), Path(file).stem
    imports = re.compile(
        rf"{re.escape(module)}\b|from {re.escape(module.rpartition('.')[0])} import .*\b{name}\b"
    )
    listed_tests = [
        test.partition("::")[0]
        for mutant in read_mutants()
        if mutant.file == file
        for test in mutant.tests
    ]
    package_tests = [
        test for test in texts if Path(test).parent.name == Path(file).parent.name
    ]
    named_tests = [test for test in package_tests if name in Path(test).stem]
    importing_tests = [
        test for test in [*package_tests, *texts] if imports.search(texts[test])
    ]
    candidates = (
        dict.fromkeys(
            [
                *(test for test in listed_tests if test in texts),
                *named_tests,
                *importing_tests,
            ]
        )
        or package_tests
    )
    return tuple(candidates)[:NEAREST]


def find_problem(mutant: Mutant, root: Path = ROOT) -> str:
    """Return why a mutant cannot be tried; "" if it can."""
    path = root / mutant.file
    if not path.is_file():
        return "there is no such file"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutant.before)) != 1 or mutant.before == mutant.after:
        return f"{mutant.before!r} is in the file {count} times, it must be there once and change"
    try:
        ast.parse(
            source.replace(mutant.before, mutant.after) if path.suffix == ".py" else ""
        )
    except SyntaxError:
        return f"{mutant.after!r} makes no Python of it"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        path = root / "tests" / file
        parts = re.sub(r"\[.*", "", name).split("::") if name else []
        text = path.read_text(encoding="utf-8") if path.is_file() else None
        if text is None or not all(
            re.search(rf"^ *(def|class) {part}\b", text, re.M) for part in parts
        ):
            return f"there is no test {test}"
    return "" if mutant.tests else "no test is named"


def run(
    tests: Sequence[str],
    mutant: Mutant | None = None,
    root: Path = ROOT,
    options: Sequence[str] = ("-x",),
) -> tuple[int, str]:
    """Run tests in a copy of the checkout, with a mutant or without; return pytest's status and output."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if mutant is not None:
            path = copy / mutant.file
            text = path.read_text(encoding="utf-8").replace(mutant.before, mutant.after)
            path.write_text(text, encoding="utf-8")

        output = Path(folder) / "output"
        arguments = [*options, *(f"tests/{test}" for test in tests)]
        process = FORKS.Process(target=_run_pytest, args=(copy, arguments, output))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, f"no end after {SECONDS} s"
        return process.exitcode, output.read_text(encoding="utf-8", errors="replace")


def _run_pytest(copy: Path, arguments: Sequence[str], output: Path) -> None:
    """Run pytest on a copy of the checkout, then exit with its status; this process is a fork."""
    os.setpgrp()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)

    # nothing of the checkout itself may be imported instead of the copy
    for name in list(sys.modules):
        if name.partition(".")[0] in OWN_PACKAGES:
            del sys.modules[name]
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.update(
        PYTHONPATH=str(copy),
        OMP_NUM_THREADS="1",
        DGLBACKEND="pytorch",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # seconds a start, and no test here needs one
    )
    common = ("-q", "--tb=short", "-p", "no:cacheprovider")
    sys.exit(int(pytest.main([*common, *arguments])))


def try_mutant(mutant: Mutant, root: Path = ROOT) -> str:
    """Try a mutant; return "killed by" and the failing tests, or another outcome."""
    if reason := find_problem(mutant, root):
        return f"STALE: {reason}"
    status, output = run(mutant.tests, mutant, root)
    failed_tests = re.findall(r"^FAILED tests/(\S+)", output, re.M)
    if status == RED and failed_tests:  # without any, the tests ended in their setup
        return f"killed by {', '.join(failed_tests)}"
    if mutant.is_generated and status != GREEN:
        return "killed, its tests do not run"
    return (
        "SURVIVED"
        if status == GREEN
        else f"NOT TRIED, its tests did not run:\n{output[-2000:]}"
    )


def try_all(mutants: Sequence[Mutant], jobs: int, root: Path = ROOT) -> bool:
    """Try all mutants and print their outcomes; return whether all were killed by tests that pass otherwise."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with ThreadPoolExecutor(jobs) as pool:
        unmutated = pool.submit(run, tests, None, root)
        killed = []
        for mutant, verdict in zip(
            mutants, pool.map(lambda m: try_mutant(m, root), mutants), strict=True
        ):
            killed.append(verdict.startswith("killed"))
            print(
                f"{mutant}: {verdict}"
                + (f"\n{mutant.difference()}" if verdict == "SURVIVED" else ""),
                flush=True,
            )
        status, verdict = unmutated.result()
    if status != GREEN:
        print(f"the tests are not green without a mutant either:\n{verdict[-2000:]}")
    return status == GREEN and all(killed)


def main() -> None:
    """Run the mutants from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "-j", "--jobs", type=int, default=cores, help="mutants at a time"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="those whose file or description holds a word",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="PATH",
        help="those that name a test at or below a path in tests",
    )
    parser.add_argument(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="made from lines that it has not",
    )
    parser.add_argument(
        "--all-red",
        action="store_true",
        help="map of all tests that turn red, in build/mutant_map; goes on where it stopped",
    )
    parser.add_argument("--most", type=int, default=40, help="made ones at most (40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw among more")
    options = parser.parse_args()
    try:
        mutants = make_mutants(options.changed) if options.changed else read_mutants()
    except ValueError as error:
        sys.exit(str(error))
    selected = mutants
    if options.only:
        selected = [m for m in mutants if any(word in str(m) for word in options.only)]
    if options.tests:
        paths = tuple(path.removeprefix("tests/") for path in options.tests)
        selected = [m for m in selected if any(t.startswith(paths) for t in m.tests)]
    if not selected and options.changed:
        sys.exit(f"nothing to change in the lines that {options.changed} does not have")
    if not selected:
        sys.exit(
            f"no mutant has {' or '.join(options.only or options.tests)} in its file, description or tests"
        )
    if options.changed and options.most < len(selected):
        print(
            f"{options.most} of {len(selected)}, drawn with seed {options.seed}",
            flush=True,
        )
        selected = random.Random(options.seed).sample(selected, options.most)
    if options.all_red:
        from bench.mutant_map import make_map, summarize_map, tree_name

        folder = ROOT / "build" / "mutant_map" / tree_name()
        print(summarize_map(make_map(selected, folder, options.jobs)))
        return
    began = time.monotonic()
    all_killed = try_all(selected, options.jobs)
    outcome = "all killed" if all_killed else "NOT ALL KILLED"
    print(f"{len(selected)} mutants in {time.monotonic() - began:.0f} s: {outcome}")
    sys.exit(not all_killed)


if __name__ == "__main__":
    main()
