"""What notebooks 08, 11 and 12 draw, print and say of committed rows."""

import numpy as np
import pytest

from cpt_core.choosing.solver import solve_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis import predictors
from cpt_lab.analysis.estimates import Estimate
from cpt_lab.analysis.preregistered import all_answers
from cpt_lab.analysis.runs import committed
from cpt_lab.experiments.grids import grid_specs
from cpt_lab.studies.h1_to_h4 import arms
from cpt_lessons import choosing
from cpt_lessons.predictions import PREDICTIONS


def test_a_committed_range_test_is_a_range_test_again(capsys):
    found = choosing.stored_range_test("digits/mlp6")
    assert found.q_min == next(q for q in found.bits if found.mean(q) >= found.threshold) == 4
    choosing.show_range_tests()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("digits/mlp6")]
    assert f"{found.mean(4):.2f}" in line
    assert "4? (6 seeds)" in line


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


@pytest.mark.slow
def test_three_ways_beside_a_schedule_on_three_tasks(capsys):
    choosing.show_equal_cost()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "task"
    assert [line.split()[0] for line in lines] == [name for name in ("digits", "facebook", "characters") for _ in "123"]
    assert lines[0].split("delayed")[1].split() == "worse not told apart".split()
    assert not any("better" in line for line in lines[::3])  # a delay
    assert all(line.replace("–", "worse").count("worse") == 2 for line in lines[1::3])  # stopped early


def drawn(figure):
    """The lines of a figure of intervals, from the top down: name, mean, low, high, verdict."""
    (ax,) = figure.axes
    texts = [text.get_text() for text in ax.texts]
    bars = [(*bar.lines[0].get_xdata(), *bar.lines[2][0].get_segments()[0][:, 0]) for bar in ax.containers]
    return [(name, *bar, word) for name, bar, word in zip(texts[::2], bars, texts[1::2], strict=True)]


def test_static_and_cycles_in_margins_with_the_verdicts_of_h2():
    lines = drawn(choosing.static_or_cycle())
    assert [line[0][:9] for line in lines] == ["cost 0.55"] * 3 + ["cost 0.30"] * 3
    assert [line[0].rpartition(", ")[2] for line in lines] == ["n = 10", "n = 20", "n = 20"] * 2
    assert all(-1 < low < mean < high < 1 and word.startswith("alike") for _, mean, low, high, word in lines[:3])
    assert all(high < 0 and word.startswith("static is better (-") for *_, high, word in lines[3:])
    (h2,) = [a for a in all_answers(committed("h2")) if a.question == "H2"]
    assert "static is better in 3 of 6; alike within the margin in 3" in h2.word
    assert lines[4][1] == pytest.approx(h2.primary[3].mean / 2)


@pytest.mark.parametrize(("bits", "cost"), [(5, "0.55"), (3, "0.30")])
def test_what_notebook_08_says_of_the_cycles_of_h2(bits, cost):
    for total in (160, 120):
        cycle = arms.least_noisy(bits, total)
        assert f"{cycle.relative_cost(8, 8):.2f}" == cost
        assert cycle.bits().min() == bits - 1
    assert choosing.stored_range_test("pydoc/lstm").q_min == 3
    assert choosing.stored_range_test("facebook_ogb_layout/gcn").q_min == 2
    assert all(grid_specs(f"h2/{name}")[0].recipe.lr_rule == "cosine" for name in ("facebook", "characters", "sage"))


def test_the_cycle_that_is_predicted_spends_most_steps_at_2_bits():
    cycle = solve_schedule(StaticSchedule(3, 160).relative_cost(8, 8), 2, 8, 160, n_cycles=2, family="cosine")
    assert PREDICTIONS["steps at 2 bits"][0] == "c"
    assert cycle.share_at(2) > 2 / 3


def test_what_notebook_12_says_of_noise_and_of_other_formats():
    assert [line[-1].split(" (")[0] for line in drawn(choosing.noise_harms())] == ["worse", "worse"]
    lines = drawn(choosing.other_formats())
    ten, late = lines[:6], lines[6:]
    for part in (ten, late):
        (lost,) = [line[0].partition(":")[0] for line in part if line[-1].startswith("static")]
        assert lost == "characters, MX formats"
        assert not any("schedule is better" in line[-1] for line in part)
    assert sum(high > 1 for *_, high, _ in ten) == 1
    assert not any(high > 1 for *_, high, _ in late)
    assert not any(a.adjusted < 0.05 for a in all_answers(committed("h6")))


def test_what_notebook_12_says_of_predictors():
    found = predictors.predictors_by_title(committed()).values()
    said = [frame.set_index("predictor")["verdict"]["noise_exposure"] for frame in found]
    assert sorted(said) == ["better"] * 2 + ["undecided"] * 6


def test_a_verdict_needs_holms_correction():
    rng = np.random.default_rng(0)
    near = Estimate("near", "points", 0.1 * (x := rng.normal(size=9)) - 0.1 * x.mean(), 0.2)
    far, wide = Estimate("far", "points", near.values - 1, 0.2), Estimate("wide", "points", 99 * near.values, 0.2)
    words = [line[-1] for line in choosing.in_margins([near, far, wide], "abc", below="lost")]
    assert [word.split(" ")[0] for word in words] == ["alike", "lost", "open"]
    assert choosing.in_margins([far], "a", above="won")[0][1] == pytest.approx(-5)
