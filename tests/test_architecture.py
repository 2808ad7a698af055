"""The rules that keep the package readable: imports go one way, and what needs no torch imports without it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cpt_core"

# Each module may import those before it.
ORDER = [
    "paths", "cost", "schedules", "budget", "quantizers", "layers", "lstm_layers", "graph_ops", "graph_layers",
    "dgl_layers", "attention_layers", "convert", "scheduler", "bitops", "integrations", "recipes", "specs",
    "models", "data", "tasks", "train", "grids", "leases", "stores", "worker", "calibration", "cluster", "runs", "plan",
    "results", "experiments", "figures", "range_test", "parameters", "teaching", "ledger", "reproducing", "report",
    "reproduce", "__main__",
]  # fmt: skip
WITHOUT_TORCH = [
    "schedules",
    "budget",
    "cost",
    "recipes",
    "specs",
    "grids",
    "leases",
    "stores",
    "results",
    "experiments",
    "figures",
    "parameters",
]


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """Names of the package's modules that a file imports, including inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cpt_core":
            parts = node.module.split(".")
            yield from (
                [parts[1]]
                if len(parts) > 1
                else [a.name for a in node.names if (PACKAGE / a.name).exists() or (PACKAGE / f"{a.name}.py").exists()]
            )
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("cpt_core."))


FILES = [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]


def test_every_module_has_its_place():
    assert {module_of(p) for p in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = ORDER.index(module_of(path))
    for name in imports_of(path):
        later = ORDER.index(name) > own
        assert not later, f"{path.name} imports {name}, which comes after it"


def test_nothing_else_imports_the_integrations():
    others = [p for p in [*FILES, PACKAGE / "__init__.py"] if module_of(p) != "integrations"]
    assert not [p.name for p in others if "integrations" in imports_of(p)]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_imports_without_torch(name):
    code = f"import sys; import cpt_core.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_library_never_chooses_a_device_or_prints():
    for path in FILES:
        text = path.read_text()
        assert ".cuda()" not in text, path.name
        if path.name not in ("teaching.py", "__main__.py"):
            calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path.name


def test_public_names_resolve():
    import cpt_core

    for name in cpt_core._HOME:
        assert getattr(cpt_core, name) is not None
        assert name in dir(cpt_core)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = cpt_core.nonsense
    assert callable(cpt_core.precision)  # a module of this name would hide the function
