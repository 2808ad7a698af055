"""Small sweep that was never disturbed: rows, curves and checkpoints of other sweeps are compared with it."""

from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import quietly, specs_of

from bench.kill_sweep import row_numbers
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.sweep import run_grid


class CalmSweep(NamedTuple):
    """Three runs that were trained one after the other in this process, at a clean commit."""

    specs: list[RunSpec]
    store: Path
    rows: list[ResultRow]
    numbers: dict[str, tuple[str, str]]  # of rows and curves, by key


@pytest.fixture(scope="session")
def calm(tmp_path_factory):
    """Return an undisturbed sweep of the arms CR, LR and ER."""
    specs = quietly(specs_of, "CR", "LR", "ER")
    store = tmp_path_factory.mktemp("calm") / "rows.jsonl"
    clean = {"commit": "1" * 40, "dirty": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpt_lab.provenance.commit", lambda: clean)
        rows = quietly(run_grid, specs, store, workers=0)
    assert [row["status"] for row in rows] == ["ok"] * 3
    return CalmSweep(specs, store, rows, row_numbers(store))
