"""The runs of H5: one cost, made from stored sensitivities alone, none of their seeds used twice."""

import json

import pytest

from bench import sensitivities
from cpt_core.choosing.sensitivities import Sensitivity
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.paths import ROOT
from cpt_lab.studies.h5 import arms
from cpt_lab.studies.h5.arms import CASES, allocated, low_then_high, stored


def made_up(steps, base=4):
    spans = tuple((steps * i // 8, steps * (i + 1) // 8) for i in range(8))
    return Sensitivity(
        "made up", "accuracy", base, steps, spans, (("body.0", "body.2"), ("body.4",)), (300, 20), (50, 51),
        (0.8, 0.8), ((0.01,) * 7 + (0.05,),) * 2, ((0.02, 0.02),) * 2,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_all_arms_cost_the_same(case, monkeypatch):
    c = CASES[case]
    monkeypatch.setattr(arms, "stored", lambda case: made_up(c.recipe.steps, c.bits))
    specs = allocated(case, [0])
    *alike, full = specs
    assert [s.arm.split(" at ")[0] for s in specs] == [
        "static", "over time", "over layers", "over both", "low then high", "static 8",
    ]  # fmt: skip
    for spec in alike:
        spent = spec.schedule.relative_cost(8, 8)
        step = 1.5 / spec.recipe.steps  # of two neighbouring precisions the dearer one gets a step too much
        assert c.budget * (1 - 1e-3) <= spent <= c.budget * (1 + (step if "low" in spec.arm else 1e-9)), spec.arm
        assert spec.schedule.q_min >= c.bits - 1  # nothing is lower than what was measured
    assert alike[0].schedule == StaticSchedule(c.bits, c.recipe.steps)
    assert full.schedule.relative_cost(8, 8) == 1


def test_the_seeds_of_the_test_are_not_those_of_the_measurement():
    for case, c in CASES.items():
        assert min(s.seed for s in allocated(case)) >= 50 + c.measured
        told = "".join(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/preregistration*.md")))
        assert f"{c.seeds} seeds" in told


def test_low_then_high_is_low_until_shortly_before_half():
    schedule = low_then_high(4, 600)
    bits = schedule.bits()
    assert set(bits[:270].tolist()) == {3}
    assert bits[270:].min() == 4
    assert bits[270:].max() == 5


def test_keys_of_the_stored_schedules_never_change():
    """Rows are found by them: neither the stored sensitivities nor what is made of them may change."""
    keys = {case: next(s.key for s in allocated(case, [100]) if "over both" in s.arm) for case in CASES}
    assert keys == {
        "digits": "7277872d0930dc95", "facebook": "bb227b0486f62e67",
        "characters": "3444bceac861c6ad", "cifar10-jpeg": "eba3f02b5ed40085",
    }  # fmt: skip


def test_what_the_command_measures_is_what_the_schedules_are_made_of(tmp_path, monkeypatch):
    """On the case's own recipe, at its bits, on seeds from 50 on that no test has; a second case joins the first."""
    calls = []

    def measure(r, **given):
        calls.append((r, given["base"], list(given["seeds"])))
        return made_up(r.steps, given["base"])

    for module in (arms, sensitivities):
        monkeypatch.setattr(module, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(sensitivities, "recipe_sensitivity", measure)
    stored.cache_clear()
    for case in ("facebook", "digits"):
        monkeypatch.setattr("sys.argv", ["sensitivities", "--only", case])
        sensitivities.main()
    assert calls[0] == (CASES["facebook"].recipe, 3, list(range(50, 58)))
    assert list(json.loads((tmp_path / arms.FILE).read_text())["cases"]) == ["digits", "facebook"]
    assert stored("digits") == made_up(600)
    assert stored("facebook") == made_up(64, 3)
    stored.cache_clear()


def test_without_a_measurement_the_error_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "results_dir", lambda: tmp_path)
    stored.cache_clear()
    with pytest.raises(ValueError, match="no sensitivity of 'digits'; measure it: "):
        allocated("digits")
    (tmp_path / arms.FILE).write_text(json.dumps({"cases": {"digits": made_up(600).to_dict()}}))
    assert stored("digits") == made_up(600)
    stored.cache_clear()
    with pytest.raises(ValueError, match="unknown case 'mnist'"):
        allocated("mnist")
