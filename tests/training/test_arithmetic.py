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
    return smoke_spec("digits", model="resnet8_w8", **SHORT, **changes)


def cifar(scale, **changes):
    changed = replace(recipe(scale, "cifar10"), **changes)
    return run_spec(changed, "CR", q_max=8, seed=0, scale=scale)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture
def flags():
    """Return a function that gives torch's TF32 settings, and restore them afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = False, True
    yield lambda: (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32, cudnn.allow_tf32 = before


def pretend_gpu(monkeypatch, capability):
    """Simulate a machine with a GPU, as far as torch reports it; None simulates one without."""
    driver = "torch.utils.collect_env.get_nvidia_driver_version"
    for name, value in {
        "torch.cuda.is_available": lambda: capability is not None,
        "torch.cuda.get_device_capability": lambda device=None: capability,
        "torch.cuda.get_device_name": lambda device=None: "some GPU",
        "torch.cuda.reset_peak_memory_stats": lambda: None,
        "torch.backends.cudnn.version": lambda: 91002,
        driver: lambda run: "580.65.06",
    }.items():
        monkeypatch.setattr(name, value)


# --- arithmetic of a recipe -----------------------------------------------------------------------


def test_recipes_keep_default_arithmetic():
    for scale in SCALES:
        for name, r in RECIPES[scale].items():
            assert (r.autocast, r.tf32, r.channels_last) == ("", False, False), name


@pytest.mark.parametrize("autocast", ["", "bfloat16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_session_applies_autocast_and_channels_last(autocast, channels_last):
    spec = digits(autocast=autocast, channels_last=channels_last)
    session, seen = Session(load_task_class(spec), spec), set()

    def note(module, inputs, output):
        (x,) = inputs
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        is_last = is_last and not x.is_contiguous()
        seen.add((module.training, x.dtype == torch.bfloat16, is_last))

    session.model.get_submodule("layer2.0.bn1").register_forward_hook(note)
    session.step(next(session.task.batches(0)), 0.01)
    evaluate(session, 1, "q_max")
    assert seen == {(mode, autocast != "", channels_last) for mode in (True, False)}
    states = session.optimizer.state.values()
    tensors = [value for state in states for value in state.values()]
    for tensor in (*session.model.parameters(), *tensors):
        assert tensor.dtype == torch.float32


IMAGES = {"train_images": 4, "valid_images": 2, "test_images": 2}
SMALL = {
    "digits": {},
    "digit-scenes": {"batch": 2, **IMAGES},
    "digits-graph": {},
    "pydoc": {"valid_tokens": 500, "test_tokens": 500},
    "templates": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", SMALL)
def test_session_trains_every_task_under_autocast(dataset):
    small = {**SHORT, **SMALL[dataset], "steps": 2, "evaluate_every": 0}
    plain, rounded = (
        train(load_task_class(spec), spec)
        for spec in (
            smoke_spec(dataset, **small, autocast=autocast)
            for autocast in ("", "bfloat16")
        )
    )
    assert rounded.status == plain.status == "ok"
    assert rounded.history["loss"] != plain.history["loss"]
    assert rounded.history["loss"] == pytest.approx(plain.history["loss"], rel=0.1)
    assert rounded.metric("loss") != plain.metric("loss")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("tf32", "tf32 is for CUDA; this run of mlp6 on digits is on device cpu"),
        (
            "channels_last",
            "channels_last is for convolutions in two dimensions; mlp6 has none",
        ),
    ],
)
def test_session_rejects_arithmetic_without_effect(field, message, store):
    (spec,) = specs_of("CR", **{field: True})
    refused(message, Session, load_task_class(spec), spec)
    refused(message, run_grid, [spec], store, workers=0)
    assert not store.exists()


@pytest.mark.parametrize("tf32", [False, True])
def test_arithmetic_sets_tf32_and_records_it(tf32, flags, monkeypatch):
    changed = digits(tf32=tf32).recipe
    with arithmetic(changed, torch.device("cpu")):
        assert flags() == (False, True)  # not the CPU's to change
    with arithmetic(changed, torch.device("cuda")):
        assert flags() == (tf32, tf32)
    assert flags() == (tf32, tf32)  # the backward pass comes after
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    pretend_gpu(monkeypatch, (9, 0))
    assert cuda_provenance(changed) == {
        "gpu": "some GPU",
        "runtime": torch.version.cuda,
        "cudnn": 91002,
        "driver": "580.65.06",
        "tf32": {"cublas": tf32, "cudnn": tf32},
    }


def test_provenance_has_cuda_for_cuda_rows_only(store, monkeypatch, flags):
    (spec,) = specs_of("CR")
    assert "cuda" not in run_all(Job(spec, store))[0].row["provenance"]
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(worker, "choose_device", lambda device, spec: "cuda")
    row = run_all(Job(spec, store.with_name("cuda.jsonl")))[0].row  # fails: no GPU
    assert row["provenance"]["cuda"]["gpu"] == row["device"] == "some GPU"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_matmul_is_float32_or_tf32(flags):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).cuda()
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).cuda()
    exact = x.double() @ w.double().T
    for tf32, low, high in ((False, 0, 2e-5), (True, 2e-4, 3e-3)):
        with arithmetic(digits(tf32=tf32).recipe, torch.device("cuda")):
            convolution = torch.conv2d(x[..., None, None], w[..., None, None])
            for result in (x @ w.T, convolution[:, :, 0, 0]):
                error = (result - exact).abs().max() / exact.abs().max()
                assert low <= error.item() < high


@pytest.mark.parametrize("switch", ["", "0", "1"])
def test_deterministic_switch_is_applied_and_recorded(switch, store, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # what is set stays
    monkeypatch.setenv("CPT_DETERMINISTIC", switch)
    try:
        (row,) = run_grid(specs_of("CR"), store, workers=0)
        assert torch.are_deterministic_algorithms_enabled() == (switch == "1")
    finally:
        torch.use_deterministic_algorithms(False)
    assert row["status"] == "ok"
    switches = row["provenance"]["machine"]["switches"]
    assert switches["CPT_DETERMINISTIC"] == switch
    assert switches["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


# --- devices --------------------------------------------------------------------------------------


def test_choose_device_rejects_tf32_on_old_gpu(monkeypatch):
    spec = cifar("paper", tf32=True)
    pretend_gpu(monkeypatch, (8, 0))
    assert choose_device("cuda", spec) == "cuda"
    pretend_gpu(monkeypatch, (7, 5))
    message = r"tf32 needs a GPU of compute capability 8\.0; some GPU has 7\.5"
    refused(message, choose_device, "cuda", spec)


@pytest.mark.parametrize(
    ("scale", "wanted", "device"),
    [
        ("smoke", "auto", "cpu"),
        ("smoke", "cuda", "cpu"),
        ("demo", "auto", "cpu"),
        ("demo", "cuda", "cuda"),
        ("demo", "cpu", "cpu"),
        ("paper", "auto", "cuda"),
        ("paper", "cuda", "cuda"),
        ("paper", "cpu", "cpu"),
    ],
)
def test_choose_device_keeps_demos_on_cpu(scale, wanted, device, monkeypatch):
    """Choose a device on a machine with a GPU, and on one without."""
    spec = cifar(scale)
    pretend_gpu(monkeypatch, (9, 0))
    assert choose_device(wanted, spec) == device
    pretend_gpu(monkeypatch, None)
    if wanted != "cuda":
        assert resolve_device(wanted, spec) == "cpu"  # to plan with
        if (scale, wanted) != ("paper", "auto"):
            assert choose_device(wanted, spec) == "cpu"


NO_DRIVER = "Found no NVIDIA driver"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)."
NO_GPU = {  # the CUDA that torch is built for, torch's error when it starts that, and our sentence
    "no driver": (
        "13.2",
        RuntimeError(f"{NO_DRIVER} on your system. Please"),
        NO_DRIVER,
    ),
    "old driver": (
        "13.2",
        RuntimeError(f"{OLD_DRIVER} Please update"),
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
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_choose_device_rejects_unrequested_long_cpu_runs(
    wanted, case, monkeypatch, store
):
    """Raise before any run, instead of storing failed rows."""
    cuda, error, message = NO_GPU[case]
    spec = cifar("paper")

    def init():
        if error is not None:
            raise error

    pretend_gpu(monkeypatch, None)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.init", init)
    with pytest.raises(DeviceNotFoundError, match=message) as caught:
        choose_device(wanted, spec)
    hint = "--device cpu, device='cpu' in Python, -p device cpu"
    assert (hint in str(caught.value)) == (wanted == "auto")
    options = {"device": wanted, "workers": 0}
    refused(message, run_grid, [spec], store, error=DeviceNotFoundError, **options)
    assert not store.exists()


def test_run_without_its_gpu_fails_without_diverging(monkeypatch, store):
    """Leave the row missing, as on one worker of a cluster, instead of counting it as diverged."""
    pretend_gpu(monkeypatch, None)
    row = run_all(Job(cifar("paper"), store))[0].row
    assert row["status"] == "failed"
    assert "DeviceNotFoundError" in row["error"]
    assert not table([row]).diverged.any()
