"""Data sets: ``images``, ``detection``, ``graphs``, ``text``, ``entailment``, each with the layouts it reads.

Downloads happen when asked for. Data is looked up in ``CPT_DATA_DIR``, then in ``data/cache``.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError

from cpt_core.checks import library, offer
from cpt_lab.experiments.recipes import EXPERIMENTS

# what can be downloaded, among it pretrained models -> its task
DOWNLOADS: dict[str, str] = {
    name: task
    for task, e in EXPERIMENTS.items()
    for name in (*(d.name for d in e.named.values() if not d.embedded), *e.weights)
}

CLIENTS = ("httpcore", "httpx", "requests", "urllib3")  # their errors have no class in common

_asked: list[str] = []  # addresses, the newest last


def download(dataset: str, language: str = "de") -> Path:
    """Download a data set, with progress, and return where it is.

    What is got is compared with a published checksum where there is one: CIFAR, Pascal VOC, Penn Treebank, ImageNet's
    archives and the weights of ResNet-18. OGB publishes none, see ``ogb.download``; the Hugging Face hub's client
    compares sizes.

    Args:
        dataset: one of ``DOWNLOADS``, among them pretrained models.
        language: of XNLI's text.

    Raises:
        ValueError: for a data set that cannot be downloaded.
        ImportError: without the libraries of its task: names the extra.
        ConnectionError: without a network: names the data set and the address that did not answer.
    """
    if dataset not in DOWNLOADS:
        raise ValueError(f"{dataset!r} cannot be downloaded; {offer(dataset, list(DOWNLOADS))}")
    experiment = EXPERIMENTS[DOWNLOADS[dataset]]
    get = library(experiment.download, experiment.extra)
    with _from_the_network(dataset):
        return get(dataset, language)


@contextmanager
def _from_the_network(what: str) -> Iterator[None]:
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
