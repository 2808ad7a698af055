"""Data-parallel training on CPUs: ``torchrun --nproc-per-node 2 examples/processes.py``.

``quantize_`` comes before DDP, and the scheduler steps in every process. Inside ``synced_ranges`` all processes use the
ranges of the whole batch; each has its own rounding noise. The first process evaluates, saves and counts BitOps. It
needs the extra `lab`.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import cpt_core as cpt
from cpt_extras.integrations.distributed import synced_ranges

STEPS, BATCH_PER_PROCESS = 200, 50  # steps, pictures of a step in every process


def main():
    """Train a small network on digits; the first process prints its accuracy."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, processes = dist.get_rank(), dist.get_world_size()
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = cpt.quantize_(
        torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )
    )
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=4)
    precision = cpt.PrecisionScheduler(parallel, schedule)
    with synced_ranges():
        for step in range(STEPS):
            batch = torch.randint(
                1200,
                (processes * BATCH_PER_PROCESS,),
                generator=torch.Generator().manual_seed(step),
            )
            i = batch.view(processes, BATCH_PER_PROCESS)[rank]
            torch.nn.functional.cross_entropy(parallel(x[i]), y[i]).backward()
            optimizer.step()
            optimizer.zero_grad()
            precision.step()
    if rank == 0:
        with torch.no_grad(), cpt.precision(model.eval(), "q_max"):
            accuracy = float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())
        whole_step = cpt.count_bitops(
            model.train(), (x[: processes * BATCH_PER_PROCESS],), schedule
        )  # the batch of all processes
        print(f"{processes} processes, accuracy {100 * accuracy:.1f} %")
        print(whole_step)
        torch.save(
            {"model": model.state_dict(), "precision": precision.state_dict()},
            "checkpoint.pt",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
