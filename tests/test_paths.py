"""Locations of data, runs and results, in a checkout and in an installation."""

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
    """Simulate an installation from a wheel, in an empty working directory."""
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


def test_paths_in_checkout_are_independent_of_cwd(tmp_path, monkeypatch):
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


def test_paths_of_installation_are_user_folders(installed):
    assert paths.runs_dir() == installed / "runs"
    assert not paths.data_dir().is_relative_to(ROOT)
    assert paths.data_dir().name == "cpt_core"
    assert paths.results_dir() == ROOT / "cpt_lab" / "shipped" / "results"


def test_user_path_prefers_data_folder_over_cwd(
    installed,
):
    assert own_path("my-images/") == installed / "my-images"
    there = paths.data_dir() / "my-images"
    there.mkdir(parents=True)
    assert own_path("my-images/") == there
    assert own_path(str(installed)) == installed


def test_paths_follow_environment_variables(installed, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(installed / "a"))
    monkeypatch.setenv("CPT_DATA_DIR", str(installed / "b"))
    assert (paths.runs_dir(), paths.data_dir()) == (installed / "a", installed / "b")


@pytest.mark.parametrize("folder", [paths.runs_dir, paths.data_dir, kernels_dir])
def test_paths_expand_tilde_in_variables(folder, tmp_path, monkeypatch):
    """Expand it as in ``--export=CPT_RUNS_DIR=~/x`` of a batch script, or a file of variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(f"CPT_{folder.__name__.removesuffix('_dir').upper()}_DIR", "~/x")
    assert folder() == tmp_path / "x"


@pytest.fixture
def homeless(monkeypatch):
    """Remove home and name of the user, as for a numeric user in a container."""

    def unknown(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "CPT_KERNELS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_paths_exist_for_user_without_home(installed, homeless, monkeypatch):
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


def test_installation_in_repository_has_no_commit(installed):
    assert provenance.commit() == {"commit": None, "dirty": None}


def test_command_in_messages_runs_as_typed(tmp_path, monkeypatch):
    """Work without the environment on the path, from any folder."""
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
