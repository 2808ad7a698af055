"""Bits that rise when the loss stalls: the progressive rule of FracTrain (Fu and others, 2020, arXiv:2012.13113).

A window holds the mean losses of the last five epochs. When none of them differs from the newest by more than a share
of the mean over the first ten epochs, the next number of bits begins with an empty window, and that share falls.
Differs: gradients keep the most bits; FracTrain lets theirs rise, too.
"""

import torch
from sklearn.datasets import load_digits

import cpt_core as cpt

STAGES, DECAY, KEPT = (3, 4, 6, 8), 0.3, 5
START = {"stage": 0, "share": 0.05, "window": [], "losses": [], "bits": []}


def after_epoch(state, loss):
    """Return what is known after an epoch of this mean loss: plain values, for a checkpoint."""
    losses, window = [*state["losses"], loss], [*state["window"], loss][-KEPT:]
    state = {**state, "losses": losses, "window": window, "bits": [*state["bits"], STAGES[state["stage"]]]}
    near = state["share"] * sum(losses[:10]) / len(losses[:10])
    if len(window) == KEPT and state["stage"] + 1 < len(STAGES) and all(abs(x - loss) <= near for x in window):
        state |= {"stage": state["stage"] + 1, "share": DECAY * state["share"], "window": []}
    return state


def train(epochs=60, checkpoint=None, until=60):
    """Train a small network on digits; return its accuracy and a checkpoint, from which training goes on."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x, state = x.float() / 16, START
    torch.manual_seed(0)
    model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    precision = cpt.PrecisionScheduler(model, cpt.StaticSchedule(max(STAGES), 12 * epochs))  # keeps the ranges
    parts = {"model": model, "optimizer": optimizer, "precision": precision}
    if checkpoint:
        state = checkpoint["state"]
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
    for epoch in range(len(state["bits"]), min(epochs, until)):
        total = torch.zeros(())
        with cpt.precision(model, bits=STAGES[state["stage"]], q_grad=max(STAGES)):
            for i in torch.randperm(1200, generator=torch.Generator().manual_seed(epoch)).split(100):
                loss = torch.nn.functional.cross_entropy(model(x[i]), y[i])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
        state = after_epoch(state, float(total) / 12)
    with torch.no_grad(), cpt.precision(model.eval(), "q_max"):
        accuracy = float((model(x[1200:]).argmax(1) == y[1200:]).float().mean())
    return accuracy, {"state": state} | {name: part.state_dict() for name, part in parts.items()}


if __name__ == "__main__":
    accuracy, checkpoint = train()
    bits = checkpoint["state"]["bits"]
    cost = cpt.schedules.TableSchedule(tuple((b, 1) for b in bits)).relative_cost()
    print(f"bits by epoch: {' '.join(map(str, bits))}")
    print(f"accuracy {100 * accuracy:.1f} % at {cost:.2f} of the bit operations of 8 bits throughout")
