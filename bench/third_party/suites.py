"""Tests of transformers, run on converted models where their source distribution is there.

A wheel of transformers has no tests. Unpack its source distribution into ``build/third-party``, or name the folder in
CPT_TRANSFORMERS_TESTS; both need the package ``parameterized``:

    pip download --no-deps --no-binary :all: transformers==VERSION -d build/third-party
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cpt_lab.paths import ROOT

CASES = Path(__file__).with_name("transformers_cases.py")
PRECISIONS = ("plain", "float", "8")
SECONDS = 900  # of one precision
# Tests that ask for what a converted model is not, with the reason.
KNOWN_FAILURES = {
    "test_batching_equivalence": "a model that has not been trained rounds on the batch at hand",
    "test_eager_matches_sdpa_inference": "the last digits of two kernels can flip a rounding; its inputs have no seed",
}


def run() -> tuple[dict[str, Any], list[str]]:
    """Return the counts of every precision, and the tests that fail on converted models alone."""
    folder, reason = find_tests()
    if folder is None:
        print(f"suites: skipped, {reason}", flush=True)
        return {"skipped": reason}, []
    with ThreadPoolExecutor(len(PRECISIONS)) as pool:
        outcomes = list(
            pool.map(lambda precision: run_precision(folder, precision), PRECISIONS)
        )
    results = dict(zip(PRECISIONS, outcomes, strict=True))
    plain = results["plain"]
    passing = {test for test, outcome in plain.items() if outcome == "PASSED"}
    summary: dict[str, Any] = {
        "suite": f"transformers {version('transformers')}",
        "counts": {},
        "failures": {},
    }
    unexpected = (
        [] if passing else ["suites: no test of transformers passes with plain models"]
    )
    for precision, outcome in results.items():
        failed = sorted(test for test in passing if outcome.get(test) != "PASSED")
        summary["counts"][precision] = {
            "passed": len(passing) - len(failed),
            "failed": len(failed),
        }
        summary["failures"][precision] = failed
        unexpected += [
            f"suites at {precision}: {test}"
            for test in failed
            if not is_known(test, precision, outcome.get(test, ""))
        ]
    return summary, unexpected


def is_known(test: str, precision: str, outcome: str) -> bool:
    """Return whether a test is known to fail at low bits; an error, or no outcome, is no known failure."""
    is_listed = any(name in test for name in KNOWN_FAILURES)
    return precision != "float" and outcome == "FAILED" and is_listed


def find_tests() -> tuple[Path | None, str]:
    """Return the folder of the source distribution, or None and why it cannot be used."""
    for package in ("transformers", "parameterized"):
        if importlib.util.find_spec(package) is None:
            return None, f"{package} is not installed"
    name = f"transformers-{version('transformers')}"
    folder = Path(
        os.environ.get("CPT_TRANSFORMERS_TESTS")
        or ROOT / "build" / "third-party" / name
    )
    if not (folder / "tests" / "test_modeling_common.py").exists():
        return None, f"there are no tests in {folder}, see bench/third_party/suites.py"
    return folder, ""


def run_precision(folder: Path, precision: str) -> dict[str, str]:
    """Return test -> outcome of the suite at one precision."""
    paths = [
        str(folder),
        str(ROOT),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    environment = {
        **os.environ,
        "CPT_SUITE_BITS": precision,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = [
        "-rA",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-W",
        "ignore",
    ]
    command = [sys.executable, "-m", "pytest", *options, "--tb=no", str(CASES)]
    process = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    lines = re.findall(
        r"^(PASSED|FAILED|ERROR) \S*?::(\S+)", process.stdout, re.MULTILINE
    )
    return {test: outcome for outcome, test in lines}
