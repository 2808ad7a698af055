"""BitOps beside seconds: networks to measure, what a step takes by way of computing it, the roofs of a machine."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from cpt_core.bitops.plan import count_bitops
from cpt_core.choosing.solver import solve_schedule
from cpt_core.inspecting.measure import measure_cost
from cpt_core.inspecting.measured import MeasuredCost
from cpt_core.inspecting.step import TrainingStep
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules import cost
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import SUITE
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_core.waiting import waiting
from cpt_lab.analysis.style import COLORS, TEXT, drawing, legend_below, name_points, whole

WAYS = {
    "simulated": QuantConfig(),
    "on codes": QuantConfig(execution="integer"),
    "on codes, shared steps": QuantConfig(execution="integer").with_shared_steps(),
}
Q_GRAD = 8
KINDS = ("linear", "convolutions")
SIZES = {"smoke": (384, 24), "demo": (2048, 128), "paper": (2048, 128)}  # rows of the one, pictures of the other
REPEATS = {"smoke": 7, "demo": 7, "paper": 15}
ENOUGH = {"smoke": 15, "demo": 60, "paper": 600}  # seconds after which no other round begins: codes may be slow here
HUES = ("small", "large", "medium")
ROOFS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


def network(kind: str, scale: str) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a small network, the same in every call, and its inputs: linear layers as a transformer's, or pictures."""
    torch.manual_seed(0)
    rows, pictures = SIZES[scale]
    if kind == "linear":
        return nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)), (torch.randn(rows, 384),)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return model, (torch.randn(pictures, 3, 16, 16),)


def rounds(scale: str) -> Iterator[int]:
    """Count the rounds of a measurement: one at least, and of the others as many as begin in time."""
    started = time.monotonic()
    for done in range(REPEATS[scale]):
        if done and time.monotonic() - started > ENOUGH[scale]:
            return
        yield done


def ways(kind: str, scale: str, bits: Sequence[int]) -> pd.DataFrame:
    """Measure a step of a network in every way of computing it, all of them in turns.

    Returns:
        A line per way and bits, in text: milliseconds of the fastest round, as other work on the machine only slows
        a step, saved MiB, and what both are of float32's.
    """
    model, inputs = network(kind, scale)
    half = partial(torch.autocast, inputs[0].device.type, torch.bfloat16)
    steps: dict[tuple[str, str], tuple[TrainingStep, Callable[[], AbstractContextManager[Any]]]] = {
        ("float32", ""): (TrainingStep(model, inputs), nullcontext),
        ("bfloat16 autocast", ""): (TrainingStep(network(kind, scale)[0], inputs, around=half), nullcontext),
    }
    for way, config in WAYS.items():
        step = TrainingStep(quantize_(network(kind, scale)[0], config), inputs)
        steps |= {(way, str(q)): (step, partial(precision, step.model, q, Q_GRAD)) for q in bits}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    saved = {}
    for repeat in waiting("rounds", rounds(scale), total=REPEATS[scale], leave=False):
        for key, (step, at_its_bits) in steps.items():
            with at_its_bits():
                if not repeat:
                    saved[key] = step.saved().total() / 2**20
                step.seconds()
            with at_its_bits():  # after a step of its own kind, as in training
                seconds[key].append(step.seconds())
    plain = "float32", ""
    best = {key: min(times) for key, times in seconds.items()}
    return pd.DataFrame(
        {
            f"{kind}, {scale}": [way for way, _ in steps],
            "bits": [q for _, q in steps],
            "ms": [f"{1e3 * best[key]:.1f}" for key in steps],
            "of float32": [f"{best[key] / best[plain]:.2f}" for key in steps],
            "saved MiB": [f"{saved[key]:.2f}" for key in steps],
            "saved of float32": [f"{saved[key] / saved[plain]:.2f}" for key in steps],
        }
    )


def measured(kind: str, scale: str, way: str, bits: Sequence[int]) -> MeasuredCost:
    """Measure a step of a network in one way of computing it, by bits and layer: the fastest of several."""
    model, inputs = network(kind, scale)
    model = quantize_(model, WAYS[way])
    return fastest(
        [measure_cost(model, inputs, bits=bits, q_grad=Q_GRAD, repeats=1, convention="paper") for _ in rounds(scale)]
    )


def fastest(found: Sequence[MeasuredCost]) -> MeasuredCost:
    """Return one of several measurements of the same model, with every width from that in which it was fastest."""
    best = {q: min(found, key=lambda m: m.seconds(q)) for q in found[0].bits}
    layers = {name: {q: m.layers[name][q] for q, m in best.items()} for name in found[0].layers}
    return replace(found[0], steps={q: m.steps[q] for q, m in best.items()}, layers=layers)


def promise_and_machine(found: Mapping[str, MeasuredCost], base: int) -> Figure:
    """Draw BitOps and seconds of a step over its bits, relative to ``base`` bits, and what it saves in MiB."""
    with drawing(1, 2, figsize=(9, 3.4), sharex=True) as (figure, ((left, right),)):
        widths = sorted({q for m in found.values() for q in m.bits})
        promised = [cost.relative_cost([q], base, Q_GRAD) for q in widths]
        left.plot(widths, promised, color=COLORS["static"], linestyle="--", label="BitOps")
        for (way, m), hue in zip(found.items(), HUES, strict=False):
            color = COLORS[hue]
            seconds = [m.seconds(q) / m.seconds(base) for q in m.bits]
            left.plot(m.bits, seconds, "o-", color=color, markersize=4, label=f"seconds, {way}")
            saved = [m.steps[q].saved_bytes / 2**20 for q in m.bits]
            right.plot(m.bits, saved, "o-", color=color, markersize=4)
        whole(left.xaxis)
        left.set(ylim=0, xlabel="bits", ylabel=f"of a step at {base} bits", title="what a step costs")
        right.set(ylim=0, xlabel="bits", ylabel="MiB", title="what it saves between its passes")
        legend_below(figure, left)
    return figure


def peaks(size: int = 1024, repeats: int = 15) -> dict[str, float]:
    """Measure what the machine does at most: operations per second by type, and bytes per second under "memory"."""

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    found = {}
    for name, kind in ROOFS.items():
        a = torch.randint(-8, 8, (size, size)).to(kind)
        found[name] = 2 * size**3 / best(partial(torch._int_mm if kind == torch.int8 else torch.mm, a, a))
    there = torch.zeros(1 << 25, dtype=torch.uint8)  # 32 MiB: more than most caches hold
    found["memory"] = 2 * there.numel() / best(partial(torch.empty_like(there).copy_, there))
    return found


def roofline(
    found: Mapping[tuple[str, str], MeasuredCost], scale: str, bits: int, roofs: Mapping[str, float]
) -> Figure:
    """Draw what layers reach of the machine's roofs, over the operations that they do per byte moved.

    A layer does one forward and two backward products, the first layer one; each moves every operand and result once,
    four bytes a number, or one where it is a code. What quantisers do besides takes time and counts nothing.

    Args:
        found: measured costs by kind of network and way.
        scale: of the networks.
        bits: of the step that is drawn.
        roofs: see ``peaks``.
    """
    tops = {name: top for name, top in roofs.items() if name != "memory"}
    with drawing(1, len(KINDS), figsize=(9.5, 4), sharey=True, sharex=True) as (figure, (line,)):
        named: list[tuple[Any, list[tuple[str, float, float, str]]]] = []
        for ax, kind in zip(line, KINDS, strict=True):
            named.append((ax, []))
            for (name, top), style in zip(tops.items(), ("-", "--", ":"), strict=True):
                x = [1.0, top / roofs["memory"], 3000.0]
                ax.plot(x, [roofs["memory"], top, top], style, color="#777777", linewidth=1.2, label=f"peak, {name}")
            ways = [(way, m) for (of, way), m in found.items() if of == kind]
            for (way, m), marker, hue in zip(ways, "os^", HUES, strict=False):
                points = _points(kind, scale, m, bits, codes="codes" in way)
                ax.plot(*zip(*points.values(), strict=True), marker, color=COLORS[hue], markersize=5, label=way)
                named[-1][1].extend((layer, *at, TEXT[hue]) for layer, at in points.items())
            ax.set(xscale="log", yscale="log", xlabel="operations per byte moved", title=f"{kind}, {bits} bits")
        line[0].set_ylabel("operations per second")
        legend_below(figure, line[0])
        for ax, layers in named:
            name_points(ax, *zip(*layers, strict=True))
    return figure


def _points(kind: str, scale: str, m: MeasuredCost, bits: int, codes: bool) -> dict[str, tuple[float, float]]:
    """Return layer -> (operations per byte, operations per second)."""
    model, inputs = network(kind, scale)
    macs = count_bitops(model, inputs, convention="paper").macs
    operand, x = 1 if codes else 4, inputs[0]
    found: dict[str, tuple[float, float]] = {}
    for name, layer in model.named_children():
        y = layer(x)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            a, b, c = x.numel(), layer.weight.numel(), y.numel()
            moved = [operand * (a + b) + 4 * c, operand * (c + a) + 4 * b]  # forward, weight gradient
            moved += [operand * (c + b) + 4 * a] if found else []  # error
            work = 2 * macs[name] * len(moved)
            found[name] = work / sum(moved), work / m.layers[name][bits].seconds
        x = y
    return found


def suite_in_seconds(m: MeasuredCost, ranges: Sequence[tuple[int, int]], total_steps: int = 64_000) -> pd.DataFrame:
    """Return BitOps and measured seconds of the paper's schedules relative to static q_max, by (q_min, q_max)."""
    rows = []
    for name, entry in SUITE.items():
        row: dict[str, Any] = {"schedule": name, "savings": entry.savings}
        for q_min, q_max in ranges:
            s = make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps)
            row[f"{q_min} to {q_max} bits: BitOps"] = f"{s.relative_cost(Q_GRAD):.3f}"
            row[f"seconds, {q_min} to {q_max}"] = f"{m.relative_cost(s):.3f}"
        rows.append(row)
    return pd.DataFrame(rows)


def spend(m: MeasuredCost, budget: float, ranges: Sequence[tuple[int, int]], total_steps: int = 64_000) -> None:
    """Print the schedules that meet a budget of seconds, by (q_min, q_max), or why none does."""
    for q_min, q_max in ranges:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShortCycleWarning)
                s = solve_schedule(budget, q_min, q_max, total_steps, cost=m.seconds)
        except ValueError as error:
            print(f"{q_min} to {q_max} bits: {error}")
            continue
        above = sum(s.share_at(q) for q in range(Q_GRAD + 1, q_max + 1))
        print(
            f"{q_min} to {q_max} bits: {m.relative_cost(s):.3f} of the seconds of static {q_max}, "
            f"{s.relative_cost(Q_GRAD):.3f} of its BitOps; {100 * above:.0f} % of the steps above {Q_GRAD} bits"
        )
