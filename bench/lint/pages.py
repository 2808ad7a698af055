"""Checks of README, docs and all other texts: links, names, line lengths, and nothing of one machine."""

from __future__ import annotations

import ast
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator

from bench.lint.packaging import MAKE_TARGET
from bench.lint.repository import CODE, Problem, Repository, tags
from cpt_lab.experiments import grids

PAGES = r"README\.md|docs/.*\.md"
LINKED = r"[^/]+\.md|(docs|data)/.*\.md|notebooks/[^/]+\.(md|ipynb)"
WIDE_PAGES = "docs/preregistration.md"  # its words stay as they were written
MAX_LINE, MAX_TABLE_LINE, MAX_CLAIM_LINE = (
    120,
    300,
    2500,
)  # a claim's cell has all of its effects
MIN_FONT_SIZE = 8

# The brackets keep these patterns from matching themselves.
MACHINE = re.compile(
    r"(?<![\w.])(?:/[r]oot\b|/[h]ome/(?!cpt\b)\w|/[U]sers/\w|/[w]ork/\w|[C]:\\Users)"
    r"|\b(?:pypi|pythonhosted|npmjs|anaconda|debian|ubuntu)[.](?:org|com)\b"
)
# Anyone could register the unpublished name on an index.
INSTALL_FROM_INDEX = re.compile(
    r"(pip|uv|uvx|pipx|conda)\b[^\n`]{0,60}\b(install|add|run)\b[^\n`]*?\bcpt[-_](?:core|lab)\b(?!-\*)"
)

# "`SCHEDULES` in `cpt_core/schedules/profiles.py`", and "| `file.py` | `Class.method` |"
NAME_IN_FILE = re.compile(
    r"`(?P<name>[A-Za-z_]+)`(?: \([^)]*\))?,? (?:in|of) `(?P<file>[\w/]+\.py)`"
)
FILE_AND_NAME = re.compile(
    r"^\| `(?P<file>[\w/]+\.py)` \| `(?P<name>[\w.]+)` \|", re.MULTILINE
)
REPOSITORY_PATH = re.compile(
    r"`((?:cpt_\w+|tests|bench|docs|data|notebooks)/[\w./-]+)`"
)
# "python -m bench.roles", and "python -m bench.adaptive at commit 888f4b8a..." where the module was removed
MODULE_COMMAND = re.compile(
    r"python -m (?P<module>[\w.]+)(?P<commit>[^;]* at commit [0-9a-f]{40}\b)?"
)
README_COMMANDS = (
    "JupyterLab",
    "papermill",
    "make image",
    "environment.yml",
    "jupyter lab notebooks",
)


def check_links(repository: Repository) -> Iterator[Problem]:
    """Check that links of pages and notebooks lead to files, and to headings of these."""
    for file in repository.find(LINKED):
        prose = CODE.sub("", repository.prose(file))
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose):
            if link.startswith(("http", "mailto")):
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(file), link))
                if link
                else file
            )
            if not repository.exists(target):
                yield repository.problem(file, f"there is no {target}", f"]({link}")
            elif anchor and anchor not in anchors(repository, target):
                yield repository.problem(
                    file, f"{target} has no heading #{anchor}", f"#{anchor})"
                )


def check_line_lengths(repository: Repository) -> Iterator[Problem]:
    """Check that lines of pages are short, and none begins with %, which the site takes for a comment."""
    for file in repository.find(PAGES):
        table_line = (
            MAX_CLAIM_LINE if file.startswith("docs/reproducing/") else MAX_TABLE_LINE
        )
        for number, line in enumerate(repository.text(file).splitlines(), 1):
            longest = table_line if line.startswith("|") else MAX_LINE
            if len(line) > longest and file != WIDE_PAGES:
                yield Problem(
                    file, number, f"{len(line)} characters, at most {longest}"
                )
            if line.lstrip(" ").startswith("%"):
                yield Problem(
                    file, number, "a line that begins with % is a comment of the site"
                )


def check_grid_names(repository: Repository) -> Iterator[Problem]:
    """Check that `cpt run NAME` on a page names a grid."""
    for file in repository.find(PAGES):
        for name in re.findall(r"cpt(?:_lab)? run ([\w/-]+)", repository.text(file)):
            try:
                grids.find_grids(name)
            except ValueError as error:
                yield repository.problem(file, str(error), f"run {name}")


def check_result_commands(repository: Repository) -> Iterator[Problem]:
    """Check that results name the command that made them: a module that exists, or the commit that held it."""
    for file in repository.find(r"data/results/[^/]+\.json"):
        command = json.loads(repository.text(file)).get("command", "")
        commands = list(MODULE_COMMAND.finditer(command))
        if not commands:
            yield repository.problem(file, "no command that made it")
        for match in commands:
            path = match["module"].replace(".", "/")
            files = (f"{path}.py", f"{path}/__main__.py")
            if not match["commit"] and not any(map(repository.exists, files)):
                yield repository.problem(
                    file,
                    f"no module {match['module']}; name the new one, or say at commit ... which held it",
                    '"command"',
                )


def check_readme(repository: Repository) -> Iterator[Problem]:
    """Check that README.md shows one figure, the ways to run a notebook, and the parameters that it has."""
    page = repository.text("README.md")
    for words in README_COMMANDS:
        if words not in page:
            yield Problem("README.md", 1, f"no word of {words}")
    if re.findall(r"!\[.*\]\((.*)\)", page) != ["data/results/figure_3.png"]:
        yield repository.problem("README.md", "expected one figure, figure_3.png", "![")
    extras = tomllib.loads(repository.text("pyproject.toml"))["project"][
        "optional-dependencies"
    ]
    for extra in ("lab", "vision", "notebooks"):
        has_jupyter = any(
            name.startswith(("jupyter", "papermill")) for name in extras[extra]
        )
        if has_jupyter != (extra == "notebooks"):
            yield repository.problem(
                "pyproject.toml", "the extra notebooks brings Jupyter", f"\n{extra} = "
            )
    for file, options in re.findall(
        r"papermill (notebooks/\w+\.ipynb) (.*?)```", page, re.DOTALL
    ):
        code = "".join(
            cell.source
            for cell in repository.notebook(file).cells
            if "parameters" in tags(cell)
        )
        for name in re.findall(r"(?:-p |-y \")(\w+)", options):
            if not re.search(rf"^{name}\b", code, re.MULTILINE):
                yield repository.problem(
                    "README.md", f"{file} has no parameter {name}", name
                )


def check_contributing(repository: Repository) -> Iterator[Problem]:
    """Check that files, names, commands and areas that CONTRIBUTING.md mentions exist."""
    page = repository.text("CONTRIBUTING.md")
    for match in [*NAME_IN_FILE.finditer(page), *FILE_AND_NAME.finditer(page)]:
        if not set(match["name"].split(".")) <= defined_names(
            repository.tree(match["file"])
        ):
            yield repository.problem(
                "CONTRIBUTING.md", f"{match['file']} has no {match['name']}", match[0]
            )
    for path in REPOSITORY_PATH.findall(page):
        if "NN_" not in path and not repository.exists(path):
            yield repository.problem("CONTRIBUTING.md", f"there is no {path}", path)
    targets = MAKE_TARGET.findall(repository.text("Makefile"))
    for command in re.findall(r"`(?:[A-Z]+=\w+ )?make ([a-z-]+)`", page):
        if command not in targets:
            yield repository.problem(
                "CONTRIBUTING.md", f"the Makefile has no {command}", f"make {command}"
            )
    for module in re.findall(r"python -m ((?:bench|book)[\w.]*\w)", page):
        path = module.replace(".", "/")
        if not (
            repository.exists(f"{path}.py") or repository.exists(f"{path}/__main__.py")
        ):
            yield repository.problem(
                "CONTRIBUTING.md", f"there is no module {module}", f"-m {module}"
            )


def check_machine_names(repository: Repository) -> Iterator[Problem]:
    """Check that no file names a folder of one machine, or the host of a package index."""
    for file in repository.files:
        text = repository.text(file)
        for match in MACHINE.finditer(text):
            yield repository.problem(
                file, f"{match[0]} exists on some machines only", match[0]
            )


def check_install_advice(repository: Repository) -> Iterator[Problem]:
    """Check that no text advises to install this unpublished package from an index."""
    for file in repository.find(
        r".*\.(py|md|ipynb|toml|ya?ml|sh|in|txt)|Makefile|Dockerfile"
    ):
        for match in INSTALL_FROM_INDEX.finditer(repository.text(file)):
            yield repository.problem(file, "this package is on no index", match[0])


def check_source_texts(repository: Repository) -> Iterator[Problem]:
    """Check that the packages choose no device, and the figures have no small letters."""
    for file in repository.find(r"cpt_.*\.py"):
        text = repository.text(file)
        if ".cuda()" in text:
            yield repository.problem(
                file, "use the device of the model or of the inputs", ".cuda()"
            )
        for size in re.finditer(r"\b(?:font|label|text)size=([\d.]+)", text):
            if float(size[1]) < MIN_FONT_SIZE:
                yield repository.problem(
                    file, f"the smallest font size is {MIN_FONT_SIZE}", size[0]
                )


def check_test_names(repository: Repository) -> Iterator[Problem]:
    """Check that test files differ by name, since pytest imports them without their folders."""
    folders: dict[str, str] = {}
    for file in repository.find(r"tests/.*test_\w+\.py"):
        folder, _, name = file.rpartition("/")
        if name in folders:
            yield Problem(file, 1, f"{folders[name]} has a {name} too")
        folders[name] = folder


def anchors(repository: Repository, file: str) -> set[str]:
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)$", repository.prose(file), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def defined_names(tree: ast.Module) -> set[str]:
    """Return the names bound in a Python file, at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
