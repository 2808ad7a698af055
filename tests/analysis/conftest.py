"""Fixtures of the tests of analyses."""

from functools import cache

import pytest

from cpt_lab.analysis import run_groups
from cpt_lab.experiments.grids import grid_specs


@cache
def _keys_of_two_grids():
    specs = grid_specs("h3/facebook") + grid_specs("execution/mlp6")
    return frozenset(spec.key for spec in specs)


@pytest.fixture
def few_preregistered(monkeypatch):
    """Take the runs of two grids for all preregistered ones, which take seconds to list."""
    monkeypatch.setattr(run_groups, "preregistered", _keys_of_two_grids)
