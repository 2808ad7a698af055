"""Exercises of the notebooks: correct solutions, hints for wrong answers, and hidden predictions."""

import ast
import html
import math
import re

import nbformat
import numpy as np
import pytest
import torch
from notebook_dataflow import FOLDER, NOTEBOOKS, PAPER, PREDICTING, code_cells, read

import cpt_core as cpt
from cpt_lab.data.loading import one_thread
from cpt_lessons import exercises
from cpt_lessons.answer_parsing import paste_repr
from cpt_lessons.demonstrations import held_out, tiny_problem
from cpt_lessons.exercise_checks import LAYER_OPERANDS, library_layer, trained
from cpt_lessons.exercises import EXERCISES
from cpt_lessons.predictions import PREDICTIONS, with_answers

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


OWN = {"own_layer": own_layer, "grid": grid, "AlwaysOne": AlwaysOne}
NAMES = {"cpt": cpt, "math": math, "np": np, "torch": torch, **OWN}
SUITE_64 = "q_min=3, q_max=8, total_steps=64_000"

# Further answers that are right, and ones that are wrong, by exercise.
RIGHT = {
    "00.1": [
        f'cpt.make_schedule("RTH", {SUITE_64})',
        f'cpt.make_schedule("RR", {SUITE_64}, n_cycles=2)',
    ],
    "00.2": [
        'cpt.FunctionSchedule(lambda u: 5, total_steps=64_000, argument="progress")'
    ],
    "00.3": ['"0.205"', "np.float32(0.205)", '"20.5 / 100"', '"20.5 %"', '"20,5%"'],
    "00.4": [
        "own_layer()",
        "own_layer(lambda x, q, role: x - (x - cpt.quantize(x, q, role)).detach())",
    ],
    "01.1": ["cpt.FunctionSchedule(lambda u: 4 if u < 0.8 else 8, total_steps=1000)"],
    "01.2": [
        "lambda t: 8 - round(5 * math.exp(-4 * abs((t // 8000 + 1) % 2 - t % 8000 / 8000)))"
    ],
    "01.3": [
        "cpt.FunctionSchedule(lambda u: 3 if u < 0.8 else 8, total_steps=400)",
        'cpt.make_schedule("RTH", q_min=3, q_max=8, total_steps=400, n_cycles=2)',
    ],
    "02.1": [
        "lambda x, q: cpt.quantize(x, q).requires_grad_()",
        "lambda x, q: grid(x, 2**q - 1, least=1e-12)",
    ],
    "02.2": [
        "lambda x, q: x - (x - cpt.quantize(x, q)).detach()",
        "lambda x, q: x.add(cpt.quantize(x.detach(), q) - x.detach())",
    ],
    "02.3": [
        "lambda q, q_grad: torch.tensor(16 / 19 if q == 3 else 2 / 3 if q == 8 else 0.75)"
    ],
    "03.1": ["lambda costs, y: np.polyfit(np.log2(costs), y, 1)[0]"],
    "03.2": ["lambda c, a, s: torch.tensor(a - np.interp(c, *zip(*sorted(s))))"],
    "04.1": [
        "lambda d: {2: 12.706, 3: 4.303, 4: 3.182}[len(d)] * np.std(d, ddof=1) / np.sqrt(len(d))"
    ],
    "05.1": ["lambda products, sums, q: 1 / (1 + products * q**2 / (1024 * sums))"],
    "06.1": [
        "lambda macs, bits, q_max: macs * np.mean([q * (q + 2 * q_max) for q in bits]) * len(bits) / 1024"
    ],
    "07.1": ["lambda low, normal: (low + 0.5 * normal, low + 0.75 * normal)"],
    "08.1": [
        "lambda trainings, margin: sorted(c for c, a in trainings if a >= dict(trainings)[1.0] - margin)[0]"
    ],
    "09.1": [
        "lambda a, b: float(np.mean([a[s] - b[s] for s in a if s in b]))",
        "lambda a, b: (torch.tensor([a[s] - b[s] for s in b if s in a])).mean()",
    ],
    "09.2": [
        "lambda runs: torch.tensor([not any(c <= x and a > y for c, a in runs) for x, y in runs])",
        "lambda runs: np.array([all(c > x or a <= y for c, a in runs) for x, y in runs])",
    ],
    "10.1": ["lambda budget: int((64 + 192 * budget) ** 0.5 - 8)"],
    "10.2": ["lambda c: math.exp(math.log(4) * (16 - math.sqrt(64 + 192 * c)))"],
    "11.1": ["cpt.DeficitSchedule(4, 16, [(0, 32_000)], 64_000)"],
    "11.2": ["lambda c: (c[0::2].int() + 16 * c[1::2].int()).tolist()"],
    "12.1": [
        'lambda x, q: cpt.quantize(x, q, "graph_input")',
        "lambda x, q: torch.stack([cpt.quantize(r, q) for r in x])",
    ],
    "12.2": ["lambda x, q: cpt.quantize(x, format=f'symmetric{q}')"],
    "13.1": [
        f'cpt.solve_schedule(0.5, {SUITE_64}, family="cosine", n_cycles=4, triangular=True)'
    ],
    "13.2": ["0.417", '"80/192"', '"41.7 %"', "0.42"],
    "13.3": ['"REX"', '" rex "', '"R"'],
    "16.1": ["lambda m, bits: sum(cpt.quantize(m, bits, 'graph_aggregation')).numpy()"],
    "17.1": ["lambda p: torch.tensor(p).log().mean().neg().exp()"],
}
NO_SCHEDULE = dict.fromkeys(
    ['"RR"', "0.4", "None", "cpt.make_schedule"], " is no schedule. Hint: "
)
NO_NUMBER = dict.fromkeys(
    ['"many"', "None", "[1, 2]", "torch.ones(2)", "lambda: 32", '"1/0"'],
    " is no number. Hint: ",
)
NO_NUMBER |= {"True": "", '"nan"': ""}
WRONG = {  # exercise -> answer -> what is said of it
    "03.1": {
        "lambda costs, y: np.polyfit(costs, y, 1)[0]": "Hint: this is the slope over the cost itself",
        "lambda costs, y: np.polyfit(np.log(costs), y, 1)[0]": "Hint: this is the slope over the natural logarithm",
        "lambda costs, y: y[-1] - y[0]": "",
    },
    "03.2": {"lambda c, a, s: a - s[0][1]": "", "lambda c, a, s: a - max(s)[1]": ""},
    "04.1": {
        "lambda d: {2: 12.706, 3: 4.303, 4: 3.182}[len(d)] * np.std(d) / len(d) ** 0.5": "Hint: the standard deviation",
        "lambda d: {2: 12.706, 3: 4.303, 4: 3.182}[len(d)] * np.std(d, ddof=1)": "Hint: the standard deviation is div",
        "lambda d: max(d) - min(d)": "",
    },
    "05.1": {
        "lambda products, sums, q: 32 * sums / (32 * sums + q * products)": "Hint: 32 and q count squared",
        "lambda products, sums, q: sums / (sums + products)": "",
    },
    "06.1": {
        "lambda macs, bits, q_max: macs * sum(q * q for q in bits) / 1024": "Hint: the two products of the backward",
        "lambda macs, bits, q_max: macs * sum(q * q + 2 * q * q_max for q in bits)": "Hint: it is not divided by",
        "lambda macs, bits, q_max: macs * len(bits)": "",
    },
    "07.1": {
        "lambda low, normal: [(low + normal) / 2, 3 * (low + normal) / 4]": "Hint: these are 50 and 75 % of all steps",
        "lambda low, normal: [normal / 2, 3 * normal / 4]": "",
    },
    "08.1": {
        "lambda trainings, margin: min(trainings)[0]": "",
        "lambda trainings, margin: 1.0": "",
    },
    "00.1": {
        **NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})': "not yet: it costs 0.633 of static 8. Hint: ",
        "cpt.DeficitSchedule(3, 8, [(0, 60_000)], 64_000)": "none of the ten",
        'cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=6400)': "6,400 steps, not 64,000",
        'cpt.make_schedule("RR", q_min=2, q_max=8, total_steps=64_000)': "from 2 to 8 bits",
    },
    "00.2": {
        **NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})': "not yet: it goes from 3 to 8 bits: it is not static. Hint: ",
        "cpt.StaticSchedule(4, 64_000)": "not yet: it costs 0.417 of static 8. Hint: ",
        "cpt.StaticSchedule(6, 64_000)": "not yet: it costs 0.688 of static 8. Hint: ",
    },
    "00.3": {
        **NO_NUMBER,
        **dict.fromkeys(["0.5", "13_000", "20.5", '"0.205 %"', '"20"'], ""),
    },
    "00.4": {
        "lambda x, weight, bias, bits: torch.nn.functional.linear(x, weight, bias)": "Hint: nothing is rounded: multip",
        "own_layer(rows=False)": "Hint: the weight has one range, and not one for each row: rounded(weight",
        "own_layer(bias=False)": "Hint: the bias is not rounded: rounded(bias",
        "own_layer(lambda x, q, role: cpt.quantize(x.detach(), q, role).requires_grad_())": (
            "its values are right, but no gradient goes from them to all of its operands. Hint: quantize alone"
        ),
        "own_layer(lambda x, q, role: 2 * x + (cpt.quantize(x, q, role) - 2 * x).detach())": (
            "its values are right; the gradient of the input is another one, also in the mean. Hint: rounded(...) has"
        ),
        "own_layer(random=False)": "the gradient of the input is the same in every backward pass. Hint: y.register",
        "own_layer(bits=None)": "the gradient of the input is the same in every backward pass. Hint: y.register",
        "own_layer(bits=3)": "the gradient of the input has not the noise of 8 bits. Hint: gradients have 8",
    },
    "01.1": {
        **NO_SCHEDULE,
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=500)": "",
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u, total_steps=1000)": "not yet: it costs 0.628 of static 8. Hint: ",
        "cpt.FunctionSchedule(lambda u: 2 + 6 * u**1.5, total_steps=1000)": "not yet: it goes down to 2 bits. Hint: ",
        "cpt.FunctionSchedule(lambda u: 3 + 5 * u**9, total_steps=1000)": "not yet: it costs 0.359 of static 8. Hint: ",
        "cpt.FunctionSchedule(lambda u: 8 - 5 * u**2, total_steps=1000)": "not yet: it ends at 3 bits. Hint: ",
    },
    "01.2": dict.fromkeys(
        ["lambda: 3", "lambda t: round(8 - 5 * math.exp(-4 * (t % 8000) / 8000))"], ""
    ),
    "01.3": {
        **NO_SCHEDULE,
        "cpt.StaticSchedule(2, 400)": "held-out images right, static 8 ",
        "cpt.StaticSchedule(8, 400)": "it costs 1.000 of static 8",
        "cpt.StaticSchedule(16, 400)": "it goes up to 16 bits",
        "cpt.StaticSchedule(4, 800)": "it has 800 steps, not 400",
        'cpt.make_schedule("CR", q_min=1, q_max=8, total_steps=400)': "",
        'cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=400)': "",
    },
    "02.1": {
        **dict.fromkeys(
            [
                "lambda x, q: x",
                "lambda x, q: cpt.quantize(x, q + 1)",
                "lambda x, q: x[:3]",
            ],
            "",
        ),
        "lambda x, q: grid(x, 2**q - 1)": "Hint: all values are equal, so that the step is 0, and 0 / 0 is no number",
        "lambda x, q: grid(x, 2**q)": "Hint: 2^q steps have one level more than 2^q",
        "lambda x, q: grid(x, 2**q - 1, torch.floor)": "Hint: it rounds down, not to the nearest level",
        "lambda x, q: grid(x, 2**q - 1, back=0)": "Hint: the minimum is taken away and not added again",
        "lambda x, q: (grid(x, 2**q - 1) - x.min()) / (x.max() - x.min()) * (2**q - 1)": "Hint: these are the levels",
    },
    "02.2": {
        "cpt.quantize": "its gradient is that of cpt.quantize: detach x before, and write the gradient yourself. Hint",
        "lambda x, q: cpt.quantize(x, q) + 0": "its gradient is that of cpt.quantize: detach x before",
        "lambda x, q: cpt.quantize(x.detach(), q)": "its values are right, but no gradient goes from them to x. Hint",
        "lambda x, q: cpt.quantize(x.detach(), q).requires_grad_()": "but no gradient goes from them to x. Hint",
        "lambda x, q: x + (cpt.quantize(x.detach(), q) - x)": "its gradient is 0 where a wide difference is 1.14. Hint",
        "lambda x, q: 2 * x + (cpt.quantize(x.detach(), q) - 2 * x).detach()": (
            "its values are right; its gradient is 2 where a wide difference is 1.14. Hint"
        ),
        "lambda x, q: AlwaysOne.apply(x, q)": "are right; of a gradient of 0.6 that arrives it passes on 1. Hint",
        "lambda x, q: 1 / 0 if x.requires_grad else cpt.quantize(x, q)": "not yet (ZeroDivisionError: division by",
        "lambda x, q: x.add_(1)": "",
    },
    "02.3": {
        "lambda q, q_grad: q / (q + 2 * q_grad)": "Hint: this is the share of the forward product",
        "lambda q, q_grad: 'many'": "your function returns 'many' wanted ",
        "16 / 19": " is no function",
    },
    "09.1": {
        "lambda a, b: sum(a.values()) / len(a) - sum(b.values()) / len(b)": "",
        "lambda a, b: sum(a[s] - b[s] for s in a) / len(a)": "",
        "lambda a, b: {s: a[s] - b[s] for s in a if s in b}": "",
        "lambda a, b: 1 / 0": ": not yet: it raises ZeroDivisionError: division by zero. Hint",
    },
    "09.2": {
        "lambda runs: [not any(c < x and a > y for c, a in runs) for x, y in runs]": "Hint: a run of the same cost tha",
        "lambda runs: [True] * len(runs)": "",
    },
    "10.1": {
        "lambda budget: 8 * budget": "",
        "lambda budget: 5": "",
        "lambda budget: round((64 + 192 * budget) ** 0.5 - 8)": "",
    },
    "10.2": {"lambda c: 4 ** (8 - 8 * c)": "", "lambda c: 4 ** -c": ""},
    "11.1": {
        **NO_SCHEDULE,
        "cpt.solve_schedule(0.75, 4, 16, 64_000)": "",
        "cpt.StaticSchedule(8, 64_000)": "from 8 to 8 bits",
        "cpt.DeficitSchedule(4, 16, [(0, 64_000)], 64_000)": "it takes 0.500 of the seconds",
    },
    "11.2": dict.fromkeys(
        ["lambda c: c[0::2]", "lambda c: 16 * c[0::2] + c[1::2]", "lambda c: c"], ""
    ),
    "12.1": {
        "lambda x, q: torch.stack([grid(row, 2**q - 1) for row in x])": " Hint: the first row has a step of 0",
        **dict.fromkeys(
            ["cpt.quantize", "lambda x, q: cpt.quantize(x.T, q, 'linear_weight').T"], ""
        ),
        "lambda x, q: x.amin(1)": "",
    },
    "12.2": {
        "lambda x, q: cpt.quantize(x, format=f'symmetric{q + 1}')": "Hint: n is 2^(q - 1) - 1",
        "lambda x, q: cpt.quantize(x, q)": "",
    },
    "12.3": {
        '{4: "mxfp4", 6: "affine6", 8: "affine8"}': "it is no FormatLadder",
        'cpt.FormatLadder({4: "mxfp4", 8: "affine8"})': "not yet: its levels are 4, 8. Hint: ",
        'cpt.FormatLadder({4: "e2m1", 6: "affine6", 8: "affine8"})': "",
    },
    "13.1": {
        **NO_SCHEDULE,
        f'cpt.make_schedule("CR", {SUITE_64})': "it costs 0.6334 of static 8",
        f'cpt.make_schedule("LR", {SUITE_64})': "its profile is linear, not",
        "cpt.DeficitSchedule(3, 8, [(0, 45_511)], 64_000)": "it has no profile",
        f'cpt.solve_schedule(0.5, {SUITE_64}, family="rex")': "its profile is rex, not",
        f"cpt.solve_schedule(0.5, {SUITE_64})": "",
        'cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=6400, family="cosine")': "6,400 steps",
        'cpt.solve_schedule(0.5, q_min=2, q_max=8, total_steps=64_000, family="cosine")': "from 2 to 8 bits",
    },
    "13.2": {**NO_NUMBER, "0.5": "", "41.7": "", "0.297": ""},
    "13.3": {
        '"cosine"': "",
        '"exponential"': "",
        "448": " is no word",
        "None": " is no word",
    },
    "15.1": {
        "lambda hits, objects: sum(hits) / len(hits)": "",
        "lambda hits, objects: sum(sum(hits[: i + 1]) / (i + 1) for i, h in enumerate(hits) if h) / objects": (
            "Hint: every hit counts the precision at its place, not the best one from there on"
        ),
        "lambda hits, n: np.mean([np.mean(hits[: i + 1]) for i, h in enumerate(hits) if h])": "Hint: it divides by the",
    },
    "16.1": {
        "lambda m, bits: m.sum(0)": "Hint: nothing is rounded",
        "lambda m, bits: cpt.quantize(m.sum(0), bits)": "Hint: the sum is rounded, and not what is summed",
        "lambda m, bits: cpt.quantize(m, bits).sum(0)": "Hint: all messages have one range together",
        "lambda m, bits: cpt.quantize(m, bits, 'graph_aggregation').mean(0)": "Hint: this is the mean",
    },
    "17.1": {"lambda p: sum(p) / len(p)": ""},
    "18.1": {"lambda low, steps, q: 1 - low / steps": ""},
}


def said(exercise, attempt, capsys):
    exercises.check(exercise, eval(attempt, dict(NAMES)))
    return " ".join(line.strip() for line in capsys.readouterr().out.splitlines())


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
    asked = [
        q
        for path in NOTEBOOKS
        for c in code_cells(read(path))
        for q, *_ in calls(c.source, "reveal")
    ]
    assert sorted(map(ast.literal_eval, asked)) == sorted(PREDICTIONS)
    numbers = [
        ast.literal_eval(number)
        for path in NOTEBOOKS
        for number, _ in calls(exercise_cells(path), "check")
    ]
    assert len(set(numbers)) == len(numbers)
    assert sorted(numbers) == sorted(EXERCISES) == sorted(WRONG)
    assert set(RIGHT) <= set(numbers)


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


def cases(answers):
    return [
        pytest.param(n, answer, id=f"{n}-{answer}")
        for n, further in answers.items()
        for answer in further
    ]


@pytest.mark.parametrize(("exercise", "answer"), cases(RIGHT))
def test_exercise_check_accepts_equivalent_answers(exercise, answer, capsys):
    assert said(exercise, answer, capsys) == f"exercise {exercise}: correct"


@pytest.mark.parametrize(("exercise", "answer"), cases(WRONG))
def test_exercise_check_explains_wrong_answers(exercise, answer, capsys):
    """Explain a wrong answer with a hint and without a traceback."""
    line = said(exercise, answer, capsys)
    assert line.startswith(f"exercise {exercise}: not yet")
    assert WRONG[exercise][answer] in line
    assert line.count("Hint: ") == 1
    better = " your function returns " in line or "Hint: " in WRONG[exercise][answer]
    assert better or line.split(". Hint: ")[1] == EXERCISES[exercise].hint
    if (
        "lambda" not in answer
    ):  # else it is the reader's own function that raises, in Python's words
        assert "has no attribute" not in line
        assert "not supported" not in line


def test_notebook_00_solution_equals_library_layer():
    solved = {}
    exec((FOLDER / "solutions" / "00_solutions.py").read_text(), solved)
    for bits in (1, 2, 4, 8):
        ours, theirs = (
            f(*LAYER_OPERANDS, bits) for f in (solved["my_linear"], library_layer)
        )
        assert torch.equal(ours, theirs)


def test_exercise_check_shows_failing_input(capsys):
    exercises.check("02.1", lambda x, bits: grid(x, 2**bits, torch.round))
    first, given, wanted, hint = capsys.readouterr().out.splitlines()
    start, names = "exercise 02.1: not yet: for ", {"tensor": torch.tensor}
    x, bits = eval(
        f"dict({first.removeprefix(start).replace(' = ', '=')})", names
    ).values()
    assert torch.allclose(
        eval(given.removeprefix("  your function returns "), names), grid(x, 2**bits)
    )
    assert torch.allclose(
        eval(wanted.removeprefix("  wanted "), names), cpt.quantize(x, bits)
    )
    assert hint == "  Hint: 2^q steps have one level more than 2^q"
    assert len(first) < 100
    assert paste_repr(torch.tensor([True, False])) == "tensor([True, False])"
    assert (
        paste_repr(torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True))
        == "tensor(0.5)"
    )


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


def test_exercise_check_reports_unattempted_exercises(
    capsys,
):
    """Report exercises that are unattempted or unknown, and a static precision that is as good."""
    exercises.check("09.1", lambda a, b: None)
    exercises.check("15.9", 1)
    assert (
        capsys.readouterr().out
        == "exercise 09.1: not attempted yet\nthere is no exercise '15.9'\n"
    )
    assert said("01.3", "cpt.StaticSchedule(4, 400)", capsys).endswith(
        "% right at a cost of 0.42, without any cycle. This is the lesson to keep: try static first"
    )


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
        == "smoke accuracy of ER: within the range of 12 earlier seeds\n"
    )
    for value in (0.35, 1.05):
        with pytest.raises(AssertionError, match="outside its band"):
            exercises.in_band("smoke accuracy of ER", value)
