"""Processes of runs: start failures are no results, and signals of terminals and batch systems stop sweeps."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import refused, specs_of

from bench.kill_sweep import claims, holder
from cpt_lab import signals
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.process import StartError, supervise
from cpt_lab.sweeps.progress import Signals
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.sweeps.worker import Job

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
SWEEP = """
import sys
from cpt_lab.experiments import designs
from cpt_lab.sweeps.sweep import run_grid
def main():
    specs = designs.quality_cost("smoke", schedules=["CR"], static_bits=[], seeds=[0], steps=10, n_cycles=2)
    print([row["status"] for row in run_grid(specs, sys.argv[1], workers=1)])
"""
GUARDED = 'if __name__ == "__main__":\n    main()\n'
NEVER_BEGUN = "the process of the run ended with status 1 and no result"


def python(*words, **how):
    """Run Python in a separate folder, and return the finished process."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, **pipes, **how
    )


@pytest.mark.slow
def test_run_grid_names_missing_main_guard(tmp_path):
    """Rerun the failed rows that earlier versions stored for scripts without a guard."""
    script, store = tmp_path / "my script.py", tmp_path / "rows.jsonl"
    (spec,) = specs_of("CR")
    old = {
        **stores.describe(spec),
        "status": "failed",
        "error": f"{NEVER_BEGUN}\n{NEVER_BEGUN}",
    }
    stores.append_row(store, old)
    before = store.read_bytes()
    script.write_text(f"{SWEEP}\nmain()\n")
    done = python(script, store)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "nothing of it was stored" in last
    assert (
        f'put what the script does under `if __name__ == "__main__":` in {script}'
        in last
    )
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert store.read_bytes() == before
    assert not (tmp_path / "rows.logs").exists()
    script.write_text(f"{SWEEP}\n{GUARDED}")
    done = python(script, store)
    assert (done.stdout, done.returncode) == ("['ok']\n", 0), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("top", ["raise KeyError('no argument')", "sys.exit(3)"])
def test_run_grid_names_unimportable_script(top, tmp_path):
    script, store = tmp_path / "script.py", tmp_path / "rows.jsonl"
    script.write_text(
        f'import sys\nif __name__ != "__main__":\n    {top}\n{SWEEP}\n{GUARDED}'
    )
    done = python(script, store)
    assert done.returncode == 1
    assert "before it had begun" in done.stderr
    assert f'`if __name__ == "__main__":` in {script}' in done.stderr.splitlines()[-1]
    assert not store.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stdin", "a script that is gone"])
def test_run_grid_runs_from_main_without_file(kind, tmp_path):
    text, store = f"{SWEEP}\nmain()\n", tmp_path / "rows.jsonl"
    if kind == "stdin":
        done = python("-", store, input=text)
    else:
        script = tmp_path / "script.py"
        script.write_text(f"import os\nos.remove(__file__)\n{text}")
        done = python(script, store)
    assert (done.stdout, done.returncode) == ("['ok']\n", 0), done.stderr


class Unreadable:
    """Object that a new process cannot unpickle."""

    def __reduce__(self):
        return os._exit, (5,)


def test_supervise_stores_no_row_before_start(tmp_path):
    job = Job(specs_of("CR")[0], tmp_path / "rows.jsonl")
    refused(
        r"ended with status 5 before it had begun",
        supervise,
        job,
        work=Unreadable(),
        error=StartError,
    )
    assert not job.store.exists()
    assert issubclass(StartError, OSError), "commands end with one line"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (NEVER_BEGUN, True),
        (f"{NEVER_BEGUN}\n", True),
        (f"{NEVER_BEGUN}\n{NEVER_BEGUN}\n", True),
        (
            f"{NEVER_BEGUN}\n12:00 abc: CR seed 0, cpu\n",
            False,
        ),  # its log says that it had begun
        ("the process of the run ended with status 7 and no result\n", False),
        ("the process of the run was ended by SIGKILL", False),
        ("", False),
    ],
)
def test_run_grid_retries_runs_that_never_began(error, again, tmp_path):
    (spec,), store = specs_of("CR"), tmp_path / "rows.jsonl"
    stores.append_row(
        store, {**stores.describe(spec), "status": "failed", "error": error}
    )
    (row,) = run_grid([spec], store, workers=0)
    assert row["status"] == ("ok" if again else "failed")


# --- signals -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def default_signals():
    """Reset signal handlers to those of a program not started by nohup; children inherit them."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in signals.PASSED_ON
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.PASSED_ON)
def test_signals_repeated_stop_sweep_once(number, capsys):
    before = signal.getsignal(number)
    with Signals() as found:
        os.kill(os.getpid(), number)
        assert found.stop.is_set()
        found._stop_time -= 10  # seconds ago
        os.kill(os.getpid(), number)
        assert not found.kill.is_set()
    assert signal.getsignal(number) is before
    assert (
        capsys.readouterr().err.count("stopping: the runs write their checkpoints") == 1
    )


def test_signals_keep_ignored_or_custom_handlers():
    """Keep SIGHUP ignored under nohup, and SIGUSR1 handlers of the user."""
    heard = []
    before = (
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1)),
    )
    try:
        with Signals() as found:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert (found.stop.is_set(), heard) == (False, [1])
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_say_survives_closed_terminal(tmp_path):
    """Exit cleanly although Python flushes stderr at the end."""
    code = "import os, sys; from cpt_lab.signals import say; os.close(r); say('a\\n'); say('b\\n'); sys.exit(130)"
    prefix = "import os; r, w = os.pipe(); os.dup2(w, 2); os.close(w); "
    done = python("-c", prefix + code)
    assert done.returncode == 130


WORDS = [
    "run",
    "digits/mlp6",
    "--scale",
    "demo",
    "--arms",
    "CR",
    "--seeds",
    "0",
    "--workers",
    "1",
]


def begun(folder):
    """Wait until a run of the sweep has been claimed; return the process that holds it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if found := [
            pid for pid in map(holder, claims(folder / "demo" / "image.jsonl")) if pid
        ]:
            return found[0]
    raise TimeoutError


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="process groups and /proc")
@pytest.mark.parametrize("how", ["SIGUSR1 to all", "the terminal closes"])
def test_run_command_stops_with_checkpoints_on_signals(how, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    ours, theirs = pty.openpty()
    text = tmp_path / "said"
    command = [
        sys.executable,
        "-c",
        "from cpt_lab.commands import main; main()",
        *WORDS,
    ]
    with text.open("w") as said:
        closes = how == "the terminal closes"
        streams = {
            name: theirs if closes else said for name in ("stdin", "stdout", "stderr")
        }
        sweep = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=own_terminal if closes else None,
            **streams,
        )
    os.close(theirs)
    run = begun(tmp_path)
    time.sleep(0.5)
    if closes:
        os.close(ours)
    else:
        os.killpg(sweep.pid, signal.SIGUSR1)
    assert sweep.wait(120) == 130
    assert not os.path.exists(f"/proc/{run}")
    assert len(list((tmp_path / "demo" / "image.checkpoints").glob("*.pt"))) == 1
    assert not [
        one
        for one in stores.load_rows(tmp_path / "demo" / "image.jsonl")
        if one["status"] == "failed"
    ]
    if not closes:
        os.close(ours)
        assert (
            "0 of 1 missing runs done; the same command goes on from here"
            in text.read_text()
        )


def own_terminal():
    """Make the terminal on stdin the controlling terminal, so that its closing sends SIGHUP."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
