"""Build of the site, ``python -m book``: pages, then Sphinx with warnings as errors; ``make book`` calls it."""

import shutil
import sys

from sphinx.cmd.build import main as sphinx

from book import pages

BUILD = pages.ROOT / "build"


def main() -> int:
    """Build the site; return 0 if there is no warning."""
    for name in (
        "book",
        "book.pages",
        "book.doctrees",
    ):  # nothing stale: Sphinx does not see what changed in conf.py
        shutil.rmtree(BUILD / name, ignore_errors=True)
    pages.write(BUILD / "book.pages")
    options = [
        "-q",
        "-W",
        "--keep-going",
        "-c",
        pages.ROOT / "book",
        "-d",
        BUILD / "book.doctrees",
    ]
    return sphinx(
        [str(word) for word in (*options, BUILD / "book.pages", BUILD / "book")]
    )


if __name__ == "__main__":
    sys.exit(main())
