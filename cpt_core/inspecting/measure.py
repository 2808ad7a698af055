"""What a training step takes on this device, by bits and layer: seconds and saved activations beside BitOps.

>>> from cpt_core.quantization.convert import quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
>>> measured = measure_cost(model, (torch.ones(5, 4),), bits=(3, 8), repeats=1)
>>> measured.bits, list(measured.layers), measured.seconds(3) > 0
((3, 8), ['0', '2'], True)
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cpt_core.bitops.plan import formats_per_layer, price
from cpt_core.bitops.trace import CONVENTIONS, trace
from cpt_core.bitops.watch import as_it_was
from cpt_core.checks import check_bits, choose, declared, whole
from cpt_core.inspecting.measured import MeasuredCost, Spent
from cpt_core.inspecting.step import TrainingStep
from cpt_core.inspecting.summary import summary
from cpt_core.quantization.convert import layer_precisions
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.layered import LayeredSchedule
from cpt_core.schedules.roles import RoleSchedules
from cpt_core.schedules.schedule import Schedule, StaticSchedule
from cpt_core.waiting import waiting

MOST_REPEATS = 10**6


def measure_cost(
    model: nn.Module,
    inputs: tuple[Any, ...],
    schedule: Schedule | None = None,
    *,
    bits: Sequence[int] | None = None,
    q_grad: int | None = None,
    repeats: int = 7,
    convention: str = "per_op",
    progress: bool | None = False,
) -> MeasuredCost:
    """Measure a training step of a converted model at every bit width of a schedule.

    A step is the forward pass and the backward pass of its outputs, for a gradient of random numbers; the loss and the
    optimizer, whose work does not depend on bits, are left out. All widths take turns, ``repeats`` times after one
    round that warms up, and medians count, relative to their round: a machine that is busy meanwhile slows all widths
    of a round. Whole steps run undisturbed, each after another of its own bits, in which quantised layers and other
    modules with parameters are timed: the forward of each, without those inside it, and the backward of what that left
    in the graph. A module's share of such a step is its share of the whole. All steps are eager.

    The model is afterwards what it was: parameters, gradients, running ranges, noise, bits, and torch's random numbers;
    only ``summary`` knows from then on which layers its forward pass called.

    Args:
        model: converted by ``quantize_``, in training mode; on the device of the inputs.
        inputs: the arguments of its forward for one step; real data of the batch size that is meant.
        schedule: whose bit widths are measured, its ``q_max`` always with them.
        bits: the bit widths, instead of a schedule.
        q_grad: gradient bits of all steps; None takes ``q_max``, or the highest of ``bits``. With more than 8 no layer
            has its backward products on codes.
        repeats: of every kind of step.
        convention: of the BitOps, see ``count_bitops``.
        progress: show a bar of the rounds; None shows it to people only, in a terminal or a notebook.

    Raises:
        ValueError: for values out of range, neither or both of schedule and bits, a schedule with other bits in other
            layers or roles, a model that is not converted, is in evaluation mode, has no output that needs a gradient,
            or is neither on the CPU nor on a GPU with CUDA.
    """
    declared(measure_cost, {"model": model, "progress": progress})
    widths, q_grad = _asked(schedule, bits, q_grad)
    repeats = whole("repeats", repeats, 1, MOST_REPEATS)
    choose("convention", convention, CONVENTIONS)
    listed = {*layer_precisions(model), *(row.name for row in summary(model).rows)}
    if not model.training:
        raise ValueError("the model is in evaluation mode; call model.train() to measure training steps")
    calls, uncounted = trace(model, inputs)
    static = {q: formats_per_layer(model, calls, StaticSchedule(q, 1), q_grad) for q in widths}
    plans = {q: price(calls, uncounted, formats, convention) for q, formats in static.items()}
    names = [name for name, _ in model.named_modules() if name in listed]
    rounds: list[dict[int, float]] = []
    parts: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    saved: dict[int, Counter[str | None]] = {}
    with as_it_was(model):
        step = TrainingStep(model, inputs, {name: model.get_submodule(name) for name in names})
        for repeat in waiting("rounds", range(repeats + 1), progress=progress, leave=False):
            rounds.append({})
            for q in widths:
                with precision(model, q, q_grad):  # on entry layers forget the weights that they keep from step to step
                    if repeat:
                        parts[q].append(step.shares())
                    else:
                        saved[q] = step.saved()
                with precision(model, q, q_grad):  # after a step of its own kind, as in training
                    rounds[-1][q] = step.seconds()
    seconds = _typical(rounds[1:])
    steps = {q: Spent(seconds[q], saved[q].total(), plans[q].total) for q in widths}

    def part(name: str, q: int) -> Spent:
        share = statistics.median(shares[name] for shares in parts[q])
        parts_too = [n for n in plans[q].by_layer if n == name or n.startswith(f"{name} (".lstrip())]  # "layer (part)"
        return Spent(share * steps[q].seconds, saved[q][name], sum(plans[q].by_layer[n] for n in parts_too))

    ran = [name for name in names if name in parts[widths[0]][0]]
    by_layer = {name: {q: part(name, q) for q in widths} for name in ran}
    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' * (threads > 1)}"
    if step.device.type == "cuda":
        device = torch.cuda.get_device_name(step.device)
    return MeasuredCost(device, q_grad, convention, steps, by_layer)


def _asked(schedule: Schedule | None, bits: Sequence[int] | None, q_grad: int | None) -> tuple[list[int], int]:
    """Return the bit widths to measure, the lowest first, and the gradient bits."""
    if (schedule is None) == (bits is None):
        raise ValueError("give a schedule, or the bits to measure, such as bits=(3, 8)")
    if schedule is not None:
        if not isinstance(schedule, Schedule) or isinstance(schedule, (LayeredSchedule, RoleSchedules)):
            raise ValueError(f"give one schedule for all layers and roles, or bits=; got {type(schedule).__name__}")
        bits = [*schedule.bits().tolist(), schedule.q_max]
    if not isinstance(bits, Iterable) or isinstance(bits, (str, bytes, Mapping)):
        raise ValueError(f"bits must be the widths to measure, such as (3, 8), got {bits!r}")
    widths = sorted({check_bits("bits", q) for q in bits})
    if not widths:
        raise ValueError(f"bits must name at least one bit width, got {bits!r}")
    highest = schedule.q_max if schedule is not None else widths[-1]
    return widths, highest if q_grad is None else check_bits("q_grad", q_grad)


def _typical(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return medians by bits over rounds, of the share in a round's own median: all of a slow round is slower."""
    levels = [statistics.median(times.values()) for times in rounds]
    shares = {q: [times[q] / level for times, level in zip(rounds, levels, strict=True)] for q in rounds[0]}
    return {q: statistics.median(of) * statistics.median(levels) for q, of in shares.items()}
