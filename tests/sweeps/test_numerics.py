"""Rows of different numerics versions: how sweeps, tables, reports and verify treat them."""

import warnings

import pytest
from helpers import quietly, specs_of, stored_row, write_rows

from cpt_core.numerics import NUMERICS
from cpt_lab.analysis import report
from cpt_lab.analysis.run_table import load, table
from cpt_lab.numerics import OtherNumericsWarning, numerics_of
from cpt_lab.sweeps import stores, verify, worker
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.row_format import load_rows
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
SPECS = quietly(specs_of, "CR", "RR", "LR")


def row_of_release(spec, release, value=0.5, **fields):
    """Return a row as written by a release before numerics versions."""
    row = stored_row(spec, value, **fields)
    del row["numerics"]
    row["provenance"] = row["provenance"] | {"versions": {"cpt-core": release}}
    return row


@pytest.fixture
def old_store(tmp_path):
    """Return a store with a row of 0.1.0, one of 0.2.0 and none of the third run."""
    rows = [row_of_release(SPECS[0], "0.1.0"), row_of_release(SPECS[1], "0.2.0")]
    return write_rows(tmp_path / "image.jsonl", *rows)


def made_by(release, **provenance):
    return {"provenance": {"versions": {"cpt-core": release}, **provenance}}


@pytest.mark.parametrize(
    ("row", "version"),
    [
        ({"numerics": 7}, 7),
        ({"numerics": 2} | made_by("0.1.0"), 1),
        ({"numerics": 3} | made_by("0.3.0"), 3),
        ({"numerics": True}, None),
        (made_by("0.1.0"), 1),
        (made_by("0.2.0"), 2),
        (made_by("0.2.0", machine={}, kernels="cpp"), 2),
        (made_by("0.2.0", machine={}), 1),
        (made_by("0.3.0"), 2),
        (made_by("not installed", kernels="triton"), 2),
        (made_by("0.9.0"), None),
        ({"provenance": {"versions": {}}}, None),
        ({}, None),
    ],
)
def test_numerics_of_reads_field_or_release(row, version):
    assert numerics_of(row) == version


def test_table_warns_of_old_numerics(old_store):
    stores.append_row(old_store, stored_row(SPECS[2], 0.5))
    counts = "2 of numerics 2, 1 of numerics 1"
    message = f"{NUMERICS}: {counts}.*image.jsonl"
    with pytest.warns(OtherNumericsWarning, match=message):
        frame = load(old_store)
    numerics = dict(zip(frame["arm"], frame["numerics"], strict=True))
    assert numerics == {"CR": 1, "RR": 2, "LR": 2}
    unknown = row_of_release(SPECS[1], "7.0")
    message = "1 of numerics 2, 1 of unknown numerics"
    with pytest.warns(OtherNumericsWarning, match=message):
        frame = table([stored_row(SPECS[0], 0.5), unknown])
    assert frame["numerics"].isna().tolist() == [False, True]


def test_table_of_current_numerics_does_not_warn():
    failed = row_of_release(SPECS[1], "0.1.0", status="failed", error="MemoryError")
    with warnings.catch_warnings(action="error", category=OtherNumericsWarning):
        frame = table([stored_row(SPECS[0], 0.5), failed])
    assert frame["numerics"].tolist() == [2, 1]


def test_run_grid_uses_old_rows_and_warns(old_store):
    run_grid(SPECS[1:2], old_store, workers=0)  # of current numerics: no warning
    with pytest.warns(OtherNumericsWarning) as caught:
        rows = run_grid(SPECS, old_store, workers=0)
    (text,) = (str(warning.message) for warning in caught)
    counts = "2 of these runs with 1 of numerics 2, 1 of numerics 1"
    assert text.startswith(f"{old_store} answers for {counts}")
    assert f"the 1 missing runs will have numerics {NUMERICS}" in text
    assert "rerun_old=True (`cpt run GRID --rerun-old`)" in text
    assert [numerics_of(row) for row in rows] == [1, 2, NUMERICS]
    assert len(old_store.read_text().splitlines()) == 3


def test_run_grid_reruns_old_rows_on_demand(old_store):
    """Rerun rows of old numerics with ``rerun_old=True``, and keep the old rows in the store."""
    before = old_store.read_text()
    rows = run_grid(SPECS[:2], old_store, workers=0, rerun_old=True)
    assert [numerics_of(row) for row in rows] == [NUMERICS, NUMERICS]
    after = old_store.read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 3  # the row of 0.2.0 is of these numerics
    assert [row["key"] for row in load_rows(old_store)] == [s.key for s in SPECS[:2]]
    assert run_grid(SPECS[:2], old_store, workers=0, rerun_old=True) == rows
    assert old_store.read_text() == after


@pytest.mark.filterwarnings("ignore::cpt_lab.numerics.OtherNumericsWarning")
def test_run_grid_keeps_checkpoints_of_reruns(old_store):
    """Keep the checkpoint of a rerun that was stopped, until the rerun has finished."""
    for spec in SPECS[:2]:
        checkpoint = stores.place(old_store, "checkpoints", spec.key)
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.with_suffix(".previous.pt").write_bytes(b"paused")
    rerun = f"{SPECS[0].key}.previous.pt"
    run_grid(SPECS[:2], old_store, workers=0)
    assert [path.name for path in checkpoint.parent.iterdir()] == [rerun]
    run_grid(SPECS[:1], old_store, workers=0, rerun_old=True)
    assert list(checkpoint.parent.iterdir()) == []


def fail(job, should_stop):
    yield from ()
    return stores.describe(job.spec) | {"status": "failed", "error": "boom"}


@pytest.mark.filterwarnings("ignore::cpt_lab.numerics.OtherNumericsWarning")
@pytest.mark.parametrize("retry_failed", [False, True])
def test_run_grid_returns_failed_reruns(retry_failed, old_store, monkeypatch):
    """Return the failure of a rerun, although the old row goes on to count in the store."""
    monkeypatch.setattr(worker, "_trained_row", fail)
    options = SweepOptions(workers=0, retry_failed=retry_failed)
    checkpoint = stores.place(old_store, "checkpoints", SPECS[0].key)
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"paused")
    rows = run_grid(SPECS[:2], old_store, options, rerun_old=True)
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert checkpoint.exists()
    assert len(old_store.read_text().splitlines()) == 3

    rows = run_grid(SPECS[:2], old_store, options)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert checkpoint.exists()


@pytest.mark.filterwarnings("ignore::cpt_lab.numerics.OtherNumericsWarning")
def test_run_command_reports_failed_reruns(tmp_path, monkeypatch, command):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(worker, "_trained_row", fail)
    store = stores.store_path("smoke", "image")
    store.parent.mkdir(parents=True)
    write_rows(store, row_of_release(SPECS[0], "0.1.0"))
    words = (
        "run digits/mlp6 --scale smoke --arms CR --steps 10 --n-cycles 2 --workers 0"
    )
    sweep = (*words.split(), "--seeds", "0")
    assert command(*sweep)[0] == 0
    status, out, err = command(*sweep, "--rerun-old")
    assert status == 1
    assert "1 failed" in out
    assert "failed: CR seed 0: boom" in err


def test_verify_skips_rows_of_different_numerics(old_store, monkeypatch, command):
    parts = {"metrics": [], "evaluations": []}
    rows = [row | parts for row in load_rows(old_store)]
    write_rows(old_store, *rows)
    monkeypatch.setattr(verify, "results_dir", lambda: old_store.parent / "none")
    monkeypatch.setattr(verify, "run_again", lambda row: row)
    status, out, _ = command("verify", old_store)
    assert status == 1
    reason = f"not comparable: made with numerics 1, today's is {NUMERICS}"
    assert f"CR seed 0: {reason}" in out
    assert "RR seed 0: bit for bit" in out
    assert "1 bit for bit, 1 not comparable by" in out
    finding = verify.compare(rows[0], stored_row(SPECS[0], 0.5), [])
    assert finding.verdict == "not comparable"


def test_verify_tolerance_uses_seeds_of_equal_numerics():
    """Measure the spread of seeds within one numerics version."""
    specs = specs_of("CR", seeds=range(5))
    rows = [stored_row(spec, 0.5 + 0.01 * i) for i, spec in enumerate(specs)]
    old = [row_of_release(spec, "0.1.0", 0.1 * i) for i, spec in enumerate(specs)]
    assert verify.allowed(rows[0], [*rows, *old]) == verify.allowed(rows[0], rows)


@pytest.mark.filterwarnings("ignore::cpt_lab.numerics.OtherNumericsWarning")
def test_report_lists_numerics_of_every_store(old_store):
    runs = load(old_store)
    current = runs[runs["numerics"] == NUMERICS]
    assert report._sources(runs)["numerics"].tolist() == ["2: 1 run, 1: 1 run"]
    (note,) = report._numerics_note(runs)
    assert note.startswith("1 run of 2 were made with other numerics than today's (2)")
    assert report._numerics_note(current) == []
    assert report._sources(current)["numerics"].tolist() == ["2"]
