"""Data reports from training to pages: printed once, stored with their rows, shown."""

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
    short = replace(base, steps=8, n_cycles=1, batch=4, valid_images=0)
    return run_spec(short, "static 8", q_max=8, seed=0)


@pytest.mark.slow
def test_data_report_is_printed_once_and_stored(own_spec, tmp_path, capsys):
    """Print the report of the user's data before the first run, but not of embedded data."""
    store = tmp_path / "a.jsonl"
    (row,) = run_grid([own_spec], store, workers=0)
    assert capsys.readouterr().err.count("data report of mine/") == 1
    run_grid([replace(own_spec, seed=1)], store, workers=0)
    (embedded,) = run_grid(specs_of("CR"), store, workers=0)
    assert "data report" not in capsys.readouterr().err
    for digest, name in ((row["data_report"], "mine/"), (embedded["data_report"], "")):
        stored = stores.load_data_report(store, digest)
        assert stored.digest == digest
        assert stored.dataset.startswith(name)


def test_data_report_sections_name_missing_reports(own_spec, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    texts = ["12 images", "3 files .heic: no reader (a.heic)"]
    facts = list(zip(("read", "left out"), texts, strict=True))
    data_report = DataReport("mine/", facts)
    store = tmp_path / "demo" / "image.jsonl"
    store.parent.mkdir()
    fields = {"status": "ok", "metrics": [], "data_report": data_report.digest}
    stores.append_row(store, stores.describe(own_spec) | fields)

    def sections():
        return data_reports.sections(*data_reports.stored_reports([store]))

    assert sections() == []  # older than reports
    stores.write_data_report(store, data_report)
    (section,) = sections()
    assert section.table.fact.tolist() == texts
    assert section.title == "Data report of mine/"
    assert data_report.digest in section.notes[0]
    assert data_reports.NOTHING_CHANGED not in section.notes
    (summary,) = data_reports.summary([data_report])
    assert summary.startswith("1 fact below on what was left out")
    stores.place(store, "data", data_report.digest).unlink()
    (section,) = sections()
    note = f"mine/ (report {data_report.digest}): {data_reports.NOT_STORED}"
    assert section.notes == (note,)


def test_data_report_section_states_complete_data():
    data_report = DataReport("mine/", [("read", "12 images")])
    (section,) = data_reports.sections([data_report])
    assert section.notes[1:] == (data_reports.NOTHING_CHANGED,)
    assert data_reports.summary([data_report]) == ()


@pytest.mark.slow
def test_data_report_is_on_result_pages(own_spec, tmp_path, monkeypatch):
    """Show the data report on the report page and the page of a precision search."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    store = tmp_path / "runs" / "demo" / "image.jsonl"
    run_grid([replace(own_spec, scale="demo")], store, workers=0)
    page = report.write(tmp_path, "demo", [], has_claims=False).read_text()
    assert f"{data_reports.TITLE} mine/" in page

    def run(specs, where):
        return run_grid(specs, where, workers=0)

    options = {"at_once": 1, "minutes": 0.001, "seeds": 1}
    _, page = precision_search_report.try_recipe(
        own_spec.recipe, "smoke", run, **options
    )
    assert f"{data_reports.TITLE} mine/" in page.read_text()


def test_data_command_prints_report_without_training(command, data_folder):
    write(data_folder / "mine", image_archives())
    status, text, _ = command("data", "mine/", "--scale", "smoke")
    assert (status, text.splitlines()[0]) == (0, "data report of mine/")
    assert list(data_folder.iterdir()) == [data_folder / "mine"]
