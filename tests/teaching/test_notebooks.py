"""Runs of notebooks by ``cpt reproduce``: caching, failures, interrupts, pages, hand-outs and submissions."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
from helpers import refused
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from book.notebooks import clean
from cpt_lab.analysis import report
from cpt_lab.paths import results_dir
from cpt_lab.resources import usable_cores
from cpt_lab.sweeps.row_format import integrity
from cpt_lessons import jupyter_kernel, notebook_progress
from cpt_lessons import notebooks as reproduce
from cpt_lessons.notebook_progress import Place, Progress
from cpt_lessons.notebook_runs import NotebookRun
from cpt_lessons.notebooks import collected, copy_notebooks, estimate, notebooks

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Provide a function that places a notebook in a temporary folder, with a separate folder of runs."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "glossary.md").write_text("# Glossary\n\n## BitOps\n\nBit operations.\n")
    monkeypatch.setattr(reproduce, "notebooks_dir", lambda: folder)
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))

    def write(name, *code, **more):
        lines = [
            'scale = "smoke"',
            "seeds = None",
            *(f"{parameter} = {value}" for parameter, value in more.items()),
        ]
        parameters = new_code_cell("\n".join(lines), metadata={"tags": ["parameters"]})
        cells = [
            new_markdown_cell("# Title"),
            parameters,
            *(new_code_cell(c) for c in code),
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(
            new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / name
        )

    return write


@pytest.fixture
def quick(monkeypatch):
    """Run the last cell of a notebook without a kernel."""

    def execute(path, copy, values, place):
        book, said = nbformat.read(path, as_version=4), io.StringIO()
        place.enter(
            len(book.cells), len(book.cells)
        )  # with the cell of the parameters that papermill adds
        with contextlib.redirect_stdout(said):
            exec(book.cells[-1].source, {"seeds": None, **values})
        book.cells[-1].outputs = [new_output("stream", text=said.getvalue())]
        nbformat.write(book, copy)

    monkeypatch.setattr(jupyter_kernel, "execute", execute)


def test_reproduce_runs_changed_notebooks_only(place, monkeypatch, capsys):
    """Run changed notebooks in a kernel without network ports, and report progress."""
    monkeypatch.setattr(notebook_progress, "PLAIN_LINE_SECONDS", 0.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    listens = "from ipykernel.connect import get_connection_info\nprint(get_connection_info())"
    listens += "\nimport os\nprint('threads', os.environ['OMP_NUM_THREADS'])"
    bar = "for _ in tqdm(range(2), desc='runs', mininterval=0): time.sleep(1.2)"
    place(
        "07_small.ipynb",
        "print('scale is', scale, seeds)",
        listens,
        f"import time\nfrom tqdm.auto import tqdm\n{bar}",
    )
    outcomes, index = reproduce.reproduce("demo", parameters={"seeds": [3]})
    assert [(o.name, o.status) for o in outcomes] == [("07_small (seeds=[3])", "done")]
    page = outcomes[0].page.read_text()
    assert "scale is demo [3]" in page
    assert '"transport": "ipc"' in page
    assert f"threads {max(1, usable_cores() // reproduce.AT_ONCE)}\n" in page
    assert "0/2" not in page
    said = capsys.readouterr().err.splitlines()
    assert any(
        re.search(r"07 small: training, \d of 2 runs done", line) for line in said
    ), said
    assert any(" min left" in line for line in said)
    assert said[0] == "notebooks 0/1: 07_small starts"
    assert said[-1].startswith("notebooks 1/1: 07_small done, ")
    again, _ = reproduce.reproduce("demo", parameters={"seeds": [3]}, progress=False)
    assert [o.status for o in again] == ["up to date"]
    place("07_small.ipynb", "raise RuntimeError('<broken> here')")
    changed, index = reproduce.reproduce(
        "demo", parameters={"seeds": [3]}, progress=False
    )
    assert [(o.status, o.page) for o in changed] == [("failed", outcomes[0].page)]
    assert index.name == "index.html"
    assert "RuntimeError: &lt;broken&gt; here (cell 3)" in index.read_text()


def test_reproduce_failure_keeps_former_page(place, quick, tmp_path):
    place("07_picky.ipynb", "print('fine')")
    former = (tmp_path / "notebooks" / "07_picky.ipynb").read_bytes()
    (good,), _ = reproduce.reproduce("demo", progress=False)
    place("07_picky.ipynb", "raise ValueError('first\\nlast')")
    for _ in range(2):
        (bad,), index = reproduce.reproduce("demo", progress=False)
        assert (bad.status, bad.error) == ("failed", "ValueError: first last (cell 3)")
        assert bad.page == good.page
        assert "fine" in good.page.read_text()
        assert "This run failed: ValueError: first last" in bad.failed.read_text()
        links = re.findall('href="([^#"]*)"', index.read_text())
        assert (
            links
            == [good.page.name, bad.failed.name]
            == ["07_picky.html", "07_picky.failed.html"]
        )
        assert "failed: ValueError: first last (cell 3)</a>" in index.read_text()
    (tmp_path / "notebooks" / "07_picky.ipynb").write_bytes(
        former
    )  # the failure is over without a run
    (again,), _ = reproduce.reproduce("demo", progress=False)
    assert (again.status, again.page, again.failed) == ("up to date", good.page, None)
    assert not bad.failed.exists()
    place("07_picky.ipynb", "1 / 0")
    reproduce.reproduce("demo", progress=False)
    place("07_picky.ipynb", "print('new')")
    (again,), index = reproduce.reproduce("demo", progress=False)
    assert (again.status, again.failed, again.error) == ("done", None, "")
    assert not bad.failed.exists()
    assert "failed" not in index.read_text().split("</style>")[1]


def test_reproduce_page_per_parameter_values(place, quick):
    place("07_picky.ipynb", "assert seeds != [13]\nprint('seeds are', seeds)")
    (good,), _ = reproduce.reproduce("demo", progress=False)
    (bad,), _ = reproduce.reproduce("demo", parameters={"seeds": [13]}, progress=False)
    (other,), _ = reproduce.reproduce("demo", parameters={"seeds": [4]}, progress=False)
    (again,), index = reproduce.reproduce(
        "demo", parameters={"seeds": None}, progress=False
    )
    assert [o.status for o in (good, bad, other, again)] == [
        "done",
        "failed",
        "done",
        "up to date",
    ]
    assert (bad.page, bad.changed_parameters, bad.error) == (
        None,
        "seeds=[13]",
        "AssertionError (cell 3)",
    )
    assert (other.changed_parameters, again.changed_parameters) == ("seeds=[4]", "")
    assert good.page == again.page != other.page
    assert "seeds are None" in again.page.read_text()
    assert "seeds are [4]" in other.page.read_text()
    page = index.read_text()
    assert "07_picky (seeds=[13])" in page
    assert all(
        f'href="{shown.name}"' in page for shown in (again.page, other.page, bad.failed)
    )
    assert page.count("earlier</td>") == 2


def test_reproduce_reruns_when_user_data_changes(place, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(
        "cpt_lab.tasks.base.read_all_data", lambda recipe: None
    )  # the files are none
    own = tmp_path / "my $frac$ graph"
    own.mkdir()
    (own / "edges.npy").write_bytes(b"one")
    place("05_own.ipynb", "print('ran')", dataset="'digits-graph'")
    tried = []
    monkeypatch.setattr(
        reproduce, "try_", lambda *data, **how: tried.append((*data, how))
    )

    def status():
        (outcome,), _ = reproduce.reproduce(
            "demo", "05", f"{own.name}/", progress=False
        )
        assert re.fullmatch(r"05_own\.[a-zA-Z0-9-]+", outcome.page.stem)
        return outcome.status

    assert [status(), status()] == ["done", "up to date"]
    (own / "edges.npy").write_bytes(b"two")
    assert [status(), status()] == ["done", "up to date"]
    os.utime(own / "edges.npy", (1, 1))  # what has another time may be other data
    assert [status(), status()] == ["done", "up to date"]
    (own / "feat.npy").write_bytes(b"")
    assert [status(), status()] == ["done", "up to date"]
    assert (
        tried == [(f"{own.name}/", {"scale": "demo", "minutes": 5})] * 8
    )  # until there is an answer
    answer = reproduce.runs_dir() / "try" / "graph-gcn-demo" / "answer.txt"
    answer.parent.mkdir(parents=True)
    answer.with_name("figure.png").write_bytes(b"drawn")
    for of, shown in (("another/", False), (f"{own.name}/", True)):
        answer.write_text(f"{of}\n3 bits are enough\nBits: 3 do\n")
        page = reproduce.reproduce("demo", "05", f"{own.name}/", progress=False)[
            1
        ].read_text()
        assert (
            ("3 bits are enough" in page)
            == ('href="../../try/graph-gcn-demo/index.html"' in page)
            == shown
        )
        assert ("../../try/graph-gcn-demo/figure.png" in page) == shown
        assert len(tried) == 9


def test_reproduce_limits_cell_time_at_smoke_scale(place, monkeypatch, capfd):
    assert set(jupyter_kernel.LIMIT) == {"smoke"}
    monkeypatch.setattr(jupyter_kernel, "LIMIT", {"smoke": 1})
    place("07_slow.ipynb", "import time", "time.sleep(60)")
    outcomes, _ = reproduce.reproduce("smoke")
    said = capfd.readouterr()
    assert said.out == ""
    assert re.sub(r"\d+ s", "N s", said.err).splitlines() == [
        "notebooks 0/1: 07_slow starts",
        "notebooks 0/1: 07_slow: cell limit of N s exceeded (cell 4); it is tried once more",
        "notebooks 1/1: 07_slow failed, N s: cell limit of N s exceeded (cell 4)",
    ]
    assert [(o.status, o.error) for o in outcomes] == [
        ("failed", "cell limit of 1 s exceeded (cell 4)")
    ]


def test_reproduce_retries_dead_kernel_once(place, tmp_path):
    die = "import os, pathlib\ntries = pathlib.Path({!r})\nwith tries.open('a') as file:\n    file.write('x')"
    once, always = tmp_path / "once", tmp_path / "always"
    place(
        "07_once.ipynb",
        die.format(str(once)),
        "if tries.read_text() == 'x': os.kill(os.getpid(), 9)",
        "print('there')",
    )
    place("08_always.ipynb", die.format(str(always)), "os.kill(os.getpid(), 9)")
    outcomes, index = reproduce.reproduce("demo", progress=False)
    assert [o.status for o in outcomes] == ["done", "failed"]
    assert (once.read_text(), always.read_text()) == ("xx", "xx")
    assert outcomes[1].error.startswith("DeadKernelError")
    assert "DeadKernelError" in index.read_text()
    assert "there" in outcomes[0].page.read_text()


def test_reproduce_interrupt_stops_running_notebooks(
    place, tmp_path, monkeypatch, capfd
):
    for number in ("05", "06", "07"):
        begin = f"import time, pathlib\npathlib.Path({str(tmp_path / f'began {number}')!r}).touch()\n"
        place(f"{number}_long.ipynb", begin + "for _ in range(600): time.sleep(0.1)")

    def refresh(self):
        if len(list(tmp_path.glob("began *"))) == reproduce.AT_ONCE:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "refresh", refresh)
    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("demo", progress=False)
    out, said = capfd.readouterr()
    closed = "ERROR:tornado.general:Uncaught exception in ZMQStream callback"  # on a busy machine, of closed sockets
    assert out == ""
    assert said == "" or (said.startswith(closed) and "non-socket" in said)
    folder = tmp_path / "runs" / "reproduce" / "demo"
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.glob("began *")) == ["began 05", "began 06"]


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


def test_place_names_notebook_and_activity():
    place = Place("03_image_classification")
    assert str(place) == "03 image classification: starting"
    place.enter(7, 23)
    assert str(place) == "03 image classification: cell 7 of 23"
    place.show("a", "runs:\u2007 14%")
    place.show("b", 12.0)
    place.show("c", "12/85 [00:34&lt;01:00, 2 running, 0 failed]")
    assert str(place) == "03 image classification: training, 12 of 85 runs done"
    place.enter(8, 23)
    place.show("d", "steps:")
    place.show("e", " 3/9")
    assert str(place) == "03 image classification: steps: 3/9"


SLEEPS_THROUGH_SIGINT = """
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path({!r}).touch()
time.sleep(300)
"""
REPRODUCE = """
import pathlib, sys
from cpt_lab.commands import app
from cpt_lessons import commands, notebooks
notebooks.notebooks_dir = lambda: pathlib.Path({!r})
app(["reproduce", "--scale", "demo"])
"""


def test_reproduce_handles_interrupt_at_once(place, tmp_path):
    """Kill a kernel that ignores the interrupt."""
    place("07_deaf.ipynb", SLEEPS_THROUGH_SIGINT.format(str(tmp_path / "began")))
    place("08_waits.ipynb", f"import time\nprint({str(tmp_path)!r})\ntime.sleep(300)")
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
        while not (tmp_path / "began").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        lines = iter(process.stderr.readline, "")
        answer = next(line for line in lines if line.startswith("stopping: "))
        answered = time.monotonic()
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "press Ctrl-C again to stop at once" in answer
    assert answered - asked < 10  # a second, where nothing else runs
    assert time.monotonic() - asked < 60
    assert "stopped; the same command goes on from here" in rest


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


def test_collected_tabulates_submissions(tmp_path, command):
    def hand_in(name, *said):
        write(
            name,
            new_code_cell(
                outputs=[new_output("stream", text=f"{line}\n") for line in said]
            ),
        )

    def write(name, *cells):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        nbformat.write(new_notebook(cells=[*cells]), tmp_path / name)

    hand_in(
        "ada/03_images.ipynb",
        "exercise 03.1: correct: yes\nexercise 03.2: not yet. 5 is wanted, of 2 it makes 7",
    )
    hand_in(
        "ada/08.ipynb", "exercise 08.1: not attempted yet", "exercise 08.1: correct"
    )
    hand_in("ada/.ipynb_checkpoints/08.ipynb", "exercise 08.1: not yet")
    hand_in("bo.ipynb", "exercise 03.1: not attempted yet")
    hand_in("eve/empty.ipynb")
    write(
        "fay/03.ipynb",
        *(new_code_cell(f'exercises.check("03.{i}", answer)') for i in (1, 2)),
    )
    out = tmp_path / "table.csv"
    status, said, _ = command("collect", tmp_path, "--out", out)
    table = pd.read_csv(out, index_col="student")
    assert table.columns.tolist() == ["03.1", "03.2", "08.1"]
    assert table.loc["ada"].tolist() == ["correct", "not yet", "correct"]
    assert table.loc["bo"].tolist() == [
        "not attempted",
        "not handed in",
        "not handed in",
    ]
    assert table.loc["eve"].tolist() == ["not handed in"] * 3
    assert table.loc["fay"].tolist() == ["not run", "not run", "not handed in"]
    assert (status, "not attempted" in said) == (0, True)
    (tmp_path / "bo.ipynb").write_text("{")
    with pytest.warns(UserWarning, match=r"bo\.ipynb cannot be read"):
        table = collected(tmp_path)
    assert (table.loc["ada"].iloc[0], table.loc["bo"].iloc[0]) == (
        "correct",
        "cannot be read",
    )
    refused(
        r"there is no folder .*nobody",
        collected,
        tmp_path / "nobody",
        error=FileNotFoundError,
    )
    refused(
        r"no notebook below .* says anything of an exercise",
        collected,
        tmp_path / "eve",
    )


def test_notebook_rejects_unknown_parameter(place, tmp_path):
    """Reject parameters that papermill accepts, and remove progress bars from cleaned outputs."""
    check = "from cpt_lessons.parameters import check_parameters\nP = check_parameters(scale=scale, seeds=seeds)"
    place(
        "07_small.ipynb",
        "from cpt_extras.progress import progress_bar\nfor _ in progress_bar('runs', range(2)): pass",
        check,
    )
    message = "this notebook has no parameter 'scael'; did you mean 'scale'? It has scale, seeds"
    with pytest.raises(papermill.PapermillExecutionError, match=re.escape(message)):
        jupyter_kernel.execute(
            tmp_path / "notebooks" / "07_small.ipynb",
            tmp_path / "ran.ipynb",
            {"scael": "demo"},
        )
    book = nbformat.read(tmp_path / "ran.ipynb", as_version=4)
    (shown,) = [cell for cell in book.cells if "progress_bar('runs'" in cell.source]
    (bar,) = shown.outputs  # and nothing on stderr
    assert bar.data["text/plain"].startswith("runs:")
    assert "application/vnd.jupyter.widget-view+json" in bar.data
    clean(book)
    assert shown.outputs == []


def test_reproduce_report_shows_rows_and_glossary(place, quick, tmp_path):
    place("07_small.ipynb", "print(scale)")
    store = tmp_path / "runs" / "demo" / "image.jsonl"
    store.parent.mkdir(parents=True)
    store.write_text((results_dir() / "image_digits.jsonl").read_text())
    _, index = reproduce.reproduce("demo", progress=False)
    assert 'id="bitops"' in (index.parent / "glossary.html").read_text(encoding="utf-8")
    page = index.read_text()
    assert (
        page.count("data:image/png;base64,") == 4
    )  # the answer, and the three experiments of the committed rows
    assert "mlp6 on scikit-learn digits, 8 x 8, 600 steps, 4 cycles, q_min 4" in page
    assert "resnet8_w8 on scikit-learn digits" in page
    for text in (page, (index.parent / "07_small.html").read_text()):
        assert not [
            part
            for part in text.split('"')
            if part.startswith(("https://cdn", "http://cdn", "https://unpkg"))
        ]


def test_notebooks_are_numbered_and_have_estimates():
    assert [p.name[:2] for p in notebooks()] == [f"{n:02}" for n in range(19)]
    assert estimate("demo") >= estimate("demo", "01") > 0
    assert estimate("paper") is None


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


def test_reproduce_leaves_unchanged_index_alone(place, quick, tmp_path, monkeypatch):
    place("07_picky.ipynb", "print('fine')")
    _, index = reproduce.reproduce("demo", progress=False)
    page = index.read_text()
    assert page.index("At equal cost no cycle beats static precision") < page.index(
        ">Notebooks</h2>"
    )
    index.write_text("kept")
    _, again = reproduce.reproduce("demo", progress=False)
    assert again.read_text() == "kept"
    rows = tmp_path / "runs" / "demo" / "new.jsonl"
    rows.parent.mkdir(exist_ok=True)
    rows.write_text("")
    _, again = reproduce.reproduce("demo", progress=False)
    assert ">Notebooks</h2>" in again.read_text()
