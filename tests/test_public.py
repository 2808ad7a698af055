"""Public names and imports: one list for the lazy loader, ``__all__``, ``dir`` and type checkers; former names warn."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from helpers import run_command

import cpt_core as cpt
from bench import sizes
from book.public_names import reference
from cpt_core import extensions
from cpt_core.lazy_imports import FORMER_NAMES, defining_modules, is_top_level
from cpt_extras.integrations import distributed
from cpt_extras.optional_libraries import install_hint
from cpt_extras.search.search_result import Arm, Difference
from cpt_lab.former_names import FORMER_NAMES as FORMER_MODULES

ROOT = Path(__file__).parents[1]
SUBPACKAGES = {
    name: home
    for name, home in defining_modules("cpt_core").items()
    if is_top_level(home)
}
PACKAGES = ["cpt_core", *(f"{home}.{name}" for name, home in SUBPACKAGES.items())]
# What a training needs; the rest is in subpackages.
TOP_LEVEL = """
BitOpsLedger CyclicSchedule DeficitSchedule DelayedSchedule FORMATS Format FormatLadder FunctionSchedule Graph GraphConv
LayeredSchedule PrecisionScheduler QuantConfig QuantizationWarning RoleSchedules SAGEConv SUITE StaticSchedule
backend check count_bitops export make_schedule precision quantize quantize_ recipes restore_ schedule_from_dict
solve_schedule summary bitops diagnostics formats kernels quantization schedules search
"""
TORCH_FREE = (
    "cpt_core.extensions",
    "cpt_core.lazy_imports",
    "cpt_core.numerics",
    "cpt_core.schedules",
    "cpt_core.validation",
    "cpt_extras.cpu_info",
    "cpt_extras.figures",
    "cpt_extras.files",
    "cpt_extras.former_names",
    "cpt_extras.formats.costs",
    "cpt_extras.formats.format",
    "cpt_extras.formats.ladder",
    "cpt_extras.formats.prices",
    "cpt_extras.formats.quantizer",
    "cpt_extras.formats.recipes",
    "cpt_extras.optional_libraries",
    "cpt_extras.progress",
    "cpt_extras.search.allocation",
    "cpt_extras.search.custom_schedules",
    "cpt_extras.search.search_loop",
    "cpt_extras.search.search_result",
    "cpt_extras.search.sensitivity_result",
    "cpt_extras.search.solved_schedules",
    "cpt_extras.search.solver",
    "cpt_extras.validation",
    "cpt_lab.analysis",
    "cpt_lab.experiments",
    "cpt_lab.resources",
    "cpt_lab.numerics",
    "cpt_lab.paths",
    "cpt_lab.provenance",
    "cpt_lab.signals",
    "cpt_lab.studies",
    "cpt_lab.sweeps.stores",
    "cpt_lessons.parameters",
)
MAX_LOADED_MODULES = 50  # 47 when this was written


def test_public_top_level_names():
    assert set(cpt.__all__) == set(TOP_LEVEL.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_resolve(package):
    """Resolve every name, and hide none by a module, which becomes an attribute of its package once imported."""
    module, homes = import_module(package), defining_modules(package)
    assert sorted(module.__all__) == sorted(homes) != []
    assert set(module.__all__) <= set(dir(module))
    for name, home in homes.items():
        is_module = is_top_level(home)
        at = f"{home}.{name}" if is_module else home
        found = import_module(at)
        assert getattr(module, name) is (found if is_module else vars(found)[name])
    with pytest.raises(
        AttributeError, match=f"module '{package}' has no attribute 'nonsense'"
    ):
        _ = module.nonsense
    files = {path.stem for path in Path(module.__file__).parent.iterdir()}
    inside = {name for name, home in SUBPACKAGES.items() if home == package}
    assert files & homes.keys() == inside


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_public_former_names_warn(former, name):
    (package,) = (package for package in (cpt, cpt.search) if name in dir(package))
    with pytest.warns(DeprecationWarning, match=rf"\.{former} is now .*\.{name}$"):
        value = getattr(package, former)
    assert value is getattr(package, name)
    assert former not in dir(package)


ARM = Arm("4 bits", "static", 4, cpt.StaticSchedule(4, 8), 8, "float32")


@pytest.mark.parametrize(
    ("instance", "former", "name"),
    [
        (cpt.backend(), "why", "reasons"),
        (ARM, "against", "baseline"),
        (Difference(ARM, (1.0, 2.0), 1.0), "word", "verdict"),
    ],
)
def test_public_former_attributes_warn(instance, former, name):
    """Warn at the line of the user: Python hides deprecations of other modules."""
    message = f"{type(instance).__name__}.{former} is now {name}"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        assert getattr(instance, former) == getattr(instance, name)
    assert [w.filename for w in warned] == [__file__]


def test_public_former_function_warns():
    message = r"agreed_ranges is now .*\.synced_ranges$"
    with pytest.warns(DeprecationWarning, match=message):
        assert distributed.agreed_ranges is distributed.synced_ranges


@pytest.mark.parametrize(("former", "name"), FORMER_MODULES.items())
def test_public_former_modules_warn(former, name, monkeypatch):
    """Both names are one module object, and the warning points at the import."""
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{former} is now {name}$") as warned:
        module = import_module(former)

    assert module is sys.modules[name] is import_module(name)
    assert module.__name__ == module.__spec__.name == name
    assert len(warned) == 1


@pytest.mark.slow
def test_public_former_modules_work_in_from_imports():
    """Import from a package that nothing has been imported from yet."""
    script = """\
import warnings
warnings.simplefilter("always")
import cpt_lessons.places
from cpt_lab.sweeps import lines
from cpt_lab.sweeps.lines import newest
import cpt_lab.sweeps.lines
import cpt_lab.sweeps.row_format as row_format
assert lines is row_format is cpt_lab.sweeps.lines
assert newest is row_format.newest
"""
    process = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert "<string>:3: DeprecationWarning: cpt_lessons.places is now" in process.stderr


def test_public_names_have_one_path():
    paths = list(reference("cpt_core"))
    names = [path.split(".")[-1] for path in paths]
    assert sorted(names) == sorted(set(names))
    assert {"quantize_", "search.allocate"} < set(paths)
    imported: dict[str, object] = {}
    exec("from cpt_extras.search import *", imported)
    assert imported.keys() - {"__builtins__"} == set(cpt.search.__all__)


@pytest.mark.slow
def test_torch_free_modules_import_without_torch():
    """Import subpackages without numpy, and torch-free modules without torch and notebook libraries."""
    files = sorted(path.relative_to(ROOT) for path in ROOT.glob("cpt_*/**/*.py"))
    names = [".".join(file.with_suffix("").parts) for file in files]
    modules = [
        name.removesuffix(".__init__")
        for name in names
        if f"{name}.".startswith(tuple(f"{free}." for free in TORCH_FREE))
    ]
    assert len(modules) > len(TORCH_FREE)
    script = f"""\
import importlib, sys
import cpt_core as cpt
{", ".join(f"cpt.{name}" for name in SUBPACKAGES)}, dir(cpt)
assert not {{"torch", "numpy"}} & sys.modules.keys()
assert cpt.schedules.Rex(0.5).d == 0.5
assert cpt.formats.COSTS["ace"]
for name in {modules!r}:
    importlib.import_module(name)
    assert not {{"torch", "nbformat", "nbconvert"}} & sys.modules.keys(), name
"""
    run_command(sys.executable, "-c", script)


@pytest.mark.slow
def test_three_lines_load_few_modules():
    """Load only what the README's three lines and a training step need."""
    assert 30 < len(sizes.loaded_files()) <= MAX_LOADED_MODULES


def test_quantized_training_step_imports_no_compiler():
    """Importing ``torch._dynamo`` takes as long as importing torch; optimizers import it, the package does not."""
    script = """
import sys, torch, cpt_core as cpt
model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
schedule = cpt.make_schedule("CR", 3, 8, 100)
precision = cpt.PrecisionScheduler(model, schedule)
for _ in range(10):
    model(torch.randn(3, 4)).sum().backward()
    precision.step()
assert "torch._dynamo" not in sys.modules
"""
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")


def test_cpt_command_names_missing_extra():
    script = "import sys, cpt_lab; sys.modules['typer'] = None; cpt_lab.main()"
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    message = f"error: typer cannot be imported; {install_hint('lab')}\n"
    assert (process.returncode, process.stderr) == (1, message)


def test_extensions_without_extras_warn_or_raise(monkeypatch):
    monkeypatch.setattr(extensions, "is_installed", lambda name: False)
    message = r"cpt_extras\.integrations\.data_parallel is not installed"
    with pytest.warns(UserWarning, match=message):
        assert extensions.services("processes").key_offset() is None
    message = "'int8' needs the package cpt_extras, which is not installed"
    with pytest.raises(RuntimeError, match=message):
        extensions.load("int8")


@pytest.mark.slow
def test_public_names_are_known_to_type_checkers(tmp_path):
    pytest.importorskip("mypy", reason="the extra dev")
    paths = list(reference("cpt_core"))
    unknown = ["cpt.no_such_name", "cpt.search.no_such_name", "cpt.sensitivity"]
    revealed = [f"reveal_type(cpt.{path})" for path in paths]
    file = tmp_path / "uses.py"
    file.write_text("\n".join(["import cpt_core as cpt", *unknown, *revealed]))
    options = (  # torch's types would take a minute
        "--no-error-summary --no-site-packages --ignore-missing-imports "
        "--follow-imports=silent --cache-dir=/dev/null"
    ).split()
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line.split("uses.py:")[-1] for line in process.stdout.splitlines()]
    errors = [line.split("  [")[0] for line in lines if line.split()[1] == "error:"]
    assert errors == [
        '2: error: Module has no attribute "no_such_name"',
        '3: error: Module has no attribute "no_such_name"',
        '4: error: Module has no attribute "sensitivity"',
    ], process.stdout + process.stderr
    types = [line.partition("Revealed type is ")[2] for line in lines]
    known = [text.strip('"') for text in types if text]
    assert len(known) == len(paths)
    assert [
        path for path, text in zip(paths, known, strict=True) if text == "Any"
    ] == []
