"""Architecture rules: packages import in one direction, and torch-free modules import without torch."""

import ast
import re
import sys
from pathlib import Path

from helpers import run_command

from bench import sizes

ROOT = Path(__file__).parents[1]

# A package may import the packages that it names here, and those that they may import: one direction. The first ones
# are the core; it names cpt_extras in cpt_core.extensions alone.
ROOMS = {
    "cpt_core.validation": (),
    "cpt_core.extensions": (),
    "cpt_core.lazy_imports": (),
    "cpt_core.numerics": (),
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
    "cpt_core.bitops": ("cpt_core.quantization",),
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
        "cpt_extras.operations",
        "cpt_extras.cpu_info",
        "cpt_extras.files",
    ),
    "cpt_extras.int8": ("cpt_extras.kernels",),
    "cpt_extras.search": (
        "cpt_extras.kernels",
        "cpt_extras.progress",
        "cpt_extras.figures",
    ),
    "cpt_extras.diagnostics": ("cpt_extras.int8", "cpt_extras.progress"),
    "cpt_extras.integrations": ("cpt_extras.diagnostics",),
    "cpt_lab.former_names": (),
    "cpt_lab.paths": (),
    "cpt_lab.resources": (),
    "cpt_lab.signals": (),
    "cpt_lab.numerics": ("cpt_core.numerics",),
    "cpt_lab.provenance": ("cpt_lab.paths", "cpt_lab.resources", "cpt_extras.cpu_info"),
    "cpt_lab.doctor": ("cpt_lab.resources", "cpt_lab.provenance", "cpt_extras.kernels"),
    "cpt_lab.experiments": (
        "cpt_extras.search",
        "cpt_extras.diagnostics",
        "cpt_lab.paths",
    ),
    "cpt_lab.data": ("cpt_lab.experiments", "cpt_lab.resources"),
    "cpt_lab.tasks": ("cpt_lab.data", "cpt_core.models"),
    "cpt_lab.training": ("cpt_lab.tasks", "cpt_extras.integrations", "cpt_lab.signals"),
    "cpt_lab.sweeps": (
        "cpt_lab.training",
        "cpt_lab.doctor",
        "cpt_lab.provenance",
        "cpt_lab.numerics",
    ),
    "cpt_lab.analysis": ("cpt_lab.sweeps",),
    "cpt_lab.studies": ("cpt_lab.analysis",),  # opened by name, see grids.STUDIES
    "cpt_lab.commands": ("cpt_lab.analysis",),
    "cpt_lab.__main__": (),
    "cpt_lessons": ("cpt_lab.commands", "cpt_extras.integrations"),
}
FASTER = (
    "cpt_extras.kernels.cpp",
    "cpt_extras.kernels.triton",
)  # the second ring: the same numbers, in other languages
WITHOUT_TORCH = (
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


FILES = [
    p
    for p in sorted(ROOT.glob("cpt_*/**/*.py"))
    if p.parent.parent != ROOT or p.name != "__init__.py"
]
TREES = {p: ast.parse(p.read_text()) for p in FILES}


def room_of(module):
    """Return the package of a module: "cpt_extras.kernels" for "cpt_extras.kernels.lstm"; the lessons are one."""
    package, *inner = module.split(".")
    return package if package == "cpt_lessons" or not inner else f"{package}.{inner[0]}"


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def imports_of(path, inside=True):
    """Return the modules of this project that a file imports, optionally without those inside functions."""
    for node in ast.walk(TREES[path]) if inside else TREES[path].body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("cpt_")
        ):
            for a in node.names:
                place = ROOT.joinpath(*node.module.split("."), a.name)
                whole = place.is_dir() or place.with_suffix(".py").exists()
                yield f"{node.module}.{a.name}" if whole else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("cpt_"))


def runtime_imports(path):
    """Return the modules that a file imports at run time, also inside functions."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if (
                isinstance(child, ast.ImportFrom)
                and child.module
                and child.module.startswith("cpt_")
            ):
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from walk(child)

    return walk(TREES[path])


def below(room):
    """Return the packages that a package may import, including itself."""
    return {room}.union(*(below(r) for r in ROOMS[room]))


def test_packages_are_listed_and_documented():
    assert {room_of(module_of(p)) for p in FILES} == set(ROOMS)
    for place in ROOT.glob("cpt_*/**/__init__.py"):
        assert ast.get_docstring(ast.parse(place.read_text())), place


def test_imports_follow_package_order():
    above = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if path != ROOT / "cpt_core/extensions.py"  # names extras, for type checkers
        for name in imports_of(path)
        if name not in ("cpt_core", "cpt_extras", "cpt_lab")
        and room_of(name) not in below(room_of(module_of(path)))
    ]
    assert not above, "the order of the rooms is ROOMS"


def test_package_order_has_no_cycles():
    order, packages = list(ROOMS), ["cpt_core", "cpt_extras", "cpt_lab", "cpt_lessons"]
    assert packages == sorted(packages, key=[r.split(".")[0] for r in order].index)
    for room, needs in ROOMS.items():
        assert all(order.index(need) < order.index(room) for need in needs), room


def test_core_names_extras_in_one_file():
    inside = [path for path in FILES if path.is_relative_to(ROOT / "cpt_core")]
    inside.append(ROOT / "cpt_core/__init__.py")
    named = set()
    for path in inside:
        tree = ast.parse(path.read_text())
        imports = [
            n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)
        ]
        imports += [
            a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
        ]
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        if any(
            re.match(r"cpt_(extras|lab|lessons)\b", name) for name in [*imports, *texts]
        ):
            named.add(path.relative_to(ROOT).as_posix())
    assert named == {"cpt_core/extensions.py"}


def test_imports_have_no_cycles_between_files():
    """Count imports inside functions, but not those for type checkers."""
    graph = {
        module_of(path): set(runtime_imports(path)) - {module_of(path)}
        for path in FILES
    }
    modules = set(graph)
    graph = {
        module: {name for name in names if name in modules}
        for module, names in graph.items()
    }
    while leaves := {module for module, names in graph.items() if not names}:
        graph = {
            module: names - leaves
            for module, names in graph.items()
            if module not in leaves
        }
    assert not graph, "these files, or what they import, stand in a circle"


def test_compiled_kernels_are_imported_lazily_in_backend():
    outside = [path for path in FILES if not module_of(path).startswith(FASTER)]
    assert [
        p.name for p in outside if any(n.startswith(FASTER) for n in imports_of(p))
    ] == ["backend.py"]
    assert not [
        n
        for n in imports_of(ROOT / "cpt_extras/kernels/backend.py", inside=False)
        if n.startswith(FASTER)
    ]


MAX_LOADED_MODULES = 50  # 47 when this was written


def test_three_lines_load_few_modules():
    """Load only what the README's three lines and a training step need."""
    assert 30 < len(sizes.loaded_files()) <= MAX_LOADED_MODULES


def test_analysis_imports_only_stores_of_sweeps():
    used = {
        n
        for p in FILES
        if "cpt_lab/analysis" in str(p)
        for n in imports_of(p)
        if n.startswith("cpt_lab.sweeps")
    }
    assert used <= {
        "cpt_lab.sweeps.stores",
        "cpt_lab.sweeps.row_format",
        "cpt_lab.sweeps.result_row",
    }  # the last two: how a store is read, and the fields of its rows


def test_torch_free_modules_import_without_torch():
    """Import torch-free modules in one interpreter, without torch and notebook libraries."""
    modules = [
        m
        for m in map(module_of, FILES)
        if any(m == w or m.startswith(f"{w}.") for w in WITHOUT_TORCH)
    ]
    assert {m for w in WITHOUT_TORCH for m in modules if m.startswith(w)} == set(
        modules
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'nbformat', 'nbconvert'} & set(sys.modules), name"
    )
    run_command(sys.executable, "-c", code)


def test_library_neither_chooses_device_nor_prints():
    for path in FILES:
        assert ".cuda()" not in path.read_text(), path.name
        if "cpt_lessons" not in path.parts:
            calls = [n for n in ast.walk(TREES[path]) if isinstance(n, ast.Call)]
            assert not [
                c
                for c in calls
                if isinstance(c.func, ast.Name) and c.func.id == "print"
            ], path.name


def test_cpu_cores_are_counted_in_one_place():
    """Count in ``cpt_lab.resources``, since a job may use fewer cores than the machine has."""
    counted = re.compile(r"cpu_count|sched_getaffinity")
    assert [p for p in FILES if counted.search(p.read_text())] == [
        ROOT / "cpt_lab/resources.py"
    ]


# whose open is not that of text: descriptors, pictures, members of archives
OPEN_BYTES = (
    "os.open",
    "Image.open",
    "import_optional('PIL.Image', 'vision').open",
    "z.open",
)


def test_text_files_are_opened_as_utf_8():
    calls = [
        (p, n, ast.unparse(n.func))
        for p in FILES
        for n in ast.walk(TREES[p])
        if isinstance(n, ast.Call)
    ]
    bare = [
        f"{path}:{call.lineno}"
        for path, call, name in calls
        if re.search(r"^open$|\.(open|read_text|write_text)$", name)
        and name not in OPEN_BYTES
        if not any(k.arg == "encoding" for k in call.keywords)
        if not re.fullmatch(
            r"'[a-z+]*b[a-z+]*'", "".join(map(ast.unparse, call.args[-1:]))
        )
    ]
    assert not bare, "these do not say encoding="
