"""Checks of imports: packages import in one direction, and the core does not know its optional parts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set

from bench.lint.repository import Problem, Repository

# A package may import the packages that it names here, and those that they may import. A package that is named stands
# above the one that names it, so that the order has no cycle.
MAY_IMPORT = {
    "cpt_core.validation": (),
    "cpt_core.extensions": (),
    "cpt_core.lazy_imports": (),
    "cpt_core.numerics": (),
    "cpt_core.text_repr": (),
    "cpt_core.schedules": (
        "cpt_core.validation",
        "cpt_core.extensions",
        "cpt_core.lazy_imports",
    ),
    "cpt_core.graphs": ("cpt_core.validation", "cpt_core.extensions"),
    "cpt_core.quantization": (
        "cpt_core.schedules",
        "cpt_core.graphs",
        "cpt_core.numerics",
    ),
    "cpt_core.bitops": ("cpt_core.quantization", "cpt_core.text_repr"),
    "cpt_core.models": ("cpt_core.graphs",),
    # optional: each registers itself at an extension point of the core
    "cpt_extras.cpu_info": (),
    "cpt_extras.figures": (),
    "cpt_extras.files": (),
    "cpt_extras.former_names": (),
    "cpt_extras.optional_libraries": (),
    "cpt_extras.progress": (),
    "cpt_extras.validation": ("cpt_core.validation",),
    "cpt_extras.operations": ("cpt_core.quantization",),
    "cpt_extras.formats": (
        "cpt_core.bitops",
        "cpt_extras.former_names",
        "cpt_extras.optional_libraries",
        "cpt_extras.operations",
        "cpt_extras.validation",
    ),
    "cpt_extras.kernels": (
        "cpt_extras.formats",
        "cpt_extras.cpu_info",
        "cpt_extras.files",
    ),
    "cpt_extras.int8": ("cpt_extras.kernels",),
    "cpt_extras.search": (
        "cpt_extras.kernels",
        "cpt_extras.progress",
    ),
    "cpt_extras.diagnostics": ("cpt_extras.int8",),
    "cpt_extras.integrations": ("cpt_extras.diagnostics",),
    "cpt_lab.former_names": (),
    "cpt_lab.paths": (),
    "cpt_lab.resources": (),
    "cpt_lab.signals": (),
    "cpt_lab.numerics": ("cpt_core.numerics",),
    "cpt_lab.provenance": ("cpt_lab.paths", "cpt_lab.resources", "cpt_extras.cpu_info"),
    "cpt_lab.doctor": ("cpt_lab.provenance", "cpt_extras.files"),
    "cpt_lab.experiments": ("cpt_extras.search",),
    "cpt_lab.data": ("cpt_lab.experiments", "cpt_lab.paths", "cpt_lab.resources"),
    "cpt_lab.tasks": ("cpt_lab.data", "cpt_core.models"),
    "cpt_lab.training": ("cpt_lab.tasks", "cpt_extras.integrations", "cpt_lab.signals"),
    "cpt_lab.sweeps": (
        "cpt_lab.training",
        "cpt_lab.doctor",
        "cpt_lab.numerics",
    ),
    "cpt_lab.analysis": ("cpt_lab.sweeps", "cpt_extras.figures"),
    "cpt_lab.studies": ("cpt_lab.analysis",),  # loaded by name, see grids.STUDIES
    "cpt_lab.commands": ("cpt_lab.analysis",),
    "cpt_lab.__main__": (),
    "cpt_lessons": ("cpt_lab.commands",),
}
WITH_INDIRECT: dict[str, set[str]] = {}
for _package, _needed in MAY_IMPORT.items():
    WITH_INDIRECT[_package] = {_package}.union(*(WITH_INDIRECT[n] for n in _needed))

EXTENSIONS = "cpt_core/extensions.py"  # the only file of the core that names cpt_extras
BACKEND = "cpt_extras/kernels/backend.py"  # the only file that imports compiled kernels
COMPILED = ("cpt_extras.kernels.cpp", "cpt_extras.kernels.triton")
# The modules of cpt_lab.sweeps that read stored rows; the others train.
STORE_READERS = {
    "cpt_lab.sweeps.stores",
    "cpt_lab.sweeps.row_format",
    "cpt_lab.sweeps.result_row",
}
Import = tuple[str, int]  # module, line


def check_package_order(repository: Repository) -> Iterator[Problem]:
    """Check that imports follow MAY_IMPORT, which lists every package."""
    for file in source_files(repository):
        package = package_of(module_name(file))
        if package not in MAY_IMPORT:
            yield Problem(file, 1, f"MAY_IMPORT does not list {package}")
            continue
        for module, line in project_imports(repository, file):
            known = file == EXTENSIONS or module in (
                "cpt_core",
                "cpt_extras",
                "cpt_lab",
            )
            if not known and package_of(module) not in WITH_INDIRECT[package]:
                yield Problem(file, line, f"{package} may not import {module}")


def check_core_independence(repository: Repository) -> Iterator[Problem]:
    """Check that only `cpt_core.extensions` names the packages above the core, in imports and strings."""
    above = re.compile(r"cpt_(extras|lab|lessons)\b")
    for file in repository.find(r"cpt_core/.*\.py"):
        for node in ast.walk(repository.tree(file)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            names = [node.value] if is_text else [name for name, _ in imported(node)]
            if file != EXTENSIONS and any(above.match(name) for name in names):
                yield Problem(
                    file, node.lineno, "the core may not name packages above it"
                )


def check_import_cycles(repository: Repository) -> Iterator[Problem]:
    """Check that files do not import each other in a circle, also not inside functions."""
    files = {module_name(file): file for file in source_files(repository)}
    graph = {}
    for module, file in files.items():
        names = runtime_imports(repository.tree(file))
        graph[module] = names & files.keys() - {module}
    while graph := _without_leaves(graph):
        cycle = find_cycle(graph)
        path = " -> ".join(files[module] for module in [*cycle, cycle[0]])
        yield Problem(files[cycle[0]], 1, f"files import each other: {path}")
        graph = {m: names - {*cycle} for m, names in graph.items() if m not in cycle}


def find_cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return the modules of one cycle, in the order of their imports; every module of the graph imports one.

    >>> find_cycle({"test": {"b"}, "b": {"a"}, "a": {"b"}})
    ['a', 'b']
    """
    path = [min(graph)]
    while (following := min(graph[path[-1]])) not in path:
        path.append(following)
    cycle = path[path.index(following) :]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]


def _without_leaves(graph: Mapping[str, Set[str]]) -> dict[str, Set[str]]:
    """Return a graph without modules that import no others of it, or import only such modules."""
    remaining = dict(graph)
    while leaves := {module for module, names in remaining.items() if not names}:
        modules = remaining.keys() - leaves
        remaining = {module: remaining[module] - leaves for module in modules}
    return remaining


def check_compiled_kernels(repository: Repository) -> Iterator[Problem]:
    """Check that only the backend imports compiled kernels, inside functions."""
    for file in source_files(repository):
        if module_name(file).startswith(COMPILED):
            continue
        top_level = {node.lineno for node in repository.tree(file).body}
        for module, line in project_imports(repository, file):
            if module.startswith(COMPILED) and (file != BACKEND or line in top_level):
                yield Problem(
                    file,
                    line,
                    f"{module} is imported inside functions of {BACKEND} only",
                )


def check_analysis_imports(repository: Repository) -> Iterator[Problem]:
    """Check that the analysis reads stored rows, and needs nothing that trains."""
    for file in repository.find(r"cpt_lab/analysis/.*\.py"):
        for module, line in project_imports(repository, file):
            if module.startswith("cpt_lab.sweeps") and module not in STORE_READERS:
                yield Problem(file, line, f"the analysis may not import {module}")


def source_files(repository: Repository) -> list[str]:
    """Return the Python files of the packages, without the packages' own `__init__.py`."""
    files = repository.find(r"cpt_\w+/.*\.py")
    return [file for file in files if not re.fullmatch(r"cpt_\w+/__init__\.py", file)]


def module_name(file: str) -> str:
    """Return the module of a file: "cpt_lab.data" for "cpt_lab/data/__init__.py"."""
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return the entry of MAY_IMPORT for a module: "cpt_lab.data" for "cpt_lab.data.files"."""
    first, *inner = module.split(".")
    return first if first == "cpt_lessons" or not inner else f"{first}.{inner[0]}"


def imported(node: ast.AST) -> list[Import]:
    """Return the names that an import statement loads: of `from a import b`, a and a.b."""
    if isinstance(node, ast.Import):
        return [(alias.name, node.lineno) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [(name, node.lineno) for name in (node.module, *names)]
    return []


def project_imports(repository: Repository, file: str) -> Iterator[Import]:
    """Yield the modules of this project that a file imports anywhere."""
    for node in ast.walk(repository.tree(file)):
        for name, line in imported(node):
            path = name.replace(".", "/")
            is_module = repository.exists(path) or repository.exists(f"{path}.py")
            if name.startswith("cpt_") and is_module:
                yield name, line


def runtime_imports(node: ast.AST) -> set[str]:
    """Return what the code below a node imports, except for type checkers."""
    names = {name for name, _ in imported(node)}
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
            child.test
        )
        if not is_typing:
            names |= runtime_imports(child)
    return names
