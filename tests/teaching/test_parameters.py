"""``P.run``: what the cell of an experiment does not have to say."""

import pytest
from layouts import image_folder, write

from cpt_lab.experiments import designs
from cpt_lab.sweeps import stores, sweep
from cpt_lessons.parameters import check_parameters


@pytest.fixture
def asked(monkeypatch):
    """What ``run_grid`` is asked for, instead of running it."""
    calls = []
    monkeypatch.setattr(sweep, "run_grid", lambda *given, **options: calls.append((*given, options)) or [])
    return calls


def test_runs_come_back_as_a_table():
    parameters = check_parameters(scale="smoke")
    specs = designs.quality_cost("smoke", schedules=["CR"], static_bits=[8], seeds=[0], steps=8, n_cycles=1)
    runs = parameters.run(specs)
    assert runs.arm.to_list() == ["CR", "static 8"]
    assert runs.accuracy.between(0, 1).all()
    assert (runs.first_loss > 0).all()
    assert [row["key"] for row in stores.load_rows(parameters.store)] == runs.key.to_list()


def test_own_data_is_read_whole_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    files = image_folder(kind="JPEG")
    write(tmp_path / "pets", files)
    check_parameters(scale="smoke", dataset="pets/")
    write(tmp_path / "pets", {name: file[:300] for name, file in files.items() if name.endswith("1.jpeg")})
    with pytest.raises(ValueError, match=r"4 files are wrong:\n.*train/a/1.jpeg cannot be read"):
        check_parameters(scale="smoke", dataset="pets/")


def test_nothing_to_run(asked):
    assert check_parameters(scale="smoke").run([]).empty
    assert asked == []


@pytest.mark.parametrize(
    ("given", "workers", "device", "progress"),
    [
        ({"scale": "smoke", "workers": 3}, 0, "auto", None),
        ({"scale": "demo", "workers": 3, "device": "cuda"}, 3, "cuda", True),
        ({"scale": "demo"}, None, "auto", True),
    ],
)
def test_how_runs_are_run(given, workers, device, progress, asked, monkeypatch, tmp_path):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    parameters = check_parameters("language_model", **given)
    nodes = designs.quality_cost(given["scale"], "digits-graph", schedules=["CR"], static_bits=[], seeds=[0])
    assert parameters.run(nodes).empty
    ((specs, store, options),) = asked
    assert (specs, options) == (nodes, {"workers": workers, "device": device, "progress": progress})
    assert store == parameters.store.with_name("graph.jsonl")  # the task's own, not the notebook's
    assert given["scale"] == "smoke" or store == stores.store_path("demo", "graph")


def test_the_rate_is_chosen(monkeypatch):
    specs = designs.quality_cost("paper", "xnli", schedules=["CR"], static_bits=[], q_max=[8], seeds=[0])
    rows = [
        {**stores.describe(s), "status": "ok", "metrics": [
            {"name": "accuracy", "split": "valid", "when": "final", "precision": "q_max", "value": s.recipe.lr}
        ]}
        for s in specs
    ]  # fmt: skip
    monkeypatch.setattr(sweep, "run_grid", lambda *_, **__: rows)
    assert len(specs) == 3
    assert check_parameters(scale="smoke").run(specs).lr.to_list() == [5e-5]


def test_failed_runs_are_told_in_one_line(monkeypatch):
    specs = designs.quality_cost("smoke", schedules=["CR", "RR"], static_bits=[], seeds=[0])
    failed = {"status": "failed", "error": "Traceback (most recent call last):\n  ...\nValueError: no such thing\n"}
    rows = [{**stores.describe(s), "status": "ok", "metrics": []} for s in specs]
    rows[1] |= failed
    monkeypatch.setattr(sweep, "run_grid", lambda *given, **options: rows)
    with pytest.raises(RuntimeError, match=r"^1 of 2 runs failed, RR seed 0 with: ValueError: no such thing$"):
        check_parameters(scale="smoke").run(specs)
