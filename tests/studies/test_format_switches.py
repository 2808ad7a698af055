"""H13: arms of equal cost, models and quantisation of its cases, and answers from synthetic runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import refused
from torch import nn

from cpt_core.quantization.convert import layer_precisions
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.studies import tuned
from cpt_lab.studies.h13 import arms as h13_arms
from cpt_lab.studies.h13 import outcome as h13
from cpt_lab.studies.h13.arms import CASES, GRIDS, LOW_BIT_RECIPES, STUDY, TASKS
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session
from cpt_lab.training.train import run_bitops
from tests.studies.study_rows import (
    answers_text,
    noise_of,
    runs_of,
    runs_with,
    sections_text,
    titled,
)

PRICES = ("bitops", "wider_operand", "tensor_core", "multiplier", "energy")


@pytest.mark.parametrize("cost", PRICES)
@pytest.mark.parametrize("format", LOW_BIT_RECIPES)
def test_h13_switches_cost_the_same_at_any_price(format, cost):
    case = CASES[f"llama/{format}"]
    arms, ladder = h13_arms.arms(case), case.recipe.formats
    costs = {
        arm: schedule.relative_cost(q_grad, 8, cost, ladder)
        for arm, (schedule, q_grad) in arms.items()
    }
    low, full = costs["4/4"], costs["8/8"]
    expected = low + (full - low) / 15
    for arm in h13_arms.EQUAL_COST_ARMS:
        np.testing.assert_allclose(costs[arm], expected, rtol=1e-12)


def specs_at(case, arm, seeds=(700,)):
    return STUDY.specs_at(CASES[case], arm, 1.0, seeds)


def test_h13_formats_share_runs_in_mxfp8(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "results_dir", lambda: tmp_path)  # without stored rows
    for task in TASKS:
        full = {specs_at(f"{task}/{f}", "8/8")[0].key for f in LOW_BIT_RECIPES}
        low = {specs_at(f"{task}/{f}", "4/4")[0].key for f in LOW_BIT_RECIPES}
        assert (len(full), len(low)) == (1, len(LOW_BIT_RECIPES))
    counts = {
        name: len(make()) for name, (make, _) in GRIDS.items() if "-rates" in name
    }
    assert counts == {
        "h13-rates/llama": 96,
        "h13-rates/vit": 96,
        "h13-rates/mlp": 96,
    }


def formats_in(session):
    """Return the active weight format of every quantised layer."""
    found = {}
    for name, precision in layer_precisions(session.model).items():
        requested = getattr(precision.active_bits, "requested", None)
        found[name] = str(requested.weight) if requested else "float32"
    return found


def make_session(case, arm, **changes):
    (spec,) = specs_at(case, arm)
    spec = replace(spec, recipe=replace(spec.recipe, **changes)) if changes else spec
    return Session(load_task_class(spec), spec, stand_in=True)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["4/4", "last layers wide", "8/8"])
def test_h13_transformers_follow_the_recipe(arm):
    session = make_session("llama/nvfp4", arm)
    linear = [n for n, m in session.model.named_modules() if isinstance(m, nn.Linear)]
    found = formats_in(session)
    assert set(found) >= set(linear)
    assert len(linear) == 2 * 7 + 1
    num_wide = 3 if arm == "last layers wide" else 1  # 15 % of 15
    inside = "mxfp8_e4m3" if arm == "8/8" else "nvfp4:rows=16"
    for name in linear[:-num_wide]:
        assert found[name].startswith(inside), name
    for name in linear[-num_wide:]:
        assert found[name].startswith("bf16"), name
    losses = []
    for step, batch in zip(range(3), session.batches(0), strict=False):
        losses.append(float(session.step(batch, 1e-3 * (step + 1))))
        session.scheduler.step()
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_language_transformer_does_not_see_later_words():
    model = make_session("llama/nvfp4", "4/4").task.build_model().eval()
    tokens = torch.randint(0, 50, (12, 2))
    changed = tokens.clone()
    changed[8:] = (changed[8:] + 1) % 50
    with torch.no_grad():
        first, second = model(tokens)[0], model(changed)[0]
    assert first.shape[:2] == (12, 2)
    torch.testing.assert_close(first[:8], second[:8])
    assert not torch.allclose(first[8:], second[8:])


def test_transformers_reject_sizes_they_cannot_have():
    (spec,) = specs_at("vit/nvfp4", "4/4")
    odd = replace(spec.recipe, dataset="cifar10", size=18)
    make = load_task_class(spec)
    task = make(replace(spec, recipe=odd), torch.device("cpu"), True)
    refused("multiple of 4 pixels, got 18", task.build_model)
    (spec,) = specs_at("llama/nvfp4", "4/4")
    narrow = replace(spec, recipe=replace(spec.recipe, hidden=40))
    task = load_task_class(narrow)(narrow, torch.device("cpu"), True)
    refused("multiple of 32, got 40", task.build_model)


def test_recipe_ladders_are_checked_and_stored():
    (spec,) = specs_at("llama/nvfp4", "last layers wide")
    assert RunSpec.from_dict(spec.to_dict()) == spec
    refused(
        "unknown ladder 'recipe nvfp'; choose from .* recipe nvfp4,",
        replace,
        spec.recipe,
        ladder="recipe nvfp",
    )
    refused("wide_share belongs", replace, spec.recipe, ladder="mx")
    refused("no execution", replace, spec.recipe, execution="integer")
    refused("from 0 to 1, got 2.0", replace, spec.recipe, wide_share=2.0)
    refused(
        "unknown optimizer .adam.; choose from sgd",
        replace,
        spec.recipe,
        optimizer="adam",
    )


# gain in margins: (arm, format) -> number
GRADIENT = "weight gradient late"
RUNS = {
    "the recipe decides": {
        **{("forward late", format): 2.0 for format in ("nvfp4", "mxfp4")},
        (GRADIENT, "int4"): 2.0,
    },
    "gradients first in MXFP4, at any time": {
        (GRADIENT, "mxfp4"): 2.0,
        ("forward spread", "mxfp4"): 1.0,
    },
    "the forward switch is better than a gradient's, but not than none": {
        **{(arm, "mxfp4"): -2.0 for arm in (GRADIENT, "input gradient late")},
    },
    "nothing differs": {},
}


def best_at_one(spec, level=1.0):
    """Return qualities in validation that fall with the distance from rate 1; MXFP8 is better, or worse, by a level."""
    arm, _, rate = spec.arm.rpartition(" at ")
    gain = {"8/8": level}.get(arm, 0.0)
    distance = abs(np.log2(float(rate)))
    return gain - distance, gain - distance - 1


def test_h13_arms_take_the_rate_of_four_bits(rated):
    def quality(spec):
        arm, _, rate = spec.arm.rpartition(" at ")
        best = 0.5 if arm == "4/4" else 1.0
        return (-abs(np.log2(float(rate) / best)),) * 2

    rated(STUDY, quality)
    specs = STUDY.runs("llama/mxfp4", seeds=[700])
    rates = {spec.arm.partition(" at ")[0]: spec.recipe.lr for spec in specs}
    assert rates.pop("8/8") == 0.003
    assert set(rates.values()) == {0.0015}
    assert set(rates) == {*h13_arms.EQUAL_COST_ARMS, "4/4"}


@pytest.mark.slow
def test_h13_answers_follow_effects(rated, golden):
    rated(STUDY, best_at_one)
    specs = {}
    format_of = {}
    for case in CASES:
        for spec in STUDY.runs(case):
            specs[spec.key] = spec
            format_of[spec.key] = case.partition("/")[2]
    specs = list(specs.values())
    base = runs_of(specs)
    texts = {}
    for title, gains in RUNS.items():

        def quality(spec, gains=gains):
            arm = spec.arm.rpartition(" at ")[0]
            return gains.get((arm, format_of[spec.key]), 0.0) + 0.1 * noise_of(spec)

        runs = runs_with(specs, base, quality)
        heading = h13.figure(h13.tasks(runs)[0]).get_suptitle()
        texts[title] = f"{answers_text(h13.answers(runs))}\nfigure: {heading}"
    texts["sections"] = sections_text(list(h13.sections(runs)))
    golden("studies/h13.txt", titled(texts))
    some = runs[runs["dataset"] == "pydoc"]
    assert {a.outcome for a in h13.answers(some)} == {"not finished: 120 of 354 runs"}
    assert h13.figure(h13.tasks(some)[0]) is None  # a mean needs two tasks


def runs_of_study(quality, lost=None):
    """Return runs of all cases with the margins that ``quality(arm)`` adds, and their specs."""
    specs = {s.key: s for case in CASES for s in STUDY.runs(case)}.values()
    runs = runs_with(
        list(specs),
        runs_of(specs),
        lambda spec: quality(spec.arm.rpartition(" at ")[0]) + 0.1 * noise_of(spec),
        lost=lost,
    )
    return runs, specs


def rate_with_gains(rated, gains):
    """Store rows that choose rates; ``gains`` are those of MXFP8 in points by (model, recipe), .6 elsewhere."""

    def quality(spec):
        recipe = spec.recipe.ladder.rpartition(" ")[2]
        is_low = spec.arm.startswith("4/4")
        loss = 0.6 - gains.get((spec.recipe.model, recipe), 0.6) if is_low else 0.0
        qualities = best_at_one(spec, 0.6)
        return tuple(value + loss for value in qualities)

    rated(STUDY, quality)


@pytest.mark.slow
def test_h13_leaves_out_tasks_without_gain(rated):
    too_little = 0.4  # half a margin is .5 points
    rate_with_gains(rated, {("vit", "mxfp4"): too_little})
    runs, _ = runs_of_study(lambda arm: 2.0 * (arm == "forward late"))
    answer, *_ = h13.answers(runs)
    assert "mean of 2 tasks" in answer.primary[0].description
    note = "left out, as MXFP8 gains too little there: ViT, digits, mxfp4"
    assert answer.outcome == f"confirmed: the forward matmuls should switch; {note}"
    (mean,) = (
        e
        for e in answer.secondary
        if e.description.startswith("nvfp4, forward late minus the mean")
    )
    assert "mean of 3 tasks" in mean.description

    rate_with_gains(rated, {("vit", "int4"): too_little})
    in_mxfp4, against_int4, _ = h13.answers(runs)
    assert "mean of 3 tasks" in in_mxfp4.primary[0].description
    assert "mean of 2 tasks" in against_int4.primary[0].description
    assert against_int4.outcome == (
        "inconclusive; left out, as MXFP8 gains too little there: ViT, digits, int4"
    )

    gains = {(model, "mxfp4"): too_little for model in ("vit", "mlp4")}
    rate_with_gains(rated, gains)
    answers = h13.answers(runs)
    names = "ViT, digits, mxfp4, MLP, digits, mxfp4"
    assert {a.outcome for a in answers} == {
        f"inconclusive; left out, as MXFP8 gains too little there: {names}"
    }
    assert not any(a.primary for a in answers)


@pytest.mark.slow
def test_h13_counts_a_lost_run_that_recipes_share_once(rated):
    rated(STUDY, best_at_one)
    first_full = ("8/8 at 1", 700, "llama")

    def lost(spec):
        place = (spec.arm, spec.seed, spec.recipe.model)
        return "diverged" if place == first_full else ""

    runs, _ = runs_of_study(lambda arm: 0.0, lost)
    assert {a.num_lost for a in h13.answers(runs)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama/nvfp4", "vit/mxfp4"])
def test_h13_arms_of_equal_cost_have_equal_bitops(case):
    counts = {
        arm: run_bitops(make_session(case, arm))["per_op"]
        for arm in (*h13_arms.EQUAL_COST_ARMS, "4/4", "8/8")
    }
    low, full = counts["4/4"], counts["8/8"]
    for arm in h13_arms.EQUAL_COST_ARMS:
        assert counts[arm] == pytest.approx(low + (full - low) / 15, rel=1e-9)
