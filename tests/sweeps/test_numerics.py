"""Rows of different numerics versions: how sweeps, tables, reports and verify treat them."""

import json
import warnings

import pytest
from helpers import quietly, specs_of, stored_row

from cpt_core.numerics import NUMERICS
from cpt_lab import numerics
from cpt_lab.analysis import report
from cpt_lab.analysis.run_table import load, table
from cpt_lab.numerics import OtherNumericsWarning, numerics_of
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import stores, verify
from cpt_lab.sweeps.row_format import integrity, load_rows, newest
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
SPECS = quietly(specs_of, "CR", "RR", "LR")


def row_by(spec, release=None, value=0.5, **changes):
    """Return a row as written by a release before numerics versions, or by the current one."""
    row = stored_row(spec, value, **changes)
    if release is not None:
        del row["numerics"]
        row["provenance"] = {**row["provenance"], "versions": {"cpt-core": release}}
    return row


def store_of(folder, *rows):
    store = folder / "image.jsonl"
    store.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return store


@pytest.fixture
def old_store(tmp_path):
    """Return a store with a row of 0.1.0, one of 0.2.0 and none of the third run."""
    return store_of(tmp_path, row_by(SPECS[0], "0.1.0"), row_by(SPECS[1], "0.2.0"))


@pytest.mark.parametrize(
    ("row", "version"),
    [
        ({"numerics": 7}, 7),
        ({"numerics": 2, "provenance": {"versions": {"cpt-core": "0.1.0"}}}, 1),
        ({"numerics": 3, "provenance": {"versions": {"cpt-core": "0.3.0"}}}, 3),
        ({"numerics": True}, None),
        ({"provenance": {"versions": {"cpt-core": "0.1.0"}}}, 1),
        ({"provenance": {"versions": {"cpt-core": "0.2.0"}}}, 2),
        (
            {
                "provenance": {
                    "versions": {"cpt-core": "0.2.0"},
                    "machine": {},
                    "kernels": "cpp",
                }
            },
            2,
        ),
        ({"provenance": {"versions": {"cpt-core": "0.2.0"}, "machine": {}}}, 1),
        ({"provenance": {"versions": {"cpt-core": "0.3.0"}}}, 2),
        (
            {
                "provenance": {
                    "versions": {"cpt-core": "not installed"},
                    "kernels": "triton",
                }
            },
            2,
        ),
        ({"provenance": {"versions": {"cpt-core": "0.9.0"}}}, None),
        ({"provenance": {"versions": {}}}, None),
        ({}, None),
    ],
)
def test_numerics_of_reads_field_or_release(row, version):
    assert numerics_of(row) == version


def test_committed_rows_have_current_numerics():
    counts = numerics.count_numerics(
        row for path in results_dir().glob("*.jsonl") for row in load_rows(path)
    )
    assert set(counts) == {NUMERICS}
    assert counts[NUMERICS] > 7000


def test_newest_prefers_current_numerics():
    old, now = row_by(SPECS[0], "0.1.0", value=0.1), row_by(SPECS[0], value=0.9)
    old["provenance"] = {**old["provenance"], "started": "2027-01-01"}
    failed = {**row_by(SPECS[0]), "status": "failed"}
    assert newest([now, old]) == newest([old, now]) == {old["key"]: now}
    assert newest([old, failed])[old["key"]] == old


def test_integrity_allows_results_of_several_numerics(tmp_path):
    """Report conflicting results of a run only within one numerics version."""
    same = store_of(
        tmp_path, row_by(SPECS[0], "0.1.0", 0.1), row_by(SPECS[0], "0.3.0", 0.9)
    )
    assert integrity([same]).doubts == ()
    differs = store_of(
        tmp_path, row_by(SPECS[0], "0.2.0", 0.1), row_by(SPECS[0], "0.3.0", 0.9)
    )
    assert len(integrity([differs]).doubts) == 1


def test_table_warns_of_old_numerics(old_store):
    stores.append_row(old_store, row_by(SPECS[2]))
    with pytest.warns(
        OtherNumericsWarning,
        match=f"{NUMERICS}: 2 of numerics 2, 1 of numerics 1.*image.jsonl",
    ):
        frame = load(old_store)
    assert dict(zip(frame["arm"], frame["numerics"], strict=True)) == {
        "CR": 1,
        "RR": 2,
        "LR": 2,
    }
    with pytest.warns(
        OtherNumericsWarning, match="1 of numerics 2, 1 of unknown numerics"
    ):
        frame = table([row_by(SPECS[0]), row_by(SPECS[1], "7.0")])
    assert frame["numerics"].isna().tolist() == [False, True]


def test_table_of_current_numerics_does_not_warn():
    failed = {**row_by(SPECS[1], "0.1.0"), "status": "failed", "error": "MemoryError"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", OtherNumericsWarning)
        assert table([row_by(SPECS[0]), failed])["numerics"].tolist() == [2, 1]


def test_run_grid_uses_old_rows_and_warns(old_store):
    with pytest.warns(OtherNumericsWarning) as caught:
        rows = run_grid(SPECS, old_store, workers=0)
    (said,) = (str(one.message) for one in caught)
    assert said.startswith(
        f"{old_store} answers for 2 of these runs with 1 of numerics 2, 1 of numerics 1"
    )
    assert f"the 1 missing runs will have numerics {NUMERICS}" in said
    assert "rerun_old=True (`cpt run GRID --rerun-old`)" in said
    assert [numerics_of(row) for row in rows] == [1, 2, NUMERICS]
    assert rows[2]["numerics"] == NUMERICS
    assert len(old_store.read_text().splitlines()) == 3


def test_run_grid_reruns_old_rows_on_demand(old_store):
    """Rerun rows of old numerics with ``rerun_old=True``, and keep the old rows in the store."""
    before = old_store.read_text()
    rows = run_grid(SPECS[:2], old_store, workers=0, rerun_old=True)
    assert [numerics_of(row) for row in rows] == [NUMERICS, NUMERICS]
    after = old_store.read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 3, "the row of 0.2.0 is of these numerics"
    assert [row["key"] for row in load_rows(old_store)] == [
        spec.key for spec in SPECS[:2]
    ]
    assert run_grid(SPECS[:2], old_store, workers=0, rerun_old=True) == rows
    assert old_store.read_text() == after


def test_run_grid_of_current_numerics_is_silent(old_store):
    rows = run_grid(SPECS[1:2], old_store, workers=0)
    assert rows[0]["status"] == "ok"


def test_append_row_keeps_row_of_equal_numerics(tmp_path):
    store = store_of(tmp_path, row_by(SPECS[0], "0.1.0", 0.1))
    first = stores.append_row(store, row_by(SPECS[0], value=0.5))
    assert stores.append_row(store, row_by(SPECS[0], value=0.9)) == first
    assert len(store.read_text().splitlines()) == 2


def test_verify_skips_rows_of_different_numerics(tmp_path, monkeypatch, command):
    old, recent = (
        row_by(SPECS[0], "0.1.0", metrics=[], evaluations=[]),
        row_by(SPECS[1], "0.2.0"),
    )
    store = store_of(tmp_path, old, {**recent, "metrics": [], "evaluations": []})
    monkeypatch.setattr(verify, "results_dir", lambda: tmp_path / "none")
    monkeypatch.setattr(verify, "run_again", lambda row: row)
    status, said, _ = command("verify", store)
    assert status == 1
    assert (
        f"CR seed 0: not comparable: made with numerics 1, today's is {NUMERICS}"
        in said
    )
    assert "RR seed 0: bit for bit" in said
    assert "1 bit for bit, 1 not comparable by" in said
    assert verify.compare(old, row_by(SPECS[0]), []).verdict == "not comparable"


def test_verify_tolerance_uses_seeds_of_equal_numerics():
    """Measure the spread of seeds within one numerics version."""
    specs = specs_of("CR", seeds=tuple(range(5)))
    now = [row_by(spec, value=0.5 + 0.01 * i) for i, spec in enumerate(specs)]
    old = [row_by(spec, "0.1.0", value=0.1 * i) for i, spec in enumerate(specs)]
    assert verify.allowed(now[0], [*now, *old]) == verify.allowed(now[0], now)


@pytest.mark.filterwarnings("ignore::cpt_lab.numerics.OtherNumericsWarning")
def test_report_lists_numerics_of_every_store(old_store, tmp_path):
    runs = load(old_store)
    sources = report._sources(runs)
    assert sources["numerics"].tolist() == ["2: 1 run, 1: 1 run"]
    (note,) = report._numerics_note(runs)
    assert note.startswith("1 run of 2 were made with other numerics than today's (2)")
    assert report._numerics_note(runs[runs["numerics"] == NUMERICS]) == []
    assert report._sources(runs[runs["numerics"] == NUMERICS])["numerics"].tolist() == [
        "2"
    ]
