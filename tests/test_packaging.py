"""Installation files: they agree with each other and are tied to no machine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
import yaml
from helpers import run_command
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name as canonical
from packaging.version import Version

import cpt_core
from cpt_extras.optional_libraries import install_hint

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def lines(name: str) -> list[str]:
    """Return the lines of a project file without comments, blanks and hashes."""
    text = re.sub(r" \\\n +--hash=sha256:[0-9a-f]{64}", "", (ROOT / name).read_text())
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
    return [line for line in stripped if line]


def pins(name: str) -> dict[str, Version]:
    found = {}
    for line in lines(name):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
        assert match, f"{name}: {line!r} is not of the form name==version"
        found[canonical(match[1])] = Version(match[2])
    assert len(found) == len(lines(name)), f"{name} names something twice"
    return found


def ranges(requirements: Iterable[str]) -> dict[str, SpecifierSet]:
    """Return required packages with their ranges, with nested extras expanded."""
    found = {canonical(r.name): r.specifier for r in map(Requirement, requirements)}
    return {
        name: allowed
        for name, allowed in found.items()
        if name != canonical(PROJECT["name"])
    }


DIRECT = ranges(
    [
        *PROJECT["dependencies"],
        *chain.from_iterable(PROJECT["optional-dependencies"].values()),
    ]
)
BROWSER = ranges(PYPROJECT["dependency-groups"]["browser"])
TRACKERS = ranges(PYPROJECT["dependency-groups"]["trackers"])


def listed_by_git(*words: str) -> list[str]:
    """Return the files named by ``git ls-files``."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", *words]
    done = subprocess.run(listing, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.split("\0")[:-1]


# --- versions -------------------------------------------------------------------------------------


def test_locks_pin_declared_ranges_and_agree():
    locked, browser = pins("requirements.lock"), pins("browser/requirements.lock")
    for name, allowed in {
        **DIRECT,
        **ranges(PYPROJECT["build-system"]["requires"]),
    }.items():
        assert name in locked, f"{name} is not in requirements.lock: make lock"
        assert locked[name] in allowed, (
            f"{name}{allowed} in pyproject.toml, {locked[name]} in requirements.lock"
        )
    assert pins("constraints.txt") == {name: locked[name] for name in DIRECT}
    assert all(browser[name] in allowed for name, allowed in BROWSER.items())
    assert all(
        locked.get(name, version) == version for name, version in browser.items()
    )
    trackers = pins("tests/trackers/requirements.lock")
    assert all(trackers[name] in allowed for name, allowed in TRACKERS.items())
    assert all(
        trackers.get(name, locked[name]) == locked[name]
        for name in ("numpy", "pandas", "torch")
    )


@pytest.mark.parametrize(
    "name",
    [
        "requirements.lock",
        "browser/requirements.lock",
        "tests/trackers/requirements.lock",
    ],
)
def test_lock_has_hashes_and_no_index(name):
    text = (ROOT / name).read_text()
    pinned = r"[\w.\[\]-]+==[^\s]+(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    assert re.sub(rf"^(#.*\n)*({pinned})+$", "", text, flags=re.MULTILINE) == ""
    assert f"--require-hashes -r {name}" in (ROOT / "Makefile").read_text()
    assert "--hash" not in (ROOT / "constraints.txt").read_text()


def test_imports_are_declared_dependencies():
    declared = {**DIRECT, **BROWSER, **TRACKERS}.keys()
    providers = packages_distributions()
    folders = (
        "cpt_core",
        "cpt_extras",
        "cpt_lab",
        "cpt_lessons",
        "bench",
        "book",
        "browser",
        "tests",
    )
    for path in chain.from_iterable(
        ROOT.glob(f"{folder}/**/*.py") for folder in folders
    ):
        for module in re.findall(
            r"^\s*(?:import|from) (\w+)(?=$|[. ])", path.read_text(), flags=re.MULTILINE
        ):
            if (
                module in sys.stdlib_module_names
                or (ROOT / module).is_dir()
                or module not in providers
            ):
                continue
            names = {canonical(name) for name in providers[module]}
            assert names & declared, (
                f"{path.relative_to(ROOT)} imports {module}; pyproject.toml declares no {names}"
            )


def test_cpt_command_names_missing_extra():
    run = (
        f"EntryPoint('cpt', {PROJECT['scripts']['cpt']!r}, 'console_scripts').load()()"
    )
    code = f"import sys; sys.modules['typer'] = None; from importlib.metadata import EntryPoint; {run}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    said = f"error: typer cannot be imported; {install_hint('lab')}\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_environment_yml_installs_lock_on_supported_python():
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert [name.split("=")[0] for name in conda] == ["python", "pip"]
    python = conda[0].removeprefix("python=")
    assert python in SpecifierSet(PROJECT["requires-python"])
    assert PYPROJECT["tool"]["mypy"]["python_version"] == python
    assert pip == {
        "pip": ["-r requirements.lock"]
    }  # with hashes in it, pip refuses a folder beside it


def test_version_is_defined_once_and_cited():
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "cpt_core.__version__"
    }
    assert (
        yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
        == cpt_core.__version__
    )
    assert f"\n## {cpt_core.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_packages_are_all_shipped():
    rooms = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in ROOT.glob("cpt_*/**/__init__.py")
    }
    shipped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(
        rooms | set(shipped)
    )
    assert all((ROOT / folder).is_dir() for folder in shipped.values())


def test_pypi_page_has_valid_links_and_commands():
    page = (ROOT / PROJECT["readme"]).read_text()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert [link for link in links if not link.startswith("https://")] == []
    text = "".join(p.read_text() for p in sorted(ROOT.glob("cpt_*/commands.py")))
    found = r"^def (\w+)\(|@app.command\(\"([\w-]+)\"|^app.add_typer\(\w+, name=\"([\w-]+)\""
    commands = set(re.findall(found, text, re.M))
    known = {name for pair in commands for name in pair if name}
    assert {word for word in re.findall(r"`cpt ([\w-]+)", page)} <= known
    extras = set(PROJECT["optional-dependencies"]) - {"book", "dev"}
    about_extras = page.partition("## On the command line")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", about_extras, re.M)) == extras


# --- Makefile, Dockerfile, continuous integration -------------------------------------------------


def test_environment_variables_agree_across_makefile_docker_conda():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["variables"]
    assert "DGLBACKEND" in conda
    exported = dict(
        re.findall(
            r"^export (\w+) := (\S+)$",
            (ROOT / "Makefile").read_text(),
            flags=re.MULTILINE,
        )
    )
    in_image = dict(
        re.findall(
            r"^(?:ENV)?\s+(\w+)=(\S+)",
            (ROOT / "Dockerfile").read_text(),
            flags=re.MULTILINE,
        )
    )
    for name, value in conda.items():
        assert exported.get(name) == value, f"{name} differs in the Makefile"
        assert in_image.get(name) == value, f"{name} differs in the Dockerfile"


@pytest.fixture
def make(tmp_path):
    """Provide a function that calls the Makefile in an empty folder, with a Python that prints its arguments."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\nfor word in "$@"; do printf \'%s\\n\' "$word"; done\n'
    )
    python.chmod(0o755)
    for made in (".packages", ".installed"):
        (tmp_path / ".venv" / made).touch()

    def call(*words, **environment):
        given = {"PATH": os.environ["PATH"], **environment}
        done = subprocess.run(
            ["make", "-C", tmp_path, "-s", *words],
            capture_output=True,
            text=True,
            env=given,
        )
        return (
            done.returncode,
            [line for line in done.stdout.splitlines() if not line.startswith("make")],
            done.stderr,
        )

    return call


ODD = [
    "my pictures/",
    "a$b/",
    "a$$b/",
    'it\'s "mine"/',
    "a;b/",
    "$(HOME)/",
    "`id`/",
    "*",
    "\\a\\",
]


@pytest.mark.parametrize("odd", ODD)
def test_make_passes_special_characters_unchanged(odd, make):
    called = ["-m", "cpt_lab", "reproduce", "--dataset", odd]
    assert (
        make("reproduce", f"DATASET={odd}")
        == make("reproduce", DATASET=odd)
        == (0, called, "")
    )
    words = "-m cpt_lab reproduce --scale paper --notebook 03 --parameter"
    wanted = [*words.split(), f"dataset={odd} q=[1, 2]"]
    assert make(
        "reproduce", "SCALE=paper", "NB=03", f"PARAMS=dataset={odd} q=[1, 2]"
    ) == (0, wanted, "")


def setup_with(make, folder, pip):
    """Return status and stderr of `make setup` without uv, with pip replaced by a script."""
    (folder / ".venv/.packages").unlink()
    script = f'#!/bin/sh\ncase "$*" in *"pip install"*) {pip};; *"-m uv"*) exit 1;; *" -c "*|-c*) echo True;; esac\n'
    (folder / ".venv/bin/python").write_text(script)  # `python -m venv` is left alone
    status, _, said = make("setup", f"PYTHON={folder}/.venv/bin/python")
    assert not (folder / ".venv/.packages").exists()
    return status, [line for line in said.splitlines() if not line.startswith("make")]


@pytest.mark.parametrize("odd", [odd for odd in ODD if " " not in odd])
def test_make_does_not_execute_tool_arguments(odd, make):
    """Pass make variables to tools, split at blanks but never executed."""
    mutants = ["-m", "bench.mutants", "--only", odd, "b", "-j", odd, "--changed", odd]
    assert make("mutants", f"ONLY={odd} b", f"JOBS={odd}", f"CHANGED={odd}") == (
        0,
        mutants,
        "",
    )
    assert make("demo-check", f"ONLY={odd}") == (
        0,
        ["-m", "bench.demo_check", "--only", odd],
        "",
    )
    assert make("third-party", f"ONLY={odd}", "UPDATE=1")[1][-3:] == [
        "--only",
        odd,
        "--update",
    ]
    assert make("compat", f"COMPAT=--torch {odd}") == (
        0,
        ["-m", "bench.compat", "--torch", odd],
        "",
    )


def test_make_setup_names_network_when_install_fails(make, tmp_path):
    """Ask about the network if neither uv nor pip gets a package for an unknown reason."""
    status, said = setup_with(make, tmp_path, "exit 1")
    assert (status, len(said)) == (2, 1)
    assert "is there a network connection" in said[0]


@pytest.mark.parametrize(
    "reason",
    [
        "NewConnectionError(<HTTPSConnection>: Failed to establish a new connection: Name or service not known)",
        "Temporary failure in name resolution",
        "[Errno 101] Network is unreachable",
        "ProxyError('Cannot connect to proxy.')",
    ],
)
def test_make_setup_reports_missing_network_in_line(reason, make, tmp_path):
    retries = (
        f'for i in 1 2 3 4 5; do echo "WARNING: Retrying: {reason}" >&2; done; exit 1'
    )
    status, said = setup_with(make, tmp_path, retries)
    assert (status, len(said)) == (2, 1)
    assert said[0].startswith("setup: no network: ")


def test_make_setup_shows_errors_of_pip(make, tmp_path):
    status, said = setup_with(
        make,
        tmp_path,
        'echo "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" >&2; exit 1',
    )
    assert (status, said[0]) == (2, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES")
    assert "no network" not in "".join(said)


def test_texts_never_advise_install_from_index():
    """Avoid this advice, since anyone could register the unpublished name on an index."""
    kinds = (
        ".py",
        ".md",
        ".ipynb",
        ".toml",
        ".yml",
        ".yaml",
        ".sh",
        ".in",
        ".txt",
        "Makefile",
        "Dockerfile",
    )
    paths = [
        ROOT / name for name in run_command("git", "-C", ROOT, "ls-files").splitlines()
    ]
    advice = re.compile(
        r"(pip|uv|uvx|pipx|conda)\b[^\n`]{0,60}\b(install|add|run)\b[^\n`]*?\bcpt[-_](core|lab)\b(?!-\*)"
    )
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path.name.endswith(kinds) and path.is_file() and path != Path(__file__)
        for match in advice.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []
    assert advice.search("get it with: pip install 'cpt-core[lab]'")
    assert advice.search("uv pip install cpt_core")
    assert not advice.search(install_hint("lab"))


def test_make_evidence_verifies_a_row_per_store(make, tmp_path):
    stores = [
        tmp_path / "data" / "results" / name
        for name in ("a.jsonl", "b.jsonl", "no_rows.json")
    ]
    stores[0].parent.mkdir(parents=True)
    for path in stores:
        path.touch()
    verified = [
        "verify",
        "--rows",
        "1",
        "--cheapest",
        "--skip-missing",
        *(f"data/results/{s}.jsonl" for s in "ab"),
    ]
    called = ["-m", "cpt_lab", "claims", "--evidence", "-m", "cpt_lab", *verified]
    assert make("evidence") == (0, called, "")
    assert make("reproduce") == (
        0,
        ["-m", "cpt_lab", "reproduce"],
        "",
    )  # nothing that is not given


def test_make_clean_keeps_rows_unless_requested(make, tmp_path):
    rows, checkpoint = (
        tmp_path / "runs/paper/image.jsonl",
        tmp_path / "runs/paper/image.checkpoints/0.pt",
    )
    page, cache, mine = (
        tmp_path / p
        for p in ("runs/reproduce/demo/index.html", ".ruff_cache/0/x", "data/a/b")
    )
    for path in (rows, checkpoint, page, cache, mine):
        path.parent.mkdir(parents=True)
        path.write_text("1\n2\n")
    status, said, _ = make("clean")
    assert status == 0
    assert said == ["kept: runs/paper/image.jsonl (2 rows)", said[1]]
    assert "make clean RUNS=delete" in said[1]
    assert [p.exists() for p in (rows, checkpoint, page, cache, mine)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert make("distclean")[0] == 0
    assert [p.exists() for p in (rows, checkpoint, tmp_path / ".venv")] == [
        True,
        True,
        False,
    ]
    assert make("clean", "RUNS=delete") == (0, [], "")
    assert [p.exists() for p in (tmp_path / "runs", mine)] == [False, True]


def test_dockerfile_passes_hadolint():
    run_command(Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile")


def test_docker_image_runs_jupyter_unprivileged():
    """Run the final stage as user 1000, with Jupyter's random token."""
    instructions = lines("Dockerfile")
    stages = [line.split()[-1] for line in instructions if line.startswith("FROM ")]
    assert "test" in stages[:-1], "the test stage is not the default image"
    assert [line for line in instructions if line.startswith("USER ")] == ["USER 1000"]
    assert instructions[-1].startswith('CMD ["jupyter", "lab"')
    assert "token" not in instructions[-1], "Jupyter's own random token is the safe one"


def test_docker_image_contains_all_tracked_files():
    left_out = listed_by_git(
        "--cached", "--ignored", "--exclude-from", str(ROOT / ".dockerignore")
    )
    assert left_out == [], (
        "results made in the image would count as made with local changes"
    )


def test_ci_script_only_calls_make_test():
    assert lines(".ci/run") == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "make test",
    ]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100, "not executable"


@pytest.mark.parametrize(
    "name", ["book", "browser", "image", "test", "trackers", "wheel"]
)
def test_workflows_only_call_make_targets(name):
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
    )
    for job in workflow["jobs"].values():
        if "needs" in job:  # hands over what another job made
            assert [step["uses"].split("@")[0] for step in job["steps"]] == [
                "actions/deploy-pages"
            ]
            continue
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        assert all(command.removeprefix("make ") in targets for command in commands), (
            commands
        )
        (python,) = [
            step["with"]["python-version"]
            for step in job["steps"]
            if "setup-python" in step.get("uses", "")
        ]
        assert python == PYPROJECT["tool"]["mypy"]["python_version"]


def test_pre_commit_hooks_use_locked_ruff():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())[
        "repos"
    ]
    assert repository["repo"] == "local"
    assert {hook["entry"].split()[0] for hook in repository["hooks"]} == {
        ".venv/bin/ruff"
    }


def test_issue_forms_are_complete():
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.stem for form in forms] == ["bug", "question", "results"]
    for form in forms:
        read = yaml.safe_load(form.read_text())
        assert read["name"]
        assert read["description"]
        ids = [part["id"] for part in read["body"]]
        assert len(ids) == len(set(ids))
        assert any(part.get("validations", {}).get("required") for part in read["body"])


# --- nothing of one machine -----------------------------------------------------------------------

# The brackets keep these patterns from matching themselves.
MACHINE_PATHS = (
    r"(?<![\w.])(?:/[r]oot\b|/[h]ome/(?!cpt\b)\w|/[U]sers/\w|/[w]ork/\w|[C]:\\Users)"
)
REGISTRY_HOSTS = r"\b(?:pypi|pythonhosted|npmjs|anaconda|debian|ubuntu)[.](?:org|com)\b"


def test_files_name_no_machine():
    found = []
    for name in listed_by_git("--cached", "--others", "--exclude-standard"):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # not text, or not there any more
        found += [
            f"{name}: {match[0]}"
            for match in re.finditer(f"{MACHINE_PATHS}|{REGISTRY_HOSTS}", text)
        ]
    assert not found, "\n".join(found)
