"""What several rooms' tests make: schedules of one size, small networks, written-and-read copies."""

import json
import warnings

import torch
from torch import nn

from cpt_core.schedules.make import make_schedule, schedule_from_dict
from cpt_core.schedules.schedule import ShortCycleWarning

NAN, INF = float("nan"), float("inf")


def make(name="CR", **changes):
    """Return a schedule of the suite, 8 cycles in 1,600 steps between 3 and 8 bits but for the changes."""
    return make_schedule(name, **{"q_min": 3, "q_max": 8, "total_steps": 1600, "n_cycles": 8} | changes)


def quietly(call, *args, **kwargs):
    """Call without the warning of cycles that are too short."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortCycleWarning)
        return call(*args, **kwargs)


def price(bits, q_max=8):
    """Return the mean of q**2 + 2 q q_max, relative to that of static q_max."""
    return sum(q * q + 2 * q * q_max for q in bits) / len(bits) / (3 * q_max * q_max)


def written_and_read(schedule):
    """Return what JSON makes of a schedule."""
    return quietly(schedule_from_dict, json.loads(json.dumps(schedule.to_dict())))


def small(seed=0):
    """Return a network with two convolutions, BatchNorm and a linear layer, for pictures of 6 x 6."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def pictures(seed=0, n=4):
    """Return random inputs of ``small``."""
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
