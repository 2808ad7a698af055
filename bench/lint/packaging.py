"""Checks of installation files: pyproject.toml, locks, conda, Docker, the Makefile and workflows agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.lint.repository import Problem, Repository

LOCK = "requirements.lock"
BROWSER_LOCK = "browser/requirements.lock"
TRACKERS_LOCK = "tests/trackers/requirements.lock"
PINNED_WITH_HASHES = re.compile(
    r"[\w.\[\]-]+==[^\s]+(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
)
PYTHON_FOLDERS = r"(cpt_\w+|bench|book|browser|tests)/.*\.py"
MAKE_TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
LINTS = {"make lint", "make check", "make test"}  # these read the commits
CI_SCRIPT = ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test"]
RESERVED_EXTRAS = {"book", "dev"}  # for those who work on this repository

Ranges = dict[str, SpecifierSet]


def check_locks(repository: Repository) -> Iterator[Problem]:
    """Check that locks pin what pyproject.toml declares, with hashes, and agree with each other."""
    project, groups = pyproject(repository), pyproject(repository)["dependency-groups"]
    direct = direct_ranges(repository)
    build = ranges(project["build-system"]["requires"])
    pins = {
        file: locked_versions(repository, file)
        for file in (LOCK, BROWSER_LOCK, TRACKERS_LOCK)
    }
    declared = {
        LOCK: {**direct, **build},
        BROWSER_LOCK: ranges(groups["browser"]),
        TRACKERS_LOCK: ranges(groups["trackers"]),
    }
    shared = {
        BROWSER_LOCK: pins[BROWSER_LOCK].keys(),
        TRACKERS_LOCK: {"numpy", "pandas", "torch"},
    }
    for file, allowed in declared.items():
        for name, versions in allowed.items():
            if name not in pins[file] or pins[file][name] not in versions:
                yield Problem(
                    file, 1, f"pyproject.toml wants {name}{versions}: make lock"
                )
        for name in shared.get(file, set()) & pins[LOCK].keys() & pins[file].keys():
            if pins[file][name] != pins[LOCK][name]:
                yield repository.problem(
                    file, f"another {name} than in {LOCK}", f"{name}=="
                )
    if locked_versions(repository, "constraints.txt") != {
        name: pins[LOCK].get(name) for name in direct
    }:
        yield Problem(
            "constraints.txt", 1, f"not the direct dependencies of {LOCK}: make lock"
        )


def check_hashes(repository: Repository) -> Iterator[Problem]:
    """Check that locks have a hash for every file and name no index, and the Makefile requires the hashes."""
    for file in (LOCK, BROWSER_LOCK, TRACKERS_LOCK):
        rest = PINNED_WITH_HASHES.sub("", repository.text(file))
        others = [
            line for line in rest.splitlines() if line and not line.startswith("#")
        ]
        for line in others:
            yield repository.problem(
                file, "neither a pin with hashes nor a comment", line
            )
        if f"--require-hashes -r {file}" not in repository.text("Makefile"):
            yield Problem("Makefile", 1, f"no --require-hashes -r {file}")


def check_declared_imports(repository: Repository) -> Iterator[Problem]:
    """Check that imported packages are declared in pyproject.toml."""
    groups = pyproject(repository)["dependency-groups"]
    declared = {
        *direct_ranges(repository),
        *ranges(groups["browser"]),
        *ranges(groups["trackers"]),
    }
    providers = packages_distributions()
    for file in repository.find(PYTHON_FOLDERS):
        for statement in re.finditer(
            r"^\s*(?:import|from) (\w+)(?=$|[. ])", repository.text(file), re.MULTILINE
        ):
            module = statement[1]
            is_ours = module in sys.stdlib_module_names or repository.exists(module)
            names = {canonicalize_name(name) for name in providers.get(module, ())}
            if names and not is_ours and not names & declared:
                yield repository.problem(
                    file, f"pyproject.toml does not declare {module}", statement[0]
                )


def check_version(repository: Repository) -> Iterator[Problem]:
    """Check that the version is defined in cpt_core alone, and CITATION.cff and CHANGELOG.md have it."""
    version = re.search(
        r'^__version__ = "(.*)"$', repository.text("cpt_core/__init__.py"), re.MULTILINE
    )[1]
    if pyproject(repository)["tool"]["setuptools"]["dynamic"]["version"] != {
        "attr": "cpt_core.__version__"
    }:
        yield Problem("pyproject.toml", 1, "the version is not that of cpt_core")
    if repository.yaml("CITATION.cff")["version"] != version:
        yield repository.problem(
            "CITATION.cff", f"the version is {version}", "\nversion"
        )
    if f"\n## {version}\n" not in repository.text("CHANGELOG.md"):
        yield Problem("CHANGELOG.md", 1, f"no section {version}")


def check_shipped_packages(repository: Repository) -> Iterator[Problem]:
    """Check that the wheel contains every package and the folders that `package-dir` names."""
    setuptools = pyproject(repository)["tool"]["setuptools"]
    inits = repository.find(r"cpt_.*/__init__\.py")
    packages = {file.removesuffix("/__init__.py").replace("/", ".") for file in inits}
    different = {*setuptools["packages"]} ^ (
        packages | setuptools["package-dir"].keys()
    )
    for package in sorted(different):
        yield repository.problem(
            "pyproject.toml",
            f"packages: {package} is too much or missing",
            f'"{package}"',
        )
    for folder in setuptools["package-dir"].values():
        if not repository.exists(folder):
            yield repository.problem(
                "pyproject.toml", f"there is no folder {folder}", folder
            )


def check_pypi_page(repository: Repository) -> Iterator[Problem]:
    """Check that the package's page has absolute links only, and names commands and extras that exist."""
    project = pyproject(repository)["project"]
    file = project["readme"]
    page = repository.text(file)
    for link in re.findall(r"\]\(((?!https://)[^)]*)\)", page):
        yield repository.problem(
            file, "a relative link leads nowhere on an index", link
        )
    sources = "".join(map(repository.text, repository.find(r"cpt_\w+/commands\.py")))
    definitions = r"^def (\w+)\(|@app.command\(\"([\w-]+)\"|^app.add_typer\(\w+, name=\"([\w-]+)\""
    commands = set(chain.from_iterable(re.findall(definitions, sources, re.MULTILINE)))
    for command in re.findall(r"`cpt ([\w-]+)", page):
        if command not in commands:
            yield repository.problem(
                file, f"there is no command {command}", f"`cpt {command}"
            )
    extras = re.findall(
        r"^\| `(\w+)` \|", page.partition("## On the command line")[0], re.MULTILINE
    )
    if set(extras) != project["optional-dependencies"].keys() - RESERVED_EXTRAS:
        yield repository.problem(file, "not the extras of pyproject.toml", "\n| `")


def check_environments(repository: Repository) -> Iterator[Problem]:
    """Check that conda, Docker, mypy and the Makefile use one Python and one set of variables."""
    python = pyproject(repository)["tool"]["mypy"]["python_version"]
    conda = repository.yaml("environment.yml")
    # With hashes in the lock, pip refuses a folder beside it.
    if conda["dependencies"] != [f"python={python}", "pip", {"pip": [f"-r {LOCK}"]}]:
        yield repository.problem(
            "environment.yml",
            f"not Python {python}, pip and the lock",
            "\ndependencies",
        )
    if python not in SpecifierSet(pyproject(repository)["project"]["requires-python"]):
        yield repository.problem(
            "pyproject.toml", f"requires-python excludes {python}", "requires-python"
        )
    for file, pattern in (
        ("Makefile", r"^export (\w+) := (\S+)$"),
        ("Dockerfile", r"^(?:ENV)?\s+(\w+)=(\S+)"),
    ):
        variables = dict(re.findall(pattern, repository.text(file), re.MULTILINE))
        for name, value in conda["variables"].items():
            if variables.get(name) != value:
                yield repository.problem(
                    file, f"{name} is {value} in environment.yml", name
                )


def check_docker(repository: Repository) -> Iterator[Problem]:
    """Check that the image runs Jupyter as user 1000 with a random token, and holds every tracked file."""
    instructions = stripped_lines(repository, "Dockerfile")
    stages = [line.split()[-1] for line in instructions if line.startswith("FROM ")]
    if "test" not in stages[:-1]:
        yield Problem("Dockerfile", 1, "the tests need a stage before the last one")
    if [line for line in instructions if line.startswith("USER ")] != ["USER 1000"]:
        yield repository.problem("Dockerfile", "the only user is 1000", "USER ")
    command = instructions[-1]
    if not command.startswith('CMD ["jupyter", "lab"') or "token" in command:
        yield repository.problem(
            "Dockerfile", "Jupyter starts last, with its own random token", command
        )
    patterns = stripped_lines(repository, ".dockerignore")
    excluded = [f"--exclude={pattern}" for pattern in patterns]
    process = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", *excluded],
        cwd=repository.root,
        capture_output=True,
        text=True,
        check=False,
    )
    # Results that the image makes would count as made with local changes.
    for file in process.stdout.splitlines():
        yield Problem(".dockerignore", 1, f"leaves out the tracked {file}")


def check_workflows(repository: Repository) -> Iterator[Problem]:
    """Check that continuous integration calls make alone, with the Python of mypy, and hooks use the locked ruff."""
    if stripped_lines(repository, ".ci/run") != CI_SCRIPT:
        yield Problem(".ci/run", 1, "the script does more than make test")
    python = pyproject(repository)["tool"]["mypy"]["python_version"]
    targets = set(MAKE_TARGET.findall(repository.text("Makefile")))
    for file in repository.find(r"\.github/workflows/.*\.yml"):
        for job in repository.yaml(file)["jobs"].values():
            steps = [
                step
                for step in job["steps"]
                if "deploy-pages" not in step.get("uses", "")
            ]
            commands = [step["run"] for step in steps if "run" in step]
            depths = [step.get("with", {}).get("fetch-depth") for step in steps]
            if LINTS.intersection(commands) and 0 not in depths:
                text = (
                    "fetch-depth: 0 is missing: lint checks the subjects of all commits"
                )
                yield repository.problem(file, text, "actions/checkout")
            for command in commands:
                if command.removeprefix("make ") not in targets:
                    yield repository.problem(
                        file, f"not a target of the Makefile: {command}", command
                    )
            versions = [
                step["with"]["python-version"]
                for step in steps
                if "setup-python" in step.get("uses", "")
            ]
            if steps and versions != [python]:
                yield repository.problem(
                    file, f"expected one setup of Python {python}", "python-version"
                )
    (hooks,) = repository.yaml(".pre-commit-config.yaml")["repos"]
    for hook in hooks["hooks"]:
        if hooks["repo"] != "local" or not hook["entry"].startswith(".venv/bin/ruff "):
            yield repository.problem(
                ".pre-commit-config.yaml", "not the locked ruff", hook["entry"]
            )


def check_issue_forms(repository: Repository) -> Iterator[Problem]:
    """Check that issue forms have a name, a description, distinct ids and a required field."""
    for file in repository.find(r"\.github/ISSUE_TEMPLATE/(bug|question|results)\.yml"):
        form = repository.yaml(file)
        ids = [part["id"] for part in form["body"]]
        required = [
            part for part in form["body"] if part.get("validations", {}).get("required")
        ]
        if not (form.get("name") and form.get("description") and required):
            yield Problem(
                file, 1, "a name, a description or a required field is missing"
            )
        if len(ids) != len(set(ids)):
            yield Problem(file, 1, "two fields have one id")


def pyproject(repository: Repository) -> dict[str, Any]:
    """Return the content of pyproject.toml."""
    return tomllib.loads(repository.text("pyproject.toml"))


def ranges(requirements: Iterable[str]) -> Ranges:
    """Return required packages with their ranges, without this package."""
    parsed = [Requirement(requirement) for requirement in requirements]
    by_name = {canonicalize_name(each.name): each.specifier for each in parsed}
    return {name: allowed for name, allowed in by_name.items() if name != "cpt-core"}


def direct_ranges(repository: Repository) -> Ranges:
    """Return the ranges of all dependencies and extras."""
    project = pyproject(repository)["project"]
    extras = project["optional-dependencies"].values()
    return ranges(chain(project["dependencies"], *extras))


def stripped_lines(repository: Repository, file: str) -> list[str]:
    """Return the lines of a file without comments and empty lines."""
    lines = (
        re.sub(r"(^|\s)#.*", "", line).strip()
        for line in repository.text(file).splitlines()
    )
    return [line for line in lines if line]


def locked_versions(repository: Repository, file: str) -> dict[str, Version]:
    """Return the versions that a lock pins."""
    pins = re.findall(
        r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;]+)", repository.text(file), re.MULTILINE
    )
    return {canonicalize_name(name): Version(version) for name, version in pins}
