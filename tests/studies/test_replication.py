"""Replication of effects with fresh seeds, on synthetic rows with a known answer."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from helpers import write_rows

from bench import fresh_seeds
from cpt_lab.analysis import preregistered
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.paths import results_dir
from cpt_lab.sweeps.stores import load_rows
from tests.studies.study_rows import noise_of, row_at
from tests.studies.test_outcomes import deficit_loss

pytestmark = pytest.mark.slow

GRID = "h3/facebook"


@cache
def cached_rows(date, fresh, noise):
    rows = []
    for spec in grid_specs(GRID):
        quality = deficit_loss(spec, date=date) + noise * noise_of(spec)
        offset = preregistered.SEED_OFFSET if fresh else 0
        rows.append(row_at(replace(spec, seed=spec.seed + offset), quality))
    return rows


def rows_of(date, fresh=True, noise=0.11):
    """Return rows of H3 in which a later deficit costs ``date`` points more, with fresh or original seeds."""
    return copy.deepcopy(cached_rows(date, fresh, noise))


@pytest.fixture
def store(monkeypatch):
    """Return a function that replaces the committed rows by those of an effect."""

    def write(date):
        runs = table(rows_of(date, fresh=False, noise=0.1))
        monkeypatch.setattr(preregistered, "committed", lambda: runs)

    return write


@pytest.mark.parametrize(
    ("former", "date", "noise", "word"),
    [
        (1, 1, 0.11, "repeats"),
        (1, -1, 0.11, "DIFFERS"),
        (1, 1, 30, "cannot be told"),
        (0, 0, 0.11, "no effect, again"),
    ],
)
def test_replicated_effects_word(former, date, noise, word, store):
    store(former)
    (found,) = preregistered.replicated_effects(GRID, rows_of(date, noise=noise))
    assert found.outcome == word
    assert f"equal learning rate: {word}: " in str(found)
    assert str(found).endswith("points, n = 10 and 10")


def test_replication_seeds_are_unused():
    fresh, own = preregistered.fresh_seed_specs(GRID), grid_specs(GRID)
    assert not {s.key for s in fresh} & {s.key for s in own}
    assert [(s.arm, s.seed - 1000) for s in fresh] == [(s.arm, s.seed) for s in own]
    with pytest.raises(ValueError, match="unknown grid 'digits'"):
        preregistered.fresh_seed_specs("digits")


@pytest.mark.parametrize(
    ("date", "status", "code", "words"),
    [
        (1, "ok", 0, "repeats"),
        (-1, "ok", 1, "DIFFERS"),
        (
            1,
            "failed",
            2,
            "1 of 300 runs failed, so the result is undecided; "
            "the same command tries them again",
        ),
    ],
)
def test_verify_verdict_exits_by_outcome(
    date, status, code, words, store, monkeypatch, command
):
    """Run fresh seeds; exit with 1 if an effect is not replicated and with 2 if runs failed."""
    found, asked = rows_of(date), []
    found[0]["status"] = status
    store(1)

    def run_grid(specs, store, retry_failed):
        asked.extend(specs)
        return found

    monkeypatch.setattr("cpt_lab.sweeps.sweep.run_grid", run_grid)
    found_code, said, errors = command("verify", "--verdict", GRID)
    assert (found_code, asked) == (code, preregistered.fresh_seed_specs(GRID))
    assert said.startswith("h3/facebook with fresh seeds: 300 runs, rows in ")
    assert words in said + errors


def test_verify_verdict_rejects_different_data(monkeypatch, command):
    specs, asked = grid_specs("h5/digits"), []
    keys = [spec.key for spec in specs]
    (own,) = {
        row["data_checksum"]
        for row in load_rows(results_dir() / "h5.jsonl")
        if row["key"] in keys
    }

    def run_grid(specs, store, **_):
        asked.extend(specs)
        return []

    monkeypatch.setattr("cpt_lab.sweeps.sweep.run_grid", run_grid)
    monkeypatch.setattr(preregistered, "replicated_effects", lambda grid, rows: [])
    results = []
    for checksum in (own, "0123456789abcdef"):
        stored = pd.DataFrame({"key": keys, "data_checksum": checksum})
        monkeypatch.setattr(preregistered, "committed", lambda stored=stored: stored)
        results.append(command("verify", "--verdict", "h5/digits"))
    (status, *_), (other_status, _, said) = results
    assert asked
    assert (status, other_status) == (0, 2)
    assert "'digits' has checksum" in said
    assert "0123456789abcdef in the rows of h5/digits" in said


@pytest.mark.parametrize(
    ("change", "complete"),
    [({}, True), ({"status": "failed"}, False), ({"data_checksum": "other"}, False)],
)
def test_fresh_seeds_stores_complete_grids_only(
    change, complete, monkeypatch, tmp_path
):
    """Skip grids with failed runs or different data, and reject rows of a changed tree."""
    fields = {"data_checksum": "same", "schema": 1, "seconds": 1.0, "device": "cpu"}
    stored = [row | fields for row in rows_of(1, fresh=False, noise=0.1)]
    again = [row | fields for row in rows_of(1)]
    for row in again:
        row["provenance"]["machine"] = {"cpu": "one"}
    again[-1] |= change
    folder = tmp_path / "verdicts" / "h3"
    folder.mkdir(parents=True)
    write_rows(folder / "facebook.jsonl", *again)
    monkeypatch.setattr(preregistered, "committed", lambda: table(stored))
    monkeypatch.setattr(fresh_seeds, "runs_dir", lambda: tmp_path)
    monkeypatch.setattr(fresh_seeds, "results_dir", lambda: tmp_path)
    fresh_seeds.main()
    grids = json.loads((tmp_path / "fresh_seeds.json").read_text())["grids"]
    assert list(grids) == [GRID] * complete
    for grid in grids.values():
        (values,) = grid["effects"].values()
        (effect,) = preregistered.replicated_effects(GRID, again)
        assert values == list(effect.replication.values)
    for row in again:
        row["provenance"]["dirty"] = True
    write_rows(folder / "facebook.jsonl", *again)
    rejected = pytest.raises(ValueError, match="not those of a clean commit")
    with rejected if complete else nullcontext():
        fresh_seeds.main()
