"""The C++ kernels are built once, wherever that is possible, and what is active is said."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cpt_core as cpt
from cpt_extras.kernels import backend as module
from cpt_extras.kernels import operators
from cpt_extras.kernels.cpp import build

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of kernels, which nothing has asked for yet."""
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Make a shell script the compiler; in it, $2 is where the library goes."""

    def use(text):
        script = tmp_path / "c++"
        script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{text}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


@pytest.fixture
def fake(cpp_kernels, tmp_path, compiler):
    """A compiler that copies the library that is there already, and keeps count."""
    built, count = Path(cpt.backend().why["cpu"].removeprefix(f"{build.capability()}, ")), tmp_path / "count"
    assert built.is_file()
    compiler(f'echo built >> {count}\nsleep 0.3; cp {built} "$2"')
    return count


def test_the_name_of_the_library_holds_every_source():
    root = Path(cpt.__file__).parents[1]
    assert set(build.SOURCES) == {p for kind in ("cpp", "h", "cu") for p in root.glob(f"cpt_*/**/*.{kind}")}
    assert build.SOURCES[0].suffix == ".cpp"
    assert len(build.SOURCES) > 5


@pytest.fixture
def loaded(undecided, monkeypatch):
    """A list that gets the libraries that would be loaded."""
    found = []
    monkeypatch.setattr(build, "_load", found.append)
    return found


OTHER_PROCESS = """
import os, sys, torch
import cpt_core as cpt
cpt.quantize_, cpt.QuantConfig, cpt.PrecisionScheduler
assert not os.path.exists(os.environ["CPT_KERNELS_DIR"]), "something is built at import"
open(sys.argv[2], "w").close()
torch.load(sys.argv[1], weights_only=False)
from cpt_extras.kernels import operators
assert operators.gradient_node, "no kernels have come with the model"
print(cpt.backend())
"""


@pytest.fixture
def stored(cpp_kernels, tmp_path):
    """A quantised model in a file."""
    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with cpt.precision(model, 4):
        torch.save(model, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_two_processes_at_once_build_once_and_a_third_builds_nothing(
    fake, stored, loaded, cache, tmp_path, monkeypatch
):
    """The other one has imported the package, and loads a model; it has the toolkit of CUDA, and no device."""
    ready, env = tmp_path / "ready", os.environ | {"CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", OTHER_PROCESS, stored, ready]
    pipes, root = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}, Path(__file__).parents[2]
    with subprocess.Popen(command, text=True, cwd=root, env=env, **pipes) as other:
        while not ready.exists() and other.poll() is None:
            time.sleep(0.01)
        assert cpt.backend().cpu == "cpp"
        out = other.communicate()[0]
    assert (other.returncode, "on a CPU: cpp" in out, len(out.splitlines())) == (0, True, 3), out  # no warning
    monkeypatch.setattr(module, "_active", None)
    assert cpt.backend().cpu == "cpp"
    assert loaded == list(cache.glob("*.so")) * 2
    assert fake.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_to(fake, loaded, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "file" / "cache"))
    assert cpt.backend().cpu == "cpp"
    assert "built for this process alone" in cpt.backend().why["cpu"]
    assert len(loaded) == 1


@pytest.fixture
def planted(fake, cache):
    """A library of somebody else in the place of the one that would be built; returns where."""
    library = cache / Path(cpt.backend().why["cpu"].split(", ")[-1]).name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"planted")
    digest = hashlib.sha256(b"planted").hexdigest()
    library.with_suffix(".sha256").write_text(digest)  # who writes the one can write the other
    return library


NOBODY = 65534
OPEN = {
    "a folder like /tmp": (lambda file: file.parent.chmod(0o1777), r"cache can be written to by others \(mode 1777\)"),
    "a folder above": (lambda file: file.parents[1].chmod(0o777), r"can be written to by others \(mode 777\)"),
    "a file that others may write": (lambda file: file.chmod(0o666), r"\.so can be written to by others"),
    "a link": (lambda file: file.rename(file.parent / "x") and file.symlink_to("x"), r"\.so can be written"),
    "a folder of another user": (lambda file: os.chown(file.parent, NOBODY, -1), "cache belongs to another user"),
    "a file of another user": (lambda file: os.chown(file, NOBODY, -1), r"\.so belongs to another user"),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_others_could_have_written_is_known(planted, name):
    if "another user" in name and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    assert build.open_to_others(planted) == ""
    OPEN[name][0](planted)
    assert re.search(OPEN[name][1], build.open_to_others(planted))


@pytest.mark.parametrize(
    ("number", "name", "members", "safe"),
    [
        (100, "me", [], True),  # most systems make every user a group
        (100, "me", ["me"], True),
        (100, "me", ["you"], False),
        (100, "staff", [], False),
        (101, "me", [], False),
        (None, "me", [], False),  # a group without a name
    ],
)
def test_a_group_is_the_user_s_own_when_nobody_else_is_in_it(planted, monkeypatch, number, name, members, safe):
    def group(found):
        if number is None:
            raise KeyError(found)
        return SimpleNamespace(gr_name=name, gr_mem=members)

    real = planted.parent.stat().st_gid
    monkeypatch.setattr("grp.getgrgid", group)
    own = real if number == 100 else real + 1
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=own))
    planted.parent.chmod(0o770)
    said = build.open_to_others(planted)
    assert said == "" if safe else re.search(r"cache can be written to by others \(mode 770\)", said)


def test_a_library_that_others_could_have_written_is_not_loaded(planted, loaded):
    planted.parent.chmod(0o1777)
    said = str(cpt.backend())
    assert re.search("on a CPU: cpp .* built for this process alone: .* can be written to by others", said), said
    assert planted not in loaded


@pytest.mark.parametrize("digest", ["0" * 64, None], ids=["another digest", "none"])
def test_a_library_that_is_not_what_was_built_is_not_loaded(planted, fake, loaded, digest, caplog):
    """Another one, or one that was cut short."""
    written = planted.with_suffix(".sha256")
    written.write_text(digest) if digest else written.unlink()
    assert cpt.backend().cpu == "cpp"
    assert ("its digest differs" if digest else "has no digest") in caplog.text
    assert fake.read_text() == "built\n"
    assert loaded == [planted]
    assert planted.read_bytes() != b"planted"


def test_folders_of_kernels_are_the_user_s_own(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(build, "_build", lambda library, flags: None)
    cpt.backend()
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("above", "above/cache")] == [0o700, 0o700]


def test_a_library_without_operators_is_no_kernels(cpp_kernels, undecided, compiler, tmp_path, monkeypatch):
    (tmp_path / "empty.cpp").write_text("")
    compiler(f'g++ -shared {tmp_path}/empty.cpp -o "$2"')
    monkeypatch.setattr(torch.ops, "cpt", SimpleNamespace())  # in this process all operators are there
    assert (cpt.backend().cpu, "defines no operator" in str(cpt.backend())) == ("reference", True)


def test_without_a_compiler_the_plain_backend_runs_and_says_why(undecided, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = cpt.backend()
    assert found.cpu == "reference"
    assert "no C++ compiler (no-such-compiler)" in str(found)


def test_a_compiler_that_fails_says_what(undecided, compiler, cache):
    compiler("echo 'x.h:1: fatal error: Python.h: no such file' >&2\nexit 1")
    assert "fatal error: Python.h: no such file" in cpt.backend().why["cpu"]
    assert list(cache.glob("*.so")) == []


def test_one_backend_can_be_forced(undecided, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert (cpt.backend().cpu, cpt.backend().cuda) == ("reference", "reference")
    assert operators.active is torch.ops.cpt_reference


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CPT_KERNELS", "cpp", r"CPT_KERNELS=cpp asks for .* but there is no C\+\+ compiler"),
        ("CPT_KERNELS", "triton", "asks for the Triton kernels, but torch sees no CUDA device"),
        ("CPT_KERNELS", "fast", "unknown CPT_KERNELS 'fast'; choose from reference, cpp, triton"),
        ("CPT_PRODUCTS", "blas", "unknown CPT_PRODUCTS 'blas'; choose from torch, onednn"),
    ],
)
def test_what_is_asked_for_and_not_there_is_refused(undecided, monkeypatch, name, value, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=message):
        cpt.backend()
