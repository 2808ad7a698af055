"""Several processes, started by torchrun, against one: noise, ranges, checkpoints, sharded weights, runs of the lab."""

import copy
import datetime
import json
import os
import runpy
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import NEAREST, refused, running_ranges
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.precision import EXECUTION_MODES, LayerPrecision
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.integrations.data_parallel import KEY_BITS, key_offset
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

DRAWS, ROWS = 24, 16  # gradients; rows of data of a process
SCHEDULE = make_schedule("CR", q_min=3, q_max=8, total_steps=12, n_cycles=2)
NETS = {  # for rows of 8 numbers
    "linear": lambda: [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)],
    "tokens": lambda: [
        nn.Unflatten(1, (2, 4)),
        nn.Linear(4, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
        nn.Flatten(),
    ],
    "pictures": lambda: [
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 8, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 4),
    ],
}


def model_of(config=None, net="linear"):
    torch.manual_seed(0)
    return quantize_(nn.Sequential(*NETS[net]()), config)


def rows(seed, n=ROWS):
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def keys_of(model):
    return [int(p.noise_key) for p in layer_precisions(model).values()]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# --- what a process computes ----------------------------------------------------------------------


def gradient_errors(model, call, x):
    """Return the root mean square error of every parameter gradient rounded to 3 bits."""

    def gradients(q_grad):
        model.zero_grad()
        with precision(model, 8, q_grad=q_grad):
            call(x).cos().sum(1).mean().backward()
        return [whole(p.grad).clone() for p in model.parameters()]

    exact = gradients("float")
    draws = [gradients(3) for _ in range(DRAWS)]
    errors = []
    for gradient, *drawn in zip(exact, *draws, strict=True):
        errors.append((torch.stack(drawn) - gradient).square().mean().sqrt())
    return errors


def train_parallel(execution="simulated", state=None):
    """Train by DDP on data of this process; return weights, keys and bits, and the checkpoint of step two."""
    model, bits = model_of(QuantConfig(execution=execution)), []
    with torch.no_grad():
        model[0].weight.add_(distributed.get_rank())  # those of the first go to all
    parallel, optimizer = DistributedDataParallel(model), sgd(model)
    scheduler = PrecisionScheduler(parallel, SCHEDULE)
    if state is not None:
        model.load_state_dict(state["model"])
        scheduler.load_state_dict(state["precision"])
    for step in range(scheduler.last_step, 4):
        optimizer.zero_grad()
        bits.append([p.bits for p in layer_precisions(model).values()])
        parallel(rows(10 * step + distributed.get_rank())).cos().sum().backward()
        optimizer.step()
        scheduler.step()
        if scheduler.last_step == 2:
            parts = {"model": model, "precision": scheduler}
            state = copy.deepcopy({name: p.state_dict() for name, p in parts.items()})
    result = {
        "weights": [p.detach() for p in model.parameters()],
        "keys": keys_of(model),
        "bits": bits,
    }
    return result, state


def ranges_after(broadcast):
    """Return running ranges after two steps and an evaluation on data of this process."""
    model, rank = model_of(), distributed.get_rank()
    parallel = DistributedDataParallel(model, broadcast_buffers=broadcast)
    with precision(model, 4):
        for step in range(2):
            parallel(rows(10 * step + rank)).sum().backward()
        with torch.no_grad():
            parallel.eval()(rows(rank))
    return running_ranges(model)


def with_granularity(granularity, roles):
    """Return a config with a different granularity for some roles."""
    quantizers = dict(NEAREST.quantizers)
    for role in roles:
        changes = {"granularity": granularity, "running": False}
        quantizers[role] = replace(quantizers[role], **changes)
    return replace(NEAREST, quantizers=quantizers)


LINEAR_ROLES = [role for role in NEAREST.quantizers if "linear" in role]
PER_EXAMPLE = with_granularity("per_row", LINEAR_ROLES)  # one row of data each
PER_SAMPLE = with_granularity("per_sample_mean", ("conv_input", "conv_grad"))
E4M3 = QuantConfig(ladder=dict.fromkeys(range(3, 9), "e4m3"))
SYNCED = {
    "linear": ("linear", NEAREST),
    "tokens": ("tokens", NEAREST),
    "pictures": ("pictures", NEAREST),
    "pictures, the authors' third range": ("pictures", PER_SAMPLE),
    "e4m3": ("linear", E4M3.with_gradient_rounding("nearest")),
}


def losses(config, net="linear", rank=0, processes=1):
    """Return the losses of 12 training steps on the same 32 rows, split over the processes."""
    model = model_of(config, net)
    call = DistributedDataParallel(model) if processes > 1 else model
    optimizer = sgd(model, momentum=0.9)
    PrecisionScheduler(call, SCHEDULE, optimizer=optimizer)
    values = []
    for step in range(12):
        x = rows(step, 2 * ROWS)
        loss = call(x.chunk(processes)[rank]).cos().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    if rank == 0 and config is NEAREST:  # alone, on running ranges: it waits for nobody
        with precision(model.eval(), 8), torch.no_grad():
            model(x)
    return torch.stack(values)


SPEC = run_spec(
    replace(recipe("smoke"), steps=24, evaluate_every=12),
    "CR",
    q_max=8,
    seed=3,
    scale="smoke",
)
FEW_PAIRS = {"train_pairs": 100, "valid_pairs": 20, "test_pairs": 20, "hidden": 16}
PAIRS = run_spec(
    replace(recipe("smoke", "templates"), steps=3, n_cycles=1, layers=1, **FEW_PAIRS),
    "static 6",
    q_max=8,
    seed=0,
    scale="smoke",
)


def run_lab(spec=SPEC, **options):
    """Train with gradients rounded to nearest and ranges of all processes; return the results."""

    def nearest(*arguments):
        return quant_config(*arguments).with_gradient_rounding("nearest")

    with patch.object(session, "quant_config", nearest), process_group.global_ranges():
        run = train(load_task_class(spec), spec, **options)
    return {
        "loss": run.history["loss"],
        "weights": torch.cat([x.flatten() for x in run.model.state_dict().values()]),
        "bitops": run.bitops,
        "metrics": run.metrics,
    }


def results_of_layers(model, rank, folder):
    """Return what a converted model does in this process."""
    parallel = DistributedDataParallel(model)
    results = {"parallel": gradient_errors(model, parallel, rows(5))}
    integer = model_of(QuantConfig(execution="integer"))
    errors = gradient_errors(integer, DistributedDataParallel(integer), rows(5))
    results["integer"] = errors
    sharded = layer_by_layer(model_of(), distributed.init_device_mesh("cpu", (2,)))
    results["sharded"] = gradient_errors(sharded, sharded, rows(5))
    results["ranges"] = {b: ranges_after(broadcast=b) for b in (True, False)}
    results["trained"] = {}
    for execution in EXECUTION_MODES:
        results["trained"][execution], state = train_parallel(execution)
        if execution == "simulated":
            torch.save(state, folder / f"state{rank}.pt")
    distributed.barrier()
    # one process saves for all, the first as a rule
    states = [torch.load(folder / f"state{r}.pt") for r in (0, 1)]
    results["resumed"] = [train_parallel(state=state)[0] for state in states]
    own = [losses(c, rank=rank, processes=2) for c in (PER_EXAMPLE, NEAREST)]
    results["losses"] = own
    return results


def results_with_synced_ranges(rank):
    results, recurrent = {}, quantize_(nn.LSTM(4, 4))
    with synced_ranges():
        active = operators.active
        with own_ranges():
            results["own"] = operators.active is active.ops
        for name, (net, config) in SYNCED.items():
            results[name] = losses(config, net, rank, processes=2)
        message = "lstm_forward finds the ranges of several examples inside"
        with precision(recurrent, 8):
            refused(message, recurrent, torch.ones(2, 2, 4), error=RuntimeError)
        error = "the first one's"
        refused(error, process_group.run_on_first, lambda: int("the first one's"))
    return results


def results_of_lab(rank, folder):
    random_states = []

    def keep_state(*_):
        random_states.append(torch.get_rng_state())

    results = {"whole": run_lab(on_step=keep_state), "pairs": run_lab(PAIRS)}
    steps = iter(range(100))

    def stop():  # one process alone is told to stop
        return rank == 1 and next(steps) == 9

    with pytest.raises(Stopped, match="at step 10 of 24"):
        run_lab(checkpoint=folder / "run.pt", should_stop=stop)
    distributed.barrier()
    results["resumed"] = run_lab(checkpoint=folder / "run.pt")
    return results | {"random": random_states[0]}


def work(rank, folder):
    torch.set_num_threads(1)
    model, results = model_of(), {}  # before the group is there
    timeout = datetime.timedelta(seconds=120)
    place = f"file://{folder}/group"
    distributed.init_process_group("gloo", place, timeout, world_size=2, rank=rank)
    results["layers"] = results_of_layers(model, rank, folder)
    results["synced"] = results_with_synced_ranges(rank)
    results["lab"] = results_of_lab(rank, folder)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return the folder written by two torchrun processes: by ``work``, then by a grid on the command line."""
    folder = tmp_path_factory.mktemp("run")
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    surroundings = os.environ | {
        "CPT_RUNS_DIR": str(folder / "runs"),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    done = subprocess.run(
        [sys.executable, *torchrun, __file__, folder],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (folder / "said").write_text(done.stdout)
    return folder


@pytest.fixture(scope="session")
def processes(folder):
    """Return the results of both processes."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parallel", "integer", "sharded"])
def test_processes_average_out_gradient_noise(kind, processes):
    """Match one process with all data; with equal noise the error would be 1.41 times as large."""
    alone = model_of(QuantConfig(execution="integer") if kind == "integer" else None)
    expected = gradient_errors(alone, alone, torch.cat([rows(5)] * 2))
    for error, other in zip(processes[0]["layers"][kind], expected, strict=True):
        # at least 24 x 64 numbers are rounded: 2 % each, and 6 % is seen
        assert 0.85 < error / other < 1.15


@pytest.mark.slow
def test_processes_with_per_example_ranges_equal_one(processes):
    pairs = zip(*(p["layers"]["losses"] for p in processes), strict=True)
    per_example, per_batch = (torch.stack(pair).mean(0) for pair in pairs)
    assert_near(per_example, losses(PER_EXAMPLE), early_rtol=1e-5)
    alone = losses(NEAREST)
    difference = ((per_batch - alone) / alone).abs().max()
    assert difference > 0.05  # a range of half the batch is another one


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNCED)
def test_processes_with_synced_ranges_equal_one(name, processes):
    net, config = SYNCED[name]
    both = torch.stack([p["synced"][name] for p in processes]).mean(0)
    assert_near(both, losses(config, net), early_rtol=1e-4)


def assert_near(losses, expected, early_rtol):
    """Compare losses: sums in another order tip a rounding now and then, in later steps."""
    torch.testing.assert_close(losses[:8], expected[:8], rtol=early_rtol, atol=0)
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [True, False])
def test_processes_share_ranges_as_buffers(broadcast, processes):
    first, second = (p["layers"]["ranges"][broadcast] for p in processes)
    assert len(first) == 2
    assert all(
        torch.equal(a, b) == broadcast for a, b in zip(first, second, strict=True)
    )
    assert all(running[2] > 0.1 for running in first)


@pytest.mark.slow
def test_processes_resume_bit_for_bit(processes):
    for process in processes:
        straight = process["layers"]["trained"]["simulated"]
        for resumed in process["layers"]["resumed"]:
            assert resumed["keys"] == straight["keys"]
            assert all(map(torch.equal, resumed["weights"], straight["weights"]))
    first, second = (p["layers"]["trained"]["simulated"]["keys"] for p in processes)
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTION_MODES)
def test_processes_keep_equal_weights_and_bits(execution, processes):
    first, second = (p["layers"]["trained"][execution] for p in processes)
    assert all(map(torch.equal, first["weights"], second["weights"]))
    assert first["bits"] == second["bits"]
    assert first["bits"] == [[b] * 2 for b in SCHEDULE.bits()[:4].tolist()]
    assert not any(map(torch.equal, first["weights"], model_of().parameters()))


@pytest.mark.slow
def test_processes_round_on_own_ranges_if_asked(processes):
    assert [p["synced"]["own"] for p in processes] == [True, True]


def test_synced_ranges_needs_process_group():
    message = r"call torch\.distributed\.init_process_group"
    refused(message, synced_ranges().__enter__, error=RuntimeError)


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_noise_key_offset_of_thousands_of_processes(rank, monkeypatch):
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    key = torch.tensor((1 << KEY_BITS) - 1).add_(key_offset())
    assert int(key) >> KEY_BITS == rank


# --- sharded weights, in a group of one process ---------------------------------------------------

X = rows(0, 3)


@pytest.fixture
def mesh(group):
    return distributed.init_device_mesh("cpu", (1,))


def as_whole(model, mesh):
    return fully_shard(model, mesh=mesh)


def layer_by_layer(model, mesh):
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def in_parallel(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


COUNT_FIRST = "count and check before"
CALLS = {
    "check": (lambda m: cpt.check(m, (X,)), "check it before fully_shard"),
    "count": (lambda m: cpt.count_bitops(m, (X,)), f"{COUNT_FIRST} fully_shard"),
}


@pytest.mark.parametrize("shard", [as_whole, layer_by_layer])
def test_sharded_model_is_rejected_by_check(mesh, shard):
    """Ask to call check and count_bitops before fully_shard."""
    model = shard(model_of(), mesh)
    for call, advice in CALLS.values():
        refused(f"parameter '0.weight' is sharded already, .*; {advice}", call, model)


@pytest.mark.parametrize("shard", [as_whole, layer_by_layer, in_parallel])
def test_sharded_model_is_rejected_by_quantize(mesh, shard):
    model = shard(nn.Sequential(*NETS["linear"]()), mesh)
    order = r"sharded already, .*; call quantize_\(model\) before fully_shard\(model\)"
    refused(order, quantize_, model)
    assert not any(isinstance(m, LayerPrecision) for m in model.modules())
    advice = f"{COUNT_FIRST} .* tensor parallelism .* cannot be used"
    refused(advice, cpt.count_bitops, model, (X,))


@pytest.mark.parametrize("shard", [as_whole, layer_by_layer])
def test_sharded_after_conversion_trains_as_unsharded(mesh, shard):
    results = []
    for model in (model_of(), shard(model_of(), mesh)):
        with precision(model, 4, 4), cpt.BitOpsLedger(model) as ledger:
            loss = model(X).square().sum()
            loss.backward()
        gradients = [whole(p.grad) for p in model.parameters()]
        results.append(([loss, *gradients], ledger.bitops()))
    (tensors, bitops), (others, other_bitops) = results
    assert all(map(torch.equal, tensors, others))
    assert bitops == other_bitops


class Saved:
    """Wrapper of a tensor that autograd saves for the backward pass."""

    def __init__(self, x):
        self.x = x


def test_sharded_weights_are_saved_only_without_checkpointing(mesh):
    """Free quantised weights after the backward pass, or at once in checkpointed blocks."""
    gradients = {}
    for checkpointed in (False, True):
        model, references = layer_by_layer(model_of(), mesh), []

        def pack(x, references=references):
            saved = Saved(x)
            references.append((weakref.ref(saved), tuple(x.shape)))
            return saved

        out = X.clone().requires_grad_()
        with precision(model, 4, 4):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.x):
                for layer in model:
                    if checkpointed:
                        out = checkpoint(layer, out, use_reentrant=False)
                    else:
                        out = layer(out)
            alive = [shape for saved, shape in references if saved() is not None]
            weights = [shape for shape in alive if shape in ((8, 32), (32, 4))]
            assert len(weights) == (0 if checkpointed else 2)
            out.square().sum().backward()
        assert not any(saved() is not None for saved, _ in references)
        gradients[checkpointed] = [whole(p.grad) for p in model.parameters()]
    assert all(map(torch.equal, *gradients.values()))


# --- runs of the lab ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), [("whole", SPEC), ("pairs", PAIRS)])
def test_torchrun_two_processes_equal_one(kind, spec, processes):
    alone, (first, second) = run_lab(spec), (p["lab"][kind] for p in processes)
    torch.testing.assert_close(first["loss"][:2], alone["loss"][:2], rtol=1e-3, atol=0)
    # sums of another order flip roundings
    torch.testing.assert_close(first["loss"], alone["loss"], rtol=2e-2, atol=0)
    assert torch.equal(first["weights"], second["weights"])
    assert first["loss"] == second["loss"]
    assert first["bitops"] == alone["bitops"]  # of the whole batch
    assert first["metrics"] == second["metrics"]


@pytest.mark.slow
def test_torchrun_resumes_bit_for_bit(processes):
    for process in processes:
        resumed, straight = process["lab"]["resumed"], process["lab"]["whole"]
        assert resumed["loss"] == straight["loss"]
        assert torch.equal(resumed["weights"], straight["weights"])


@pytest.mark.slow
def test_torchrun_processes_draw_separate_dropout(processes):
    assert not torch.equal(*(p["lab"]["random"] for p in processes))


@pytest.mark.slow
def test_torchrun_rejects_different_number_of_processes(folder):
    message = "was written by 2 processes, and 1 would go on from it"
    alone = Session(load_task_class(SPEC), SPEC)
    refused(message, load_checkpoint, folder / "run.pt", alone)


@pytest.mark.parametrize(
    ("task", "count", "options", "message"),
    [
        (
            "digits",
            3,
            {},
            r"share batches of 64 of digits \(image\): .* a number that divides the bat",
        ),
        (
            "digits-graph",
            2,
            {},
            r"of digits-graph \(graph\): images and sentence pairs",
        ),
        ("pydoc", 2, {}, r"of pydoc \(language_model\): images and"),
        ("digits", 2, {"workers": 2}, "one run at a time; leave out workers and exec"),
    ],
)
def test_torchrun_rejects_unsupported_settings_before_runs(
    task, count, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(process_group, "size", lambda: count)
    spec = run_spec(recipe("smoke", task), "CR", q_max=8, seed=0, scale="smoke")
    refused(message, run_grid, [spec], tmp_path / "rows.jsonl", **options)
    assert not list(tmp_path.iterdir())


def test_torchrun_shares_partition_the_batch(monkeypatch):
    task = load_task_class(SPEC)(SPEC, torch.device("cpu"))
    data, cpu = task.data, torch.device("cpu")
    batch = next(array_batches(data.train, data, task.recipe, 3, cpu, 0))
    parts = []
    monkeypatch.setattr(process_group, "size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(process_group, "rank", lambda rank=rank: rank)
        parts.append(next(task.shared_batches(0, process_group.local_part)))
        assert process_group.local_part([0, 1, 2, 3, 4]) == [[0, 1], [2, 3]][rank]
        assert process_group.local_part([7]) == [7]  # too few for all: everybody's
    for x, *shares in zip(batch, *parts, strict=True):
        assert torch.equal(torch.cat(shares), x)


@pytest.mark.slow
def test_torchrun_runs_a_grid(folder):
    assert (folder / "said").read_text().splitlines()[-1] == "1 ok"
    lines = (folder / "runs/smoke/image.jsonl").read_text().splitlines()
    (row,) = map(json.loads, lines)
    short = replace(recipe("smoke"), steps=24)
    spec = run_spec(short, "CR", q_max=8, seed=0, scale="smoke")
    found = row["key"], row["provenance"]["processes"], row["steps"]
    assert found == (spec.key, 2, 24)
    assert not list((folder / "runs").rglob("*.pt"))


if __name__ == "__main__":  # as torchrun starts it
    work(int(os.environ["RANK"]), Path(sys.argv[1]))
    sys.argv[1:] = "run digits/mlp6 --scale smoke --arms CR --seeds 0".split()
    with patch.object(designs, "recipe", lambda *a: replace(recipe(*a), steps=24)):
        runpy.run_module("cpt_lab", run_name="__main__")
