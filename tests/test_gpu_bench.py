"""``bench.gpu`` rehearsed on the CPU: every part runs, fails, stops and resumes."""

import importlib
import io
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_cuda_graph import TapeRecorder
from torch import nn

import cpt_core as cpt
from bench.gpu import __main__ as hour
from bench.gpu import checks, models, parts, stages
from cpt_extras.kernels import operators
from cpt_extras.kernels.backend import backend
from cpt_extras.optional_libraries import explain_missing_extra
from cpt_lab.training import session


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path))
    monkeypatch.setattr(stages, "commit", dict)  # asking git takes its time
    monkeypatch.setattr(
        stages.gc, "collect", lambda: 0
    )  # so does this, in a process of many tests
    monkeypatch.setattr(parts, "WARM_UP", 1)
    return tmp_path / "gpu-dry"


def read(folder, part):
    return json.loads((folder / f"{part}.json").read_text()), stages.read_rows(
        folder / f"{part}.jsonl"
    )


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("part", "only", "ok", "left_out"),
    [
        ("checks", "versions,tests,quantisers,layer linear,task multilayer", 6, 0),
        ("speed", "PTB LSTM", 3, 5),
        ("memory", "ResNet-20", 3, 5),
    ],
)
def test_gpu_bench_parts_run_once_on_cpu(part, only, ok, left_out, folder):
    assert hour.main([part, "--dry", "--only", only]) == 0
    summary, rows = read(folder, part)
    assert (
        summary["ok"],
        len(summary["left out"]),
        summary["failed"],
        summary["left"],
    ) == (
        ok,
        left_out,
        {},
        [],
    )
    assert set(summary["left out"].values()) <= {
        "steps are not captured: the device is cpu"
    }
    assert hour.main([part, "--dry", "--only", only]) == 0
    assert read(folder, part) == (summary, rows)
    if part == "speed":
        assert summary["values"]["PTB LSTM, float32"]["ms"] > 0
        assert summary["values"]["PTB LSTM, quantised"]["ratio"] > 0


@pytest.mark.parametrize(
    ("kind", "family"),
    [("plain torch captured", "reference"), ("quantised captured", "active")],
)
def test_gpu_bench_speed_captures_requested_backend(kind, family, monkeypatch):
    """Replace the CUDA graph by a tape; the first steps reveal the recorded backend."""
    monkeypatch.setattr(session, "unsupported_reason", lambda device, fixed_shape: "")
    monkeypatch.setattr(session, "CudaRecorder", lambda device: TapeRecorder())
    monkeypatch.setattr(parts, "WARM_UP", 5)
    backend()  # loads the kernels
    before, step = operators.active, session.Session.step
    families = set()

    def watched_step(self, *args):
        families.add(operators.active)
        return step(self, *args)

    monkeypatch.setattr(session.Session, "step", watched_step)
    values = parts.speed(
        "PTB LSTM", kind, stages.Options("speed", "cpu", True, 60.0, None, Path())
    )
    assert values["ms"] > 0
    assert not values["failed"]  # such as "no step was captured"
    assert families == {torch.ops.cpt_reference if family == "reference" else before}
    assert operators.active is before


def test_gpu_bench_packing_sums_process_rates(folder, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["-c", "quantised", "cpu", "0.01"])
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    exec(parts.PACKED)  # what each of them does
    ready, rate = capfd.readouterr().out.split()
    assert (ready, float(rate) > 0) == ("ready", True)
    monkeypatch.setattr(
        parts, "PACKED", "print('ready', flush=True); input(); print(2.5)"
    )
    assert hour.main(["packing", "--dry"]) == 0
    found = read(folder, "packing")[0]["values"]
    assert {
        stage: (v["steps_per_second"], v["slowest"]) for stage, v in found.items()
    } == {
        "1 at a time, quantised": (2.5, 2.5),
        "2 at a time, quantised": (5.0, 2.5),
    }


@pytest.fixture
def speed(folder, monkeypatch):
    """Return a function that runs given stages as the part "speed"; it returns the status, summary and rows."""

    def run(*options, **given_stages):
        monkeypatch.setitem(hour.PARTS, "speed", lambda options: given_stages)
        status = hour.main(["speed", "--dry", *options])
        return status, *read(folder, "speed")

    return run


def test_gpu_bench_failed_stage_is_isolated(speed):
    """Run the remaining stages, and retry a failed stage only with ``--again``."""
    calls = []

    def breaks():
        calls.append("breaks")
        if len(calls) < 3:
            raise ZeroDivisionError("no luck")
        return {}

    def missing():
        with explain_missing_extra("graph", "ogb"):
            importlib.import_module("no_such_library")

    def renamed():
        raise ImportError("cannot import name 'train' from 'cpt_lab'")

    given_stages = {
        "first": lambda: {"ms": 1.0},
        "breaks": breaks,
        "missing": missing,
        "renamed": renamed,
        "wrong": lambda: {"failed": "NaN"},
    }
    status, summary, rows = speed(**given_stages)
    assert status == 1
    failed = dict(summary["failed"])
    assert failed.pop("renamed").startswith("ImportError: cannot import name")
    assert failed == {"breaks": "ZeroDivisionError: no luck", "wrong": "NaN"}
    reason = summary["left out"].pop("missing")
    assert reason.startswith("no_such_library cannot be imported")
    assert not summary["left out"]
    first, second = [row["traceback"] for row in rows if "traceback" in row]
    assert "in breaks" in first
    assert "in renamed" in second
    assert speed(**given_stages)[0] == 1
    assert calls == ["breaks"]
    for _ in range(2):
        status, summary, _ = speed("--again", **given_stages)
        assert status == 1
    assert set(summary["failed"]) == {"renamed", "wrong"}


def test_gpu_bench_stops_at_limit_and_resumes(speed):
    given_stages = {
        "slow": lambda: time.sleep(0.05) or {},
        "next": lambda: {"ms": 2.0},
    }
    status, summary, _ = speed("--seconds", "0.02", **given_stages)
    assert (status, summary["left"]) == (3, ["next"])
    assert speed(**given_stages)[0] == 0


def test_gpu_bench_retries_deadly_stage_once(folder, speed):
    where = stages.describe_environment("cpu")
    started = {"stage": "deadly", "status": "started", "where": where}
    for _ in range(2):
        stages.append_row(folder / "speed.jsonl", started)
    with open(folder / "speed.jsonl", "a") as file:
        file.write('{"stage": "next", "sta')  # killed while it wrote
    status, summary, rows = speed(deadly=lambda: {"ms": 1.0}, next=lambda: {"ms": 2.0})
    assert status == 1
    assert summary["failed"] == {"deadly": "it ended its process 2 times"}
    assert summary["values"] == {"next": {"ms": 2.0}}
    assert len(rows) == 4


@pytest.mark.parametrize("other", [{"torch": "2.0.0"}, {"commit": "0" * 40}])
def test_gpu_bench_stage_of_other_environment_runs_again(other, folder, speed):
    where = stages.describe_environment("cpu") | other
    row = {"stage": "first", "status": "ok", "values": {"ms": 9.0}, "where": where}
    stages.append_row(folder / "speed.jsonl", row)
    status, summary, _ = speed(first=lambda: {"ms": 1.0})
    assert (status, summary["values"]) == (0, {"first": {"ms": 1.0}})


@pytest.mark.parametrize(
    ("kind", "baseline"),
    [
        ("float32 captured", ""),
        ("quantised", "float32"),
        ("per operation", "float32"),
        ("quantised captured", "float32 captured"),
        ("quantised captured TF32", "float32 captured TF32"),
        ("quantised integer shared steps captured", "float32 captured"),
    ],
)
def test_gpu_bench_speed_divides_by_same_capture(kind, baseline, folder, monkeypatch):
    """Compare captured steps with captured float32 steps, and those in TF32 with each other."""
    options = stages.Options("speed", "cpu", True, 60.0, None, folder)
    where = stages.describe_environment("cpu")
    for i, name in enumerate(models.KINDS):
        values = {"ms": 2.0**i}
        row = {"stage": f"LSTM, {name}", "status": "ok", "values": values}
        stages.append_row(options.rows, row | {"where": where})
    monkeypatch.setattr(parts, "_step", lambda *args: (None, lambda: None))
    monkeypatch.setattr(parts, "measure_step", lambda *args: {"ms": 1.0})
    monkeypatch.setattr(parts, "_find_fault", lambda *args: "")
    values = parts.speed("LSTM", kind, options)
    assert values.get("baseline", "") == baseline
    if baseline:
        assert values["ratio"] == 0.5 ** models.KINDS.index(baseline)


class Nan(nn.Module):
    """Module whose output is NaN."""

    def forward(self, x):
        return x * math.nan


def test_gpu_bench_layer_check_fails_on_nan(monkeypatch):
    broken = (lambda: nn.Sequential(nn.Linear(8, 8), Nan()), (4, 8))
    monkeypatch.setitem(checks.LAYERS, "broken", broken)
    assert checks.layer("broken", "cpu")["failed"].startswith("nan of the largest")
    assert "failed" not in checks.layer("linear", "cpu")


@pytest.mark.parametrize(
    ("loss", "first_loss", "fault"),
    [
        (1.0, 1.0, ""),
        (math.nan, 1.0, "the resumed run is nan"),
        (1.0, math.nan, "the first loss is nan"),
    ],
)
def test_gpu_bench_task_check_fails_on_nan(loss, first_loss, fault, monkeypatch):
    history = {"loss": [1.0, loss, 1.0]}
    run = SimpleNamespace(history=history, captured=False, uncaptured_reason="")
    monkeypatch.setattr(checks, "train", lambda *args, **options: run)
    monkeypatch.setattr(checks, "_first_loss", lambda *args: first_loss)
    details = checks.task("multilayer perceptron", "cpu")
    assert details.get("failed", "").startswith(fault)
    assert ("failed" in details) == bool(fault)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_bench_without_cuda_names_dry_run(capsys):
    with pytest.raises(SystemExit):
        hour.main(["speed"])
    message = "torch sees no CUDA device; --dry rehearses on the CPU"
    assert message in capsys.readouterr().err


GRAPH = cpt.Graph.from_edges(
    *torch.randint(0, 30, (2, 200), generator=torch.Generator().manual_seed(0)), 30
)
SAME_WORK = {
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),)),
    "linear": (lambda: nn.Linear(6, 4), (torch.randn(5, 7, 6),)),
    "LSTM": (lambda: nn.LSTM(6, 4), (torch.randn(5, 3, 6),)),
    "GCN that widens": (lambda: cpt.GraphConv(6, 9), (GRAPH, torch.randn(30, 6))),
    "GCN that narrows": (lambda: cpt.GraphConv(9, 6), (GRAPH, torch.randn(30, 9))),
}


@pytest.mark.parametrize("name", SAME_WORK)
def test_gpu_bench_unfused_layers_equal_fused_ones(name):
    """Compute equal values in both timed variants, and equal gradients up to rounding noise."""
    make, inputs = SAME_WORK[name]
    torch.manual_seed(0)
    fused, plain = nn.Sequential(make()), nn.Sequential(make())
    plain.load_state_dict(fused.state_dict())
    for p in [*fused.parameters(), *plain.parameters()]:
        if p.dim() == 1 and name == "LSTM":
            nn.init.zeros_(p)  # the second bias of torch's LSTM
    cpt.quantize_(fused)
    assert models.take_apart(plain) == 1

    def output_and_gradient(model, precision):
        with precision:
            y = model[0](*inputs)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
        weight = "weight_ih_l0" if name == "LSTM" else "weight"
        return y.detach(), model[0].get_parameter(weight).grad

    precision = cpt.precision(fused, models.BITS, q_grad=models.Q_GRAD)
    y, gradient = output_and_gradient(fused, precision)
    plain_y, plain_gradient = output_and_gradient(plain, nullcontext())
    torch.testing.assert_close(y, plain_y, atol=1e-5, rtol=1e-5)
    difference = (gradient - plain_gradient).norm() / gradient.norm()
    assert difference < 0.05
