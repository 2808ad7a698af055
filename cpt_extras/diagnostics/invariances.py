"""Questions to a model to which float32 has an exact answer: what keeps an output there keeps it at low precision.

The problem: rounding may connect what a model keeps apart. Where the range of an operand spans several tokens, a later
one moves the rounding of an earlier one; where zero is no value of a grid, a mask lets a little through. A loss does
not show it, and perplexities, cached decoding and padded batches are then those of another model.

The design: change something in the inputs, and compare the outputs before and after. *Outputs that float32 keeps, the
quantised model must keep.* Nothing has to be known about the architecture: which outputs those are, float32 says. An
output counts as kept where

- a whole slice of it along an axis as long as the changed axis of the input is equal bit for bit, for two different
  contents of the changed position: that single elements stay is no evidence, as a ReLU may be zero both times;
- it moves when the whole input changes, and so does depend on it.

Questions that change the sizes of the inputs (a sample alone, a prefix, a cache) take outputs as kept that differ by
less than ``TOLERANCE`` of the largest one; all sums are computed in float64 and rounded, see ``exact_sums``.

The trade-offs: everything runs in evaluation mode and at one low number of bits, and most changes are tried at two
positions. "holds" means that no fault was seen with these inputs.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpt_extras.diagnostics.input_changes import (
    Axis,
    at,
    cut,
    find_masks,
    leaves,
    new_contents,
    places_of,
    replaced,
)
from cpt_extras.diagnostics.repeated_runs import (
    LayerCall,
    RepeatedRuns,
    floating,
    relaid,
)

TOLERANCE = 1e-6  # of the largest output: below, two numbers are the same
HOLDS, BROKEN, NOT_APPLICABLE = "holds", "broken", "not applicable"
REPEATED = "the same inputs again"
SAMPLES = "another sample changed"
ALONE = "one sample alone"
LATER = "later positions changed"
OUT_OF_REACH = "positions out of reach changed"
MASKED = "masked positions changed"
PREFIX = "a prefix alone"
CACHED = "token by token with a cache"
CHECKPOINTED = "checkpointed"
LAYOUT = "another memory layout"
INDEPENDENT = "independent"  # an axis whose positions do not see each other
NUM_CACHED = 3  # tokens that are decoded one by one


Run = Callable[..., list[Tensor]]
# before, after, and the elements that count; None for all
Pairs = list[tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Invariance:
    """The answer to one question.

    Attributes:
        name: of the change.
        status: "holds", "broken" or "not applicable".
        moved: the largest move of an output that float32 keeps, relative to the largest output.
        layer: of a broken one, the first layer in the order of the run whose output moves and stays in float32; None
            where none was found.
        note: why a question is not applicable, or what was compared.
    """

    name: str
    status: str
    moved: float = 0.0
    layer: str | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.status != BROKEN:
            return f"{self.status}{f' ({self.note})' if self.note else ''}"
        if math.isinf(self.moved):
            return f"BROKEN: {self.note or 'an output becomes infinite'}"
        place = "" if self.layer is None else f", first in {self.layer or '(model)'}"
        return f"BROKEN: moves by {self.moved:.2g} of the largest output{place}{f' ({self.note})' if self.note else ''}"


@dataclass
class Kept:
    """What float32 keeps when one position of an axis of the inputs changes.

    Attributes:
        changed: the changed inputs.
        position: that was changed.
        outputs: number of an output -> its elements that float32 keeps.
        slices: (number of an output, its dimension) -> the positions that float32 keeps.
    """

    changed: tuple[Any, ...]
    position: int
    outputs: dict[int, Tensor] = field(default_factory=dict)
    slices: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """The part of outputs that smaller inputs give: of ``dims`` of ``size``, ``length`` from ``start`` on."""

    dims: Mapping[int, int]
    size: int
    start: int
    length: int


def find_invariances(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[list[Invariance], list[str]]:
    """Ask all questions; return the answers, and the layers whose empty running ranges were filled for them.

    The caller puts the model back, see ``as_it_was``.
    """
    with ExitStack() as undo:
        try:
            runs = RepeatedRuns(model, inputs, undo)
            return _Questions(runs, inputs).answers(), runs.filled
        except Exception as problem:
            note = f"the model cannot be evaluated: {_shortened(problem)}"
            return [Invariance(REPEATED, NOT_APPLICABLE, note=note)], []


class _Questions:
    """The questions to one model and its inputs."""

    def __init__(self, runs: RepeatedRuns, inputs: tuple[Any, ...]) -> None:
        self.runs, self.inputs = runs, inputs
        self.leaves = leaves(inputs)
        self.masks = find_masks(self.leaves)
        self.float32 = runs.outputs(inputs, False)
        self.quantized = runs.outputs(inputs, True)
        self.kept: dict[Axis, list[Kept]] = {}
        self.kinds: dict[Axis, str] = {}

    def answers(self) -> list[Invariance]:
        """Return all answers; of a model that gives other outputs for the same inputs only this one."""
        again = self._try(REPEATED, self._repeat)
        if again.status != HOLDS:
            return [again]
        self._find_axes()
        return [
            self._perturbed(SAMPLES, "independent of each other along no axis"),
            self._try(ALONE, self._alone),
            self._perturbed(LATER, "no earlier output is kept"),
            self._try(PREFIX, self._prefix),
            self._try(CACHED, self._cached),
            self._perturbed(OUT_OF_REACH, "every position reaches every output"),
            self._try(MASKED, self._masked),
            self._try(CHECKPOINTED, self._checkpointed),
            self._try(LAYOUT, self._layout),
        ]

    # --- what float32 keeps -----------------------------------------------------------------------------------------

    def _find_axes(self) -> None:
        """Change single positions of every axis that an output may share, and note what float32 keeps."""
        sizes = {size for y in self.float32 for size in y.shape}
        for number, leaf in enumerate(self.leaves):
            axes = [
                Axis(number, dim, size)
                for dim, size in enumerate(leaf.shape)
                if size > 1 and size in sizes
            ]
            contents = [] if number in self.masks else new_contents(leaf)
            if not axes or not contents:
                continue
            with suppress(
                Exception
            ):  # a model may not take other contents, such as other edges
                other = self.runs.outputs(
                    replaced(self.inputs, {number: contents[0]}), False
                )
                depends = [
                    ~_same(a, b) for a, b in zip(self.float32, other, strict=True)
                ]
                for axis in axes:
                    self._look_at(axis, contents, depends)
        self._name_axes()

    def _look_at(
        self, axis: Axis, contents: list[Tensor], depends: list[Tensor]
    ) -> None:
        """Note what float32 keeps when positions of one axis change."""
        found = []
        for position in dict.fromkeys((axis.size - 1, (axis.size - 1) // 2)):
            kept = self._kept_at(axis, position, contents)
            found.append(kept)
        aligned = {
            key
            for kept in found
            for key, slices in kept.slices.items()
            if slices.any() and not slices.all()
        }
        if not aligned:
            return
        for kept in found:
            kept.slices = {
                key: slices for key, slices in kept.slices.items() if key in aligned
            }
            for (number, dim), slices in kept.slices.items():
                elements = _along(slices, dim, self.float32[number]) & depends[number]
                kept.outputs[number] = (
                    kept.outputs.get(number, torch.zeros_like(elements)) | elements
                )
        self.kept[axis] = found
        self.kinds[axis] = _kind_of(found)

    def _kept_at(self, axis: Axis, position: int, contents: list[Tensor]) -> Kept:
        leaf = self.leaves[axis.number]
        kept = Kept(self.inputs, position)
        for content in contents:
            kept.changed = replaced(
                self.inputs, {axis.number: at(leaf, content, axis.dim, position)}
            )
            after = self.runs.outputs(kept.changed, False)
            for key, slices in _equal_slices(self.float32, after, axis.size).items():
                kept.slices[key] = kept.slices.get(key, slices) & slices
            if not any(slices.any() for slices in kept.slices.values()):
                break
        return kept

    def _name_axes(self) -> None:
        """Take the first axis along which outputs are independent as that of the samples, for all inputs."""
        aligned = {axis: self._output_dims(axis) for axis in self.kinds}
        others = [
            aligned[axis] for axis, kind in self.kinds.items() if kind != INDEPENDENT
        ]
        independent = [axis for axis, kind in self.kinds.items() if kind == INDEPENDENT]
        self.samples: dict[
            int, Axis
        ] = {}  # number of a tensor -> the axis of its samples
        first = next(
            (axis for axis in independent if aligned[axis] not in others), None
        )
        for axis in independent:
            if (
                first is not None
                and axis.size == first.size
                and aligned[axis] == aligned[first]
            ):
                self.samples.setdefault(axis.number, axis)
        for axis in independent:
            self.kinds[axis] = (
                SAMPLES if axis in self.samples.values() else OUT_OF_REACH
            )

    def _output_dims(self, axis: Axis) -> dict[int, int]:
        """Return number of an output -> its dimension that belongs to an axis of the inputs."""
        return {number: dim for number, dim in reversed(self.kept[axis][0].slices)}

    # --- questions ----------------------------------------------------------------------------------------------------

    def _perturbed(self, name: str, note: str) -> Invariance:
        """Change positions, and look at what float32 keeps."""
        axes = [axis for axis, kind in self.kinds.items() if kind == name]
        answers = []
        for axis in axes:
            for kept in self.kept[axis]:
                where = f"input {axis.number + 1}, dimension {axis.dim}"
                answers.append(
                    self._try(name, partial(self._perturb, kept=kept, where=where))
                )
        if not answers:
            return Invariance(name, NOT_APPLICABLE, note=note)
        order = (BROKEN, HOLDS, NOT_APPLICABLE)
        return min(
            answers, key=lambda answer: (order.index(answer.status), -answer.moved)
        )

    def _perturb(self, name: str, kept: Kept, where: str) -> Invariance:
        after = self.runs.outputs(kept.changed, True)
        pairs: Pairs = [
            (self.quantized[i], after[i], elements)
            for i, elements in kept.outputs.items()
        ]
        moved = largest_move(pairs)
        if moved <= TOLERANCE:
            return Invariance(name, HOLDS)
        matched = partial(_kept_slices, list(kept.slices.values()))
        layer = self._first_layer(
            self._forward(self.inputs), self._forward(kept.changed), matched
        )
        return Invariance(name, BROKEN, moved, layer, where)

    def _repeat(self, name: str) -> Invariance:
        return self._compare(
            name,
            self._forward(self.inputs),
            "two float32 passes over the same inputs differ",
        )

    def _alone(self, name: str) -> Invariance:
        if not self.samples:
            return Invariance(name, NOT_APPLICABLE, note=self._no_samples())
        first = next(iter(self.samples.values()))
        dims = {n: {_dim_like(first, x)} for n, x in enumerate(self.leaves)}
        dims |= {n: {axis.dim} for n, axis in self.samples.items()}
        answers = []
        for start in (first.size - 1, 0):
            alone = cut(self.inputs, dims, first.size, start, 1)
            part = Part(self._output_dims(first), first.size, start, 1)
            answers.append(
                self._compare(
                    name, self._forward(alone), "float32 gives other outputs, too", part
                )
            )
        return max(answers, key=lambda answer: answer.moved)

    def _prefix(self, name: str) -> Invariance:
        axis = self._axis_of(LATER)
        if axis is None:
            return Invariance(name, NOT_APPLICABLE, note="no earlier output is kept")
        length = max(1, axis.size // 2)
        dims = {}
        for number, leaf in enumerate(self.leaves):
            of_samples = {self.samples[number].dim} if number in self.samples else set()
            like = {
                d for d, size in enumerate(leaf.shape) if size == axis.size
            } - of_samples
            own = {
                a.dim
                for a, kind in self.kinds.items()
                if kind == LATER and a.number == number
            }
            dims[number] = own or (like if number in self.masks else like & {axis.dim})
        prefix = cut(self.inputs, dims, axis.size, 0, length)
        part = Part(self._output_dims(axis), axis.size, 0, length)
        return self._compare(
            name, self._forward(prefix), "float32 gives other outputs, too", part
        )

    def _cached(self, name: str) -> Invariance:
        axis = self._axis_of(LATER)
        names = list(inspect.signature(self.runs.model.forward).parameters)
        if axis is None or not {"past_key_values", "use_cache"} <= set(names):
            return Invariance(
                name,
                NOT_APPLICABLE,
                note="forward takes no past_key_values and use_cache",
            )
        decode = partial(_decode, self.runs.model, names)

        def run(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            outputs = self.runs.outputs(
                self.inputs, is_quantized, calls, partial(decode, is_cached=True)
            )
            if calls is not None:  # those of the last token
                ends = [i for i, call in enumerate(calls) if call.caller is None]
                del calls[: ends[-2] + 1]
            return outputs

        def full(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs(
                self.inputs, is_quantized, calls, partial(decode, is_cached=False)
            )

        last = Part({}, axis.size, axis.size - 1, 1)
        return self._compare(
            name, run, "float32 gives other outputs, too", full=full, of_layers=last
        )

    def _masked(self, name: str) -> Invariance:
        answers = [self._perturb(name, kept, "") for kept in self._masked_changes()]
        if not answers:
            return Invariance(
                name,
                NOT_APPLICABLE,
                note="no input is a mask of positions that float32 leaves out",
            )
        return max(answers, key=lambda answer: answer.moved)

    def _masked_changes(self) -> Iterator[Kept]:
        for mask, (number, leaf) in itertools.product(
            self.masks.values(), enumerate(self.leaves)
        ):
            contents = [] if number in self.masks else new_contents(leaf)
            for places in places_of(mask, leaf) if contents else ():
                kept = self._kept_beside(number, places, contents)
                if kept.outputs:
                    yield kept

    def _kept_beside(self, number: int, places: Tensor, contents: list[Tensor]) -> Kept:
        """Change the content of masked places, and note the outputs of which float32 keeps all others."""
        leaf, kept = self.leaves[number], Kept(self.inputs, 0)
        for content in contents:
            where = places.reshape(*places.shape, *(1,) * (leaf.dim() - places.dim()))
            kept.changed = replaced(
                self.inputs, {number: torch.where(where, content, leaf)}
            )
            after = self.runs.outputs(kept.changed, False)
            for i, (a, b) in enumerate(zip(self.float32, after, strict=True)):
                elements = torch.ones_like(a, dtype=torch.bool)
                if a.shape[: places.dim()] == places.shape:
                    elements &= ~places.reshape(
                        *places.shape, *(1,) * (a.dim() - places.dim())
                    )
                is_kept = bool((_same(a, b) | ~elements).all())
                kept.outputs[i] = elements & is_kept & kept.outputs.get(i, elements)
        kept.outputs = {
            i: elements for i, elements in kept.outputs.items() if elements.any()
        }
        if kept.outputs and not self._depends_on(number, kept.outputs):
            kept.outputs = {}
        kept.slices = {(-1, 0): ~places}
        return kept

    def _depends_on(self, number: int, elements: Mapping[int, Tensor]) -> bool:
        """Return whether elements of outputs move at all when a tensor changes everywhere."""
        content = new_contents(self.leaves[number])[0]
        after = self.runs.outputs(replaced(self.inputs, {number: content}), False)
        return any(
            bool((~_same(self.float32[i], after[i]) & kept).any())
            for i, kept in elements.items()
        )

    def _checkpointed(self, name: str) -> Invariance:
        def moves(is_quantized: bool) -> dict[str, float]:
            before, after = (
                self.runs.gradients(self.inputs, is_quantized, again)
                for again in (False, True)
            )
            return {
                key: largest_move([(before[key], after[key], None)])
                for key in before
                if key in after
            }

        try:
            found = moves(True)
        except RuntimeError as problem:  # torch compares what a recomputed pass saves
            moves(False)
            return Invariance(
                name,
                BROKEN,
                math.inf,
                None,
                f"the quantised model raises: {_shortened(problem)}",
            )
        if max(found.values(), default=0.0) <= TOLERANCE:
            return Invariance(name, HOLDS)
        if max(moves(False).values()) > TOLERANCE:
            return Invariance(
                name, NOT_APPLICABLE, note="float32 gives other gradients, too"
            )
        return Invariance(
            name,
            BROKEN,
            max(found.values()),
            self._first_recomputed(),
            "outputs and gradients",
        )

    def _layout(self, name: str) -> Invariance:
        new = {n: relaid(x) for n, x in enumerate(self.leaves) if x.is_floating_point()}
        changed = replaced(self.inputs, new)

        def run(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs_relaid(changed, is_quantized, calls)

        return self._compare(name, run, "float32 gives other outputs, too")

    # --- comparing --------------------------------------------------------------------------------------------------

    def _try(self, name: str, question: Callable[[str], Invariance]) -> Invariance:
        """Ask a question; one that the model cannot be asked is not applicable."""
        try:
            return question(name)
        except Exception as problem:
            note = f"the model refuses such inputs: {_shortened(problem)}"
            return Invariance(name, NOT_APPLICABLE, note=note)

    def _compare(
        self,
        name: str,
        run: Run,
        note: str,
        part: Part | None = None,
        full: Run | None = None,
        of_layers: Part | None = None,
    ) -> Invariance:
        """Compare another run with that of the inputs, or with ``full``; in float32 where quantised outputs differ.

        ``part``: of the outputs that is compared; ``of_layers``: of those of layers, where it is another one.
        """
        before = self.quantized if full is None else full(True)
        moved = largest_move(_matched_outputs(before, run(True), part))
        if moved <= TOLERANCE:
            return Invariance(name, HOLDS)
        before = self.float32 if full is None else full(False)
        if largest_move(_matched_outputs(before, run(False), part)) > TOLERANCE:
            return Invariance(name, NOT_APPLICABLE, note=note)
        layer = self._first_layer(
            full or self._forward(self.inputs),
            run,
            partial(_same_part, of_layers or part),
        )
        return Invariance(name, BROKEN, moved, layer)

    def _forward(self, inputs: tuple[Any, ...]) -> Run:
        def run(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs(inputs, is_quantized, calls)

        return run

    def _first_layer(
        self, before: Run, after: Run, matched: Callable[[Tensor, Tensor], Pairs]
    ) -> str | None:
        """Return the first layer whose float32 output stays in ``matched`` parts, and whose quantised one moves."""
        recorded: list[list[LayerCall]] = []
        for is_quantized, run in itertools.product((False, True), (before, after)):
            recorded.append([])
            run(is_quantized, recorded[-1])

        def moves(calls: Sequence[LayerCall], attribute: str) -> bool:
            for a, b, c, d in zip(
                *(getattr(call, attribute) for call in calls), strict=False
            ):
                for plain, rounded in zip(matched(a, b), matched(c, d), strict=True):
                    if largest_move([plain]) <= TOLERANCE < largest_move([rounded]):
                        return True
            return False

        return _first_of(zip(*recorded, strict=False), moves)

    def _first_recomputed(self) -> str | None:
        """Return the first layer whose output is another one when a checkpoint computes it again."""
        calls: list[LayerCall] = []
        self.runs.gradients(self.inputs, True, True, calls)
        first = 1 + next(i for i, call in enumerate(calls) if call.caller is None)

        def moves(calls: Sequence[LayerCall], attribute: str) -> bool:
            before, after = (getattr(call, attribute) for call in calls)
            pairs: Pairs = [
                (a, b, None)
                for a, b in zip(before, after, strict=False)
                if a.shape == b.shape
            ]
            return largest_move(pairs) > TOLERANCE

        return _first_of(zip(calls[:first], calls[first:], strict=False), moves)

    def _axis_of(self, kind: str) -> Axis | None:
        return next((axis for axis, its in self.kinds.items() if its == kind), None)

    def _no_samples(self) -> str:
        return "outputs are independent of each other along no axis"


def _first_of(
    groups: Iterable[Sequence[LayerCall]],
    moves: Callable[[Sequence[LayerCall], str], bool],
) -> str | None:
    """Return the first layer whose outputs move, in the order in which calls end; "" where it is the model itself.

    ``groups``: the same call in every run.
    """
    for calls in groups:
        if len({call.layer for call in calls}) > 1:
            return None  # the model takes another way
        if not moves(calls, "outputs"):
            continue
        while calls[0].caller is not None and moves(
            calls, "inputs"
        ):  # moved by what called it
            calls = [call.caller or call for call in calls]
        return calls[0].layer
    return ""  # no part of the model


# --- comparing outputs ------------------------------------------------------------------------------------------------


def largest_move(pairs: Pairs) -> float:
    """Return the largest move of an element, relative to the largest of its output."""
    largest = 0.0
    for before, after, elements in pairs:
        difference = torch.where(
            _same(before, after), 0.0, (before - after).abs().double()
        ).nan_to_num(torch.inf)
        if elements is not None:
            difference = difference * elements
        finite = before[before.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        move = float(difference.max()) if difference.numel() else 0.0
        if move > 0:
            largest = max(largest, move / scale if scale else torch.inf)
    return largest


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _along(slices: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return which elements belong to the chosen slices of a dimension."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return slices.reshape(shape).expand_as(like)


def _equal_slices(
    before: list[Tensor], after: list[Tensor], size: int
) -> dict[tuple[int, int], Tensor]:
    """Return (number of an output, its dimension of a size) -> the slices that are equal bit for bit."""
    found = {}
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        for dim in range(a.dim()):
            if a.shape[dim] == size:
                found[number, dim] = (
                    _same(a, b).movedim(dim, 0).reshape(size, -1).all(1)
                )
    return found


def _kind_of(found: list[Kept]) -> str:
    """Return what kind of axis it is by the slices that float32 keeps."""
    keys = found[0].slices.keys()
    others = [
        all(
            int((~k.slices[key]).sum()) == 1 and not k.slices[key][k.position]
            for k in found
        )
        for key in keys
    ]
    if any(others):
        return INDEPENDENT
    earlier = [
        all(bool(k.slices[key][: k.position].all()) for k in found) for key in keys
    ]
    return LATER if any(earlier) else OUT_OF_REACH


def _kept_slices(kept: list[Tensor], before: Tensor, after: Tensor) -> Pairs:
    """Return the parts of a layer's output that belong to kept slices of an axis of the same length."""
    pairs: Pairs = []
    if before.shape != after.shape:
        return pairs
    for slices in kept:
        if before.shape[: slices.dim()] == slices.shape and slices.dim() > 1:
            pairs.append((before[slices], after[slices], None))
            continue
        for dim in range(before.dim()):
            if slices.dim() == 1 and before.shape[dim] == len(slices) and slices.any():
                chosen = slices.nonzero()[:, 0]
                pairs.append(
                    (
                        before.index_select(dim, chosen),
                        after.index_select(dim, chosen),
                        None,
                    )
                )
    return pairs


def _same_part(part: Part | None, before: Tensor, after: Tensor) -> Pairs:
    """Return what two outputs of a layer have in common, of which the second may be that of a part of the inputs."""
    if before.shape == after.shape:
        return [(before, after, None)]
    if part is None or before.dim() != after.dim():
        return []
    other = [
        dim for dim in range(before.dim()) if before.shape[dim] != after.shape[dim]
    ]
    if len(other) != 1 or (before.shape[other[0]], after.shape[other[0]]) != (
        part.size,
        part.length,
    ):
        return []
    return [(before.narrow(other[0], part.start, part.length), after, None)]


def _matched_outputs(
    before: list[Tensor], after: list[Tensor], part: Part | None
) -> Pairs:
    """Return outputs and those of another run, side by side; ValueError where they cannot be."""
    pairs: Pairs = []
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if part is not None and number not in part.dims:
            continue
        wanted = (
            a if part is None else a.narrow(part.dims[number], part.start, part.length)
        )
        if wanted.shape != b.shape:
            raise ValueError(
                f"the output has shape {tuple(b.shape)} where {tuple(wanted.shape)} was expected"
            )
        pairs.append((wanted, b, None))
    return pairs


def _dim_like(axis: Axis, x: Tensor) -> int:
    """Return the dimension of another input that has the samples: the same one, or else the first."""
    return axis.dim if x.dim() > axis.dim and x.shape[axis.dim] == axis.size else 0


def _decode(
    model: nn.Module, names: list[str], *inputs: Any, is_cached: bool
) -> Tensor:
    """Return the outputs of a decoder with a key and value cache, or without: the last tokens one by one.

    Its inputs have (batch, tokens, ...); a mask of attention grows with the tokens.
    """
    given = {
        name: value
        for name, value in zip(names, inputs, strict=False)
        if value is not None
    }
    given.pop("labels", None)
    length = inputs[0].shape[1]
    first = max(1, length - NUM_CACHED)
    if not is_cached:
        return _logits(model(**given, use_cache=False))
    past, pieces = None, []
    for start, stop in [(0, first), *((t, t + 1) for t in range(first, length))]:
        now = dict(given)
        for name, value in given.items():
            if (
                isinstance(value, Tensor)
                and value.dim() > 1
                and value.shape[1] == length
            ):
                now[name] = value[:, (0 if name == "attention_mask" else start) : stop]
        output = model(**now, past_key_values=past, use_cache=True)
        past = (
            output["past_key_values"]
            if isinstance(output, Mapping)
            else output.past_key_values
        )
        pieces.append(_logits(output))
    return torch.cat(pieces, 1)


def _shortened(problem: Exception) -> str:
    return " ".join(str(problem).split())[:100] or type(problem).__name__


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    return floating(output)[0] if logits is None else logits
