"""Pinned numerics: roundings, noise keys and first losses equal those of the stored file."""

import json
from dataclasses import replace

import pytest
import torch

from bench import pinned_losses
from bench.pinned_losses import FILE, HINT, RUNS, Pinned
from cpt_core.numerics import NUMERICS
from cpt_core.quantization import rounding

STORED = json.loads(FILE.read_text())
KERNELS = ("reference", "cpp")


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request):
    if request.param == "cpp":
        request.getfixturevalue("cpp_kernels")
    with pinned_losses.computing_with(request.param):
        yield request.param


def changes_of(name, arm):
    same_machine = pinned_losses.describe_machine() == STORED["machine"]
    stored = STORED["runs"][f"{name} {arm}"]
    return pinned_losses.find_changes(
        pinned_losses.pin_run(pinned_losses.tiny_spec(name, arm)), stored, same_machine
    )


def test_numerics_version_matches_stored_losses():
    assert STORED["numerics"] == NUMERICS, "run `python -m bench.pinned_losses`"
    assert set(STORED["runs"]) == {f"{name} {arm}" for name, arm in RUNS}
    for pinned in STORED["runs"].values():
        assert len(set(pinned["losses"])) == pinned_losses.STEPS


DEAR = ("entailment_bert", "detection_retinanet")
CASES = [
    pytest.param(*run, marks=pytest.mark.slow if run[0] in DEAR else ()) for run in RUNS
]


@pytest.mark.parametrize(("name", "arm"), CASES)
def test_training_losses_match_stored_values(kernels, name, arm):
    changes = changes_of(name, arm)
    assert not changes, (
        f"{name} {arm} on {kernels} kernels: {'; '.join(changes)}; {HINT}"
    )


def test_roundings_match_stored_values(kernels):
    found, stored = pinned_losses.pin_roundings(), STORED["roundings"]
    changed = [name for name in stored | found if found.get(name) != stored.get(name)]
    assert not changed, (
        f"roundings on {kernels} kernels changed: {', '.join(changed)}; {HINT}"
    )


def test_pinned_roundings_detect_changed_noise(monkeypatch):
    """Detect changed noise in stochastic roundings and in losses of the recording machine."""
    real = rounding.hash_noise
    monkeypatch.setattr(rounding, "hash_noise", lambda key, count: real(key + 1, count))
    with pinned_losses.computing_with("reference"):
        found = pinned_losses.pin_roundings()
        run = pinned_losses.pin_run(pinned_losses.tiny_spec("image_mlp", "CR"))
    changed = {name for name in found if found[name] != STORED["roundings"][name]}
    assert changed == {name for name in found if name.endswith("stochastic")}
    stored = STORED["runs"]["image_mlp CR"]
    assert run.losses[0] == pytest.approx(stored["losses"][0], rel=1e-4)
    assert run.losses[1:] != stored["losses"][1:]


def test_pinned_losses_detect_changed_noise_keys():
    """Detect noise keys of another seed on every machine."""
    spec = pinned_losses.tiny_spec("image_mlp", "CR")
    with pinned_losses.computing_with("reference"):
        run = pinned_losses.pin_run(replace(spec, seed=1))
    changes = pinned_losses.find_changes(
        run, STORED["runs"]["image_mlp CR"], same_machine=False
    )
    assert changes[0] == "the noise keys of its layers changed"


@pytest.mark.parametrize(
    ("change", "same_machine", "said"),
    [
        ({}, True, []),
        ({"last": 1e-7}, True, ["loss 2 is 2.0000001, it was 2.0"]),
        ({"last": 1e-1}, False, []),
        ({"first": 1e-3}, False, []),
        (
            {"first": 0.25},
            False,
            ["the first loss is 1.25, it was 1.0 on another machine"],
        ),
        ({"noise_keys": "b"}, False, ["the noise keys of its layers changed"]),
    ],
)
def test_find_changes_describes_differences(change, same_machine, said):
    losses = [1.0 + change.get("first", 0.0), 2.0 + change.get("last", 0.0)]
    found = Pinned(losses, change.get("noise_keys", "a"))
    assert (
        pinned_losses.find_changes(
            found, {"losses": [1.0, 2.0], "noise_keys": "a"}, same_machine
        )
        == said
    )


def test_computing_with_restores_backend_and_threads():
    before = torch.get_num_threads(), pinned_losses.gemm_backend.active
    with pinned_losses.computing_with("reference"):
        assert (torch.get_num_threads(), pinned_losses.gemm_backend.active) == (
            1,
            "torch",
        )
    assert (torch.get_num_threads(), pinned_losses.gemm_backend.active) == before
