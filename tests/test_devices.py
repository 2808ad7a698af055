"""GPU code that also runs on the CPU: sampling, all tasks with stop and resume, workers, captured steps."""

from dataclasses import replace

import pytest
import torch
from helpers import WITH_CUDA

import cpt_core as cpt
from bench.gpu import checks
from cpt_lab.data.graph_batches import sample_blocks
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.sweeps import worker
from cpt_lab.sweeps.options import SweepOptions
from cpt_lab.sweeps.process import supervise
from cpt_lab.sweeps.worker import Job, run_all
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.device import device_name
from cpt_lab.training.session import Session
from cpt_lab.training.train import train


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=WITH_CUDA) for name in checks.TASKS]
)
def test_cuda_tasks_train_stop_and_resume(name):
    """Train all tasks on CUDA; the tests of the tasks cover the CPU."""
    found = checks.task(name, "cuda")
    assert "failed" not in found, found


@pytest.mark.parametrize("name", ["quantisers", *checks.LAYERS])
def test_quantizers_and_layers_match_cpu(name, device):
    found = (
        checks.quantisers(device.type)
        if name == "quantisers"
        else checks.layer(name, device.type)
    )
    assert "failed" not in found, found


def test_sample_blocks_on_device(device):
    source, target = torch.unique(
        torch.randint(0, 60, (2, 900), generator=torch.Generator().manual_seed(0)),
        dim=1,
    )
    edges = set(zip(source.tolist(), target.tolist(), strict=True))
    graph = cpt.Graph.from_edges(source, target, 60).to(device)
    x = torch.randn(60, 8, device=device)
    torch.manual_seed(0)
    layer = cpt.quantize_(cpt.SAGEConv(8, 16).to(device))
    seeds = torch.tensor([5, 0, 17], device=device)
    nodes, (block,) = sample_blocks(
        graph, seeds, [4], torch.Generator(device).manual_seed(1)
    )
    again, _ = sample_blocks(graph, seeds, [4], torch.Generator(device).manual_seed(1))
    assert torch.equal(nodes, again)
    assert block.in_degrees.tolist() == graph.in_degrees[seeds].clamp_max(4).tolist()
    into = torch.repeat_interleave(seeds, block.indptr.diff())
    assert (
        set(zip(nodes[block.indices.long()].tolist(), into.tolist(), strict=True))
        <= edges
    )
    with cpt.precision(layer, 16):
        here = layer(block, x[nodes])
        there = layer.to("cpu")(block.to("cpu"), x[nodes].cpu())
    assert here.device.type == device.type
    torch.testing.assert_close(here.cpu(), there, atol=1e-3, rtol=1e-3)


def demo(**changes):
    """Return a short run at a scale that uses a GPU."""
    small = replace(
        recipe("demo", "digits", "mlp6"),
        steps=6,
        n_cycles=1,
        train_images=200,
        evaluate_every=0,
    )
    return run_spec(
        replace(small, **changes), "static 8", q_max=8, seed=0, scale="demo"
    )


WAYS = [
    (run_all, "cpu"),
    *(pytest.param(way, "cuda", marks=WITH_CUDA) for way in (run_all, supervise)),
]


@pytest.mark.parametrize(("way", "where"), WAYS)
def test_worker_runs_on_its_device(way, where, tmp_path):
    gpu = 0 if way is supervise else None
    (outcome,) = way(
        Job(demo(), tmp_path / "rows.jsonl", SweepOptions(device=where), gpu=gpu)
    )
    row = outcome.row
    assert (row["status"], row["device"]) == ("ok", device_name(where))
    assert ("captured" in row) == (where == "cuda")


CAPTURED = {
    ("digits", "mlp6"): {},
    ("digits", "resnet8_w8"): {},
    ("pydoc", None): {},
    ("digits-graph", "gcn"): {},
    ("templates", None): {"padding": "max"},
}


@pytest.mark.gpu
@pytest.mark.parametrize(("dataset", "model"), CAPTURED)
def test_captured_cuda_steps_equal_eager(dataset, model, monkeypatch):
    base = replace(
        recipe("smoke", dataset, model),
        steps=12,
        n_cycles=1,
        **CAPTURED[dataset, model],
    )
    spec = run_spec(base, "CR", q_max=8, seed=0, scale="smoke")
    losses = []
    # by default cuDNN may add up in another order, and of a last digit 12 steps at few bits make a hundredth
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for value in ("0", "1"):
        monkeypatch.setenv("CPT_CAPTURE", value)
        one = Session(load_task_class(spec), spec, "cuda")
        batches, lr = one.task.batches(0), one.lr_at(0, [])
        losses.append([])
        for _ in range(12):
            losses[-1].append(one.step(next(batches), lr))
            one.scheduler.step()
        assert (one.captured > 0) == (value == "1"), one.uncaptured_reason
    torch.testing.assert_close(*map(torch.stack, losses), atol=1e-3, rtol=1e-3)


def test_row_of_gpu_run_states_captured_steps(monkeypatch):
    spec = demo()
    run = train(load_task_class(spec), spec)
    monkeypatch.setattr(worker, "peak_memory", lambda device: 1)
    assert worker._result_fields(run, "cuda")["captured"] == {
        "steps": 0,
        "why_not": "the device is cpu",
    }
    assert "captured" not in worker._result_fields(run, "cpu")
