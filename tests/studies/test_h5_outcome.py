"""Outcome of study H5 on synthetic rows with a known answer, in both directions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies.h5 import outcome
from cpt_lab.studies.h5.arms import CASES, allocated
from cpt_lab.studies.h5.outcome import (
    ARMS,
    allocation_figure,
    cases,
    secondary,
    sections,
    summary,
    verdict,
)
from tests.studies.study_rows import row_at
from tests.studies.test_h5_arms import made_up

pytestmark = pytest.mark.slow


def effects(runs):
    return outcome.effects(cases(runs))


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Give every case ten seeds and a synthetic sensitivity."""
    stored = {case: made_up(c.recipe.steps, c.bits) for case, c in CASES.items()}
    for case, c in CASES.items():
        monkeypatch.setitem(CASES, case, replace(c, seeds=10))
    for module in ("cpt_lab.studies.h5.arms", "cpt_lab.studies.h5.outcome"):
        monkeypatch.setattr(f"{module}.stored_sensitivity", stored.__getitem__)


def rows(gains=(), own=0.0, lost=(), cases=CASES, spread=0.1):
    """Return rows of H5 with gains over static, {(case, arm): points or %}; ``own`` is added at own bits."""
    gains, found = dict(gains), []
    for case in cases:
        noise = np.random.default_rng(0).normal(size=1000)
        for i, spec in enumerate(allocated(case)):
            arm = spec.arm.split(" at ")[0]
            gain = 5.0 if arm == "static 8" else gains.get((case, arm), 0.0)
            gain += (
                3 * math.sin(spec.seed) + spread * noise[i]
            )  # what a seed has in all arms, and noise
            status = "diverged" if (case, arm, spec.seed) in lost else "ok"
            found.append(
                row_at(spec, gain, gain + (own if arm == "static" else 0.0), status)
            )
    return table(found)


def line(found, case, arm):
    return found[(found["case"] == case) & (found["arm"] == arm)].iloc[0]


def test_h5_finds_known_gains_with_sign():
    gains = {
        ("facebook", "over both"): 0.5,
        ("digits", "over time"): -2.0,
        ("characters", "over both"): 3,
    }
    found = effects(rows(gains))
    assert len(found) == 16
    won = line(found, "facebook", "over both")
    assert (won.word, won.unit, won.n) == ("wins", "points", 10)
    assert won["mean"] == pytest.approx(0.5, abs=0.1)
    assert won["low"] < won["mean"] < won["high"]
    assert line(found, "digits", "over time").word == "loses"
    assert line(found, "characters", "over both")["mean"] == pytest.approx(3, abs=0.1)
    assert line(found, "characters", "over both").unit == "%"
    assert (found["word"] == "open").sum() == 13
    assert line(found, "digits", "over time").full == pytest.approx(5, abs=0.1)
    assert verdict(found).startswith("bits here, not there: over both, facebook: +0.5")
    assert ". Worse than static: over time, digits: -" in verdict(
        found
    )  # a loss of another arm is no secret


def test_h5_without_effect_states_upper_bound():
    found = effects(rows())
    assert set(found["word"]) == {"open"}
    mine = found[found["arm"] != "low then high"]
    best = mine.loc[(mine["high"] / mine["full"]).idxmax()]
    told = f"nothing beat static: at most {best.high:+.2f} {best.unit} ({best.arm}, {best.case}"
    assert verdict(found).startswith(told)


def test_h5_low_then_high_is_tested_separately():
    found = effects(rows({("facebook", "low then high"): 1.0}))
    assert line(found, "facebook", "low then high").word == "wins"
    assert verdict(found).startswith("nothing beat static")


def test_h5_compares_with_better_evaluation_of_static():
    one, other = effects(rows(own=-2.0)), effects(rows(own=+2.0))
    assert set(one["opponent"]) == {"8 bits"}
    assert set(other["opponent"]) == {"own bits"}
    mean = line(other, "digits", "over both")["mean"]
    assert mean == pytest.approx(-2.0, abs=0.1)
    assert line(other, "digits", "over both").word == "loses"


def test_h5_diverged_runs_score_chance():
    lost = {("digits", "over both", s) for s in range(100, 110)}
    found = effects(rows(lost=lost))
    assert line(found, "digits", "over both").lost == 10
    assert line(found, "digits", "over both")["mean"] == pytest.approx(
        -40, abs=2
    )  # from 50 % to 10 %
    assert line(found, "digits", "over both").word == "loses"
    against = effects(rows(lost={("characters", "static", s) for s in range(100, 110)}))
    assert line(against, "characters", "over time")["mean"] == pytest.approx(
        100 * math.log(102 / 10), abs=2
    )


def test_h5_missing_runs_are_inconclusive_per_case():
    """Correct for all 16 comparisons by Holm's rule, even if runs are missing."""
    found = effects(rows({("facebook", "over both"): 0.5}, cases=["facebook"]))
    assert set(found["word"][found["case"] == "digits"]) == {"open: 0 of 60 runs"}
    assert line(found, "facebook", "over both").word == "wins"
    assert line(found, "facebook", "over both").adjusted == pytest.approx(
        16 * line(found, "facebook", "over both").p
    )
    assert (
        verdict(found) == "open: runs of digits, characters, cifar10-jpeg are missing"
    )
    assert effects(table([]))["n"].sum() == 0


def test_h5_reports_secondary_effects():
    made = rows(
        {("facebook", "over both"): 0.5, ("facebook", "over time"): 0.2}, own=-2.0
    )
    told = secondary(outcome.cases(made))
    told = told[told["task"] == "facebook"].set_index("effect")["mean [95 %]"]
    assert told["over both, minus static at 8 bits"].startswith("+0.5")
    assert told["over both, minus static at its own bits"].startswith("+2.5")
    assert told["over both, minus over time"].startswith("+0.3")
    assert told["over both, share of the way from static to static 8"] in (
        "9 %",
        "10 %",
        "11 %",
    )
    # rows of one product of one layer: the highest bits of each step are counted
    assert (
        float(told["over both, BitOps of the whole model beside static's (paper)"]) > 1
    )
    assert (
        told["low then high, BitOps of the whole model beside static's (paper)"]
        == "1.003"
    )


def test_h5_sections_tables_and_figures():
    runs = rows({("facebook", "over both"): 0.5})
    section, others = sections(runs)
    assert len(others.table) == 4 * (4 * 5 + 2 + 2)
    assert "bits here, not there" in section.notes[0]
    (answer,) = outcome.answers(runs)
    assert (answer.question, answer.outcome) == ("H5", "bits here, not there")
    shown = summary(effects(runs).assign(bitops=1.04, bitops_per_op=1.0))
    assert set(shown["BitOps of the whole model (paper, per_op)"]) == {"1.040, 1.000"}
    assert list(shown["arm"][:4]) == list(ARMS)
    assert shown["outcome"].tolist().count("wins") == 1
    assert allocation_figure(effects(runs)).axes
    assert not list(sections(table([])))
    with pytest.raises(ValueError, match="no case of H5 is answered yet"):
        allocation_figure(effects(table([])))


def test_h5_without_sensitivities_has_no_section(monkeypatch):
    def missing(case):
        raise NotMeasuredError(case)

    monkeypatch.setattr("cpt_lab.studies.h5.arms.stored_sensitivity", missing)
    assert not list(sections(table([])))
    found = effects(table([]))
    assert set(found["word"]) == {"open: where bits matter has not been measured"}
    assert len(summary(found)) == len(CASES) * len(ARMS)
    assert (
        outcome.answers(table([]))[0].outcome
        == f"open: runs of {', '.join(CASES)} are missing"
    )
