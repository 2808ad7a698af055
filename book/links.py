"""Check of every link of the built pages: internal targets must exist, external ones must be addresses."""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("use", "href"),
}


class Page(HTMLParser):
    """Anchors and links of a page.

    Attributes:
        ids: the anchors.
        links: (tag, attribute, address) of every link and loaded resource.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the anchors and links of a tag."""
        for key, value in attrs:
            if key == "id" or (tag == "a" and key == "name"):
                self.ids.add(value or "")
            elif key in ("href", "src") and value:
                self.links.append((tag, key, value))


def problems(site: Path) -> list[str]:
    """Return a line for every broken link, and for every resource that a page loads from the network."""

    @cache
    def page(path: Path) -> Page:
        return Page(path.read_text(encoding="utf-8"))

    faults = []
    site = site.resolve()
    for path in sorted(site.rglob("*.html")):
        for tag, key, address in page(path).links:
            if fault := _problem(path, site, tag, key, address, page):
                faults.append(f"{path.relative_to(site)}: {address}: {fault}")
    return list(dict.fromkeys(faults))


def _problem(path: Path, site: Path, tag: str, key: str, address: str, page) -> str:  # type: ignore[no-untyped-def]
    parts = urlsplit(address)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        if (tag, key) in LOADED:
            return "is loaded from the network"
        is_complete = parts.scheme == "mailto" or (
            parts.scheme in ("http", "https") and "." in parts.netloc
        )
        return "" if is_complete and " " not in address else "is no address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(site):
        return "leads out of the site"
    if not target.is_file():
        return "is not there"
    if (
        parts.fragment
        and target.suffix == ".html"
        and unquote(parts.fragment) not in page(target).ids
    ):
        return "has no such anchor"
    return ""


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    print("\n".join(wrong) or "every link leads somewhere")
    sys.exit(bool(wrong))
