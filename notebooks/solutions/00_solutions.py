"""Solutions of the exercises of 00_start_here.ipynb: one way of many."""

import cpt_core as cpt
from cpt_lessons import exercises

# 1. Large savings: RR or RTH.
half = cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=64_000)

# 2. Small savings, and its first cycle runs downwards.
falling = cpt.make_schedule("ETH", q_min=3, q_max=8, total_steps=64_000)

# 3. The cosine rounds to 8 bits above 7.5: in the last fifth of a cycle.
share = (cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64_000, n_cycles=8).bits() == 8).mean()


# 4. The lines of section 2, as a function.
def train(model, loader, loss_fn, optimizer, schedule):
    """Train along the schedule and return the losses."""
    cpt.quantize_(model)
    precision = cpt.PrecisionScheduler(model, schedule)
    losses = []
    for x, y in loader:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precision.step()
        losses.append(float(loss.detach()))
    return losses


exercises.check("00.1", half)
exercises.check("00.2", falling)
exercises.check("00.3", share)
exercises.check("00.4", train)
