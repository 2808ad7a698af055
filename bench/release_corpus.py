"""Files that a release writes, recorded for the compatibility tests: ``python -m bench.release_corpus RELEASE``.

    git worktree add /tmp/release COMMIT
    python -m bench.release_corpus 0.4.0 --checkout /tmp/release

writes ``tests/compatibility/0.4.0/``: rows of three tiny runs, the checkpoint of an interrupted one, the states of a
training loop, an exported program and a model that was pickled whole, about 55 kB. ``--name`` is another name of the
folder, for a commit between two releases. Then give the release a line in ``tests/compatibility/test_releases.py`` and
in docs/sweeps.md. Without ``--checkout`` it is this tree. Float32 products are those of torch, on one thread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "compatibility"
SCRIPT = Path(__file__).with_name("release_items.py")


def record(release: str, name: str, checkout: Path) -> Path:
    """Record a release in a new folder, and return the folder.

    Raises:
        subprocess.CalledProcessError: if the release fails; its former folder then stays.
    """
    fresh = CORPUS / f"{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    settings = {
        "PYTHONPATH": str(checkout),
        "CPT_PRODUCTS": "torch",
        "OMP_NUM_THREADS": "1",
        "DGLBACKEND": "pytorch",
    }
    command = [sys.executable, str(SCRIPT), release, str(fresh)]
    subprocess.run(command, cwd=checkout, env={**os.environ, **settings}, check=True)
    folder = CORPUS / name
    shutil.rmtree(folder, ignore_errors=True)
    return fresh.rename(folder)


def main() -> int:
    """Record a release."""
    parser = argparse.ArgumentParser(description="Record what a release writes.")
    parser.add_argument("release", help="version that its rows name, such as 0.3.0")
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="tree of the release"
    )
    parser.add_argument("--name", help="of the folder; the release by default")
    options = parser.parse_args()
    print(
        record(
            options.release, options.name or options.release, options.checkout.resolve()
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
