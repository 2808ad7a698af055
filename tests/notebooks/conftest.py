"""Fixtures for tests of the notebooks."""

from pathlib import Path

import pytest
from notebook_files import NOTEBOOKS


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    """Return the path of every notebook in turn."""
    return request.param
