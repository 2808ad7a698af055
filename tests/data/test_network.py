"""Downloads without a network: errors that name the data set and the cause."""

import socket
import urllib.request

import pytest
from helpers import refused

from cpt_lab import data
from cpt_lab.data.files import DataNotFoundError

NOWHERE = "http://127.0.0.1:9/x.zip"  # the discard port: nobody listens


def fetch():
    urllib.request.urlopen(NOWHERE, timeout=5)


def fetch_otherwise():
    try:
        socket.create_connection(("localhost", 9), timeout=5)
    except OSError as error:
        raise ValueError("please check your internet connection") from error


def fetch_and_fill_the_disk():
    refused("refused", fetch, error=OSError)
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("get", "error", "message"),
    [
        (
            fetch,
            ConnectionError,
            r"^ptb was not downloaded: .*refused.*; a download needs a network$",
        ),
        (
            fetch_otherwise,
            ConnectionError,
            r"^ptb was not downloaded: .*refused.*; a download needs a network$",
        ),
        (fetch_and_fill_the_disk, OSError, r"^\[Errno 28\] No space left on device$"),
    ],
)
def test_download_without_network_names_dataset(get, error, message, monkeypatch):
    monkeypatch.setattr(
        data, "import_optional", lambda name, extra: lambda dataset, language: get()
    )
    for _ in range(2):
        refused(message, data.download, "ptb", error=error)


def test_download_names_missing_archives(data_folder):
    with pytest.raises(
        DataNotFoundError,
        match=r"devkit.* is not present .* See data/cards/imagenet\.md$",
    ):
        data.download("imagenet")
