"""Designs of equal cost that spend it in different ways."""

import json

import pytest
from helpers import NAN, make, price, quietly

from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec


def spent_by(spec):
    return price(spec.schedule.bits().tolist(), spec.q_max) * spec.recipe.steps


@pytest.mark.parametrize(
    ("scale", "dataset", "model", "arms"),
    [
        (
            "paper",
            "cifar10",
            "resnet74",
            [
                "RR",
                "RR delayed 10 %",
                "ER, 31046 of 64000 steps",
                "static 8, 25533 of 64000 steps",
                "static 4, 61280 of 64000 steps",
                "static 8",
            ],
        ),
        (
            "paper",
            "xnli",
            "bert",
            [
                "RR",
                "RR delayed 10 %",
                "ER, 8372 of 12272 steps",
                "static 8, 7493 of 12272 steps",
                "static 6, 10899 of 12272 steps",
                "static 8",
            ],
        ),
    ],
)
def test_equal_cost_design_lists_matching_arms(scale, dataset, model, arms):
    task = recipe(scale, dataset, model).task
    specs = designs.equal_cost(scale, dataset, model, task=task, seeds=[5])
    assert [s.arm for s in specs] == arms
    plain, delayed, rising, *stopped, full = specs
    steps = plain.recipe.steps
    r = recipe(scale, dataset, model, task=task)
    settings = {"q_min": r.q_min, "q_max": 8, "n_cycles": r.n_cycles}
    assert plain.schedule == make_schedule("RR", total_steps=steps, **settings)
    money = spent_by(plain)
    assert spent_by(delayed) == pytest.approx(money, rel=2e-3)
    assert delayed.schedule.bits()[: round(0.1 * steps)].tolist() == [8] * round(
        0.1 * steps
    )
    assert delayed.schedule.total_steps == steps
    assert 0.95 * money <= spent_by(rising) <= money + 1e-6
    assert rising.schedule == make_schedule(
        "ER", total_steps=rising.recipe.steps, **settings
    )
    for spec in stopped:
        bits = spec.schedule.q_max
        assert spec.schedule == StaticSchedule(bits, spec.recipe.steps)
        assert 0 <= money + 1e-6 - spent_by(spec) <= price([bits]) + 1e-6
        assert spec.arm == f"static {bits}, {spec.recipe.steps} of {steps} steps"
    assert full.schedule == StaticSchedule(8, steps)
    assert {(s.seed, s.q_max, s.q_grad, s.scale) for s in specs} == {(5, 8, 8, scale)}


# Static 4 5 6 7 bits cost 0.417 0.547 0.688 0.839; divided by 0.95: 0.439 0.576 0.724 0.883.
@pytest.mark.parametrize(
    ("budget", "static"),
    [
        (0.35, 4),
        (0.43, 4),
        (0.445, 5),
        (0.58, 6),
        (0.875, 7),
        (0.89, 8),
    ],
)
def test_equal_cost_design_selects_affordable_static_bits(budget, static):
    """Take the lowest static precision that is hardly cheaper than the budget."""
    specs = quietly(
        designs.equal_cost, budget=budget, delay=0.02, seeds=[0], steps=4_000
    )
    money = spent_by(specs[0])
    assert money == pytest.approx(budget * 4_000, rel=1e-3)
    assert specs[0].arm == f"RR at {budget:.3f}"
    assert specs[1].arm == f"RR at {budget:.3f} delayed 2 %"
    assert spent_by(specs[1]) == pytest.approx(money, rel=2e-3)
    assert price([static]) * 4_000 >= 0.95 * money > price([static - 1]) * 4_000
    constant = [s for s in specs if isinstance(s.schedule, StaticSchedule)]
    assert [s.schedule.q_max for s in constant] == (
        [8, 8] if static == 8 else [8, static, 8]
    )
    assert (constant[-1].arm, constant[-1].recipe.steps) == ("static 8", 4_000)
    assert all(spent_by(s) <= money + 1e-6 for s in constant[:-1])


def test_equal_cost_design_runs_cheap_schedules_fully():
    specs = quietly(designs.equal_cost, budget=0.9, seeds=[0], steps=4_000)
    rising = next(s for s in specs if s.arm == "ER")
    assert rising.recipe.steps == 4_000
    assert spent_by(rising) < spent_by(specs[0])


def test_equal_cost_design_runs_matching_static_fully():
    specs = quietly(designs.equal_cost, budget=105 / 192, seeds=[0])
    arm = next(s for s in specs if s.arm == "static 5")
    assert arm.schedule == StaticSchedule(5, specs[0].recipe.steps)
    assert spent_by(arm) == pytest.approx(spent_by(specs[0]), rel=2e-3)
    assert [s.arm for s in specs if s.arm.startswith("static 5")] == ["static 5"]


def test_equal_cost_design_applies_recipe_changes():
    specs = quietly(
        designs.equal_cost,
        q_max=[6],
        q_min=2,
        steps=2_000,
        lr=0.5,
        delay=0.1,
        seeds=[0],
    )
    assert {(s.q_max, s.q_grad, s.recipe.q_min, s.recipe.lr) for s in specs} == {
        (6, 6, 2, 0.5)
    }
    assert specs[0].schedule == make(
        "RR", q_min=2, q_max=6, total_steps=2_000, n_cycles=4
    )
    assert specs[1].schedule.bits()[:200].tolist() == [6] * 200
    money = spent_by(specs[0])
    assert spent_by(specs[1]) == pytest.approx(money, rel=2e-3)
    assert specs[-1].arm == "static 6"
    assert all(spent_by(s) <= money + 1e-6 for s in specs[2:-1])


@pytest.mark.parametrize("name", [name for name in grids.GRIDS if "equal_cost" in name])
def test_equal_cost_grids_meet_budget(name):
    for scale in grids.GRIDS[name].scales:
        specs = quietly(grids.grid_specs, name, scale)
        money = spent_by(specs[0])
        for spec in specs:
            again = quietly(RunSpec.from_dict, json.loads(json.dumps(spec.to_dict())))
            assert (again, again.key) == (spec, spec.key)
            if spec.arm.startswith("RR"):
                assert spent_by(spec) == pytest.approx(money, rel=2e-3)
            elif " of " in spec.arm:
                assert spent_by(spec) <= money + 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"delay": 0.6},
            r"cannot be met between 3 and 8 bits with 1200 of 2000 steps held at 8 bits; budgets lie",
        ),
        (
            {"budget": 0.3},
            r"cannot be met between 3 and 8 bits with 200 of 2000 steps held at 8 bits",
        ),
        (
            {"budget": 0.2},
            r"budget 0\.2 cannot be met between 3 and 8 bits; budgets lie between 0\.2969 and 1",
        ),
        ({"budget": NAN}, "budget must be a number"),
        ({"budget": "0.5"}, "budget must be a number"),
        ({"delay": "0.1"}, "delay is a share of the training"),
        ({"delay": 0.9999}, "leaves none of 2000 steps to cycle in"),
        ({"stepz": 3}, "a recipe has no stepz"),
        ({"task": "graph"}, "is for task 'image', not 'graph'"),
    ],
)
def test_equal_cost_design_rejects_unreachable_budgets(given, message):
    with pytest.raises(ValueError, match=message):
        quietly(
            designs.equal_cost,
            **{"scale": "demo", "dataset": "cifar10", "model": "resnet20"} | given,
        )
