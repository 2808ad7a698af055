"""Tasks are imported when asked for; what every task shares; what runs without any extra."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cpt_lab.data import common
from cpt_lab.data.common import Stream, epoch_order, generator_of, load_once
from cpt_lab.experiments.recipes import DATASETS, EXPERIMENTS, recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import TASKS, learning_rates

OPTIONAL = "torchvision PIL torchmetrics dgl ogb transformers tokenizers datasets accelerate".split()
BASE = ("digits/mlp6", "digits/resnet8_w8", "pydoc/lstm", "digits-graph/gcn", "digits-graph/sage")
# what needs an extra -> the library that is missed first, the extra
REFUSED = {
    "TASKS['image'](spec('cifar10/resnet8_w8'), CPU)": ("torchvision", "vision"),
    "TASKS['image'](spec('imagenet/resnet18', 'paper'), CPU, stand_in=True).model()": ("torchvision", "vision"),
    "TASKS['detection'](spec('digit-scenes/retinanet_small'), CPU)": ("torchvision", "vision"),
    "TASKS['entailment'](spec('templates/bert_small'), CPU)": ("tokenizers", "text"),
    "download('voc2012')": ("torchvision", "vision"),
    "download('ogbn-arxiv')": ("ogb", "graph"),
}
WITHOUT_EXTRAS = f"""
import json, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None
import torch
from dataclasses import replace
from cpt_lab.data import download
from cpt_lab.experiments.recipes import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import TASKS
from cpt_lab.training.train import train
CPU = torch.device("cpu")
torch.set_num_threads(1)
def spec(name, scale="smoke"):
    r = recipe(scale, *name.split("/"))
    return run_spec(replace(r, steps=3, n_cycles=1, evaluate_every=0), "static 8", q_max=8, seed=0, scale=scale)
out = {{"tasks": sorted(TASKS), "shown": str(TASKS)}}
out["imported"] = [name for name in sys.modules if name.startswith("cpt_lab.tasks.")]
for name in {BASE!r}:
    run = train(TASKS[spec(name).recipe.task], spec(name))
    out[name] = [run.status, len(run.history["loss"]), min(run.bitops.values())]
for code in {list(REFUSED)!r}:
    try:
        out[code] = repr(eval(code))
    except ImportError as error:
        out[code] = str(error)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def without_extras():
    """What one process found in which no library of an extra can be imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_asking_what_there_is_imports_no_task(without_extras):
    assert without_extras["tasks"] == sorted(EXPERIMENTS)
    assert all(name in without_extras["shown"] for name in EXPERIMENTS)
    assert without_extras["imported"] == ["cpt_lab.tasks.base"]


@pytest.mark.parametrize("name", BASE)
def test_the_base_installation_trains(name, without_extras):
    status, steps, cost = without_extras[name]
    assert (status, steps) == ("ok", 3)
    assert cost > 0


@pytest.mark.parametrize("code", REFUSED)
def test_what_needs_an_extra_names_it(code, without_extras):
    library, extra = REFUSED[code]
    assert without_extras[code] == f"{library} cannot be imported; get it with: pip install 'cpt-core[{extra}]'"


def test_tasks_have_the_metric_of_their_experiment():
    assert list(TASKS) == list(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        assert (TASKS[name].metric, TASKS[name].better) == (experiment.metric.name, experiment.metric.better)
    assert TASKS["language_model"].better == -1
    with pytest.raises(KeyError):
        TASKS["chess"]
    assert "chess" not in TASKS


# --- learning rates -------------------------------------------------------------------------------


def evaluations(*losses):
    return [{"valid": {"loss": loss}} for loss in losses]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (learning_rates.constant(0.5), [0.5, 0.5, 0.5, 0.5, 0.5]),
        (learning_rates.linear(0.5, 0.2, 40), [0.5, 0.4, 0.3, 0.2, 0.1]),
        (learning_rates.cosine(0.5, 0.0, 40), [0.5, 0.25 + math.sqrt(0.03125), 0.25, 0.25 - math.sqrt(0.03125), 0.0]),
        (learning_rates.milestones(0.5, (0.5, 0.74), 40), [0.5, 0.5, 0.05, 0.005, 0.005]),  # 29.6 is step 30
    ],
)
def test_learning_rates_by_hand(rate, expected):
    assert [rate(step, []) for step in (0, 10, 20, 30, 40)] == pytest.approx(expected)


def test_a_plateau_cuts_after_every_evaluation_that_is_not_the_best():
    rate = learning_rates.plateau(8.0, 2.0)
    assert [rate(9, evaluations(*losses)) for losses in ((), (3,), (3, 3), (3, 4, 2), (3, 4, 2, math.nan))] == [
        8, 8, 4, 4, 2,
    ]  # fmt: skip


# --- streams and loading --------------------------------------------------------------------------


def test_purposes_are_the_numbers_that_rows_were_made_with():
    """A changed number would change every run of a committed seed."""
    assert [(s.name, int(s)) for s in Stream] == [
        ("ORDER", 0), ("AUGMENT", 1), ("IMAGE", 2), ("SAMPLE", 3), ("EVALUATE", 4),
    ]  # fmt: skip
    for stream in Stream:
        assert generator_of(5, 7, stream).initial_seed() == generator_of(5, 7, int(stream)).initial_seed()
    assert len({generator_of(5, 7, stream).initial_seed() for stream in Stream}) == len(Stream)
    assert generator_of(5, 7, Stream.SAMPLE).initial_seed() == 53_212_224_671_631_112
    order = epoch_order(50, seed=1, epoch=2)
    assert order.tolist() == torch.randperm(50, generator=generator_of(1, 2, 0)).tolist()
    assert order.tolist() != epoch_order(50, seed=1, epoch=3).tolist()


def test_data_is_loaded_once_and_the_last_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "_last", {})
    loaded = []

    def load(r):
        loaded.append((r.dataset, r.size))
        return object()

    small = recipe("demo")
    first = load_once(load, small, "size")
    assert load_once(load, run_spec(small, "CR", q_max=8, seed=3).recipe, "size") is first
    assert load_once(load, recipe("demo", "cifar10"), "size") is not first
    assert load_once(load, small, "size") is not first  # only the last is kept
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    load_once(load, small, "size")
    assert loaded == [("digits", 8), ("cifar10", 16), ("digits", 8), ("digits", 8)]


def test_words_and_characters_of_one_text_are_two_data_sets():
    large = []
    for unit in ("characters", "words"):
        changed = replace(recipe("smoke", "pydoc"), unit=unit, steps=30)
        task = TASKS["language_model"](run_spec(changed, "CR", q_max=8, seed=0, scale="smoke"), torch.device("cpu"))
        large.append(len(task.data.vocabulary) > 300)
    assert large == [False, True]


@pytest.mark.parametrize("dataset", [d for d in DATASETS.values() if d.embedded], ids=lambda d: d.name)
def test_the_checksum_of_data_does_not_depend_on_the_number_of_threads(dataset):
    found = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            common._last.clear()
            (chosen, *_) = dataset.recipes["smoke"]
            found.add(
                TASKS[chosen.task](run_spec(chosen, "CR", q_max=8, seed=0, scale="smoke"), torch.device("cpu")).checksum
            )
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
