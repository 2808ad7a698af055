"""Seconds and memory of training steps on this machine: ``median_seconds`` and ``saved_bytes``.

Steps take turns, so that other work on the machine slows all of them alike. Memory is what the profiler of torch sees.

>>> list(median_seconds({"add": lambda: 1 + 1}, rounds=3))
['add']
>>> saved_bytes(torch.nn.ReLU(), torch.ones(256, requires_grad=True))  # the output, which the backward pass reads
1024
"""

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Key = TypeVar("Key", bound=Hashable)

# The profiler logs every start and stop to stderr, which a notebook would show. It reads this at its first start.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def median_seconds(
    steps: Mapping[Key, Callable[[], object]], rounds: int = 7
) -> dict[Key, float]:
    """Return the median seconds of every step on the CPU; the steps take turns.

    Args:
        steps: key -> function that runs the step.
        rounds: number of times that every step is timed, after one round that warms up.
    """
    times: dict[Key, list[float]] = {key: [] for key in steps}
    for _ in range(rounds + 1):
        for key, step in steps.items():
            start = time.perf_counter()
            step()
            times[key].append(time.perf_counter() - start)

    return {key: statistics.median(values[1:]) for key, values in times.items()}


def saved_bytes(model: torch.nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward pass on the CPU leaves allocated.

    These are the output and the tensors that autograd saves for the backward pass, without parameters and inputs.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = model(x)  # a name, so that the graph lives until the profiler stops

    saved = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    del output
    return saved
