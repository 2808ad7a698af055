"""Build and cache of the C++ kernels, and the report of the active backend."""

import hashlib
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cpt_core as cpt
from cpt_extras.kernels import backend as module
from cpt_extras.kernels import operators
from cpt_extras.kernels.cpp import build, spare_folders

pytestmark = pytest.mark.slow
NOBODY = 65534  # the number of a user


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return an empty kernel cache, before any backend is chosen."""
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CPT_KERNELS", raising=False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", ())
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Use a shell script as the compiler; ``$2`` is the path of the library."""

    def use(text):
        script = tmp_path / "c++"
        script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n{text}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


@pytest.fixture
def fake(cpp_kernels, tmp_path, compiler):
    """Use a compiler that copies the existing library and counts its calls."""
    where = (
        cpt.backend()
        .reasons["cpu"]
        .removeprefix(f"{build.capability()}, ")
        .partition("; ")[0]
    )
    built, count = Path(where), tmp_path / "count"
    assert built.is_file()
    compiler(f'echo built >> {count}\nsleep 0.3; cp {built} "$2"')
    return count


def test_kernel_library_name_covers_every_source():
    root = Path(cpt.__file__).parents[1]
    assert set(build.SOURCES) == {
        p for kind in ("cpp", "h", "cu") for p in root.glob(f"cpt_*/**/*.{kind}")
    }
    assert build.SOURCES[0].suffix == ".cpp"
    assert len(build.SOURCES) > 5


@pytest.fixture
def loaded(undecided, monkeypatch):
    """Return a list of the libraries that would be loaded."""
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
assert operators.has_cpp_gradient, "no kernels have come with the model"
print(cpt.backend())
"""


@pytest.fixture
def stored(cpp_kernels, tmp_path):
    """Save a quantised model to a file."""
    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with cpt.precision(model, 4):
        torch.save(model, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_kernel_build_runs_once_across_processes(
    fake, stored, loaded, cache, tmp_path, monkeypatch
):
    """Build once for two concurrent processes, one of which has the CUDA toolkit and no device."""
    ready, env = tmp_path / "ready", os.environ | {"CUDA_HOME": str(tmp_path)}
    command = [sys.executable, "-c", OTHER_PROCESS, stored, ready]
    pipes, root = (
        {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        Path(__file__).parents[2],
    )
    with subprocess.Popen(command, text=True, cwd=root, env=env, **pipes) as other:
        while not ready.exists() and other.poll() is None:
            time.sleep(0.01)
        assert cpt.backend().cpu == "cpp"
        out = other.communicate()[0]
    assert (other.returncode, "on a CPU: cpp" in out, len(out.splitlines())) == (
        0,
        True,
        3,
    ), out  # no warning
    monkeypatch.setattr(module, "_active", None)
    assert cpt.backend().cpu == "cpp"
    assert loaded == list(cache.glob("*.so")) * 2
    assert fake.read_text() == "built\n"


def no_file(folder):
    """Put a file in the place of a parent folder."""
    (folder / "file").write_text("")
    return folder / "file" / "cache"


def open_above(mode, folder):
    """Make a cache folder below a folder that a group or everybody may write to."""
    (folder / "shared").mkdir()
    (folder / "shared").chmod(mode)
    return folder / "shared" / "cache"


UNUSABLE = {
    "a file above": (no_file, "cache cannot be written to"),
    "nowhere": (
        lambda folder: Path("/proc/nope/cache"),
        "/proc/nope/cache cannot be written to",
    ),
    "everybody may write above": (
        partial(open_above, 0o777),
        r"shared can be written to by others \(mode 777\)",
    ),
    "a group may write above": (
        partial(open_above, 0o2775),
        r"shared can be written to by others \(mode 2775\)",
    ),
    "no home": (
        lambda folder: "~nobody-of-this-name/kernels",
        "has no home folder for ~nobody-of-this-name",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_kernel_cache_falls_back_to_user_folder(
    name, fake, loaded, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        build, "_is_private_group", lambda number: False
    )  # root's group is root's alone
    monkeypatch.setenv("CPT_KERNELS_DIR", str(UNUSABLE[name][0](tmp_path)))
    for _ in range(3):
        monkeypatch.setattr(module, "_active", None)
        assert re.search(UNUSABLE[name][1], cpt.backend().reasons["cpu"])
    spare = tmp_path / "temporary" / f"cpt_core-kernels-{os.geteuid()}"
    assert (stat.S_IMODE(spare.stat().st_mode), spare.stat().st_uid) == (
        0o700,
        os.geteuid(),
    )
    assert loaded == list(spare.glob("*.so")) * 3
    assert fake.read_text() == "built\n"
    place = spare_folders.find_kernel_location()
    assert (place.folder, place.built) == (spare, True)
    assert re.search(UNUSABLE[name][1], place.reason)


def owned(folder):
    os.chown(folder, NOBODY, -1)


TAKEN = {
    "another user has it": (
        lambda folder: folder.mkdir() or owned(folder),
        "belongs to another user",
    ),
    "others may write to it": (
        lambda folder: folder.mkdir() or folder.chmod(0o777),
        "can be written to by others",
    ),
    "it is a link": (
        lambda folder: folder.symlink_to("elsewhere", target_is_directory=True),
        "is a link",
    ),
    "its folder is not safe": (
        lambda folder: folder.parent.chmod(0o777),
        "can be written to by others",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_kernel_cache_rejects_unsafe_fallback_folder(
    name, fake, loaded, tmp_path, monkeypatch, caplog
):
    """Build once per process, and report it, if the fallback folder could be another user's."""
    if "another user" in name and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    monkeypatch.setenv("CPT_KERNELS_DIR", "/proc/nope/cache")
    (tmp_path / "temporary" / "elsewhere").mkdir()
    spare = tmp_path / "temporary" / f"cpt_core-kernels-{os.geteuid()}"
    TAKEN[name][0](spare)
    assert (
        "built for this process alone: /proc/nope/cache cannot be written to"
        in cpt.backend().reasons["cpu"]
    )
    assert caplog.text.count("name a safe folder with CPT_KERNELS_DIR") == 1
    assert not list((tmp_path / "temporary").rglob("*.so"))
    assert spare_folders.find_kernel_location()[:3] == (
        None,
        "/proc/nope/cache cannot be written to",
        False,
    )
    monkeypatch.setattr(spare_folders, "SPARE_DIRS", (str(tmp_path / "second"),))
    (tmp_path / "second").mkdir()
    monkeypatch.setattr(module, "_active", None)
    cpt.backend()
    assert loaded[-1].parent.parent == tmp_path / "second"


def test_kernel_cache_skips_noexec_folder(
    fake, undecided, cache, tmp_path, monkeypatch
):
    def load(library):
        loaded.append(library)
        if library.parent == cache:
            raise build.NoKernelsError(
                f"{library} cannot be loaded: failed to map segment from shared object"
            )

    loaded = []
    monkeypatch.setattr(build, "_load", load)
    assert "failed to map segment" in cpt.backend().reasons["cpu"]
    assert (
        loaded[-1].parent == tmp_path / "temporary" / f"cpt_core-kernels-{os.geteuid()}"
    )


def test_kernel_cache_handles_unreadable_folder(fake, loaded, cache, monkeypatch):
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
def planted(fake, cache):
    """Plant a foreign library at the path of the one to build, and return the path."""
    library = cache / build.library_name()
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"planted")
    digest = hashlib.sha256(b"planted").hexdigest()
    library.with_suffix(".sha256").write_text(
        digest
    )  # who writes the one can write the other
    return library


OPEN = {
    "a folder like /tmp": (
        lambda file: file.parent.chmod(0o1777),
        r"cache can be written to by others \(mode 1777\)",
    ),
    "a folder above": (
        lambda file: file.parents[1].chmod(0o777),
        r"can be written to by others \(mode 777\)",
    ),
    "a file that others may write": (
        lambda file: file.chmod(0o666),
        r"\.so can be written to by others",
    ),
    "a link": (
        lambda file: file.rename(file.parent / "x") and file.symlink_to("x"),
        r"\.so can be written",
    ),
    "a folder of another user": (
        lambda file: os.chown(file.parent, NOBODY, -1),
        "cache belongs to another user",
    ),
    "a file of another user": (
        lambda file: os.chown(file, NOBODY, -1),
        r"\.so belongs to another user",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_kernel_cache_detects_writable_paths(planted, name):
    if "another user" in name and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    assert build.exposure_reason(planted) == ""
    OPEN[name][0](planted)
    assert re.search(OPEN[name][1], build.exposure_reason(planted))


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
def test_kernel_cache_accepts_only_private_groups(
    planted, monkeypatch, number, name, members, safe
):
    def group(found):
        if number is None:
            raise KeyError(found)
        return SimpleNamespace(gr_name=name, gr_mem=members)

    real = planted.parent.stat().st_gid
    monkeypatch.setattr("grp.getgrgid", group)
    own = real if number == 100 else real + 1
    monkeypatch.setattr(
        "pwd.getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=own)
    )
    planted.parent.chmod(0o770)
    said = build.exposure_reason(planted)
    assert (
        said == ""
        if safe
        else re.search(r"cache can be written to by others \(mode 770\)", said)
    )


def test_kernel_cache_skips_writable_library(planted, loaded):
    planted.parent.chmod(0o1777)
    said = str(cpt.backend())
    assert re.search("on a CPU: cpp .*temporary.*can be written to by others", said), (
        said
    )
    assert planted not in loaded


@pytest.mark.parametrize("digest", ["0" * 64, None], ids=["another digest", "none"])
def test_kernel_cache_rebuilds_altered_library(planted, fake, loaded, digest, caplog):
    """Rebuild a library that was replaced or cut short."""
    written = planted.with_suffix(".sha256")
    written.write_text(digest) if digest else written.unlink()
    assert cpt.backend().cpu == "cpp"
    assert ("its digest differs" if digest else "has no digest") in caplog.text
    assert fake.read_text() == "built\n"
    assert loaded == [planted]
    assert planted.read_bytes() != b"planted"


def test_kernel_cache_folders_are_private(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(build, "build", lambda library: None)
    cpt.backend()
    assert [
        stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("above", "above/cache")
    ] == [0o700, 0o700]


def test_kernel_library_without_operators_is_rejected(
    cpp_kernels, undecided, compiler, tmp_path, monkeypatch
):
    (tmp_path / "empty.cpp").write_text("")
    compiler(f'g++ -shared {tmp_path}/empty.cpp -o "$2"')
    monkeypatch.setattr(
        torch.ops, "cpt", SimpleNamespace()
    )  # in this process all operators are there
    assert (cpt.backend().cpu, "defines no operator" in str(cpt.backend())) == (
        "reference",
        True,
    )


def test_backend_falls_back_without_compiler(undecided, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = cpt.backend()
    assert found.cpu == "reference"
    assert "no C++ compiler (no-such-compiler)" in str(found)


def test_backend_reports_compiler_errors(undecided, compiler, cache):
    compiler("echo 'x.h:1: fatal error: Python.h: no such file' >&2\nexit 1")
    assert "fatal error: Python.h: no such file" in cpt.backend().reasons["cpu"]
    assert list(cache.glob("*.so")) == []


def test_backend_can_be_forced(undecided, monkeypatch):
    monkeypatch.setenv("CPT_KERNELS", "reference")
    assert (cpt.backend().cpu, cpt.backend().cuda) == ("reference", "reference")
    assert operators.active is torch.ops.cpt_reference


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "CPT_KERNELS",
            "cpp",
            r"CPT_KERNELS=cpp asks for .* but there is no C\+\+ compiler",
        ),
        (
            "CPT_KERNELS",
            "triton",
            "asks for the Triton kernels, but torch sees no CUDA device",
        ),
        (
            "CPT_KERNELS",
            "fast",
            "unknown CPT_KERNELS 'fast'; choose from reference, cpp, triton",
        ),
        (
            "CPT_PRODUCTS",
            "blas",
            "unknown CPT_PRODUCTS 'blas'; choose from torch, onednn",
        ),
    ],
)
def test_backend_rejects_unavailable_choice(
    undecided, monkeypatch, name, value, message
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=message):
        cpt.backend()
