"""What all tests share."""

import atexit
import csv
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import WITH_CUDA
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from cpt_extras.kernels.backend import backend
from cpt_extras.kernels.cpp import build

torch.set_num_threads(1)

# The same examples in every run, and no folder of found ones beside the sources.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites golden files."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files of tests/golden with what the tests produce",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with the file of that name in tests/golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path} differs"

    return compare


def pytest_configure(config: pytest.Config) -> None:
    """Let nbval's kernels listen on sockets of the file system: two that start at once can take each other's ports."""
    if not config.getoption("nbval_lax", False):
        return
    import nbval.kernel

    manager = nbval.kernel.KernelManager
    folder = tempfile.TemporaryDirectory(
        prefix="cpt-"
    )  # a short path: the system allows some 100 characters
    atexit.register(
        folder.cleanup
    )  # a worker of xdist leaves its configuration as it is
    nbval.kernel.KernelManager = lambda **how: manager(
        transport="ipc", ip=f"{folder.name}/kernel", **how
    )


# Files whose tests share a costly fixture, such as the processes of torchrun.
UNDIVIDED_FILES = (
    "analysis/test_deficit_dates.py",
    "analysis/test_report.py",
    "integrations/test_exported_programs.py",
    "integrations/test_processes.py",
    "test_book.py",
    "test_wheel.py",
)


class TestScheduling(LoadScopeScheduling):
    """Distribution of single tests to processes; some files and the cells of a notebook stay together."""

    def _split_scope(self, nodeid: str) -> str:
        for ending in ("ipynb", *UNDIVIDED_FILES):
            before, separator, _ = nodeid.partition(f"{ending}::")
            if separator:
                return before + ending
        return nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TestScheduling:
    """Return the distribution of tests for ``-n``."""
    return TestScheduling(config, log)


def _is_short(item: pytest.Item) -> bool:
    """Return whether a test is neither a cell of a notebook nor marked slow."""
    return item.path.suffix != ".ipynb" and not item.get_closest_marker("slow")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin with what takes long, so that at the end no process waits; leave out what needs a device."""
    items.sort(key=_is_short)
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("gpu")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Return the folder of the reference values, or that of CPT_REFERENCE_DIR."""
    return Path(
        os.environ.get("CPT_REFERENCE_DIR")
        or Path(__file__).parent / "reference" / "data"
    )


@pytest.fixture(scope="session")
def reference_macs(reference_dir: Path) -> dict[str, dict[str, str]]:
    """Return the rows of the reference's forward passes, by model."""
    with (reference_dir / "flops.csv").open() as file:
        return {row["model"]: row for row in csv.DictReader(file)}


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty data folder."""
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs ``cpt`` and returns its status, stdout and stderr."""
    from cpt_lab import commands

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cpt", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            commands.main()
        output = capsys.readouterr()
        return end.value.code or 0, output.out, output.err

    return run


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=WITH_CUDA)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield torch.device(request.param)


@pytest.fixture(scope="session")
def cpp_kernels() -> None:
    """Skips where there is no C++ compiler, or another backend is forced; where there is one, they must be active."""
    active = backend()
    if active.cpu != "cpp":
        assert os.environ.get("CPT_KERNELS") or build.compiler() is None, str(active)
        pytest.skip(f"on a CPU: {active.cpu} ({active.reasons['cpu']})")
