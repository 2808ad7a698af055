"""One run on two gloo processes: equal to one process, resumable, with errors for unsupported settings."""

import datetime
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from cpt_extras.integrations.distributed import own_ranges, synced_ranges
from cpt_extras.kernels import operators
from cpt_lab.data.image_batches import array_batches
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.paths import ROOT
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training import process_group, session
from cpt_lab.training.checkpoint import load_checkpoint
from cpt_lab.training.session import Session, quant_config
from cpt_lab.training.train import Stopped, train

pytestmark = pytest.mark.slow

SPEC = run_spec(
    replace(recipe("smoke"), steps=24, evaluate_every=12),
    "CR",
    q_max=8,
    seed=3,
    scale="smoke",
)
FEW = {
    "steps": 3,
    "n_cycles": 1,
    "layers": 1,
    "train_pairs": 300,
    "valid_pairs": 60,
    "test_pairs": 60,
}
PAIRS = run_spec(
    replace(recipe("smoke", "templates"), **FEW),
    "static 6",
    q_max=8,
    seed=0,
    scale="smoke",
)


def nearest(*given):
    return quant_config(*given).with_gradient_rounding("nearest")


def trained(spec=SPEC, **options):
    """Train with gradients rounded to nearest and ranges of all processes; return the results."""
    with patch.object(session, "quant_config", nearest), process_group.global_ranges():
        run = train(load_task_class(spec), spec, **options)
    weights = torch.cat([x.flatten() for x in run.model.state_dict().values()])
    return {
        "loss": run.history["loss"],
        "weights": weights,
        "bitops": run.bitops,
        "metrics": run.metrics,
    }


def worker(rank, folder):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    distributed.init_process_group(
        "gloo", f"file://{folder}/group", timeout, world_size=2, rank=rank
    )
    states = []
    found = {
        "whole": trained(on_step=lambda *_: states.append(torch.get_rng_state())),
        "pairs": trained(PAIRS),
    }
    steps = iter(range(100))
    asked = lambda: rank == 1 and next(steps) == 9  # noqa: E731 - one process alone is told to stop
    with pytest.raises(Stopped, match="at step 10 of 24"):
        trained(checkpoint=folder / "run.pt", should_stop=asked)
    distributed.barrier()
    found["resumed"] = trained(checkpoint=folder / "run.pt")
    with synced_ranges():
        active = operators.active
        with own_ranges():
            found["own"] = operators.active is active.ops
        with pytest.raises(ValueError, match="the first one's"):
            process_group.run_on_first(lambda: int("the first one's"))
    found["random"] = states[0]
    torch.save(found, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder written by two torchrun processes: by ``worker``, then by a grid on the command line."""
    folder = tmp_path_factory.mktemp("run")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
    ]
    surroundings = os.environ | {
        "CPT_RUNS_DIR": str(folder / "runs"),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*command, folder],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize(("kind", "spec"), [("whole", SPEC), ("pairs", PAIRS)])
def test_torchrun_two_processes_equal_one(kind, spec, both):
    alone, (first, second) = trained(spec), (found[kind] for found in both)
    torch.testing.assert_close(first["loss"][:2], alone["loss"][:2], rtol=1e-3, atol=0)
    torch.testing.assert_close(
        first["loss"], alone["loss"], rtol=2e-2, atol=0
    )  # sums of another order flip roundings
    assert torch.equal(first["weights"], second["weights"])
    assert first["loss"] == second["loss"]
    assert first["bitops"] == alone["bitops"]  # of the whole batch
    assert first["metrics"] == second["metrics"]


def test_torchrun_resumes_bit_for_bit(both):
    for found in both:
        assert found["resumed"]["loss"] == found["whole"]["loss"]
        assert torch.equal(found["resumed"]["weights"], found["whole"]["weights"])


def test_torchrun_processes_draw_separate_dropout(both):
    """Draw different dropout per process, and evaluate on the ranges of the process."""
    assert not torch.equal(both[0]["random"], both[1]["random"])
    assert [found["own"] for found in both] == [True, True]


def test_torchrun_rejects_different_number_of_processes(folder):
    with pytest.raises(
        ValueError, match="was written by 2 processes, and 1 would go on from it"
    ):
        load_checkpoint(folder / "run.pt", Session(load_task_class(SPEC), SPEC))


@pytest.mark.parametrize(
    ("task", "count", "options", "message"),
    [
        (
            "digits",
            3,
            {},
            r"share batches of 64 of digits \(image\): .* a number that divides the batch",
        ),
        (
            "digits-graph",
            2,
            {},
            r"of digits-graph \(graph\): images and sentence pairs alone",
        ),
        ("pydoc", 2, {}, r"of pydoc \(language_model\): images and"),
        (
            "digits",
            2,
            {"workers": 2},
            "one run at a time; leave out workers and executor",
        ),
    ],
)
def test_torchrun_rejects_unsupported_settings_before_runs(
    task, count, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(process_group, "size", lambda: count)
    spec = run_spec(recipe("smoke", task), "CR", q_max=8, seed=0, scale="smoke")
    with pytest.raises(ValueError, match=message):
        run_grid([spec], tmp_path / "rows.jsonl", **options)
    assert not list(tmp_path.iterdir())


def test_torchrun_shares_partition_the_batch(monkeypatch):
    task = load_task_class(SPEC)(SPEC, torch.device("cpu"))
    whole = next(
        array_batches(
            task.data.train, task.data, task.recipe, 3, torch.device("cpu"), 0
        )
    )
    parts = []
    monkeypatch.setattr(process_group, "size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(process_group, "rank", lambda rank=rank: rank)
        parts.append(next(task.shared_batches(0, process_group.local_part)))
        assert process_group.local_part([0, 1, 2, 3, 4]) == [[0, 1], [2, 3]][rank]
        assert process_group.local_part([7]) == [7]  # too few for all: everybody's
    for x, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(shares), x)


def test_torchrun_runs_a_grid(folder):
    assert (folder / "said").read_text().splitlines()[-1] == "1 ok"
    (row,) = map(
        json.loads, (folder / "runs/smoke/image.jsonl").read_text().splitlines()
    )
    spec = run_spec(
        replace(recipe("smoke"), steps=24), "CR", q_max=8, seed=0, scale="smoke"
    )
    assert (row["key"], row["provenance"]["processes"], row["steps"]) == (
        spec.key,
        2,
        24,
    )
    assert not list((folder / "runs").rglob("*.pt"))


if __name__ == "__main__":  # as torchrun starts it
    worker(int(os.environ["RANK"]), Path(sys.argv[1]))
    sys.argv[1:] = "run digits/mlp6 --scale smoke --arms CR --seeds 0".split()
    with patch.object(
        designs, "recipe", lambda *given: replace(recipe(*given), steps=24)
    ):
        runpy.run_module("cpt_lab", run_name="__main__")
