"""Exercises of the notebooks: correct solutions, replies to right and wrong answers, and hidden predictions.

The transcripts in tests/golden/exercises show what the check of an exercise replies to an answer. A line that begins
with ">>> " adds an answer; ``pytest --update-golden`` writes the reply below it.
"""

import ast
import contextlib
import html
import io
import math
import re

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from notebook_files import FOLDER, NOTEBOOKS, PREDICTING, code_cells, read

import cpt_core as cpt
from bench.lint.notebooks import PAPER
from cpt_lab.analysis import quality_cost
from cpt_lab.data.loading import one_thread
from cpt_lessons import exercises
from cpt_lessons.demonstrations import held_out, tiny_problem
from cpt_lessons.exercise_checks import trained
from cpt_lessons.exercises import EXERCISES
from cpt_lessons.predictions import PREDICTIONS, with_answers

TRANSCRIPTS = sorted((FOLDER.parent / "tests/golden").glob("exercises/*.txt"))
SOLVED = [
    p
    for p in NOTEBOOKS
    if (FOLDER / "solutions" / f"{p.name[:2]}_solutions.py").exists()
]
TO_DO = [p for p in NOTEBOOKS if p in PREDICTING or p in SOLVED]


def grid(x, n, rounded=torch.round, back=1, least=0.0):
    """Round as the quantiser with n steps, with options for typical mistakes."""
    step = ((x.max() - x.min()) / n).clamp(min=least)
    return rounded((x - x.min()) / step) * step + back * x.min()


class AlwaysOne(torch.autograd.Function):
    """Quantiser whose gradient is 1, whatever arrives."""

    @staticmethod
    def forward(ctx, x, q):
        return cpt.quantize(x.detach(), q)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(gradient), None


def own_layer(
    through=lambda x, q, role: cpt.quantize(x, q, role),
    rows=True,
    bias=True,
    bits=8,
    random=True,
):
    """Return an answer to exercise 00.4, which is right by default."""

    def layer(x, weight, b, q):
        b = through(b, q, "bias") if bias else b
        y = torch.nn.functional.linear(
            through(x, q, None),
            through(weight, q, "linear_weight" if rows else None),
            b,
        )
        if bits:
            y.register_hook(
                lambda g: grid(
                    g,
                    2**bits - 1,
                    lambda k: (k + random * (torch.rand_like(k) - 0.5)).round(),
                )
            )
        return y

    return layer


NAMES = {
    "cpt": cpt,
    "math": math,
    "np": np,
    "torch": torch,
    "own_layer": own_layer,
    "grid": grid,
    "AlwaysOne": AlwaysOne,
    "SUITE_64": {"q_min": 3, "q_max": 8, "total_steps": 64_000},
}


def reply_to(exercise, answer):
    """Return what the check of an exercise prints, without numbers that depend on the machine."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exercises.check(exercise, eval(answer, dict(NAMES)))
    text = re.sub(r"x[0-9a-f]{8,}>", "x...>", printed.getvalue())
    text = re.sub(r"\d+\.\d%", "N%", text)
    text = re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.4g}", text)
    lines = [
        line if len(line) <= 160 or "Hint: " in line else f"{line[:157]}..."
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def answers_in(path):
    """Return the exercises and answers of a transcript."""
    return re.findall(r"^>>> (\d\d\.\d): (.*)$", path.read_text("utf-8"), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_exercise_check_replies(path, golden):
    """Accept equivalent answers; explain a wrong answer with one hint and without a traceback."""
    blocks = []
    for exercise, answer in answers_in(path):
        reply = reply_to(exercise, answer)
        blocks.append(f">>> {exercise}: {answer}\n{reply}\n")
        if reply.startswith(f"exercise {exercise}: correct"):
            continue
        assert reply.startswith(f"exercise {exercise}: not yet")
        assert reply.count("Hint: ") == 1
        if "lambda" not in answer:
            assert not re.search("has no attribute|not supported", reply)
    golden(f"exercises/{path.name}", "\n".join(blocks))


def exercise_cells(path):
    """Return the source of all cells that check an exercise, in order."""
    return "\n".join(
        c.source for c in code_cells(read(path)) if "exercises.check(" in c.source
    )


def calls(source, name):
    """Return the arguments of all calls of ``exercises.<name>`` as source text."""
    tree = ast.walk(ast.parse(source))
    found = [
        n
        for n in tree
        if isinstance(n, ast.Call) and ast.unparse(n.func) == f"exercises.{name}"
    ]
    return [[ast.unparse(a) for a in (*n.args, *n.keywords)] for n in found]


def test_exercises_are_listed_once_with_answers():
    """Ask every question in one place, and give every exercise a notebook and wrong answers."""
    sources = [c.source for path in NOTEBOOKS for c in code_cells(read(path))]
    questions = [q for source in sources for q, *_ in calls(source, "reveal")]
    assert sorted(map(ast.literal_eval, questions)) == sorted(PREDICTIONS)
    checks = [
        call for path in NOTEBOOKS for call in calls(exercise_cells(path), "check")
    ]
    numbers = [ast.literal_eval(number) for number, _ in checks]
    assert sorted(numbers) == sorted(EXERCISES)
    wrong = set()
    for path in TRANSCRIPTS:
        wrong |= set(
            re.findall(r"^exercise (\S+): not yet", path.read_text("utf-8"), re.M)
        )
    assert wrong == set(EXERCISES)


@pytest.mark.slow
@pytest.mark.parametrize("path", TO_DO, ids=lambda p: p.stem)
def test_exercise_solutions_are_correct(path, capsys):
    todo, solved = (
        exercise_cells(path),
        (FOLDER / "solutions" / f"{path.name[:2]}_solutions.py").read_text(),
    )
    asked = calls(todo, "check")
    assert calls(solved, "check") == asked
    exec(todo, {**NAMES, "exercises": exercises})
    numbers = [ast.literal_eval(number) for number, _ in asked]
    assert all(n[:2] == path.name[:2] for n in numbers)
    assert capsys.readouterr().out.splitlines() == [
        f"exercise {n}: not attempted yet" for n in numbers
    ]
    exec(solved, {})
    assert capsys.readouterr().out.splitlines() == [
        f"exercise {n}: correct" for n in numbers
    ]


@pytest.mark.parametrize("path", TO_DO, ids=lambda p: p.stem)
def test_exercise_text_lists_checked_items(path):
    (text,) = [c.source for c in read(path).cells if "Exercises\n" in c.source]
    items = dict(re.findall(r"^(\d)\. (.*)$", text.split("Exercises\n")[1], flags=re.M))
    assert list(items) == [str(i + 1) for i in range(len(items))]
    checked = {
        number.strip("'").split(".")[1]
        for number, _ in calls(exercise_cells(path), "check")
    }
    assert checked | {k for k, item in items.items() if "<summary>" in item} == set(
        items
    )
    to_do = [
        item
        for item in items.values()
        if re.search(r"[Ww]rite|[Mm]ake|Count|Compute|Pack|^Set ", item)
    ]
    assert len(to_do) >= (1 if path.name[:2] in PAPER else 3)
    assert f"(solutions/{path.name[:2]}_solutions.py)" in text


def test_exercise_baseline_uses_8_bit_gradients():
    """Train static precisions with gradients of 8 bits, and restore the random state."""
    state = torch.random.get_rng_state()
    found = trained(cpt.StaticSchedule(2, 40))
    assert torch.equal(state, torch.random.get_rng_state())
    with one_thread(), torch.random.fork_rng(devices=[]):
        model, batches, loss_fn, optimizer = tiny_problem()
        with cpt.precision(cpt.quantize_(model), bits=2, q_grad=8):
            for x, y in batches:
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            images, labels = held_out()
            right = (model.eval()(images).argmax(1) == labels).float().mean().item()
    assert found == right


def test_exercise_front_is_that_of_library(capsys):
    def front(trainings):
        arms = pd.DataFrame(trainings, columns=["relative_cost", "mean"])
        return quality_cost.pareto(arms).tolist()

    exercises.check("09.2", front)
    assert capsys.readouterr().out == "exercise 09.2: correct\n"


def test_exercise_check_reports_unattempted_exercises(capsys):
    exercises.check("09.1", lambda a, b: None)
    exercises.check("15.9", 1)
    assert capsys.readouterr().out.splitlines() == [
        "exercise 09.1: not attempted yet",
        "there is no exercise '15.9'",
    ]


@pytest.fixture
def unchosen(monkeypatch):
    monkeypatch.setattr(exercises, "_predictions", {})


@pytest.mark.parametrize("choice", ["c", "C", " c ", "(c)"])
def test_prediction_is_compared_with_answer(choice, unchosen, capsys):
    exercises.predict("backward share", choice)
    exercises.reveal("backward share")
    noted, *told = capsys.readouterr().out.splitlines()
    assert noted == "backward share: noted 'c'"
    assert told[1:] == [PREDICTIONS["backward share"][1]]
    assert told[0] == "backward share: the answer is c.  You were right."
    exercises.predict("backward share", "a")
    exercises.reveal("backward share")
    assert "backward share: the answer is c.  You said a." in capsys.readouterr().out


NONE = ["d", "ab", 3, None, True, ["a"], ("b",), np.array(["a", "b"]), {}, "  b c"]


@pytest.mark.parametrize(
    ("choices", "word"),
    [(NONE, ".* is none of a, b, c"), (["", "  "], "no prediction yet")],
)
def test_prediction_is_required_for_answer(choices, word, unchosen, capsys):
    for choice in choices:
        exercises.predict("two bits", "a")
        exercises.predict("two bits", choice)
        exercises.reveal("two bits")
        _, refused, told = capsys.readouterr().out.splitlines()
        assert re.fullmatch(
            f"two bits: {word} - put (one of them|a letter) between the quotes", refused
        )
        assert (
            told
            == "two bits: choose first, in the cell with predict, then run this cell again"
        )
    exercises.reveal("nought")
    assert capsys.readouterr().out.startswith(
        "there is no question 'nought'; those of the notebooks are static 4, "
    )


@pytest.mark.parametrize("path", PREDICTING, ids=lambda p: p.stem)
def test_prediction_answers_are_hidden_in_notebooks(path):
    book = read(path)
    sources = "\n".join(c.source for c in code_cells(book))
    asked = [ast.literal_eval(question) for question, *_ in calls(sources, "reveal")]
    assert asked
    predicted = calls(sources, "predict")
    assert sorted(ast.literal_eval(question) for question, *_ in predicted) == sorted(
        asked
    )
    assert {choice for _, choice, *_ in predicted} == {"''"}
    pages = [nbformat.from_dict(cell) for cell in with_answers(book.cells)]
    for question in asked:
        answer, because = PREDICTIONS[question]
        because = html.escape(because, quote=False)
        (at,) = [
            i
            for i, c in enumerate(pages)
            if f'reveal("{question}"' in re.sub(r"\(\s+", "(", c.source)
        ]
        assert (
            pages[at + 1].source
            == f"<details><summary>Answer</summary>({answer}) {because}</details>"
        )
        printed = "".join(o.get("text", "") for o in pages[at].outputs)
        assert (
            f"{question}: choose first, in the cell with predict, then run this cell again\n"
            in printed
        )
        assert because not in str(book)
        assert not re.search(r"the answer is", str(book))


def test_in_band_rejects_outside_values(capsys):
    exercises.in_band("smoke accuracy of ER", 0.88)
    assert (
        capsys.readouterr().out
        == "smoke accuracy of ER: within four standard deviations of 12 earlier seeds\n"
    )
    for value in (0.35, 1.05):
        with pytest.raises(AssertionError, match="outside its band"):
            exercises.in_band("smoke accuracy of ER", value)
