"""Data sets of the tasks: images, detection, graphs, text and sentence pairs, each with the file layouts it reads.

``download`` fetches a data set; loading never downloads. Data is looked up in ``CPT_DATA_DIR``, then in ``data/cache``.
Every loaded data set carries a ``report.DataReport`` of what was read, left out and changed.
"""

import socket
from http.client import HTTPException
from pathlib import Path
from urllib.error import URLError

from cpt_core.validation import suggest_names
from cpt_extras.optional_libraries import import_optional
from cpt_lab.experiments.registry import EXPERIMENTS

# Errors from which the errors of all network clients derive or are raised.
NETWORK_ERRORS = (
    URLError,
    ConnectionError,
    TimeoutError,
    socket.gaierror,
    HTTPException,
)


def _list_downloads() -> dict[str, str]:
    """Return the task of every data set and pretrained model that can be downloaded."""
    tasks = {}
    for task, experiment in EXPERIMENTS.items():
        for dataset in experiment.named_datasets.values():
            if not dataset.embedded:
                tasks[dataset.name] = task
        tasks |= dict.fromkeys(experiment.weights, task)
    return tasks


DOWNLOADS = _list_downloads()


def download(dataset: str, language: str = "de") -> Path:
    """Download a data set, with progress, and return where it is.

    Downloads are compared with a published checksum where there is one: CIFAR, Pascal VOC, Penn Treebank, ImageNet's
    archives and the weights of ResNet-18. OGB publishes none (the first download's is kept beside the data); the
    Hugging Face hub's client compares sizes.

    Args:
        dataset: a key of ``DOWNLOADS``: a data set or a pretrained model.
        language: language of "xnli" to download; other data sets ignore it.

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
    download_dataset = import_optional(experiment.download, experiment.extra)
    try:
        return download_dataset(dataset, language)
    except Exception as error:
        causes: list[BaseException] = [error]
        while cause := causes[-1].__cause__ or causes[-1].__context__:
            causes.append(cause)
        failures = [e for e in causes if isinstance(e, NETWORK_ERRORS)]
        if not failures:
            raise
        raise ConnectionError(
            f"{dataset} was not downloaded: {failures[-1]}; a download needs a network"
        ) from error
