"""Promises of every task: seeds, resumed runs, learning rates, fixed shapes, and the base installation."""

import itertools
import json
import math
import sys

import pytest
import torch
from helpers import run_command, same_parameters, smoke_spec
from torch import nn
from torch.utils._pytree import tree_leaves

from cpt_extras.optional_libraries import install_hint
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.registry import EXPERIMENTS
from cpt_lab.tasks import base as learning_rates
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session
from cpt_lab.training.train import Stopped, train

CPU = torch.device("cpu")

# --- every task -----------------------------------------------------------------------------------

PAIRS = {"train_pairs": 300, "valid_pairs": 60, "test_pairs": 60}
TOKENS = {"train_tokens": 500, "valid_tokens": 100, "test_tokens": 100}
ONE_IMAGE = {"valid_images": 1, "test_images": 1}
TINY = {
    "digits": {"model": "resnet8_w8", "crop": 1, "train_images": 100},
    "digit-scenes": {"flip": True, "train_images": 8} | ONE_IMAGE,
    "digits-graph": {"model": "sage", "dropout": 0.1},
    "templates": {"padding": "longest", "dropout": 0.1, "hidden": 16, "layers": 1}
    | PAIRS,
    "pydoc": {"dropout": 0.3, "lr_rule": "plateau", "hidden": 8, "length": 5} | TOKENS,
}


def tiny(dataset, arm="CR", seed=0):
    settings = {"steps": 6, "n_cycles": 1, "evaluate_every": 2}
    return smoke_spec(dataset, arm, seed, **settings, **TINY[dataset])


def start(spec, step=3):
    """Return the initial weights of a run, and the tensors of one of its batches."""
    task = load_task_class(spec)(spec, CPU)
    torch.manual_seed(0)
    batch = next(task.batches(step))
    values = tree_leaves(batch if isinstance(batch, tuple) else vars(batch))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return list(task.build_model().parameters()), tensors


def are_equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dataset", TINY)
def test_arms_of_one_seed_share_weights(dataset):
    """Give all arms of a seed equal initial weights and batches."""
    weights, batch = start(tiny(dataset))
    other_weights, other_batch = start(tiny(dataset, "static 8"))
    assert are_equal(weights, other_weights)
    assert are_equal(batch, other_batch)
    assert not are_equal(batch, start(tiny(dataset), step=4)[1])
    if dataset != "pydoc":  # a text has one order
        assert not are_equal(batch, start(tiny(dataset, seed=1))[1])


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [name for name in TINY if name != "digits"])
def test_resumed_task_equals_uninterrupted_run(dataset, tmp_path):
    """Compare a run that was stopped after three steps; training/test_train.py does so for images."""
    spec, path, checks = tiny(dataset), tmp_path / "c.pt", itertools.count(1)
    task = load_task_class(spec)
    whole = train(task, spec)
    with pytest.raises(Stopped, match="at step 3 of 6"):
        train(task, spec, checkpoint=path, should_stop=lambda: next(checks) == 3)
    torch.rand(7)  # the state of the random numbers comes from the checkpoint
    resumed = train(task, spec, checkpoint=path)
    assert same_parameters(whole.model, resumed.model)
    assert whole.history == resumed.history
    assert whole.metrics == resumed.metrics
    assert whole.bitops == resumed.bitops


@pytest.mark.parametrize(
    ("dataset", "model", "fixed_shape"),
    [
        ("digits", None, True),
        ("pydoc", None, True),
        ("digits-graph", "gcn", True),
        ("digits-graph", "sage", False),
        ("templates", None, False),
        ("digit-scenes", None, False),
    ],
)
def test_session_has_metric_and_fixed_shape_flag(dataset, model, fixed_shape):
    spec = smoke_spec(dataset, model=model)
    session = Session(load_task_class(spec), spec, stand_in=True)
    assert session.metric is EXPERIMENTS[spec.recipe.task].metric
    assert session.metric.better == (-1 if dataset == "pydoc" else 1)
    assert session.task.fixed_shape == fixed_shape
    assert session.uncaptured_reason == "the device is cpu"


# --- learning rates -------------------------------------------------------------------------------


def evaluations(*losses):
    return [{"valid": {"loss": loss}} for loss in losses]


LOW = 0.25 - math.sqrt(0.03125)
RATES = {  # rate of 40 steps -> its values at steps 0, 10, 20, 30, 40
    "constant": (learning_rates.constant(0.5), [0.5] * 5),
    "linear": (learning_rates.linear(0.5, 0.2, 40), [0.5, 0.4, 0.3, 0.2, 0.1]),
    "cosine": (learning_rates.cosine(0.5, 0.0, 40), [0.5, 0.5 - LOW, 0.25, LOW, 0.0]),
    "milestones, of which 29.6 is step 30": (
        learning_rates.milestones(0.5, (0.5, 0.74), 40),
        [0.5, 0.5, 0.05, 0.005, 0.005],
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_of_hand_computed_cases(name):
    rate, expected = RATES[name]
    assert [rate(step, []) for step in range(0, 50, 10)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [((), 8), ((3,), 8), ((3, 3), 4), ((3, 4, 2), 4), ((3, 4, 2, math.nan), 2)],
)
def test_plateau_rate_drops_after_worse_evaluation(losses, expected):
    rate = learning_rates.plateau(8.0, 2.0)
    assert rate(9, evaluations(*losses)) == expected


PLATEAU = {"lr_rule": "plateau", "lr_division": 4.0, "evaluate_every": 9}


@pytest.mark.parametrize(
    ("dataset", "changes", "optimizer", "rates"),
    [
        ("digits", {"milestones": (0.5, 0.75)}, "SGD", [8, 8, 0.8, 0.08]),
        ("digit-scenes", {}, "Adam", [8, 8, 8, 8]),
        ("templates", {"final_lr": 0.1}, "AdamW", [8, 4.472, 4.4, 0.8]),
        ("digits-graph", {"final_lr": 0.1}, "Adam", [8, 4.513, 4.4, 0.8]),
        ("digits-graph", {"lr_rule": "step"}, "Adam", [8, 8, 0.8, 0.08]),
        ("digits-graph", {"lr_rule": "constant"}, "Adam", [8, 8, 8, 8]),
        ("pydoc", {"final_lr": 0.1}, "SGD", [8, 4.513, 4.4, 0.8]),
        ("pydoc", {"lr_rule": "step"}, "SGD", [8, 8, 8, 0.08]),
        ("pydoc", PLATEAU, "SGD", [8, 8, 8, 8]),
    ],
)
def test_task_optimizer_and_learning_rates(dataset, changes, optimizer, rates):
    spec = smoke_spec(dataset, steps=1000, lr=8.0, **changes)
    task = load_task_class(spec)(spec, CPU, stand_in=True)
    sgd_or_adam, rate = task.optimizer(nn.Linear(2, 2))
    assert type(sgd_or_adam).__name__ == optimizer
    values = [rate(step, []) for step in (0, 491, 500, 1000)]
    assert values == pytest.approx(rates, rel=1e-2)
    after_worse = rate(0, evaluations(3, 4, 2))
    assert after_worse == (2 if changes is PLATEAU else 8)


# --- random streams -------------------------------------------------------------------------------


def test_random_streams_equal_committed_rows():
    """Keep the stream numbers, which determine every run of a committed seed."""
    names = ["ORDER", "AUGMENT", "IMAGE", "SAMPLE", "EVALUATE"]
    assert [stream.name for stream in Stream] == names
    assert [int(stream) for stream in Stream] == list(range(5))
    seeds = [seeded_generator(5, 7, stream).initial_seed() for stream in Stream]
    numbers = [seeded_generator(5, 7, i).initial_seed() for i in range(5)]
    assert seeds == numbers
    assert len(set(seeds)) == len(Stream)
    assert seeds[Stream.SAMPLE] == 53_212_224_671_631_112


def test_batch_keys_have_seeded_order_of_epoch():
    second, third = itertools.islice(batch_keys(50, 50, seed=1, start=2), 2)
    assert {epoch for epoch, _ in second} == {2}
    assert {epoch for epoch, _ in third} == {3}
    order = torch.randperm(50, generator=seeded_generator(1, 2, 0)).tolist()
    assert [index for _, index in second] == order
    assert [index for _, index in third] != order


# --- the base installation ------------------------------------------------------------------------

OPTIONAL = "torchvision PIL torchmetrics dgl ogb transformers tokenizers datasets accelerate".split()
BASE = (
    "digits/mlp6",
    "digits/resnet8_w8",
    "pydoc/lstm",
    "digits-graph/gcn",
    "digits-graph/sage",
)
# what needs an extra -> the library that is missed first, the extra
REFUSED = {
    "task('cifar10/resnet8_w8')": ("torchvision", "vision"),
    "task('imagenet/resnet18', 'paper', stand_in=True).build_model()": (
        "torchvision",
        "vision",
    ),
    "task('digit-scenes/retinanet_small')": ("torchvision", "vision"),
    "task('templates/bert_small')": ("tokenizers", "text"),
    "download('voc2012')": ("torchvision", "vision"),
    "download('ogbn-arxiv')": ("ogb", "graph"),
}
WITHOUT_EXTRAS = f"""
import json, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import torch
import cpt_core as cpt
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
def train_step(step):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
tested = cpt.search.precision_range_test(model, train_step, optimizer, bits=(2, 4), dwell=8, seeds=(0,)).bits
out = {{"tested": tested, "needed": [name for name in sys.modules if name.startswith(("cpt_lab", "cpt_core.models"))]}}
from dataclasses import replace
from cpt_lab.data import download
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train
torch.set_num_threads(1)
def spec(name, scale="smoke"):
    r = recipe(scale, *name.split("/"))
    return run_spec(replace(r, steps=3, n_cycles=1, evaluate_every=0), "static 8", q_max=8, seed=0, scale=scale)
def task(name, scale="smoke", **options):
    found = spec(name, scale)
    return load_task_class(found)(found, torch.device("cpu"), **options)
out["imported"] = [name for name in sys.modules if name.startswith("cpt_lab.tasks.") and name != "cpt_lab.tasks.base"]
for name in {BASE!r}:
    run = train(load_task_class(spec(name)), spec(name))
    out[name] = [run.status, len(run.history["loss"]), min(run.bitops.values()) > 0]
for code in {list(REFUSED)!r}:
    try:
        out[code] = repr(eval(code))
    except ImportError as error:
        out[code] = str(error)
print(json.dumps(out))
"""


@pytest.mark.slow
def test_base_installation_trains_and_names_missing_extras():
    """Run in one process that cannot import any optional library."""
    output = run_command(sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS)
    refusals = {
        code: f"{library} cannot be imported; {install_hint(extra)}"
        for code, (library, extra) in REFUSED.items()
    }
    assert json.loads(output) == {
        "tested": [2, 4, 8],
        "needed": [],  # the model of a user needs no task
        "imported": [],  # a task is imported when it is asked for
        **{name: ["ok", 3, True] for name in BASE},
        **refusals,
    }
