"""Bits that rise when the loss stalls (FracTrain's rule, see ``AdaptiveScheduler``), in a training that resumes.

It needs the extra `lab`.
"""

import torch
from sklearn.datasets import load_digits

import cpt_core as cpt


def train(epochs=60, checkpoint=None, until=60):
    """Train a small network on digits; return its accuracy, its schedule, and a checkpoint to go on from."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    precision = cpt.choosing.AdaptiveScheduler(model, (3, 4, 6, 8), steps_per_epoch=12)
    parts = {"model": model, "optimizer": optimizer, "precision": precision}
    for name, part in parts.items() if checkpoint else ():
        part.load_state_dict(checkpoint[name])
    for epoch in range(precision.last_step // 12, min(epochs, until)):
        for i in torch.randperm(1200, generator=torch.Generator().manual_seed(epoch)).split(100):
            loss = torch.nn.functional.cross_entropy(model(x[i]), y[i])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            precision.step(loss)
    with torch.no_grad(), cpt.precision(model.eval(), "q_max"):
        accuracy = float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())
    return accuracy, precision.ran, {name: part.state_dict() for name, part in parts.items()}


if __name__ == "__main__":
    accuracy, schedule, _ = train()
    print(", ".join(f"{steps} steps at {bits} bits" for bits, steps in schedule.runs))
    cost = schedule.relative_cost(8, 8)
    print(f"accuracy {100 * accuracy:.1f} % at {cost:.2f} of the bit operations of 8 bits throughout")
