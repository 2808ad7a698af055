"""Lines of code of every package, of the tests, and of the modules that the README's three lines load.

    python -m bench.sizes

Every line of a file counts, empty ones and comments too. The README's three lines are run in a fresh process, with a
step of training, because the library imports some modules only when a model needs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "cpt_core",
    "cpt_extras",
    "cpt_lab",
    "cpt_lessons",
    "tests",
    "bench",
    "book",
    "browser",
)
SUFFIXES = (".py", ".cpp", ".h")

THREE_LINES = """
import sys, torch, cpt_core as cpt
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 9))
schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64)
cpt.quantize_(model)
precision = cpt.PrecisionScheduler(model, schedule)
model(torch.randn(2, 3, 8, 8)).sum().backward()
precision.step()
files = [m.__file__ for name, m in sys.modules.items() if name.startswith("cpt_")]
print("\\n".join(files))
"""


def count_lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def source_files(folder: str) -> list[Path]:
    """Return the Python and C++ files of a folder of the repository."""
    return sorted(
        path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES
    )


def loaded_files() -> list[Path]:
    """Return the files of the package that the README's three lines and a step load.

    Raises:
        subprocess.CalledProcessError: when the three lines fail.
    """
    command = [sys.executable, "-c", THREE_LINES]
    files = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split("\n")
    return [Path(file) for file in files if file]


def main() -> int:
    """Print a line per folder, and the lines that the README's three lines load."""
    for folder in FOLDERS:
        print(f"{folder:<24}{count_lines(source_files(folder)):>8,}")
    print(f"{'loaded by three lines':<24}{count_lines(loaded_files()):>8,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
