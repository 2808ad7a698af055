"""Public names: one list for the lazy loader, ``__all__``, ``dir`` and type checkers, in all packages."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from helpers import run_command

import cpt_core as cpt
from book.public_names import reference
from cpt_core.lazy_imports import FORMER_NAMES, defining_modules, is_top_level
from cpt_extras.integrations import distributed

ROOT = Path(__file__).parents[1]
HOMES = {
    name: home
    for name, home in defining_modules("cpt_core").items()
    if is_top_level(home)
}  # of subpackages
ROOMS = sorted(HOMES)
PACKAGES = ["cpt_core", *(f"{HOMES[room]}.{room}" for room in ROOMS)]
# what a training needs; the rest is in rooms
TOP = """
BitOpsLedger CyclicSchedule DeficitSchedule DelayedSchedule FORMATS Format FormatLadder FunctionSchedule Graph GraphConv
LayeredSchedule PrecisionScheduler QuantConfig QuantizationWarning RoleSchedules SAGEConv SUITE StaticSchedule
backend check count_bitops export make_schedule precision quantize quantize_ restore_ schedule_from_dict
solve_schedule summary
"""


def test_public_top_level_names():
    assert set(cpt.__all__) - set(ROOMS) == set(TOP.split())
    assert ROOMS == [
        "bitops",
        "diagnostics",
        "formats",
        "kernels",
        "quantization",
        "schedules",
        "search",
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_resolve(package):
    module = import_module(package)
    assert sorted(module.__all__) == sorted(defining_modules(package)) != []
    assert set(module.__all__) <= set(dir(module))
    for name, home in defining_modules(package).items():
        value = getattr(module, name)
        assert value is (
            sys.modules[f"{home}.{name}"]
            if is_top_level(home)
            else getattr(import_module(home), name)
        )
    with pytest.raises(
        AttributeError, match=f"module '{package}' has no attribute 'nonsense'"
    ):
        _ = module.nonsense


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_not_hidden_by_modules(package):
    """Check module names, since an imported module becomes an attribute of its package."""
    modules = {
        path.stem for path in Path(import_module(package).__file__).parent.iterdir()
    }
    assert modules & set(defining_modules(package)) == (
        {name for name, home in HOMES.items() if home == package}
    )


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_public_former_names_warn(former, name):
    packages = [cpt, cpt.search]
    (package,) = (package for package in packages if name in dir(package))
    with pytest.warns(DeprecationWarning, match=rf"\.{former} is now .*\.{name}$"):
        value = getattr(package, former)
    assert value is getattr(package, name)
    assert former not in dir(package)


def test_public_former_backend_attribute_warns():
    backend = cpt.backend()
    with pytest.warns(DeprecationWarning, match="Backend.why is now reasons"):
        reasons = backend.why
    assert reasons == backend.reasons


def test_public_former_synced_ranges_warns():
    message = r"agreed_ranges is now .*\.synced_ranges$"
    with pytest.warns(DeprecationWarning, match=message):
        former = distributed.agreed_ranges
    assert former is distributed.synced_ranges


def test_public_names_have_one_path():
    paths = list(reference("cpt_core"))
    bare = [path.split(".")[-1] for path in paths]
    assert sorted(bare) == sorted(set(bare))
    assert {"quantize_", "search.allocate"} < set(paths)


def test_public_star_import_gets_all_names(tmp_path):
    got: dict[str, object] = {}
    exec("from cpt_extras.search import *", got)
    assert set(got) - {"__builtins__"} == set(cpt.search.__all__)


def test_public_subpackages_load_without_torch_and_numpy():
    rooms = ", ".join(f"cpt.{room}" for room in ROOMS)
    code = f"import sys, cpt_core as cpt; {rooms}, dir(cpt); assert not {{'torch', 'numpy'}} & set(sys.modules); "
    code += "assert cpt.schedules.Rex(0.5).d == 0.5; assert cpt.formats.COSTS['ace']"
    run_command(sys.executable, "-c", code)


def test_public_names_are_known_to_type_checkers(tmp_path):
    pytest.importorskip("mypy", reason="the extra dev")
    lines = [
        "import cpt_core as cpt",
        "cpt.no_such_name",
        "cpt.search.no_such_name",
        "cpt.sensitivity",
    ]
    lines += [f"reveal_type(cpt.{path})" for path in reference("cpt_core")]
    file = tmp_path / "uses.py"
    file.write_text("\n".join(lines))
    alone = [
        "--no-site-packages",
        "--ignore-missing-imports",
        "--follow-imports=silent",
        "--cache-dir=/dev/null",
    ]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        *alone,
        file,
    ]  # torch's types would take a minute
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line.split("uses.py:")[-1] for line in done.stdout.splitlines()]
    errors = [line for line in said if line.split()[1] == "error:"]
    assert [line.split("  [")[0] for line in errors] == [
        '2: error: Module has no attribute "no_such_name"',
        '3: error: Module has no attribute "no_such_name"',
        '4: error: Module has no attribute "sensitivity"',
    ], done.stdout + done.stderr
    revealed = [
        line.split("Revealed type is ", 1)[1]
        for line in said
        if "Revealed type is" in line
    ]
    assert len(revealed) == len(reference("cpt_core"))
    unknown = [
        path
        for path, kind in zip(reference("cpt_core"), revealed, strict=True)
        if kind.strip('"') == "Any"
    ]
    assert unknown == []
