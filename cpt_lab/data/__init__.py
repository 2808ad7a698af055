"""Data sets: ``images``, ``detection``, ``graphs``, ``text``, ``entailment``, each with the layouts it reads.

Downloads happen when asked for. Data is looked up in ``CPT_DATA_DIR``, then in ``data/cache``.
"""

import socket
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

from cpt_core.validation import suggest_names
from cpt_extras.optional_libraries import import_optional
from cpt_lab.experiments.registry import EXPERIMENTS

# what can be downloaded, among it pretrained models -> its task
DOWNLOADS: dict[str, str] = {
    name: task
    for task, e in EXPERIMENTS.items()
    for name in (*(d.name for d in e.named.values() if not d.embedded), *e.weights)
}

# beneath the errors of every client of the network
NETWORK = (URLError, ConnectionError, TimeoutError, socket.gaierror, HTTPException)


def download(dataset: str, language: str = "de") -> Path:
    """Download a data set, with progress, and return where it is.

    What is got is compared with a published checksum where there is one: CIFAR, Pascal VOC, Penn Treebank, ImageNet's
    archives and the weights of ResNet-18. OGB publishes none, see ``ogb.download``; the Hugging Face hub's client
    compares sizes.

    Args:
        dataset: one of ``DOWNLOADS``, among them pretrained models.

    Raises:
        ValueError: for a data set that cannot be downloaded.
        ImportError: without the libraries of its task: names the extra.
        ConnectionError: without a network: names the data set, and what went wrong.
    """
    if dataset not in DOWNLOADS:
        raise ValueError(
            f"{dataset!r} cannot be downloaded; {suggest_names(dataset, list(DOWNLOADS))}"
        )
    experiment = EXPERIMENTS[DOWNLOADS[dataset]]
    get = import_optional(experiment.download, experiment.extra)
    try:
        return get(dataset, language)
    except Exception as error:
        chain: list[BaseException] = [error]  # what it came from, down to the bottom
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        failures = [e for e in chain if isinstance(e, NETWORK)]
        if not failures:
            raise
        raise ConnectionError(
            f"{dataset} was not downloaded: {failures[-1]}; a download needs a network"
        ) from error
