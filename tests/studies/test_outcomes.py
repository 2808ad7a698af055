"""Answers of all studies to synthetic runs with known effects, as golden files."""

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from helpers import refused

from cpt_extras.search.sensitivity_result import Sensitivity
from cpt_lab.analysis import run_groups
from cpt_lab.analysis.rendering import terminal
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import grids
from cpt_lab.experiments.spec import NotMeasuredError
from cpt_lab.studies import tuned
from cpt_lab.studies.h1_to_h4 import arms, outcome
from cpt_lab.studies.h5 import arms as h5_arms
from cpt_lab.studies.h5 import outcome as h5
from cpt_lab.studies.h6 import arms as h6_arms
from cpt_lab.studies.h6 import outcome as h6
from cpt_lab.studies.h7 import outcome as h7
from cpt_lab.studies.h7.arms import STUDY as H7
from cpt_lab.studies.h10 import arms as h10_arms
from cpt_lab.studies.h10 import outcome as h10
from cpt_lab.studies.h10.arms import LATE
from cpt_lab.studies.h10.arms import STUDY as H10
from cpt_lab.studies.tuned_outcome import compare_rate_grids
from tests.studies.study_rows import (
    answers_text,
    noise_of,
    runs_of,
    runs_with,
    sections_text,
    titled,
)

pytestmark = pytest.mark.slow


# --- H1 to H4 -------------------------------------------------------------------------------------


class Effect(NamedTuple):
    """A synthetic effect: qualities in points or percent, functions of a spec."""

    grids: tuple[str, ...]
    quality: object
    noise: float = 0.1
    own_gain: object = None
    lost: object = None
    hubs: float = 0.0  # points that nodes of many neighbours have more with Q-Agg


@cache
def grid_runs(grid):
    specs = grids.grid_specs(grid)
    return specs, runs_of(specs), [noise_of(spec) for spec in specs]


def runs_with_effect(effect):
    """Return the runs of all grids of an effect."""
    parts = []
    for grid in effect.grids:
        specs, runs, noise = grid_runs(grid)
        noise_by_key = {
            s.key: effect.noise * z for s, z in zip(specs, noise, strict=True)
        }

        def quality(spec, noise_by_key=noise_by_key):
            return effect.quality(spec) + noise_by_key[spec.key]

        runs = runs_with(specs, runs, quality, effect.own_gain, effect.lost)
        for low in getattr(specs[0].recipe, "degrees", ()):
            is_hub = (runs["aggregation"] == "quantized") & (low == 30)
            more = (
                effect.hubs / 100 * (1 + 0.1 * np.array(noise)) * is_hub.astype(float)
            )
            runs[f"accuracy_degree{low}_current"] = runs["accuracy_current"] + more
        parts.append(runs)
    return pd.concat(parts, ignore_index=True)


def feature(spec, name):
    """Return a property of one of the twelve schedules of H1."""
    schedule = arms.equal_cost_schedules()[int(spec.arm.split()[1]) - 1]
    if name == "noise":
        return np.log2(schedule.noise_exposure())
    return arms.mean_noise_time(schedule) if name == "date" else schedule.share_at(2)


def is_text(spec):
    return spec.recipe.task == "language_model"


def is_cyclic(spec):
    return spec.arm.startswith("cyclic")


def is_cyclic_on_sage(spec):
    return spec.arm == "cyclic at the cost of static 5" and spec.recipe.model == "sage"


def deficit_loss(spec, date=0.0, during=0.0, after=0.0):
    """Return the quality of a run of H3, by date of its deficit and learning rates in and after it."""
    if not spec.schedule.windows:
        return 0.0
    in_deficit, later = arms.learning_rate_sums(spec)
    start = spec.schedule.windows[0][0]
    return -(date * start / 48 + during * in_deficit + after * later)


def by_operand(forward, gradients):
    def quality(spec):
        return forward * (spec.schedule(0) == 6) + gradients * (spec.q_grad == 6)

    return quality


def none(spec):
    return 0.0


def diverged(*names):
    return lambda spec: "diverged" if spec.arm in names else ""


H1 = ("h1/facebook", "h1/characters")
H2 = ("h2/facebook", "h2/characters", "h2/sage")
H3 = ("h3/facebook",)
H4A, H4B = ("h4/gradients",), ("h4/aggregation",)
EFFECTS = {
    "noise costs 0.5 per doubling": Effect(H1, lambda s: -0.5 * feature(s, "noise")),
    "noise costs 0.5 per doubling on one task, which is noisy": Effect(
        H1, lambda s: 0.0 if is_text(s) else -0.5 * feature(s, "noise"), 3
    ),
    "noise gains 0.5 per doubling": Effect(H1, lambda s: 0.5 * feature(s, "noise")),
    "noise costs on Facebook and gains on characters": Effect(
        H1, lambda s: (0.5 if is_text(s) else -0.5) * feature(s, "noise")
    ),
    "noise costs 0.05 per doubling": Effect(
        H1, lambda s: -0.05 * feature(s, "noise"), 0.01
    ),
    "a late noise gains 5, steps at 2 bits cost 20": Effect(
        H1, lambda s: 5 * feature(s, "date") - 20 * feature(s, "share")
    ),
    "schedules are as good as static": Effect(H2, none, 0.03),
    "schedules lose 3": Effect(H2, lambda s: -3.0 * is_cyclic(s)),
    "a schedule gains 3 on one task": Effect(H2, lambda s: 3.0 * is_cyclic_on_sage(s)),
    "schedules and static are noisy": Effect(H2, none, 3),
    "schedules gain 3, static gains 5 at its own bits": Effect(
        H2,
        lambda s: 3.0 * is_cyclic(s),
        0.03,
        own_gain=lambda s: 0.0 if is_cyclic(s) else 5.0,
    ),
    "static 3 gains 1 at its own bits": Effect(
        H2, none, 0.03, own_gain=lambda s: float(s.arm == "static 3")
    ),
    "static 5 diverges": Effect(H2, none, lost=diverged("static 5")),
    "an earlier deficit costs 1": Effect(H3, lambda s: deficit_loss(s, date=-1)),
    "a later deficit costs 1": Effect(H3, lambda s: deficit_loss(s, date=1)),
    "learning rates during and after a deficit decide": Effect(
        H3, lambda s: deficit_loss(s, during=0.05, after=-0.02)
    ),
    "deficits cost nothing and are noisy": Effect(H3, none, 1),
    "6-bit gradients cost 0.6, 6 bits forward 0.1": Effect(H4A, by_operand(-0.1, -0.6)),
    "6-bit gradients cost 0.1, 6 bits forward 0.6": Effect(H4A, by_operand(-0.6, -0.1)),
    "6-bit gradients and 6 bits forward cost 1": Effect(H4A, by_operand(-1, -1), 0.01),
    "6 bits forward diverge": Effect(
        H4A, none, lost=diverged("static 6, 8-bit gradients")
    ),
    "Q-Agg costs hubs nothing": Effect(H4B, none),
    "Q-Agg costs hubs 2": Effect(H4B, none, hubs=-2.0),
    "Q-Agg gains hubs 2": Effect(H4B, none, hubs=2.0),
}


@pytest.mark.parametrize("question", [H1, H2, H3, H4A, H4B], ids=lambda x: x[0][:2])
def test_h1_to_h4_answers_follow_effects(question, golden):
    texts = {
        title: answers_text(outcome.answers(runs_with_effect(effect)))
        for title, effect in EFFECTS.items()
        if effect.grids == question
    }
    golden(f"studies/{question[0].replace('/', '_')}.txt", titled(texts))


def test_h1_over_schedules_equals_linear_regression():
    effect = Effect(H1[:1], lambda s: -0.5 * feature(s, "noise"), 0.001)
    (line,) = outcome.over_schedules(runs_with_effect(effect)).itertuples(index=False)
    assert line[0] == "facebook"
    assert line[1].startswith("-0.50 [")
    assert float(line[2]) < 1e-6


@pytest.mark.parametrize("grid", ["", *H2])
def test_h2_run_without_value_gives_no_answer(grid):
    runs = runs_with_effect(EFFECTS["schedules lose 3"])
    lacks = runs["key"] == (grids.grid_specs(grid)[0].key if grid else "")
    values = ["accuracy", "accuracy_current", "perplexity", "perplexity_current"]
    found = outcome.answers(runs.assign(**runs[values].mask(lacks)))
    (h2,) = (answer for answer in found if answer.question == "H2")
    assert ("confirmed" in h2.outcome, math.isnan(h2.p)) == (not grid, bool(grid))


def test_h1_to_h4_sections_show_answered_questions(golden):
    runs = runs_with_effect(EFFECTS["an earlier deficit costs 1"])
    golden("studies/sections.txt", sections_text(outcome.sections(runs)))
    incomplete = outcome.answers(runs.iloc[1:])
    assert [a.outcome for a in incomplete if a.question == "H3"] == [
        "not finished: 299 of 300 runs"
    ]
    assert run_groups.deficit_groups(runs) == []
    h1_runs = grid_runs("h1/characters")[1]
    assert run_groups.quality_cost_groups(h1_runs) == []


# --- H5 -------------------------------------------------------------------------------------------


def sensitivity(steps, base=4):
    """Return a sensitivity of two groups of layers that rises at the end of the training."""
    spans = tuple((steps * i // 8, steps * (i + 1) // 8) for i in range(8))
    return Sensitivity(
        "made up",
        "accuracy",
        base,
        steps,
        spans,
        groups=(("body.0", "body.2"), ("body.4",)),
        macs=(300, 20),
        seeds=(50, 51),
        reference=(0.8, 0.8),
        in_windows=((0.01,) * 7 + (0.05,),) * 2,
        in_groups=((0.02, 0.02),) * 2,
    )


@pytest.fixture
def measured(monkeypatch):
    """Give every case of H5 ten seeds and a synthetic sensitivity."""
    for case, c in h5_arms.CASES.items():
        monkeypatch.setitem(h5_arms.CASES, case, replace(c, seeds=10))
    stored = {n: sensitivity(c.recipe.steps, c.bits) for n, c in h5_arms.CASES.items()}
    for module in (h5_arms, h5):
        monkeypatch.setattr(module, "stored_sensitivity", stored.__getitem__)


def h5_runs(base, gains=None, own=0.0, lost=None):
    """Return runs of H5 with gains over static by (case, arm), and of static at its own bits."""
    specs_by_case, runs = base
    noise = np.random.default_rng(0).normal(size=1000)
    qualities, own_gains, status = {}, {}, {}
    for case, specs in specs_by_case.items():
        for i, spec in enumerate(specs):
            arm = spec.arm.split(" at ")[0]
            gain = 5.0 if arm == "static 8" else (gains or {}).get((case, arm), 0.0)
            qualities[spec.key] = gain + 3 * math.sin(spec.seed) + 0.1 * noise[i]
            own_gains[spec.key] = own if arm == "static" else 0.0
            status[spec.key] = "diverged" if (case, arm) == lost else ""
    return runs_with(
        [spec for specs in specs_by_case.values() for spec in specs],
        runs,
        lambda spec: qualities[spec.key],
        lambda spec: own_gains[spec.key],
        lambda spec: status[spec.key],
    )


H5_RUNS = {
    "one arm gains, another loses": {
        "gains": {
            ("facebook", "over both"): 0.5,
            ("digits", "over time"): -2.0,
            ("characters", "over both"): 3,
        }
    },
    "no arm gains": {},
    "low then high gains": {"gains": {("facebook", "low then high"): 1.0}},
    "static is worse at its own bits": {"own": -2.0},
    "static is better at its own bits": {"own": 2.0},
    "over both diverges on digits": {"lost": ("digits", "over both")},
    "static diverges on characters": {"lost": ("characters", "static")},
}


def test_h5_answers_follow_effects(measured, golden):
    specs = {case: h5_arms.allocated(case) for case in h5_arms.CASES}
    base = specs, runs_of([spec for part in specs.values() for spec in part])
    texts = {}
    for title, given in H5_RUNS.items():
        runs = h5_runs(base, **given)
        parts = h5.cases(runs)
        found = h5.effects(parts)
        texts[title] = "\n".join(
            [
                h5.verdict(found),
                *(f"{a.outcome}; {a.rules_text()}" for a in h5.answers(runs)),
                terminal(h5.summary(found)),
            ]
        )
    runs = h5_runs(base, **H5_RUNS["one arm gains, another loses"])
    texts["sections"] = sections_text(h5.sections(runs))
    some = h5.effects(h5.cases(runs[runs["dataset"] == "facebook_ogb_layout/"]))
    words = some.drop_duplicates(["case", "word"])[["case", "word"]]
    texts["facebook alone"] = f"{h5.verdict(some)}\n{terminal(words)}"
    golden("studies/h5.txt", titled(texts))


def test_h5_without_runs_or_sensitivities_is_open(monkeypatch, measured):
    assert not list(h5.sections(table([])))
    empty = h5.effects(h5.cases(table([])))
    refused("no case of H5 is answered yet", h5.allocation_figure, empty)

    def missing(case):
        raise NotMeasuredError(case)

    monkeypatch.setattr(h5_arms, "stored_sensitivity", missing)
    assert not list(h5.sections(table([])))
    found = h5.effects(h5.cases(table([])))
    assert set(found["word"]) == {
        "not finished: where bits matter has not been measured"
    }
    assert len(h5.summary(found)) == len(h5_arms.CASES) * len(h5.ARMS)
    names = ", ".join(h5_arms.CASES)
    assert (
        h5.answers(table([]))[0].outcome == f"not finished: runs of {names} are missing"
    )


# --- H6 -------------------------------------------------------------------------------------------


def h6_runs(specs, runs, gain=0.0, late=0.0, slope=10.0, noise=0.05, lost=None):
    """Return runs of quality linear in cost, with schedules above or below the line by margins."""
    margins = {c.dataset: c.margin for c in h6_arms.CASES.values()}

    def quality(spec):
        own = late if spec.arm == h6_arms.LATE else gain
        own = 0.0 if spec.arm.startswith("static") else own
        line = slope * spec.relative_cost + own * margins[spec.recipe.dataset]
        return line + noise * noise_of(spec)

    return runs_with(specs, runs, quality, lost=lost)


H6_RUNS = {
    "schedules lie 0.2 margins below the line": {
        "gain": -0.2,
        "late": -0.2,
        "noise": 0.01,
    },
    "the suite lies 2 margins above the line, the late one below": {
        "gain": 2.0,
        "late": -2.0,
    },
    "quality falls with cost": {"slope": -10.0},
    "a run failed": {
        "lost": lambda s: "failed" * ((s.arm, s.seed) == (h6_arms.LATE, 100))
    },
}


def test_h6_answers_follow_effects(golden):
    specs = [spec for case in h6_arms.CASES for spec in h6_arms.on_ladders(case)]
    base = runs_of(specs)
    texts = {}
    for title, given in H6_RUNS.items():
        runs = h6_runs(specs, base, **given)
        texts[title] = answers_text(h6.answers(runs))
    texts["sections"] = sections_text(h6.sections(h6_runs(specs, base)))
    golden("studies/h6.txt", titled(texts))

    cell = h6.cells(runs)[0]
    assert (cell.num_lost, cell.quality[h6_arms.LATE][100]) == (1, pytest.approx(10))
    some = runs[runs["seed"] != 103]
    assert {a.outcome for a in h6.answers(some)} == {
        f"not finished: {744 - 93} of 744 runs"
    }
    assert list(h6.sections(some)) == []


# --- H7 and H8 ------------------------------------------------------------------------------------

WORSE = 5.0  # points or percent that the other rates and evaluations lose


def best_rate(spec):
    return 2.0 if is_text(spec) else 0.5


def h7_rates(spec):
    """Return qualities in validation: best at the best rate, and at own bits except for 8/8."""
    at_own = 0.0 if spec.arm.endswith(f" at {best_rate(spec):g}") else -WORSE
    return at_own + (WORSE if spec.arm.startswith("8/8") else -WORSE), at_own


@pytest.fixture
def h7_base(rated):
    path = rated(H7, h7_rates)
    specs = {case: H7.runs(case) for case in H7.cases}
    return path, specs, runs_of([spec for part in specs.values() for spec in part])


def h7_runs(base, pair=0.0, cycle=0.0, by_case=None, lost=None):
    """Return runs in which pairs and cycles beat static 3, 4 and 5 by multiples of the margin."""
    _, specs_by_case, runs = base
    top, own = {}, {}
    for case, specs in specs_by_case.items():
        gain = (by_case or {}).get(case, pair)
        for spec in specs:
            arm = spec.arm.rpartition(" at ")[0]
            own_gain = gain * arm.endswith("/5") + cycle * arm.startswith("cycle")
            own_gain += 3 * (arm == "8/8")
            quality = H7.cases[case].margin * (own_gain + 0.05 * noise_of(spec))
            own[spec.key] = 0.0 if arm == "8/8" else WORSE
            top[spec.key] = quality - own[spec.key]
    return runs_with(
        [spec for specs in specs_by_case.values() for spec in specs],
        runs,
        lambda spec: top[spec.key],
        lambda spec: own[spec.key],
        lost,
    )


def h7_scenarios():
    *names, last = H7.cases
    five = dict.fromkeys(names[:5], 2.0)
    return {
        "pairs gain 2 margins, cycles lose one": {"pair": 2.0, "cycle": -1.0},
        "pairs gain in 3 tasks": {"by_case": dict.fromkeys(names[:3], 2.0)},
        "pairs gain in 4 tasks": {"by_case": dict.fromkeys(names[:4], 2.0)},
        "pairs gain in 5 tasks, lose 1.5 in one": {"by_case": {**five, last: -1.5}},
        "pairs gain in 5 tasks, lose 0.5 in one": {"by_case": {**five, last: -0.5}},
        "cycles gain 2 margins": {"cycle": 2.0},
        "a run failed": {
            "pair": 2.0,
            "lost": lambda s: "failed" * ((s.arm[:3], s.seed) == ("4/5", 300)),
        },
    }


def test_h7_answers_follow_effects(h7_base, golden):
    texts = {
        title: answers_text(h7.answers(h7_runs(h7_base, **given)))
        for title, given in h7_scenarios().items()
    }
    runs = h7_runs(h7_base, pair=2.0)
    texts["sections"] = sections_text(h7.sections(runs))
    some = runs[runs["dataset"] != "ptb"]
    assert {a.outcome for a in h7.answers(some)} == {"not finished: 300 of 360 runs"}
    texts["sections without ptb"] = sections_text(list(h7.sections(some))[:1])
    parts, _ = h7.tasks(runs)
    texts["gains"] = terminal(h7.gains(parts))
    texts["gains by evaluation"] = terminal(h7.gains_by_evaluation(parts))
    texts["rates at ends"] = terminal(tuned.rates_at_ends(H7))
    golden("studies/h7.txt", titled(texts))
    refused("no task of H7 is complete", h7.figure, [])
    lost = h7_runs(h7_base, **h7_scenarios()["a run failed"])
    parts, missing = h7.tasks(lost)
    assert (missing, len(parts[1].lost_keys)) == ("", 1)
    assert parts[1].quality("4/5")[0] == pytest.approx(10)


def test_h7_settings_are_best_in_validation(h7_base, tmp_path):
    for case, c in H7.cases.items():
        found = tuned.settings(H7, case)
        (rate,) = {rate for rate, _ in found.values()}
        assert rate == (2.0 if c.task == "language_model" else 0.5)
        assert [arm for arm, (_, at) in found.items() if at == "8 bits"] == ["8/8"]
        assert {s.recipe.lr for s in H7.runs(case)} == {rate * c.recipe.lr}
    _, *others = h7_base[0].read_text().splitlines(keepends=True)
    (tmp_path / H7.file).write_text("".join(others))  # one of the first task is lost
    message = r"lacks 1 of the 90 runs .* run h7-rates/characters"
    refused(message, H7.runs, "characters", error=NotMeasuredError)
    assert len(H7.runs("digits")) == 10 * 6
    assert {a.outcome for a in h7.answers(table([]))} == {"not finished: 0 of 360 runs"}


# --- H10 ------------------------------------------------------------------------------------------


def h10_rates(spec):
    """Return qualities in validation: best at the recipe's rate; 5/4 and "both late" are best."""
    good = 2 * spec.arm.startswith(("5/4", "both")) - 5 * (
        not spec.arm.endswith(" at 1")
    )
    return good - 3, good


H10_RUNS = {
    "the late forward switch gains 2 margins, both late 4": {
        LATE: 2.0,
        "both late": 4.0,
        "forward spread": 2.0,
    },
    "nothing gains": {},
    "the late forward switch gains 2, late gradients 1": {
        LATE: 2.0,
        "gradients late": 1.0,
    },
}


def test_h10_answers_follow_effects(rated, golden):
    rated(H10, h10_rates)
    specs = [spec for case in H10.cases for spec in H10.runs(case)]
    base = runs_of(specs)
    texts = {}
    for title, gains in H10_RUNS.items():

        def quality(spec, gains=gains):
            gain = gains.get(spec.arm.rpartition(" at ")[0], 0.0)
            return gain - 3 + 0.05 * noise_of(spec)

        runs = runs_with(specs, base, quality, lambda spec: 3.0)
        texts[title] = answers_text(h10.answers(runs))
    parts, missing = h10.tasks(runs)
    assert missing == ""
    texts["sections"] = sections_text(h10.sections(runs))
    texts["switches"] = terminal(h10.switches(parts))
    texts["gains by evaluation"] = terminal(h10.gains_by_evaluation(parts))
    some = runs[runs["dataset"].isin(["digits", "ptb"])]
    some = some[some["ladder"] == "affine"] if "ladder" in some else some
    texts["sections of two tasks"] = sections_text(list(h10.sections(some))[:1])
    golden("studies/h10.txt", titled(texts))
    assert [t.best(("4/6", "5/4")) for t in parts] == ["5/4"] * 4 + ["4/6"]
    assert {t.best(("gradients late", "both late")) for t in parts} == {"both late"}
    assert {rate for t in parts for rate, _ in t.settings.values()} == {1.0}


def late_rates(spec):
    """Return qualities in validation: best at 4 times the recipe's rate for the late switch, at 1 for others."""
    arm, _, rate = spec.arm.rpartition(" at ")
    best = 4.0 if arm == LATE else 1.0
    good = -abs(np.log2(float(rate) / best))
    return good - 3, good


def test_h10_extended_rates_answer_beside_preregistered(rated):
    """Let the late switch gain at a rate outside the first grid alone: only the answers at extended rates change."""
    extended = h10_arms.EXTENDED_STUDY
    rated(H10, late_rates)
    registered_specs = [spec for case in H10.cases for spec in H10.runs(case)]
    assert {a.outcome for a in h10.extended_answers(runs_of(registered_specs))} == {
        "not finished: 0 of 234 runs"
    }

    for _ in range(4):  # the rates that the stored rows ask for
        rated(extended, late_rates)
    extended_specs = [spec for case in H10.cases for spec in extended.runs(case)]
    specs = {spec.key: spec for spec in registered_specs + extended_specs}
    assert len(specs) == len(registered_specs) + 6 * len(H10.cases)

    def quality(spec):
        return 2.0 * (spec.arm == f"{LATE} at 4") + 0.05 * noise_of(spec)

    runs = runs_with(specs.values(), runs_of(specs.values()), quality, lambda spec: 3.0)
    is_registered = runs["key"].isin({spec.key for spec in registered_specs})
    assert answers_text(h10.answers(runs)) == answers_text(
        h10.answers(runs[is_registered])
    )
    outcomes = compare_rate_grids(h10.answers(runs), h10.extended_answers(runs))
    for _, registered, extended_outcome, depends in outcomes.itertuples(index=False):
        assert registered.startswith("confirmed: the forward switch beats it nowhere")
        assert extended_outcome.startswith("contradicted: the forward switch wins in 5")
        assert depends == "yes"
    same = compare_rate_grids(h10.answers(runs), h10.answers(runs))
    assert set(same["depends on the rates"]) == {"no"}
    refused(
        "extended: expected the answer to H10a, got one to H10b",
        compare_rate_grids,
        h10.answers(runs)[:1],
        h10.extended_answers(runs)[1:2],
    )
