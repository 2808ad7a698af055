"""The map of mutants: which tests reach a changed line, which of them turn red, and what the summary says."""

import pytest
from helpers import run_command

from bench.mutant_map import (
    LineContexts,
    RedTests,
    find_red_tests,
    greedy_cover,
    make_map,
    read_map,
    summarize_map,
    tree_name,
)
from bench.mutants import Mutant

SOURCE = """SCALE = 2


def half(x):
    return x / SCALE


def double(x):
    return x * SCALE
"""
TESTS = """import pytest
from cpt_core.half import double, half

@pytest.mark.parametrize("x", [0, 4], ids=["no thing", "4"])
def test_half(x):
    assert half(x) == x / 2

def test_double():
    assert double(4) == 8
"""
HALVES = ["test_half.py::test_half[4]", "test_half.py::test_half[no thing]"]
HALF, DOUBLE = "test_half.py::test_half", "test_half.py::test_double"
CONTEXTS = LineContexts(
    {"cpt_core/half.py": {1: [], 5: HALVES, 9: ["test_half.py::test_double"]}}
)


@pytest.fixture
def project(tmp_path):
    for name, text in {"cpt_core/half.py": SOURCE, "tests/test_half.py": TESTS}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def mutant(before, after):
    tests = ("test_half.py::test_half",)
    return Mutant("cpt_core/half.py", f"{before} becomes {after}", before, after, tests)


@pytest.mark.parametrize(
    ("change", "tests"),
    [
        (("x / SCALE", "x"), [HALF]),
        (("x * SCALE", "x"), [DOUBLE, HALF]),
        (("SCALE = 2", "SCALE = 3"), [DOUBLE, HALF]),
    ],
    ids=["in a function", "of another test than named", "at import"],
)
def test_line_contexts_select_tests(change, tests, project):
    assert CONTEXTS.tests_of(mutant(*change), project) == tests


def test_line_contexts_keep_named_files(project):
    """Run all tests of a file that a mutant names: some may run the changed line in another process."""
    named = Mutant("cpt_core/half.py", "", "x / SCALE", "x", ("test_half.py",))
    assert CONTEXTS.tests_of(named, project) == ["test_half.py"]


def test_tree_name_changes_with_every_edit(project, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "docs: Add")):
        run_command("git", *words, cwd=project)
    names = [tree_name(project)]
    (project / "cpt_core/half.py").write_text(SOURCE + "# an edit\n")
    names.append(tree_name(project))
    (project / "new.py").write_text("")
    names.append(tree_name(project))
    assert len(names[0]) == 12
    assert len(set(names)) == 3
    assert all(name.startswith(f"{names[0]}-") for name in names[1:])


def test_make_map_looks_for_texts_below_root(project, tmp_path):
    absent = mutant("x / 4", "x")
    with pytest.raises(SystemExit, match="is in the file 0 times"):
        make_map([absent], tmp_path, 1, project)


@pytest.mark.slow
def test_find_red_tests_lists_all(project):
    everything = find_red_tests(mutant("SCALE = 2", "SCALE = 3"), CONTEXTS, project)
    assert (everything.number_run, everything.status) == (3, 1)
    assert set(everything.red) == {"test_half.py::test_double", HALVES[0]}
    assert find_red_tests(mutant("x / SCALE", "0.5 * x"), CONTEXTS, project).red == ()


def test_greedy_cover_takes_most_useful_first():
    red = {"m1": ["a", "b"], "m2": ["b"], "m3": ["b", "c"], "m4": ["d"], "m5": []}
    assert greedy_cover(red) == {"b": ["m1", "m2", "m3"], "d": ["m4"]}


def test_summarize_map_names_unnoticed_mutants():
    rows = [
        RedTests("m1", 2, ("a", "b"), 1),
        RedTests("m2", 2, ("a",), 1),
        RedTests("m3", 2, (), 0),
        RedTests("m4", 2, (), -1),
    ]
    assert summarize_map({row.mutant: row for row in rows}).splitlines() == [
        "4 mutants: 2 turn tests red, 1 none, 1 end without a result",
        "2 tests turn red for a mutant, 1 of them alone for some, 1 suffice for all",
        "no test notices: m3",
        "no result: m4",
        "tests of the cover, with the mutants that each adds:",
        "   2 a",
    ]


def test_read_map_leaves_out_unfinished_line(tmp_path):
    path = tmp_path / "red.jsonl"
    assert read_map(path) == {}
    row = '{"mutant": "m1", "number_run": 2, "red": ["a"], "status": 1}\n'
    path.write_text(row + '{"mutant": "m2", "numb')
    assert read_map(path) == {"m1": RedTests("m1", 2, ("a",), 1)}
