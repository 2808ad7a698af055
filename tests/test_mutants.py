"""``make mutants``: its table fits the packages, and killed mutants are told from surviving ones."""

import ast
from dataclasses import replace

import pytest
from helpers import refused, run_command

from bench import mutants
from bench.mutants import (
    Mutant,
    find_problem,
    make_mutants,
    nearest_tests,
    read_mutants,
    try_all,
    try_mutant,
)
from bench.mutation_operators import changed_lines, changes
from cpt_lab.paths import ROOT

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
    return Mutant("cpt_core/half.py", "made up", before, after, (test,))


@pytest.mark.slow
def test_mutants_fit_package_and_name_existing_tests():
    assert [(str(m), why) for m in read_mutants() if (why := find_problem(m))] == []


def test_mutants_cover_every_package():
    rooms = {
        p.parent.relative_to(ROOT).as_posix() for p in ROOT.glob("cpt_*/*/__init__.py")
    }
    assert rooms <= {"/".join(m.file.split("/")[:2]) for m in read_mutants()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("x / 3", "x"), "'x / 3' is in the file 0 times"),
        (("x", "y"), "'x' is in the file 2 times"),
        (("x / 2", "x / 2"), "it must be there once and change"),
        (("x / 2", "x /"), "'x /' makes no Python of it"),
        (("x / 2", "x", "test_whole.py"), "there is no test test_whole.py"),
        (
            ("x / 2", "x", "test_half.py::test_hal"),
            "there is no test test_half.py::test_hal",
        ),
        (
            ("x / 2", "x", "test_half.py::TestHalf::test_half"),
            "there is no test test_half.py::TestHalf::test_half",
        ),
    ],
)
def test_mutant_that_no_longer_fits_is_stale(change, why, project):
    assert why in find_problem(mutant(*change), project)
    assert try_mutant(mutant(*change), project).startswith("STALE: ")


@pytest.mark.parametrize(
    ("is_generated", "outcome"),
    [(False, "NOT TRIED, its tests did"), (True, "killed, its tests do not run")],
)
def test_mutant_with_errors_alone_is_not_tried(
    is_generated, outcome, project, monkeypatch
):
    """Expect a failing test of a mutant that was written by hand: an error in a setup tells nothing."""
    output = "ERROR tests/test_half.py::test_half - NameError: no half"
    monkeypatch.setattr(mutants, "run", lambda *args: (mutants.RED, output))
    change = replace(mutant("x / 2", "x / 4"), is_generated=is_generated)
    assert try_mutant(change, project).startswith(outcome)


@pytest.mark.slow
def test_canary_fails_on_surviving_mutants(project, capsys):
    killed, alive, broken = (
        mutant("x / 2", "x / 4"),
        mutant("x / 2", "x * 0.5"),
        mutant("half(x)", "halve(x)"),
    )
    assert try_all([killed], 1, project)
    assert not try_all([killed, alive, broken], 2, project)
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("cpt_core/half.py: ")
    ]
    name = "cpt_core/half.py: made up"
    assert said[:3] == [f"{name}: killed by test_half.py::test_half"] * 2 + [
        f"{name}: SURVIVED"
    ]
    assert said[3].startswith(
        f"{name}: NOT TRIED"
    )  # a test that cannot be imported notices everything
    assert (project / "cpt_core" / "half.py").read_text() == PROJECT["cpt_core/half.py"]


@pytest.mark.slow
def test_canary_fails_if_unmutated_tests_fail(project, capsys):
    assert not try_all([mutant("x / 2", "x", "test_red.py")], 2, project)
    assert "the tests are not green without a mutant either" in capsys.readouterr().out


# --- those that a machine makes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("x = a < b <= c", {"x = (a <= b <= c)", "x = (a < b < c)"}),
        ("x = a == b", {"x = (a != b)"}),
        ("x = a is None", {"x = (a is not None)"}),
        ("x = a in b", {"x = (a not in b)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = a - b * c", {"x = (a + b * c)", "x = a - (b / c)"}),
        ("x = a | b", set()),
        ("x -= y", {"x += y"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = a"}),
        (
            "x = 0.5 ** -(a if b() else c)",
            {
                "x = 0.5 ** (a if b() else c)",
                "x = 1.5 ** -(a if b() else c)",
                "x = 0.5 ** -(a if (not b()) else c)",
            },
        ),
        ("x = [a[-1]]", {"x = [a[1]]", "x = [a[-2]]"}),
        (
            "x = 0, 0.5, True",
            {"x = 1, 0.5, True", "x = 0, 1.5, True", "x = 0, 0.5, False"},
        ),
        ("x = 'é', 1", {"x = 'é', 2"}),  # columns are bytes
        ("x = max(a, y.min())", {"x = min(a, y.min())", "x = max(a, y.max())"}),
        ("x = f(a, b=c, **d)", {"x = f(a, **d)"}),
        ("f(a)", {"pass"}),
        ("x = a if f(b) else c", {"x = a if (not f(b)) else c"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if (not a)]"}),
        ("def f(): return a", {"def f(): return"}),
        ("def f(): return None", set()),
        (
            "def f(a: 'list[1]' = (1)) -> g(b=2): ...",
            {"def f(a: 'list[1]' = (2)) -> g(b=2): ..."},
        ),
        ("raise ValueError(1 + 1)", set()),
        ("match a:\n    case [-1]: pass", set()),
        ("x = f'{1 + 1}'", set()),
        ("'1 + 1'", set()),
    ],
)
def test_changes_covers_every_kind_of_mutation(line, wrong):
    found = changes(f"{line}\n", {1, 2})
    assert {change.after.rstrip("\n") for change in found} == wrong
    assert len(found) == len(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["cpt_extras/search/solver.py", "cpt_extras/diagnostics/recording.py"]
)
def test_changes_mutates_given_lines_to_valid_python(file):
    source = (ROOT / file).read_text(encoding="utf-8")
    lines = source.splitlines()
    wanted = set(range(0, len(lines) + 1, 4))
    found = changes(source, wanted)
    assert len(found) > 10
    for change in found:
        assert find_problem(Mutant(file, *change, ("test_mutants.py",))) == ""
        other = source.replace(change.before, change.after)
        assert ast.dump(ast.parse(other)) != ast.dump(ast.parse(source))
        first = int(change.description.removeprefix("line ").partition(":")[0])
        same = next(
            i
            for i, (a, b) in enumerate(zip(lines, other.splitlines(), strict=False), 1)
            if a != b
        )
        assert first == same
    assert not changes(source, set())


def test_changes_distinguishes_repeated_lines():
    source = "x = 1\nx = 1\nx = 1\n"
    results = [
        source.replace(c.before, c.after)
        for n in (1, 2, 3)
        for c in changes(source, {n})
    ]
    assert results == [
        "x = 2\nx = 1\nx = 1\n",
        "x = 1\nx = 2\nx = 1\n",
        "x = 1\nx = 1\nx = 2\n",
    ]


@pytest.fixture
def repository(project):
    """Return the project as a repository with changed, new, deleted and invalid files."""

    def git(*words):
        who = [
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@b.c",
            "-c",
            "commit.gpgsign=false",
        ]
        run_command("git", *who, *words, cwd=project)

    (project / "cpt_core" / "gone.py").write_text("x = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (project / "cpt_core" / "half.py").write_text(
        "def half(x):\n    return x / 2\n\n\ndef less(x):\n    return x - 0\n"
    )
    git("commit", "-qam", "second")
    (project / "cpt_core" / "gone.py").unlink()
    (project / "cpt_core" / "room").mkdir()
    (project / "cpt_core" / "room" / "new.py").write_text("x = 1\ny = 2\n")
    (project / "cpt_core" / "notes.txt").write_text("x = 1\n")
    (project / "tests" / "test_half.py").write_text(
        "from cpt_core.half import less\n\n\ndef test_less():\n    assert less(3) == 3\n"
    )
    return project


def test_changed_lines_since_commit(repository):
    assert changed_lines("HEAD", repository) == {"cpt_core/room/new.py": {1, 2, 3}}
    assert changed_lines("HEAD~1", repository) == {
        "cpt_core/half.py": {3, 4, 5, 6},
        "cpt_core/room/new.py": {1, 2, 3},
    }
    refused(r"git diff .* nowhere", changed_lines, "nowhere", repository)


@pytest.mark.slow
def test_made_mutants_cover_changed_lines(repository, capsys):
    found = [
        m for m in make_mutants("HEAD~1", repository) if m.file == "cpt_core/half.py"
    ]
    assert {m.tests for m in found} == {("test_half.py",)}
    assert not try_all(found, 1, repository)
    assert capsys.readouterr().out.splitlines() == [
        "cpt_core/half.py: line 6: `return x - 0` becomes `return`: killed by test_half.py::test_less",
        "cpt_core/half.py: line 6: `x - 0` becomes `x + 0`: SURVIVED",
        "-     return x - 0",
        "+     return (x + 0)",
        "cpt_core/half.py: line 6: `0` becomes `1`: killed by test_half.py::test_less",
    ]
    stops = Mutant(
        "cpt_core/half.py",
        "made",
        "def less",
        "1 / 0\n\n\ndef less",
        ("test_half.py",),
        is_generated=True,
    )
    assert try_mutant(stops, repository) == "killed, its tests do not run"


@pytest.mark.parametrize("alive", [True, False])
def test_mutants_command_draws_repeatably_by_seed(alive, monkeypatch):
    chosen = []

    def tried(drawn, jobs):
        chosen.append([m.description for m in drawn])
        return not alive

    monkeypatch.setattr(
        mutants,
        "make_mutants",
        lambda ref: [Mutant(f"{ref}.py", str(i), "", "", ()) for i in range(30)],
    )
    monkeypatch.setattr(mutants, "try_all", tried)
    for words in ("", "", "--seed 1", "--most 50", "--only 2"):
        monkeypatch.setattr(
            "sys.argv", ["mutants", "--changed", "main", "--most", "9", *words.split()]
        )
        with pytest.raises(SystemExit) as ended:
            mutants.main()
        assert ended.value.code == alive
    first, again, other, everything, only = chosen
    assert first == again
    assert first != other
    assert len(set(first)) == len(set(other)) == 9
    assert everything == [str(i) for i in range(30)]
    assert all("2" in what for what in only)
    monkeypatch.setattr(
        "sys.argv", ["mutants", "--changed", "--only", "nothing like it"]
    )
    refused(
        "nothing to change in the lines that HEAD does not have",
        mutants.main,
        error=SystemExit,
    )


def test_mutants_command_rejects_unknown_commit(monkeypatch):
    monkeypatch.setattr("sys.argv", ["mutants", "--changed", "no-such-commit"])
    refused(r"^git diff .* no-such-commit", mutants.main, error=SystemExit)


def test_nearest_orders_tests_by_closeness():
    texts = {
        "room/test_other.py": "import torch",
        "room/test_the_new_one.py": "",
        "test_a.py": "from cpt_lab.room.new import x",
        "test_b.py": "from cpt_lab.room import old, new\n",
        "test_c.py": "from cpt_lab.room.newer import x",
    }
    assert nearest_tests("cpt_lab/room/new.py", texts) == (
        "room/test_the_new_one.py",
        "test_a.py",
        "test_b.py",
    )
    assert nearest_tests("cpt_lab/room/else.py", texts) == (
        "room/test_other.py",
        "room/test_the_new_one.py",
    )
