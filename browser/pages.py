"""Checks of every page: no console errors, no network requests, no violations of axe's accessibility rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Request

BAD = ("serious", "critical")


class PageLog:
    """Log of a page's console errors, and of its requests that fail or leave the machine.

    Args:
        allowed: prefixes of messages that are not logged.
        offline: whether requests to this machine are logged, too.

    Attributes:
        messages: one line per problem.
    """

    def __init__(self, allowed: Iterable[str] = (), offline: bool = False) -> None:
        self.allowed, self.offline, self.messages = tuple(allowed), offline, list[str]()

    def listen(self, page: Page) -> None:
        """Log the problems of a page from now on."""
        page.on(
            "console",
            lambda m: self.note(f"console: {m.text}") if m.type == "error" else None,
        )
        page.on("pageerror", lambda error: self.note(f"error: {error}"))
        page.on(
            "requestfailed", lambda r: self.note(f"failed: {r.url[:200]} {r.failure}")
        )
        page.on(
            "response",
            lambda r: (
                self.note(f"status {r.status}: {r.url}") if r.status >= 400 else None
            ),
        )
        page.on("request", self.note_request)

    def note_request(self, request: Request) -> None:
        """Log a request that leaves the machine."""
        local = request.url.startswith(("data:", "blob:", "file:"))
        if not local and (
            self.offline
            or not request.url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:"))
        ):
            self.note(f"request: {request.url}")

    def note(self, line: str) -> None:
        """Log a line unless it is allowed."""
        if not line.startswith(self.allowed):
            self.messages.append(line)


def assert_accessible(
    page: Page, context: Mapping[str, Any] | None = None, without: Iterable[str] = ()
) -> None:
    """Assert that axe finds nothing serious or critical.

    Args:
        page: it, as it is shown now.
        context: which parts; all of it when left out.
        without: rules that do not count here.
    """
    # preload would fetch the style sheets again, which a browser refuses for files
    options = {
        "resultTypes": ["violations"],
        "preload": False,
        "rules": {rule: {"enabled": False} for rule in without},
    }
    violations = Axe().run(page, context, options).response["violations"]
    messages = [
        f"{finding['id']} ({finding['impact']}): {node['html'][:200]}: {node['failureSummary']}"
        for finding in violations
        if finding["impact"] in BAD
        for node in finding["nodes"][:5]
    ]
    assert not messages, "\n".join(messages)
