"""Runs of notebooks by ``cpt reproduce``: caching, failures, kernels, interrupts, pages and hand-outs."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import nbformat
import numpy as np
import papermill
import pytest
from helpers import refused
from nbclient.exceptions import CellTimeoutError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from book.notebooks import clean
from cpt_lab.analysis import report
from cpt_lab.analysis.style import subplots
from cpt_lab.paths import results_dir
from cpt_lab.resources import usable_cores
from cpt_lab.sweeps.row_format import integrity
from cpt_lessons import (
    evidence_figures,
    jupyter_kernel,
    notebook_progress,
    notebook_runs,
)
from cpt_lessons import notebooks as reproduce
from cpt_lessons.notebook_progress import Place, Progress
from cpt_lessons.notebook_runs import NotebookRun
from cpt_lessons.notebooks import copy_notebooks, estimate, notebooks

WHEEL = "cpt_core-{}-py3-none-any.whl".format
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Provide a function that places a notebook in a temporary folder, with a separate folder of runs."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "glossary.md").write_text("# Glossary\n\n## BitOps\n\nBit operations.\n")
    monkeypatch.setattr(reproduce, "notebooks_dir", lambda: folder)
    # sections of the paper take long, and notebooks from 09 on have none
    monkeypatch.setattr(reproduce, "_committed_evidence", lambda: [])
    # digests of the package and of committed rows take long
    monkeypatch.setattr(notebook_runs, "ROOT", tmp_path)
    monkeypatch.setattr(notebook_runs, "results_dir", lambda: tmp_path)
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))

    def write(name, *code, **more):
        lines = ['scale = "smoke"', "seeds = None"]
        lines += [f"{parameter} = {value}" for parameter, value in more.items()]
        parameters = new_code_cell("\n".join(lines), metadata={"tags": ["parameters"]})
        cells = [new_markdown_cell("# Title"), parameters, *map(new_code_cell, code)]
        book = new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
        nbformat.write(book, folder / name)
        return folder / name

    return write


@pytest.fixture
def without_kernel(monkeypatch):
    """Run the last cell of a notebook in this process."""

    def execute(path, copy, values, place):
        book, printed = nbformat.read(path, as_version=4), io.StringIO()
        # papermill adds a cell of parameters
        place.enter(len(book.cells), len(book.cells))
        with contextlib.redirect_stdout(printed):
            exec(book.cells[-1].source, {"seeds": None, **values})
        book.cells[-1].outputs = [new_output("stream", text=printed.getvalue())]
        nbformat.write(book, copy)

    monkeypatch.setattr(jupyter_kernel, "execute", execute)


def run_one(**options):
    """Return the outcome of the only notebook, and the text of the index."""
    (outcome,), index = reproduce.reproduce("demo", progress=False, **options)
    return outcome, index.read_text()


@pytest.mark.slow
def test_reproduce_runs_changed_notebooks_only(place, without_kernel, capsys):
    """Cache pages by notebook and parameters; keep the page of the last good run beside that of a failure."""
    path = place("10_picky.ipynb", "assert seeds != [13]\nprint('seeds are', seeds)")
    former = path.read_bytes()
    good, _ = run_one()
    bad, _ = run_one(parameters={"seeds": [13]})
    other, _ = run_one(parameters={"seeds": [4]})
    again, index = run_one(parameters={"seeds": None})
    outcomes = (good, bad, other, again)
    statuses = ["done", "failed", "done", "up to date"]
    assert [o.status for o in outcomes] == statuses
    changes = ["", "seeds=[13]", "seeds=[4]", ""]
    assert [o.changed_parameters for o in outcomes] == changes
    assert (bad.page, bad.error) == (None, "AssertionError (cell 3)")
    assert good.page == again.page != other.page
    assert "seeds are None" in again.page.read_text()
    assert "seeds are [4]" in other.page.read_text()
    assert "10_picky (seeds=[13])" in index
    for page in (again.page, other.page, bad.failed):
        assert f'href="{page.name}"' in index
    assert index.count("earlier</td>") == 2

    place("10_picky.ipynb", "raise ValueError('<first>\\nlast')")
    for _ in range(2):
        bad, index = run_one()
        error = "ValueError: <first> last (cell 3)"
        assert (bad.status, bad.error) == ("failed", error)
        assert bad.page == good.page
        assert "seeds are None" in good.page.read_text()
        assert (
            "This run failed: ValueError: &lt;first&gt; last" in bad.failed.read_text()
        )
        assert 'href="10_picky.failed.html"' in index
        assert "failed: ValueError: &lt;first&gt; last (cell 3)</a>" in index
    path.write_bytes(former)  # the failure is over without a run
    again, _ = run_one()
    assert (again.status, again.page, again.failed) == ("up to date", good.page, None)
    assert not bad.failed.exists()
    place("10_picky.ipynb", "1 / 0")
    run_one()
    place("10_picky.ipynb", "print('new')")
    again, index = run_one()
    assert (again.status, again.failed, again.error) == ("done", None, "")
    assert not bad.failed.exists()
    assert "10_picky.failed.html" not in index

    capsys.readouterr()
    reproduce.reproduce("demo", parameters={"seeds": [5]})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "notebooks 0/1: 10_picky starts"
    assert lines[-1].startswith("notebooks 1/1: 10_picky done, ")


@pytest.mark.slow
def test_reproduce_reruns_when_user_data_changes(
    place, without_kernel, tmp_path, monkeypatch
):
    """Run again for other contents, times and files; try the data until there is an answer."""
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    # the files hold no data
    monkeypatch.setattr("cpt_lab.tasks.base.read_all_data", lambda recipe: None)
    graph = tmp_path / "my $frac$ graph"
    graph.mkdir()
    place("10_own.ipynb", "print('ran')", dataset="'digits-graph'")
    tried = []
    monkeypatch.setattr(
        reproduce, "try_", lambda *data, **options: tried.append((*data, options))
    )

    def run():
        outcome, index = run_one(number="10", dataset=f"{graph.name}/")
        assert re.fullmatch(r"10_own\.[a-zA-Z0-9-]+", outcome.page.stem)
        return outcome.status, index

    for change in (
        lambda: (graph / "edges.npy").write_bytes(b"one"),
        lambda: (graph / "edges.npy").write_bytes(b"two"),
        lambda: os.utime(graph / "edges.npy", (1, 1)),
        lambda: (graph / "feat.npy").write_bytes(b""),
    ):
        change()
        assert [run()[0], run()[0]] == ["done", "up to date"]
    assert tried == [(f"{graph.name}/", {"scale": "demo", "minutes": 5})] * 8

    answer = reproduce.runs_dir() / "try" / "graph-gcn-demo" / "answer.txt"
    answer.parent.mkdir(parents=True)
    answer.with_name("figure.png").write_bytes(b"drawn")
    for data, is_shown in (("another/", False), (f"{graph.name}/", True)):
        answer.write_text(f"{data}\n3 bits are enough\nBits: 3 do\n")
        _, page = run()
        for text in ("3 bits are enough", "index.html", "figure.png"):
            if text.endswith(("html", "png")):
                text = f"../../try/graph-gcn-demo/{text}"
            assert (text in page) == is_shown
    assert len(tried) == 9


@pytest.mark.slow
def test_reproduce_leaves_unchanged_index_alone(place, without_kernel, tmp_path):
    place("10_picky.ipynb", "print('fine')")
    run_one()
    index = tmp_path / "runs" / "reproduce" / "demo" / "index.html"
    index.write_text("left alone")
    assert run_one()[1] == "left alone"
    rows = tmp_path / "runs" / "demo" / "new.jsonl"
    rows.parent.mkdir(exist_ok=True)
    rows.write_text("")
    assert ">Notebooks</h2>" in run_one()[1]


@pytest.mark.slow
def test_reproduce_report_shows_rows_and_glossary(tmp_path, monkeypatch):
    with subplots(alt="evidence") as (figure, _):
        figure.suptitle("No cycle is better")
    monkeypatch.setattr(evidence_figures, "static_or_cycle", lambda: figure)
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    rows = (results_dir() / "image_digits.jsonl").read_text().splitlines()
    store = tmp_path / "demo" / "image.jsonl"
    store.parent.mkdir()
    store.write_text("\n".join(row for row in rows if '"resnet8_w8"' in row))
    index = reproduce._write_index(tmp_path, "demo", "", [], ["10"], is_final=False)
    assert 'id="bitops"' in (tmp_path / "glossary.html").read_text(encoding="utf-8")
    page = index.read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.index("No cycle is better") < page.index("resnet8_w8 on scikit-learn")
    assert not re.search(r'"https?://(cdn|unpkg)', page)


# --- kernels ----------------------------------------------------------------------------------------------------------

TRAINING_CELL = """
import time
from cpt_extras.progress import progress_bar
for _ in progress_bar('runs', range(2)): time.sleep(0.3)
"""
ENVIRONMENT_CELL = """
import os
from ipykernel.connect import get_connection_info
print(scale, seeds, os.environ['OMP_NUM_THREADS'], get_connection_info())
"""
PARAMETERS_CELL = """
from cpt_lessons.parameters import check_parameters
P = check_parameters(scale=scale, seeds=seeds)
"""


@pytest.mark.slow
def test_execute_runs_notebook_in_kernel(place, tmp_path, monkeypatch):
    """Run without network ports, follow progress bars, and reject parameters that papermill accepts."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shown = []

    class WatchedPlace(Place):
        def show(self, widget, text):
            super().show(widget, text)
            shown.append(str(self))

    path = place("10_a.ipynb", ENVIRONMENT_CELL, TRAINING_CELL, PARAMETERS_CELL)
    ran = tmp_path / "ran.ipynb"
    values = {"scale": "demo", "seeds": [3], "scael": "demo"}
    message = "this notebook has no parameter 'scael'; did you mean 'scale'? It has scale, seeds"
    with pytest.raises(papermill.PapermillExecutionError, match=re.escape(message)):
        jupyter_kernel.execute(path, ran, values, WatchedPlace("10_a"))
    assert any(re.search(r"10 a: training, \d of 2 runs done", x) for x in shown)

    book = nbformat.read(ran, as_version=4)
    (environment,) = [c for c in book.cells if c.source == ENVIRONMENT_CELL]
    printed = environment.outputs[0].text
    num_threads = max(1, usable_cores() // reproduce.AT_ONCE)
    assert printed.startswith(f"demo [3] {num_threads} ")
    assert '"transport": "ipc"' in printed
    (training,) = [c for c in book.cells if c.source == TRAINING_CELL]
    (bar,) = training.outputs  # and nothing on stderr
    assert bar.data["text/plain"].startswith("runs:")
    assert "application/vnd.jupyter.widget-view+json" in bar.data
    clean(book)
    assert training.outputs == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "failures", "error"),
    [
        ("smoke", [CellTimeoutError("late")] * 2, "cell limit of 900 s exceeded"),
        ("demo", [RuntimeError("lost.")] * 2, "RuntimeError: lost"),
        ("demo", [RuntimeError("lost")], ""),
    ],
)
def test_reproduce_retries_lost_kernel_once(
    scale, failures, error, place, monkeypatch, capsys
):
    place("10_a.ipynb", "print(1)")
    failures, limits = [*failures], []

    def run(path, copy, values, execution_timeout, **options):
        limits.append(execution_timeout)
        if failures:
            raise failures.pop(0)
        nbformat.write(nbformat.read(path, as_version=4), copy)

    monkeypatch.setattr(papermill, "execute_notebook", run)
    (outcome,), index = reproduce.reproduce(scale)
    assert limits == [900 if scale == "smoke" else None] * 2
    assert (outcome.status, outcome.error) == ("failed" if error else "done", error)
    assert error in index.read_text()
    first_error = error or "RuntimeError: lost"
    lines = re.sub(r", \d+ s", ", N s", capsys.readouterr().err).splitlines()
    end = f"failed, N s: {error}" if error else "done, N s"
    assert lines[0] == "notebooks 0/1: 10_a starts"
    assert lines[-2:] == [
        f"notebooks 0/1: 10_a: {first_error}; it is tried once more",
        f"notebooks 1/1: 10_a {end}",
    ]


REPRODUCE = """
import pathlib
from cpt_lab.commands import app
from cpt_lessons import commands, notebooks
notebooks.notebooks_dir = lambda: pathlib.Path({!r})
notebooks._committed_evidence = list
app(["reproduce", "--scale", "demo"])
"""
IGNORE_INTERRUPT = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
BEGIN = "import pathlib, time\npathlib.Path({!r}).touch()\ntime.sleep(300)"


@pytest.mark.slow
def test_reproduce_handles_interrupt_at_once(place, tmp_path):
    """Interrupt one kernel, kill another that ignores it, and start no third."""
    begun = [tmp_path / f"begun {number}" for number in (10, 11, 12)]
    place("10_deaf.ipynb", IGNORE_INTERRUPT + BEGIN.format(str(begun[0])))
    place("11_long.ipynb", BEGIN.format(str(begun[1])))
    place("12_waits.ipynb", BEGIN.format(str(begun[2])))
    code = REPRODUCE.format(str(tmp_path / "notebooks"))
    with (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as process,
        contextlib.ExitStack() as cleanup,
    ):
        cleanup.callback(process.kill)
        deadline = time.monotonic() + 240
        while not (begun[0].exists() and begun[1].exists()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        interrupt_time = time.monotonic()
        lines = iter(process.stderr.readline, "")
        answer = next(line for line in lines if line.startswith("stopping: "))
        assert time.monotonic() - interrupt_time < 10  # a second on an idle machine
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "press Ctrl-C again to stop at once" in answer
    assert time.monotonic() - interrupt_time < 60
    assert "stopped; the same command goes on from here" in rest
    assert not begun[2].exists()
    assert not [*(tmp_path / "runs/reproduce/demo").glob("1*")]


def test_stop_kills_kernels_at_second_interrupt(monkeypatch):
    """Stop waiting at a second Ctrl-C; a signal delivered twice counts once."""
    signals = []
    clock = iter([0.0, 0.0, 0.1, 0.2, 0.9, 1.0, 1.1])
    monkeypatch.setattr(reproduce.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        notebook_progress.os, "kill", lambda process, number: signals.append(number)
    )

    def interrupted(futures, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "wait", interrupted)
    running = Future()
    running.set_running_or_notify_cancel()
    waiting = Future()
    reproduce._stop([running, waiting], [Place("03_a", kernel=1)])
    assert signals == [signal.SIGINT, signal.SIGKILL]
    assert waiting.cancelled()
    assert next(clock) == 1.0


def test_progress_time_left_follows_measured_pace(monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(notebook_progress.time, "monotonic", lambda: clock)
    first, second = Place("01_a"), Place("02_b")
    progress = Progress(
        [first, second], {"01_a": 10.0, "02_b": 100.0}, at_once=2, is_shown=False
    )
    assert progress.seconds_left() == 100.0
    second.start_time = clock
    progress.record_end("01_a", "done", 20.0)  # twice as long as expected
    clock += 50.0
    assert progress.seconds_left() == 150.0
    clock += 500.0
    assert progress.seconds_left() is None  # nobody knows
    assert Progress([Place("03_c")], {}, 2, is_shown=False).seconds_left() is None


# --- copies, hand-outs and the first cell -----------------------------------------------------------------------------


def test_copy_notebooks_includes_linked_files(tmp_path):
    copies = copy_notebooks(tmp_path / "mine")
    assert [p.name for p in copies] == [p.name for p in notebooks()]
    parts = (
        "README.md data/results/image_digits.jsonl data/paper/claims.csv "
        "data/cards/digits.md solutions/00_solutions.py"
    )
    assert [
        part for part in parts.split() if not (tmp_path / "mine" / part).is_file()
    ] == []
    for copy, notebook in zip(copies, notebooks(), strict=True):
        cells = [nbformat.read(path, as_version=4).cells for path in (copy, notebook)]
        assert [c.id for c in cells[0]] == [c.id for c in cells[1]]
    for page in [*copies, *(tmp_path / "mine").glob("*.md")]:
        for link in re.findall(
            r"\]\(([\w./-]+\.(?:ipynb|md|py))", page.read_text(encoding="utf-8")
        ):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    copies[0].write_text("my answers")
    assert integrity([tmp_path / "mine/data/results/cycles_digits.jsonl"]).bare == 0
    refused(
        r"00_start_here\.ipynb is there already",
        copy_notebooks,
        tmp_path / "mine",
        error=FileExistsError,
    )
    assert copies[0].read_text() == "my answers"


def test_notebooks_hand_out_has_no_solutions(tmp_path, command):
    assert command("notebooks", "--copy", tmp_path / "class", "--hand-out")[0] == 0
    copies = sorted((tmp_path / "class").glob("*.ipynb"))
    assert [p.name for p in copies] == [p.name for p in notebooks()]
    assert not list((tmp_path / "class").rglob("*solutions*"))
    assert "Solutions" not in (tmp_path / "class" / "README.md").read_text()
    for copy, notebook in zip(copies, notebooks(), strict=True):
        assert not re.search(r"\b[Ss]olutions\b", copy.read_text(encoding="utf-8"))
        handed, whole = (nbformat.read(path, as_version=4) for path in (copy, notebook))
        nbformat.validate(handed)
        assert not any(
            c.outputs or c.execution_count
            for c in handed.cells
            if c.cell_type == "code"
        )
        assert [c.source for c in handed.cells if c.cell_type == "code"] == [
            c.source for c in whole.cells if c.cell_type == "code"
        ]


@pytest.fixture
def first_cell(tmp_path, monkeypatch):
    """Return a function that runs a notebook's first cell in a folder with files; it returns the magics."""
    monkeypatch.chdir(tmp_path)

    def run(number, *files):
        for name in files:
            (tmp_path / name).touch()
        magics, (path,) = [], notebooks(number)
        cells = nbformat.read(path, as_version=4).cells
        source = next(cell.source for cell in cells if cell.cell_type == "code")
        shell = SimpleNamespace(run_line_magic=lambda *line: magics.append(line))
        exec(source, {"get_ipython": lambda: shell})
        return magics

    return run


@pytest.fixture
def without_package(monkeypatch):
    """Simulate an interpreter without the package."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *given: None if name == "cpt_core" else find_spec(name, *given),
    )


@pytest.mark.parametrize(
    ("number", "files", "wheel"),
    [
        ("00", [WHEEL("0.1.0")], f"./{WHEEL('0.1.0')}[lessons]"),
        (
            "04",
            [WHEEL("0.1.0"), "other-1-py3-none-any.whl"],
            f"./{WHEEL('0.1.0')}[lessons,vision]",
        ),
        ("06", [WHEEL("0.2.0")], f"./{WHEEL('0.2.0')}[lessons,text]"),
    ],
)
def test_first_cell_installs_wheel_if_package_missing(
    number, files, wheel, first_cell, without_package
):
    assert first_cell(number, *files) == [("pip", f"install -q '{wheel}'")]


@pytest.mark.parametrize("files", [[], [WHEEL("0.9.0"), WHEEL("0.10.0")]])
def test_first_cell_without_one_wheel_explains(files, first_cell, without_package):
    message = r"put one file cpt_core-\*\.whl here, beside this notebook"
    with pytest.raises(AssertionError, match=message):
        first_cell("00", *files)


def test_first_cell_with_package_installs_no_wheel(first_cell):
    assert first_cell("00", WHEEL("0.1.0")) == []


# --- parameters, questions and answers --------------------------------------------------------------------------------


def test_notebooks_are_numbered_and_have_estimates():
    assert [p.name[:2] for p in notebooks()] == [f"{n:02}" for n in range(19)]
    assert notebooks("3") == notebooks("03")
    assert estimate("demo") >= estimate("demo", "01") > 0
    assert estimate("paper") is None


@pytest.mark.parametrize(("number", "num_sections"), [("01", 0), ("03", 1), (None, 6)])
def test_estimate_includes_report(number, num_sections):
    seconds = reproduce.expected("demo", notebooks(number)).values()
    report_seconds = (
        reproduce.REPORT_SECONDS + num_sections * reproduce.SECTION_CLAIMS_SECONDS
    )
    notebook_seconds = max(max(seconds), sum(seconds) / reproduce.AT_ONCE)
    assert estimate("demo", number) == notebook_seconds + report_seconds


@pytest.mark.slow
def test_reproduce_passes_dataset_to_notebooks_of_task(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "cpt_lab.tasks.base.read_all_data", lambda recipe: None
    )  # the files are none
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    for name in ("cifar-10-batches-py", "my-text", "my-pairs"):
        (tmp_path / name).mkdir()
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / "my-text" / name).touch()
    for name in ("train.csv", "test.csv"):
        (tmp_path / "my-pairs" / name).touch()
    np.savez(tmp_path / "my.npz", edge_index=np.zeros((2, 1), int))
    monkeypatch.setattr(reproduce, "_write_index", lambda *given: tmp_path)
    asked = {}

    def note(job, key, place):
        asked[job.notebook.name[:2]] = job.values
        return reproduce.NotebookOutcome(
            job.notebook.stem, "", "done", 0.0, job.folder / "x.html"
        )

    monkeypatch.setattr(reproduce, "_run", note)
    monkeypatch.setattr(
        reproduce,
        "try_",
        lambda data, **how: asked.setdefault("tried", []).append(data),
    )
    reproduce.reproduce(
        "demo",
        dataset="cifar10",
        parameters={"model": "resnet20", "seeds": [1]},
        progress=False,
    )
    assert asked["03"] == {
        "scale": "demo",
        "dataset": "cifar10",
        "model": "resnet20",
        "seeds": [1],
    }
    assert asked["05"] == {"scale": "demo", "seeds": [1]}  # keeps its own graph
    assert asked["06"] == {"scale": "demo", "seeds": [1]}
    reproduce.reproduce(
        "demo", "06", "my-text/", {"pairs": "my-pairs/"}, progress=False
    )
    assert asked["06"] == {"scale": "demo", "dataset": "my-text/", "pairs": "my-pairs/"}
    reproduce.reproduce("demo", "05", "my.npz", progress=False)
    assert asked["05"] == {"scale": "demo", "dataset": "my.npz"}
    for scale in ("smoke", "paper"):
        reproduce.reproduce(scale, "05", "my.npz", progress=False)
    assert asked["tried"] == [
        "my-text/",
        "my.npz",
    ]  # at demo scale, and not a named one
    refused(
        r"say which notebook 'my\.npz' is for",
        reproduce.reproduce,
        "demo",
        dataset="my.npz",
        progress=False,
    )
    with pytest.raises(
        ValueError,
        match="'ogbn-arxiv' is for another notebook: its task is 'graph', not 'image'",
    ):
        reproduce.reproduce("demo", "03", "ogbn-arxiv", progress=False)
    asked.clear()
    for number, dataset, given, message in (
        ("05", "nothere.npz", {}, r"there is no file or folder .*nothere\.npz"),
        ("04", "nothere/", {}, r"there is no file or folder .*nothere"),
        (
            "04",
            "my-text/",
            {},
            r"my-text is no data for this task \(detection\); it needs .*own-pictures\.md",
        ),
        ("03", "my.npz", {}, r"my\.npz is no data for this task \(image\)"),
        (
            "06",
            "my-text/",
            {"pairs": "my-text/"},
            r"my-text is no data for this task \(entailment\)",
        ),
        ("03", "cifar100", {}, "python -m cpt_lab download cifar100"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            reproduce.reproduce("paper", number, dataset, given, progress=False)
    assert asked == {}, "a notebook was started"


def test_report_lists_questions_and_findings_of_notebooks(tmp_path):
    line = "minus static 4: +1.20 [+0.40, +2.00] points, n = 5: above 0"
    beside = (
        "ER minus static 7: +0.20 [-0.40, +0.80] points, n = 5: cannot be told from 0"
    )
    few = "CR minus static 5: +0.20 [-0.40, +0.80] points, n = 2: fewer than 3 seeds say nothing"
    here = (
        "In this run: RR minus static 4: +1.20 [+0.40, +2.00] points, n = 5; not told apart: ER and static 7; "
        "too few seeds to tell: CR and static 5."
    )
    asks = "# 07\n\n**Question** (section 3 of the [paper](x)): do *few* bits do? And $2$? The paper says so."
    sums_up = "## Summary\n\n- On **digits** they do.\n- Elsewhere [not](y).\n\nMore."
    cells = [
        new_markdown_cell(asks),
        new_code_cell(
            "kept",
            outputs=[new_output("stream", text=f"CR {line}\n")],
            metadata={"tags": ["nbval-check-output"]},
        ),
        new_code_cell(
            "own",
            outputs=[
                new_output("stream", text=f"5 runs\nRR {line}\n{beside}\n{few}\n")
            ],
        ),
        new_markdown_cell(sums_up),
    ]
    book = nbformat.writes(new_notebook(cells=cells))
    for given, found in (
        ({}, f"On digits they do. Elsewhere not. {here}"),
        ({"seeds": [3]}, f"On digits they do. Elsewhere not. {here}"),
        ({"dataset": "my/"}, here),  # what the notebook sums up is of other data
    ):
        job = NotebookRun(tmp_path / "07_asks.ipynb", {}, given, tmp_path)
        job.keep("page", book, key="k", seconds=3.0)
        outcome = job.outcome("done")
        assert (outcome.question, outcome.answer) == ("Do few bits do? And 2?", found)
    page = report.write(tmp_path, "smoke", [outcome.index_entry()]).read_text()
    told = " ".join(re.sub("<.*?>", " ", page.split("</style>")[1]).split())
    assert "not corrected for several comparisons" in told
    assert (
        "notebook question answer time 07_asks (dataset=my/) Do few bits do? And 2? In this run: RR "
        in told
    )


def test_notebooks_state_question_and_summary(tmp_path):
    for path in notebooks():
        job = NotebookRun(path, {}, {}, tmp_path)
        job.keep("page", path.read_text(encoding="utf-8"), key="k", seconds=3.0)
        outcome = job.outcome("done")
        assert outcome.question.endswith("?"), path
        assert outcome.answer[0].isupper(), path
