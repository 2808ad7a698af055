"""Run one notebook in a kernel through papermill. Needs the extra "notebooks".

No cell has a limit of time but at smoke scale: a slow machine is no failure. Kernels listen on sockets of the file
system, for two that start at once can take each other's ports and then wait for ever; one that dies is tried once more.
"""

import os
import tempfile
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines

from cpt_lab.resources import usable_cores
from cpt_lessons.notebook_progress import AT_ONCE, Place

# Seconds for a kernel to come up on a loaded machine; alone it takes one or two.
START = 600

# Seconds for a cell, whose smoke runs take two: only a kernel that is lost needs as long.
LIMIT = {"smoke": 900}

# RuntimeError is what nbclient raises for a kernel that died and jupyter_client for one that does not come up.
KERNEL_FAILURES = (CellTimeoutError, RuntimeError)


class _Client(PapermillNotebookClient):
    """Notebook client that reports its position: the cell that runs, and the bars that tqdm shows in it."""

    def __init__(self, nb_man: Any, place: Place, **options: Any) -> None:
        super().__init__(nb_man, on_cell_start=self._enter, **options)
        self.place = place

    def start_new_kernel(self, **options: Any) -> None:
        """Start the kernel and note its process, so that it can be interrupted before it answers."""
        self.place.check_running()
        super().start_new_kernel(**options)
        self.place.kernel = getattr(self.km.provisioner, "pid", None)
        if self.place.stopped:  # meanwhile
            self.place.kill()

    def _enter(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self.place.check_running()
        is_code = [c.cell_type == "code" for c in self.nb.cells]
        self.place.enter(sum(is_code[: cell_index + 1]), sum(is_code))

    def handle_comm_msg(
        self, outs: list[Any], msg: dict[str, Any], cell_index: int
    ) -> None:
        super().handle_comm_msg(outs, msg, cell_index)
        state = msg["content"].get("data", {}).get("state", {})
        self.place.show(msg["content"]["comm_id"], state.get("value"))


class _Engine(NBClientEngine):
    """papermill's engine with our client."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, **options: Any
    ) -> None:
        # a short path: the system allows some 100 characters
        with tempfile.TemporaryDirectory(prefix="cpt-") as sockets:
            client = _Client(
                nb_man,
                options["place"],
                kernel_name=kernel_name,
                startup_timeout=START,
                timeout=options["execution_timeout"],
                extra_arguments=[
                    "--IPKernelApp.log_level=50"
                ],  # else it tells of its end when it is ended
            )
            client.config.KernelManager.update(transport="ipc", ip=f"{sockets}/kernel")
            # threads of several kernels that share cores wait for one another: ten times as long, and more
            share = {
                "OMP_NUM_THREADS": str(max(1, usable_cores() // AT_ONCE)),
                **os.environ,
            }
            share["JPY_SESSION_NAME"] = options[
                "place"
            ].notebook  # Ctrl-C is answered here, not by every kernel
            try:
                client.execute(
                    cwd=str(Path.cwd()), env=share
                )  # where relative paths of data begin
            finally:
                options[
                    "place"
                ].kernel = None  # its number may soon be that of another process


papermill_engines.register("cpt_core", _Engine)


def execute(
    path: Path, copy: Path | None, values: dict[str, Any], place: Place | None = None
) -> nbformat.NotebookNode:
    """Run a notebook with parameters, save it as ``copy`` and return it; a lost kernel is tried once more.

    Raises:
        PapermillExecutionError: for a cell that raises.
        CellTimeoutError, RuntimeError: for a kernel that was lost twice.
    """
    place = place or Place(path.stem)
    place.check_running()
    run = partial(
        papermill.execute_notebook,
        str(path),
        None if copy is None else str(copy),
        values,
        engine_name="cpt_core",
        progress_bar=False,
        kernel_name="python3",
        execution_timeout=LIMIT.get(values.get("scale", "smoke")),
        place=place,
    )
    try:
        return run()
    except KERNEL_FAILURES as failure:
        if place.stopped:  # the kernel was interrupted or killed on purpose
            raise
        place.messages.append(f"{reason(failure, place)}; it is tried once more")
        return run()


def reason(failure: Exception, place: Place) -> str:
    """Return why a notebook failed, in one line."""
    if isinstance(failure, papermill.PapermillExecutionError):
        message = f"{failure.ename}: {failure.evalue}"
    elif isinstance(failure, CellTimeoutError):
        message = f"cell limit of {LIMIT['smoke']} s exceeded"
    else:
        message = f"{type(failure).__name__}: {failure}"
    return shorten(message.rstrip(".: "), 400) + (
        f" (cell {place.cell})" if place.cell else ""
    )
