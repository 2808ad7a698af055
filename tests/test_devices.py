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


@pytest.mark.parametrize("name", ["quantisers", *checks.LAYERS])
def test_quantizers_and_layers_match_cpu(name, device):
    if name == "quantisers":
        report = checks.quantisers(device.type)
    else:
        report = checks.layer(name, device.type)
    assert "failed" not in report, report


@pytest.mark.gpu
@pytest.mark.parametrize("name", checks.TASKS)
def test_cuda_tasks_train_stop_and_resume(name):
    """Train all tasks on CUDA; the tests of the tasks cover the CPU."""
    report = checks.task(name, "cuda")
    assert "failed" not in report, report


def test_sample_blocks_on_device(device):
    generator = torch.Generator().manual_seed(0)
    random_edges = torch.randint(0, 60, (2, 900), generator=generator)
    source, target = torch.unique(random_edges, dim=1)
    edges = set(zip(source.tolist(), target.tolist(), strict=True))
    graph = cpt.Graph.from_edges(source, target, 60).to(device)
    seeds = torch.tensor([5, 0, 17], device=device)
    (nodes, (block,)), (nodes_again, _) = (
        sample_blocks(graph, seeds, [4], torch.Generator(device).manual_seed(1))
        for _ in range(2)
    )
    assert torch.equal(nodes, nodes_again)
    assert block.in_degrees.tolist() == graph.in_degrees[seeds].clamp_max(4).tolist()
    targets = torch.repeat_interleave(seeds, block.indptr.diff())
    sources = nodes[block.indices.long()]
    assert set(zip(sources.tolist(), targets.tolist(), strict=True)) <= edges

    x = torch.randn(60, 8, device=device)
    torch.manual_seed(0)
    layer = cpt.quantize_(cpt.SAGEConv(8, 16).to(device))
    with cpt.precision(layer, 16):
        here = layer(block, x[nodes])
        there = layer.to("cpu")(block.to("cpu"), x[nodes].cpu())
    assert here.device.type == device.type
    torch.testing.assert_close(here.cpu(), there, atol=1e-3, rtol=1e-3)


@pytest.fixture
def spec():
    """Return a short run at a scale that uses a GPU."""
    base = recipe("demo", "digits", "mlp6")
    short = replace(base, steps=6, n_cycles=1, train_images=200, evaluate_every=0)
    return run_spec(short, "static 8", q_max=8, seed=0, scale="demo")


@pytest.mark.parametrize(
    ("work", "device_type"),
    [
        (run_all, "cpu"),
        pytest.param(run_all, "cuda", marks=WITH_CUDA),
        pytest.param(supervise, "cuda", marks=WITH_CUDA),
    ],
)
def test_worker_runs_on_its_device(work, device_type, spec, tmp_path):
    gpu = 0 if work is supervise else None
    options = SweepOptions(device=device_type)
    (outcome,) = work(Job(spec, tmp_path / "rows.jsonl", options, gpu=gpu))
    row = outcome.row
    assert (row["status"], row["device"]) == ("ok", device_name(device_type))
    assert ("captured" in row) == (device_type == "cuda")


CAPTURED = [
    ("digits", "mlp6", {}),
    ("digits", "resnet8_w8", {}),
    ("pydoc", None, {}),
    ("digits-graph", "gcn", {}),
    ("templates", None, {"padding": "max"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dataset", "model", "changes"), CAPTURED)
def test_captured_cuda_steps_equal_eager(dataset, model, changes, monkeypatch):
    base = recipe("smoke", dataset, model)
    short = replace(base, steps=12, n_cycles=1, **changes)
    spec = run_spec(short, "CR", q_max=8, seed=0, scale="smoke")
    losses = []
    # By default cuDNN may add in another order, and 12 steps at few bits make a hundredth of a last digit.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for value in ("0", "1"):
        monkeypatch.setenv("CPT_CAPTURE", value)
        session = Session(load_task_class(spec), spec, "cuda")
        batches, lr = session.task.batches(0), session.lr_at(0, [])
        losses.append([])
        for _ in range(12):
            losses[-1].append(session.step(next(batches), lr))
            session.scheduler.step()
        assert (session.captured > 0) == (value == "1"), session.uncaptured_reason
    torch.testing.assert_close(*map(torch.stack, losses), atol=1e-3, rtol=1e-3)


def test_row_of_gpu_run_states_captured_steps(spec, monkeypatch):
    run = train(load_task_class(spec), spec)
    monkeypatch.setattr(worker, "peak_memory", lambda device: 1)
    captured = {"steps": 0, "why_not": "the device is cpu"}
    assert worker._result_fields(run, "cuda")["captured"] == captured
    assert "captured" not in worker._result_fields(run, "cpu")
