"""Autocast, TF32 and channels last as fields of a recipe, in training and evaluation; device selection."""

from dataclasses import replace

import pytest
import torch
from helpers import RECIPES, refused, smoke_spec, specs_of

from cpt_lab.analysis.run_table import table
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import SCALES
from cpt_lab.experiments.spec import run_spec
from cpt_lab.sweeps import worker
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.sweeps.worker import Job, run_all
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.device import (
    DeviceNotFoundError,
    arithmetic,
    choose_device,
    cuda_provenance,
    resolve_device,
)
from cpt_lab.training.session import Session
from cpt_lab.training.train import evaluate, train

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
SHORT = {"steps": 4, "n_cycles": 2, "evaluate_every": 2}


def digits(**changes):
    return smoke_spec("digits", model="resnet8_w8", **{**SHORT, **changes})


def at(scale, **changes):
    return run_spec(
        replace(recipe(scale, "cifar10"), **changes), "CR", q_max=8, seed=0, scale=scale
    )


@pytest.fixture
def flags():
    """Return torch's TF32 settings, and restore them afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    yield lambda: (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_recipes_keep_default_arithmetic():
    for scale in SCALES:
        for name, r in RECIPES[scale].items():
            assert (r.autocast, r.tf32, r.channels_last) == ("", False, False), name


@pytest.mark.parametrize("autocast", ["", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_session_applies_autocast_and_channels_last(autocast, channels_last):
    spec = digits(autocast=autocast, channels_last=channels_last)
    session = Session(load_task_class(spec), spec)
    (middle,) = (
        m for name, m in session.model.named_modules() if name == "layer2.0.bn1"
    )
    seen = []

    def note(module, inputs, output):
        (x,) = inputs
        last = (
            x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        )
        seen.append((module.training, x.dtype == torch.bfloat16, last))

    middle.register_forward_hook(note)
    session.step(next(session.task.batches(0)), 0.01)
    evaluate(session, 1, "q_max")
    assert set(seen) == {
        (training, autocast != "", channels_last) for training in (True, False)
    }
    assert all(p.dtype == torch.float32 for p in session.model.parameters())
    assert all(
        v.dtype == torch.float32
        for state in session.optimizer.state.values()
        for v in state.values()
    )


SMALL = {
    "digits": {},
    "digit-scenes": {
        "batch": 2,
        "train_images": 4,
        "valid_images": 2,
        "test_images": 2,
    },
    "digits-graph": {},
    "pydoc": {"valid_tokens": 500, "test_tokens": 500},
    "templates": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", SMALL)
def test_session_trains_every_task_under_autocast(dataset):
    small = {**SHORT, **SMALL[dataset], "steps": 2, "evaluate_every": 0}
    specs = [
        smoke_spec(dataset, **small, autocast=autocast) for autocast in ("", "bfloat16")
    ]
    plain, rounded = (train(load_task_class(spec), spec) for spec in specs)
    assert rounded.status == plain.status == "ok"
    assert rounded.history["loss"] != plain.history["loss"]
    assert rounded.history["loss"] == pytest.approx(plain.history["loss"], rel=0.1)
    assert rounded.metric("loss") != plain.metric("loss")


REFUSED = {
    "tf32": (
        {"tf32": True},
        "tf32 is for CUDA; this run of mlp6 on digits is on device cpu",
    ),
    "channels_last": (
        {"channels_last": True},
        "channels_last is for convolutions in two dimensions; mlp6 has none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_session_rejects_arithmetic_without_effect(name, tmp_path):
    changes, message = REFUSED[name]
    (spec,) = specs_of("CR", **changes)
    refused(message, Session, load_task_class(spec), spec)
    refused(message, run_grid, [spec], tmp_path / "rows.jsonl", workers=0)
    assert not (tmp_path / "rows.jsonl").exists()


def pretend(monkeypatch, capability):
    """Simulate a machine with a GPU, as far as torch reports it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr(
        "torch.cuda.get_device_capability", lambda device=None: capability
    )
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "some GPU")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91002)
    monkeypatch.setattr(
        "torch.utils.collect_env.get_nvidia_driver_version", lambda run: "580.65.06"
    )


def test_choose_device_rejects_tf32_on_old_gpu(monkeypatch):
    spec = at("paper", tf32=True)
    pretend(monkeypatch, (8, 0))
    assert choose_device("cuda", spec) == "cuda"
    pretend(monkeypatch, (7, 5))
    refused(
        r"tf32 needs a GPU of compute capability 8\.0; some GPU has 7\.5",
        choose_device,
        "cuda",
        spec,
    )


CHOSEN = {  # scale, device asked for -> on a machine with a GPU
    ("smoke", "auto"): "cpu",
    ("smoke", "cuda"): "cpu",
    ("demo", "auto"): "cpu",
    ("demo", "cuda"): "cuda",
    ("demo", "cpu"): "cpu",
    ("paper", "auto"): "cuda",
    ("paper", "cuda"): "cuda",
    ("paper", "cpu"): "cpu",
}


@pytest.mark.parametrize(("scale", "asked"), CHOSEN)
def test_choose_device_keeps_demos_on_cpu(scale, asked, monkeypatch):
    spec = at(scale)
    pretend(monkeypatch, (9, 0))
    assert choose_device(asked, spec) == CHOSEN[scale, asked]
    pretend(monkeypatch, None)
    if asked != "cuda":
        assert resolve_device(asked, spec) == "cpu"  # to plan with
        if (scale, asked) != ("paper", "auto"):
            assert choose_device(asked, spec) == "cpu"


NO_GPU = {  # the CUDA that torch is built for, what torch says when it starts that, what is said of both
    "no driver": (
        "13.2",
        RuntimeError("Found no NVIDIA driver on your system. Please"),
        "Found no NVIDIA driver",
    ),
    "old driver": (
        "13.2",
        RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040). Please update"
        ),
        r"too old \(found version 12040\) \(torch .* is built for CUDA 13\.2, which needs a driver .*, 580 or newer\)",
    ),
    "CUDA 12": (
        "12.8",
        RuntimeError("No CUDA GPUs are available"),
        r"available \(.*CUDA 12\.8, .*, 525 or newer",
    ),
    "a later CUDA": (
        "20.0",
        AssertionError("whatever"),
        r"no CUDA device: whatever \(.* for CUDA 20\.0\)",
    ),
    "no reason": ("13.2", None, "torch sees no CUDA device: there is none"),
    "none in torch": (None, None, "torch .* is built without CUDA"),
}


@pytest.mark.parametrize("case", NO_GPU)
@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_choose_device_rejects_unrequested_long_cpu_runs(
    asked, case, monkeypatch, tmp_path
):
    built, error, said = NO_GPU[case]
    spec = at("paper")

    def init():
        if error is not None:
            raise error

    pretend(monkeypatch, None)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.cuda.init", init)
    with pytest.raises(DeviceNotFoundError, match=said) as found:
        choose_device(asked, spec)
    assert (
        "--device cpu, device='cpu' in Python, -p device cpu" in str(found.value)
    ) == (asked == "auto")
    with pytest.raises(
        DeviceNotFoundError, match=said
    ):  # and no row that says "failed"
        run_grid([spec], tmp_path / "rows.jsonl", device=asked, workers=0)
    assert not (tmp_path / "rows.jsonl").exists()


def test_run_without_its_gpu_fails_without_diverging(monkeypatch, tmp_path):
    """Leave the row missing, as on one worker of a cluster, instead of counting it as diverged."""
    pretend(monkeypatch, None)
    row = run_all(Job(at("paper"), tmp_path / "rows.jsonl"))[0].row
    assert row["status"] == "failed"
    assert "DeviceNotFoundError" in row["error"]
    assert not table([row]).diverged.any()


@pytest.mark.parametrize("tf32", [False, True])
def test_arithmetic_sets_tf32_and_records_it(tf32, flags, monkeypatch):
    found = digits(tf32=tf32).recipe
    with arithmetic(found, torch.device("cpu")):
        assert flags() == (False, True)  # not the CPU's to change
    with arithmetic(found, torch.device("cuda")):
        assert flags() == (tf32, tf32)
    assert flags() == (tf32, tf32)  # the backward pass comes after
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    pretend(monkeypatch, (9, 0))
    said = cuda_provenance(found)
    assert said == {
        "gpu": "some GPU",
        "runtime": torch.version.cuda,
        "cudnn": 91002,
        "driver": "580.65.06",
        "tf32": {"cublas": tf32, "cudnn": tf32},
    }


def test_provenance_has_cuda_for_cuda_rows_only(tmp_path, monkeypatch, flags):
    (spec,) = specs_of("CR")
    assert "cuda" not in run_all(Job(spec, tmp_path / "cpu.jsonl"))[0].row["provenance"]
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(worker, "choose_device", lambda device, spec: "cuda")
    row = run_all(Job(spec, tmp_path / "cuda.jsonl"))[0].row  # fails: there is none
    assert row["provenance"]["cuda"]["gpu"] == row["device"] == "some GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_matmul_is_float32_or_tf32(flags):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    w = torch.randn(64, 256, 1, 1, generator=torch.Generator().manual_seed(1)).cuda()
    exact = x.double() @ w.double()[:, :, 0, 0].T
    for tf32, low, high in ((False, 0, 2e-5), (True, 2e-4, 3e-3)):
        with arithmetic(digits(tf32=tf32).recipe, torch.device("cuda")):
            for found in (
                x @ w[:, :, 0, 0].T,
                torch.conv2d(x[:, :, None, None], w)[:, :, 0, 0],
            ):
                error = ((found - exact).abs().max() / exact.abs().max()).item()
                assert low <= error < high


@pytest.mark.parametrize("asked", [None, "0", "1"])
def test_deterministic_switch_is_applied_and_recorded(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what is set stays
    monkeypatch.setenv("CPT_DETERMINISTIC", asked or "")
    try:
        (row,) = run_grid([smoke_spec("digits")], tmp_path / "rows.jsonl", workers=0)
        assert torch.are_deterministic_algorithms_enabled() == (asked == "1")
    finally:
        torch.use_deterministic_algorithms(False)
    assert row["status"] == "ok"
    switches = row["provenance"]["machine"]["switches"]
    assert switches["CPT_DETERMINISTIC"] == (asked or "")
    assert switches["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
