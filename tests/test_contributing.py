"""CONTRIBUTING.md: the files and names that it mentions exist."""

import ast
import re
from pathlib import Path

import pytest

from bench.commit_subjects import AREAS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = "cpt_core|cpt_extras|cpt_lab|cpt_lessons|tests|bench|docs|data|notebooks"
# "`SCHEDULES` in `cpt_core/schedules/profiles.py`", and "| `file.py` | `Class.method` |"
NAME_IN_FILE = re.compile(
    r"`(?P<name>[A-Za-z_]+)`(?: \([^)]*\))?,? (?:in|of) `(?P<file>[\w/]+\.py)`"
)
FILE_AND_NAME = re.compile(
    r"^\| `(?P<file>[\w/]+\.py)` \| `(?P<name>[\w.]+)` \|", re.MULTILINE
)


def defined_names(path):
    """Return the names bound in a Python file, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def mentioned_names():
    matches = [*NAME_IN_FILE.finditer(TEXT), *FILE_AND_NAME.finditer(TEXT)]
    return [(match["file"], match["name"]) for match in matches]


@pytest.mark.parametrize(("file", "name"), mentioned_names())
def test_contributing_names_exist(file, name):
    assert set(name.split(".")) <= defined_names(ROOT / file)


def test_contributing_mentions_enough_names():
    assert len(mentioned_names()) >= 20


def test_contributing_paths_exist():
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", TEXT)
    assert len(paths) >= 60
    missing = [
        path for path in paths if "NN_" not in path and not (ROOT / path).exists()
    ]
    assert missing == []


def test_contributing_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = set(re.findall(r"`(?:[A-Z]+=\w+ )?make ([a-z-]+)`", TEXT))
    assert len(commands) >= 10
    assert commands <= targets

    modules = set(re.findall(r"python -m ((?:bench|book)[\w.]*)", TEXT))
    assert len(modules) >= 5
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_contributing_areas_are_those_of_packages():
    packages = {path.name for path in (ROOT / "cpt_extras").iterdir()}
    used = {"int8", "kernels", "formats", "search", "diagnostics", "integrations"}
    assert used <= packages
    assert used <= AREAS
