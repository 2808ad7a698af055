"""Sliders: choose a schedule and see its bits, or train along it for a second and see loss and bits move together."""

from __future__ import annotations

import itertools
import textwrap
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.profiles import STATIC, SUITE
from cpt_core.schedules.schedule import Schedule, ShortCycleWarning, StaticSchedule, check_range
from cpt_lab.analysis import schedules
from cpt_lab.analysis.style import COLORS, QUIET, drawing, legend_below
from cpt_lab.data.common import one_thread
from cpt_lessons.demonstrations import held_out, tiny_problem

MOST_BITS = 12  # of the sliders of a schedule
Q_MAX = 8  # bits of the baseline, and of all gradients
STEPS = 400
SMOOTH = 10  # steps whose mean loss is drawn
LOSSES = (0.005, 50)  # limits of their axis, whatever is chosen


class Run(NamedTuple):
    """What became of a training.

    Attributes:
        schedule: that it followed.
        losses: of every step, shape (total_steps,).
        accuracy: at the end, on images that it was not trained on, at the highest bits of its schedule.
    """

    schedule: Schedule
    losses: tuple[float, ...]
    accuracy: float


@lru_cache(64)
def train(schedule: Schedule, seed: int = 0) -> Run:
    """Train ``demonstrations.tiny_problem`` along a schedule; what was trained once is remembered.

    Gradients have ``Q_MAX`` bits, also below static precisions of fewer. The state of torch's random numbers is left as
    it was.
    """
    with torch.random.fork_rng(devices=[]), one_thread():  # with more, so short a training ends elsewhere
        model, batches, loss_fn, optimizer = tiny_problem(seed=seed)
        scheduler, losses = PrecisionScheduler(quantize_(model), schedule, q_grad=Q_MAX), []
        for x, y in itertools.islice(itertools.cycle(batches), schedule.total_steps):
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
    images, labels = held_out(seed=seed)
    with precision(model.eval(), "q_max"), torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).float().mean())
    return Run(schedule, tuple(losses), accuracy)


def chosen_schedule(name: str = "CR", q_min: int = 2, n_cycles: int = 4) -> Schedule:
    """Return a schedule of the suite up to ``Q_MAX`` bits in ``STEPS`` steps; "STATIC" has ``q_min`` bits throughout.

    Raises:
        ValueError: for what makes no schedule, such as ``q_min`` above ``Q_MAX``.
    """
    check_range(q_min, Q_MAX, STEPS)
    if name == STATIC:
        return StaticSchedule(q_min, STEPS)
    return _drawn(name, q_min, Q_MAX, n_cycles, STEPS)


def _drawn(name: str, q_min: int, q_max: int, n_cycles: int, total_steps: int) -> Schedule:
    with warnings.catch_warnings():  # the picture shows, and its title says, at how many bits it ends
        warnings.simplefilter("ignore", ShortCycleWarning)
        return make_schedule(name, q_min=q_min, q_max=q_max, total_steps=total_steps, n_cycles=n_cycles)


def baseline(schedule: Schedule, seed: int = 0) -> Run:
    """Return the training at static ``Q_MAX`` bits, as long as that of a schedule."""
    return train(StaticSchedule(Q_MAX, schedule.total_steps), seed)


def cost(schedule: Schedule) -> float:
    """Return the cost relative to static ``Q_MAX`` bits."""
    return schedule.relative_cost(q_grad=Q_MAX, q_max=Q_MAX)


def name_of(schedule: Schedule) -> str:
    """Return what a schedule is called in pictures, such as "CR, 2 to 8 bits"."""
    if schedule.q_min == schedule.q_max:
        return f"static {schedule.q_max}"
    return f"{getattr(schedule, 'name', '') or 'your schedule'}, {schedule.q_min} to {schedule.q_max} bits"


def words(run: Run, static: Run) -> str:
    """Say what became of a training, beside that at static ``Q_MAX`` bits."""
    last, base = (np.mean(r.losses[-SMOOTH:]) for r in (run, static))
    end, cycles = run.schedule.bits()[-1], getattr(run.schedule, "n_cycles", None)
    named = name_of(run.schedule) + (f", {cycles} cycles" if cycles else "")
    return (
        f"{named}: relative cost {cost(run.schedule):.3f}; the last step has {end} bits;\n"
        f"loss at the end {last:.3f} (static {Q_MAX}: {base:.3f}); "
        f"held-out images right {run.accuracy:.1%} (static {Q_MAX}: {static.accuracy:.1%})"
    )


def picture(schedule: Schedule, seed: int = 0) -> Figure:
    """Train along a schedule and draw loss and bits over the steps, beside static ``Q_MAX`` bits of the same seed."""
    run, static = train(schedule, seed), baseline(schedule, seed)
    return _picture(words(run, static), static, run)


def chosen_picture(name: str = "CR", q_min: int = 2, n_cycles: int = 4) -> Figure:
    """Draw the training of a ``chosen_schedule``, or say why there is none: on the same axes whatever is chosen."""
    try:
        schedule = chosen_schedule(name, q_min, n_cycles)
    except ValueError as error:
        return _picture(str(error), train(StaticSchedule(Q_MAX, STEPS)))
    return picture(schedule)


def _picture(said: str, *runs: Run) -> Figure:
    alt = f"A toy, not a result. Training loss above, bits below, over the steps. {said}"
    with drawing(2, 1, alt, figsize=(8, 4.6), sharex=True, height_ratios=(3, 2)) as (figure, ((upper,), (lower,))):
        for run, color in zip(runs, (QUIET, COLORS["large"]), strict=False):
            smooth = np.convolve(run.losses, np.ones(SMOOTH) / SMOOTH, mode="valid")
            upper.plot(np.arange(SMOOTH - 1, len(run.losses)), smooth, color=color, label=name_of(run.schedule))
            lower.step(np.arange(len(run.losses)), run.schedule.bits(), where="post", color=color)
        steps = len(runs[0].losses)
        upper.set(yscale="log", ylim=LOSSES, xlim=(0, steps), ylabel=f"training loss,\nmean of {SMOOTH} steps")
        upper.set_yticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
        upper.set_yticks([], minor=True)
        lines = [line for part in said.split("\n") for line in textwrap.wrap(part, 110)]
        upper.set_title("\n".join([*lines, "", ""][: max(2, len(lines))]), fontsize=9, loc="left", parse_math=False)
        lower.set(xlabel="training step", ylabel="bits", ylim=(0.4, Q_MAX + 0.6), yticks=range(1, Q_MAX + 1))
        figure.suptitle("A toy: one small network, one seed - not a result", fontsize=10)
        legend_below(figure, upper)
    return figure


def schedule_picture(
    name: str = "CR", q_min: int = 3, q_max: int = 8, n_cycles: int = 4, total_steps: int = 800
) -> Figure:
    """Draw a schedule, or say why there is none: on the same axes whatever is chosen, so that it alone moves."""
    with drawing(figsize=(8, 2.6)) as (figure, ((ax,),)):
        try:
            s = _drawn(name, q_min, q_max, n_cycles, total_steps)
        except ValueError as error:
            said = textwrap.fill(str(error), 90)
        else:
            schedules.draw_schedule(ax, s)
            said = f"{name}: relative cost {s.relative_cost():.3f}, noise exposure {s.noise_exposure():,.0f}"
            said += f", the last step has {s.bits()[-1]} bits"
        ax.set_title(said, fontsize=10, parse_math=False)
        ax.set(xlabel="training step", ylabel="bits", xlim=(0, total_steps), ylim=(0.4, MOST_BITS + 0.6))
        ax.set_yticks(range(1, MOST_BITS + 1))
    return figure


def explore() -> Any:
    """Show a schedule with sliders for name, bits and cycles; without ipywidgets, a static figure."""

    def controls(widgets: Any) -> dict[str, Any]:
        return {
            "name": widgets.Dropdown(options=list(SUITE), value="CR", description="schedule"),
            "q_min": widgets.IntSlider(3, 1, 8, description="q_min"),
            "q_max": widgets.IntSlider(8, 2, MOST_BITS, description="q_max"),
            "n_cycles": widgets.IntSlider(4, 1, 16, description="cycles"),
        }

    return _with_sliders(schedule_picture, controls)


def play() -> Any:
    """Train along a schedule, again whenever a slider is let go; without ipywidgets, show one training."""

    def controls(widgets: Any) -> dict[str, Any]:
        return {
            "name": widgets.Dropdown(options=[*SUITE, STATIC], value="RR", description="schedule"),
            "q_min": widgets.IntSlider(3, 1, Q_MAX, description="q_min", continuous_update=False),
            "n_cycles": widgets.IntSlider(4, 1, 16, description="cycles", continuous_update=False),
        }

    return _with_sliders(chosen_picture, controls, f"training for {STEPS} steps ...")


def _with_sliders(draw: Callable[..., Figure], controls: Callable[[Any], dict[str, Any]], meanwhile: str = "") -> Any:
    """Return widgets and below them what ``draw`` makes of their values; ``meanwhile`` is shown until it is there."""
    try:
        import ipywidgets as widgets
    except ImportError:
        return draw()
    from IPython.display import display

    made, status = controls(widgets), widgets.Label()

    def show(**chosen: Any) -> None:
        status.value = meanwhile  # the last picture stays until the next one is there
        display(draw(**chosen))
        status.value = ""

    print("Choose with the mouse, or with Tab and the arrow keys. No sliders? Run this cell.")
    row = widgets.HBox(list(made.values()), layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([row, status, widgets.interactive_output(show, made)])
