"""Timing of training steps on this device, with the memory of a run: measured in seconds, on random data, and cached.

>>> measure(spec).seconds_per_step  # doctest: +SKIP
0.0021
"""

import hashlib
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from cpt_extras.cpu_info import cpu
from cpt_extras.files import write_text
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import runs_dir
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.training.device import (
    device_name,
    host_memory,
    peak_memory,
    resolve_device,
)

if TYPE_CHECKING:
    from cpt_lab.sweeps.worker import Job, Outcome

MEASURING_SECONDS = 1.0  # time to measure one recipe, if its steps are that quick
VERSION = 5  # version of the method: cached measurements of another version are ignored
CUDA_CONTEXT_BYTES = 600 * 2**20  # memory of a CUDA process before its first tensor


@dataclass(frozen=True)
class Calibration:
    """Time per step and memory of a run of one recipe on one device."""

    seconds_per_step: float  # of training, on one CPU thread or one GPU; evaluation and reading images are not in it
    peak_memory: int  # bytes, see ``training.device``
    host_memory: int  # bytes that its process takes of the machine's memory
    checkpoint: int  # bytes on disk
    macs: int  # forward multiply-accumulates of one step, as convention "paper" counts them
    measured: float  # when, in seconds since 1970


def cached_timing(spec: RunSpec, device: str = "auto") -> Calibration | None:
    """Return the cached measurement of a recipe on this machine; None if ``measure`` has not run."""
    measurement = _cache(runs_dir() / "calibration.json").get(_key(spec, device))
    return Calibration(**measurement) if measurement else None


def measure(spec: RunSpec, device: str = "auto") -> Calibration:
    """Measure a few training steps of a recipe in a new process.

    Measurements are cached in ``runs/calibration.json``, by recipe, device, processor, threads and version of torch; a
    folder that cannot be written is a warning.

    Raises:
        RuntimeError: when the steps fail, with the reason.
    """
    # Imported here, so that cached measurements are read without the modules that train.
    from cpt_lab.sweeps.process import supervise
    from cpt_lab.sweeps.worker import Job

    path = runs_dir() / "calibration.json"
    with tempfile.TemporaryDirectory() as folder:
        job = Job(spec, Path(folder) / "calibration.jsonl", SweepOptions(device=device))
        outcome = supervise(job, work=_measure)[0]
    measurement = outcome.measurement or dict[str, Any](outcome.row or {})
    if "error" in measurement:
        raise RuntimeError(
            f"{spec.recipe.model} on {spec.recipe.dataset} does not run here: {measurement['error']}"
        )
    timing = Calibration(**measurement)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            timings = {**_cache(path), _key(spec, device): asdict(timing)}
            write_text(path, json.dumps(timings, indent=1))
    except OSError as error:
        warnings.warn(
            f"measurements cannot be kept in {path.parent}: {error.strerror or error}",
            stacklevel=2,
        )
    return timing


def _cache(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: the steps are measured again
        return {}


def runs_per_gpu(
    on_gpu: int, gpu_memory: int, on_host: int, memory: int, cores: int
) -> int:
    """Return how many runs share a GPU: at most one per CPU core, within 90 % of GPU memory and host memory.

    Args:
        on_gpu: bytes of GPU memory of a run, without its CUDA context.
        gpu_memory: bytes of the GPU.
        on_host: bytes of host memory of the process of a run.
        memory: bytes of host memory for the runs of this GPU.
        cores: CPU cores for the runs of this GPU.

    >>> runs_per_gpu(2 * 2**30, 24 * 2**30, on_host=3 * 2**30, memory=64 * 2**30, cores=16)
    8
    """
    fitting = min(gpu_memory / (on_gpu + CUDA_CONTEXT_BYTES), memory / on_host)
    return max(1, min(int(0.9 * fitting), cores))


def _key(spec: RunSpec, device: str) -> str:
    """Return the cache key of a recipe on a device: a hash of everything that changes the time of a step."""
    where = (
        f"{device_name(resolve_device(device, spec))} {cpu()} {SweepOptions().threads}"
    )
    recipe = json.dumps(spec.to_dict()["recipe"], sort_keys=True)
    return hashlib.sha256(
        f"{VERSION} {recipe} {where} {torch.__version__}".encode()
    ).hexdigest()[:16]


def _measure(
    job: "Job", should_stop: Callable[[], bool], on_start: Callable[[str], None]
) -> "list[Outcome]":
    from cpt_lab.sweeps.worker import Outcome

    try:
        device = resolve_device(job.options.device, job.spec)
        measurement = asdict(_steps(job.spec, device))
    except Exception as error:
        measurement = {"error": f"{type(error).__name__}: {error}"}
    return [Outcome(job.spec.key, "ran", measurement=measurement)]


def _steps(spec: RunSpec, device: str) -> Calibration:
    """Measure steps of whole batches on a GPU or of quick models; else steps of 8 samples, and scale the time."""
    batch = spec.recipe.batch  # 0 is a full graph
    small_batch = batch if device == "cuda" else min(batch, 8)
    timing = _steps_of(spec, device, small_batch)
    if small_batch == batch:
        return timing

    if timing.seconds_per_step * batch / small_batch < MEASURING_SECONDS:
        return _steps_of(spec, device, batch)

    factor = batch / small_batch
    return replace(
        timing,
        seconds_per_step=timing.seconds_per_step * factor,
        macs=round(timing.macs * factor),
    )


def _steps_of(spec: RunSpec, device: str, batch: int) -> Calibration:
    """Measure steps with a batch size."""
    from cpt_core.bitops.plan import count_bitops
    from cpt_core.quantization.scheduler import precision
    from cpt_lab.tasks.base import load_task_class
    from cpt_lab.training.session import Session

    spec = replace(spec, recipe=replace(spec.recipe, batch=batch))
    session = Session(load_task_class(spec), spec, device, stand_in=True)
    first, lr = next(session.task.batches(0)), session.lr_at(0, [])

    def step() -> float:
        start_time = time.monotonic()
        loss = float(session.step(first, lr))  # waits for the end of the step on a GPU
        if not math.isfinite(loss):
            raise ArithmeticError("the loss of random data is not finite")
        return time.monotonic() - start_time

    times: list[float] = []
    with precision(session.model, "q_max"):  # one precision for all steps
        step()  # the first step allocates memory
        while (len(times) < 3 and sum(times) < MEASURING_SECONDS) or (
            len(times) < 200 and sum(times) < MEASURING_SECONDS / 3
        ):
            times.append(step())
    states = [session.model.state_dict(), *session.optimizer.state.values()]
    tensors = [
        v for state in states for v in state.values() if isinstance(v, torch.Tensor)
    ]
    return Calibration(
        seconds_per_step=median(times),
        peak_memory=peak_memory(device),
        host_memory=host_memory(),
        checkpoint=sum(t.numel() * t.element_size() for t in tensors),
        macs=count_bitops(
            session.model, session.task.inputs(first), convention="paper"
        ).forward_macs,
        measured=time.time(),
    )
