"""Solutions are right, wrong answers get a hint, and no answer is on the page before it was asked for."""

import ast
import html
import math
import re
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

import cpt_core as cpt
from cpt_core.schedules.profiles import SUITE
from cpt_lessons import exercises
from cpt_lessons.checks_of_lessons import OPERANDS, library_layer
from cpt_lessons.exercises import EXERCISES
from cpt_lessons.export import notebook_page
from cpt_lessons.predictions import PREDICTIONS, with_answers

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def grid(x, n, rounded=torch.round, back=1, least=0.0):
    """The formula of the quantiser, with n steps and what one may get wrong in it."""
    step = ((x.max() - x.min()) / n).clamp(min=least)
    return rounded((x - x.min()) / step) * step + back * x.min()


class AlwaysOne(torch.autograd.Function):
    """A quantiser that passes on a gradient of 1, whatever arrives."""

    @staticmethod
    def forward(ctx, x, q):
        return cpt.quantize(x.detach(), q)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones_like(gradient), None


def own_layer(through=lambda x, q, role: cpt.quantize(x, q, role), rows=True, bias=True, bits=8, random=True):
    """A reader's answer to 00.4, right unless told otherwise."""

    def layer(x, weight, b, q):
        b = through(b, q, "bias") if bias else b
        y = torch.nn.functional.linear(through(x, q, None), through(weight, q, "linear_weight" if rows else None), b)
        if bits:
            y.register_hook(lambda g: grid(g, 2**bits - 1, lambda k: (k + random * (torch.rand_like(k) - 0.5)).round()))
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
}
SUITE_64 = "q_min=3, q_max=8, total_steps=64_000"

# Further answers that are right, and ones that are wrong, by exercise.
RIGHT = {
    "00.1": [f'cpt.make_schedule("RTH", {SUITE_64})', f'cpt.make_schedule("RR", {SUITE_64}, n_cycles=2)'],
    "00.2": ["cpt.FunctionSchedule(lambda u: 5, total_steps=64_000)"],
    "00.3": ['"0.205"', "np.float32(0.205)", '"20.5 / 100"', '"20.5 %"', '"20,5%"'],
    "00.4": ["own_layer()", "own_layer(lambda x, q, role: x - (x - cpt.quantize(x, q, role)).detach())"],
    "01.1": ['"ER"', '"eth"', '" Er "', '"ER and ETH"', '("ETH", "ER")', f'cpt.make_schedule("ER", {SUITE_64})'],
    "01.2": ["cpt.FunctionSchedule(lambda u: 4 if u < 0.8 else 8, total_steps=1000)"],
    "01.3": ["lambda t: 8 - round(5 * math.exp(-4 * abs((t // 8000 + 1) % 2 - t % 8000 / 8000)))"],
    "01.4": ["lambda s: s.share_at(s.q_min)", "lambda s: torch.tensor(s.bits() == s.q_min).float().mean()"],
    "01.5": [
        "cpt.StaticSchedule(4, 400)",
        "cpt.FunctionSchedule(lambda u: 3 if u < 0.8 else 8, total_steps=400)",
        'cpt.make_schedule("RTH", q_min=3, q_max=8, total_steps=400, n_cycles=2)',
    ],
    "02.1": ["32.0", '"32"', "np.int64(32)", "torch.tensor(32)", "np.array([32])"],
    "02.2": ["48 / 192", "0.2501", '"0.25"', '"0,25"', '"1/4"', '"25 %"', "torch.tensor(0.25, requires_grad=True)"],
    "02.5": ["lambda x, q: cpt.quantize(x, q).requires_grad_()", "lambda x, q: grid(x, 2**q - 1, least=1e-12)"],
    "02.6": ["18_874_368.0", '"18,874,368"'],
    "02.7": ["cpt.quantize", "lambda x, q: x - (x - cpt.quantize(x, q)).detach()"],
    "02.8": [
        'lambda x, q: cpt.quantize(x, q, "graph_input")',
        "lambda x, q: torch.stack([cpt.quantize(r, q) for r in x])",
    ],
    "03.1": ['"Large"', '"large savings"', '" LARGE  savings"', '"RR"', '"rth"'],
    "03.2": ["5.0", '"5"', "np.int8(5)", '"5 bits"'],
    "03.3": [
        "lambda runs: torch.tensor([not any(c <= x and a > y for c, a in runs) for x, y in runs])",
        "lambda runs: np.array([all(c > x or a <= y for c, a in runs) for x, y in runs])",
    ],
    "03.6": [
        "lambda a, b: float(np.mean([a[s] - b[s] for s in a if s in b]))",
        "lambda a, b: (torch.tensor([a[s] - b[s] for s in b if s in a])).mean()",
    ],
    "04.1": ["4 / 9", "0.44", '"4/9"', '"0.444"', '"44 %"'],
    "05.1": ["8**0.5", "2.83", "2.8", "math.sqrt(8)"],
    "05.2": ['"59.3 %"', "59", "0.593"],
    "05.3": ['-float("inf")', '"-inf"', "-np.inf", "-torch.inf"],
    "05.7": ["lambda m, bits: sum(cpt.quantize(m, bits, 'graph_aggregation')).numpy()"],
    "06.1": ["0.063", "-0.063", '"6.3 %"', '"-6.3 %"'],
    "06.3": ["math.exp(math.log(10_000))", "1 / (1 / 10_000)", '"10,000"', '"10 000"', '"1e4"'],
    "06.4": ["lambda p: torch.tensor(p).log().mean().neg().exp()"],
    "08.1": [f'cpt.solve_schedule(0.5, {SUITE_64}, family="cosine", n_cycles=4, triangular=True)'],
    "08.3": ['"4 bits"', '"4"'],
    "08.4": ['"REX"', '" rex "', '"R"'],
    "08.6": ["lambda budget: int((64 + 192 * budget) ** 0.5 - 8)"],
    "08.2": ["0.417", '"80/192"', '"41.7 %"', "0.42"],
    "09.1": ["cpt.DeficitSchedule(4, 16, [(0, 32_000)], 64_000)"],
    "09.2": ["lambda c: (c[0::2].int() + 16 * c[1::2].int()).tolist()"],
}
SLIPS = {
    "lambda x, q: grid(x, 2**q - 1)": "all values are equal, so that the step is 0, and 0 / 0 is no number",
    "lambda x, q: grid(x, 2**q)": "2^q steps have one level more than 2^q",
    "lambda x, q: grid(x, 2**q - 1, torch.floor)": "it rounds down, not to the nearest level",
    "lambda x, q: grid(x, 2**q - 1, back=0)": "the minimum is taken away and not added again",
    "lambda x, q: (grid(x, 2**q - 1) - x.min()) / (x.max() - x.min()) * (2**q - 1)": "these are the levels, 0 to",
}
NO_SCHEDULE = ['"RR"', "0.4", "None", "cpt.make_schedule"]
NO_NUMBER = ['"many"', "None", "True", "[1, 2]", "torch.ones(2)", "lambda: 32", '"1/0"', '"nan"']
WRONG = {
    "00.1": [
        *NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})',
        "cpt.DeficitSchedule(3, 8, [(0, 60_000)], 64_000)",
        'cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=6400)',
        'cpt.make_schedule("RR", q_min=2, q_max=8, total_steps=64_000)',
    ],
    "00.2": [
        *NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})',
        "cpt.StaticSchedule(4, 64_000)",
        "cpt.StaticSchedule(6, 64_000)",
        "cpt.StaticSchedule(5, 6400)",
    ],
    "00.3": [*NO_NUMBER, "0.5", "13_000", "20.5", '"0.205 %"', '"20"'],
    "00.4": [
        "lambda x, weight, bias, bits: torch.nn.functional.linear(x, weight, bias)",
        "own_layer(rows=False)",
        "own_layer(bias=False)",
        "own_layer(lambda x, q, role: cpt.quantize(x.detach(), q, role).requires_grad_())",
        "own_layer(lambda x, q, role: 2 * x + (cpt.quantize(x, q, role) - 2 * x).detach())",
        "own_layer(random=False)",
        "own_layer(bits=None)",
        "own_layer(bits=3)",
        "lambda x: x",
        "[2.3]",
    ],
    "01.1": [
        *['"RTH"', '"E"', '"ER and RTH"', '""', "()", '("ER", 4)', "4", "None"],
        f'cpt.make_schedule("RR", {SUITE_64})',
    ],
    "01.2": [
        *NO_SCHEDULE,
        "lambda u: 3 + 5 * u**1.9",
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=500)",
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u, total_steps=1000)",
        "cpt.FunctionSchedule(lambda u: 2 + 6 * u**1.5, total_steps=1000)",
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u**9, total_steps=1000)",
        "cpt.FunctionSchedule(lambda u: 8 - 5 * u**2, total_steps=1000)",
    ],
    "01.3": [
        "lambda t: 5",
        "lambda t: 1 / 0",
        "lambda: 3",
        "lambda t: [3, 4]",
        'lambda t: "3 bits"',
        "3",
        "lambda t: round(8 - 5 * math.exp(-4 * (t % 8000) / 8000))",
    ],
    "01.4": ["lambda s: s.bits()", "lambda s: s.q_min", "lambda s: s.nothing", "0.2", "lambda s: s.share_at(8)"],
    "01.5": [
        *NO_SCHEDULE,
        "cpt.StaticSchedule(2, 400)",
        "cpt.StaticSchedule(8, 400)",
        "cpt.StaticSchedule(16, 400)",
        "cpt.StaticSchedule(4, 800)",
        'cpt.make_schedule("CR", q_min=1, q_max=8, total_steps=400)',
        'cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=400)',
    ],
    "02.1": [*NO_NUMBER, "31", "5", "{32}"],
    "02.2": [*NO_NUMBER, "0.5", "80 / 192", "25", '"0.25 %"'],
    "02.4": ["lambda q, q_max: q / q_max", "lambda q: 1", "0.4"],
    "02.5": [
        "lambda x, q: x",
        "lambda x, q: cpt.quantize(x, q + 1)",
        "lambda x, q: x[:3]",
        "lambda x, q: x.numpy(1)",
        "32",
        *SLIPS,
    ],
    "02.6": [*NO_NUMBER, "4_718_592", "37_748_736"],
    "02.7": [
        "lambda x, q: x",
        "lambda x, q: cpt.quantize(x.detach(), q)",
        "lambda x, q: cpt.quantize(x.detach(), q).requires_grad_()",
        "lambda x, q: x + (cpt.quantize(x.detach(), q) - x)",
        "lambda x, q: 2 * x + (cpt.quantize(x.detach(), q) - 2 * x).detach()",
        "lambda x, q: AlwaysOne.apply(x, q)",
        "lambda x, q: x.add_(1)",
        "0.5",
    ],
    "02.8": [
        "lambda x, q: torch.stack([grid(row, 2**q - 1) for row in x])",
        "cpt.quantize",
        "lambda x, q: cpt.quantize(x.T, q, 'linear_weight').T",
        "lambda x, q: x.amin(1)",
        "2",
    ],
    "03.1": ['"medium"', '"large cost"', '"not large"', '"small"', '["large"]', "1", "None"],
    "03.2": [*NO_NUMBER, "6", "4", '"static 5"'],
    "03.3": ["lambda runs: [True] * len(runs)", "lambda runs: True", "lambda runs: runs[9]", "[True]"],
    "03.4": [*NO_NUMBER, "0.05", "80.9"],
    "03.6": [
        "lambda a, b: sum(a.values()) / len(a) - sum(b.values()) / len(b)",
        "lambda a, b: sum(a[s] - b[s] for s in a) / len(a)",
        "lambda a, b: {s: a[s] - b[s] for s in a if s in b}",
    ],
    "04.1": [*NO_NUMBER, "32 / 48", "44.4", "1024"],
    "04.2": ["lambda a, b: 0.759", "lambda a, b: a - b", "lambda a, b: a"],
    "04.3": ["lambda height, width: 9 * (height // 8) * (width // 8)", "94_851"],
    "04.5": [
        "lambda hits, objects: sum(hits) / len(hits)",
        "lambda hits, objects: sum(sum(hits[: i + 1]) / (i + 1) for i, h in enumerate(hits) if h) / objects",
        "0.688",
    ],
    "05.1": [*NO_NUMBER, "4", "8", "3"],
    "05.2": [*NO_NUMBER, "1.4", "0.478", "5.93"],
    "05.3": [*NO_NUMBER, "0", 'float("inf")', "-1e30"],
    "05.4": ["lambda a: a", "lambda a: a + torch.eye(4)", "lambda a: a.sum(1)"],
    "05.5": ["lambda logits, label: -logits.log_softmax(0)[label]", "lambda logits, label: logits[label]"],
    "05.7": [
        "lambda m, bits: m.sum(0)",
        "lambda m, bits: cpt.quantize(m.sum(0), bits)",
        "lambda m, bits: cpt.quantize(m, bits).sum(0)",
    ],
    "06.1": [*NO_NUMBER, "0.007", "0.937", "6.3"],
    "06.2": ["lambda i, u: 4 * u * u", "lambda i, u: 700 * 4 * u * (i + u)", "5_120_000"],
    "06.3": [*NO_NUMBER, "math.log(10_000)", "9_990", "9.2"],
    "06.4": ["lambda p: sum(p) / len(p)", "lambda p: math.log(p)", "2.8"],
    "06.5": [*NO_NUMBER, "0.186", "1.1", "-0.105"],
    "06.6": ["lambda t, w: t * t * w", "lambda t, w: 2 * t * w * w", "1"],
    "07.1": ["lambda low, steps, q: 1 - low / steps", "lambda low, steps: 1"],
    "08.1": [
        *NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})',
        f'cpt.solve_schedule(0.5, {SUITE_64}, family="rex")',
        f"cpt.solve_schedule(0.5, {SUITE_64})",
        'cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=6400, family="cosine")',
        'cpt.solve_schedule(0.5, q_min=2, q_max=8, total_steps=64_000, family="cosine")',
    ],
    "08.2": [*NO_NUMBER, "0.5", "41.7", "0.297"],
    "08.3": [*NO_NUMBER, "3"],
    "08.4": ['"cosine"', '"exponential"', "448", "None"],
    "08.5": ["lambda s: 4.0 ** (8 - s.bits().mean())", "lambda s: s.bits()", "lambda s: 4 ** -s"],
    "08.6": [
        "lambda budget: 8 * budget",
        "lambda budget: 5",
        "lambda budget: round((64 + 192 * budget) ** 0.5 - 8)",
        "5",
    ],
    "09.1": [*NO_SCHEDULE, "cpt.solve_schedule(0.75, 4, 16, 64_000)", "cpt.StaticSchedule(8, 64_000)"],
    "09.2": ["lambda c: c[0::2]", "lambda c: 16 * c[0::2] + c[1::2]", "lambda c: c"],
}


def said(exercise, attempt, capsys):
    exercises.check(exercise, eval(attempt, dict(NAMES)))
    (line,) = capsys.readouterr().out.splitlines()
    return line


def code(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def exercise_cells(path):
    """What is to be written, in order: most of it stands in one cell, some where it was explained."""
    return "\n".join(c.source for c in code(path) if "exercises.check(" in c.source)


def calls(source, name):
    """The arguments of all calls of ``exercises.<name>``, as they are written."""
    tree = ast.walk(ast.parse(source))
    found = [n for n in tree if isinstance(n, ast.Call) and ast.unparse(n.func) == f"exercises.{name}"]
    return [[ast.unparse(a) for a in (*n.args, *n.keywords)] for n in found]


def test_every_exercise_has_its_notebook_and_its_wrong_answers():
    numbers = [ast.literal_eval(number) for path in NOTEBOOKS for number, _ in calls(exercise_cells(path), "check")]
    assert len(set(numbers)) == len(numbers)
    assert sorted(numbers) == list(EXERCISES)
    assert list(WRONG) == list(EXERCISES)
    assert set(RIGHT) <= set(numbers)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_solutions(path, capsys):
    todo, solved = exercise_cells(path), (FOLDER / "solutions" / f"{path.name[:2]}_solutions.py").read_text()
    asked = calls(todo, "check")
    assert calls(solved, "check") == asked
    exec(todo, {**NAMES, "exercises": exercises})
    numbers = [ast.literal_eval(number) for number, _ in asked]
    assert all(n[:2] == path.name[:2] for n in numbers)
    assert capsys.readouterr().out.splitlines() == [f"exercise {n}: not attempted yet" for n in numbers]
    exec(solved, {})
    assert capsys.readouterr().out.splitlines() == [f"exercise {n}: correct" for n in numbers]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_text_has_every_exercise_that_is_checked_and_at_least_three_to_do(path):
    (text,) = [c.source for c in nbformat.read(path, as_version=4).cells if "Exercises\n" in c.source]
    items = dict(re.findall(r"^(\d)\. (.*)$", text.split("Exercises\n")[1], flags=re.M))
    assert list(items) == [str(i + 1) for i in range(len(items))]
    checked = {number.strip("'").split(".")[1] for number, _ in calls(exercise_cells(path), "check")}
    assert checked | {k for k, item in items.items() if "<summary>" in item} == set(items)
    to_do = [item for item in items.values() if re.search(r"[Ww]rite|[Mm]ake|Count|Compute|Pack|^Set ", item)]
    assert len(to_do) >= 3
    assert f"(solutions/{path.name[:2]}_solutions.py)" in text


def cases(answers):
    return [pytest.param(n, answer, id=f"{n}-{answer}") for n, further in answers.items() for answer in further]


@pytest.mark.parametrize(("exercise", "answer"), cases(RIGHT))
def test_other_forms_of_a_right_answer_are_accepted(exercise, answer, capsys):
    assert said(exercise, answer, capsys) == f"exercise {exercise}: correct"


def test_what_is_wrong_with_a_schedule_is_told(capsys):
    assert "it costs 0.6334 of static 8" in said("08.1", f'cpt.make_schedule("CR", {SUITE_64})', capsys)
    assert "its profile is linear, not" in said("08.1", f'cpt.make_schedule("LR", {SUITE_64})', capsys)
    assert "it has no profile" in said("08.1", "cpt.DeficitSchedule(3, 8, [(0, 45_511)], 64_000)", capsys)
    assert "it takes 0.500 of the seconds" in said("09.1", "cpt.DeficitSchedule(4, 16, [(0, 64_000)], 64_000)", capsys)


@pytest.mark.parametrize(("exercise", "answer"), cases(WRONG))
def test_wrong_answers_get_a_hint_without_a_traceback(exercise, answer, capsys):
    line = said(exercise, answer, capsys)
    assert line.startswith(f"exercise {exercise}: not yet")
    assert line.endswith(f". Hint: {EXERCISES[exercise].hint}")
    if "lambda" not in answer:  # else it is the reader's own function that raises, in Python's words
        assert "has no attribute" not in line
        assert "not supported" not in line


@pytest.mark.parametrize(
    ("exercise", "slip", "sentence"),
    [
        ("04.5", WRONG["04.5"][1], "every hit counts the precision at its place, not the best one from there on"),
        (
            "04.5",
            "lambda hits, n: np.mean([np.mean(hits[: i + 1]) for i, h in enumerate(hits) if h])",
            "it divides by the",
        ),
        ("05.7", WRONG["05.7"][0], "nothing is rounded"),
        ("05.7", WRONG["05.7"][1], "the sum is rounded, and not what is summed"),
        ("05.7", WRONG["05.7"][2], "all messages have one range together"),
        ("05.7", "lambda m, bits: cpt.quantize(m, bits, 'graph_aggregation').mean(0)", "this is the mean"),
        ("06.2", "lambda i, u: u * (i + u)", "these are those of one gate"),
        ("06.2", "lambda i, u: 4 * u * (i + u) + 4 * u", "a bias is added, not multiplied"),
        ("06.2", WRONG["06.2"][1], "these are those of a step of 35 x 20 words"),
        ("06.6", WRONG["06.6"][0], "these are those of one product"),
    ],
)
def test_what_is_wrong_with_other_answers_is_said(exercise, slip, sentence, capsys):
    assert f"; {sentence}" in said(exercise, slip, capsys)


@pytest.mark.parametrize(("slip", "sentence"), SLIPS.items(), ids=SLIPS.values())
def test_what_is_wrong_with_a_quantiser_is_said(slip, sentence, capsys):
    assert f"; {sentence}" in said("02.5", slip, capsys)


REASONS = {
    ("00.1", f'cpt.make_schedule("CR", {SUITE_64})'): "it costs 0.633 of static 8",
    ("00.2", f'cpt.make_schedule("CR", {SUITE_64})'): "it goes from 3 to 8 bits: it is not static",
    ("00.2", "cpt.StaticSchedule(4, 64_000)"): "it costs 0.417 of static 8",
    ("00.2", "cpt.StaticSchedule(6, 64_000)"): "it costs 0.688 of static 8",
    ("01.2", WRONG["01.2"][-4]): "it costs 0.628 of static 8",
    ("01.2", WRONG["01.2"][-3]): "it goes down to 2 bits",
    ("01.2", WRONG["01.2"][-2]): "it costs 0.359 of static 8",
    ("01.2", WRONG["01.2"][-1]): "it ends at 3 bits",
}


@pytest.mark.parametrize(("asked", "reason"), REASONS.items(), ids=[f"{n}-{r}" for (n, _), r in REASONS.items()])
def test_what_is_wrong_with_a_schedule_is_said(asked, reason, capsys):
    assert f": not yet: {reason}. Hint: " in said(*asked, capsys)


def test_what_is_wrong_with_a_layer_is_said(capsys):
    found = [said("00.4", answer, capsys).split(". Hint")[0] for answer in WRONG["00.4"][:8]]
    assert [line.split("; ")[1] for line in found[:3]] == [
        "nothing is rounded",
        "the weight has one range, and not one for each row",
        "the bias is not rounded",
    ]
    assert [line.split("its values are right")[1] for line in found[3:]] == [
        ", but no gradient goes from them to all of its operands",
        "; the gradient of the input is another one, also in the mean",
        "; the gradient of the input is the same in every backward pass",
        "; the gradient of the input is the same in every backward pass",
        "; the gradient of the input has not the noise of 8 bits",
    ]


def test_the_solution_of_notebook_00_is_the_layer_of_the_library_to_the_last_bit():
    solved = {}
    exec((FOLDER / "solutions" / "00_solutions.py").read_text(), solved)
    for bits in (1, 2, 4, 8):
        ours, theirs = (f(*OPERANDS, bits) for f in (solved["my_linear"], library_layer))
        assert torch.equal(ours, theirs)


def test_a_row_without_a_step_is_told(capsys):
    assert "; the first row has a step of 0. Hint: " in said("02.8", WRONG["02.8"][0], capsys)


def test_what_is_wrong_with_a_gradient_is_said(capsys):
    found = [said("02.7", answer, capsys).split(": ", 2)[2].split(". Hint")[0] for answer in WRONG["02.7"][1:6]]
    assert found == [
        "its values are right, but no gradient goes from them to x",
        "its values are right, but no gradient goes from them to x",
        "its values are right; its gradient is 0 where a wide difference is 1.14",
        "its values are right; its gradient is 2 where a wide difference is 1.14",
        "its values are right; of a gradient of 0.6 that arrives it passes on 1",
    ]


def test_the_smallest_share_at_q_min_is_that_of_the_names_that_are_accepted():
    shares = {name: cpt.make_schedule(name, q_min=3, q_max=8, total_steps=64_000).share_at(3) for name in SUITE}
    assert set(sorted(shares, key=shares.get)[:2]) == {"ER", "ETH"}
    assert shares["ER"] == pytest.approx(shares["ETH"], abs=1e-3)


def test_a_function_that_raises_is_told(capsys):
    assert ": not yet: it raises ZeroDivisionError: division by zero. Hint" in said(
        "04.2", "lambda a, b: 1 / 0", capsys
    )
    exercises.check("04.2", lambda a, b: None)
    exercises.check("04.9", 1)
    assert capsys.readouterr().out == "exercise 04.2: not attempted yet\nthere is no exercise '04.9'\n"


def test_a_check_of_ones_own(capsys):
    exercises.check("x", "text", lambda s: s.relative_cost() < 1, "a schedule")
    assert capsys.readouterr().out == "x: not yet: str is not the kind of answer asked for. Hint: a schedule\n"
    short = cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=800)
    exercises.check("x", short, lambda s: s(999) == 8, "1000 steps")
    assert re.fullmatch(r"x: not yet \(\w+: .*999.*\)\. Hint: 1000 steps\n", capsys.readouterr().out)


@pytest.fixture
def unchosen(monkeypatch):
    monkeypatch.setattr(exercises, "_predictions", {})


@pytest.mark.parametrize("choice", ["b", "B", " b ", "(b)"])
def test_a_prediction_is_compared_with_the_answer(choice, unchosen, capsys):
    exercises.predict("unit", choice, options=("a", "b"))
    exercises.reveal("unit", because="More.")
    noted, *told = capsys.readouterr().out.splitlines()
    assert noted == "unit: noted 'b'"
    assert told == ["unit: the answer is b.  You were right.", PREDICTIONS["unit"].because, "More."]
    exercises.predict("unit", "a")
    exercises.reveal("unit")
    assert "unit: the answer is b.  You said a." in capsys.readouterr().out


@pytest.mark.parametrize("choice", ["d", "ab", 3, None, True, ["a"], ("b",), np.array(["a", "b"]), {}, "  b c"])
def test_no_prediction_no_answer(choice, unchosen, capsys):
    exercises.predict("zero", "a")
    exercises.predict("zero", choice)
    exercises.reveal("zero", because="a secret")
    _, refused, told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"zero: .* is none of a, b, c - put one of them between the quotes", refused)
    assert told == "zero: choose first, in the cell with predict, then run this cell again"


@pytest.mark.parametrize("choice", ["", "  "])
def test_an_empty_prediction_is_none(choice, unchosen, capsys):
    exercises.predict("zero", choice)
    exercises.reveal("zero")
    assert [line.split(" - ")[0].split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "zero: no prediction yet",
        "zero: choose first",
    ]


def test_rows_that_give_another_answer_are_heard(unchosen, capsys):
    with pytest.raises(AssertionError, match="zero: the answer that is kept is a, the rows say b"):
        exercises.reveal("zero", found="b")
    exercises.reveal("nought")
    assert capsys.readouterr().out.startswith("there is no question 'nought'; those of the notebooks are static 4, ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_answers_of_predictions_are_on_pages_alone_and_collapsed(path):
    book = nbformat.read(path, as_version=4)
    sources = "\n".join(c.source for c in code(path))
    asked = [ast.literal_eval(question) for question, *_ in calls(sources, "reveal")]
    assert asked
    predicted = calls(sources, "predict")
    assert sorted(ast.literal_eval(question) for question, *_ in predicted) == sorted(asked)
    assert {choice for _, choice, *_ in predicted} == {"''"}
    pages = [nbformat.from_dict(cell) for cell in with_answers(book.cells)]
    for question in asked:
        answer, because = PREDICTIONS[question]
        because = html.escape(because, quote=False)
        (at,) = [i for i, c in enumerate(pages) if f'reveal("{question}"' in re.sub(r"\(\s+", "(", c.source)]
        assert pages[at + 1].source == f"<details><summary>Answer</summary>({answer}) {because}</details>"
        printed = "".join(o.get("text", "") for o in pages[at].outputs)
        assert f"{question}: choose first, in the cell with predict, then run this cell again\n" in printed
        assert because not in str(book)
        assert notebook_page(book).count(because) == 1
        assert not re.search(r"the answer is", str(book))


def test_questions_have_one_place():
    asked = [q for path in NOTEBOOKS for c in code(path) for q, *_ in calls(c.source, "reveal")]
    assert sorted(map(ast.literal_eval, asked)) == sorted(PREDICTIONS)


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
