"""Where things are, in a checkout and in an installation."""

import subprocess
import sys
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from cpt_extras.kernels.cpp.build import kernels_dir
from cpt_lab import paths, provenance
from cpt_lab.data.files import own_path

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if the package had come from a wheel, in an empty working directory."""
    monkeypatch.setattr(paths, "CHECKOUT", None)
    monkeypatch.setattr(provenance, "CHECKOUT", None)
    for name in ("CPT_RUNS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        paths, "user_cache_path", lambda name, **_: tmp_path / "cache" / name
    )
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_in_a_checkout_all_lies_in_its_folders_wherever_a_program_starts(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("CPT_RUNS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert paths.CHECKOUT == ROOT
    assert (paths.runs_dir(), paths.data_dir()) == (
        ROOT / "runs",
        ROOT / "data" / "cache",
    )
    for folder in (
        paths.results_dir(),
        paths.paper_dir(),
        paths.cards_dir(),
        paths.notebooks_dir(),
    ):
        assert folder.is_dir()
        assert folder.is_relative_to(ROOT)
    assert (
        own_path("my-images/") == tmp_path / "my-images"
    )  # there is none: it is missed where one looks


def test_an_installation_writes_to_the_users_folders(installed):
    assert paths.runs_dir() == installed / "runs"
    assert not paths.data_dir().is_relative_to(ROOT)
    assert paths.data_dir().name == "cpt_core"
    assert paths.results_dir() == ROOT / "cpt_lab" / "shipped" / "results"


def test_paths_of_the_users_are_looked_up_in_the_data_folder_then_in_the_working_directory(
    installed,
):
    assert own_path("my-images/") == installed / "my-images"
    there = paths.data_dir() / "my-images"
    there.mkdir(parents=True)
    assert own_path("my-images/") == there
    assert own_path(str(installed)) == installed


def test_variables_name_other_folders(installed, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(installed / "a"))
    monkeypatch.setenv("CPT_DATA_DIR", str(installed / "b"))
    assert (paths.runs_dir(), paths.data_dir()) == (installed / "a", installed / "b")


@pytest.mark.parametrize("folder", [paths.runs_dir, paths.data_dir, kernels_dir])
def test_a_tilde_that_no_shell_has_read_is_the_home(folder, tmp_path, monkeypatch):
    """As in a batch script's ``--export=CPT_RUNS_DIR=~/x``, or a file of variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(f"CPT_{folder.__name__.removesuffix('_dir').upper()}_DIR", "~/x")
    assert folder() == tmp_path / "x"


@pytest.fixture
def homeless(monkeypatch):
    """Take home and name from the user, as of a number in a container."""

    def unknown(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "CPT_KERNELS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_a_user_without_a_home_has_folders(installed, homeless, monkeypatch):
    for cache in (user_cache_path, lambda name, **_: Path("~/.cache") / name):
        monkeypatch.setattr(paths, "user_cache_path", cache)
        assert paths.data_dir() == installed / "data" / "cache"
    assert str(kernels_dir()).startswith("~"), (
        "which is no folder; another takes its place"
    )
    monkeypatch.setenv("CPT_DATA_DIR", "~/data")
    with pytest.raises(
        ValueError,
        match="CPT_DATA_DIR=~/data: this user has no home folder; give the whole path",
    ):
        paths.data_dir()


def test_an_installation_has_no_commit_even_inside_a_repository(installed):
    assert provenance.commit() == {"commit": None, "dirty": None}


def test_commands_in_messages_work_as_they_are_typed(tmp_path, monkeypatch):
    """Without the environment on the path, and wherever one is."""
    for folder in (tmp_path, Path(sys.executable).parents[2]):
        monkeypatch.chdir(folder)
        surroundings = {"PATH": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            paths.command("--help"),
            shell=True,
            capture_output=True,
            text=True,
            env=surroundings,
        )
        assert done.returncode == 0, done.stderr
        assert "download" in done.stdout
    assert (
        paths.command("plan")
        == f"{Path(sys.executable).relative_to(Path.cwd())} -m cpt_lab plan"
    )
