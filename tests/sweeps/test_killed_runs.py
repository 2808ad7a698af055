"""Processes of runs: what they get, what remains of those that die anywhere, and signals that stop sweeps."""

import os
import pty
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import forkserver

import pytest
import torch
from helpers import refused, specs_of

from bench.kill_sweep import check_store, claims, holder
from cpt_lab import signals
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.paths import ROOT
from cpt_lab.resources import usable_cores
from cpt_lab.sweeps import process, stores, worker
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import StartError, supervise
from cpt_lab.sweeps.progress import Signals
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.sweeps.worker import Job, Outcome, run_all
from cpt_lab.training import train

pytestmark = [
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="process groups and /proc"),
]


@pytest.fixture
def store(tmp_path):
    return tmp_path / "rows.jsonl"


# --- kill and resume ------------------------------------------------------------------------------


class Killed(BaseException):
    """Exception that simulates the end of this process."""


def kill_here():
    raise Killed


def kill_process():
    os.kill(os.getpid(), signal.SIGKILL)


# Module and name of the function at whose start, half or end a run is killed, and what it leaves behind.
PLACES = {
    "before training": (worker, "training_steps", "start", "nothing"),
    "before a checkpoint": (train, "save_checkpoint", "start", "nothing"),
    "after a checkpoint": (train, "save_checkpoint", "end", "checkpoint"),
    "before the last evaluation": (train, "run_bitops", "start", "checkpoint"),
    "before the curve": (stores, "write_curve", "start", "checkpoint"),
    "before the row": (stores, "append_row", "start", "checkpoint"),
    "within the row": (stores, "_write_all", "half", "checkpoint"),
    "before the row is synced": (stores, "sync_open_file", "start", "row"),
    "after the row": (stores, "append_row", "end", "row"),
}


def kill_at(place, kill, set_attribute=setattr):
    """Kill at the next call of the function of a place."""
    module, name, moment, _ = PLACES[place]
    function = getattr(module, name)

    def call(*args, **options):
        if moment == "half":
            file, text = args
            function(file, text[: len(text) // 2])
        if moment == "end":
            function(*args, **options)
        kill()

    set_attribute(module, name, call)


def killed_run(place, job, should_stop, on_start):
    """Train in the process of a run until it is killed at a place."""
    kill_at(place, kill_process)
    run_all(job, should_stop, on_start)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["this process", "a process"])
@pytest.mark.parametrize("place", PLACES)
def test_run_killed_anywhere_resumes(place, host, store, calm, caplog, monkeypatch):
    """Lose no row, store none twice, and give the numbers of an undisturbed run."""
    spec, left = calm.specs[0], PLACES[place][3]
    job = Job(spec, store, SweepOptions(checkpoint_seconds=0.0))
    if host == "this process":
        with monkeypatch.context() as patch:
            kill_at(place, kill_here, patch.setattr)
            with pytest.raises(Killed):
                run_all(job)
    else:
        (outcome,) = supervise(job, work=partial(killed_run, place))
        assert outcome.row["status"] == ("ok" if left == "row" else "failed")

    caplog.set_level("INFO")
    options = {"workers": 0, "retry_failed": True, "checkpoint_seconds": 0.0}
    run_grid([spec], store, **options)
    check_store(store, {spec.key: calm.numbers[spec.key]})
    assert not list(store.parent.rglob("*.tmp"))
    assert ("goes on from step" in caplog.text) == (left == "checkpoint")


def end_by(number, job, stop, on_start):
    os.kill(os.getpid(), number)


def vanish(job, stop, on_start):
    os._exit(7)


DEATHS = [
    (vanish, ["ended with status 7 and no result"]),
    (
        partial(end_by, signal.SIGSEGV),
        ["ended by SIGSEGV", "Fatal Python error", "in end_by"],
    ),
    (
        partial(end_by, signal.SIGKILL),
        ["ended by SIGKILL (the system may have run out of memory)"],
    ),
]


@pytest.mark.parametrize(("work", "words"), DEATHS)
def test_supervise_stores_failure_of_dead_process(work, words, store):
    (outcome,) = supervise(Job(specs_of("CR")[0], store), work=work)
    assert outcome.row["status"] == "failed"
    assert [w for w in words if w not in outcome.row["error"]] == []
    assert stores.load_rows(store) == [outcome.row]


def hang(job, stop, on_start):
    on_start(job.spec.key)
    print("no step ever ends", flush=True)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("work", [hang, run_all])
def test_supervise_fails_run_at_timeout(work, store, monkeypatch):
    """Fail a run that hangs, and one that is too long and leaves its checkpoint."""
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5 if work is hang else 60)
    (spec,) = specs_of("CR", steps=100_000)
    job = Job(spec, store, SweepOptions(timeout=0.5))
    (outcome,) = supervise(job, work=work)
    assert outcome.row["error"].startswith("took longer than 0.5 s")
    assert ("no step ever ends" in outcome.row["error"]) == (work is hang)
    log = stores.place(store, "logs", spec.key).read_text()
    assert log.endswith("took longer than 0.5 s\n")
    has_checkpoint = stores.place(store, "checkpoints", spec.key).exists()
    assert has_checkpoint == (work is run_all)


class Unreadable:
    """Object that a new process cannot unpickle."""

    def __reduce__(self):
        return os._exit, (5,)


def test_supervise_stores_no_row_before_start(store):
    job = Job(specs_of("CR")[0], store)
    message = r"ended with status 5 before it had begun"
    refused(message, supervise, job, work=Unreadable(), error=StartError)
    assert not store.exists()
    assert issubclass(StartError, OSError), "commands end with one line"


# --- what a process gets --------------------------------------------------------------------------


def tell(job, stop, on_start):
    """Return what the process of a run knows."""
    known = {
        "word": os.environ.get("CPT_TEST_WORD"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "sharing": job.sharing,
    }
    return [Outcome(job.spec.key, "ran", known)]


@pytest.mark.slow
def test_run_process_gets_environment_gpu_and_cores(store, monkeypatch):
    """Pass the current environment, since the fork server has an older one."""
    (spec,) = specs_of("CR")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (outcome,) = supervise(Job(spec, store, gpu=1), work=tell)
    expected = {"word": None, "visible": "1", "threads": 1, "cores": usable_cores()}
    assert outcome.row == expected | {"sharing": 1}

    monkeypatch.setenv("CPT_TEST_WORD", "reached")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")  # what a cluster gave
    job = Job(spec, store, SweepOptions(threads=2), gpu=1, sharing=2)
    (outcome,) = supervise(job, work=tell)
    expected = {"word": "reached", "visible": "GPU-7", "threads": 2, "sharing": 2}
    assert outcome.row == expected | {"cores": max(1, usable_cores() // 2)}

    tasks = {f"cpt_lab.tasks.{name}" for name in EXPERIMENTS}
    assert tasks < set(forkserver._forkserver._preload_modules)  # seconds a run


@pytest.mark.slow
def test_run_process_gets_no_unset_variables(tmp_path):
    """Unset what the fork server was started with, and leave what imports have set there."""
    script = tmp_path / "sweep.py"
    script.write_text(UNSETTING_SWEEP)
    environment = os.environ | {"CPT_DATA_DIR": "old", "CPT_TEST_WORD": "old"}
    out = subprocess.check_output(
        [sys.executable, script, tmp_path], env=environment, text=True
    )
    before, after = (set(line.split(",")) for line in out.split())
    assert before - after == {"CPT_DATA_DIR", "CPT_TEST_WORD"}
    assert after - before == {"CPT_NEW_WORD"}
    assert {*process.ALLOCATOR, "TORCHINDUCTOR_CACHE_DIR"} <= after


UNSETTING_SWEEP = """
import os, sys
from pathlib import Path
from cpt_lab.experiments import designs
from cpt_lab.sweeps.process import supervise
from cpt_lab.sweeps.worker import Job, Outcome

def names(job, stop, on_start):
    return [Outcome(job.spec.key, "ran", sorted(os.environ))]

if __name__ == "__main__":
    spec, *_ = designs.quality_cost("smoke", schedules=["CR"], static_bits=[])
    job = Job(spec, Path(sys.argv[1]) / "rows.jsonl")
    print(",".join(supervise(job, work=names)[0].row))
    del os.environ["CPT_DATA_DIR"]
    os.environ.pop("CPT_TEST_WORD")
    os.environ["CPT_NEW_WORD"] = "new"
    print(",".join(supervise(job, work=names)[0].row))
"""


def test_fork_server_ignores_interrupts():
    process._context()
    with open(f"/proc/{forkserver._forkserver._forkserver_pid}/status") as file:
        status = file.read()
    masks = [int(status.split(n)[1].split()[0], 16) for n in ("SigBlk:", "SigIgn:")]
    assert (masks[0] | masks[1]) >> (signal.SIGINT - 1) & 1


# --- scripts that start sweeps --------------------------------------------------------------------

SCRIPT = """
import sys
from cpt_lab.experiments import designs
from cpt_lab.sweeps.sweep import run_grid
specs = designs.quality_cost("smoke", schedules=["CR"], static_bits=[], seeds=[0], steps=10, n_cycles=2)
print([row["status"] for row in run_grid(specs, sys.argv[1], workers=1)])
"""


def python(*words, **options):
    """Run Python on this checkout, and return the finished process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options |= {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, **options
    )


@pytest.mark.slow
def test_run_grid_names_missing_main_guard(tmp_path, store):
    script = tmp_path / "my script.py"
    script.write_text(SCRIPT)
    done = python(script, store)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert "nothing of it was stored" in last
    guard = 'put what the script does under `if __name__ == "__main__":`'
    assert f"{guard} in {script}" in last
    assert not store.exists()
    assert not (tmp_path / "rows.logs").exists()


def test_main_script_that_is_gone_is_not_imported(tmp_path, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    for name, is_hidden in (("<stdin>", True), ("gone.py", True), ("there.py", False)):
        (tmp_path / "there.py").touch()
        monkeypatch.setattr(main, "__file__", str(tmp_path / name), raising=False)
        with process._importable_main():
            assert hasattr(main, "__file__") != is_hidden
        assert main.__file__ == str(tmp_path / name)


def test_failed_start_names_script(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "run.py", raising=False)
    text = process._explain_failed_start(3)
    assert "ended with status 3 before it had begun" in text
    assert '`if __name__ == "__main__":` in run.py' in text
    monkeypatch.delattr(main, "__file__")
    assert "mend what it names, or take workers=0" in process._explain_failed_start(3)


# --- signals --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def default_signals():
    """Reset signal handlers to those of a program not started by nohup; children inherit them."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in signals.PASSED_ON
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, *signals.PASSED_ON])
def test_signals_repeated_stop_sweep_once(number, capsys):
    """Count signals that come at once as one; a later second Ctrl-C stops at once, other signals never do."""
    before = signal.getsignal(number)
    with Signals() as found:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert found.stop.is_set()
        assert not found.kill.is_set()
        found._stop_time -= 10  # seconds ago
        if number == signal.SIGINT:
            handle, error = found._handle, KeyboardInterrupt
            refused("stopped at once", handle, number, None, error=error)
        else:
            os.kill(os.getpid(), number)
        assert found.kill.is_set() == (number == signal.SIGINT)
    assert signal.getsignal(number) is before
    text = "stopping: the runs write their checkpoints"
    assert capsys.readouterr().err.count(text) == 1


def test_signals_keep_ignored_or_custom_handlers():
    """Keep SIGHUP ignored under nohup, and SIGUSR1 handlers of the user."""
    numbers = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    with Signals() as found:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (found.stop.is_set(), numbers) == (False, [signal.SIGUSR1])


def test_say_survives_closed_terminal():
    """Exit cleanly although Python flushes stderr at the end."""
    code = (
        "import os, sys; r, w = os.pipe(); os.dup2(w, 2); os.close(w)\n"
        "from cpt_lab.signals import say; os.close(r); say('a\\n'); say('b\\n'); sys.exit(130)"
    )
    assert python("-c", code).returncode == 130


def own_terminal():
    """Make the terminal on stdin the controlling terminal, so that its closing sends SIGHUP."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


WORDS = "run digits/mlp6 --scale demo --arms CR --seeds 0 1 --workers 1".split()
MAIN = "from cpt_lab.commands import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["Ctrl-C", "the terminal closes", "killed"])
def test_run_command_stopped_leaves_checkpoints(how, tmp_path, monkeypatch):
    """Write the checkpoint of the running run, begin no other, and end all processes."""
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    store = tmp_path / "demo" / "image.jsonl"
    ours, theirs = pty.openpty()
    has_terminal = how == "the terminal closes"
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    sweep = subprocess.Popen(
        [sys.executable, "-c", MAIN, *WORDS],
        start_new_session=True,
        preexec_fn=own_terminal if has_terminal else None,
        **(streams if has_terminal else {"stderr": subprocess.PIPE}),
    )
    os.close(theirs)
    deadline = time.monotonic() + 120
    runs = []
    while not runs and time.monotonic() < deadline:
        time.sleep(0.05)
        runs = list(filter(None, map(holder, claims(store))))
    time.sleep(0.5)
    if how == "Ctrl-C":
        os.killpg(sweep.pid, signal.SIGINT)
    elif how == "killed":
        sweep.kill()
    os.close(ours)
    _, error = sweep.communicate(timeout=120)
    while os.path.exists(f"/proc/{runs[0]}") and time.monotonic() < deadline:
        time.sleep(0.05)

    assert sweep.returncode == (-signal.SIGKILL if how == "killed" else 130)
    assert len(list((tmp_path / "demo" / "image.checkpoints").glob("*.pt"))) == 1
    assert [holder(claim) for claim in claims(store)] == [None]
    assert not os.path.exists(f"/proc/{runs[0]}")
    assert stores.load_rows(store) == []
    if how == "Ctrl-C":
        text = error.decode()
        assert "stopping: the runs write their checkpoints" in text
        assert "0 of 2 missing runs done; the same command goes on from here" in text
