"""Levels: accuracy of full-precision bits shown beside an effect, in text and in evidence of claims."""

import re
from dataclasses import replace

import pytest

from cpt_lab.analysis import claims, levels
from cpt_lab.analysis.run_table import table
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import recipe
from cpt_lab.studies.h7.arms import CASES
from tests.analysis.test_claims import rows_of


def runs_of(specs, value, metric="accuracy"):
    return table(rows_of(specs, value, metric))


@pytest.fixture(scope="module")
def digits():
    specs = designs.quality_cost(
        "demo", static_bits=[3, 6, 8], q_max=[6, 8], seeds=range(3)
    )
    quality = {("static 8", 8): 0.9, ("static 6", 6): 0.7}
    return runs_of(specs, lambda s: quality.get((s.arm, s.q_max), 0.5))


def num_steps(found, claim):
    (entry,) = claims.judge_claims(found, [claim])
    return [effect.level for effect, _ in entry.effects]


def test_effect_level_uses_static_q_max(digits):
    assert num_steps(digits, "schedule_controls")[0] in (
        "static 8 reaches 90.0 %",
        "static 6 reaches 70.0 %",
    )
    assert set(num_steps(digits, "cpt_improves")) == {
        "static 8 reaches 90.0 %",
        "static 6 reaches 70.0 %",
    }


def test_effect_level_appears_in_evidence(digits):
    (entry,) = claims.judge_claims(digits, ["cpt_improves"])
    assert all("; static " in line for line in entry.evidence())


def test_effect_level_ignores_number_of_cycles():
    """Take the static arm of any number of cycles as the level."""
    specs = designs.quality_cost(
        "demo", schedules=["CR"], static_bits=[], n_cycles=8, seeds=range(3)
    )
    specs += designs.quality_cost(
        "demo", schedules=["CR"], static_bits=[8], n_cycles=2, seeds=range(3)
    )
    found = runs_of(specs, lambda s: 0.9 if s.arm == "static 8" else 0.5)
    wanted = found[found["n_cycles"] == 8][levels.LEVEL_COLUMNS].itertuples(
        index=False, name=None
    )
    assert levels.level_of(levels.full_bits(found), wanted) == "static 8 reaches 90.0 %"


def test_effect_level_uses_training_without_deficit():
    found = runs_of(
        designs.deficit_scan("demo", "digits", seeds=range(3)),
        lambda s: 0.5 if s.schedule.windows else 0.8,
    )
    assert set(num_steps(found, "deficit_short")) == {"no deficit reaches 80.0 %"}
    assert levels.experiment_level(found) == "no deficit reaches 80.0 %"


def test_full_bits_exclude_fewer_gradient_bits():
    specs = designs.quality_cost(
        "demo", schedules=["CR"], static_bits=[8], seeds=range(3)
    )
    fewer = [replace(s, q_grad=6) for s in specs]
    assert levels.full_bits(runs_of(fewer, lambda s: 0.9)).empty


def test_experiment_level_falls_back_to_best_arm():
    specs = designs.quality_cost(
        "demo", schedules=["CR", "RR"], static_bits=[], seeds=range(3)
    )
    found = runs_of(specs, lambda s: 0.6 if s.arm == "CR" else 0.5)
    assert (
        levels.experiment_level(found)
        == "no run at 8/8; the best arm (CR) reaches 60.0 %"
    )


def test_reached_spans_recipes_and_perplexities():
    specs = designs.quality_cost(
        "demo",
        "pydoc",
        task="language_model",
        schedules=[],
        static_bits=[8],
        seeds=range(2),
    )
    longer = [
        replace(
            s,
            recipe=replace(s.recipe, steps=320),
            schedule=replace(s.schedule, total_steps=320),
        )
        for s in specs
    ]
    assert (
        levels.quality_text(runs_of(specs, lambda s: 4.0, "perplexity"))
        == "perplexity 4.00"
    )
    both = runs_of(
        [*specs, *longer], lambda s: 4.0 if s.recipe.steps == 320 else 9.0, "perplexity"
    )
    assert levels.quality_text(both) == "perplexity 4.00 to 9.00"
    assert levels.quality_text(both.iloc[:0]) == ""


def test_training_text_states_epochs_or_steps():
    assert (
        levels.training_text(CASES["cifar10-jpeg"].recipe)
        == "1.4 epochs of 10,000 images of 16 x 16"
    )
    assert levels.training_text(CASES["gcn"].recipe) == "64 epochs of the whole graph"
    assert levels.training_text(CASES["ptb"].recipe) == "2.1 passes over 100,000 words"
    assert levels.training_text(recipe("paper", "cifar10")) == "64,000 steps"


def test_claim_needs_name_missing_runs():
    found = {claim.id: claims.needs(claim) for claim in claims.claims()}
    assert found["products_fanout"] == (
        "Not run: needs sage on OGBN-Products, 24 runs at paper scale (`ogbn-products/fanout`)."
    )
    assert all(
        re.search(r"\d+ runs? at|no grid lists", text) for text in found.values()
    )


def test_coverage_counts_claims_with_effects(digits):
    names = ["cpt_improves", "products_fanout", "detection_saves"]
    entries = claims.judge_claims(digits, names)
    there, missing = claims.coverage(entries)
    assert (there, missing) == (2, 1)  # one measured, one computed, one without runs
    assert claims.coverage(claims.judge_claims(digits.iloc[:0], names)) == (1, 2)
