"""Common task code: lazy imports, shared weights and batches, learning rates, and the base installation."""

import itertools
import json
import math
import sys

import pytest
import torch
from helpers import run_command, same_parameters, smoke_spec
from torch import nn
from torch.utils._pytree import tree_leaves
from training.test_train import stop_at

from cpt_extras.optional_libraries import install_hint
from cpt_lab.data import loading
from cpt_lab.data.random_streams import Stream, batch_keys, seeded_generator
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import base as learning_rates
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session
from cpt_lab.training.train import train

CPU = torch.device("cpu")
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
    out[name] = [run.status, len(run.history["loss"]), min(run.bitops.values())]
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
    found = json.loads(
        run_command(sys.executable, "-W", "ignore", "-c", WITHOUT_EXTRAS)
    )
    assert (found["tested"], found["needed"]) == (
        [2, 4, 8],
        [],
    )  # a model of one's own needs no task either
    assert found["imported"] == []  # a task is imported when it is asked for
    assert [(*found[name][:2], found[name][2] > 0) for name in BASE] == [
        ("ok", 3, True)
    ] * len(BASE)
    assert {code: found[code] for code in REFUSED} == {
        code: f"{library} cannot be imported; {install_hint(extra)}"
        for code, (library, extra) in REFUSED.items()
    }


FIXED = {
    ("digits", None): True,
    ("pydoc", None): True,
    ("digits-graph", "gcn"): True,
    ("digits-graph", "sage"): False,
    ("templates", None): False,
    ("digit-scenes", None): False,
}


@pytest.mark.parametrize(("dataset", "model"), FIXED)
def test_session_has_metric_and_fixed_shape_flag(dataset, model):
    spec = smoke_spec(dataset, model=model)
    session = Session(load_task_class(spec), spec, stand_in=True)
    assert session.metric is EXPERIMENTS[spec.recipe.task].metric
    assert session.metric.better == (-1 if dataset == "pydoc" else 1)
    assert session.task.fixed_shape == FIXED[dataset, model]
    assert session.uncaptured_reason == "the device is cpu"


# --- learning rates -------------------------------------------------------------------------------


def evaluations(*losses):
    return [{"valid": {"loss": loss}} for loss in losses]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (learning_rates.constant(0.5), [0.5, 0.5, 0.5, 0.5, 0.5]),
        (learning_rates.linear(0.5, 0.2, 40), [0.5, 0.4, 0.3, 0.2, 0.1]),
        (
            learning_rates.cosine(0.5, 0.0, 40),
            [0.5, 0.25 + math.sqrt(0.03125), 0.25, 0.25 - math.sqrt(0.03125), 0.0],
        ),
        (
            learning_rates.milestones(0.5, (0.5, 0.74), 40),
            [0.5, 0.5, 0.05, 0.005, 0.005],
        ),  # 29.6 is step 30
    ],
)
def test_learning_rates_of_hand_computed_cases(rate, expected):
    assert [rate(step, []) for step in (0, 10, 20, 30, 40)] == pytest.approx(expected)


def test_plateau_rate_drops_after_worse_evaluation():
    rate = learning_rates.plateau(8.0, 2.0)
    assert [
        rate(9, evaluations(*losses))
        for losses in ((), (3,), (3, 3), (3, 4, 2), (3, 4, 2, math.nan))
    ] == [
        8,
        8,
        4,
        4,
        2,
    ]


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
        (
            "pydoc",
            {"lr_rule": "plateau", "lr_division": 4.0, "evaluate_every": 9},
            "SGD",
            [8, 8, 8, 8],
        ),
    ],
)
def test_task_optimizer_and_learning_rates(dataset, changes, optimizer, rates):
    spec = smoke_spec(dataset, steps=1000, lr=8.0, **changes)
    made, rate = load_task_class(spec)(spec, CPU, stand_in=True).optimizer(
        nn.Linear(2, 2)
    )
    assert type(made).__name__ == optimizer
    assert [rate(step, []) for step in (0, 491, 500, 1000)] == pytest.approx(
        rates, rel=1e-2
    )
    cut = 4 if changes.get("lr_rule") == "plateau" else 1
    assert rate(0, evaluations(3, 4, 2)) == 8 / cut


# --- what every task promises ---------------------------------------------------------------------

TINY = {
    "digits": {"model": "resnet8_w8", "crop": 1, "train_images": 100},
    "digit-scenes": {"flip": True, "train_images": 8, "test_images": 2},
    "digits-graph": {"model": "sage", "dropout": 0.1},
    "templates": {
        "padding": "longest",
        "dropout": 0.1,
        "hidden": 16,
        "layers": 1,
        "train_pairs": 300,
        "valid_pairs": 60,
        "test_pairs": 60,
    },
    "pydoc": {
        "dropout": 0.3,
        "lr_rule": "plateau",
        "hidden": 8,
        "length": 5,
        "train_tokens": 500,
        "valid_tokens": 100,
        "test_tokens": 100,
    },
}


def tiny(dataset, arm="CR", seed=0):
    return smoke_spec(
        dataset, arm, seed, steps=6, n_cycles=1, evaluate_every=2, **TINY[dataset]
    )


@pytest.mark.parametrize("dataset", TINY)
def test_arms_of_one_seed_share_weights(dataset):
    """Give all arms of a seed equal initial weights and batches."""

    def start(spec, step=3):
        """Return initial weights and the tensors of a batch."""
        task = load_task_class(spec)(spec, CPU)
        torch.manual_seed(0)
        batch = next(task.batches(step))
        return [*task.build_model().parameters()], tree_leaves(
            batch if isinstance(batch, tuple) else vars(batch)
        )

    def shared(one, other):
        return all(
            torch.equal(a, b)
            for a, b in zip(one, other, strict=True)
            if isinstance(a, torch.Tensor)
        )

    (weights, batch), (others, again) = (
        start(tiny(dataset)),
        start(tiny(dataset, "static 8")),
    )
    assert shared(weights, others)
    assert shared(batch, again)
    assert not shared(batch, start(tiny(dataset), step=4)[1])
    if dataset != "pydoc":  # a text has one order
        assert not shared(batch, start(tiny(dataset, seed=1))[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "dataset", [d for d in TINY if d != "digits"]
)  # of images: training/test_train.py
def test_resumed_task_equals_uninterrupted_run(dataset, tmp_path):
    spec, path = tiny(dataset), tmp_path / "c.pt"
    whole = train(load_task_class(spec), spec)
    stop_at(3, spec, path)
    torch.rand(7)  # the state of the random numbers comes from the checkpoint
    resumed = train(load_task_class(spec), spec, checkpoint=path)
    assert same_parameters(whole.model, resumed.model)
    assert (whole.history, whole.metrics, whole.bitops) == (
        resumed.history,
        resumed.metrics,
        resumed.bitops,
    )


# --- streams and loading --------------------------------------------------------------------------


def test_random_streams_equal_committed_rows():
    """Keep the stream numbers, which determine every run of a committed seed."""
    assert [(s.name, int(s)) for s in Stream] == [
        ("ORDER", 0),
        ("AUGMENT", 1),
        ("IMAGE", 2),
        ("SAMPLE", 3),
        ("EVALUATE", 4),
    ]
    for stream in Stream:
        assert (
            seeded_generator(5, 7, stream).initial_seed()
            == seeded_generator(5, 7, int(stream)).initial_seed()
        )
    assert len(
        {seeded_generator(5, 7, stream).initial_seed() for stream in Stream}
    ) == len(Stream)
    assert (
        seeded_generator(5, 7, Stream.SAMPLE).initial_seed() == 53_212_224_671_631_112
    )
    epochs = itertools.islice(batch_keys(50, 50, seed=1, start=2), 2)
    (second, order), (third, other) = (
        map(list, zip(*keys, strict=True)) for keys in epochs
    )
    assert (set(second), set(third)) == ({2}, {3})
    assert order == torch.randperm(50, generator=seeded_generator(1, 2, 0)).tolist()
    assert order != other


@pytest.mark.parametrize(
    "dataset", [d for d in DATASETS.values() if d.embedded], ids=lambda d: d.name
)
def test_data_checksum_is_independent_of_threads(dataset):
    found = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            loading._last.clear()
            spec = run_spec(
                dataset.recipes["smoke"][0], "CR", q_max=8, seed=0, scale="smoke"
            )
            found.add(load_task_class(spec)(spec, CPU).data.checksum)
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
