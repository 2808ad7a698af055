"""What notebook 08 prints: committed range tests, and a reader's own beside them."""

import numpy as np
import pytest

from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis.preregistered import findings
from cpt_lab.analysis.runs import committed
from cpt_lessons import choosing
from cpt_lessons.parameters import check_parameters


def test_a_committed_range_test_is_a_range_test_again(capsys):
    found = choosing.stored_range_test("digits/mlp6")
    assert found.q_min == next(q for q in found.bits if found.mean(q) >= found.threshold) == 4
    choosing.show_range_tests()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("digits/mlp6")]
    assert f"{found.mean(4):.2f}" in line
    assert "4? (6 seeds)" in line


def test_a_smoke_range_test_never_names_a_q_min(capsys):
    found = choosing.own_range_test(check_parameters("image", scale="smoke", dataset="digits", model="", q_max=8))
    said = capsys.readouterr().out
    assert found.bits == (2, 3, 8)
    assert said.startswith("smoke scale: not a result")
    assert "q_min" not in said
    assert all(f"{q} bits {found.mean(q):.2f}" in said for q in (2, 3))
    assert np.isfinite(found.shares).all()


def test_the_outcome_is_told_whole_and_no_line_is_wider_than_a_small_screen(capsys):
    runs = committed()
    choosing.show_outcome(runs)
    told = capsys.readouterr().out
    assert told.split() == " ".join(findings(runs)).split()
    choosing.show_fronts(runs)
    choosing.show_equal_cost({name: committed(f"equal_cost_{name}") for name in ("digits", "pydoc")})
    choosing.show_budgets([0.3], ["rex"], q_min=3, q_max=8, total_steps=64_000, delay=0.1)
    lines = [*told.splitlines(), *capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= choosing.WIDTH
    assert not any(line.strip().startswith("(") for line in lines)  # a cost stays with its arm


def test_budgets_that_cannot_be_met_stand_below_those_that_can(capsys):
    choosing.show_budgets([0.3, 0.45], ["rex"], q_min=3, q_max=8, total_steps=6_400, delay=0.1)
    head, met, *unmet = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["budget", "family", "power", "cost"]
    assert met.split()[:2] == ["0.45", "rex"]
    assert " ".join(unmet).startswith("rex: budget 0.3 cannot be met")


def test_costs_beside_bit_operations(capsys):
    choosing.show_costs(3, 8, total_steps=800)
    head, *lines = (line.split() for line in capsys.readouterr().out.replace("static ", "static_").splitlines())
    costs = {arm: dict(zip(head[1:], map(float, of), strict=True)) for arm, *of in lines}
    assert {"RR", "CR", "ER"} < costs.keys()
    assert costs["static_4"]["bitops"] == pytest.approx(80 / 192, abs=5e-4)
    assert costs["static_4"]["energy"] == pytest.approx(
        StaticSchedule(4, 8).relative_cost(8, 8, cost="energy"), abs=5e-4
    )
    assert all(of["bitops"] < of["multiplier"] < of["traffic"] < 1 for of in costs.values())
    assert [of["bitops"] for of in costs.values()] == sorted(of["bitops"] for of in costs.values())


def test_three_ways_beside_a_schedule(capsys):
    choosing.show_equal_cost({"digits": committed("equal_cost_digits")})
    head, delayed, early, fewer = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "task"
    assert delayed.split("delayed")[1].split() == "worse not told apart".split()
    assert early.count("static 8 worse") == 2
    assert fewer.count("not told apart") == 2


def test_what_notebook_08_says_of_them_all(capsys):
    files = {"digits": "digits", "facebook": "facebook", "characters": "pydoc"}
    choosing.show_equal_cost({name: committed(f"equal_cost_{file}") for name, file in files.items()})
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [name for name in files for _ in range(3)]
    assert not any("better" in line for line in lines[::3])  # a delay
    assert all(line.replace("–", "worse").count("worse") == 2 for line in lines[1::3])  # stopped early
