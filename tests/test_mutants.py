"""``make mutants``: its table fits the package, and it tells mutants that are killed from all others."""

import pytest

from bench.mutants import Mutant, canary, problem, table, tried
from cpt_core.paths import PACKAGE

PROJECT = {
    "cpt_core/half.py": "def half(x):\n    return x / 2\n",
    "tests/test_half.py": "from cpt_core.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n",
    "tests/test_red.py": "def test_red():\n    assert False\n",
}


@pytest.fixture
def project(tmp_path):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def mutant(before, after, test="test_half.py::test_half"):
    return Mutant("half.py", "made up", before, after, (test,))


def test_every_mutant_fits_the_package_and_its_tests_are_there():
    assert [(str(m), why) for m in table() if (why := problem(m))] == []


def test_every_room_has_mutants():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= {m.file.partition("/")[0] for m in table()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("x / 3", "x"), "'x / 3' is in the file 0 times"),
        (("x", "y"), "'x' is in the file 2 times"),
        (("x / 2", "x / 2"), "it must be there once and change"),
        (("x / 2", "x /"), "'x /' makes no Python of it"),
        (("x / 2", "x", "test_whole.py"), "there is no test test_whole.py"),
        (("x / 2", "x", "test_half.py::test_hal"), "there is no test test_half.py::test_hal"),
        (("x / 2", "x", "test_half.py::TestHalf::test_half"), "there is no test test_half.py::TestHalf::test_half"),
    ],
)
def test_a_mutant_that_fits_no_more_is_an_error_of_its_own(change, why, project):
    assert why in problem(mutant(*change), project)
    assert tried(mutant(*change), project).startswith("STALE: ")


def test_whatever_is_not_killed_fails_the_canary(project, capsys):
    killed, alive, broken = mutant("x / 2", "x / 4"), mutant("x / 2", "x * 0.5"), mutant("half(x)", "halve(x)")
    assert canary([killed], 1, project)
    assert not canary([killed, alive, broken], 2, project)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("half.py: ")]
    assert said[:3] == ["half.py: made up: killed by test_half.py::test_half"] * 2 + ["half.py: made up: SURVIVED"]
    assert said[3].startswith("half.py: made up: NOT TRIED")  # a test that cannot be imported notices everything
    assert (project / "cpt_core" / "half.py").read_text() == PROJECT["cpt_core/half.py"]


def test_tests_that_are_red_without_a_mutant_fail_the_canary(project, capsys):
    assert not canary([mutant("x / 2", "x", "test_red.py")], 2, project)
    assert "the tests are not green without a mutant either" in capsys.readouterr().out
