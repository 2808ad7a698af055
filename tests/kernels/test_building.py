"""Build and cache of the C++ kernels, and the report of the active backend."""

import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cpt_core as cpt
from cpt_extras.kernels import backend as backend_module
from cpt_extras.kernels import operators
from cpt_extras.kernels.cpp import build, spare_folders

NOBODY = 65534  # the number of a user
ROOT = Path(__file__).parents[2]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def cache(undecided, tmp_path, monkeypatch):
    """Return an empty kernel cache, before any backend is chosen."""
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", ())
    return tmp_path / "cache"


@pytest.fixture
def spare(tmp_path):
    """Return the folder that takes the place of an unusable cache."""
    return tmp_path / "temporary" / f"cpt_core-kernels-{os.geteuid()}"


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Return a function that makes a shell script the compiler; ``$2`` is the path of the library."""

    def use(text):
        script = tmp_path / "c++"
        script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{text}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


@pytest.fixture
def build_log(use_compiler, tmp_path):
    """Use a compiler that writes a word instead of a library, and a line for every call."""
    log = tmp_path / "log"
    use_compiler(f'echo built >> {log}\necho kernels > "$2"')
    return log


@pytest.fixture
def loaded(monkeypatch):
    """Return a list of the libraries that would be loaded."""
    libraries = []
    monkeypatch.setattr(build, "_load", libraries.append)
    return libraries


def choose_again(monkeypatch):
    """Choose the backend as a new process does."""
    monkeypatch.setattr(backend_module, "_active", None)
    return cpt.backend()


def test_kernel_library_name_covers_every_source():
    sources = {
        p for kind in ("cpp", "h", "cu") for p in ROOT.glob(f"cpt_*/**/*.{kind}")
    }
    assert set(build.SOURCES) == sources
    assert build.SOURCES[0].suffix == ".cpp"
    assert len(build.SOURCES) > 5


OTHER_PROCESS = """
import os, sys, torch
import cpt_core as cpt
cpt.quantize_, cpt.QuantConfig, cpt.PrecisionScheduler
assert not os.path.exists(os.environ["CPT_KERNELS_DIR"]), "something is built at import"
open(sys.argv[2], "w").close()
torch.load(sys.argv[1], weights_only=False)
from cpt_extras.kernels import operators
assert operators.has_cpp_gradient, "no kernels have come with the model"
print(cpt.backend())
"""


@pytest.fixture(scope="module")
def stored_model(cpp_kernels, tmp_path_factory):
    """Return the file of a quantised model, and the library of the kernels that it ran on."""
    file = tmp_path_factory.mktemp("stored") / "model.pt"
    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with cpt.precision(model, 4):
        torch.save(model, file)
    return file, build.kernels_dir() / build.library_name()


@pytest.mark.slow
def test_kernel_build_runs_once_across_processes(
    stored_model, use_compiler, loaded, cache, tmp_path, monkeypatch
):
    """Build once for two concurrent processes, one of which has the CUDA toolkit and no device."""
    model, library = stored_model
    ready, log = tmp_path / "ready", tmp_path / "log"
    use_compiler(f'echo built >> {log}\nsleep 0.3; cp {library} "$2"')
    command = [sys.executable, "-c", OTHER_PROCESS, model, ready]
    env = os.environ | {"CUDA_HOME": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as other:
        while not ready.exists() and other.poll() is None:
            time.sleep(0.01)
        assert cpt.backend().cpu == "cpp"
        output = other.communicate()[0]
    assert other.returncode == 0, output
    assert "on a CPU: cpp" in output
    assert len(output.splitlines()) == 3, output  # no warning
    assert choose_again(monkeypatch).cpu == "cpp"
    assert loaded == list(cache.glob("*.so")) * 2
    assert log.read_text() == "built\n"


def below_file(folder):
    (folder / "file").write_text("")
    return folder / "file" / "cache"


def below_shared_folder(mode, folder):
    (folder / "shared").mkdir()
    (folder / "shared").chmod(mode)
    return folder / "shared" / "cache"


UNUSABLE_CACHES = {
    "below a file": (below_file, "cache cannot be written to"),
    "nowhere": (lambda _: "/proc/nope/cache", "/proc/nope/cache cannot be written to"),
    "below a folder of everybody": (
        partial(below_shared_folder, 0o777),
        r"shared can be written to by others \(mode 777\)",
    ),
    "below a folder of a group": (
        partial(below_shared_folder, 0o2775),
        r"shared can be written to by others \(mode 2775\)",
    ),
    "no home": (
        lambda _: "~nobody-of-this-name/kernels",
        "has no home folder for ~nobody-of-this-name",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE_CACHES)
def test_kernel_cache_falls_back_to_user_folder(
    name, build_log, loaded, spare, tmp_path, monkeypatch
):
    make, reason = UNUSABLE_CACHES[name]
    monkeypatch.setattr(build, "_is_private_group", lambda _: False)  # root's would be
    monkeypatch.setenv("CPT_KERNELS_DIR", str(make(tmp_path)))
    for _ in range(2):
        assert re.search(reason, choose_again(monkeypatch).reasons["cpu"])
    assert stat.S_IMODE(spare.stat().st_mode) == 0o700
    assert loaded == list(spare.glob("*.so")) * 2
    assert build_log.read_text() == "built\n"
    location = spare_folders.find_kernel_location()
    assert (location.folder, location.built) == (spare, True)
    assert re.search(reason, location.reason)


UNSAFE_FOLDERS = {
    "of another user": lambda folder: (folder.mkdir(), os.chown(folder, NOBODY, -1)),
    "open to others": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    "a link": lambda folder: folder.symlink_to("elsewhere", target_is_directory=True),
    "below an open folder": lambda folder: folder.parent.chmod(0o777),
}


@pytest.mark.parametrize(
    "name", [pytest.param("of another user", marks=AS_ROOT), *list(UNSAFE_FOLDERS)[1:]]
)
def test_kernel_cache_rejects_unsafe_fallback_folder(
    name, build_log, loaded, spare, tmp_path, monkeypatch, caplog
):
    """Build for one process alone, and report it, if the fallback folder could be another user's."""
    monkeypatch.setenv("CPT_KERNELS_DIR", "/proc/nope/cache")
    (spare.parent / "elsewhere").mkdir()
    UNSAFE_FOLDERS[name](spare)
    reason = "/proc/nope/cache cannot be written to"
    alone = f"built for this process alone: {reason}"
    assert alone in cpt.backend().reasons["cpu"]
    assert caplog.text.count("name a safe folder with CPT_KERNELS_DIR") == 1
    assert not list(spare.parent.rglob("*.so"))
    assert spare_folders.find_kernel_location()[:3] == (None, reason, False)
    second = tmp_path / "second"
    second.mkdir()
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", (str(second),))
    choose_again(monkeypatch)
    assert loaded[-1].parent.parent == second


def test_kernel_cache_skips_noexec_folder(build_log, spare, cache, monkeypatch):
    loaded = []

    def load(library):
        loaded.append(library)
        if library.parent == cache:
            raise build.NoKernelsError("failed to map segment from shared object")

    monkeypatch.setattr(build, "_load", load)
    assert "failed to map segment" in cpt.backend().reasons["cpu"]
    assert loaded[-1].parent == spare


def test_kernel_cache_handles_unreadable_folder(build_log, loaded, cache, monkeypatch):
    """Handle a folder that hides even the existence of its files, as root's home does."""
    exists = Path.exists

    def refuse(path):
        if cache in path.parents:
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    assert "cache cannot be written to" in cpt.backend().reasons["cpu"]
    assert loaded


@pytest.fixture
def planted(build_log, cache):
    """Plant a foreign library, with its digest, at the path of the one to build."""
    library = cache / build.library_name()
    cache.mkdir(mode=0o700)
    library.write_bytes(b"planted")
    library.with_suffix(".sha256").write_text(sha256(b"planted").hexdigest())
    return library


EXPOSURES = [
    (lambda file: file.parent.chmod(0o1777), r"cache can be .* others \(mode 1777\)"),
    (lambda file: file.parents[1].chmod(0o777), r"written to by others \(mode 777\)"),
    (lambda file: file.chmod(0o666), r"\.so can be written to by others"),
    (
        lambda file: file.rename(file.parent / "x") and file.symlink_to("x"),
        r"\.so can be written",
    ),
    pytest.param(
        lambda file: os.chown(file.parent, NOBODY, -1),
        "cache belongs to another user",
        marks=AS_ROOT,
    ),
    pytest.param(
        lambda file: os.chown(file, NOBODY, -1),
        r"\.so belongs to another user",
        marks=AS_ROOT,
    ),
]


@pytest.mark.parametrize(("expose", "reason"), EXPOSURES)
def test_kernel_cache_detects_writable_paths(planted, expose, reason):
    assert build.exposure_reason(planted) == ""
    expose(planted)
    assert re.search(reason, build.exposure_reason(planted))


@pytest.mark.parametrize(
    ("is_own", "name", "members", "is_private"),
    [
        (True, "me", [], True),  # most systems make every user a group
        (True, "me", ["me"], True),
        (True, "me", ["you"], False),
        (True, "staff", [], False),
        (False, "me", [], False),
        (True, None, [], False),  # a group without a name
    ],
)
def test_kernel_cache_accepts_only_private_groups(
    planted, monkeypatch, is_own, name, members, is_private
):
    def find_group(number):
        if name is None:
            raise KeyError(number)
        return SimpleNamespace(gr_name=name, gr_mem=members)

    own = planted.parent.stat().st_gid + (not is_own)
    user = SimpleNamespace(pw_name="me", pw_gid=own)
    monkeypatch.setattr("grp.getgrgid", find_group)
    monkeypatch.setattr("pwd.getpwuid", lambda _: user)
    planted.parent.chmod(0o770)
    reason = f"{planted.parent} can be written to by others (mode 770)"
    assert build.exposure_reason(planted) == ("" if is_private else reason)


def test_kernel_cache_skips_writable_library(planted, loaded, spare):
    planted.parent.chmod(0o1777)
    report = str(cpt.backend())
    assert re.search(f"on a CPU: cpp .*{spare}.*can be written to by others", report)
    assert planted not in loaded


@pytest.mark.parametrize(
    ("digest", "reason"), [("0" * 64, "its digest differs"), ("", "has no digest")]
)
def test_kernel_cache_rebuilds_altered_library(
    planted, build_log, loaded, digest, reason, caplog
):
    """Rebuild a library that was replaced or cut short."""
    file = planted.with_suffix(".sha256")
    file.write_text(digest) if digest else file.unlink()
    assert cpt.backend().cpu == "cpp"
    assert reason in caplog.text
    assert build_log.read_text() == "built\n"
    assert loaded == [planted]
    assert planted.read_bytes() != b"planted"


def test_kernel_cache_folders_are_private(build_log, loaded, tmp_path, monkeypatch):
    folders = tmp_path / "above", tmp_path / "above" / "cache"
    monkeypatch.setenv("CPT_KERNELS_DIR", str(folders[1]))
    cpt.backend()
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700, 0o700]


def test_kernel_library_without_operators_is_rejected(
    cpp_kernels, use_compiler, tmp_path, monkeypatch
):
    (tmp_path / "empty.cpp").write_text("")
    use_compiler(f'g++ -shared {tmp_path}/empty.cpp -o "$2"')
    monkeypatch.setattr(torch.ops, "cpt", SimpleNamespace())  # as in a new process
    active = cpt.backend()
    assert active.cpu == "reference"
    assert "defines no operator" in active.reasons["cpu"]


def test_backend_reports_compiler_errors(use_compiler, cache, monkeypatch):
    use_compiler("echo 'x.h:1: fatal error: Python.h: no such file' >&2\nexit 1")
    assert "fatal error: Python.h: no such file" in cpt.backend().reasons["cpu"]
    assert list(cache.glob("*.so")) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    active = choose_again(monkeypatch)
    assert active.cpu == "reference"
    assert "no C++ compiler (no-such-compiler)" in active.reasons["cpu"]


def test_backend_can_be_forced(monkeypatch):
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert (cpt.backend().cpu, cpt.backend().cuda) == ("reference", "reference")
    assert operators.active is torch.ops.cpt_reference


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CPT_KERNELS", "cpp", r"=cpp asks for .* but there is no C\+\+ compiler"),
        ("CPT_KERNELS", "triton", "the Triton kernels, but torch sees no CUDA device"),
        (
            "CPT_KERNELS",
            "fast",
            "unknown .* 'fast'; choose from reference, cpp, triton",
        ),
        ("CPT_PRODUCTS", "blas", "unknown .* 'blas'; choose from torch, onednn"),
    ],
)
def test_backend_rejects_unavailable_choice(monkeypatch, name, value, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=message) as error:
        cpt.backend()
    assert name in str(error.value)


def test_kernels_on_names_active_backend(monkeypatch):
    def active_backends():
        kinds = map(torch.device, ("cpu", "cuda"))
        return [backend_module.kernels_on(device) for device in kinds]

    assert active_backends() == ["not loaded", "not loaded"]
    both = backend_module.Backend("cpp", "triton", {})
    monkeypatch.setattr(backend_module, "_active", both)
    monkeypatch.setattr(operators, "active", torch.ops.cpt)
    assert active_backends() == ["cpp", "triton"]
    with backend_module.reference():
        assert active_backends() == ["reference", "reference"]
        assert operators.active is torch.ops.cpt_reference
    assert active_backends() == ["cpp", "triton"]
