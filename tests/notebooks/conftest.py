"""What the tests of notebooks share."""

from pathlib import Path

import pytest
from notebook_dataflow import NOTEBOOKS


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    """Every notebook."""
    return request.param
