"""The rules that keep the house readable: rooms import one way, and what needs no torch imports without it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cpt_core"

# A room may import the rooms that it names here, and those that they may import.
ROOMS = {
    "paths": (),
    "checks": (),
    "machine": (),
    "provenance": ("paths",),
    "described": (),
    "waiting": (),
    "formats": ("checks",),
    "schedules": ("formats", "described"),
    "graphs": ("checks", "paths"),
    "kernels": ("checks", "provenance", "formats"),
    "quantization": ("schedules", "graphs", "kernels"),
    "bitops": ("quantization",),
    "inspecting": ("bitops", "waiting"),
    "integrations": ("inspecting",),
    "experiments": ("schedules", "formats", "paths"),
    "models": ("graphs",),
    "data": ("experiments", "graphs", "machine"),
    "tasks": ("data", "models"),
    "training": ("tasks", "inspecting"),
    "sweeps": ("training", "provenance"),
    "analysis": ("sweeps",),
    "teaching": ("analysis",),
    "__main__": ("teaching",),
}
WITHOUT_TORCH = (
    "schedules",
    "formats",
    "experiments",
    "analysis",
    "sweeps.stores",
    "teaching.parameters",
    "checks",
    "paths",
    "described",
    "machine",
    "provenance",
    "waiting",
)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """Modules of the package that a file imports, also inside functions, such as "schedules.make"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cpt_core":
            inner = node.module.removeprefix("cpt_core").lstrip(".")
            for a in node.names:
                whole = f"{inner}.{a.name}".lstrip(".")
                place = PACKAGE.joinpath(*whole.split("."))
                yield whole if place.is_dir() or place.with_suffix(".py").exists() else inner
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("cpt_core.") for a in node.names if a.name.startswith("cpt_core."))


def below(room):
    """The rooms that a room may import, and itself."""
    return {room}.union(*(below(r) for r in ROOMS[room]))


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_every_room_is_named_and_says_what_it_is_for():
    assert {room_of(p) for p in FILES} == set(ROOMS)
    for place in PACKAGE.iterdir():
        if place.is_dir() and place.name != "__pycache__":
            assert ast.get_docstring(ast.parse((place / "__init__.py").read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    above = {name for name in imports_of(path) if name and name.split(".")[0] not in below(room_of(path))}
    assert not above, f"{path.relative_to(ROOT)} imports {', '.join(sorted(above))}: the order of the rooms is ROOMS"


def test_rooms_stand_in_no_circle():
    order = list(ROOMS)
    for room, needs in ROOMS.items():
        assert all(order.index(need) < order.index(room) for need in needs), room


def test_the_core_knows_no_experiments():
    for core in ("schedules", "formats", "quantization", "bitops"):
        assert not below(core) & {"experiments", "data", "models", "tasks", "training", "sweeps", "analysis"}


def test_analysis_takes_the_store_and_nothing_else_of_sweeps():
    used = {n for p in FILES if room_of(p) == "analysis" for n in imports_of(p) if n.split(".")[0] == "sweeps"}
    assert used <= {"sweeps", "sweeps.stores", "sweeps.lines"}  # the last: how a store is read


def test_nothing_else_imports_the_integrations():
    others = [p for p in [*FILES, PACKAGE / "__init__.py"] if room_of(p) != "integrations"]
    assert not [p.name for p in others if any(n.startswith("integrations") for n in imports_of(p))]


def test_what_needs_no_torch_imports_without_it():
    """One interpreter imports all of it and looks after every module; nor does it take what runs notebooks."""
    modules = []
    for name in WITHOUT_TORCH:
        place = PACKAGE.joinpath(*name.split("."))
        modules += [f"cpt_core.{name}"]
        modules += [f"cpt_core.{name}.{p.stem}" for p in sorted(place.glob("*.py")) if p.stem != "__init__"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'nbformat', 'nbconvert'} & set(sys.modules), name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_never_chooses_a_device_or_prints():
    for path in FILES:
        text = path.read_text()
        assert ".cuda()" not in text, path.name
        if room_of(path) not in ("teaching", "__main__"):
            calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path.name


def test_cores_are_counted_in_one_place():
    """What a job may use is less than what the machine has: see ``cpt_core.machine``."""
    counted = re.compile(r"cpu_count|sched_getaffinity")
    assert [p for p in FILES if counted.search(p.read_text())] == [PACKAGE / "machine.py"]


def test_public_names_resolve():
    import cpt_core

    for name in cpt_core._HOME:
        assert getattr(cpt_core, name) is not None
        assert name in dir(cpt_core)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cpt_core.nonsense
    assert callable(cpt_core.precision)  # a module of this name would hide the function


# whose open is not that of text: descriptors, pictures, members of archives
OPEN_BYTES = ("os", "Image", "library('PIL.Image', 'vision')", "z")


def opens_text(call):
    """Whether a call opens a file as text: read_text, write_text, or open without "b" in its mode."""
    name, of = getattr(call.func, "id", ""), ""
    if isinstance(call.func, ast.Attribute):
        name, of = call.func.attr, ast.unparse(call.func.value)
        if name in ("read_text", "write_text"):
            return True
    modes = [a.value for a in call.args[-1:] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return name == "open" and of not in OPEN_BYTES and not any("b" in mode for mode in modes)


@pytest.mark.parametrize("path", FILES, ids=room_of)
def test_text_files_are_utf_8_whatever_the_locale(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    bare = [c.lineno for c in calls if opens_text(c) and not any(k.arg == "encoding" for k in c.keywords)]
    assert not bare, f"{path}: lines {bare} do not say encoding="
