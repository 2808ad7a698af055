"""Replication of effects with fresh seeds, on synthetic rows with a known answer."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from helpers import write_rows

from bench import fresh_seeds
from cpt_lab.analysis import preregistered as repeated
from cpt_lab.analysis.run_table import committed, table
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.experiments.spec import RunSpec
from tests.studies.test_h1_to_h4_outcome import deficit_loss, rows

GRID = "h3/facebook"


def made(date, fresh=False, sd=0.1):
    """Return rows of H3 in which a later deficit costs ``date`` points more, with fresh or original seeds."""
    found = rows(GRID, lambda s: deficit_loss(s, date=date), sd=sd)
    for row in found if fresh else []:
        spec = RunSpec.from_dict(row["spec"])
        spec = replace(spec, seed=spec.seed + repeated.SEED_OFFSET)
        row |= {"spec": spec.to_dict(), "key": spec.key}
    return found


@pytest.mark.parametrize(
    ("former", "date", "sd", "word"),
    [
        (1, 1, 0.11, "repeats"),
        (1, -1, 0.11, "DIFFERS"),
        (1, 1, 30, "cannot be told"),
        (0, 0, 0.11, "no effect, again"),
    ],
)
def test_replicated_effects_word(former, date, sd, word, monkeypatch):
    monkeypatch.setattr(repeated, "committed", lambda: table(made(former)))
    (found,) = repeated.replicated_effects(GRID, made(date, fresh=True, sd=sd))
    assert found.outcome == word
    assert f"equal learning rate: {word}: " in str(found)
    assert str(found).endswith("points, n = 10 and 10")


def test_replication_seeds_are_unused():
    fresh, own = repeated.fresh_seed_specs(GRID), grid_specs(GRID)
    assert not {s.key for s in fresh} & {s.key for s in own}
    assert [(s.arm, s.seed - 1000) for s in fresh] == [(s.arm, s.seed) for s in own]
    with pytest.raises(ValueError, match="unknown grid 'digits'"):
        repeated.fresh_seed_specs("digits")


@pytest.mark.parametrize(("date", "code"), [(1, 0), (-1, 1)])
def test_verify_verdict_runs_fresh_seeds_and_exits(date, code, monkeypatch, command):
    """Exit with status 1 if an effect is not replicated."""
    found, asked = made(date, fresh=True), []
    monkeypatch.setattr(repeated, "committed", lambda: table(made(date=1)))
    monkeypatch.setattr(
        "cpt_lab.sweeps.sweep.run_grid",
        lambda specs, store, **_: asked.extend(specs) or found,
    )
    status, said, _ = command("verify", "--verdict", GRID)
    assert (status, asked) == (code, repeated.fresh_seed_specs(GRID))
    assert said.startswith("h3/facebook with fresh seeds: 300 runs, rows in ")
    assert ("DIFFERS" in said) == bool(code)


def test_verify_verdict_with_failed_runs_is_inconclusive(monkeypatch, command):
    found = made(1, fresh=True)
    found[0]["status"] = "failed"
    monkeypatch.setattr(repeated, "committed", lambda: table(made(date=1)))
    monkeypatch.setattr(
        "cpt_lab.sweeps.sweep.run_grid", lambda specs, store, retry_failed: found
    )
    status, _, said = command("verify", "--verdict", GRID)
    assert (
        status,
        "1 of 300 runs failed, so the result is undecided; the same command tries them again"
        in said,
    ) == (2, True)


@pytest.mark.parametrize(
    ("change", "kept"),
    [({}, True), ({"status": "failed"}, False), ({"data_checksum": "other"}, False)],
)
def test_fresh_seeds_stores_complete_grids_only(change, kept, monkeypatch, tmp_path):
    """Skip grids with failed runs or different data."""
    of_row = {"data_checksum": "same", "schema": 1, "seconds": 1.0, "device": "cpu"}
    stored, again = (
        [row | of_row for row in made(1, fresh, sd)]
        for fresh, sd in ((False, 0.1), (True, 0.11))
    )
    for row in again:
        row["provenance"] = {**row["provenance"], "machine": {"cpu": "one"}}
    again[-1] |= change
    (tmp_path / "verdicts" / "h3").mkdir(parents=True)
    write_rows(tmp_path / "verdicts" / "h3" / "facebook.jsonl", *again)
    for module, name, value in [
        (repeated, "committed", lambda: table(stored)),
        (fresh_seeds, "runs_dir", lambda: tmp_path),
        (fresh_seeds, "results_dir", lambda: tmp_path),
    ]:
        monkeypatch.setattr(module, name, value)
    fresh_seeds.main()
    grids = json.loads((tmp_path / "fresh_seeds.json").read_text())["grids"]
    assert list(grids) == [GRID] * kept
    for grid in grids.values():
        (values,) = grid["effects"].values()
        assert values == list(
            repeated.replicated_effects(GRID, again)[0].replication.values
        )
    for row in again:
        row["provenance"]["dirty"] = True
    write_rows(tmp_path / "verdicts" / "h3" / "facebook.jsonl", *again)
    with (
        pytest.raises(ValueError, match="not those of a clean commit")
        if kept
        else nullcontext()
    ):
        fresh_seeds.main()


def test_verify_verdict_rejects_different_data(monkeypatch, command):
    stored, asked = committed("h5"), []
    monkeypatch.setattr(
        "cpt_lab.sweeps.sweep.run_grid",
        lambda specs, store, **_: asked.extend(specs) or [],
    )
    monkeypatch.setattr(repeated, "replicated_effects", lambda grid, rows: [])
    monkeypatch.setattr(repeated, "committed", lambda: stored)
    assert command("verify", "--verdict", "h5/digits")[0] == 0
    assert asked
    monkeypatch.setattr(
        repeated, "committed", lambda: stored.assign(data_checksum="0123456789abcdef")
    )
    status, _, said = command("verify", "--verdict", "h5/digits")
    assert status != 0
    assert "'digits' has checksum" in said
    assert "0123456789abcdef in the rows of h5/digits" in said
