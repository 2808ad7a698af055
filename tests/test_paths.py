"""Locations of data, runs and results, in a checkout and in an installation."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refused
from platformdirs import user_cache_path

from cpt_extras.kernels.cpp.build import kernels_dir
from cpt_lab import paths, provenance
from cpt_lab.data.files import own_path

ROOT = Path(__file__).parents[1]


@pytest.fixture
def working_dir(tmp_path, monkeypatch):
    """Enter an empty folder, without the variables that name folders."""
    for name in ("CPT_RUNS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def installed(working_dir, tmp_path, monkeypatch):
    """Simulate an installation from a wheel, in an empty working directory."""

    def cache_path(name, **_):
        return tmp_path / "cache" / name

    monkeypatch.setattr(paths, "CHECKOUT", None)
    monkeypatch.setattr(provenance, "CHECKOUT", None)
    monkeypatch.setattr(paths, "user_cache_path", cache_path)
    return working_dir


def test_paths_in_checkout_are_independent_of_cwd(working_dir):
    assert paths.CHECKOUT == ROOT
    assert paths.runs_dir() == ROOT / "runs"
    assert paths.data_dir() == ROOT / "data" / "cache"
    for find in (
        paths.results_dir,
        paths.paper_dir,
        paths.cards_dir,
        paths.notebooks_dir,
    ):
        assert find().is_dir()
        assert find().is_relative_to(ROOT)
    # There is no such folder: it is missed where the user looks.
    assert own_path("my-images/") == working_dir / "my-images"


def test_paths_of_installation_are_user_folders(installed):
    assert paths.runs_dir() == installed / "runs"
    assert not paths.data_dir().is_relative_to(ROOT)
    assert paths.data_dir().name == "cpt_core"
    assert paths.results_dir() == ROOT / "cpt_lab" / "shipped" / "results"
    assert provenance.commit() == {"commit": None, "dirty": None}


def test_user_path_prefers_data_folder_over_cwd(installed):
    assert own_path("my-images/") == installed / "my-images"
    stored = paths.data_dir() / "my-images"
    stored.mkdir(parents=True)
    assert own_path("my-images/") == stored
    assert own_path(str(installed)) == installed


def test_paths_follow_environment_variables(installed, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(installed / "a"))
    monkeypatch.setenv("CPT_DATA_DIR", str(installed / "b"))
    assert (paths.runs_dir(), paths.data_dir()) == (installed / "a", installed / "b")


@pytest.mark.parametrize("folder", [paths.runs_dir, paths.data_dir, kernels_dir])
def test_paths_expand_tilde_in_variables(folder, tmp_path, monkeypatch):
    """Expand it as in ``--export=CPT_RUNS_DIR=~/x`` of a batch script, or a file of variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(f"CPT_{folder.__name__.upper()}", "~/x")
    assert folder() == tmp_path / "x"


@pytest.fixture
def homeless(monkeypatch):
    """Remove home and name of the user, as for a numeric user in a container."""

    def refuse(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "CPT_KERNELS_DIR", "CPT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", refuse)


def old_cache_path(name, **_):
    """Return the folder that older versions of platformdirs return."""
    return Path("~/.cache") / name


@pytest.mark.parametrize("cache_path", [user_cache_path, old_cache_path])
def test_paths_exist_for_user_without_home(
    cache_path, installed, homeless, monkeypatch
):
    monkeypatch.setattr(paths, "user_cache_path", cache_path)
    assert paths.data_dir() == installed / "data" / "cache"
    assert str(kernels_dir()).startswith("~")  # no folder; another takes its place
    monkeypatch.setenv("CPT_DATA_DIR", "~/data")
    message = "CPT_DATA_DIR=~/data: this user has no home folder; give the whole path"
    refused(message, paths.data_dir)


@pytest.mark.slow
def test_command_in_messages_runs_as_typed(working_dir):
    """Run it in a shell without the environment on the path, from any folder."""
    done = subprocess.run(
        paths.command("--help"),
        shell=True,
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "download" in done.stdout


def test_command_in_messages_is_short_nearby(monkeypatch):
    folder = Path(sys.executable).parents[2]
    monkeypatch.chdir(folder)
    python = Path(sys.executable).relative_to(folder)
    assert paths.command("plan") == f"{python} -m cpt_lab plan"
