"""H7 and H8 of docs/preregistration.md, on rows that were made up so that the answer is known."""

import json
import math
from functools import cache

import numpy as np
import pytest

from cpt_lab.analysis.runs import table
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies import tuned
from cpt_lab.studies.h7 import arms, outcome
from cpt_lab.studies.h7.arms import CASES, STUDY
from tests.helpers import row_of

WORSE = 5.0  # points or percent that the other rates and evaluations lose


def value(spec, quality):
    return math.exp(1 - quality / 100) if spec.recipe.task == "language_model" else 0.5 + quality / 100


def row(spec, top, own, status="ok"):
    """A row whose quality at 8 bits and at its own is given."""
    name = "perplexity" if spec.recipe.task == "language_model" else "accuracy"
    made = row_of(spec, value(spec, top), name, status)
    for m in list(made["metrics"]):
        made["metrics"].append({**m, "precision": "current", "value": value(spec, own)})
    for m in list(made["metrics"]):
        held = {"name": "loss", "value": math.log(m["value"])} if name == "perplexity" else {}
        made["metrics"].append({**m, **held, "split": "valid"})
    return made


@cache
def rates(best):
    """Lines of rows by which every arm takes ``best`` times the recipe's rate, and its own bits but for 8/8."""
    made = []
    for spec in (spec for case in CASES for spec in STUDY.rates(case)):
        lost = 0 if spec.arm.endswith(f" at {best:g}") else WORSE
        own = -WORSE if spec.arm.startswith("8/8") else 0.0
        made.append(json.dumps({**row(spec, -lost - WORSE - own, -lost), "schema": 1}) + "\n")
    return made


@pytest.fixture
def rated(tmp_path, monkeypatch):
    """Writes the rows of the rates."""

    def write(drop=0, best=2.0):
        (tmp_path / STUDY.file).write_text("".join(rates(best)[drop:]))
        tuned.held_out.cache_clear()

    monkeypatch.setattr(tuned, "results_dir", lambda: tmp_path)
    yield write
    tuned.held_out.cache_clear()


def rows(pair=0.0, cycle=0.0, by_case=None, noise=0.05, lost=()):
    """Rows in which pairs and cycles are better than static 3, 4 and 5 by as many margins."""
    made, rng = [], np.random.default_rng(0)
    for case, c in CASES.items():
        gain = (by_case or {}).get(case, pair)
        for spec in STUDY.runs(case):
            arm = spec.arm.rpartition(" at ")[0]
            own = gain * arm.endswith("/5") + cycle * arm.startswith("cycle") + 3 * (arm == "8/8")
            q = c.margin * (own + noise * rng.standard_normal())
            top = q if arm == "8/8" else q - WORSE
            made.append(row(spec, top, q, "failed" if (case, arm, spec.seed) in lost else "ok"))
    return table(made)


def test_pairs_cost_less_and_cycles_as_much_as_static(rated):
    rated()
    for case in CASES:
        cost = {s.arm.rpartition(" at ")[0]: s.relative_cost for s in STUDY.runs(case)}
        assert [round(cost[arms.pays(b)] / cost[f"{b}/8"], 3) for b in (3, 4, 5)] == [0.982, 0.938, 0.914]
        for other in ("4/8", "4/5", "5/5"):
            assert cost[f"cycle at {other}"] == pytest.approx(cost[other], rel=1e-3)
    for b in (3, 4, 5):  # one gradient bit more would cost more than static b
        f, g = map(int, arms.pays(b).split("/"))
        assert f * f + 2 * f * g <= b * b + 16 * b < f * f + 2 * f * (g + 1)


def test_settings_are_the_best_on_held_out_data(rated):
    rated(best=0.5)
    for case, c in CASES.items():
        chosen = tuned.settings(STUDY, case)
        assert {rate for rate, _ in chosen.values()} == {0.5}
        assert [arm for arm, (_, at) in chosen.items() if at == "8 bits"] == ["8/8"]
        assert {s.recipe.lr for s in STUDY.runs(case)} == {0.5 * c.recipe.lr}


def test_a_task_without_its_rates_has_no_runs(rated):
    rated(drop=1)  # one of the first task
    with pytest.raises(NotMeasuredError, match=r"lacks 1 of the 90 runs .* run h7-rates/characters"):
        STUDY.runs("characters")
    assert len(STUDY.runs("digits")) == 400
    found = outcome.answers(table([]))
    assert {a.word for a in found} == {"open: 0 of 1240 runs"}


def test_pairs_that_gain_confirm_and_cycles_that_lose_do_too(rated):
    rated()
    a, b, c, d, e = outcome.answers(rows(pair=2.0, cycle=-1.0))
    for found in (a, b, c):
        assert found.word == "confirmed: gradients may pay; the pair gains in 6 of 6"
        assert len(found.primary) == 6
        assert all(x.mean / x.margin == pytest.approx(2, abs=0.1) for x in found.primary)
    for found in (d, e):
        assert found.word == "confirmed: no cycle beats static by the margin; static is better in 6 of 6"


@pytest.mark.slow
def test_four_tasks_must_gain_and_none_may_lose_its_margin(rated):
    rated()
    names = list(CASES)
    three = outcome.answers(rows(by_case=dict.fromkeys(names[:3], 2.0)))[0]
    assert three.word == "open; the pair gains in 3 of 6"
    four = outcome.answers(rows(by_case=dict.fromkeys(names[:4], 2.0)))[0]
    assert four.word == "confirmed: gradients may pay; the pair gains in 4 of 6"
    worse = outcome.answers(rows(by_case={**dict.fromkeys(names[:5], 2.0), names[5]: -1.5}))[0]
    told = "contradicted: gradients should keep their bits (Penn Treebank, small, 4/5 minus 3/8)"
    assert worse.word == f"{told}; the pair gains in 5 of 6"
    little = outcome.answers(rows(by_case={**dict.fromkeys(names[:5], 2.0), names[5]: -0.5}))[0]
    assert little.word.startswith("confirmed: gradients may pay; contradicted: ")


def test_a_cycle_that_wins_contradicts(rated):
    rated()
    *_, d, e = outcome.answers(rows(cycle=2.0))
    assert d.word.startswith("contradicted: a cycle wins in 6 of 6 (characters, cycle at 4/5 minus 4/5; ")
    assert "confirmed" not in d.word + e.word


def test_what_depends_on_the_bits_of_evaluation_is_said(rated):
    rated()
    found = rows(pair=2.0)
    low = found["arm"].str.startswith("3/8")
    perplexity = found["task"] == "language_model"
    found.loc[low & ~perplexity, "accuracy"] += 0.2  # static 3 would be best at 8 bits, which were not chosen
    found.loc[low & perplexity, "perplexity"] /= 1.2
    word = outcome.answers(found)[0].word
    assert word.startswith("confirmed: gradients may pay; the pair gains in 6 of 6; depends on the rule: contradicted")
    assert "where both are judged at 8 bits" in word
    assert "their own bits" not in word


@pytest.mark.slow
def test_lost_runs_count_as_chance_and_missing_ones_leave_it_open(rated):
    rated()
    found = rows(pair=2.0, lost={("digits", "4/5", 300)})
    parts, missing = outcome.tasks(found)
    assert (missing, parts[1].lost) == ("", 1)
    assert parts[1].quality("4/5")[0] == pytest.approx(10)
    some = found[found["dataset"] != "ptb"]
    assert {a.word for a in outcome.answers(some)} == {"open: 1120 of 1240 runs"}
    first, shares, arm = outcome.sections(some)
    assert "Nothing is decided" in first.notes[1]
    assert len(first.figure.axes) == 3
    assert len(shares.table) == 5
    assert len(arm.table) == 5 * 10
    first, *_, last = outcome.sections(found)
    assert len(first.notes) == 1
    assert len(first.table) == 5
    assert len(last.table) == 3 * 6 + 6
    with pytest.raises(ValueError, match="no task of H7 is complete"):
        outcome.figure([])


def test_effects_in_units_of_what_full_precision_gains(rated):
    rated()
    parts, _ = outcome.tasks(rows(by_case={"digits": 1.5, "ptb": -0.6}))  # 8/8 gains three margins
    told = outcome.gains(parts).set_index("task")
    assert list(told) == [f"{pair} [95 %]" for pair in ("4/5 minus 3/8", "5/5 minus 4/8", "6/5 minus 5/8")]
    for digits, ptb in zip(told.loc["digits"], told.loc["Penn Treebank, small"], strict=True):
        assert digits.startswith(("+1.4", "+1.5"))
        assert "; +0.50 [+0." in digits
        assert "; -0.2" in ptb or "; -0.1" in ptb
    found = rows()
    digits = (found["dataset"] == "digits") & found["arm"].str.startswith("8/8")
    found.loc[digits, "accuracy_current"] = found.loc[digits, "accuracy"] = 0.4
    told = outcome.gains(outcome.tasks(found)[0]).set_index("task")
    assert all(cell.endswith("; 8/8 gains nothing clear") for cell in told.loc["digits"])
