"""The C++ kernels are built once, wherever that is possible, and what is active is said."""

import hashlib
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cpt_core as cpt
from cpt_core.kernels import backend as module
from cpt_core.kernels import operators
from cpt_core.kernels.cpp import building

pytestmark = pytest.mark.slow

SHOW = "import cpt_core as cpt; print(cpt.backend())"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty folder of kernels, which nothing has asked for yet."""
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Make a shell script the compiler."""

    def use(text):
        script = tmp_path / "c++"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


OUTPUT = 'while [ "$1" != -o ]; do shift; done'  # then $2 is where the library goes


@pytest.fixture
def fake(cpp_kernels, tmp_path, compiler):
    """A compiler that copies the library that is there already, and keeps count."""
    built, count = Path(cpt.backend().why["cpu"].removeprefix(f"{building.capability()}, ")), tmp_path / "count"
    assert built.is_file()
    compiler(f'echo built >> {count}\n{OUTPUT}\nsleep 0.3; cp {built} "$2"')
    return count


def run(code=SHOW, **env):
    """Return exit code and output of a process of its own."""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env, cwd=root)
    return done.returncode, done.stdout + done.stderr


def test_the_name_of_the_library_holds_every_source():
    package = Path(cpt.__file__).parent
    assert set(building.SOURCES) == {p for kind in ("cpp", "h", "cu") for p in package.rglob(f"*.{kind}")}
    assert building.SOURCES[0].suffix == ".cpp"
    assert len(building.SOURCES) > 5


@pytest.fixture
def undecided(monkeypatch):
    """As if no quantised layer had run yet; a list that gets the libraries that would be loaded."""
    loaded = []
    monkeypatch.setattr(module, "_active", None)
    monkeypatch.setattr(building, "_load", loaded.append)
    before, node = operators.active, operators.gradient_node
    yield loaded
    operators.active, operators.gradient_node = before, node


@pytest.fixture
def loading(cpp_kernels, tmp_path):
    """Code that loads a stored model, and says whether kernels have come with it."""
    model, path = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(2, 2))), tmp_path / "model.pt"
    with cpt.precision(model, 4):
        torch.save(model, path)
    load = f"import torch; torch.load({str(path)!r}, weights_only=False)"
    return f"{load}; from cpt_core.kernels import operators; print(operators.gradient_node)"


def test_two_processes_at_once_build_once_and_a_third_builds_nothing(fake, loading, undecided, cache, tmp_path):
    with ThreadPoolExecutor(2) as pool:  # on a machine with the toolkit of CUDA and without a device
        shown, loaded = [pool.submit(run, code, CUDA_HOME=str(tmp_path)) for code in (SHOW, loading)]
    code, out = shown.result()
    assert (code, "on a CPU: cpp" in out, len(out.splitlines())) == (0, True, 3), out  # no warning
    assert loaded.result() == (0, "True\n")
    assert cpt.backend().cpu == "cpp"
    assert undecided == list(cache.glob("*.so"))
    assert fake.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_to(fake, undecided, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "file" / "cache"))
    assert cpt.backend().cpu == "cpp"
    assert "built for this process alone" in cpt.backend().why["cpu"]
    assert len(undecided) == 1


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
    assert building.open_to_others(planted) == ""
    OPEN[name][0](planted)
    assert re.search(OPEN[name][1], building.open_to_others(planted))


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
    said = building.open_to_others(planted)
    assert said == "" if safe else re.search(r"cache can be written to by others \(mode 770\)", said)


def test_a_library_that_others_could_have_written_is_not_loaded(planted, undecided):
    planted.parent.chmod(0o1777)
    said = str(cpt.backend())
    assert re.search("on a CPU: cpp .* built for this process alone: .* can be written to by others", said), said
    assert planted not in undecided


@pytest.mark.parametrize("digest", ["0" * 64, None], ids=["another digest", "none"])
def test_a_library_that_is_not_what_was_built_is_not_loaded(planted, fake, undecided, digest, caplog):
    """Another one, or one that was cut short."""
    written = planted.with_suffix(".sha256")
    written.write_text(digest) if digest else written.unlink()
    assert cpt.backend().cpu == "cpp"
    assert ("its digest differs" if digest else "has no digest") in caplog.text
    assert fake.read_text() == "built\n"
    assert undecided == [planted]
    assert planted.read_bytes() != b"planted"


def test_folders_of_kernels_are_the_user_s_own(undecided, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(building, "_build", lambda library, flags: None)
    cpt.backend()
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("above", "above/cache")] == [0o700, 0o700]


AT_IMPORT = """
import os
import cpt_core as cpt
cpt.quantize_, cpt.QuantConfig, cpt.PrecisionScheduler
assert not os.path.exists(os.environ["CPT_KERNELS_DIR"]), "something is built at import"
"""


def test_a_library_without_operators_is_no_kernels(cpp_kernels, compiler, tmp_path):
    (tmp_path / "empty.cpp").write_text("")
    compiler(f'{OUTPUT}\ng++ -shared {tmp_path}/empty.cpp -o "$2"')
    code, out = run(AT_IMPORT + SHOW)
    assert (code, "on a CPU: reference" in out, "defines no operator" in out) == (0, True, True), out


def test_without_a_compiler_the_plain_backend_runs_and_says_why(undecided, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = cpt.backend()
    assert found.cpu == "reference"
    assert "no C++ compiler (no-such-compiler)" in str(found)
    monkeypatch.setattr(module, "_active", None)
    monkeypatch.setenv("CPT_KERNELS", "cpp")
    with pytest.raises(RuntimeError, match=r"CPT_KERNELS=cpp asks for .* but there is no C\+\+ compiler"):
        cpt.backend()


def test_a_compiler_that_fails_says_what(undecided, compiler, cache):
    compiler("echo 'x.h:1: fatal error: Python.h: no such file' >&2\nexit 1")
    assert "fatal error: Python.h: no such file" in cpt.backend().why["cpu"]
    assert list(cache.glob("*.so")) == []


def test_one_backend_can_be_forced(undecided, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert (cpt.backend().cpu, cpt.backend().cuda) == ("reference", "reference")
    assert operators.active is torch.ops.cpt_reference
    monkeypatch.setattr(module, "_active", None)
    monkeypatch.setenv("CPT_KERNELS", "fast")
    with pytest.raises(ValueError, match="unknown CPT_KERNELS 'fast'; choose from reference, cpp, triton"):
        cpt.backend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_triton_needs_a_device(undecided, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CPT_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="asks for the Triton kernels, but torch sees no CUDA device"):
        cpt.backend()
