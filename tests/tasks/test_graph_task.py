"""Node classification by the common training loop: full graph and sampled, resumed, evaluated, counted."""

import itertools
from dataclasses import replace
from functools import partial

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


@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_graph_training_learns(model):
    run = train(GraphTask, spec(model=model, steps=40))
    assert run.status == "ok"
    assert run.metric("accuracy") > 0.7  # chance is 0.1
    assert run.history["loss"][-1] < run.history["loss"][0] / 2
    assert run.metric("accuracy", "valid") > 0.7
    assert "digits" in run.title
    assert ("GCN" if model == "gcn" else "GraphSAGE") in run.title


def test_graph_full_batch_uses_training_nodes():
    task = GraphTask(spec(), CPU)
    _, _, labels, rows = next(task.batches(7))
    assert torch.equal(rows, task.data.train)
    assert torch.equal(labels, task.data.labels[rows])


def test_graph_batches_are_independent_of_workers(monkeypatch):
    task = GraphTask(spec(model="sage"), CPU)
    here = [next(task.batches(step)) for step in range(3)]
    monkeypatch.setattr(
        graph_task, "MIN_EDGES_FOR_SAMPLERS", 0
    )  # sample in processes of their own
    there = itertools.islice(task.batches(0), 3)
    for (graphs, *some, _), (others, *again, _) in zip(here, there, strict=True):
        assert all(map(torch.equal, some, again))
        assert all(
            torch.equal(a.indptr, b.indptr) for a, b in zip(graphs, others, strict=True)
        )
        assert all(
            torch.equal(a.indices, b.indices)
            for a, b in zip(graphs, others, strict=True)
        )


def test_graph_epoch_has_every_training_node_once():
    task = GraphTask(spec(model="sage", batch=15), CPU)
    seen = [next(task.batches(step))[2] for step in range(4)]
    assert [len(s) for s in seen] == [
        15,
        15,
        15,
        5,
    ]  # 50 labelled nodes; the last batch is small, not dropped
    assert torch.bincount(torch.cat(seen)).tolist() == [5] * 10


def test_graph_accuracy_by_in_degree():
    task = GraphTask(spec(degrees=(0, 10, 12, 10_000)), CPU)
    torch.manual_seed(0)
    model = quantize_(task.build_model()).eval()
    with precision(model, bits=8), torch.no_grad():
        found = task.evaluate(model)["test"]
        predicted = model(task.graph, task.features).argmax(1)
        without = GraphTask(spec(), CPU).evaluate(model)["test"]
    nodes = task.rows["test"]
    right, degree = (predicted == task.labels)[nodes], task.graph.in_degrees[nodes]
    strata = {
        0: degree < 10,
        10: (degree >= 10) & (degree < 12),
        12: degree >= 12,
    }  # nobody has 10,000 neighbours
    told = {
        f"accuracy_degree{low}": float(right[inside].float().mean())
        for low, inside in strata.items()
    }
    assert {
        name: value for name, value in found.items() if "degree" in name
    } == pytest.approx(told)
    assert found["accuracy"] == pytest.approx(
        np.dot([float(s.float().mean()) for s in strata.values()], list(told.values()))
    )
    assert without == {name: found[name] for name in ("accuracy", "loss")}


def test_graph_exact_inference_equals_full_graph(monkeypatch):
    monkeypatch.setattr(graph_task, "EXACT_CHUNK_NODES", 300)  # many chunks
    task = GraphTask(spec(model="sage", inference="exact"), CPU)
    torch.manual_seed(0)
    model = quantize_(task.build_model()).eval()
    with precision(model, 4):
        chunks = task._exact_logits(model)
        whole = model(task.graph, task.features)
    torch.testing.assert_close(
        chunks, whole, atol=2e-3, rtol=0
    )  # a sum in another order can move a level
    assert (chunks.argmax(1) == whole.argmax(1)).float().mean() > 0.995


def test_graph_sampled_inference_repeats_near_exact():
    run = train(GraphTask, spec(model="sage", steps=40, fanout=30))
    task = GraphTask(spec(model="sage", fanout=30), CPU)
    run.model.eval()
    with precision(run.model, 8):
        first, again = task.evaluate(run.model), task.evaluate(run.model)
        exact = GraphTask(spec(model="sage", inference="exact"), CPU).evaluate(
            run.model
        )
    few = GraphTask(
        spec(model="sage", fanout=3), CPU
    )  # fewer than a node has: here chance takes part
    with precision(run.model, 8):
        assert few.evaluate(run.model) == few.evaluate(run.model) != first
    assert first == again
    assert abs(first["test"]["accuracy"] - exact["test"]["accuracy"]) < 0.03


def test_graph_raw_logit_loss_is_unbounded():
    run = train(GraphTask, spec(loss="nll_raw", steps=60))
    assert run.history["loss"][-1] < 0
    assert run.history["loss"][-1] < run.history["loss"][30] < run.history["loss"][0]


def test_graph_without_validation_reports_best_test(monkeypatch):
    original = graph_task.load_graph
    monkeypatch.setattr(
        graph_task,
        "load_graph",
        lambda r: replace(original(r), valid=torch.empty(0, dtype=torch.int64)),
    )
    run = train(GraphTask, spec(evaluate_every=4))
    assert {m["when"] for m in run.metrics} == {"final", "best_test"}


def test_graph_ogb_data_uses_ogb_evaluator(monkeypatch):
    plain, calls = train(GraphTask, spec(steps=1)), []

    class Evaluator:
        def eval(self, pair):
            calls.append(
                (
                    pair["y_true"].shape,
                    pair["y_pred"].shape,
                    (pair["y_true"] == pair["y_pred"]).mean(),
                )
            )
            return {"acc": 0.25}

    original = graph_task.load_graph
    monkeypatch.setattr(
        graph_task, "load_graph", lambda r: replace(original(r), ogb="ogbn-arxiv")
    )
    monkeypatch.setattr(graph_task, "ogb_evaluator", lambda name: Evaluator())
    run = train(GraphTask, spec(steps=1))
    assert run.metric("accuracy") == 0.25
    assert calls[0][:2] == ((200, 1), (200, 1))
    assert plain.metric("accuracy") in [right for _, _, right in calls]


@pytest.mark.parametrize("norm", ["matrix", "node", "none"])
def test_graph_norms_have_no_parameters(norm):
    model = GraphNet("sage", 4, 2, hidden=8, norm=norm)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in model.convs.parameters()
    )
    assert len(model.norms) == 2
