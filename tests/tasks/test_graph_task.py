"""Node classification task: batches, sampled and exact inference, accuracies, losses."""

import itertools
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from helpers import smoke_spec

from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import precision
from cpt_lab.tasks import graph as graph_task
from cpt_lab.tasks.graph import GraphTask
from cpt_lab.training.train import train

CPU = torch.device("cpu")
spec = partial(smoke_spec, "digits-graph", steps=12, evaluate_every=0)


@pytest.fixture(scope="session")
def trained():
    """Return a function that trains a model for 40 steps, once."""
    return cache(lambda model: train(GraphTask, spec(model=model, steps=40)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [("gcn", "GCN"), ("sage", "GraphSAGE")])
def test_graph_training_learns(model, name, trained):
    run = trained(model)
    assert run.status == "ok"
    assert run.metric("accuracy") > 0.7  # chance is 0.1
    assert run.metric("accuracy", "valid") > 0.7
    assert run.history["loss"][-1] < run.history["loss"][0] / 2
    assert run.title.startswith(name)
    assert "digits" in run.title


# --- batches --------------------------------------------------------------------------------------


def test_graph_full_batch_uses_training_nodes():
    task = GraphTask(spec(), CPU)
    batch = next(task.batches(7))
    assert torch.equal(batch.rows, task.data.train)
    assert torch.equal(batch.labels, task.data.labels[batch.rows])


def test_graph_epoch_has_every_training_node_once():
    task = GraphTask(spec(model="sage", batch=15), CPU)
    labels = [next(task.batches(step)).labels for step in range(4)]
    # There are 50 labelled nodes; the last batch is small, not dropped.
    assert [len(part) for part in labels] == [15, 15, 15, 5]
    assert torch.bincount(torch.cat(labels)).tolist() == [5] * 10


@pytest.mark.slow
def test_graph_batches_are_independent_of_workers(monkeypatch):
    """Sample the same neighbours in this process and in worker processes."""
    task = GraphTask(spec(model="sage"), CPU)
    batches = [next(task.batches(step)) for step in range(3)]
    monkeypatch.setattr(graph_task, "MIN_EDGES_FOR_SAMPLERS", 0)
    for here, there in zip(batches, itertools.islice(task.batches(0), 3), strict=True):
        assert torch.equal(here.features, there.features)
        assert torch.equal(here.labels, there.labels)
        for a, b in zip(here.graphs, there.graphs, strict=True):
            assert torch.equal(a.indptr, b.indptr)
            assert torch.equal(a.indices, b.indices)


# --- inference and metrics ------------------------------------------------------------------------


def untrained(task):
    torch.manual_seed(0)
    return quantize_(task.build_model()).eval()


def test_graph_accuracy_by_in_degree():
    """Report ranges of in-degrees that have nodes; nobody has 10,000 neighbours."""
    task = GraphTask(spec(degrees=(0, 10, 12, 10_000)), CPU)
    model = untrained(task)
    with precision(model, bits=8), torch.no_grad():
        result = task.evaluate(model)["test"]
        predicted = model(task.graph, task.features).argmax(1)
        plain = GraphTask(spec(), CPU).evaluate(model)["test"]
    nodes = task.rows["test"]
    is_correct = (predicted == task.labels)[nodes].double()
    degree = task.graph.in_degrees[nodes]
    ranges = {0: degree < 10, 10: (degree >= 10) & (degree < 12), 12: degree >= 12}
    expected = {
        f"accuracy_degree{low}": float(is_correct[inside].mean())
        for low, inside in ranges.items()
    }
    assert result == pytest.approx({**plain, **expected})
    shares = [float(inside.double().mean()) for inside in ranges.values()]
    assert result["accuracy"] == pytest.approx(np.dot(shares, list(expected.values())))
    assert set(plain) == {"accuracy", "loss"}


def test_graph_exact_inference_equals_full_graph(monkeypatch):
    monkeypatch.setattr(graph_task, "EXACT_CHUNK_NODES", 300)  # many chunks
    task = GraphTask(spec(model="sage", inference="exact"), CPU)
    model = untrained(task)
    with precision(model, 4), torch.no_grad():
        chunks = task._exact_logits(model)
        whole = model(task.graph, task.features)
    # A sum in another order can move a value by one level.
    torch.testing.assert_close(chunks, whole, atol=2e-3, rtol=0)
    assert (chunks.argmax(1) == whole.argmax(1)).float().mean() > 0.995


@pytest.mark.slow
def test_graph_sampled_inference_repeats_near_exact(trained):
    model = trained("sage").model.eval()

    def evaluate(**changes):
        with precision(model, 8):
            return GraphTask(spec(model="sage", **changes), CPU).evaluate(model)

    many, few = evaluate(fanout=30), evaluate(fanout=3)
    assert evaluate(fanout=30) == many
    assert evaluate(fanout=3) == few != many  # nodes have more than three neighbours
    exact = evaluate(inference="exact")
    assert abs(many["test"]["accuracy"] - exact["test"]["accuracy"]) < 0.03


@pytest.mark.slow
def test_graph_raw_logit_loss_is_unbounded():
    losses = train(GraphTask, spec(loss="nll_raw", steps=40)).history["loss"]
    assert losses[-1] < losses[20] < losses[0]
    assert losses[-1] < 0


def test_graph_without_validation_reports_best_test(monkeypatch):
    load = graph_task.load_graph
    nothing = torch.empty(0, dtype=torch.int64)
    monkeypatch.setattr(
        graph_task, "load_graph", lambda config: replace(load(config), valid=nothing)
    )
    run = train(GraphTask, spec(steps=8, evaluate_every=4))
    assert {metric["when"] for metric in run.metrics} == {"final", "best_test"}


def test_graph_ogb_data_uses_ogb_evaluator(monkeypatch):
    task = GraphTask(spec(), CPU)
    model = untrained(task)
    pairs = []

    class Evaluator:
        def eval(self, pair):
            pairs.append((pair["y_true"], pair["y_pred"]))
            return {"acc": 0.25}

    with precision(model, 8):
        plain = task.evaluate(model)["test"]["accuracy"]
        task.data = replace(task.data, ogb="ogbn-arxiv")
        monkeypatch.setattr(graph_task, "ogb_evaluator", lambda name: Evaluator())
        assert task.evaluate(model)["test"]["accuracy"] == 0.25
    labels, predicted = pairs[-1]
    assert labels.shape == predicted.shape == (len(task.data.test), 1)
    assert (labels == predicted).mean() == pytest.approx(plain)


@pytest.mark.parametrize("norm", ["matrix", "node", "none"])
def test_graph_norms_have_no_parameters(norm):
    model = GraphNet("sage", 4, 2, hidden=8, norm=norm)
    count = sum(p.numel() for p in model.convs.parameters())
    assert sum(p.numel() for p in model.parameters()) == count
    assert len(model.norms) == 2
