"""Changes of a model's inputs, for tests of invariances: other contents of positions, and parts of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cpt_core.bitops.counting import copy_inputs, tensors_in
from cpt_core.validation import ForwardInputs

MAX_DISTINCT_VALUES = 16  # of a tensor of numbers such as classes
NOISE_STRENGTH = 3.0  # of random contents, in standard deviations of the input


class Axis(NamedTuple):
    """A dimension of one of the tensors in the inputs.

    Attributes:
        number: of the tensor, in the order of ``leaves``.
        dim: dimension of the tensor.
        size: of the dimension.
    """

    number: int
    dim: int
    size: int


def leaves(inputs: Any) -> list[Tensor]:
    """Return the tensors of the inputs that tests may change.

    The sizes and indices of packed sequences are not among them.
    """
    fixed_ids = set[int]()
    for part in _parts(inputs):
        if isinstance(part, PackedSequence):
            fixed_ids |= {id(t) for t in part[1:] if isinstance(t, Tensor)}
    tensor_by_id = {id(t): t for t in tensors_in(inputs) if t.layout == torch.strided}
    return [t for key, t in tensor_by_id.items() if key not in fixed_ids]


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (tuple, list, dict)) and not isinstance(value, PackedSequence):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def replace_leaves(inputs: ForwardInputs, new: dict[int, Tensor]) -> ForwardInputs:
    """Return copies of inputs with ``new`` tensors, by their number in ``leaves``."""
    memo = {id(leaf): new[i] for i, leaf in enumerate(leaves(inputs)) if i in new}
    copies: ForwardInputs = copy_inputs(inputs, False, memo)
    return copies


def find_masks(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return the tensors that mask positions of another tensor, by number."""
    candidates = {number: x for number, x in enumerate(tensors) if _may_mask(x)}
    contents = [x for number, x in enumerate(tensors) if number not in candidates]
    return {
        number: mask
        for number, mask in candidates.items()
        if any(list(masked_positions(mask, x)) for x in contents)
    }


def _may_mask(x: Tensor) -> bool:
    """Return whether the elements of a tensor are zeros and one other number, such as 1 or minus infinity."""
    if x.dim() < 2 or x.is_complex() or not x.numel():
        return False
    nonzero = x[x != 0]
    return 0 < nonzero.numel() < x.numel() and bool((nonzero == nonzero[0]).all())


def masked_positions(mask: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Yield the positions of ``x`` that a mask may leave out, (batch, tokens): its zeros, then its other elements."""
    is_nonzero = mask.squeeze() != 0
    if is_nonzero.dim() != 2:
        return
    for positions in (is_nonzero, is_nonzero.mT):
        if x.shape[:2] == positions.shape:
            yield ~positions
            yield positions
            return


def new_contents(x: Tensor) -> list[Tensor]:
    """Return other contents for a tensor, the weaker change first; none for a tensor with a single value.

    Few distinct values, such as the numbers of tokens, are exchanged for each other. Other floating-point numbers are
    permuted, and then replaced by random numbers.
    """
    if x.dtype == torch.bool or x.is_complex() or not x.numel():
        return []

    values, indices = torch.unique(x, return_inverse=True)
    num_values = len(values)
    max_values = min(MAX_DISTINCT_VALUES, x.numel() // 2)
    if not x.is_floating_point() or num_values <= max_values:
        shifts = []
        if num_values >= 2:
            shifts.append(1)
        if num_values >= 4:
            shifts.append(num_values // 2)
        return [values[(indices + shift) % num_values] for shift in shifts]

    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    permuted = x.flatten()[order].reshape(x.shape)
    noise = torch.randn(x.shape, generator=generator).to(x)
    std = x.std().nan_to_num().clamp(min=1e-3)
    return [permuted, x.mean() + NOISE_STRENGTH * std * noise]


def change_position(x: Tensor, content: Tensor, dim: int, position: int) -> Tensor:
    """Return a copy of a tensor with other ``content`` at one position of a dimension."""
    changed = x.clone()
    changed.select(dim, position).copy_(content.select(dim, position))
    return changed


def cut_inputs(
    inputs: ForwardInputs,
    dims: dict[int, set[int]],
    size: int,
    start: int,
    length: int,
) -> ForwardInputs:
    """Return a part of inputs: ``length`` positions from ``start`` on.

    Args:
        inputs: of a model.
        dims: dimensions that are cut, by number in ``leaves``; only those of ``size`` are.
        size: of the dimensions before.
        start: first position of the part.
        length: of the part.
    """
    new = {}
    for number, leaf in enumerate(leaves(inputs)):
        part = leaf
        for dim in dims.get(number, set()):
            if leaf.shape[dim] == size:
                part = part.narrow(dim, start, length)
        new[number] = part.clone()
    return replace_leaves(inputs, new)
