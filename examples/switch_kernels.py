"""A schedule that drives somebody else's kernels: few bits where the schedule is low, more where it is high.

Here they are torch's own, ``torch.autocast`` to bfloat16, as every processor has them. The one line to change for
other libraries is ``low_precision``: ``transformer_engine.pytorch.autocast(enabled=low)`` for its float8, for instance.
The products are not ours then, so ``quantize_`` has no part in it; ``schedule(step)`` is all that is needed.
The digits need the extra `lab`.
"""

import torch
from sklearn.datasets import load_digits

import cpt_core as cpt


def low_precision(low):
    """Return the context of a step's forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=low)


def train(schedule, threshold):
    """Train a small network on digits; return its accuracy, and the type in which each step multiplied."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    types = []
    for step in range(schedule.total_steps):
        i = torch.randint(1200, (100,), generator=torch.Generator().manual_seed(step))
        with low_precision(schedule(step) < threshold):
            logits = model(x[i])
        types.append(logits.dtype)
        torch.nn.functional.cross_entropy(logits.float(), y[i]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float((model(x[1200:]).argmax(1) == y[1200:]).float().mean()), types


if __name__ == "__main__":
    # high precision for the last fifth, where a learning rate would decay
    last_fifth = cpt.schedules.TableSchedule(((16, 320), (32, 80)))
    cyclic = cpt.make_schedule("CR", q_min=16, q_max=32, total_steps=400, n_cycles=4)
    for name, schedule in (
        ("the last fifth in float32", last_fifth),
        ("four cycles", cyclic),
    ):
        accuracy, types = train(schedule, threshold=24)
        share = types.count(torch.bfloat16) / len(types)
        print(
            f"{name}: accuracy {100 * accuracy:.1f} %, {100 * share:.0f} % of the steps in bfloat16"
        )
