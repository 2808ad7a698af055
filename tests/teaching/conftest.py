"""Fixtures of the tests of lessons."""

from collections.abc import Iterator
from functools import cache

import pytest

from cpt_lab.analysis import run_table
from cpt_lab.paths import results_dir
from cpt_lab.sweeps.stores import load_rows

load_rows_cached = cache(load_rows)


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """Read committed rows once per session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_table,
            "load_rows",
            lambda file: (
                load_rows_cached if file.parent == results_dir() else load_rows
            )(file),
        )
        yield
