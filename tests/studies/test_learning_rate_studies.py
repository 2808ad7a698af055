"""H11 and H12: arms, extended grids of learning rates, and answers from synthetic runs."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import refused

from cpt_lab.analysis.rendering import terminal
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies import tuned
from cpt_lab.studies.h11 import arms as h11_arms
from cpt_lab.studies.h11 import outcome as h11
from cpt_lab.studies.h11.arms import CASES, RULES, TASKS
from cpt_lab.studies.h11.arms import STUDY as H11
from cpt_lab.studies.h12 import arms as h12_arms
from cpt_lab.studies.h12 import outcome as h12
from tests.studies.study_rows import (
    answers_text,
    noise_of,
    runs_of,
    runs_with,
    sections_text,
    titled,
)

pytestmark = pytest.mark.slow


def best_at(factor):
    """Return qualities in validation that fall with the distance from one rate, higher at 8 bits."""

    def qualities(spec):
        distance = abs(np.log2(float(spec.arm.rpartition(" at ")[2]) / factor))
        return -distance, -distance - 1

    return qualities


def few_seeds(monkeypatch, num_seeds=6):
    for task, (case, rules) in TASKS.items():
        few = replace(case, seeds=num_seeds)
        monkeypatch.setitem(TASKS, task, (few, rules))


# --- arms -----------------------------------------------------------------------------------------


def test_h11_arms_order_the_same_bits():
    for name, case in CASES.items():
        arms = h11_arms.arms(case)
        bits = {arm: schedule.bits() for arm, (schedule, _) in arms.items()}
        assert (np.diff(bits["rising"]) >= 0).all()
        assert (bits["falling"] == bits["rising"][::-1]).all()
        assert sorted(bits["even"]) == sorted(bits["rising"])
        high = np.flatnonzero(bits["even"] == 6)
        assert np.ptp(np.diff(high)) <= 1, name
        costs = [s.relative_cost(g, 8) for s, g in arms.values()]
        np.testing.assert_allclose(costs, 5 * [80 / 192] + [1], rtol=6e-3)
        assert set(bits["CR"]) <= set(range(3, 9))


def test_h11_cases_change_learning_rate_alone():
    for task, (case, rules) in TASKS.items():
        for rule in rules:
            recipe = CASES[h11_arms.case_name(task, rule)].recipe
            changed = {"lr_rule", "milestones"}
            same = case.recipe.to_dict().items()
            assert {(k, str(v)) for k, v in same if k not in changed} <= {
                (k, str(v)) for k, v in recipe.to_dict().items()
            }
            rates = {"step": "milestones" if recipe.task == "image" else "step"}
            assert recipe.lr_rule == rates.get(rule, rule)


def test_h12_recovery_is_equal_in_first_design():
    for task, design in h12_arms.DESIGNS.items():
        equal, fixed = h12_arms.windows(task)[:3], h12_arms.windows(task)[3:]
        assert [steps - stop for steps, (_, stop) in equal] == 3 * [design.recovery]
        assert {steps for steps, _ in fixed} == {design.fixed_steps}
        assert max(stop for _, (_, stop) in fixed) == design.fixed_steps


# --- learning rates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "num_rates", "chosen"),
    [(1.4, 6, 2**0.5), (8.0, 10, 2**3), (0.2, 10, 2**-2.5), (1e9, 14, 2**5.5)],
)
def test_rates_extend_until_best_is_inside(rated, best, num_rates, chosen):
    study = replace(H11, cases={"gcn/step": CASES["gcn/step"]})
    num_rows = []
    for _ in range(10):
        path = rated(study, best_at(best))  # the rates that the stored rows ask for
        num_rows.append(len(path.read_text().splitlines()))
    assert num_rows[0] == 3 * 6 * 6
    assert num_rows[-1] == num_rows[-2] == 3 * num_rates * 6
    settings = tuned.settings(study, "gcn/step")
    np.testing.assert_allclose([rate for rate, _ in settings.values()], chosen)
    ends = tuned.rates_at_ends(study)[["smallest rate", "largest rate"]].to_numpy()
    assert ends.sum() == (6 if num_rates == tuned.MAX_RATES else 0)


def test_study_without_stored_rates_names_the_grid(rated):
    message = (
        "lacks 108 of the 108 runs .* of 'gcn/step'; run them: .* run h11-rates/gcn"
    )
    refused(message, H11.runs, "gcn/step", error=NotMeasuredError)
    refused("run h11-rates/gcn", h12_arms.runs, "gcn", error=NotMeasuredError)


# --- answers --------------------------------------------------------------------------------------

# gain in margins: (arm, rule) -> number
H11_RUNS = {
    "order matters at a constant rate alone": {
        ("rising", "constant"): 2.0,
        ("falling", "constant"): -2.0,
    },
    "rising bits win under decay": {
        ("rising", "step"): 3.0,
        ("rising", "cosine"): 3.0,
    },
    "nothing differs": {},
}


def test_h11_answers_follow_effects(rated, monkeypatch, golden):
    few_seeds(monkeypatch)
    rated(H11, best_at(1.4))
    by_case = {case: H11.runs(case) for case in CASES}
    rule_of = {
        spec.key: case.partition("/")[2]
        for case, specs in by_case.items()
        for spec in specs
    }
    margin_of = {
        spec.key: CASES[case].margin
        for case, specs in by_case.items()
        for spec in specs
    }
    specs = [spec for specs in by_case.values() for spec in specs]
    base = runs_of(specs)
    texts = {}
    for title, gains in H11_RUNS.items():

        def quality(spec, gains=gains):
            arm = spec.arm.rpartition(" at ")[0]
            gain = gains.get((arm, rule_of[spec.key]), 0.0)
            return margin_of[spec.key] * (gain + 0.1 * noise_of(spec))

        runs = runs_with(specs, base, quality)
        heading = h11.figure(h11.tasks(runs)[0]).get_suptitle()
        texts[title] = f"{answers_text(h11.answers(runs))}\nfigure: {heading}"
    texts["sections"] = sections_text(list(h11.sections(runs)))
    some = runs[runs["dataset"] == "digits"]
    texts["sections of one task"] = sections_text(list(h11.sections(some))[:1])
    golden("studies/h11.txt", titled(texts))
    assert {a.outcome for a in h11.answers(some)} == {"not finished: 180 of 576 runs"}


H12_RUNS = {  # damage of the early and of the late deficit, constant and under decay
    "dates matter under decay alone": ((1.0, 1.0), (5.0, 1.0)),
    "late is worse at a constant rate": ((1.0, 4.0), (4.0, 4.0)),
    "decay makes late deficits worse": ((2.0, 2.0), (1.0, 6.0)),
}


def test_h12_answers_follow_effects(rated, monkeypatch, golden):
    few_seeds(monkeypatch)
    rated(H11, best_at(1.4))
    specs = [spec for task in h12_arms.DESIGNS for spec in h12_arms.runs(task)]
    assert len(specs) == sum(map(h12_arms.num_runs, h12_arms.DESIGNS)) == 2 * 9 * 3 * 6
    assert len({spec.key for spec in specs}) == len(specs)
    base = runs_of(specs)
    texts = {}
    for title, damages in H12_RUNS.items():

        def quality(spec, damages=damages):
            rule = spec.arm.rpartition(", ")[2]
            margin = 0.25 if spec.recipe.task == "graph" else 1.0
            windows = spec.schedule.windows
            damage = 0.0
            if windows:
                is_late = windows[0][0] >= spec.recipe.steps / 2.6
                damage = damages[rule != RULES[0]][is_late]
            return margin * (0.1 * noise_of(spec) - damage)

        runs = runs_with(specs, base, quality)
        texts[title] = answers_text(h12.answers(runs))
    texts["sections"] = sections_text(list(h12.sections(runs)))
    parts, _ = h12.damages(runs)
    texts["damages"] = terminal(h12.damage_table(parts))
    some = runs[runs["dataset"] == "digits"]
    texts["sections of one task"] = sections_text(list(h12.sections(some))[:1])
    golden("studies/h12.txt", titled(texts))
    assert {a.outcome for a in h12.answers(some)} == {"not finished: 162 of 324 runs"}
