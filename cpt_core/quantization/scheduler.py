"""Bits of a converted model: ``PrecisionScheduler`` for training, ``precision`` for a block of code.

``copy_ranges`` copies the running ranges of a model, which are no buffers, into a copy or an average of it.

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
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from cpt_core import extensions
from cpt_core.numerics import NUMERICS, NUMERICS_WITHOUT_VERSION
from cpt_core.quantization.active_bits import ALL_FLOAT32
from cpt_core.quantization.convert import (
    all_precisions,
    warn_of_added_modules,
    warn_of_silent_layers,
)
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.schedules.schedule import RoleLevels, Schedule
from cpt_core.validation import (
    MAX_BITS,
    check_bits,
    check_int,
    check_types,
    short_repr,
)

Schedules = Schedule | Mapping[str, Schedule]
EvalBits = int | str
MAX_SCHEDULE_CHARACTERS = 1000  # of a schedule in a message
EVAL_BITS = ("q_max", "current", "float")
# interval of the search for modules that were added after quantize_; it also runs at steps 1, 2, 4, ...
SEARCH_INTERVAL_STEPS = 64


class AssignedSchedule(NamedTuple):
    """A schedule and the layers that it drives.

    Attributes:
        schedule: the schedule.
        layers: names of its layers.
    """

    schedule: Schedule
    layers: list[str]


class SavedBits(NamedTuple):
    """Bits of a layer, with the schedulers that set them, before a block of code that sets others.

    The fields besides ``layer`` are attributes of ``LayerPrecision``.
    """

    layer: LayerPrecision
    active_levels: RoleLevels | None
    highest: RoleLevels | None
    owning_scheduler: Any
    pending_scheduler: Any
    is_fixed: bool
    is_untrained: bool
    unmatched: str

    @classmethod
    def current(cls, layer: LayerPrecision) -> SavedBits:
        """Return the bits of a layer as they are now."""
        return cls(layer, *[getattr(layer, field) for field in cls._fields[1:]])

    def restore(self) -> None:
        """Set the layer to these bits."""
        for field, value in zip(self._fields[1:], self[1:], strict=True):
            setattr(self.layer, field, value)


class PrecisionScheduler:
    """Scheduler of the bits of a converted model, used like ``torch.optim.lr_scheduler``.

    Args:
        model: a model converted by ``quantize_``.
        schedule: one schedule for all layers, or a mapping from patterns of layer names to schedules, such as
            ``{"layer4.*": s1, "*": s2}``, or a ``LayeredSchedule``: the first pattern that matches a layer decides.
            Patterns must cover every layer and each must match some layer.
        q_grad: gradient level; None takes each schedule's ``q_max``, or the gradient levels of a ``RoleSchedules``.
        optimizer: optimizer to follow in a training loop that you cannot edit: each of its steps calls ``step()``, and
            its ``state_dict`` contains that of the scheduler.
        eval_bits: precision after ``model.eval()``, until ``model.train()``: "q_max", "float" (no quantisation) or 1 to
            32; "current" uses the bits of the step.

    The constructor applies step 0; call ``step()`` after ``optimizer.step()``. Past the last step the last bits stay.
    A copy of the model (``deepcopy``, pickle, ``AveragedModel``) is not driven, and has no precision: run it inside
    ``precision(copy, "q_max")``. A model that is copied together with its scheduler stays driven, but the
    copy of the scheduler follows no optimizer.

    Raises:
        ValueError: for schedules that do not fit the layers, and for levels that a layer does not support.

    Warns:
        UserWarning: once, if ``step()`` seems not to be called; for a copy of a scheduler that follows an optimizer;
            for ``eval_bits`` that quantise after last steps in float32, which leave running ranges stale.
        QuantizationWarning: once, for a module that was added to the model after ``quantize_`` and is in float32.

    Paper: section 3 (weights and activations at q_t bits, gradients at q_max).
    Differs: the authors' CIFAR sweeps keep 8-bit gradients at q_max = 6; give ``q_grad=8`` for that.
    """

    _model: weakref.ref[nn.Module] | None = None  # None in copies
    _searched_at = -1  # step of the last search for added modules

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
        self.follows = False  # whether the steps of an optimizer call advance()
        self._groups: dict[str, list[LayerPrecision]] = {}
        for pattern, assigned in self.schedules.items():
            self._groups[pattern] = [self._layers[name] for name in assigned.layers]
        self.total_steps = next(iter(self.schedules.values())).schedule.total_steps
        for pattern, assigned in self.schedules.items():
            self._check_levels(assigned.schedule, self._groups[pattern])
        if optimizer is not None:
            extensions.load("follow").follow(optimizer, self)
        matched = {n for assigned in self.schedules.values() for n in assigned.layers}
        for name in self._layers.keys() - matched:
            self._layers[name].unmatched = _describe_unmatched(
                name, self.schedules, "schedule"
            )
        self._apply()
        self._warn_of_stale_ranges()
        extensions.services("missing_steps").warn_of_missing_steps(self, model)
        self._model = weakref.ref(model)
        self._search_added_modules()

    def _check_levels(self, schedule: Schedule, layers: list[LayerPrecision]) -> None:
        """Raise ValueError for a level of a schedule that one of its layers does not support."""
        levels_by_role = [levels.tolist() for levels in schedule.levels(self.q_grad)]
        distinct_levels = sorted(set(zip(*levels_by_role, strict=True)))
        for layer, levels in itertools.product(layers, distinct_levels):
            layer.check_levels(RoleLevels(*levels))

    def _warn_of_stale_ranges(self) -> None:
        """Warn if the last steps are in float32, which updates no running range, and evaluation is quantised."""
        if self.eval_bits == "current":
            return
        for pattern, layers in self._groups.items():
            schedule = self.schedules[pattern].schedule
            levels_by_role = [q.tolist() for q in schedule.levels(self.q_grad)]
            all_levels = list(zip(*levels_by_role, strict=True))
            last_levels = RoleLevels(*all_levels[-1])
            for layer in layers:
                eval_levels = resolve_levels(
                    "eval_bits", self.eval_bits, layer, pattern
                )
                if (
                    layer.ranges()
                    and layer.quantizes_activations(eval_levels)
                    and not layer.quantizes_activations(last_levels)
                    and any(
                        layer.quantizes_activations(RoleLevels(*levels))
                        for levels in set(all_levels)
                    )
                ):
                    warnings.warn(
                        f"layer {layer.name!r} is in float32 in the last step of its schedule, at "
                        f"{last_levels.activation} bits, and eval_bits={self.eval_bits!r} quantises it: evaluation "
                        "clips inputs to the running ranges of earlier steps, because steps in float32 update none. "
                        "End the schedule at 23 bits or fewer, take eval_bits='current', or run some batches in "
                        "training mode inside cpt.precision(model, 8) before you evaluate",
                        stacklevel=3,
                    )
                    return

    @property
    def eval_bits(self) -> EvalBits:
        """Precision of evaluation; may be assigned."""
        return self._eval_bits

    @eval_bits.setter
    def eval_bits(self, value: EvalBits) -> None:
        self._eval_bits = check_eval_bits(value)
        self._apply()

    def step(self) -> None:
        """Set the bits of the next optimizer step; RuntimeError if the scheduler follows an optimizer."""
        if self.follows:
            raise RuntimeError(
                "this scheduler follows its optimizer: every optimizer.step() calls step() already"
            )
        self.advance()

    def advance(self) -> None:
        """Set the bits of the next optimizer step, also on behalf of a followed optimizer."""
        self.last_step += 1
        if self.last_step == self.total_steps + 1:
            warnings.warn(
                f"training goes on after the schedule's {self.total_steps} steps; the last bits are kept",
                stacklevel=3,
            )
        self._apply()
        is_power_of_two = self.last_step & (self.last_step - 1) == 0
        if is_power_of_two or self.last_step % SEARCH_INTERVAL_STEPS == 0:
            self._search_added_modules()

    def _search_added_modules(self) -> None:
        """Warn of modules that were added after ``quantize_``, and of layers without operations, once per step."""
        model = None if self._model is None else self._model()
        if model is not None and self._searched_at != self.last_step:
            self._searched_at = self.last_step
            warn_of_added_modules(model)
            warn_of_silent_layers(model, all_precisions(model))

    def get_last_bits(self) -> list[int]:
        """Return the forward bits of every schedule at the current step, in the order given.

        Evaluation bits and ``precision`` blocks are not considered.
        """
        step = min(self.last_step, self.total_steps - 1)
        return [assigned.schedule(step) for assigned in self.schedules.values()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step {self.last_step} of {self.total_steps}, bits {self.get_last_bits()})"

    def _apply(self, only: Collection[LayerPrecision] | None = None) -> None:
        """Set the bits of the current step in all layers, or in some of them."""
        step = min(self.last_step, self.total_steps - 1)
        for pattern, layers in self._groups.items():
            schedule = self.schedules[pattern].schedule
            step_levels = schedule.levels_at(step, self.q_grad)

            for layer in layers:
                if only is not None and layer not in only:
                    continue
                layer.highest = schedule.highest
                layer.set_untrained(self.last_step == 0)
                levels = step_levels
                if not layer.training and self.eval_bits != "current":
                    eval_levels = resolve_levels(
                        "eval_bits", self.eval_bits, layer, pattern
                    )
                    levels = merge_levels(eval_levels, step_levels)
                if layer.is_fixed:
                    layer.pending_scheduler = self
                else:
                    layer.set_levels(levels, self)

    def _on_mode_change(self, layer: LayerPrecision) -> None:
        """Set the bits of a layer that changed between training and evaluation."""
        if not layer.training:
            self._search_added_modules()
        if self.eval_bits != "current":
            self._apply({layer})

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the model from copies and pickles."""
        return {**vars(self), "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Drive the layers that were copied together with the scheduler, without an optimizer."""
        if state["follows"]:
            warnings.warn(
                "the copy of a PrecisionScheduler follows no optimizer: call its step()",
                stacklevel=2,
            )
        vars(self).update(state, follows=False)
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return step, schedules and running ranges for a checkpoint, as plain values and tensors.

        A resumed run needs it besides the model's ``state_dict``.
        """
        schedules = {
            pattern: assigned.schedule.to_dict()
            for pattern, assigned in self.schedules.items()
        }
        ladders = {}
        running_ranges = {}
        for name, layer in self._layers.items():
            ladder = layer.grids.to_dict()
            if ladder:  # {} for the paper's grids
                ladders[name] = ladder
            if layer.is_listed:
                running_ranges[name] = layer.get_running()
        return {
            "numerics": NUMERICS,
            "last_step": self.last_step,
            "q_grad": self.q_grad,
            "schedules": schedules,
            "ladders": ladders,
            "layers": running_ranges,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run from ``state_dict()``.

        Raises:
            ValueError: for the state of another run or release.

        Warns:
            UserWarning: for a state of other numerics, whose noise differs.
        """
        check_types(self.load_state_dict, {"state": state})
        missing_entries = {"last_step", "q_grad", "schedules", "layers"} - set(state)
        if missing_entries:
            raise ValueError(
                f"state must be what state_dict() returned, and lacks {', '.join(sorted(missing_entries))}"
            )
        check_int("last_step", state["last_step"], 0)
        numerics = check_int(
            "numerics", state.get("numerics", NUMERICS_WITHOUT_VERSION), 1
        )

        ladders = {
            name: ladder
            for name, ladder in state.get("ladders", {}).items()
            if any(ladder.values())
        }
        checkpoint = {**state, "ladders": ladders}
        current = {**self.state_dict(), "layers": self._layers}
        _check_known_entries(state, current)
        wrappers = extensions.services("wrappers")
        checkpoint = wrappers.unwrapped(checkpoint) or checkpoint
        current = wrappers.unwrapped(current) or current
        _check_same_settings(checkpoint, current)
        _check_same_layers(checkpoint["layers"], current["layers"])

        for name, running in checkpoint["layers"].items():
            current["layers"][name].set_running(running)
        self.last_step = int(state["last_step"])
        self._apply()
        if numerics != NUMERICS:
            warnings.warn(
                f"the state is of numerics {numerics}, and this release has {NUMERICS}: training goes on with other "
                "noise, so its losses are not those of one run; see cpt_core.numerics",
                stacklevel=2,
            )


def _check_known_entries(state: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError for entries of a state that this release does not know."""
    unknown_entries = sorted(map(repr, set(state) - set(current)))
    if unknown_entries:
        raise ValueError(
            f"state has entries that this release does not know: {', '.join(unknown_entries)}. It is of another "
            "release: go on with that one, or load the weights alone and start a new schedule"
        )


def _check_same_settings(
    checkpoint: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Raise ValueError if schedules, gradient bits or ladders of a state differ from the scheduler's."""
    for key in ("schedules", "q_grad", "ladders"):
        # compared as JSON, in which tuples and lists are equal
        if json.dumps(checkpoint[key]) != json.dumps(current[key]):
            raise ValueError(
                f"the checkpoint has {key} {_short(checkpoint[key])}, this scheduler {_short(current[key])}"
            )


def _check_same_layers(
    checkpoint: Mapping[str, Mapping[str, Any]], layers: Mapping[str, LayerPrecision]
) -> None:
    """Raise ValueError if layers or ranges of a state differ from the model's."""
    listed_layers = {name for name, layer in layers.items() if layer.is_listed}
    # a layer without weights is in a checkpoint only if it had run before the checkpoint was written
    different_layers = {
        name
        for name in set(checkpoint) ^ listed_layers
        if name not in layers or layers[name].always_runs_matmul
    }
    if different_layers:
        raise ValueError(
            f"the checkpoint's quantised layers differ from the model's: {', '.join(sorted(different_layers))}"
        )
    for name, running in checkpoint.items():
        range_names = set(layers[name].get_running())
        if set(running) != range_names:
            raise ValueError(
                f"the checkpoint holds {sorted(running)} of layer {name!r}, which has {sorted(range_names)}"
            )


def assign_schedules(
    schedule: Schedules, layers: Mapping[str, LayerPrecision | None]
) -> dict[str, AssignedSchedule]:
    """Return pattern -> schedule and its layers; ValueError if the patterns do not fit the layers."""
    check_types(assign_schedules, {"schedule": schedule}, parts=True)
    schedule = getattr(schedule, "by_pattern", schedule)  # of a LayeredSchedule
    if not schedule:
        raise ValueError("schedule must name one for every layer, got {}")
    if isinstance(schedule, Schedule):
        schedules = {"*": schedule}
    else:
        schedules = dict(schedule)

    lengths = [s.total_steps for s in schedules.values()]
    if len(set(lengths)) != 1:
        raise ValueError(f"schedules must have one length, got {lengths} steps")
    assigned = {pattern: AssignedSchedule(s, []) for pattern, s in schedules.items()}
    for name, pattern in _match_patterns(layers, schedules, "schedule").items():
        assigned[pattern].layers.append(name)
    unused_patterns = [pattern for pattern, a in assigned.items() if not a.layers]
    if unused_patterns:
        raise ValueError(
            f"pattern {unused_patterns[0]!r} matches no layer that is left; layers: {', '.join(layers)}"
        )
    return assigned


def _match_patterns(
    layers: Mapping[str, LayerPrecision | None],
    patterns: Collection[str],
    argument: str,
) -> dict[str, str]:
    """Return layer -> the first pattern that matches it.

    Raises:
        ValueError: for a layer that needs bits and matches no pattern.
    """
    pattern_by_layer = {}
    order = {pattern: number for number, pattern in enumerate(patterns)}
    # a pattern without wildcards matches the layer of that name alone
    wildcards = [pattern for pattern in patterns if not {*"*?["}.isdisjoint(pattern)]
    for name, layer in layers.items():
        candidates = [pattern for pattern in wildcards if fnmatchcase(name, pattern)]
        if name in order:
            candidates.append(name)
        if candidates:
            pattern_by_layer[name] = min(candidates, key=order.__getitem__)
        # any other layer may never run a matmul, and then needs no bits
        elif layer is None or layer.always_runs_matmul or layer.holds_weights:
            raise ValueError(_describe_unmatched(name, patterns, argument))
    return pattern_by_layer


def _describe_unmatched(name: str, patterns: Collection[str], argument: str) -> str:
    return (
        f"layer {name!r} matches none of the patterns of {argument}, {', '.join(patterns)}; "
        "add '*' for the rest"
    )


@contextmanager
def precision(
    model: nn.Module,
    bits: int | str | Mapping[str, int],
    q_grad: int | str | None = None,
) -> Iterator[nn.Module]:
    """Run ``model`` at a fixed precision inside a ``with`` block, in training and evaluation; restore it afterwards.

    Args:
        model: a model converted by ``quantize_``.
        bits: 1 to 32, "q_max" (of each layer's schedule, role by role), "float" for no quantisation, or a mapping from
            patterns of layer names to bits, of which the first that matches a layer decides.
        q_grad: gradient bits, 1 to 32, "q_max" or "float". None keeps the active ones, or takes ``bits`` if none are
            set; where ``bits`` is "float", gradients are not quantised either.

    A backward pass after the block uses the bits of its forward pass, except in code of ``torch.compile``. Schedulers
    continue to count steps, and set their bits after the block. Copies made inside keep the bits of the block.

    Raises:
        ValueError: for other values, patterns that do not cover every layer, or "q_max" when no
            ``PrecisionScheduler`` has been made.

    Warns:
        QuantizationWarning: once, for a module that was added to the model after ``quantize_`` and is in float32; and
            after the block for layers that hold weights and ran no intercepted operation.
    """
    layers = all_precisions(model)
    bits_by_pattern = bits if isinstance(bits, Mapping) else {"*": bits}
    patterns = _match_patterns(layers, bits_by_pattern, "bits")
    warn_of_added_modules(model)
    former_bits = [SavedBits.current(layer) for layer in layers.values()]
    try:
        for name, pattern in patterns.items():
            layer = layers[name]
            levels = resolve_levels("bits", bits_by_pattern[pattern], layer, name)
            if q_grad is None:
                levels = merge_levels(levels, layer.active_levels or levels)
            else:
                gradient_levels = resolve_levels("q_grad", q_grad, layer, name)
                levels = RoleLevels(*levels[:2], *gradient_levels[2:])
            layer.set_levels(levels)
            layer.is_fixed = True
        for name in layers.keys() - patterns.keys():
            layers[name].unmatched = _describe_unmatched(name, bits_by_pattern, "bits")
        yield model
        warn_of_silent_layers(model, layers)
    finally:
        layers_by_scheduler: dict[PrecisionScheduler, set[LayerPrecision]] = {}
        for saved in former_bits:
            layer = saved.layer
            scheduler = layer.pending_scheduler or saved.owning_scheduler
            saved.restore()
            if scheduler is not None:
                layers_by_scheduler.setdefault(scheduler, set()).add(layer)
        # a step, or a change of mode, may have happened inside the block
        for scheduler, driven_layers in layers_by_scheduler.items():
            scheduler._apply(driven_layers)


def copy_ranges(source: nn.Module, target: nn.Module) -> None:
    """Copy the running ranges of ``source`` into ``target``, which has equal quantised layers.

    Running ranges are no buffers: code that averages or loads weights, such as ``AveragedModel``, does not copy them.

    Args:
        source: a model converted by ``quantize_``.
        target: a copy of it, or an average of its weights; it may be wrapped, as by ``AveragedModel``.

    Raises:
        ValueError: for models whose quantised layers differ.
    """
    check_types(copy_ranges, {"source": source, "target": target})
    source_layers = _precisions_in("source", source)
    target_layers = _precisions_in("target", target)
    pairs = list(zip(source_layers.items(), target_layers.items(), strict=False))
    have_equal_layers = all(_correspond(*first, *second) for first, second in pairs)
    are_equal = len(source_layers) == len(target_layers) and have_equal_layers
    if not are_equal:
        raise ValueError(
            "source and target must have the same quantised layers, "
            f"got {_list_layers(source_layers)}; and {_list_layers(target_layers)}"
        )
    for (_, layer), (_, target_layer) in pairs:
        target_layer.set_running(layer.ranges())


def _list_layers(layers: Mapping[str, LayerPrecision]) -> str:
    return ", ".join(name or "the model itself" for name in layers)


def _precisions_in(argument: str, model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the precisions of a model; its ValueError names the argument."""
    try:
        return all_precisions(model)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None


def _correspond(
    name: str, layer: LayerPrecision, wrapped_name: str, wrapped_layer: LayerPrecision
) -> bool:
    """Return whether two layers have equal range names and, apart from wrappers, equal names."""
    has_same_name = not name or f".{wrapped_name}".endswith(f".{name}")
    return has_same_name and set(layer.ranges()) == set(wrapped_layer.ranges())


def merge_levels(values: RoleLevels, gradients: RoleLevels) -> RoleLevels:
    """Return the forward levels of ``values`` with the gradient levels of ``gradients``.

    A forward pass in float32 has gradients in float32.
    """
    is_float32 = values.activation is None
    gradient_levels = values[2:] if is_float32 else gradients[2:]
    return RoleLevels(*values[:2], *gradient_levels)


def check_eval_bits(value: Any) -> EvalBits:
    """Return ``value`` if it is a valid ``eval_bits``, else raise ValueError."""
    if isinstance(value, str) and value in EVAL_BITS:
        return value
    try:
        return check_bits("eval_bits", value)
    except ValueError:
        names = ", ".join(map(repr, EVAL_BITS))
        raise ValueError(
            f"eval_bits: expected {names} or an integer from 1 to {MAX_BITS}, got {short_repr(value)}"
        ) from None


def resolve_levels(
    argument: str, value: int | str, layer: LayerPrecision, name: str
) -> RoleLevels:
    """Return the levels of all roles for a value of ``bits``, ``q_grad`` or ``eval_bits``."""
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
    """Return the ``repr`` of a value, truncated: the table of a schedule may have megabytes."""
    text = repr(value)
    if len(text) <= MAX_SCHEDULE_CHARACTERS:
        return text
    return f"{text[:MAX_SCHEDULE_CHARACTERS]} ... ({len(text)} characters)"
