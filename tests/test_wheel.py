"""Wheel and source distribution: complete, and usable away from the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import nbformat
import pytest
from helpers import run_command

import cpt_core
from cpt_extras.kernels.cpp.build import kernels_dir
from cpt_extras.optional_libraries import install_hint

pytestmark = pytest.mark.weekly

ROOT = Path(__file__).parents[1]
NAME = f"cpt_core-{cpt_core.__version__}"

# Made by machines; a copy without them is what a fresh clone holds.
MADE = ".git .venv build dist *.egg-info __pycache__ .*_cache .hypothesis .ipynb_checkpoints runs cache".split()

# What only notebooks need; an installation without extras has none of these.
EXTRA = "papermill nbformat nbclient nbconvert ipykernel IPython jupyter_client"

BLOCK = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ.get('CPT_BLOCKED', '').split()))\n"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build the source distribution from a clean copy and the wheel from that; return both."""
    place = tmp_path_factory.mktemp("built")
    shutil.copytree(
        ROOT, place / "copy", ignore=shutil.ignore_patterns(*MADE), symlinks=True
    )
    for made in (
        "runs/demo/image.jsonl",
        "data/cache/cifar.bin",
        "data/results/x.jsonl.lock",
    ):  # must stay out
        (place / "copy" / made).parent.mkdir(parents=True, exist_ok=True)
        (place / "copy" / made).write_text("{}")
    backend = (
        "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    )
    dist = place / "dist"
    for what, where in (
        ("build_sdist", place / "copy"),
        ("build_wheel", place / "unpacked" / NAME),
    ):
        command = [sys.executable, "-c", backend, what, dist]
        run_command(*command, cwd=where)
        if what == "build_sdist":
            with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
                archive.extractall(place / "unpacked", filter="data")
    return dist / f"{NAME}.tar.gz", dist / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="session")
def installed(built, tmp_path_factory):
    """Install the wheel into an environment with the dependencies and no second copy of the package."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place)
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    )
    python = place / "bin" / "python"
    run_command(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        built[1],
    )
    # Files of a folder named here are found, but not its .pth files, so no editable installation.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (packages / "sitecustomize.py").write_text(BLOCK)
    return place, packages


@pytest.fixture
def cpt(installed, tmp_path, monkeypatch):
    """Return a function that runs an installed command in an empty folder and returns its output."""
    environment, packages = installed
    folder = tmp_path / "empty"
    folder.mkdir()
    for name in ("PYTHONPATH", "CPT_RUNS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "CPT_KERNELS_DIR", str(kernels_dir())
    )  # those of the same sources are not built again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(
        "JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter")
    )  # nbconvert's templates
    before = sorted(packages.glob("cpt_*/**/*"))

    def run(*words, status=0, blocked=""):
        command = [environment / "bin" / "cpt", *words]
        env = {**os.environ, "CPT_BLOCKED": blocked}
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.folder, run.python = folder, environment / "bin" / "python"
    yield run
    assert sorted(packages.glob("cpt_*/**/*")) == before, (
        "something was written beside the package"
    )


# --- what is in them ------------------------------------------------------------------------------


def test_wheel_contains_package_and_data_only(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    places = {
        "data/cards": "cards",
        "data/paper": "paper",
        "data/results": "results",
        "notebooks": "notebooks",
    }
    places |= {"notebooks/solutions": "solutions", "notebooks/sweeps": "sweeps"}
    for place, shipped in places.items():
        for path in (ROOT / place).iterdir():
            if path.suffix in (
                ".md",
                ".csv",
                ".json",
                ".jsonl",
                ".ipynb",
                ".py",
                ".yaml",
            ):
                assert f"cpt_lab/shipped/{shipped}/{path.name}" in names
    for path in ROOT.glob("cpt_*/**/*"):
        if (
            path.is_file()
            and path.suffix != ".pyc"
            and ".egg-info" not in path.parent.name
        ):  # which builds leave here
            assert path.relative_to(ROOT).as_posix() in names
    assert "cpt_core/py.typed" in names
    assert {name.split("/")[0] for name in names} == {
        "cpt_core",
        "cpt_extras",
        "cpt_lab",
        "cpt_lessons",
        f"{NAME}.dist-info",
    }
    assert not [
        name
        for name in names
        if "cache" in name or "runs/" in name or name.endswith(".lock")
    ]


def test_sdist_contains_all_tracked_files(built):
    with tarfile.open(built[0]) as archive:
        held = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    assert not [
        name
        for name in held
        if name.startswith(("runs", "data/cache")) or name.endswith(".jsonl.lock")
    ]
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True
    )
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert (
        not {name for name in done.stdout.splitlines() if (ROOT / name).exists()} - held
    )


# --- the installed package ------------------------------------------------------------------------


def test_wheel_runs_without_extras(cpt):
    where = "import cpt_core, cpt_lab.paths as p; print(cpt_core.__file__, p.CHECKOUT, p.data_dir(), p.results_dir())"
    package, checkout, data, results = map(
        Path, run_command(cpt.python, "-c", where, cwd=cpt.folder).split()
    )
    assert package.is_relative_to(cpt.python.parents[1])
    assert str(checkout) == "None"
    assert data == cpt.folder.parent / "cache" / "cpt_core"
    said = cpt(
        "run",
        "digits/mlp6",
        "--scale",
        "smoke",
        "--workers",
        "0",
        "--arms",
        "CR",
        blocked=EXTRA,
    )
    assert f"rows in {cpt.folder / 'runs' / 'smoke' / 'image.jsonl'}" in said
    assert "1 done" in cpt("plan", "digits/mlp6", "--scale", "smoke", blocked=EXTRA)
    # the report of all takes three times as long
    rows = results / "image_cifar10_jpeg.jsonl"
    assert f"report: {cpt.folder / 'runs' / 'report.html'}" in cpt(
        "report", str(rows), blocked=EXTRA
    )
    page = (cpt.folder / "runs" / "report.html").read_text()
    assert rows.name in page
    assert "confirmed, exact" in page  # a claim that needs no rows
    assert "data:image/png;base64," in page
    said = cpt(
        "reproduce", "--notebook", "00", "--scale", "smoke", status=2, blocked=EXTRA
    )
    assert said.splitlines()[-1] == (
        f"error: papermill cannot be imported; {install_hint('notebooks')}"
    )


def test_wheel_runs_copied_notebooks(cpt):
    cpt("notebooks", "--copy", "mine", blocked=EXTRA)
    mine = cpt.folder / "mine"
    assert (mine / "data" / "results" / "bands.json").is_file()
    assert (mine / "solutions" / "00_solutions.py").is_file()
    assert (mine / "sweeps" / "03_cifar10_resnet74.yaml").is_file()
    cpt("reproduce", "--notebook", "01", "--scale", "smoke")
    assert (cpt.folder / "runs" / "reproduce" / "smoke" / "01_schedules.html").is_file()
    asks = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "import cpt_core, cpt_lab.paths as p\nprint(cpt_core.__file__, p.runs_dir())"
            )
        ],
        metadata={
            "kernelspec": {
                "name": "python3",
                "display_name": "Python 3",
                "language": "python",
            }
        },
    )
    nbformat.write(asks, mine / "asks.ipynb")
    run = "import papermill; papermill.execute_notebook('asks.ipynb', 'asked.ipynb', progress_bar=False)"
    run_command(cpt.python, "-c", run, cwd=mine)
    (output,) = nbformat.read(mine / "asked.ipynb", as_version=4).cells[0].outputs
    package, runs = map(Path, output.text.split())
    assert package.is_relative_to(cpt.python.parents[1])
    assert runs == mine / "runs"
