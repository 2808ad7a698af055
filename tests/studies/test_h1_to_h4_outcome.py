"""Outcomes of studies H1 to H4 of docs/preregistration.md, on synthetic rows with a known answer."""

import math

import numpy as np
import pytest
from scipy import stats

from cpt_lab.analysis import run_groups
from cpt_lab.analysis.estimates import Estimate, holm
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import grids
from cpt_lab.studies.h1_to_h4 import arms, outcome
from tests.studies.study_rows import row_at

pytestmark = pytest.mark.slow


def chance(spec):
    """Return normal noise of a run, equal in every call, of standard deviation 1."""
    return np.random.default_rng([spec.seed, *spec.key.encode()]).normal()


def rows(grid, quality, sd=0.1, lost=(), hubs=0.0):
    """Return rows of all runs of a grid, of ``quality(spec)`` plus noise.

    Arms in ``lost`` diverged; with Q-Agg, nodes of many neighbours have ``hubs`` points more.
    """
    out = []
    for spec in grids.grid_specs(grid):
        made = row_at(
            spec,
            quality(spec) + sd * chance(spec),
            status="diverged" if spec.arm in lost else "ok",
        )
        made["metrics"] += [
            {
                **at_own,
                "name": f"accuracy_degree{low}",
                "value": at_own["value"] + more / 100,
            }
            for at_own in made["metrics"][1:]
            for low in getattr(spec.recipe, "degrees", ())
            for more in [hubs * (spec.recipe.aggregation == "quantized" and low == 30)]
        ]
        out.append(made)
    return out


def answer(name, *parts):
    """Return the answer to one question from the rows of its grids."""
    found = outcome.answers(table([row for part in parts for row in part]))
    return next(a for a in found if a.question == name)


def x_of(spec, column):
    schedule = arms.equal_cost_schedules()[int(spec.arm.split()[1]) - 1]
    return {
        "noise": np.log2(schedule.noise_exposure()),
        "date": arms.mean_noise_time(schedule),
        "share": schedule.share_at(2),
    }[column]


# --- estimates ------------------------------------------------------------------------------------


def test_estimate_equals_student_t_test():
    values = np.array([0.1, 0.4, 0.2, 0.7])
    e = Estimate("a", "points", values, margin=0.9)
    told = stats.ttest_1samp(values, 0)
    assert e.p() == pytest.approx(told.pvalue)
    assert e.interval() == pytest.approx(tuple(told.confidence_interval(0.95)))
    assert e.p(0.3, "greater") == pytest.approx(
        stats.ttest_1samp(values, 0.3, alternative="greater").pvalue
    )
    assert e.p(0.3, "less") == pytest.approx(
        stats.ttest_1samp(values, 0.3, alternative="less").pvalue
    )
    assert e.small
    assert not Estimate("a", "points", values, margin=0.6).small
    assert not Estimate("a", "points", -values, margin=0.6).small
    same = Estimate("a", "points", np.ones(3))
    assert (same.p(), same.p(1.0), same.p(0, "greater"), same.p(0, "less")) == (
        0,
        1,
        0,
        1,
    )


def test_holm_steps_down_and_counts_missing_tests():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.04, math.nan, 0.01]) == pytest.approx(
        [0.08, math.nan, 0.03], nan_ok=True
    )
    assert holm([0.9, 0.8]) == [1.0, 1.0]


# --- the questions --------------------------------------------------------------------------------


def h1(facebook, characters=None, **given):
    return answer(
        "H1",
        rows("h1/facebook", facebook, **given),
        rows("h1/characters", characters or facebook, **given),
    )


def test_h1_finds_noise_slope_only():
    found = h1(lambda s: -0.5 * x_of(s, "noise"))
    assert found.outcome == "confirmed: at one cost, noisier schedules are worse"
    assert [e.mean for e in found.primary] == pytest.approx([-0.5, -0.5], abs=0.1)
    assert found.p == max(e.p() for e in found.primary)
    assert found.adjusted == pytest.approx(5 * found.p)
    found = h1(lambda s: 5 * x_of(s, "date") - 20 * x_of(s, "share"))
    assert found.outcome == "no effect worth naming"
    others = {e.description: e.mean for e in found.secondary}
    assert others["Facebook, noise 0.1 of the training later"] == pytest.approx(
        0.5, abs=0.1
    )
    assert others["characters, 10 % more steps at 2 bits"] == pytest.approx(-2, abs=0.3)


def test_h1_needs_equal_signs_on_both_tasks():
    assert h1(lambda s: -0.5 * x_of(s, "noise"), lambda s: 0.0, sd=3).outcome == "open"
    assert (
        h1(lambda s: 0.5 * x_of(s, "noise")).outcome
        == "contradicted: noisier schedules are better"
    )
    mixed = h1(lambda s: -0.5 * x_of(s, "noise"), lambda s: 0.5 * x_of(s, "noise"))
    assert mixed.outcome == "mixed: two signs"
    small = h1(lambda s: -0.05 * x_of(s, "noise"), sd=0.01)
    assert (
        small.outcome
        == "confirmed: at one cost, noisier schedules are worse; no effect worth naming"
    )


def test_h1_over_schedules_equals_linear_regression():
    runs = table(rows("h1/facebook", lambda s: -0.5 * x_of(s, "noise"), sd=0.001))
    (line,) = outcome.over_schedules(runs).itertuples(index=False)
    assert line[0] == "facebook"
    assert line[1].startswith("-0.50 [")
    assert float(line[2]) < 1e-6


H2 = ("h2/facebook", "h2/characters", "h2/sage")


def test_h2_words_for_static_unbeaten_and_beaten():
    alike = answer("H2", *(rows(grid, lambda s: 0.0, sd=0.03) for grid in H2))
    assert alike.outcome == (
        "confirmed: no schedule beats static by the margin; static is better in 0 of 6; alike within the margin in 6"
    )
    loses = answer(
        "H2", *(rows(grid, lambda s: -3.0 * s.arm.startswith("cyclic")) for grid in H2)
    )
    assert loses.outcome.endswith(
        "static is better in 6 of 6; alike within the margin in 0"
    )
    assert loses.outcome.startswith("confirmed")

    def wins(spec):
        return 3.0 * (
            spec.arm == "cyclic at the cost of static 5" and spec.recipe.model == "sage"
        )

    found = answer("H2", *(rows(grid, wins) for grid in H2))
    told = "contradicted: a schedule wins in 1 of 6 (Facebook GraphSAGE, schedule minus static 5);"
    assert found.outcome.startswith(told)
    assert found.p == pytest.approx(1, abs=0.01)
    unclear = answer("H2", *(rows(grid, lambda s: 0.0, sd=3) for grid in H2))
    assert unclear.outcome.startswith("open; static is better in 0 of 6")


def test_h2_reports_dependence_on_evaluation_rule():
    made = [
        rows(grid, lambda s: 3.0 * s.arm.startswith("cyclic"), sd=0.03) for grid in H2
    ]
    for row in (
        row for part in made for row in part if row["spec"]["arm"].startswith("static")
    ):
        at_top, at_own = row["metrics"][:2]  # better at its own bits: by 5 points or %
        at_own["value"] += (
            0.05 if at_top["name"] == "accuracy" else -0.05 * at_top["value"]
        )
    said = answer("H2", *made).outcome
    assert said.startswith(
        "confirmed: no schedule beats static by the margin; static is better in 6 of 6;"
    )
    assert said.endswith(
        "; depends on the rule: contradicted where both are judged at 8 bits"
    )
    alike = answer("H2", *(rows(grid, lambda s: 0.0, sd=0.03) for grid in H2))
    assert "depends" not in alike.outcome
    assert [rule for rule, _ in alike.by_rule] == ["8 bits", "their own bits"]


def test_h2_compares_with_better_evaluation_of_static():
    made = rows("h2/facebook", lambda s: 0.0, sd=0.03)
    for row in made:
        if row["spec"]["arm"] == "static 3":
            row["metrics"][1]["value"] += 0.01  # a point more at 3 bits
    found = answer(
        "H2", made, rows("h2/characters", lambda s: 0.0), rows("h2/sage", lambda s: 0.0)
    )
    means = {e.description: e.mean for e in (*found.primary, *found.secondary)}
    assert means["Facebook GCN, schedule minus static 3"] == pytest.approx(-1, abs=0.1)
    assert means["Facebook GCN, schedule minus static 3 at 8 bits"] == pytest.approx(
        0, abs=0.1
    )
    assert means["Facebook GCN, schedule minus static 5"] == pytest.approx(0, abs=0.1)


def deficit_loss(spec, date=0.0, during=0.0, after=0.0):
    if not spec.schedule.windows:
        return 0.0
    sums = arms.learning_rate_sums(spec)
    return -(
        date * spec.schedule.windows[0][0] / 48 + during * sums[0] + after * sums[1]
    )


def test_h3_separates_date_from_learning_rate():
    assert (
        answer("H3", rows("h3/facebook", lambda s: deficit_loss(s, date=-1))).outcome
        == "earlier is worse"
    )
    assert (
        answer("H3", rows("h3/facebook", lambda s: deficit_loss(s, date=1))).outcome
        == "later is worse"
    )
    found = answer(
        "H3", rows("h3/facebook", lambda s: deficit_loss(s, during=0.05, after=-0.02))
    )
    assert found.outcome == "no effect worth naming"
    others = {e.description: e.mean for e in found.secondary}
    assert others[
        "loss, a learning rate of 10 steps more in the deficit"
    ] == pytest.approx(0.5, abs=0.1)
    assert others["loss, a learning rate of 10 steps more after it"] == pytest.approx(
        -0.2, abs=0.1
    )
    assert (
        others["the same, cosine learning rate alone"] < -0.2
    )  # without correction the rate passes for the date
    assert others["the same, constant learning rate alone"] == pytest.approx(
        0, abs=0.15
    )
    assert answer("H3", rows("h3/facebook", lambda s: 0.0, sd=1)).outcome == "open"


def test_h4a_names_operand_that_hurts_more():
    def quality(spec, forward, gradients):
        return forward * (spec.schedule(0) == 6) + gradients * (spec.q_grad == 6)

    made = rows("h4/gradients", lambda s: quality(s, -0.1, -0.6))
    found = answer("H4a", made)
    assert found.outcome == "gradients hurt more"
    others = {e.description: e.mean for e in found.secondary}
    assert others["6-bit minus 8-bit gradients"] == pytest.approx(-0.6, abs=0.1)
    assert others["6 minus 8 bits forward"] == pytest.approx(-0.1, abs=0.1)
    found = answer("H4a", rows("h4/gradients", lambda s: quality(s, -0.6, -0.1)))
    assert found.outcome == "weights and activations hurt more"
    assert (
        answer(
            "H4a", rows("h4/gradients", lambda s: quality(s, -1, -1), sd=0.01)
        ).outcome
        == "alike"
    )


def test_h4b_compares_hubs_with_leaves():
    assert (
        answer("H4b", rows("h4/aggregation", lambda s: 0.0)).outcome
        == "no difference worth naming"
    )
    found = answer("H4b", rows("h4/aggregation", lambda s: 0.0, hubs=-2.0))
    assert found.outcome == "hubs are hurt more"
    assert found.primary[0].mean == pytest.approx(2)
    assert (
        answer("H4b", rows("h4/aggregation", lambda s: 0.0, hubs=2.0)).outcome
        == "hubs are hurt less"
    )


# --- runs that are lost, missing, or another question's -------------------------------------------


def test_diverged_runs_score_chance():
    made = rows("h4/gradients", lambda s: 0.0, lost=("static 6, 8-bit gradients",))
    found = answer("H4a", made)
    assert found.num_lost == 13
    assert found.outcome == "weights and activations hurt more"
    assert found.primary[0].mean == pytest.approx(-100 * math.log(2000 / 10), abs=0.2)
    found = answer(
        "H2", *(rows(grid, lambda s: 0.0, lost=("static 5",)) for grid in H2)
    )
    by_unit = {
        "points": 50 - 100 / 4,
        "%": 100 * math.log(102 / 10),
    }  # four classes, 102 characters
    assert {
        e.description: e.mean for e in found.primary if "static 5" in e.description
    } == {
        e.description: pytest.approx(by_unit[e.unit], abs=0.2)
        for e in found.primary
        if "static 5" in e.description
    }


def test_h2_run_without_value_gives_no_answer():
    made = table(
        [r for task in H2 for r in rows(task, lambda s: -float("cyclic" in s.arm))]
    )
    for grid in ("", *H2):
        lacks = made["key"] == (grids.grid_specs(grid)[0].key if grid else "")
        values = ["accuracy", "accuracy_current", "perplexity", "perplexity_current"]
        (h2,) = (
            a
            for a in outcome.answers(made.assign(**made[values].mask(lacks)))
            if a.question == "H2"
        )
        assert ("confirmed" in h2.outcome, math.isnan(h2.p)) == (not grid, bool(grid))


def test_incomplete_grids_give_no_answer():
    made = rows("h3/facebook", lambda s: deficit_loss(s, date=-1))
    assert answer("H3", made[1:]).outcome == "open: 299 of 300 runs"
    assert math.isnan(answer("H3", made[1:]).p)
    assert {a.outcome for a in outcome.answers(table([]))} >= {
        "open: 0 of 52 runs",
        "open: 0 of 200 runs",
    }


def test_run_groups_exclude_h1_and_h3_runs():
    runs = table(rows("h1/characters", lambda s: 0.0))
    assert len(runs) == 192
    assert run_groups.quality_cost_groups(runs) == []
    assert run_groups.deficit_groups(table(rows("h3/facebook", lambda s: 0.0))) == []


def test_sections_show_answered_questions():
    runs = table(rows("h3/facebook", lambda s: deficit_loss(s, date=-1)))
    first, other, decays, between = outcome.sections(runs)
    shown = first.table.set_index("")
    assert shown.loc["H3", "outcome"] == "earlier is worse"
    assert shown.loc["H1", "outcome"] == "open: 0 of 288 runs"
    (shown,) = first.figure.axes
    assert [text.get_text() for text in shown.texts] == [
        "H3 loss, latest minus earliest, at equal learning rate, n = 10",
        "-0.95 [-1.01, -0.89] points",
    ]
    assert len(other.table) == 5
    assert decays.table["learning rate"].tolist() == ["step", "cosine", "constant"]
    assert len(between.table) == 3
    assert not list(outcome.sections(table([])))
