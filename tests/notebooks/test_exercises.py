"""Every exercise accepts its solution, refuses a wrong answer, and says so kindly."""

import math
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest

import cpt_core as cpt
from cpt_core.schedules import cost
from cpt_core.teaching import exercises

from solutions import ALSO_RIGHT, ALSO_WRONG, SOLUTIONS, WRONG  # isort: skip

FOLDER = Path(__file__).parents[2] / "notebooks"


def exercise_cell(name):
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    (cell,) = [c for c in book.cells if c.cell_type == "code" and "exercises.check(" in c.source]
    return cell.source


def run(name, answers, capsys):
    source = exercise_cell(name)
    for variable, answer in answers.items():
        source, count = re.subn(rf"^{variable} = \.\.\..*$", f"{variable} = {answer}", source, flags=re.M)
        assert count == 1, variable
    exec(source, {"cpt": cpt, "cost": cost, "exercises": exercises, "math": math})
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.ipynb")))
def test_exercises(name, capsys):
    todo = exercise_cell(name).count("exercises.check(")
    assert [line.endswith("not attempted yet") for line in run(name, {}, capsys)] == [True] * todo
    assert [line.endswith(": correct") for line in run(name, SOLUTIONS[name], capsys)] == [True] * todo
    wrong = run(name, WRONG[name], capsys)
    assert [": not yet. Hint: " in line for line in wrong] == [True] * todo


def cases(answers):
    return [
        pytest.param(name, variable, answer, id=f"{name[:2]}-{variable}-{answer}")
        for name, exercise in answers.items()
        for variable, further in exercise.items()
        for answer in further
    ]


@pytest.mark.parametrize(("name", "variable", "answer"), cases(ALSO_RIGHT))
def test_other_forms_of_a_right_answer_are_accepted(name, variable, answer, capsys):
    (verdict,) = [line for line in run(name, {variable: answer}, capsys) if "not attempted" not in line]
    assert verdict.endswith(": correct")


@pytest.mark.parametrize(("name", "variable", "answer"), cases(ALSO_WRONG))
def test_other_wrong_answers_get_a_hint_without_python_words(name, variable, answer, capsys):
    (verdict,) = [line for line in run(name, {variable: answer}, capsys) if "not attempted" not in line]
    assert ": not yet" in verdict
    assert ". Hint: " in verdict
    assert "has no attribute" not in verdict
    assert "not supported" not in verdict


def test_an_answer_of_the_wrong_kind_gets_a_hint_not_a_traceback(capsys):
    exercises.check("x", "text", lambda s: s.relative_cost() < 1, "a schedule")
    assert capsys.readouterr().out == "x: not yet: str is not the kind of answer asked for. Hint: a schedule\n"


def test_an_error_that_is_a_sentence_is_shown(capsys):
    short = cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=800)
    exercises.check("x", short, lambda s: s(999) == 8, "1000 steps")
    assert re.fullmatch(r"x: not yet \(\w+: .*999.*\)\. Hint: 1000 steps\n", capsys.readouterr().out)


def test_predictions_are_compared(capsys):
    exercises.predict("q", "b")
    exercises.reveal("q", "b", "because")
    exercises.predict("q", "c")
    exercises.reveal("q", "b", "because")
    out = capsys.readouterr().out
    assert "You were right." in out
    assert "You said c." in out
    with pytest.raises(ValueError, match="choose one of a, b, c, got 'z'"):
        exercises.predict("q", "z")


def test_bands_reject_what_lies_outside(capsys):
    exercises.in_band("smoke accuracy of ER", 0.88)
    assert capsys.readouterr().out == "smoke accuracy of ER: inside the band of 12 seeds\n"
    for value in (0.35, 1.05):
        with pytest.raises(AssertionError, match="outside its band"):
            exercises.in_band("smoke accuracy of ER", value)


def test_what_must_hold_is_a_finding_on_data_of_ones_own(capsys):
    runs = pd.DataFrame({"arm": ["CR", "RR"], "seed": [0, 1], "first_loss": [2.0, 2.0], "last_loss": [1.0, 3.0]})
    fell = runs.last_loss < runs.first_loss
    exercises.finding("the loss fell", fell, runs, "my-images/")
    exercises.finding("the loss fell", fell[:1], runs[:1], "digits")
    assert capsys.readouterr().out == "the loss fell: not so in RR seed 1\nthe loss fell: yes\n"
    with pytest.raises(AssertionError, match="the loss fell: not so in RR seed 1"):
        exercises.finding("the loss fell", fell, runs, "digits")
