"""Tests of invariances: outputs that an input change does not move in float32 must not move at low precision either.

The problem: rounding may connect parts that a model computes apart. Where the range of an operand spans several tokens,
a later token moves the rounding of an earlier one; where zero is no value of a grid, a masked token has some influence.
A loss does not show it, and perplexities, cached decoding and padded batches are then those of another model.

The design: change something in the inputs, and compare the outputs before and after. *Outputs that do not
change in float32 must not change in the quantised model.* Nothing has to be known about the architecture: the float32
run determines these outputs. An output counts as unchanged where

- a whole slice of it along an axis as long as the changed axis of the input is equal bit for bit, for two different
  contents of the changed position: single equal elements are no evidence, as a ReLU may be zero both times;
- it moves when the whole input changes, and so does depend on it.

Tests that change the sizes of the inputs (a sample alone, a prefix, a cache) take outputs as unchanged that differ by
less than ``MOVE_TOLERANCE`` of the largest one; all sums are computed in float64 and rounded, see ``exact_sums``.

The trade-offs: everything runs in evaluation mode and at one low number of bits, and most changes are tried at two
positions. "holds" means that no fault was found with these inputs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cpt_core.validation import ForwardInputs
from cpt_extras.diagnostics.input_changes import (
    Axis,
    change_position,
    cut_inputs,
    find_masks,
    leaves,
    masked_positions,
    new_contents,
    replace_leaves,
)
from cpt_extras.diagnostics.repeated_runs import (
    LayerCall,
    RepeatedRuns,
    change_layout,
    floating,
)

MOVE_TOLERANCE = 1e-6  # relative to the largest output; smaller moves count as none
# arguments of a decoder that are left out where its tokens are decoded one by one
NOT_DECODED = "labels", "past_key_values", "use_cache"
HOLDS, BROKEN, NOT_APPLICABLE = "holds", "broken", "not applicable"

# names of invariances, and kinds of axes
REPEATED_PASS = "the same inputs again"
OTHER_SAMPLES = "another sample changed"
ONE_SAMPLE = "one sample alone"
LATER_POSITIONS = "later positions changed"
OUT_OF_REACH = "positions out of reach changed"
MASKED_POSITIONS = "masked positions changed"
PREFIX_ALONE = "a prefix alone"
CACHED_DECODING = "token by token with a cache"
CHECKPOINTING = "checkpointed"
MEMORY_LAYOUT = "another memory layout"
INDEPENDENT = "independent"  # an axis whose positions do not influence each other
NUM_DECODED_TOKENS = 3  # one by one, with a cache

# notes of tests that are not applicable
NO_SAMPLES = "outputs are independent of each other along no axis"
OTHER_IN_FLOAT32 = "float32 gives other outputs, too"
# note of tests that did not run on the formats of the model
ON_AFFINE_GRIDS = "on the paper's grids: no level of the formats fits all layers"


Run = Callable[..., list[Tensor]]


class Pair(NamedTuple):
    """A tensor of two runs.

    Attributes:
        before: of the first run.
        after: of the second run.
        elements: mask of the elements that are compared; None for all.
    """

    before: Tensor
    after: Tensor
    elements: Tensor | None = None


@dataclass(frozen=True)
class Invariance:
    """Result of the test of one invariance.

    Attributes:
        name: of the change.
        status: "holds", "broken" or "not applicable".
        moved: the largest move of an output that does not change in float32, relative to the largest output.
        layer: name of the first layer, in the order of execution, whose output moves and does not change in float32;
            None where there is none.
        note: why the test is not applicable, or what was compared.
    """

    name: str
    status: str
    moved: float = 0.0
    layer: str | None = None
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        if self.status != BROKEN:
            return f"{self.status}{note}"
        if math.isinf(self.moved):
            return f"BROKEN: {self.note or 'an output becomes infinite'}"

        layer = ""
        if self.layer is not None:
            layer = f", first in {self.layer or '(model)'}"
        return f"BROKEN: moves by {self.moved:.2g} of the largest output{layer}{note}"


@dataclass
class Perturbation:
    """A change of one position of the inputs, and the outputs that it does not change in float32.

    Attributes:
        inputs: the changed inputs.
        position: index of the changed position.
        outputs: masks of the unchanged elements, by number of an output.
        slices: masks of the unchanged slices, by (number of an output, its dimension).
    """

    inputs: ForwardInputs
    position: int
    outputs: dict[int, Tensor] = field(default_factory=dict)
    slices: dict[tuple[int, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Part of the outputs that smaller inputs give.

    Attributes:
        dims: dimension that is cut, by number of an output.
        size: of the dimension in the whole output.
        start: first position of the part.
        length: of the part.
    """

    dims: Mapping[int, int]
    size: int
    start: int
    length: int


def find_invariances(
    model: nn.Module, inputs: ForwardInputs
) -> tuple[list[Invariance], list[str]]:
    """Test all invariances of a model.

    The caller restores the model, see ``preserve_state``.

    Returns:
        The results, and the names of the layers whose empty running ranges were filled for the tests.
    """
    with ExitStack() as undo:
        try:
            runs = RepeatedRuns(model, inputs, undo)
            results = _InvarianceTests(runs, inputs).results()
            if runs.on_affine_grids:
                results = [_note_affine_grids(result) for result in results]
            return results, runs.filled
        except Exception as problem:
            note = f"the model cannot be evaluated: {_shorten(problem)}"
            return [Invariance(REPEATED_PASS, NOT_APPLICABLE, note=note)], []


def _note_affine_grids(result: Invariance) -> Invariance:
    """Return a result with a note that its test ran on the paper's grids."""
    if result.status == NOT_APPLICABLE:
        return result
    notes = [note for note in (result.note, ON_AFFINE_GRIDS) if note]
    return replace(result, note="; ".join(notes))


class _InvarianceTests:
    """The tests of one model with its inputs.

    Attributes:
        runs: of the model.
        inputs: of the model.
        leaves: tensors of the inputs.
        masks: leaves that are masks, by number.
        float32: outputs in float32.
        quantized: outputs at low precision.
        perturbations: of every axis with outputs that do not change in float32.
        kinds: kinds of these axes.
        sample_axes: axis of the samples, by number of a leaf.
    """

    def __init__(self, runs: RepeatedRuns, inputs: ForwardInputs) -> None:
        self.runs = runs
        self.inputs = inputs
        self.leaves = leaves(inputs)
        self.masks = find_masks(self.leaves)
        self.float32 = runs.outputs(inputs, False)
        self.quantized = runs.outputs(inputs, True)
        self.perturbations: dict[Axis, list[Perturbation]] = {}
        self.kinds: dict[Axis, str] = {}
        self.sample_axes: dict[int, Axis] = {}

    def results(self) -> list[Invariance]:
        """Return all results; only the first one for a model whose outputs differ from pass to pass."""
        repeated_pass = self._try(REPEATED_PASS, self._repeat)
        if repeated_pass.status != HOLDS:
            return [repeated_pass]

        self._find_axes()
        return [
            self._perturbed(OTHER_SAMPLES, "independent of each other along no axis"),
            self._try(ONE_SAMPLE, self._alone),
            self._perturbed(LATER_POSITIONS, "no earlier output is kept"),
            self._try(PREFIX_ALONE, self._prefix),
            self._try(CACHED_DECODING, self._cached),
            self._perturbed(OUT_OF_REACH, "every position reaches every output"),
            self._try(MASKED_POSITIONS, self._masked),
            self._try(CHECKPOINTING, self._checkpointed),
            self._try(MEMORY_LAYOUT, self._layout),
        ]

    # --- unchanged outputs in float32 --------------------------------------------------------------------------------

    def _find_axes(self) -> None:
        """Change single positions of every axis that an output may share, and find what does not change in float32."""
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
            # a model may refuse other contents, such as other edges
            with suppress(Exception):
                changed = replace_leaves(self.inputs, {number: contents[0]})
                outputs = self.runs.outputs(changed, False)
                depends = [
                    ~_equal(a, b) for a, b in zip(self.float32, outputs, strict=True)
                ]
                for axis in axes:
                    self._examine_axis(axis, contents, depends)
        self._find_sample_axes()

    def _examine_axis(
        self, axis: Axis, contents: list[Tensor], depends: list[Tensor]
    ) -> None:
        """Find the outputs that do not change in float32 when positions of one axis change.

        Args:
            axis: of an input.
            contents: other contents of the input.
            depends: masks of the elements of every output that depend on the input.
        """
        positions = dict.fromkeys((axis.size - 1, (axis.size - 1) // 2))
        perturbations = [self._perturb_position(axis, p, contents) for p in positions]
        aligned = set()  # dimensions of outputs of which some slices change, not all
        for perturbation in perturbations:
            for key, slices in perturbation.slices.items():
                if slices.any() and not slices.all():
                    aligned.add(key)
        if not aligned:
            return

        for perturbation in perturbations:
            all_slices = perturbation.slices
            perturbation.slices = {k: all_slices[k] for k in all_slices if k in aligned}
            for (number, dim), slices in perturbation.slices.items():
                elements = _along(slices, dim, self.float32[number]) & depends[number]
                unchanged = perturbation.outputs.get(number, torch.zeros_like(elements))
                perturbation.outputs[number] = unchanged | elements
        self.perturbations[axis] = perturbations
        self.kinds[axis] = _axis_kind(perturbations)

    def _perturb_position(
        self, axis: Axis, position: int, contents: list[Tensor]
    ) -> Perturbation:
        """Change one position to several contents; find the slices of outputs that never change in float32."""
        leaf = self.leaves[axis.number]
        perturbation = Perturbation(self.inputs, position)
        for content in contents:
            changed = change_position(leaf, content, axis.dim, position)
            perturbation.inputs = replace_leaves(self.inputs, {axis.number: changed})
            after = self.runs.outputs(perturbation.inputs, False)
            for key, slices in _equal_slices(self.float32, after, axis.size).items():
                former = perturbation.slices.get(key, slices)
                perturbation.slices[key] = former & slices
            if not any(slices.any() for slices in perturbation.slices.values()):
                break
        return perturbation

    def _find_sample_axes(self) -> None:
        """Take the first axis along which outputs are independent as the axis of the samples, for all inputs."""
        aligned = {axis: self._output_dims(axis) for axis in self.kinds}
        independent = [axis for axis, kind in self.kinds.items() if kind == INDEPENDENT]
        dependent_dims = [
            aligned[axis] for axis in self.kinds if axis not in independent
        ]
        candidates = [a for a in independent if aligned[a] not in dependent_dims]
        if candidates:
            first = candidates[0]
            for axis in independent:
                if axis.size == first.size and aligned[axis] == aligned[first]:
                    self.sample_axes.setdefault(axis.number, axis)
        for axis in independent:
            is_sample_axis = axis in self.sample_axes.values()
            self.kinds[axis] = OTHER_SAMPLES if is_sample_axis else OUT_OF_REACH

    def _output_dims(self, axis: Axis) -> dict[int, int]:
        """Return the dimension of every output that belongs to an axis of the inputs, by number of the output."""
        slices = self.perturbations[axis][0].slices
        return {number: dim for number, dim in reversed(slices)}

    # --- tests ----------------------------------------------------------------------------------------------------

    def _perturbed(self, name: str, note: str) -> Invariance:
        """Test the perturbations of all axes of a kind; return the worst result."""
        axes = [axis for axis, kind in self.kinds.items() if kind == name]
        results = []
        for axis in axes:
            place = f"input {axis.number + 1}, dimension {axis.dim}"
            for perturbation in self.perturbations[axis]:
                test = partial(self._perturb, perturbation=perturbation, place=place)
                results.append(self._try(name, test))
        if not results:
            return Invariance(name, NOT_APPLICABLE, note=note)
        order = (BROKEN, HOLDS, NOT_APPLICABLE)
        return min(results, key=lambda r: (order.index(r.status), -r.moved))

    def _perturb(self, name: str, perturbation: Perturbation, place: str) -> Invariance:
        after = self.runs.outputs(perturbation.inputs, True)
        pairs = [
            Pair(self.quantized[i], after[i], elements)
            for i, elements in perturbation.outputs.items()
        ]
        moved = largest_move(pairs)
        if moved <= MOVE_TOLERANCE:
            return Invariance(name, HOLDS)

        matched = partial(_unchanged_slices, list(perturbation.slices.values()))
        layer = self._first_layer(
            self._forward(self.inputs), self._forward(perturbation.inputs), matched
        )
        return Invariance(name, BROKEN, moved, layer, place)

    def _repeat(self, name: str) -> Invariance:
        return self._compare(
            name,
            self._forward(self.inputs),
            "two float32 passes over the same inputs differ",
        )

    def _alone(self, name: str) -> Invariance:
        if not self.sample_axes:
            return Invariance(name, NOT_APPLICABLE, note=NO_SAMPLES)

        first = next(iter(self.sample_axes.values()))
        dims = {n: {_sample_dim(first, x)} for n, x in enumerate(self.leaves)}
        dims |= {n: {axis.dim} for n, axis in self.sample_axes.items()}
        results = []
        for start in (first.size - 1, 0):
            alone = cut_inputs(self.inputs, dims, first.size, start, 1)
            part = Part(self._output_dims(first), first.size, start, 1)
            results.append(
                self._compare(name, self._forward(alone), OTHER_IN_FLOAT32, part)
            )
        return max(results, key=lambda result: result.moved)

    def _prefix(self, name: str) -> Invariance:
        axis = self._first_axis(LATER_POSITIONS)
        if axis is None:
            return Invariance(name, NOT_APPLICABLE, note="no earlier output is kept")

        length = max(1, axis.size // 2)
        dims = {n: self._token_dims(n, axis) for n in range(len(self.leaves))}
        prefix = cut_inputs(self.inputs, dims, axis.size, 0, length)
        part = Part(self._output_dims(axis), axis.size, 0, length)
        return self._compare(name, self._forward(prefix), OTHER_IN_FLOAT32, part)

    def _token_dims(self, number: int, axis: Axis) -> set[int]:
        """Return the dimensions of a leaf that have the tokens of an axis."""
        token_dims = {
            a.dim
            for a, kind in self.kinds.items()
            if kind == LATER_POSITIONS and a.number == number
        }
        if token_dims:
            return token_dims

        shape = self.leaves[number].shape
        same_size = {dim for dim, size in enumerate(shape) if size == axis.size}
        if number in self.sample_axes:
            same_size.discard(self.sample_axes[number].dim)
        return same_size if number in self.masks else same_size & {axis.dim}

    def _cached(self, name: str) -> Invariance:
        axis = self._first_axis(LATER_POSITIONS)
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
            if calls is not None:  # only the calls for the last token are compared
                ends = [i for i, call in enumerate(calls) if call.caller is None]
                del calls[: ends[-2] + 1]
            return outputs

        def full(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs(
                self.inputs, is_quantized, calls, partial(decode, is_cached=False)
            )

        last_token = Part({}, axis.size, axis.size - 1, 1)
        return self._compare(
            name, run, OTHER_IN_FLOAT32, full=full, layer_part=last_token
        )

    def _masked(self, name: str) -> Invariance:
        results = [self._perturb(name, p, "") for p in self._masked_changes()]
        if not results:
            return Invariance(
                name,
                NOT_APPLICABLE,
                note="no input is a mask of positions that float32 leaves out",
            )
        return max(results, key=lambda result: result.moved)

    def _masked_changes(self) -> Iterator[Perturbation]:
        """Yield changes of masked positions after which float32 outputs at other positions do not change."""
        for mask in self.masks.values():
            for number, leaf in enumerate(self.leaves):
                contents = [] if number in self.masks else new_contents(leaf)
                if not contents:
                    continue
                for positions in masked_positions(mask, leaf):
                    perturbation = self._perturb_masked(number, positions, contents)
                    if perturbation.outputs:
                        yield perturbation

    def _perturb_masked(
        self, number: int, positions: Tensor, contents: list[Tensor]
    ) -> Perturbation:
        """Change the content of masked positions; find the outputs of which nothing else changes in float32."""
        leaf = self.leaves[number]
        perturbation = Perturbation(self.inputs, 0)
        for content in contents:
            is_masked = _expand_dims(positions, leaf.dim())
            changed = torch.where(is_masked, content, leaf)
            perturbation.inputs = replace_leaves(self.inputs, {number: changed})
            after = self.runs.outputs(perturbation.inputs, False)
            for i, (a, b) in enumerate(zip(self.float32, after, strict=True)):
                elements = torch.ones_like(a, dtype=torch.bool)
                if a.shape[: positions.dim()] == positions.shape:
                    elements &= ~_expand_dims(positions, a.dim())
                is_unchanged = bool((_equal(a, b) | ~elements).all())
                former = perturbation.outputs.get(i, elements)
                perturbation.outputs[i] = elements & is_unchanged & former

        outputs = {i: e for i, e in perturbation.outputs.items() if e.any()}
        if outputs and not self._depends_on(number, outputs):
            outputs = {}
        perturbation.outputs = outputs
        perturbation.slices = {(-1, 0): ~positions}
        return perturbation

    def _depends_on(self, number: int, elements: Mapping[int, Tensor]) -> bool:
        """Return whether elements of outputs move at all when a whole leaf changes."""
        content = new_contents(self.leaves[number])[0]
        changed = replace_leaves(self.inputs, {number: content})
        after = self.runs.outputs(changed, False)
        for i, is_compared in elements.items():
            moves = ~_equal(self.float32[i], after[i])
            if bool((moves & is_compared).any()):
                return True
        return False

    def _checkpointed(self, name: str) -> Invariance:
        def moves(is_quantized: bool) -> dict[str, float]:
            plain = self.runs.outputs_and_gradients(self.inputs, is_quantized, False)
            checkpointed = self.runs.outputs_and_gradients(
                self.inputs, is_quantized, True
            )
            return {
                key: largest_move([Pair(plain[key], checkpointed[key])])
                for key in plain
                if key in checkpointed
            }

        try:
            quantized_moves = moves(True)
        except RuntimeError as problem:
            # torch compares the tensors that a recomputed pass saves; float32 must pass this check
            moves(False)
            note = f"the quantised model raises: {_shorten(problem)}"
            return Invariance(name, BROKEN, math.inf, None, note)
        moved = max(quantized_moves.values(), default=0.0)
        if moved <= MOVE_TOLERANCE:
            return Invariance(name, HOLDS)
        if max(moves(False).values()) > MOVE_TOLERANCE:
            return Invariance(
                name, NOT_APPLICABLE, note="float32 gives other gradients, too"
            )
        layer = self._first_recomputed()
        return Invariance(name, BROKEN, moved, layer, "outputs and gradients")

    def _layout(self, name: str) -> Invariance:
        new = {
            n: change_layout(x)
            for n, x in enumerate(self.leaves)
            if x.is_floating_point()
        }
        changed = replace_leaves(self.inputs, new)

        def run(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs_in_other_layout(changed, is_quantized, calls)

        return self._compare(name, run, OTHER_IN_FLOAT32)

    # --- comparing --------------------------------------------------------------------------------------------------

    def _try(self, name: str, test: Callable[[str], Invariance]) -> Invariance:
        """Run a test; it is not applicable where the model raises an error."""
        try:
            return test(name)
        except Exception as problem:
            note = f"the model refuses such inputs: {_shorten(problem)}"
            return Invariance(name, NOT_APPLICABLE, note=note)

    def _compare(
        self,
        name: str,
        run: Run,
        note: str,
        part: Part | None = None,
        full: Run | None = None,
        layer_part: Part | None = None,
    ) -> Invariance:
        """Compare a run with the run of the inputs: the quantised outputs, and where they differ the float32 ones.

        Args:
            name: of the invariance.
            run: gives the outputs to compare.
            note: of the result where the float32 outputs differ, too.
            part: of the outputs that is compared; None for whole outputs.
            full: replaces the run of the inputs.
            layer_part: of the outputs of layers that is compared; ``part`` by default.
        """
        before = self.quantized if full is None else full(True)
        moved = largest_move(_matched_outputs(before, run(True), part))
        if moved <= MOVE_TOLERANCE:
            return Invariance(name, HOLDS)
        before = self.float32 if full is None else full(False)
        if largest_move(_matched_outputs(before, run(False), part)) > MOVE_TOLERANCE:
            return Invariance(name, NOT_APPLICABLE, note=note)
        layer = self._first_layer(
            full or self._forward(self.inputs),
            run,
            partial(_common_part, layer_part or part),
        )
        return Invariance(name, BROKEN, moved, layer)

    def _forward(self, inputs: ForwardInputs) -> Run:
        def run(
            is_quantized: bool, calls: list[LayerCall] | None = None
        ) -> list[Tensor]:
            return self.runs.outputs(inputs, is_quantized, calls)

        return run

    def _first_layer(
        self, before: Run, after: Run, matched: Callable[[Tensor, Tensor], list[Pair]]
    ) -> str | None:
        """Return the first layer of whose output ``matched`` parts move at low precision, and not in float32."""
        calls_of_runs: list[list[LayerCall]] = []
        for is_quantized in (False, True):
            for run in (before, after):
                calls_of_run: list[LayerCall] = []
                run(is_quantized, calls_of_run)
                calls_of_runs.append(calls_of_run)

        def moves(calls: Sequence[LayerCall], attribute: str) -> bool:
            tensors = zip(*(getattr(call, attribute) for call in calls), strict=False)
            for plain, plain_after, rounded, rounded_after in tensors:
                plain_pairs = matched(plain, plain_after)
                rounded_pairs = matched(rounded, rounded_after)
                for a, b in zip(plain_pairs, rounded_pairs, strict=True):
                    if largest_move([a]) <= MOVE_TOLERANCE < largest_move([b]):
                        return True
            return False

        return _first_moved_layer(zip(*calls_of_runs, strict=False), moves)

    def _first_recomputed(self) -> str | None:
        """Return the first layer whose output changes when a checkpoint recomputes it."""
        calls: list[LayerCall] = []
        self.runs.outputs_and_gradients(self.inputs, True, True, calls)
        first = 1 + next(i for i, call in enumerate(calls) if call.caller is None)

        def moves(calls: Sequence[LayerCall], attribute: str) -> bool:
            before, after = (getattr(call, attribute) for call in calls)
            pairs = [
                Pair(a, b)
                for a, b in zip(before, after, strict=False)
                if a.shape == b.shape
            ]
            return largest_move(pairs) > MOVE_TOLERANCE

        recomputed = zip(calls[:first], calls[first:], strict=False)
        return _first_moved_layer(recomputed, moves)

    def _first_axis(self, kind: str) -> Axis | None:
        axes = [axis for axis, axis_kind in self.kinds.items() if axis_kind == kind]
        return axes[0] if axes else None


def _first_moved_layer(
    groups: Iterable[Sequence[LayerCall]],
    moves: Callable[[Sequence[LayerCall], str], bool],
) -> str | None:
    """Return the first layer whose outputs move, in the order in which calls end.

    Args:
        groups: one call of a layer in every run, for all calls.
        moves: whether "inputs" or "outputs" of such calls move.

    Returns:
        Name of the layer; "" for the model itself; None where the runs call different layers.
    """
    for calls in groups:
        if len({call.layer for call in calls}) > 1:
            return None
        if not moves(calls, "outputs"):
            continue
        # a layer whose inputs move is not the cause, its caller may be
        while calls[0].caller is not None and moves(calls, "inputs"):
            calls = [call.caller or call for call in calls]
        return calls[0].layer
    return ""


# --- comparing outputs ------------------------------------------------------------------------------------------------


def largest_move(pairs: list[Pair]) -> float:
    """Return the largest move of an element, relative to the largest element of its tensor."""
    largest = 0.0
    for before, after, elements in pairs:
        difference = (before - after).abs().double()
        difference = torch.where(_equal(before, after), 0.0, difference)
        difference = difference.nan_to_num(torch.inf)
        if elements is not None:
            difference = difference * elements
        finite = before[before.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        move = float(difference.max()) if difference.numel() else 0.0
        if move > 0:
            largest = max(largest, move / scale if scale else torch.inf)
    return largest


def _equal(a: Tensor, b: Tensor) -> Tensor:
    """Return which elements are equal; NaN equals NaN."""
    return (a == b) | (a.isnan() & b.isnan())


def _expand_dims(mask: Tensor, dims: int) -> Tensor:
    """Return a mask of the first dimensions with so many dimensions."""
    return mask.reshape(*mask.shape, *(1,) * (dims - mask.dim()))


def _along(slices: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return a mask of the elements that belong to the chosen slices of a dimension."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return slices.reshape(shape).expand_as(like)


def _equal_slices(
    before: list[Tensor], after: list[Tensor], size: int
) -> dict[tuple[int, int], Tensor]:
    """Return masks of the slices that are equal bit for bit, by (number of an output, its dimension of a size)."""
    masks = {}
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        for dim in range(a.dim()):
            if a.shape[dim] == size:
                by_slice = _equal(a, b).movedim(dim, 0).reshape(size, -1)
                masks[number, dim] = by_slice.all(1)
    return masks


def _axis_kind(perturbations: list[Perturbation]) -> str:
    """Return the kind of an axis by the slices that do not change in float32."""
    keys = perturbations[0].slices.keys()
    if any(_changes_alone(perturbations, key) for key in keys):
        return INDEPENDENT
    if any(_keeps_earlier(perturbations, key) for key in keys):
        return LATER_POSITIONS
    return OUT_OF_REACH


def _changes_alone(perturbations: list[Perturbation], key: tuple[int, int]) -> bool:
    """Return whether every perturbation changes the slice of its own position, and no other slice."""
    for perturbation in perturbations:
        is_unchanged = perturbation.slices[key]
        if int((~is_unchanged).sum()) != 1 or is_unchanged[perturbation.position]:
            return False
    return True


def _keeps_earlier(perturbations: list[Perturbation], key: tuple[int, int]) -> bool:
    """Return whether no perturbation changes a slice before its own position."""
    return all(bool(p.slices[key][: p.position].all()) for p in perturbations)


def _unchanged_slices(masks: list[Tensor], before: Tensor, after: Tensor) -> list[Pair]:
    """Return the parts of a layer's output that belong to unchanged slices of an axis of equal length.

    Args:
        masks: of the unchanged slices.
        before: output of the layer in one run.
        after: output of the layer in another run.
    """
    pairs: list[Pair] = []
    if before.shape != after.shape:
        return pairs
    for mask in masks:
        if mask.dim() > 1:
            if before.shape[: mask.dim()] == mask.shape:
                pairs.append(Pair(before[mask], after[mask]))
            continue
        if mask.dim() != 1 or not mask.any():
            continue
        indices = mask.nonzero()[:, 0]
        for dim in range(before.dim()):
            if before.shape[dim] == len(mask):
                part_before = before.index_select(dim, indices)
                pairs.append(Pair(part_before, after.index_select(dim, indices)))
    return pairs


def _common_part(part: Part | None, before: Tensor, after: Tensor) -> list[Pair]:
    """Return the common part of two outputs of a layer, of which the second may come from a part of the inputs."""
    if before.shape == after.shape:
        return [Pair(before, after)]
    if part is None or before.dim() != after.dim():
        return []
    cut_dims = [d for d in range(before.dim()) if before.shape[d] != after.shape[d]]
    if len(cut_dims) != 1:
        return []
    (dim,) = cut_dims
    if (before.shape[dim], after.shape[dim]) != (part.size, part.length):
        return []
    return [Pair(before.narrow(dim, part.start, part.length), after)]


def _matched_outputs(
    before: list[Tensor], after: list[Tensor], part: Part | None
) -> list[Pair]:
    """Return the outputs of two runs as pairs; ValueError where their shapes do not fit."""
    pairs = []
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        if part is not None:
            if number not in part.dims:
                continue
            a = a.narrow(part.dims[number], part.start, part.length)
        if a.shape != b.shape:
            raise ValueError(
                f"the output has shape {tuple(b.shape)} where {tuple(a.shape)} was expected"
            )
        pairs.append(Pair(a, b))
    return pairs


def _sample_dim(axis: Axis, x: Tensor) -> int:
    """Return the dimension of ``x`` with the samples: the one of ``axis`` if its size fits, else the first."""
    return axis.dim if x.dim() > axis.dim and x.shape[axis.dim] == axis.size else 0


def _decode(
    model: nn.Module, names: list[str], *inputs: Any, is_cached: bool, **named: Any
) -> Tensor:
    """Return the outputs of a decoder that decodes the last tokens one by one with a cache, or all without one.

    Its inputs have (batch, tokens, ...); a mask of attention grows with the tokens.
    """
    arguments = {}
    for name, value in (*zip(names, inputs, strict=False), *named.items()):
        if value is not None and name not in NOT_DECODED:
            arguments[name] = value
    length = next(iter(arguments.values())).shape[1]
    if not is_cached:
        return _logits(model(**arguments, use_cache=False))

    first = max(1, length - NUM_DECODED_TOKENS)
    spans = [(0, first), *((t, t + 1) for t in range(first, length))]
    cache, pieces = None, []
    for start, stop in spans:
        step_arguments = dict(arguments)
        for name, value in arguments.items():
            has_tokens = isinstance(value, Tensor) and value.dim() > 1
            if has_tokens and value.shape[1] == length:
                first_token = 0 if name == "attention_mask" else start
                step_arguments[name] = value[:, first_token:stop]
        output = model(**step_arguments, past_key_values=cache, use_cache=True)
        if isinstance(output, Mapping):
            cache = output["past_key_values"]
        else:
            cache = output.past_key_values
        pieces.append(_logits(output))
    return torch.cat(pieces, 1)


def _shorten(problem: Exception) -> str:
    return " ".join(str(problem).split())[:100] or type(problem).__name__


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    return floating(output)[0] if logits is None else logits
