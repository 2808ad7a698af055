"""Drive the precision of a converted model: a scheduler for training, a context for evaluation.

>>> from cpt_core import make_schedule, quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 2)))
>>> PrecisionScheduler(model, make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=2)).get_last_bits()
[3]
"""

from __future__ import annotations

import itertools
import json
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cpt_core import extensions
from cpt_core.numerics import NUMERICS, NUMERICS_WITHOUT_VERSION
from cpt_core.quantization.active_bits import ALL_FLOAT32
from cpt_core.quantization.convert import all_precisions, warn_of_added_modules
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.schedules.schedule import RoleLevels, Schedule
from cpt_core.validation import check_bits, check_int, check_types

Schedules = Schedule | Mapping[str, Schedule]
EvalBits = int | str
EVAL_BITS = ("q_max", "current", "float")
SEARCH_EVERY = 64  # steps, and at steps 1, 2, 4, ...: how often modules are looked for that came after quantize_


class PrecisionScheduler:
    """Set the bits of a converted model at every optimizer step; works like ``torch.optim.lr_scheduler``.

    Args:
        model: a model converted by ``quantize_``.
        schedule: one schedule for all layers, or a mapping from patterns of layer names to schedules, such as
            ``{"layer4.*": s1, "*": s2}``, or a ``LayeredSchedule``: the first pattern that matches a layer decides.
            Patterns must cover every layer and each must match some layer.
        q_grad: gradient level; None takes each schedule's ``q_max``, or what a ``RoleSchedules`` says.
        optimizer: in a loop that is not yours, one to follow: each of its steps calls ``step()``, and its
            ``state_dict`` holds that of the scheduler.
        eval_bits: precision after ``model.eval()``, until ``model.train()``: "q_max", "float" (no quantisation) or 1 to
            32; "current" leaves it at the bits of the step.

    The constructor applies step 0; call ``step()`` after ``optimizer.step()``. Past the last step the last bits stay.
    A copy of the model (``deepcopy``, pickle, ``AveragedModel``) is not driven, and has no precision: run it inside
    ``precision(copy, "q_max")``. What is copied with its scheduler stays driven, but follows no optimizer.

    Raises:
        ValueError: for schedules that do not fit the layers, and for levels that a layer cannot take.

    Warns:
        UserWarning: once, when ``step()`` seems not to be called; for a copy that should follow an optimizer.
        QuantizationWarning: once, for a module that was added to the model after ``quantize_`` and is in float32.

    Paper: section 3 (weights and activations at q_t bits, gradients at q_max).
    Differs: the authors' CIFAR sweeps keep 8-bit gradients at q_max = 6; give ``q_grad=8`` for that.
    """

    _model: weakref.ref[nn.Module] | None = None  # None in copies
    _searched_at = -1  # the step at which modules that came late were last looked for

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedules,
        q_grad: int | None = None,
        *,
        optimizer: Optimizer | None = None,
        eval_bits: EvalBits = "current",
    ) -> None:
        self._eval_bits = check_eval_bits(eval_bits)
        self._layers = all_precisions(model)
        self.schedules = assign_schedules(schedule, self._layers)
        self.q_grad = None if q_grad is None else check_bits("q_grad", q_grad)
        self.last_step = 0
        self.follows = (
            False  # whether the steps of an optimizer are those of the scheduler
        )
        self._groups = {
            p: [self._layers[n] for n in names]
            for p, (_, names) in self.schedules.items()
        }
        self.total_steps = next(iter(self.schedules.values()))[0].total_steps
        for pattern, (s, _) in self.schedules.items():
            used = set(
                zip(*(levels.tolist() for levels in s.levels(self.q_grad)), strict=True)
            )
            for layer, levels in itertools.product(self._groups[pattern], sorted(used)):
                layer.check_levels(RoleLevels(*levels))
        if optimizer is not None:
            extensions.load("follow").follow(optimizer, self)
        self._apply()
        extensions.services("missing_steps").warn_of_missing_steps(self, model)
        self._model = weakref.ref(model)
        self._search_added_modules()

    @property
    def eval_bits(self) -> EvalBits:
        """Precision of evaluation; may be assigned."""
        return self._eval_bits

    @eval_bits.setter
    def eval_bits(self, value: EvalBits) -> None:
        self._eval_bits = check_eval_bits(value)
        self._apply()

    def step(self) -> None:
        """Go to the next optimizer step; RuntimeError where the scheduler follows an optimizer."""
        if self.follows:
            raise RuntimeError(
                "this scheduler follows its optimizer: every optimizer.step() calls step() already"
            )
        self.advance()

    def advance(self) -> None:
        """Go to the next optimizer step, also for an optimizer that the scheduler follows."""
        self.last_step += 1
        if self.last_step == self.total_steps + 1:
            warnings.warn(
                f"training goes on after the schedule's {self.total_steps} steps; the last bits are kept",
                stacklevel=3,
            )
        self._apply()
        if (
            self.last_step & (self.last_step - 1) == 0
            or self.last_step % SEARCH_EVERY == 0
        ):
            self._search_added_modules()

    def _search_added_modules(self) -> None:
        """Warn of modules that came after ``quantize_``; once per step at most."""
        model = None if self._model is None else self._model()
        if model is not None and self._searched_at != self.last_step:
            self._searched_at = self.last_step
            warn_of_added_modules(model)

    def get_last_bits(self) -> list[int]:
        """Return the bits in force, one per schedule in the order they were given."""
        step = min(self.last_step, self.total_steps - 1)
        return [schedule(step) for schedule, _ in self.schedules.values()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step {self.last_step} of {self.total_steps}, bits {self.get_last_bits()})"

    def _apply(self, only: Collection[LayerPrecision] | None = None) -> None:
        for pattern, layers in self._groups.items():
            schedule = self.schedules[pattern][0]
            step = min(self.last_step, self.total_steps - 1)
            of_step = schedule.levels_at(step, self.q_grad)

            for layer in layers if only is None else [x for x in layers if x in only]:
                layer.highest, levels = schedule.highest, of_step
                if not layer.training and self.eval_bits != "current":
                    levels = merge_levels(
                        resolve_levels("eval_bits", self.eval_bits, layer, pattern),
                        levels,
                    )
                if not layer.is_fixed:
                    layer.set_levels(levels, self)

    def _on_mode_change(self, layer: LayerPrecision) -> None:
        """Give a layer that changed between training and evaluation the bits of its mode."""
        if not layer.training:
            self._search_added_modules()
        if self.eval_bits != "current":
            self._apply({layer})

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out of a copy."""
        return {**vars(self), "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Drive the layers that were copied together with their scheduler, and follow no optimizer."""
        if state["follows"]:
            warnings.warn(
                "the copy of a PrecisionScheduler follows no optimizer: call its step()",
                stacklevel=2,
            )
        vars(self).update(state, follows=False)
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs that the model's ``state_dict`` lacks: plain values and tensors."""
        return {
            "numerics": NUMERICS,
            "last_step": self.last_step,
            "q_grad": self.q_grad,
            "schedules": {
                pattern: schedule.to_dict()
                for pattern, (schedule, _) in self.schedules.items()
            },
            "ladders": {
                name: d for name, p in self._layers.items() if (d := p.grids.to_dict())
            },
            "layers": {
                name: layer.get_running()
                for name, layer in self._layers.items()
                if layer.is_listed
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``, after a warning from other numerics; ValueError for another run's."""
        check_types(self.load_state_dict, {"state": state})
        if missing := {"last_step", "q_grad", "schedules", "layers"} - set(state):
            raise ValueError(
                f"state must be what state_dict() returned, and lacks {', '.join(sorted(missing))}"
            )
        check_int("last_step", state["last_step"], 0)
        numerics = check_int(
            "numerics", state.get("numerics", NUMERICS_WITHOUT_VERSION), 1
        )
        theirs = {
            **state,
            "ladders": {
                n: d for n, d in state.get("ladders", {}).items() if any(d.values())
            },
        }
        mine = {**self.state_dict(), "layers": self._layers}
        if unknown := sorted(map(repr, set(state) - set(mine))):
            said = f"state has entries that this release does not know: {', '.join(unknown)}. It is of another "
            raise ValueError(
                f"{said}release: go on with that one, or load the weights alone and start a new schedule"
            )
        wrappers = extensions.services("wrappers")
        theirs, mine = (
            wrappers.unwrapped(theirs) or theirs,
            wrappers.unwrapped(mine) or mine,
        )
        for key in ("schedules", "q_grad", "ladders"):
            if json.dumps(theirs[key]) != json.dumps(
                mine[key]
            ):  # tuples are lists there
                said = f"the checkpoint has {key} {_short(theirs[key])}, this scheduler {_short(mine[key])}"
                raise ValueError(said)
        layers = mine["layers"]
        odd = set(theirs["layers"]) ^ {
            name for name, layer in layers.items() if layer.is_listed
        }
        # what turned out to multiply nothing has nothing to store, and one of the two may not know it yet
        if odd := {
            name for name in odd if name not in layers or layers[name].has_weights
        }:
            raise ValueError(
                f"the checkpoint's quantised layers differ from the model's: {', '.join(sorted(odd))}"
            )
        for name, running in theirs["layers"].items():
            if set(running) != (known := set(layers[name].get_running())):
                raise ValueError(
                    f"the checkpoint holds {sorted(running)} of layer {name!r}, which has {sorted(known)}"
                )
        for name, running in theirs["layers"].items():
            layers[name].set_running(running)
        self.last_step = int(state["last_step"])
        self._apply()
        if numerics != NUMERICS:
            said = f"the state is of numerics {numerics}, and this release has {NUMERICS}: training goes on with other"
            warnings.warn(
                f"{said} noise, so its losses are not those of one run; see cpt_core.numerics",
                stacklevel=2,
            )


def assign_schedules(
    schedule: Schedules, layers: Mapping[str, LayerPrecision | None]
) -> dict[str, tuple[Schedule, list[str]]]:
    """Return pattern -> (schedule, names of its layers); ValueError when the patterns do not fit the layers."""
    check_types(assign_schedules, {"schedule": schedule}, parts=True)
    schedule = getattr(schedule, "by_pattern", schedule)  # of a LayeredSchedule
    if not schedule:
        raise ValueError("schedule must name one for every layer, got {}")
    given = {"*": schedule} if isinstance(schedule, Schedule) else dict(schedule)
    if len({s.total_steps for s in given.values()}) != 1:
        raise ValueError(
            f"schedules must have one length, got {[s.total_steps for s in given.values()]} steps"
        )
    assigned: dict[str, tuple[Schedule, list[str]]] = {
        pattern: (s, []) for pattern, s in given.items()
    }
    for name, pattern in _patterns_of(layers, given, "schedule").items():
        assigned[pattern][1].append(name)
    if idle := [p for p, (_, names) in assigned.items() if not names]:
        raise ValueError(
            f"pattern {idle[0]!r} matches no layer that is left; layers: {', '.join(layers)}"
        )
    return assigned


def _patterns_of(
    layers: Mapping[str, LayerPrecision | None], patterns: Collection[str], what: str
) -> dict[str, str]:
    """Return layer -> the first pattern that matches; ValueError when a layer that has to match one matches none."""
    found = {}
    order = {pattern: number for number, pattern in enumerate(patterns)}
    wild = [
        pattern for pattern in patterns if any(sign in pattern for sign in "*?[")
    ]  # others match their own name
    for layer, own in layers.items():
        candidates = [p for p in wild if fnmatchcase(layer, p)] + [layer] * (
            layer in order
        )
        pattern = min(candidates, key=lambda candidate: order[candidate], default=None)
        if pattern is not None:
            found[layer] = pattern
        elif (
            own is None or own.has_weights
        ):  # others may never multiply, and need no precision then
            raise ValueError(
                f"layer {layer!r} matches none of the patterns of {what}, {', '.join(patterns)}; add '*' for the rest"
            )
    return found


@contextmanager
def precision(
    model: nn.Module,
    bits: int | str | Mapping[str, int],
    q_grad: int | str | None = None,
) -> Iterator[nn.Module]:
    """Run ``model`` at a fixed precision inside a ``with`` block, also while it trains, then put the former one back.

    Args:
        model: a model converted by ``quantize_``.
        bits: 1 to 32, "q_max" (of the schedule that drives each layer, role by role), "float" for no quantisation, or a
            mapping from patterns of layer names to bits, of which the first that matches a layer decides.
        q_grad: gradient bits; None keeps those in force, or takes ``bits`` where there are none; with "float" gradients
            are not quantised either.

    A backward pass may come after the block, at the bits that its forward pass had, unless ``torch.compile`` made it.
    Schedulers count on, and set their bits after it. Copies that are made inside keep the bits of the block.

    Raises:
        ValueError: for other values, patterns that do not cover every layer, or "q_max" when no
            ``PrecisionScheduler`` has been made.

    Warns:
        QuantizationWarning: once, for a module that was added to the model after ``quantize_`` and is in float32.
    """
    layers, by_pattern = (
        all_precisions(model),
        bits if isinstance(bits, Mapping) else {"*": bits},
    )
    patterns = _patterns_of(layers, by_pattern, "bits")
    warn_of_added_modules(model)
    before = [
        (layer, layer.active_levels, layer.owning_scheduler, layer.is_fixed)
        for layer in layers.values()
    ]
    try:
        for name, pattern in patterns.items():
            layer = layers[name]
            values = resolve_levels("bits", by_pattern[pattern], layer, name)
            if q_grad is None:
                layer.set_levels(merge_levels(values, layer.active_levels or values))
            else:
                layer.set_levels(
                    RoleLevels(
                        *values[:2], *resolve_levels("q_grad", q_grad, layer, name)[2:]
                    )
                )
            layer.is_fixed = True
        yield model
    finally:
        for layer, in_force, driver, fixed in before:
            layer.active_levels, layer.owning_scheduler, layer.is_fixed = (
                in_force,
                driver,
                fixed,
            )
        for driver in dict.fromkeys(
            driver for _, _, driver, _ in before if driver is not None
        ):
            driver._apply(
                set(layers.values())
            )  # a step, or another mode, may have come inside


def copy_ranges(source: nn.Module, target: nn.Module) -> None:
    """Copy the running ranges of a model into another of the same layers.

    Running ranges are no buffers: what averages or loads weights, such as ``AveragedModel``, leaves them as they are.

    Args:
        source: a model converted by ``quantize_``.
        target: a copy of it, or an average of its weights; it may be wrapped, as by ``AveragedModel``.

    Raises:
        ValueError: for models whose quantised layers differ.
    """
    check_types(copy_ranges, {"source": source, "target": target})
    source_layers, target_layers = (
        _precisions_in("source", source),
        _precisions_in("target", target),
    )
    pairs = list(zip(source_layers.items(), target_layers.items(), strict=False))
    if len(source_layers) != len(target_layers) or not all(
        _correspond(*first, *second) for first, second in pairs
    ):
        names = [
            ", ".join(name or "the model itself" for name in layers)
            for layers in (source_layers, target_layers)
        ]
        raise ValueError(
            f"source and target must have the same quantised layers, got {names[0]}; and {names[1]}"
        )
    for (_, layer), (_, target_layer) in pairs:
        target_layer.set_running(layer.ranges())


def _precisions_in(argument: str, model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the precisions of a model that is given as an argument."""
    try:
        return all_precisions(model)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _correspond(
    name: str, layer: LayerPrecision, wrapped_name: str, wrapped_layer: LayerPrecision
) -> bool:
    """Return whether two layers have the same ranges and, but for wrappers, the same name."""
    has_same_name = not name or f".{wrapped_name}".endswith(f".{name}")
    return has_same_name and set(layer.ranges()) == set(wrapped_layer.ranges())


def merge_levels(values: RoleLevels, gradients: RoleLevels) -> RoleLevels:
    """Return levels of other forward values; a forward pass in float32 has gradients in float32."""
    return RoleLevels(
        *values[:2], *(values if values.activation is None else gradients)[2:]
    )


def check_eval_bits(value: Any) -> EvalBits:
    """Return ``value`` when a model can be evaluated at it, else raise ValueError."""
    if isinstance(value, str) and value in EVAL_BITS:
        return value
    return check_bits(f"eval_bits, if not {' or '.join(map(repr, EVAL_BITS))},", value)


def resolve_levels(
    argument: str, value: int | str, layer: LayerPrecision, name: str
) -> RoleLevels:
    """Return the levels of all roles that a value of ``precision`` means; of gradients only the last two count."""
    if isinstance(value, str) and value == "float":
        return ALL_FLOAT32
    if isinstance(value, str) and value == "q_max":
        if layer.highest is None:
            raise ValueError(
                f"layer {name!r} has no q_max yet: make a PrecisionScheduler first, or give a number"
            )
        return layer.highest
    if isinstance(value, str):
        raise ValueError(
            f"{argument} must be an integer from 1 to 32, 'q_max' or 'float', got {value!r}"
        )
    return RoleLevels(*[check_bits(argument, value)] * 4)


def _short(value: Any) -> str:
    """Write a value for an error: a schedule that changes at every step has megabytes."""
    text = repr(value)
    return text if len(text) <= 1000 else f"{text[:1000]} ... ({len(text)} characters)"
