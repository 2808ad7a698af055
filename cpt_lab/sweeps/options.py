"""Options of a sweep: one value that is passed on from the command line to the process of every run."""

from collections.abc import Callable
from dataclasses import dataclass

from cpt_core.validation import check_choice, check_int, check_types
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import is_comparable
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import never_began
from cpt_lab.training.device import DEVICES

EXECUTORS = ("local", "dask")
MAX_WORKERS = 1024  # workers or threads: torch crashes where a process cannot have as many threads as it is told


@dataclass(frozen=True)
class SweepOptions:
    """The options of ``run_grid``; ValueError for a wrong value.

    Attributes:
        executor: "local" for the cores or GPUs of this machine; "dask" for a cluster (needs the extra "cluster").
        workers: processes at a time; 0 runs all in this one. None takes as many as the CPU cores or the memory
            of the GPUs allow. With ``scheduler`` the cluster decides.
        threads: CPU threads of a run; small networks are faster on one. Results depend on it in the last digits.
        device: "auto" takes CUDA where there is one at paper scale, the CPU at the others, whose networks are too small
            to gain by it; or "cpu", "cuda". Smoke scale is always on the CPU.
        per_gpu: runs that share a GPU; None takes as many as fit, measured before they start (one on a cluster that
            is there already).
        scheduler: address of a Dask scheduler such as "tcp://10.0.0.5:8786"; None starts a cluster on this machine.
        together: runs of one recipe and seed that train side by side in a process, to the same rows; None takes up to
            11 on a CPU where that is faster, at smoke and demo scale.
        timeout: seconds after which a run is failed; not with ``workers=0``.
        retry_failed: run specs again whose newest row says "failed"; they go on from their last checkpoint.
        rerun_old: run specs again whose newest row was made with other numerics, see docs/sweeps.md; the old rows stay
            in the file, and the new ones count.
        checkpoint_seconds: time between checkpoints of a run.
        progress: show a bar with what is done and how long the rest takes; None shows it to people only.
        on_step: ``on_step(spec, step, loss)`` after every step of every run; only with ``workers=0``.
    """

    executor: str = "local"
    workers: int | None = None
    threads: int = 1
    device: str = "auto"
    per_gpu: int | None = None
    scheduler: str | None = None
    together: int | None = None
    timeout: float | None = None
    retry_failed: bool = False
    rerun_old: bool = False
    checkpoint_seconds: float = 60.0
    progress: bool | None = None
    on_step: Callable[[RunSpec, int, float], None] | None = None

    def accepts(self, row: ResultRow) -> bool:
        """Return whether a stored row counts as the result of its run, so that it is not run again."""
        if row["status"] == "failed":
            return not (self.retry_failed or never_began(row))
        return is_comparable(row) or not self.rerun_old

    def __post_init__(self) -> None:
        check_choice("executor", self.executor, EXECUTORS)
        check_choice("device", self.device, DEVICES)
        check_types(type(self), vars(self))
        for name, minimum in (
            ("workers", 0),
            ("threads", 1),
            ("per_gpu", 1),
            ("together", 1),
        ):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, minimum, MAX_WORKERS)
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(
                f"timeout must be more than 0 seconds; got {self.timeout!r}"
            )
        if self.timeout is not None and (self.together or 1) > 1:
            raise ValueError(
                f"timeout={self.timeout} is of a run alone in its process; got together={self.together}"
            )
        if not self.checkpoint_seconds >= 0:
            raise ValueError(
                f"checkpoint_seconds must be 0 or more; got {self.checkpoint_seconds!r}"
            )
        if self.scheduler is not None and self.executor != "dask":
            raise ValueError(
                f"scheduler={self.scheduler!r} is for executor 'dask', not {self.executor!r}"
            )
        if self.scheduler is not None and self.workers is not None:
            raise ValueError(
                f"workers={self.workers} is for this machine; the cluster at {self.scheduler} has its own"
            )
        if self.workers == 0 and self.executor == "dask":
            raise ValueError(
                "workers=0 runs everything in this process; executor 'dask' needs at least 1"
            )
        if self.workers != 0 and self.on_step is not None:
            raise ValueError(
                f"on_step is called in this process, which needs workers=0; got workers={self.workers}"
            )
        if self.workers == 0 and self.timeout is not None:
            raise ValueError(
                f"timeout={self.timeout} needs runs in processes of their own; got workers=0"
            )
