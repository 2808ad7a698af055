"""Downloads without a network: errors that name the data set and the cause."""

import socket
import urllib.request

import pytest
from helpers import refused

from cpt_lab import data
from cpt_lab.data.files import DataNotFoundError


def open_address():
    urllib.request.urlopen("http://127.0.0.1:9/x.zip", timeout=5)  # nobody listens


def hide_cause():
    try:
        socket.create_connection(("localhost", 9), timeout=5)
    except OSError as error:
        raise ValueError("please check your internet connection") from error


def fill_disk():
    refused("refused", open_address, error=OSError)
    raise OSError(28, "No space left on device")


NO_NETWORK = r"^ptb was not downloaded: .*refused.*; a download needs a network$"


@pytest.mark.parametrize(
    ("get", "error", "message"),
    [
        (open_address, ConnectionError, NO_NETWORK),
        (hide_cause, ConnectionError, NO_NETWORK),
        (fill_disk, OSError, r"^\[Errno 28\] No space left on device$"),
    ],
)
def test_download_without_network_names_dataset(get, error, message, monkeypatch):
    def downloader(dataset, language):
        get()

    monkeypatch.setattr(data, "import_optional", lambda name, extra: downloader)
    for _ in range(2):
        refused(message, data.download, "ptb", error=error)


def test_download_names_missing_archives(data_folder):
    message = r"devkit.* is not present .* See data/cards/imagenet\.md$"
    refused(message, data.download, "imagenet", error=DataNotFoundError)
