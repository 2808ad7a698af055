"""The cell that opens a notebook: it asks for the wheel where the package is missing, and else for nothing."""

import json
import subprocess
import sys

import pytest

from cpt_lessons.opening import guard

# A bare interpreter: this one, if it did not know the package. What %pip is asked for is written down, not done.
SHELL = """
import importlib.machinery as machinery, json, sys

if sys.argv[1] == "bare":
    found = machinery.PathFinder.find_spec
    machinery.PathFinder.find_spec = lambda name, *more: None if name == "cpt_core" else found(name, *more)
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from IPython.core.interactiveshell import InteractiveShell

shell, asked = InteractiveShell.instance(), []
shell.register_magic_function(asked.append, "line", "pip")
shell.run_cell(sys.argv[2]).raise_error()
print(json.dumps(asked))
"""


def asked(kind, number, folder):
    """What the first cell asks of %pip in a folder, in a kernel that is bare or has the package."""
    command = [sys.executable, "-c", SHELL, kind, guard(number)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WHEEL = "cpt_core-{}-py3-none-any.whl".format


@pytest.mark.parametrize(
    ("number", "there", "wanted"),
    [
        ("00", [WHEEL("0.1.0")], f"./{WHEEL('0.1.0')}[lessons]"),
        ("04", [WHEEL("0.1.0"), "other-1-py3-none-any.whl"], f"./{WHEEL('0.1.0')}[lessons,vision]"),
        ("06", [WHEEL("0.2.0")], f"./{WHEEL('0.2.0')}[lessons,text]"),
    ],
)
def test_where_the_package_is_missing_the_wheel_is_asked_for(number, there, wanted, tmp_path):
    for name in there:
        (tmp_path / name).touch()
    assert asked("bare", number, tmp_path) == [f"install -q '{wanted}'"]


@pytest.mark.parametrize("there", [[], [WHEEL("0.9.0"), WHEEL("0.10.0")]])
def test_without_one_wheel_it_says_what_to_do_and_asks_for_nothing(there, tmp_path):
    for name in there:
        (tmp_path / name).touch()
    command = [sys.executable, "-c", SHELL, "bare", guard("00")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "AssertionError: put one file cpt_core-*.whl here, beside this notebook" in done.stderr


def test_where_the_package_is_nothing_is_asked_for(tmp_path):
    (tmp_path / WHEEL("0.1.0")).touch()
    assert asked("with it", "00", tmp_path) == []
