"""Parts of ``bench.gpu``: the stages of each, by name, the most valuable first."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu import checks
from bench.gpu.models import (
    KINDS,
    MODELS,
    backend_context,
    baseline_of,
    is_quantised,
    session_of,
)
from bench.gpu.stages import (
    Options,
    Stage,
    describe_environment,
    finished_rows,
    read_rows,
)
from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import CHECKOUT
from cpt_lab.sweeps import stores
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.training.device import peak_memory
from cpt_lab.training.session import Session

WARM_UP = 5  # the captured kind records its step after three


def check_stages(options: Options) -> dict[str, Stage]:
    """Return the stages of the part "checks": tests that need CUDA, and comparisons with the CPU."""
    device = options.device
    stages: dict[str, Stage] = {
        "versions": partial(checks.versions, device),
        "tests": partial(_tests, options),
        "quantisers": partial(checks.quantisers, device),
    }
    for name in checks.LAYERS:
        stages[f"layer {name}"] = partial(checks.layer, name, device)
    for name in checks.LAYERS:
        stages[f"layer {name} on codes"] = partial(checks.layer, name, device, True)
    for name in checks.TASKS:
        stages[f"task {name}"] = partial(checks.task, name, device)
    return stages


def _tests(options: Options) -> dict[str, Any]:
    """Run the tests marked ``gpu``; in a rehearsal one other test."""
    assert CHECKOUT is not None
    selection = ["-m", "gpu", "tests"]
    if options.dry:
        selection = [
            "-m",
            "not gpu",
            "tests/graphs/test_graph.py",
            "-k",
            "test_graph_aggregate_matches_dense_matmul",
        ]
    elif importlib.util.find_spec("xdist"):
        selection += ["-n", "4"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-rfE",
        "-W",
        "ignore::DeprecationWarning",
        "--continue-on-collection-errors",
        *selection,
    ]
    process = subprocess.run(
        command,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=min(300.0, options.seconds),
    )
    return _summarise_tests(process)


def _summarise_tests(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return summary, failures and left-out test files of a run of pytest, and "failed" if it failed."""
    lines = process.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]

    # Test files for libraries that are not installed: pytest's list of errors does not give this reason.
    sections = re.split(
        r"^_+ ERROR collecting (\S+) _+$", process.stdout, flags=re.MULTILINE
    )
    files_without_library = {
        file
        for file, text in zip(sections[1::2], sections[2::2], strict=True)
        if "ModuleNotFoundError" in text
    }
    left_out = [line for line in failures if line.split()[1] in files_without_library]
    real_failures = [line for line in failures if line not in left_out]

    status = process.returncode
    has_failed = (
        bool(real_failures) or status not in (0, 1, 2) or (status > 0 and not left_out)
    )
    return {
        "summary": lines[-1] if lines else process.stderr[-500:],
        "failures": real_failures,
        "left_out": left_out,
        "failed": f"pytest ended with {status}" if has_failed else "",
    }


def step_stages(options: Options) -> dict[str, Stage]:
    """Return a stage for every model and variant of its step, ordered by model."""
    kinds = [kind for kind in KINDS if not (options.dry and "TF32" in kind)]
    make = speed if options.part == "speed" else memory
    return {
        f"{name}, {kind}": partial(make, name, kind, options)
        for name in MODELS
        for kind in kinds
    }


def stored_rows(options: Options) -> dict[str, dict[str, Any]]:
    """Return the finished rows of a part that were measured in this environment."""
    environment = describe_environment(options.device)
    return finished_rows(read_rows(options.rows), environment)


def _step(
    name: str, kind: str, options: Options
) -> tuple[Session, Callable[[], torch.Tensor]]:
    session = session_of(name, kind, options.device, options.dry)
    batches, lr = session.task.batches(0), session.lr_at(0, [])

    def step() -> torch.Tensor:
        with backend_context(kind):
            loss = session.step(next(batches), 1e-3 * lr)
        if is_quantised(kind):
            session.scheduler.step()
        return loss

    return session, step


def speed(name: str, kind: str, options: Options) -> dict[str, Any]:
    """Measure the milliseconds of a step, and their ratio to the float32 variant ``baseline_of``.

    Three times: of steps back to back, of a step on the device, and of the host that starts it.
    """
    session, step = _step(name, kind, options)
    for _ in range(WARM_UP):
        loss = step()
    times: dict[str, Any] = measure_step(step, 2 if options.dry else 20, options.device)
    times["failed"] = _find_fault(session, kind, loss)

    baseline = baseline_of(kind)
    row = stored_rows(options).get(f"{name}, {baseline}", {})
    if row.get("status") == "ok" and kind != baseline:
        ratio = times["ms"] / row["values"]["ms"]
        times |= {"baseline": baseline, "ratio": ratio}
    return times


def _find_fault(session: Session, kind: str, loss: torch.Tensor) -> str:
    """Return why a measurement is worthless; "" if it is valid."""
    if not bool(loss.isfinite()):
        return f"the loss is {float(loss)}"
    return (
        f"no step was captured: {session.uncaptured_reason}"
        if "captured" in kind and not session.captured
        else ""
    )


def measure_step(
    step: Callable[[], Any], repeats: int, device: str
) -> dict[str, float]:
    """Return medians of single steps, and the mean of steps back to back, in milliseconds."""
    cuda = device == "cuda"
    hosts, devices = [], []
    for _ in range(repeats):
        if cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
        began = time.perf_counter()
        step()
        hosts.append(1e3 * (time.perf_counter() - began))
        if cuda:
            end.record()
            torch.cuda.synchronize()
            devices.append(start.elapsed_time(end))
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    if cuda:
        torch.cuda.synchronize()
    together = 1e3 * (time.perf_counter() - began) / repeats
    middle = repeats // 2
    return {
        "ms": together,
        "device_ms": sorted(devices or hosts)[middle],
        "host_ms": sorted(hosts)[middle],
    }


def memory(name: str, kind: str, options: Options) -> dict[str, Any]:
    """Measure the peak memory of tensors and of the process, in MiB."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    session, step = _step(name, kind, options)
    for _ in range(WARM_UP):
        loss = step()
    peaks: dict[str, Any] = {
        "process_mb": peak_memory(options.device) / 2**20,
        "failed": _find_fault(session, kind, loss),
    }
    if options.device == "cuda":
        peaks["tensors_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return peaks


# --- several processes ----------------------------------------------------------------------------

PACKED = (
    "import sys; from bench.gpu.parts import train_packed; "
    "train_packed(sys.argv[1], sys.argv[2], float(sys.argv[3]))"
)
COUNTS = (1, 2, 4, 8, 16)


def packing_stages(options: Options) -> dict[str, Stage]:
    """Return stages of 1 to 16 processes that train the Penn Treebank LSTM at once."""
    kinds = (
        ("quantised",)
        if options.device == "cpu"
        else ("quantised captured", "quantised")
    )
    counts = COUNTS[:2] if options.dry else COUNTS
    return {
        f"{n} at a time, {kind}": partial(packing, n, kind, options)
        for kind in kinds
        for n in counts
    }


def train_packed(kind: str, device: str, seconds: float) -> None:
    """Train in one of several processes for some seconds, after a line from stdin; print the rate."""
    torch.set_num_threads(1)
    options = Options("packing", device, device == "cpu", seconds, None, Path())
    _, step = _step("PTB LSTM", kind, options)
    for _ in range(WARM_UP):
        float(step())
    print("ready", flush=True)
    sys.stdin.readline()
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for _ in range(10):
            loss = step()
        float(loss)  # waits for the device
        count += 10
    print(count / (time.monotonic() - began), flush=True)


def packing(count: int, kind: str, options: Options) -> dict[str, Any]:
    """Measure the steps per second of several processes together."""
    command = [
        sys.executable,
        "-c",
        PACKED,
        kind,
        options.device,
        "0.3" if options.dry else "10",
    ]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(
                    f"a process of {count} ended: {process.communicate()[1][-800:]}"
                )
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        rates = [float(process.communicate(timeout=120)[0]) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return {
        "steps_per_second": sum(rates),
        "slowest": min(rates),
        "fastest": max(rates),
    }


# --- runs -----------------------------------------------------------------------------------------

FIRST = ("CR", "RR", "LT", "static 8", "static 5")
STATIC = (8, 6, 5, 3)


def treebank(dry: bool) -> list[RunSpec]:
    """Return the runs of figure 7 (left), the most informative first.

    Five arms of seed 0 come first, then the other arms of seed 0, then the other seeds.
    """
    if dry:
        small = {"steps": 8, "n_cycles": 1, "valid_tokens": 200, "test_tokens": 200}
        specs = designs.quality_cost(
            "smoke", "pydoc", schedules=["CR"], static_bits=[8], seeds=[0], **small
        )
    else:
        specs = designs.quality_cost(
            "paper", "ptb", "lstm", static_bits=STATIC, q_max=[8]
        )
    return sorted(
        specs,
        key=lambda spec: (
            spec.seed,
            FIRST.index(spec.arm) if spec.arm in FIRST else len(FIRST),
        ),
    )


def evidence_stages(options: Options) -> dict[str, Stage]:
    """Return one stage with a new name in every call, so that it always runs: the store knows which runs are done."""
    return {
        f"runs until {time.strftime('%Y-%m-%d %H:%M:%S')}": partial(evidence, options)
    }


def evidence(options: Options) -> dict[str, Any]:
    """Run what the store lacks; at the time limit the runs write checkpoints, and the next call continues."""
    specs = treebank(options.dry)
    store = stores.store_path(specs[0].scale, specs[0].recipe.task)
    workers = 0 if options.dry else options.workers or best_packing(options)
    # as Ctrl-C does: asked while runs are at work, they stop at the end of a step
    timer = threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        run_grid(
            specs,
            store,
            workers=workers,
            device=options.device,
            checkpoint_seconds=30.0,
            retry_failed=True,
        )
    except KeyboardInterrupt:
        pass  # what is left is said below
    finally:
        timer.cancel()
    rows_by_key = {row["key"]: row for row in stores.load_rows(store)}
    rows = [rows_by_key[spec.key] for spec in specs if spec.key in rows_by_key]
    status = {s: sum(row["status"] == s for row in rows) for s in stores.STATUSES}
    failure = (
        {"failed": f"{status['failed']} runs failed; see the rows of {store}"}
        if status["failed"]
        else {}
    )
    quality_by_run = {
        f"{row['spec']['arm']} seed {row['spec']['seed']}": _quality(row)
        for row in rows
        if row["status"] == "ok"
    }
    counts = {
        "store": str(store),
        "runs": len(specs),
        "left": len(specs) - len(rows),
        "workers": workers,
        **status,
    }
    return {**counts, "perplexity": quality_by_run, **failure}


def _quality(row: dict[str, Any]) -> float:
    conditions = {
        "name": "perplexity",
        "split": "test",
        "when": "final",
        "precision": "q_max",
    }
    return next(
        m["value"]
        for m in row["metrics"]
        if all(m[k] == v for k, v in conditions.items())
    )


def best_packing(options: Options) -> int:
    """Return the fastest number of captured runs at a time; 4 if the part "packing" has not been run."""
    rows = stored_rows(replace(options, part="packing"))
    rates = {
        int(stage.split()[0]): row["values"]["steps_per_second"]
        for stage, row in rows.items()
        if row["status"] == "ok" and stage.endswith("captured")
    }
    return max(rates, key=rates.__getitem__) if rates else 4


PARTS: dict[str, Callable[[Options], dict[str, Stage]]] = {
    "checks": check_stages,
    "speed": step_stages,
    "memory": step_stages,
    "packing": packing_stages,
    "evidence": evidence_stages,
}
