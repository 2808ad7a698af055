"""Designs of critical-period experiments and their controls."""

import json
from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import RECIPES, refused
from torch import nn

from cpt_lab.experiments import designs, grids
from cpt_lab.experiments.graph import DEFICITS_OWN
from cpt_lab.experiments.image import DEFICITS_CIFAR, ImageRecipe
from cpt_lab.experiments.registry import deficits, recipe, task_of_dataset
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.tasks.image import ImageTask

SHIFTED = [
    ("paper", "cifar10", "resnet74"),
    ("demo", "digits", "mlp6"),
    ("smoke", "digits", "mlp6"),
]


def windows_of(specs):
    assert all(s.recipe.steps == s.schedule.total_steps for s in specs)
    return [(s.recipe.steps, s.schedule.windows) for s in specs]


def test_deficit_scan_adds_controls_per_length():
    specs = designs.deficit_scan(
        deficit_lengths=[0, 10, 30],
        deficit_starts=[0, 5],
        deficit_window=20,
        steps=100,
        seeds=[4],
    )
    found = windows_of(specs)
    assert len(found) == len(set(found))
    assert set(found) == {
        (100, ()),
        (110, ()),
        (110, ((0, 10),)),
        (110, ((100, 110),)),
        (130, ()),
        (130, ((0, 30),)),
        (130, ((100, 130),)),
        (100, ((0, 20),)),
        (100, ((5, 25),)),
        (100, ((80, 100),)),
    }
    assert {s.seed for s in specs} == {4}


@pytest.mark.parametrize(("scale", "dataset", "model"), SHIFTED)
def test_deficit_length_delays_learning_rate_drops(scale, dataset, model):
    """Shift learning-rate drops by the length of a deficit, but not by a window."""
    settings = deficits(scale, dataset, model)[1]
    lengths, after = settings.lengths, settings.changes["steps"]
    specs = designs.deficit_length(scale, dataset, model, seeds=[0])
    assert {s.recipe.steps for s in specs} == {n + after for n in lengths}
    found = [(s, s.recipe.steps - after, after) for s in specs]
    for odd in (4, 396, 256_000):
        lengths_ = (1, 7, 101, 16_000, 99_991)
        specs = designs.deficit_length(
            scale, dataset, model, deficit_lengths=lengths_, steps=odd, seeds=[0]
        )
        found += [(s, s.recipe.steps - odd, odd) for s in specs]
    found += [
        (s, 0, settings.window_steps)
        for s in designs.deficit_window(scale, dataset, model, seeds=[0])
    ]
    for spec, start, steps in found:
        assert drops_of(spec.recipe) == [start + steps // 2, start + 3 * steps // 4], (
            spec.arm
        )


def drops_of(r):
    """Return the steps at which an image task lowers its learning rate."""
    assert isinstance(r, ImageRecipe)
    _, rate = ImageTask.optimizer(
        SimpleNamespace(recipe=r, device=torch.device("cpu")), nn.Linear(1, 1)
    )
    near = sorted(
        {
            t + near
            for m in r.milestones
            for t in [int(m * r.steps)]
            for near in range(-3, 4)
        }
    )
    steps = [t for t in near if 1 <= t < r.steps]
    assert rate(0, ()) == pytest.approx(r.lr)
    assert rate(r.steps - 1, ()) == pytest.approx(r.lr * 0.01)
    return [t for t in steps if rate(t, ()) < 0.5 * rate(t - 1, ())]


# steps of the paper's deficits at the start, the training after them, bits, model, and the names of the first arms
PAPER = {
    "cifar10/deficit_length": (
        [0, 16_000, 32_000, 64_000, 128_000, 256_000],
        256_000,
        3,
        "resnet74",
        [
            "no deficit, 256K",
            "no deficit, 272K",
            "[0, 16K) of 272K",
            "[256K, 272K) of 272K",
        ],
    ),
    "imagenet/deficit_length": (
        [0, 25 * 5005, 100 * 5005],
        150 * 5005,
        4,
        "resnet18",
        ["no deficit, 150", "no deficit, 175", "[0, 25) of 175", "[150, 175) of 175"],
    ),
    "ogbn-arxiv/deficit_length": (
        list(range(0, 1_001, 100)),
        1_000,
        3,
        "gcn",
        [
            "no deficit, 1000",
            "no deficit, 1100",
            "[0, 100) of 1100",
            "[1000, 1100) of 1100",
        ],
    ),
    "cifar10/deficit_window": (
        [0, 16_000, 32_000, 64_000, 128_000],
        256_000,
        3,
        "resnet74",
        ["no deficit, 256K", "[0, 128K) of 256K", "[128K, 256K) of 256K"],
    ),
    "ogbn-arxiv/deficit_window": (
        [0, 100, 200, 300, 400, 500],
        1_000,
        3,
        "gcn",
        ["no deficit, 1000", "[0, 500) of 1000", "[500, 1000) of 1000"],
    ),
}


@pytest.mark.parametrize("grid", PAPER)
def test_deficit_grids_match_paper(grid):
    specs, (at, after, q_min, model, arms) = grids.grid_specs(grid), PAPER[grid]
    if grid.endswith("window"):
        expected = {(after, ()), *((after, ((t, t + after // 2),)) for t in at)}
    else:
        expected = {(r + after, ()) for r in at}
        expected |= {
            (r + after, window)
            for r in at[1:]
            for window in (((0, r),), ((after, after + r),))
        }
    assert set(windows_of(specs)) == expected
    assert Counter(s.seed for s in specs) == dict.fromkeys((0, 1, 2), len(expected))
    said = {
        (
            s.recipe.model,
            s.recipe.weight_decay,
            s.schedule.q_low,
            s.schedule.q_high,
            s.q_grad,
        )
        for s in specs
    }
    assert said == {(model, 0, q_min, 8, 8)}
    assert [arm for arm, _ in groupby(s.arm for s in specs)][: len(arms)] == arms


def test_deficit_arms_name_odd_lengths_in_steps():
    specs = designs.deficit_length(
        "paper", "cifar10", deficit_lengths=[16_001], seeds=[0]
    )
    assert [s.arm for s in specs] == [
        "no deficit, 272001",
        "[0, 16001) of 272001",
        "[256K, 272001) of 272001",
    ]


def test_deficit_scan_accepts_arrays():
    given = {"steps": 100, "seeds": [0], "deficit_window": 20}
    arrays = designs.deficit_scan(
        deficit_lengths=np.arange(3), deficit_starts=np.array([10]), **given
    )
    assert arrays == designs.deficit_scan(
        deficit_lengths=[0, 1, 2], deficit_starts=[10], **given
    )


def test_deficit_window_uses_default_starts():
    specs = designs.deficit_window(deficit_window=50, controls=False, seeds=[0])
    assert [w for _, w in windows_of(specs)] == [
        ((t, t + 50),) for t in (0, 100, 200, 300)
    ]
    (spec,) = designs.deficit_window(
        "paper", "imagenet", deficit_starts=[7], controls=False, seeds=[0]
    )
    assert spec.schedule.windows == (
        (7, 7 + 75 * 5005),
    )  # the paper has no windows there: half of the training


def test_deficit_scan_combines_q_max_and_decays():
    specs = designs.deficit_scan(
        q_max=[6, 8], decay=["constant", "step", "cosine"], seeds=[0], controls=False
    )
    # 200 steps at the start and the window from 0 on are one run, where no milestone counts from the end of the deficit
    assert len({s.key for s in specs}) == len(specs) == 2 * (8 + 9 + 8)
    assert {(s.q_max, s.schedule.q_high) for s in specs} == {(6, 6), (8, 8)}
    rules = {(s.recipe.lr_rule, bool(s.recipe.milestones)) for s in specs}
    assert rules == {("constant", False), ("cosine", False), ("milestones", True)}


@pytest.mark.parametrize(
    ("dataset", "decay"), [("digits", "step"), ("digits-graph", "cosine")]
)
def test_deficit_scan_deduplicates_recipe_decay(dataset, decay):
    given = {"task": task_of_dataset(dataset), "seeds": [0]}
    specs = designs.deficit_scan("demo", dataset, **given)
    assert (
        designs.deficit_scan("demo", dataset, decay=["recipe", decay], **given) == specs
    )


@pytest.mark.parametrize(
    ("dataset", "decay", "rule"),
    [
        ("digits-graph", "step", "step"),
        ("digits-graph", "constant", "constant"),
        ("pydoc", "constant", "constant"),
        ("pydoc", "step", "step"),
        ("digits", "cosine", "cosine"),
    ],
)
def test_deficit_scan_sets_learning_rate_rule(dataset, decay, rule):
    task = task_of_dataset(dataset)
    specs = designs.deficit_scan("smoke", dataset, task=task, decay=[decay], seeds=[0])
    assert {s.recipe.lr_rule for s in specs} == {rule}


def test_deficit_scan_constant_decay_matches_detection():
    specs = designs.deficit_scan("smoke", "digit-scenes", task="detection", seeds=[0])
    assert (
        designs.deficit_scan(
            "smoke", "digit-scenes", task="detection", decay=["constant"], seeds=[0]
        )
        == specs
    )


@pytest.mark.parametrize(
    ("decay", "rates"), [("constant", [0.03] * 3), ("cosine", [0.03, 0.015, 0.0])]
)
def test_deficit_decay_changes_learning_rate(decay, rates):
    *_, spec = designs.deficit_scan(decay=[decay], seeds=[0])
    task = SimpleNamespace(recipe=spec.recipe, device=torch.device("cpu"))
    _, rate = ImageTask.optimizer(task, nn.Linear(1, 1))
    steps = spec.recipe.steps
    assert [rate(t, ()) for t in (0, steps // 2, steps)] == pytest.approx(rates)


def test_deficit_scan_applies_recipe_changes():
    specs = designs.deficit_scan(
        deficit_bits=4, learning_rate=0.5, seeds=[7, 8], q_max=[6]
    )
    assert specs == designs.deficit_scan(
        q_min=4, lr=0.5, seeds=[7, 8], q_max=[6], deficit_bits=None, q_grad=None
    )
    assert {s.q_grad for s in designs.deficit_scan(q_grad=5, seeds=[0])} == {5}
    assert {
        (s.schedule.q_low, s.schedule.q_high, s.q_max, s.q_grad) for s in specs
    } == {(4, 6, 6, 6)}
    assert {(s.recipe.q_min, s.recipe.lr) for s in specs} == {(4, 0.5)}
    assert {s.seed for s in specs} == {7, 8}
    assert {s.scale for s in designs.deficit_scan("smoke")} == {"smoke"}


@pytest.mark.parametrize("scale", RECIPES)
def test_deficits_disable_weight_decay_of_recipes(scale):
    for key, plain in RECIPES[scale].items():
        dataset, model = key.split("/")
        if dataset.startswith("own-"):
            continue
        found, settings = deficits(scale, dataset, model, plain.task)
        assert (found.weight_decay, found.q_min > 0, found.evaluate_every > 0) == (
            0,
            True,
            True,
        ), key
        assert settings.lengths[0] == 0
        specs = designs.deficit_scan(scale, dataset, model, task=plain.task, seeds=[0])
        assert len({s.key for s in specs}) == len(specs)
        assert {s.recipe.weight_decay for s in specs} == {0}
        assert {s.schedule.q_low for s in specs} == {found.q_min}
    again = RunSpec.from_dict(json.loads(json.dumps(specs[-1].to_dict())))
    assert (again, again.key) == (specs[-1], specs[-1].key)


def test_deficits_default_to_training_shares():
    found, settings = deficits("paper", "cifar100", "resnet152")
    assert found == replace(recipe("paper", "cifar100", "resnet152"), weight_decay=0.0)
    assert settings.lengths == (0, 16_000, 32_000, 64_000)
    assert (settings.windows, settings.window_steps) == (
        ((0, 32_000), (16_000, 48_000)),
        64_000,
    )
    assert (settings.lr_after, settings.unit, settings.suffix) == (True, 1, "")
    specs = designs.deficit_length("paper", "cifar100", "resnet152", seeds=[0])
    assert {(s.recipe.steps, *drops_of(s.recipe)) for s in specs} == {
        (r + 64_000, r + 32_000, r + 48_000) for r in (0, 16_000, 32_000, 64_000)
    }
    graph, settings = deficits("paper", "ogbn-products", task="graph")
    assert (graph.weight_decay, settings.lr_after) == (0, False)
    unseen = deficits("smoke", "templates", task="entailment")[0]
    assert unseen.evaluate_every == 4


def test_deficits_of_user_data_follow_family():
    assert deficits("paper", "a.npz")[1] == DEFICITS_CIFAR
    assert deficits("demo", "ogbn-arxiv", task="graph")[1] == DEFICITS_OWN
    assert deficits("paper", "a.npz")[0].dataset == "a.npz"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"scale": "huge"},
            "unknown scale 'huge'; choose from smoke, demo, background, paper",
        ),
        ({"stepz": 3}, "a recipe has no stepz; it has task"),
        (
            {"deficit_lengths": [0, -1]},
            "deficit_lengths must be a whole number of at least 0, got -1",
        ),
        (
            {"deficit_lengths": [True]},
            "deficit_lengths must be a whole number .* got True",
        ),
        (
            {"deficit_lengths": 5},
            r"deficit_lengths must be Sequence\[int\] or None, got 5",
        ),
        (
            {"deficit_starts": [-1]},
            "deficit_starts must be a whole number of at least 0, got -1",
        ),
        (
            {"deficit_starts": [401]},
            "starts of windows of 200 steps within 600 steps, from 0 to 400; got 401",
        ),
        (
            {"deficit_window": 51, "steps": 50},
            "within 50 steps, none, as deficit_window is 51; got 0",
        ),
        (
            {"deficit_window": 2.5},
            "deficit_window must be a whole number of at least 1, got 2.5",
        ),
        (
            {"deficit_window": 0},
            "deficit_window must be a whole number of at least 1, got 0",
        ),
        (
            {"deficit_bits": 9},
            "deficit_bits: expected an integer from 1 to q_max = 8, got 9",
        ),
        ({"deficit_bits": 0}, "deficit_bits must be an integer from 1 to 32, got 0"),
        ({"deficit_bits": 3, "q_min": 3}, "deficit_bits: expected None beside q_min"),
        (
            {"q_max": [1]},
            "deficit_bits: expected an integer from 1 to q_max = 1, got 2",
        ),
        ({"q_max": 8}, r"q_max must be Sequence\[int\], got 8"),
        ({"q_max": [8.5]}, "q_max must be an integer from 1 to 32, got 8.5"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"decay": "step"}, r"decay must be Sequence\[str\], got 'step'"),
        (
            {"decay": ["linear"]},
            "unknown decay 'linear'; choose from recipe, constant, step, cosine",
        ),
        ({"controls": 1}, "controls must be True or False, got 1"),
        (
            {"preset": "authors"},
            "preset: expected 'ours', which in section 5 are the authors' settings, got 'authors'",
        ),
        (
            {"dataset": "templates", "task": "entailment", "decay": ["step"]},
            "decay: expected 'recipe', the only one of task 'entailment', got 'step'",
        ),
    ],
)
def test_deficit_scan_rejects_invalid_arguments(given, message):
    refused(message, designs.deficit_scan, **given)
