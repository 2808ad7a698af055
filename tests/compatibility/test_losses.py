"""Pinned numerics: roundings, noise keys and first losses equal those of the stored file."""

import json

import pytest

from bench import pinned_losses
from bench.pinned_losses import FILE, HINT, RUNS, Pinned
from cpt_core.numerics import NUMERICS

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
