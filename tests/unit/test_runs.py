import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cpt_core import grids, results, runs
from cpt_core.runs import run_grid


def specs_of(*arms, seeds=(0,), **changes):
    return grids.image("smoke", schedules=arms, static=[], seeds=seeds, **{"steps": 10, "n_cycles": 2, **changes})


@pytest.fixture
def quick(monkeypatch):
    """Count the runs and make them cheap, but leave storing and resuming as they are."""
    ran = []

    def fake(job):
        ran.append(job[0].arm)
        if job[0].arm == "RR":
            return {**stores.describe(job[0]), "status": "failed", "error": "boom"}
        return {**stores.describe(job[0]), "status": "ok", "metrics": []}

    monkeypatch.setattr(runs, "run_one", fake)
    return ran


@pytest.mark.filterwarnings("ignore::cpt_core.schedules.ShortCycleWarning")
class TestStore:
    def test_what_is_there_is_not_run_again(self, quick, tmp_path):
        store = tmp_path / "rows.jsonl"
        run_grid(specs_of("CR"), store)
        rows = run_grid(specs_of("CR", "LR"), store)
        assert quick == ["CR", "LR"]
        assert [r["spec"]["arm"] for r in rows] == ["CR", "LR"]
        assert len(store.read_text().splitlines()) == 2

    def test_the_same_spec_twice_runs_once(self, quick, tmp_path):
        assert len(run_grid(specs_of("CR") * 2, tmp_path / "rows.jsonl")) == 2
        assert quick == ["CR"]

    def test_failures_stay_and_are_retried_on_demand(self, quick, tmp_path):
        store = tmp_path / "rows.jsonl"
        rows = run_grid(specs_of("RR", "CR"), store)
        assert [r["status"] for r in rows] == ["failed", "ok"]
        run_grid(specs_of("RR", "CR"), store)
        assert quick == ["RR", "CR"]
        run_grid(specs_of("RR", "CR"), store, retry_failed=True)
        assert quick == ["RR", "CR", "RR"]
        assert len(store.read_text().splitlines()) == 3  # appended, not edited


@pytest.mark.filterwarnings("ignore::cpt_core.schedules.ShortCycleWarning")
def test_rows_are_complete(tmp_path):
    (row,) = run_grid(specs_of("CR", steps=20), tmp_path / "rows.jsonl")
    assert row["status"] == "ok"
    assert set(row) >= {
        "schema", "key", "spec", "relative_cost", "noise_exposure", "share_at_q_min", "provenance", "metrics", "bitops",
        "steps", "seconds", "device", "title", "data_checksum", "loss",
    }  # fmt: skip
    assert row["device"] == "cpu"
    assert row["bitops"].keys() == {"paper", "per_op"}
    assert {"commit", "dirty", "versions", "started"} <= set(row["provenance"])
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == row
    assert str(tmp_path) not in json.dumps(row)


def test_a_run_that_raises_is_a_row_with_its_traceback(tmp_path):
    good, bad = specs_of("CR", steps=20)[0], specs_of("CR", steps=20, model="mlp6")[0]
    bad = replace(bad, recipe=replace(bad.recipe, model="vgg"))
    rows = run_grid([bad, good], tmp_path / "rows.jsonl")
    assert [r["status"] for r in rows] == ["failed", "ok"]
    assert "KeyError: 'vgg'" in rows[0]["error"]


def test_missing_data_stop_the_sweep_before_anything_runs(tmp_path):
    good = specs_of("CR", steps=20)[0]
    bad = replace(good, recipe=replace(good.recipe, dataset="nowhere/"))
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        run_grid([good, bad], tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_processes_give_the_same_numbers_as_inline(tmp_path):
    specs = specs_of("CR", "ER", steps=20)
    inline = run_grid(specs, tmp_path / "a.jsonl")
    processes = run_grid(specs, tmp_path / "b.jsonl", executor="processes", workers=2)
    assert [r["metrics"] for r in processes] == [r["metrics"] for r in inline]
    assert [r["key"] for r in processes] == [s.key for s in specs]


def die(job):
    if job[0].arm == "ER":
        os._exit(9)  # as an out-of-memory kill would end it
    return {**stores.describe(job[0]), "status": "ok", "metrics": []}


def test_a_run_that_kills_its_process_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "run_one", die)
    rows = run_grid(specs_of("CR", "ER", "LR", steps=20), tmp_path / "rows.jsonl", executor="processes", workers=2)
    assert [r["status"] for r in rows] == ["ok", "failed", "ok"]
    assert "process" in rows[1]["error"].lower()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"executor": "cloud"}, "unknown executor 'cloud'; choose from inline, processes"),
        ({"device": "tpu"}, "unknown device 'tpu'; choose from auto, cpu, cuda"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(choices, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_grid(specs_of("CR", steps=20), tmp_path / "rows.jsonl", **choices)
    assert not (tmp_path / "rows.jsonl").exists()


# --- the file itself ------------------------------------------------------------------------------


def row(key, value=1):
    return {"schema": 1, "key": key, "value": value}


def test_newest_row_wins(tmp_path):
    store = tmp_path / "rows.jsonl"
    for r in (row("a"), row("b"), row("a", 2)):
        stores.append_row(store, r)
    assert stores.load_rows(store) == [row("a", 2), row("b")]
    assert stores.load_rows(tmp_path / "none.jsonl") == []


def test_a_torn_last_line_is_left_out_and_then_cut_off(tmp_path):
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("a"))
    with open(store, "a") as f:
        f.write('{"schema": 1, "key": "b", "va')
    assert stores.load_rows(store) == [row("a")]
    stores.append_row(store, row("c"))
    assert stores.load_rows(store) == [row("a"), row("c")]


def test_broken_lines_and_other_schemas_are_named(tmp_path):
    store = tmp_path / "rows.jsonl"
    store.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        stores.load_rows(store)
    store.write_text('{"schema": 99, "key": "a"}\n')
    with pytest.raises(ValueError, match="schema 99 is not 1"):
        stores.load_rows(store)


def test_not_a_number_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        stores.append_row(tmp_path / "rows.jsonl", row("a", float("nan")))
    assert stores.load_rows(tmp_path / "rows.jsonl") == []


def write_many(store, worker):
    for i in range(40):
        stores.append_row(Path(store), row(f"{worker}-{i}", "x" * 2000))


def test_many_writers(tmp_path):
    store = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(str(store), w)) for w in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(stores.load_rows(store)) == 120
