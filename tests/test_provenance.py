"""Provenance of rows: processor, machine, versions and commit."""

import os
import re
import shutil
import warnings

import pytest
import torch
from helpers import run_command

from cpt_extras import cpu_info
from cpt_lab import provenance
from cpt_lab.resources import MachineWarning

# --- machine --------------------------------------------------------------------------------------

CPU_INFO = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 207
model name	: Some Processor
stepping	: 2
flags		: fpu sse2 avx2 fma avx512f amx_tile

processor	: 1
model		: 999
"""


def test_cpu_has_model_and_wide_instructions(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(CPU_INFO)
    monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "cpuinfo")
    assert cpu_info.cpu() == {
        "cpu": "Some Processor, cpu family 6, model 207, stepping 2",
        "instructions": ["avx2", "fma", "avx512f", "amx_tile"],
    }


def test_cpu_of_unknown_system_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "none")
    result = cpu_info.cpu()
    assert result["cpu"]
    assert result["instructions"] == []


def test_machine_has_threads_switches_and_libraries(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    result = provenance.machine()
    assert result["threads"] == torch.get_num_threads()
    assert result["switches"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "MKL_CBWR" not in result["switches"]
    assert result["onednn"]
    assert result["onednn"] in torch.__config__.show()


def test_versions_cover_imported_libraries(monkeypatch):
    monkeypatch.setitem(provenance.RECORDED_LIBRARIES, "pretended", "torch")
    monkeypatch.setitem(provenance.RECORDED_LIBRARIES, "absent", "no_such_module")
    result = provenance.versions()
    full = torch.__version__
    assert result["torch"] in (full, full.partition("+")[0])
    assert result["pretended"] == "not installed"
    assert "absent" not in result


# --- commit ---------------------------------------------------------------------------------------


def git(folder, *words):
    """Run git in a folder, without repository variables of this test's environment."""
    plain = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    settings = {
        "user.name": "x",
        "user.email": "x@x",
        "protocol.file.allow": "always",
        "safe.directory": "*",
    }
    options = [part for item in settings.items() for part in ("-c", "=".join(item))]
    return run_command("git", *options, "-C", folder, *words, env=plain).strip()


def make_repository(folder):
    """Make a repository with one commit of all files and a new one; return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text(folder.name)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", folder.name)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a repository, and pretend that it is the checkout."""
    folder = tmp_path / "checkout"
    make_repository(folder)
    monkeypatch.setattr(provenance, "CHECKOUT", folder)
    return folder


def as_repository(folder, monkeypatch):
    return folder


def as_worktree(folder, monkeypatch):
    git(folder, "worktree", "add", "-q", folder.parent / "tree")
    return folder.parent / "tree"


def as_submodule(folder, monkeypatch):
    above = folder.parent / "above"
    make_repository(above)
    git(above, "submodule", "--quiet", "add", folder, "inner")
    return above / "inner"


def as_somebody_else(folder, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 12345, 12345)
    return folder


def in_a_hook(folder, monkeypatch):
    """Set the repository variables that git gives its hooks and aliases."""
    other = folder.parent / "other"
    make_repository(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    return folder


def with_damaged_settings(folder, monkeypatch):
    """Set a home that belongs to a different user or is damaged."""
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (folder.parent / ".gitconfig").write_text("[damaged")
    return folder


def with_ceiling(folder, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.bare")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    return folder


@pytest.mark.parametrize(
    "kind",
    [
        as_repository,
        as_worktree,
        as_submodule,
        as_somebody_else,
        in_a_hook,
        with_damaged_settings,
        with_ceiling,
    ],
)
def test_find_commit_of_checkout(kind, checkout, monkeypatch):
    name = git(checkout, "rev-parse", "HEAD")
    folder = kind(checkout, monkeypatch)
    monkeypatch.setattr(provenance, "CHECKOUT", folder)
    assert provenance.find_commit() == (name, False, "")
    assert provenance.commit() == {"commit": name, "dirty": False}
    (folder / "file").write_text("two")
    assert provenance.commit() == {"commit": name, "dirty": True}


def no_repository(folder, monkeypatch):
    shutil.rmtree(folder / ".git")


def empty_repository(folder, monkeypatch):
    """Create it inside an unrelated repository."""
    no_repository(folder, monkeypatch)
    (folder / ".git").mkdir()
    make_repository(folder.parent)


def lost_worktree(folder, monkeypatch):
    no_repository(folder, monkeypatch)
    (folder / ".git").write_text("gitdir: /nowhere/.git/worktrees/this\n")


def without_git(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))


def without_commits(folder, monkeypatch):
    no_repository(folder, monkeypatch)
    git(folder, "init", "-q")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (no_repository, "is no repository: there is no .git in it"),
        (empty_repository, r"checkout/.git is no repository, and git takes that of .*"),
        (lost_worktree, "git cannot read .*: not a git repository: /nowhere"),
        (without_git, "git is not installed"),
        (without_commits, "git cannot read .*HEAD"),
    ],
)
def test_find_commit_gives_reason_without_commit(kind, reason, checkout, monkeypatch):
    kind(checkout, monkeypatch)
    result = provenance.find_commit()
    assert (result.name, result.dirty) == (None, None)
    assert re.search(reason, result.reason), result.reason
    monkeypatch.setattr(provenance, "_has_warned_of_commit", False)
    message = r"rows name no commit \(null\): .*cpt doctor"
    with pytest.warns(MachineWarning, match=message):
        assert provenance.commit() == {"commit": None, "dirty": None}
    with warnings.catch_warnings(action="error"):
        provenance.commit()


def test_commit_is_dirty_for_changes_except_rows(tmp_path, monkeypatch):
    rows, card = tmp_path / "data" / "results" / "x.jsonl", tmp_path / "data" / "card"
    rows.parent.mkdir(parents=True)
    rows.write_text("one\n")
    card.write_text("one")
    name = make_repository(tmp_path)
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    clean = {"commit": name, "dirty": False}
    assert provenance.commit() == clean
    (tmp_path / "new").write_text("not tracked")
    rows.write_text("one\ntwo\n")
    assert provenance.commit() == clean
    card.write_text("two")
    assert provenance.commit() == {**clean, "dirty": True}
