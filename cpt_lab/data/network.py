"""What to say when a download fails for want of a network: which data set, and which address."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from typing import Any
from urllib.error import URLError

CLIENTS = ("httpcore", "httpx", "requests", "urllib3")  # their errors have no class in common

_asked: list[str] = []  # addresses, the newest last


@contextmanager
def from_the_network(what: str) -> Iterator[None]:
    """Turn an error of the network within a ``with`` block into one that says what failed; others pass as they are.

    Raises:
        ConnectionError: with ``what`` and the address that was asked for last.
    """
    _listen()
    _asked.clear()
    try:
        yield
    except Exception as error:
        failures = [e for e in _causes(error) if _of_the_network(e)]
        if not failures or not _asked:
            raise
        where = f"{what} was not downloaded from {_asked[-1]}"
        raise ConnectionError(f"{where}: {failures[-1]}; a download needs a network") from error


@cache
def _listen() -> None:
    """Have every address noted that Python is asked for, whichever library does so. Hooks stay, so there is but one."""

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event == "urllib.Request":
            _asked.append(given[0])
        elif event == "socket.getaddrinfo" and not (_asked and str(given[0]) in _asked[-1]):
            _asked.append(str(given[0]))

    sys.addaudithook(note)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from, down to the bottom."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_the_network(error: BaseException) -> bool:
    known = (URLError, ConnectionError, TimeoutError, socket.gaierror, HTTPException)
    return isinstance(error, known) or type(error).__module__.partition(".")[0] in CLIENTS
