"""Several processes: each rounds with its noise, so that averaged gradients contain less of it."""

import copy
import datetime
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import NEAREST, running_ranges
from torch import nn

from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_
from cpt_core.quantization.precision import EXECUTION_MODES
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.integrations.data_parallel import KEY_BITS, key_offset
from cpt_extras.integrations.distributed import synced_ranges

pytestmark = pytest.mark.slow

DRAWS, EACH = 24, 16  # gradients; rows of data of a process


def model_of(execution="simulated"):
    torch.manual_seed(0)
    return quantize_(KINDS["linear"](), QuantConfig(execution=execution))


def keys_of(model):
    return [int(p.noise_key) for p in layer_precisions(model).values()]


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(model, call, x, q_grad):
    """Return the gradients of a loss that is a mean over rows of data."""
    model.zero_grad()
    with precision(model, 8, q_grad=q_grad):
        call(x).cos().sum(1).mean().backward()
    return [whole(p.grad).clone() for p in model.parameters()]


def errors(model, call, x):
    """Return the root mean square error of every parameter gradient rounded to 3 bits."""
    exact = gradients(model, call, x, "float")
    drawn = [gradients(model, call, x, 3) for _ in range(DRAWS)]
    of_parameters = zip(exact, zip(*drawn, strict=True), strict=True)
    return [
        torch.stack([draw - e for draw in draws]).square().mean().sqrt()
        for e, draws in of_parameters
    ]


def data():
    return torch.randn(EACH, 8, generator=torch.Generator().manual_seed(5))


SCHEDULE = make_schedule("CR", q_min=3, q_max=8, total_steps=8, n_cycles=1)


def trained(state=None, steps=4, execution="simulated"):
    """Return weights, keys and bits of data-parallel training steps, and the checkpoint of step two."""
    model, bits = model_of(execution), []
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())  # those of the first process go to all
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = PrecisionScheduler(parallel, SCHEDULE)
    if state is not None:
        model.load_state_dict(state["model"])
        scheduler.load_state_dict(state["precision"])
    for _ in range(scheduler.last_step, steps):
        optimizer.zero_grad()
        bits.append([p.bits for p in layer_precisions(model).values()])
        x = torch.randn(
            EACH,
            8,
            generator=torch.Generator().manual_seed(
                10 * scheduler.last_step + dist.get_rank()
            ),
        )
        parallel(x).cos().sum().backward()
        optimizer.step()
        scheduler.step()
        if scheduler.last_step == 2:
            state = copy.deepcopy(
                {"model": model.state_dict(), "precision": scheduler.state_dict()}
            )
    return [p.detach() for p in model.parameters()], keys_of(model), bits, state


KINDS = {  # of networks, for rows of 8 numbers
    "linear": lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
    "tokens": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Linear(4, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
        nn.Flatten(),
    ),
    "pictures": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 8, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 4),
    ),
}


def own_ranges(granularity, roles):
    """Return a config with a different granularity for some roles."""
    own = {
        r: replace(NEAREST.quantizers[r], granularity=granularity, running=False)
        for r in roles
    }
    return replace(NEAREST, quantizers=NEAREST.quantizers | own)


OF_EXAMPLES = own_ranges(
    "per_row", [role for role in NEAREST.quantizers if "linear" in role]
)  # one row of data each
AGREED = [
    *((kind, NEAREST) for kind in KINDS),
    (
        "pictures",
        own_ranges("per_sample_mean", ("conv_input", "conv_grad")),
    ),  # the authors' third range
    (
        "linear",
        QuantConfig(ladder=dict.fromkeys(range(3, 9), "e4m3")).with_gradient_rounding(
            "nearest"
        ),
    ),
]


def losses(config, rank=0, processes=1, kind="linear"):
    """Return the losses of 12 training steps on the same 32 rows, split over the processes."""
    torch.manual_seed(0)
    model = quantize_(KINDS[kind](), config)
    call = nn.parallel.DistributedDataParallel(model) if processes > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = make_schedule("CR", q_min=3, q_max=8, total_steps=12, n_cycles=2)
    scheduler = PrecisionScheduler(call, schedule, optimizer=optimizer)
    found = []
    while scheduler.last_step < 12:
        x = torch.randn(
            2 * EACH, 8, generator=torch.Generator().manual_seed(scheduler.last_step)
        )
        loss = call(x.chunk(processes)[rank]).cos().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    if rank == 0 and config is NEAREST:  # alone, on running ranges: it waits for nobody
        with precision(model.eval(), 8), torch.no_grad():
            model(x)
    return torch.stack(found)


def ranges_after(broadcast):
    """Return running ranges after two steps and an evaluation on data of this process."""
    model = model_of()
    parallel = nn.parallel.DistributedDataParallel(model, broadcast_buffers=broadcast)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with precision(model, 4):
        for _ in range(2):
            parallel(torch.randn(EACH, 8, generator=generator)).sum().backward()
        with torch.no_grad():
            parallel.eval()(torch.randn(EACH, 8, generator=generator))
    return running_ranges(model)


def worker(rank, folder):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    model = model_of()  # before the group is there
    first = keys_of(model)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timeout, world_size=2, rank=rank
    )
    found = {
        "first": first,
        "parallel": errors(model, nn.parallel.DistributedDataParallel(model), data()),
    }
    found["keys"] = keys_of(model)
    found["ranges"] = {
        broadcast: ranges_after(broadcast) for broadcast in (True, False)
    }
    on_codes = model_of("integer")
    found["codes"] = errors(
        on_codes, nn.parallel.DistributedDataParallel(on_codes), data()
    )
    sharded = model_of()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (2,)))
    found["sharded"] = errors(sharded, sharded, data())
    for execution in EXECUTION_MODES:
        *found[execution], state = trained(execution=execution)
        if execution == "simulated":
            torch.save(state, f"{folder}/state{rank}.pt")
    found["losses"] = [losses(c, rank, 2) for c in (OF_EXAMPLES, NEAREST)]
    with synced_ranges():
        found["agreed"] = [losses(config, rank, 2, kind) for kind, config in AGREED]
        refused = quantize_(nn.LSTM(4, 4))
        with pytest.raises(
            RuntimeError,
            match="lstm_forward finds the ranges of several examples inside",
        ):
            with precision(refused, 8):
                refused(torch.ones(2, 2, 4))
    dist.barrier()
    # one process saves for all, the first as a rule
    states = [
        torch.load(f"{folder}/state{saved}.pt", weights_only=True) for saved in (0, 1)
    ]
    found["resumed"], found["states"] = [trained(state)[:2] for state in states], states
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("kind", ["parallel", "codes", "sharded"])
def test_processes_average_out_gradient_noise(kind, processes):
    """Match one process with all data; with equal noise the error would be 1.41 times as large."""
    alone = model_of("integer" if kind == "codes" else "simulated")
    expected = errors(alone, alone, torch.cat([data()] * 2))
    for error, other in zip(processes[0][kind], expected, strict=True):
        assert (
            0.85 < error / other < 1.15
        )  # at least 24 x 64 numbers are rounded: 2 % each, and 6 % is seen


def test_processes_with_per_example_ranges_equal_one(processes):
    of_rows, of_batches = (
        torch.stack(both).mean(0)
        for both in zip(*(p["losses"] for p in processes), strict=True)
    )
    alone = losses(OF_EXAMPLES)
    torch.testing.assert_close(of_rows[:8], alone[:8], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        of_rows, alone, rtol=1e-2, atol=0
    )  # sums in another order tip a rounding now and then
    alone = losses(NEAREST)
    assert (
        (of_batches - alone) / alone
    ).abs().max() > 0.05  # a range of half the batch is another one


@pytest.mark.parametrize("number", range(len(AGREED)))
def test_processes_with_synced_ranges_equal_one(number, processes):
    kind, config = AGREED[number]
    both, alone = (
        torch.stack([p["agreed"][number] for p in processes]).mean(0),
        losses(config, kind=kind),
    )
    torch.testing.assert_close(both[:8], alone[:8], rtol=1e-4, atol=0)
    torch.testing.assert_close(both, alone, rtol=1e-2, atol=0)


@pytest.mark.parametrize("broadcast", [True, False])
def test_processes_share_ranges_as_buffers(broadcast, processes):
    first, second = (process["ranges"][broadcast] for process in processes)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
        broadcast
    ] * 2
    assert all(running[2] > 0.1 for running in first)


def test_synced_ranges_needs_process_group():
    with (
        pytest.raises(
            RuntimeError, match=r"call torch\.distributed\.init_process_group"
        ),
        synced_ranges(),
    ):
        pass


def test_processes_have_distinct_noise_keys(processes):
    assert processes[0]["first"] == processes[1]["first"] == keys_of(model_of())
    counts = [
        key - start
        for key, start in zip(processes[0]["keys"], processes[0]["first"], strict=True)
    ]
    assert counts == [
        DRAWS,
        DRAWS,
    ]  # the first process has the noise of one that is alone
    for mine, others in zip(*(p["keys"] for p in processes), strict=True):
        assert others - mine == 1 << KEY_BITS > max(processes[0]["keys"])


def test_processes_resume_bit_for_bit(processes):
    for process in processes:
        weights, keys, _ = process["simulated"]
        for again, keys_again in process["resumed"]:
            assert keys == keys_again
            assert all(map(torch.equal, weights, again))
    assert processes[0]["resumed"][0][1] != processes[1]["resumed"][0][1]


@pytest.mark.parametrize("execution", EXECUTION_MODES)
def test_processes_keep_equal_weights_and_bits(execution, processes):
    (first, _, bits), (second, _, others) = (
        process[execution] for process in processes
    )
    assert all(map(torch.equal, first, second))
    assert bits == others == [[b] * 2 for b in SCHEDULE.bits()[:4].tolist()]
    assert not any(map(torch.equal, first, model_of().parameters()))


def test_processes_state_loads_into_single_process(processes):
    alone = PrecisionScheduler(model_of(), SCHEDULE)
    alone.load_state_dict(processes[0]["states"][0]["precision"])
    assert alone.last_step == 2


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_noise_key_offset_of_thousands_of_processes(rank, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    key = torch.tensor((1 << KEY_BITS) - 1).add_(key_offset())
    assert int(key) >> KEY_BITS == rank
