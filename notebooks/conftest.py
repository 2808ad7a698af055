"""For nbval: kernels listen on sockets of the file system, for two that start at once can take each other's ports."""

import atexit
import tempfile
from typing import Any

import nbval.kernel
import pytest
from jupyter_client.manager import KernelManager


def pytest_configure(config: pytest.Config) -> None:
    """Let nbval start its kernels in this way."""
    folder = tempfile.TemporaryDirectory(prefix="cpt-")  # a short path: the system allows some 100 characters
    atexit.register(folder.cleanup)  # a worker of xdist leaves its configuration as it is

    def on_sockets(**how: Any) -> KernelManager:
        return KernelManager(transport="ipc", ip=f"{folder.name}/kernel", **how)

    nbval.kernel.KernelManager = on_sockets
