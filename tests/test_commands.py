"""Command line: transcripts of errors, selected runs and plans; results, reports, searches and claims."""

import io
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import cpt_core as cpt
from cpt_extras.optional_libraries import install_hint
from cpt_lab.analysis import data_reports, precision_search_report, rendering, report
from cpt_lab.analysis.claims import judge_claims
from cpt_lab.analysis.preregistered import Answer
from cpt_lab.analysis.run_table import COLUMN_TYPES, load, table
from cpt_lab.experiments import grids, registry
from cpt_lab.experiments.registry import recipe
from cpt_lab.paths import ROOT, paper_dir, results_dir
from cpt_lab.sweeps import forecast, stores, sweep
from cpt_lab.sweeps.step_timing import Calibration

TRANSCRIPTS = Path(__file__).parent / "golden" / "commands"
DIGITS = results_dir() / "image_digits.jsonl"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return an empty folder, below which commands look for data and write runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def transcript(command, folder, golden):
    """Return a function that runs the ``$ cpt`` lines of a golden file, and compares the outputs with it.

    A new case is a new line ``$ cpt ...`` and ``pytest --update-golden``. The test's folder is written FOLDER.
    """

    def run(name, show):
        parts = []
        for line in (TRANSCRIPTS / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("$ cpt "):
                words = line.removeprefix("$ cpt ").replace("FOLDER", str(folder))
                text = show(*command(*shlex.split(words)))
                text = text.replace(str(folder), "FOLDER").replace(str(ROOT), "ROOT")
                parts.append(f"{line}\n{text.strip()}\n")
        golden(f"commands/{name}", "\n".join(parts))

    return run


@pytest.fixture
def asked(monkeypatch):
    """Return the list of specs that commands want to run; nothing is trained."""
    specs = []

    def run_grid(wanted, store, options):
        specs.extend(wanted)
        return []

    monkeypatch.setattr(sweep, "run_grid", run_grid)
    return specs


def store_row(spec, status="ok", **fields):
    """Store a row of a run, as if it had finished."""
    row = {**stores.describe(spec), "status": status, "error": "x\ny", **fields}
    stores.append_row(stores.store_path(spec.scale, spec.recipe.task), row)


# --- errors ---------------------------------------------------------------------------------------


def one_line(status, _, error):
    """Return the error of a command on one line, without the parts that depend on the machine."""
    assert status == 2
    assert "Traceback" not in error
    assert len(error) < 500
    text = re.sub(r"[\s│╭╰─╮╯]+", " ", error)
    text = re.sub(r"\S*python\S* -m cpt_lab", "python -m cpt_lab", text)
    return re.sub(r"^ ?Usage: .* Error ", "usage error: ", text)


@pytest.mark.parametrize(
    "part",
    [pytest.param("run", marks=pytest.mark.slow), "plan", "try", "reproduce", "other"],
)
def test_command_reports_invalid_input_in_one_line(part, transcript, folder):
    """Report invalid input in one line before any work starts."""
    transcript(f"errors_{part}.txt", one_line)
    assert [path for path in folder.rglob("*.jsonl") if path.read_text()] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digits --figure answer.foo", "unknown type of --figure 'foo'"),
        ("{}/empty.npz --task graph", "empty.npz cannot be read: "),
    ],
)
def test_range_test_command_names_unusable_file(words, message, command, folder):
    (folder / "empty.npz").touch()
    status, _, error = command("range-test", *words.format(folder).split())
    assert status == 2
    assert message in error
    assert "Aborted" not in error


def test_version_option_prints_versions(command):
    status, output, _ = command("--version")
    assert status == 0
    assert output.strip() == f"cpt {cpt.__version__}, torch {torch.__version__}"


def test_command_names_extra_of_missing_import(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "cpt_lab.sweeps.forecast")
    message = f"error: pandas cannot be imported; {install_hint('lab')}"
    status, _, error = command("plan")
    assert (status, error.splitlines()[-1]) == (2, message)


# --- selected runs and plans ----------------------------------------------------------------------


def test_run_command_selects_runs(transcript, asked):
    """Show the runs of a few selections, and the number and store of the runs of larger ones."""

    def show(status, out, error):
        assert (status, error) == (0, "")
        lines = [out]
        for spec in asked if len(asked) < 5 else ():
            r = spec.recipe
            windows = getattr(spec.schedule, "windows", None)
            deficit = f", {spec.schedule.q_low} bits in {windows}" if windows else ""
            lines.append(
                f"  {r.dataset}/{r.model} {spec.arm}, seed {spec.seed}: q_min {r.q_min}, q_max {spec.q_max}, "
                f"q_grad {spec.q_grad}, {r.n_cycles} cycles, {r.steps} steps, lr {r.lr} {r.lr_rule}{deficit}\n"
            )
        asked.clear()
        return "".join(lines)

    transcript("selected_runs.txt", show)


def test_plan_command_counts_and_prices_runs(transcript, monkeypatch):
    """Plan with measured steps, where one run is stored, one diverged and one failed."""
    timing = Calibration(
        seconds_per_step=0.5,
        peak_memory=1,
        host_memory=1,
        checkpoint=10**6,
        macs=1024 * 1000,
        measured=time.time() - 3 * 86400,
    )
    monkeypatch.setattr(forecast, "cached_timing", lambda spec, device: timing)
    specs = grids.grid_specs("digits/mlp6", "smoke")
    for spec, status in zip(specs, ("ok", "diverged", "failed"), strict=False):
        store_row(spec, status, seconds=7.0, device="cpu")
    transcript("plans.txt", lambda status, out, error: out)


@pytest.mark.slow
def test_rows_command_prints_table_and_writes_csv(transcript, folder, monkeypatch):
    failed, *_ = grids.grid_specs("digits/mlp6", "demo", [77], schedules=["CR"])
    store_row(failed, "failed")
    store_row(grids.grid_specs("digits/mlp6", "smoke")[0], seconds=1.0)
    known = [DIGITS, stores.store_path("demo", "image")]
    monkeypatch.setattr("cpt_lab.commands.all_stores", lambda: known)
    transcript("rows.txt", lambda status, out, error: out)
    frame = pd.read_csv(folder / "rows.csv")
    assert set(COLUMN_TYPES) <= set(frame)
    arms = ["CR", "CR", "CR", "static 8", "static 8"]
    assert (frame.arm.tolist(), frame.seed.tolist()) == (arms, [0, 1, 77, 0, 1])


def test_result_table_has_typed_columns(tmp_path):
    assert load(tmp_path / "none.jsonl").dtypes.to_dict() == table([]).dtypes.to_dict()
    runs = load(DIGITS)
    assert set(COLUMN_TYPES) <= set(runs)
    assert {str(runs[name].dtype) for name in ("seed", "q_max", "steps")} == {"Int64"}
    assert runs.accuracy.between(0, 1).all()
    assert len(runs) == len(set(runs.key)) == len(DIGITS.read_text().splitlines())


# --- runs and reports -----------------------------------------------------------------------------


@pytest.mark.slow
def test_run_command_trains_and_skips_stored_runs(command):
    words = "run digits/mlp6 --scale smoke --arms CR --seeds 0 1 --steps 20 --workers 0"
    for _ in range(2):
        status, out, error = command(*words.split())
        assert (status, error) == (0, "")
        assert "2 runs" in out
        assert "2 ok" in out
    assert len(stores.store_path("smoke", "image").read_text().splitlines()) == 2


def test_report_command_shows_no_smoke_runs(command, folder, monkeypatch):
    """Write the page of all stores, or of the given ones, without smoke runs; test_report covers its sections."""
    shutil.copy(DIGITS, folder)
    store_row(grids.grid_specs("digits/mlp6", "smoke")[0], seconds=1.0)
    store_row(grids.grid_specs("digits/mlp6", "demo", [77])[0], seconds=1.0)
    shown = []
    monkeypatch.setattr("cpt_lab.paths.results_dir", lambda: folder)
    monkeypatch.setattr(
        report, "_report_sections", lambda *parts: shown.append(parts) or []
    )
    monkeypatch.setattr(report, "render", lambda name, **parts: str(parts["notes"]))

    assert command("report")[0] == 0
    _, runs, files = shown.pop()
    demo = stores.store_path("demo", "image")
    assert files == [folder / DIGITS.name, demo]
    assert set(runs.scale) == {"demo"}
    assert len(runs) == len(DIGITS.read_text().splitlines()) + 1
    assert "smoke" not in (folder / "runs/report.html").read_text()

    smoke = stores.store_path("smoke", "image")
    page = folder / "page.html"
    assert command("report", smoke, demo, "--out", page)[0] == 0
    assert len(shown.pop()[1]) == 1
    assert "1 run at smoke scale left out" in page.read_text()


def test_run_command_prints_reason_of_failed_runs(command, monkeypatch):
    errors = {
        "CR": "Traceback\nValueError: no luck",
        "RR": "took longer than 5 s\nthe end of its log",
    }

    def fail(specs, store, options):
        failed = {"status": "failed"}
        return [
            stores.describe(spec) | failed | {"error": errors[spec.arm]}
            for spec in specs
        ]

    monkeypatch.setattr(sweep, "run_grid", fail)
    words = "run digits/mlp6 --scale smoke --arms CR RR --seeds 0 0 --workers 0"
    status, out, error = command(*words.split())
    assert status == 1
    assert "2 failed" in out
    assert "failed: CR seed 0: ValueError: no luck (log: " in error
    assert "failed: RR seed 0: took longer than 5 s (log: " in error
    assert "--retry-failed" in error


def test_notebooks_command_lists_parameters(command):
    status, out, _ = command("notebooks", "--parameters", "03")
    assert status == 0
    assert out.startswith("03_image_classification.ipynb\nscale")
    assert re.search(r"^q_max +list +default \[8\]; .+", out, re.MULTILINE)


# --- range test and precision search --------------------------------------------------------------


@pytest.mark.slow
def test_range_test_command_prints_result_and_figure(command, folder):
    figure = folder / "f.png"
    words = "range-test digits --scale smoke --bits 2 3 --dwell 8 --seeds 0 1 --figure"
    status, out, _ = command(*words.split(), figure)
    assert status == (0 if "q_min = " in out else 1)
    assert out.startswith("mlp6 on scikit-learn digits")
    assert "mean +- std, 2 seeds, 8 steps each" in out
    lines = [line for line in out.splitlines() if line[:4].strip().isdigit()]
    assert [line.split()[0] for line in lines] == ["2", "3", "8"]
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_try_command_prints_answer_and_writes_page(command, folder, monkeypatch):
    short = replace(recipe("smoke", "digits"), steps=40)
    monkeypatch.setattr(registry, "recipe", lambda *_, **__: short)
    words = "try digits --scale smoke --seeds 1 --workers 0".split()
    status, out, error = command(*words)
    assert status == 0, out
    assert out.startswith("mlp6 on scikit-learn digits, 8 x 8")
    for text in (
        ": 12 trainings, 1 seed; nothing is clear with so few; plus is better, 1 point of accuracy is too little "
        "to matter\n",
        "\nBits:      ",
        "\nTime:      None is saved, as low precision is simulated",
    ):
        assert text in out
    first_model = "The model is mlp6, the first for such data"
    assert f"{first_model}; --model names another." in error
    assert re.search(r"^trained .+, seed 0: ok, \d+ s$", error, re.MULTILINE)

    rows = folder / "runs/try/digits-mlp6-smoke/rows.jsonl"
    page = (rows.parent / "index.html").read_text()
    for text in (
        "plus is better, 1 point of accuracy is too little to matter",
        first_model,
    ):
        assert text in page
    trainings, _, data = page.rpartition(f">{data_reports.TITLE} digits</h2>")
    assert trainings.count("<tr>") == 1 + 11  # all but float32
    assert data.count("<tr>") > 1
    assert (rows.parent / "answer.txt").read_text().startswith("digits\n")

    (section,) = precision_search_report.answer_sections("digits", "smoke")
    shown = rendering.render("page.html.j2", title="", notes=[], sections=[section])
    (figure,) = re.findall("<img[^>]* src='([^']*)' width='480'", shown)
    index = folder / "runs/reproduce/smoke"  # the figure's path is relative to it
    index.mkdir(parents=True)
    assert (index / figure).read_bytes().startswith(b"\x89PNG")

    before = rows.read_bytes()
    _, again, error = command(*words, "--model", "mlp6")
    assert again.splitlines()[0] == out.splitlines()[0]
    assert "The model is mlp6." in error
    assert rows.read_bytes() == before  # nothing is trained twice


def test_try_command_warns_of_hours_for_detection(command, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(precision_search_report, "try_recipe", stop)
    status, _, error = command("try", "digit-scenes")
    assert status == 130
    assert "a training takes minutes, an answer hours (--minutes 300)" in error
    assert "hours" not in command("try", "digits")[2]


def test_try_command_prints_reason_of_failed_training(command, monkeypatch):
    failed = {"status": "failed", "error": "Traceback\nMemoryError: none left"}

    def fail(specs, store, options):
        return [failed | {"spec": spec.to_dict()} for spec in specs]

    monkeypatch.setattr(sweep, "run_grid", fail)
    status, _, error = command("try", "digits", "--scale", "smoke")
    assert status == 1
    reason = "float32, seed 0: MemoryError: none left; rows and logs: "
    assert f"a training failed: {reason}" in error


def test_try_recipe_refuses_format_ladder():
    mx = replace(recipe("smoke"), ladder="recipe mxfp8")
    with pytest.raises(ValueError, match="must be 'affine', got 'recipe mxfp8'"):
        precision_search_report.try_recipe(mx, "smoke", None, at_once=1)


def test_try_folders_are_visible_and_separate(folder):
    """Give every data set a visible folder of its own, also where names differ in replaced characters alone."""
    datasets = "a-b/ a/b/ ./<img src=x onerror=alert(1)>/ ../../mine/ .hidden/"
    folders = {
        precision_search_report._folder(replace(recipe("smoke"), dataset=name), "smoke")
        for name in datasets.replace("img src=x ", "img_src=x_").split()
    }
    assert len(folders) == 5
    for path in folders:
        assert path.name[0].isalnum()
        assert path.parent == folder / "runs/try"


# --- claims ---------------------------------------------------------------------------------------


ANSWER = Answer(
    "H9",
    "Why?",
    ("an effect",),
    outcome="inconclusive",
    by_rule=(("8 bits", "confirmed"),),
)


@pytest.fixture(scope="session")
def entries():
    """Return all claims as judged without a row."""
    return judge_claims(load())


@pytest.mark.slow
def test_claims_command_prints_summary_or_all(command, entries, monkeypatch, folder):
    """Print the committed summary if it fits the committed rows, and judge all rows otherwise."""
    judged = []

    def judge(runs):
        judged.append(runs)
        return entries

    monkeypatch.setattr("cpt_lab.analysis.claims.judge_claims", judge)
    monkeypatch.setattr("cpt_lab.analysis.run_table.load", lambda *stores: stores)
    monkeypatch.setattr(
        "cpt_lab.analysis.preregistered.all_answers", lambda runs: [ANSWER]
    )
    _, *summary = (paper_dir() / "claims.txt").read_text().splitlines()
    assert command("claims")[1:] == ("\n".join(summary) + "\n", "")

    store = folder / "runs" / "own" / "mine.jsonl"
    store.parent.mkdir(parents=True)
    store.touch()
    _, out, error = command("claims")
    assert out.splitlines() == summary
    hint = f"by the committed rows; --all judges those under {folder / 'runs'}, too\n"
    assert error == hint
    assert judged == []

    _, out, error = command("claims", "--all")
    assert error == "judging all rows, for about half a minute\n"
    first, *lines = out.splitlines()
    of_paper = [entry for entry in entries if entry.claim.is_of_paper]
    scales = r"exactly or at its scale: (.*); at smaller ones: .*"
    pattern = rf"{len(of_paper)} claims of the paper, {scales}"
    counts = re.fullmatch(pattern, first)[1]
    at_paper = sum(
        not e.verdicts()[0].startswith(("inconclusive", "not run")) for e in of_paper
    )
    assert sum(map(int, re.findall(r"\d+", counts))) == at_paper
    heading = "our own questions (docs/preregistration.md):"
    answer = ["H9: Why?", "  inconclusive", "  Judged at 8 bits: confirmed."]
    assert lines[-4:] == [heading, *answer]
    assert len(lines) == 4 + 4 * len(entries)
    assert judged == [(*sorted(results_dir().glob("*.jsonl")), store)]

    monkeypatch.setattr("cpt_lab.commands.results_dir", lambda: folder)  # other rows
    assert command("claims")[1].splitlines() == [first, *lines[-4:]]
    assert len(judged) == 2


@pytest.mark.slow
def test_claims_command_prints_utf_8_in_c_locale(command, entries, monkeypatch):
    """Print UTF-8 where the system asks for ASCII; test_architecture checks written files."""
    monkeypatch.setattr("cpt_lab.commands.all_stores", list)
    monkeypatch.setattr("cpt_lab.analysis.claims.judge_claims", lambda runs: entries)
    monkeypatch.setattr(
        "cpt_lab.analysis.preregistered.all_answers", lambda runs: [ANSWER]
    )
    output = io.BytesIO()
    with io.TextIOWrapper(output, encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command("claims", "--evidence")[0] == 0
        stdout.flush()
        text = output.getvalue().decode("utf-8")
    assert "paper scale: confirmed, exact\n  smaller scales: –\n  rule of 2" in text
    assert text.endswith("confirmed.\n    an effect\n0 of 0 rows intact\n")
