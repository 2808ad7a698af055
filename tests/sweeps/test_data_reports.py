"""Data reports from training to pages: printed once, stored with their rows, shown."""

import json
from dataclasses import replace

import pytest
from dataset_layouts import image_archives, write
from helpers import specs_of

from cpt_lab.analysis import data_reports, precision_search_report, report
from cpt_lab.data.report import DataReport
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.sweeps import stores, sweep
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.fixture
def own_spec(data_folder, monkeypatch):
    """Return a short run on six images of the user's data."""
    monkeypatch.setattr(sweep, "_printed", set())
    write(data_folder / "mine", image_archives())
    base = recipe("smoke", "mine/", task="image")
    return run_spec(
        replace(base, steps=16, batch=4, valid_images=0), "static 8", q_max=8, seed=0
    )


def test_data_report_is_printed_once_before_training(own_spec, tmp_path, capsys):
    rows = run_grid([own_spec], tmp_path / "a.jsonl", workers=0)
    assert rows[0]["status"] == "ok"
    text = capsys.readouterr().err
    assert text.count("data report of mine/") == 1
    run_grid([replace(own_spec, seed=1)], tmp_path / "a.jsonl", workers=0)
    assert "data report" not in capsys.readouterr().err


def test_data_report_skips_printing_embedded_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "_printed", set())
    (row,) = run_grid(specs_of("CR"), tmp_path / "a.jsonl", workers=0)
    assert "data report" not in capsys.readouterr().err
    assert len(row["data_report"]) == 16


def test_data_report_is_stored_with_rows(own_spec, tmp_path):
    store = tmp_path / "a.jsonl"
    (row,) = run_grid([own_spec], store, workers=1)
    found = stores.load_data_report(store, row["data_report"])
    assert found.dataset == "mine/"
    assert found.digest == row["data_report"]
    path = stores.place(store, "data", row["data_report"])
    assert path == tmp_path / "a.data" / f"{row['data_report']}.json"
    path.write_text(path.read_text().replace("mine/", "yours/"))  # the name is no fact
    stores.load_data_report(store, row["data_report"])
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "facts": [["read", "nothing"]]}))
    with pytest.raises(ValueError, match="was changed after it was written"):
        stores.load_data_report(store, row["data_report"])
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no data report"):
        stores.load_data_report(store, row["data_report"])


def test_data_report_is_written_once(tmp_path):
    """Write a data report once, and name a folder that cannot be written."""
    facts = DataReport("x/", [("read", "ten files")])
    stores.write_data_report(tmp_path / "a.jsonl", facts)
    path = stores.place(tmp_path / "a.jsonl", "data", facts.digest)
    before = path.stat().st_mtime_ns
    stores.write_data_report(tmp_path / "a.jsonl", facts)
    assert path.stat().st_mtime_ns == before
    (tmp_path / "b.data").write_text("a file where the folder should be")
    with pytest.raises(stores.StoreError, match=r"cannot write .*b\.data"):
        stores.write_data_report(tmp_path / "b.jsonl", facts)


def test_data_report_sections_name_missing_reports(own_spec, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    facts = DataReport(
        "mine/",
        [("read", "12 images"), ("left out", "3 files .heic: no reader (a.heic)")],
    )
    store = tmp_path / "demo" / "image.jsonl"
    store.parent.mkdir()
    row = stores.describe(own_spec) | {
        "status": "ok",
        "metrics": [],
        "data_report": facts.digest,
    }
    stores.append_row(store, row)
    assert (
        data_reports.sections(*data_reports.stored_reports([store])) == []
    )  # older than reports
    stores.write_data_report(store, facts)
    (section,) = data_reports.sections(*data_reports.stored_reports([store]))
    assert section.table.fact.tolist() == [
        "12 images",
        "3 files .heic: no reader (a.heic)",
    ]
    assert section.title == "Data report of mine/"
    assert facts.digest in section.notes[0]
    assert data_reports.NOTHING_CHANGED not in section.notes
    assert data_reports.summary([facts])[0].startswith(
        "1 fact below on what was left out"
    )
    stores.place(store, "data", facts.digest).unlink()
    (section,) = data_reports.sections(*data_reports.stored_reports([store]))
    assert section.notes == (
        f"mine/ (report {facts.digest}): {data_reports.NOT_STORED}",
    )


def test_data_report_section_states_complete_data():
    sound = DataReport("mine/", [("read", "12 images")])
    (section,) = data_reports.sections([sound])
    assert section.notes[1:] == (data_reports.NOTHING_CHANGED,)
    assert data_reports.summary([sound]) == ()


def test_data_report_is_on_result_pages(own_spec, tmp_path, monkeypatch):
    """Show the data report on the report page and the page of a precision search."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    store = tmp_path / "runs" / "demo" / "image.jsonl"
    run_grid([replace(own_spec, scale="demo")], store, workers=0)
    page = report.write(tmp_path, "demo", []).read_text()
    assert f"{data_reports.TITLE} mine/" in page

    def run(specs, where):
        return run_grid(specs, where, workers=0)

    _, page = precision_search_report.try_recipe(
        own_spec.recipe, "smoke", run, at_once=1, minutes=0.001, seeds=1
    )
    assert f"{data_reports.TITLE} mine/" in page.read_text()


def test_data_command_prints_report_without_training(command, data_folder):
    write(data_folder / "mine", image_archives())
    status, text, _ = command("data", "mine/", "--scale", "smoke")
    assert (status, text.splitlines()[0]) == (0, "data report of mine/")
    assert list(data_folder.iterdir()) == [data_folder / "mine"]
