"""Designs: arms of every kind of experiment, learning rates around deficits, and equal cost."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import NAN, RECIPES, errors_text, price, quietly, smoke_spec
from torch import nn

from cpt_core.schedules.schedule import StaticSchedule
from cpt_lab.analysis.rendering import terminal
from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.graph import DEFICITS_OWN
from cpt_lab.experiments.image import DEFICITS_CIFAR
from cpt_lab.experiments.registry import deficits, recipe
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.image import ImageTask
from cpt_lab.training.session import Session

ONE_ARM = {"schedules": ["CR"], "static_bits": [], "q_max": [8], "seeds": [0]}
SCAN = {"deficit_window": 20, "steps": 100, "seeds": [4]}
BUDGET = {"steps": 4_000, "seeds": [0], "delay": 0.02}

# calls whose arms are in tests/golden/designs.txt
CALLS = [
    (designs.quality_cost, {"q_max": [6, 8], "seeds": [0, 1]}),
    (designs.quality_cost, {**ONE_ARM, "q_max": [6], "learning_rate": 0.5}),
    (designs.quality_cost, {"scale": "paper", "dataset": "xnli", **ONE_ARM}),
    (designs.quality_cost, {"scale": "paper", "dataset": "xnli", **ONE_ARM, "lr": 2}),
    *(
        (
            designs.quality_cost,
            {"scale": "paper", "dataset": name, "preset": "authors", **ONE_ARM}
            | {"q_max": [6]},
        )
        for name in ("xnli", "cifar10", "imagenet")
    ),
    (designs.aggregation, {"scale": "paper", "dataset": "ogbn-arxiv"}),
    (designs.fanout, {"model": "sage", "dataset": "digits-graph", "fanouts": [5, 10]}),
    (designs.cycles, {"n_cycles": 3, "seeds": [0]}),
    (designs.execution, {"seeds": [0]}),
    (designs.deficit_scan, {"deficit_lengths": [0, 10], "deficit_starts": [5], **SCAN}),
    (
        designs.deficit_scan,
        {"deficit_lengths": np.arange(2), "deficit_starts": np.array([5]), **SCAN},
    ),
    (designs.deficit_scan, {"deficit_bits": 4, "q_max": [6], "learning_rate": 0.5}),
    (designs.deficit_scan, {"q_grad": 5, "deficit_lengths": [0], "controls": False}),
    *(
        (
            designs.deficit_scan,
            {
                "dataset": dataset,
                "task": task,
                "decay": ["recipe", decay],
                "deficit_starts": [],
                "deficit_lengths": [0],
                "seeds": [0],
            },
        )
        for dataset, task, decay in (
            ("digits", "image", "step"),
            ("digits", "image", "cosine"),
            ("digits", "image", "constant"),
            ("digits-graph", "graph", "step"),
            ("digits-graph", "graph", "cosine"),
            ("digits-graph", "graph", "constant"),
            ("pydoc", "language_model", "step"),
            ("pydoc", "language_model", "constant"),
            ("digit-scenes", "detection", "constant"),
        )
    ),
    (designs.deficit_window, {"deficit_window": 50, "controls": False, "seeds": [0]}),
    (
        designs.deficit_window,
        {"scale": "paper", "dataset": "imagenet", "deficit_starts": [7], "seeds": [0]},
    ),
    (
        designs.deficit_length,
        {
            "scale": "paper",
            "dataset": "cifar10",
            "deficit_lengths": [16_001],
            "seeds": [0],
        },
    ),
    (designs.deficit_scan, {"scale": "paper", "dataset": "cifar100", "seeds": [0]}),
    (
        designs.equal_cost,
        {"scale": "paper", "dataset": "cifar10", "model": "resnet74", "seeds": [5]},
    ),
    (designs.equal_cost, {"scale": "paper", "dataset": "xnli", "task": "entailment"}),
    (designs.equal_cost, {"q_max": [6], "q_min": 2, "steps": 2_000, "lr": 0.5}),
    (designs.equal_cost, {"budget": 0.9, **BUDGET}),
    (designs.equal_cost, {"budget": 105 / 192, "seeds": [0]}),
]
PAPER_DEFICITS = (
    "cifar10/deficit_length",
    "imagenet/deficit_length",
    "ogbn-arxiv/deficit_length",
    "cifar10/deficit_window",
    "ogbn-arxiv/deficit_window",
    "cifar10-jpeg/table_1",
)


def settings_of(spec):
    """Return the fields of a run that designs set, without arm and seed."""
    r = spec.recipe
    settings = {
        "model": r.model,
        "steps": r.steps,
        "bits": f"{spec.schedule.q_min}-{spec.schedule.q_max}",
        "q_max": spec.q_max,
        "gradients": spec.q_grad,
        "lr": f"{r.lr:g}",
        "rule": getattr(r, "lr_rule", ""),
        "milestones": [round(m, 4) for m in getattr(r, "milestones", ())],
        "n_cycles": r.n_cycles,
        "decay": r.weight_decay,
        "low": list(getattr(spec.schedule, "windows", ())),
    }
    others = ("aggregation", "fanout", "learning_rates", "execution", "shared_steps")
    settings |= {name: getattr(r, name, "") for name in others}
    return {name: str(value) for name, value in settings.items()}


def described(specs):
    """Return what the runs of a design share, and a line per arm with the rest."""
    frame = pd.DataFrame(settings_of(spec) for spec in specs)
    same = frame.columns[frame.nunique() == 1]
    shared = " ".join(f"{name}={frame[name].iloc[0]}" for name in same)
    frame.insert(0, "arm", [spec.arm for spec in specs])
    frame["seed"] = [spec.seed for spec in specs]
    arms = frame.drop(columns=same)
    arms = arms.groupby(list(arms.columns[:-1]), sort=False)["seed"]
    return f"{shared}\n{terminal(arms.agg(list).reset_index())}\n"


@pytest.mark.slow
def test_designs_list_expected_arms(golden):
    text = ""
    for function, given in CALLS:
        name = getattr(function, "__name__", "deficit_scan of one kind")
        text += f"\n{name}({given})\n{described(quietly(function, **given))}"
    for name in PAPER_DEFICITS:
        text += f"\n{name}\n{described(grids.grid_specs(name))}"
    golden("designs.txt", text)


def windows_of(specs):
    return [(s.recipe.steps, s.schedule.windows) for s in specs]


def test_deficit_scan_adds_controls_per_length():
    specs = designs.deficit_scan(
        deficit_lengths=[0, 10, 30], deficit_starts=[0, 5], **SCAN
    )
    assert sorted(windows_of(specs)) == sorted(
        [
            *((steps, ()) for steps in (100, 110, 130)),
            *((100 + n, ((0, n),)) for n in (10, 30)),
            *((100 + n, ((100, 100 + n),)) for n in (10, 30)),
            *((100, ((start, start + 20),)) for start in (0, 5, 80)),
        ]
    )


def drops_of(r):
    """Return the steps at which an image task lowers its learning rate."""
    task = SimpleNamespace(recipe=r, device=torch.device("cpu"))
    _, rate = ImageTask.optimizer(task, nn.Linear(1, 1))
    assert rate(0, ()) == pytest.approx(r.lr)
    assert rate(r.steps - 1, ()) == pytest.approx(r.lr * 0.01)
    steps = set()
    for milestone in r.milestones:
        near = int(milestone * r.steps)
        steps |= set(range(max(1, near - 3), min(r.steps, near + 4)))
    return [t for t in sorted(steps) if rate(t, ()) < 0.5 * rate(t - 1, ())]


@pytest.mark.parametrize("after", [4, 396, 600, 256_000])
@pytest.mark.parametrize("length", [1, 7, 101, 16_000, 99_991])
def test_deficit_length_delays_learning_rate_drops(length, after):
    specs = designs.deficit_length(deficit_lengths=[length], steps=after, seeds=[0])
    assert len(specs) == 3
    expected = [length + after // 2, length + 3 * after // 4]
    assert all(drops_of(spec.recipe) == expected for spec in specs)


@pytest.mark.parametrize(
    ("decay", "rates"), [("constant", [0.03] * 3), ("cosine", [0.03, 0.015, 0.0])]
)
def test_deficit_decay_changes_learning_rate(decay, rates):
    *_, spec = designs.deficit_scan(decay=[decay], seeds=[0])
    task = SimpleNamespace(recipe=spec.recipe, device=torch.device("cpu"))
    _, rate = ImageTask.optimizer(task, nn.Linear(1, 1))
    steps = spec.recipe.steps
    assert [rate(t, ()) for t in (0, steps // 2, steps)] == pytest.approx(rates)


@pytest.mark.parametrize("scale", RECIPES)
def test_deficits_disable_weight_decay_of_recipes(scale):
    for key, plain in RECIPES[scale].items():
        dataset, model = key.split("/")
        if dataset.startswith("own-"):
            continue
        found, settings = deficits(scale, dataset, model, plain.task)
        assert found.weight_decay == settings.lengths[0] == 0, key
        assert min(found.q_min, found.evaluate_every) > 0, key
        specs = designs.deficit_scan(scale, dataset, model, task=plain.task, seeds=[0])
        assert len({s.key for s in specs}) == len(specs)
        again = RunSpec.from_dict(json.loads(json.dumps(specs[-1].to_dict())))
        assert (again, again.key) == (specs[-1], specs[-1].key)


def test_deficits_of_user_data_follow_family():
    own, settings = deficits("paper", "a.npz")
    assert (own.dataset, settings) == ("a.npz", DEFICITS_CIFAR)
    assert deficits("demo", "ogbn-arxiv", task="graph")[1] == DEFICITS_OWN
    assert deficits("smoke", "templates", task="entailment")[0].evaluate_every == 4


@pytest.mark.parametrize(("how", "shared"), [("simulated", True), ("integer", False)])
def test_recipe_execution_selects_int8_matmuls(how, shared):
    spec = smoke_spec("digits", execution=how, shared_steps=shared)
    model = Session(load_task_class(spec), spec).model
    layers = [m.precision for m in model.modules() if hasattr(m, "precision")]
    assert layers
    for precision in layers:
        assert precision.execution == how
        roles = [role for role in precision.quantizers if "_" not in role]
        steps = {precision.quantizers[role].granularity for role in roles}
        assert (steps == {"per_tensor"}) is shared


# --- equal cost -----------------------------------------------------------------------------------


def spent_by(spec):
    return price(spec.schedule.bits().tolist(), spec.q_max) * spec.recipe.steps


# Static 4 5 6 7 bits cost 0.417 0.547 0.688 0.839; divided by 0.95: 0.439 0.576 0.724 0.883.
@pytest.mark.parametrize(
    ("budget", "static"),
    [(0.35, 4), (0.43, 4), (0.445, 5), (0.58, 6), (0.875, 7), (0.89, 8)],
)
def test_equal_cost_design_selects_affordable_static_bits(budget, static):
    """Take the lowest static precision that is hardly cheaper than the budget."""
    specs = quietly(designs.equal_cost, budget=budget, **BUDGET)
    money = spent_by(specs[0])
    assert money == pytest.approx(budget * 4_000, rel=1e-3)
    names = [f"RR at {budget:.3f}", f"RR at {budget:.3f} delayed 2 %"]
    assert [spec.arm for spec in specs[:2]] == names
    assert spent_by(specs[1]) == pytest.approx(money, rel=2e-3)
    assert specs[1].schedule.bits()[:80].tolist() == [8] * 80
    constant = [s for s in specs if isinstance(s.schedule, StaticSchedule)]
    assert [s.schedule.q_max for s in constant] == [8, *{static} - {8}, 8]
    assert constant[-1].recipe.steps == 4_000
    assert all(spent_by(s) <= money + 1e-6 for s in constant[:-1])


@pytest.mark.parametrize("name", [name for name in grids.GRIDS if "equal_cost" in name])
def test_equal_cost_grids_meet_budget(name):
    for scale in grids.GRIDS[name].scales:
        check_budget(quietly(grids.grid_specs, name, scale))


def check_budget(specs):
    money = spent_by(specs[0])
    for spec in specs:
        again = quietly(RunSpec.from_dict, json.loads(json.dumps(spec.to_dict())))
        assert (again, again.key) == (spec, spec.key)
        if spec.arm.startswith("RR"):
            assert spent_by(spec) == pytest.approx(money, rel=2e-3)
        elif " of " in spec.arm:
            step = price([spec.schedule.bits()[-1]], spec.q_max)
            assert 0 <= money + 1e-6 - spent_by(spec)
            assert spent_by(spec) >= money - step or spec.arm.startswith("ER")
            assert spent_by(spec) >= 0.85 * money


# --- errors ---------------------------------------------------------------------------------------


def of(function, *values, **fixed):
    """Return a call per value: a keyword and its value each."""
    return [(function, {**fixed, **value}) for value in values]


WRONG = [
    *of(
        designs.quality_cost,
        {"scale": "huge"},
        {"dataset": "mnist"},
        {"model": "vgg"},
        {"preset": "authors"},
        {"schedules": ["XR"]},
        {"stepz": 3},
        {"seeds": 3},
        {"schedules": "CR"},
        {"static_bits": 8},
        {"static_bits": [9]},
        {"q_max": 8},
        {"q_max": []},
        {"q_max": [33]},
        {"q_min": 9},
        {"q_max": [8, 2]},
        {"q_grad": 99},
        {"steps": 0},
        {"learning_rate": 0},
        {"learning_rate": "1"},
        {"learning_rate": 1, "lr": 1},
        {"seeds": ["0"]},
        {"seeds": [1.0]},
        {"seeds": [True]},
        {"seeds": [-1]},
        {"dataset": "xnli", "task": "image"},
    ),
    *of(designs.execution, {"seeds": 0}),
    *of(designs.fanout, {"dataset": "digits-graph"}),
    *of(
        designs.deficit_scan,
        {"scale": "huge"},
        {"seeds": "01"},
        {"stepz": 3},
        {"deficit_lengths": [0, -1]},
        {"deficit_lengths": [True]},
        {"deficit_lengths": 5},
        {"deficit_starts": [-1]},
        {"deficit_starts": [401]},
        {"deficit_window": 51, "steps": 50},
        {"deficit_window": 2.5},
        {"deficit_window": 0},
        {"deficit_bits": 9},
        {"deficit_bits": 0},
        {"deficit_bits": 3, "q_min": 3},
        {"q_max": [1]},
        {"q_max": 8},
        {"q_max": [8.5]},
        {"steps": 0},
        {"decay": "step"},
        {"decay": ["linear"]},
        {"controls": 1},
        {"preset": "authors"},
        {"dataset": "templates", "task": "entailment", "decay": ["step"]},
    ),
    *of(
        designs.equal_cost,
        {"delay": 0.6},
        {"budget": 0.3},
        {"budget": 0.2},
        {"budget": NAN},
        {"budget": "0.5"},
        {"delay": "0.1"},
        {"delay": 0.9999},
        {"stepz": 3},
        {"task": "graph"},
        {"seeds": 0},
        dataset="cifar10",
        model="resnet20",
    ),
    *of(
        run_spec,
        {"arm": "CR", "q_max": 8.5},
        {"arm": "CR", "q_max": 8, "q_grad": 64},
        {"arm": "static x", "q_max": 8},
        recipe=recipe("demo"),
        seed=0,
    ),
]


def test_designs_reject_wrong_values(golden):
    golden("design_errors.txt", errors_text(WRONG))
