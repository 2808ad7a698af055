"""Check of the library on several Pythons and releases of torch, each in a temporary environment.

    python -m bench.compat
    python -m bench.compat --python 3.11 --torch 2.13.0 --backend default --find-links FOLDER

Needs uv, which also fetches a Python that the machine lacks. CPU builds of torch come from PyTorch's own index
(``--backend cpu``); ``--backend default`` takes what the package index has, on Linux CUDA builds of several GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHECK = Path(__file__).with_name("compat_check.py")


class Combination(NamedTuple):
    """Result for one combination of Python and torch.

    Attributes:
        python: requested version of Python.
        torch: requested version of torch, or "newest".
        installed: installed version of torch, "-" without one.
        outcome: "passed: ...", "FAILED: ..." or "skipped: ...".
    """

    python: str
    torch: str
    installed: str
    outcome: str


def _uv() -> str:
    path = shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if path is None:
        raise SystemExit("compat needs uv: pip install uv")
    return path


def _environment() -> dict[str, str]:
    """Return this environment without the checkout, and with every Python of pyenv on PATH."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "CPT_", "VIRTUAL_"))
    }
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return {
        **inherited,
        "PATH": os.pathsep.join(
            [*map(str, pyenv.glob("versions/*/bin")), os.environ["PATH"]]
        ),
    }


def _call(*words: str | Path, cwd: Path) -> tuple[bool, str]:
    process = subprocess.run(
        words, cwd=cwd, env=_environment(), capture_output=True, text=True
    )
    return process.returncode == 0, (process.stdout + process.stderr).strip()


def _reason(output: str) -> str:
    """Return the last line of an output that has text."""
    return next(
        (line.strip(" ╰─▶│") for line in reversed(output.splitlines()) if line.strip()),
        "no message",
    )[:140]


def build(uv: str, folder: Path) -> Path:
    """Build the wheel from the source distribution, which leaves stale files out."""
    is_built, output = _call(
        uv,
        "build",
        "-q",
        "--no-build-isolation",
        "-p",
        sys.executable,
        "-o",
        folder,
        ROOT,
        cwd=folder,
    )
    if not is_built:
        raise SystemExit(f"compat could not build the wheel:\n{output}")
    return next(folder.glob("*.whl"))


def check_combination(
    uv: str, wheel: Path, python: str, torch: str, backend: str, links: list[str]
) -> Combination:
    """Install the wheel for one combination of Python and torch, and run the check there."""
    with tempfile.TemporaryDirectory(prefix="cpt-compat-") as name:
        folder = Path(name)
        venv = folder / "venv"
        is_made, output = _call(uv, "venv", "-q", "-p", python, venv, cwd=folder)
        if not is_made:
            outcome = f"skipped: no Python {python} here ({_reason(output)})"
            return Combination(python, torch, "-", outcome)

        requirement = "torch" if torch == "newest" else f"torch=={torch}"
        source = ["--torch-backend", "cpu"] if backend == "cpu" else []
        for link in links:
            source += ["--find-links", link]
        # The extra "lab" has the command line, which trains a model of digits.
        install = [uv, "pip", "install", "-q", "-p", str(venv), *source]
        is_installed, output = _call(*install, f"{wheel}[lab]", requirement, cwd=folder)
        if not is_installed:
            # The wheel is to blame if torch alone can be installed.
            alone = [*install, "--dry-run", requirement]
            has_torch, torch_output = _call(*alone, cwd=folder)
            outcome = f"FAILED: the wheel cannot be installed ({_reason(output)})"
            if not has_torch:
                reason = _reason(torch_output)
                outcome = f"skipped: {requirement} cannot be installed ({reason})"
            return Combination(python, torch, "-", outcome)

        has_passed, output = _call(venv / "bin" / "python", CHECK, cwd=folder)
        lines = output.splitlines()
        versions = lines[0].split() if lines else []
        installed = (
            versions[versions.index("torch") + 1] if "torch" in versions else "-"
        )
        if has_passed:
            count = sum(line.startswith("ok ") for line in lines)
            return Combination(python, torch, installed, f"passed: {count} parts")
        failures = [line for line in lines if not line.startswith("ok ")][1:]
        outcome = f"FAILED: {'; '.join(failures or [_reason(output)])}"
        return Combination(python, torch, installed, outcome)


def main() -> int:
    """Check all combinations, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=["3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=["2.6.0", "newest"])
    parser.add_argument("--backend", choices=["cpu", "default"], default="cpu")
    parser.add_argument("--find-links", nargs="*", default=[], help="folders of wheels")
    options = parser.parse_args()

    uv, outcomes = _uv(), []
    with tempfile.TemporaryDirectory(prefix="cpt-wheel-") as folder:
        wheel = build(uv, Path(folder))
        for python in options.python:
            for torch in options.torch:
                combination = check_combination(
                    uv, wheel, python, torch, options.backend, options.find_links
                )
                print("{:<7} torch {:<8} {:<14} {}".format(*combination), flush=True)
                outcomes.append(combination.outcome)

    return summarise(outcomes)


def summarise(outcomes: Sequence[str]) -> int:
    """Print the number of outcomes; return 1 if a combination failed, or none passed."""
    failed = sum(outcome.startswith("FAILED") for outcome in outcomes)
    passed = sum(outcome.startswith("passed") for outcome in outcomes)
    skipped = len(outcomes) - passed - failed
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or not passed)


if __name__ == "__main__":
    raise SystemExit(main())
