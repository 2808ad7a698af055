"""Changes of a model's inputs: the content of one position, of all positions, parts that are cut off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cpt_core.bitops.counting import copy_inputs, tensors_in

MAX_VALUES = 16  # of a tensor that takes a few values alone
STRENGTH = (
    3.0  # of the second change of a position, in standard deviations of the input
)


class Axis(NamedTuple):
    """A dimension of one of the tensors in the inputs."""

    number: int  # of the tensor, in the order of ``leaves``
    dim: int
    size: int


def leaves(inputs: Any) -> list[Tensor]:
    """Return the tensors of the inputs whose content may be changed: no sizes of packed sequences."""
    fixed = set[int]()
    for part in _parts(inputs):
        if isinstance(part, PackedSequence):
            fixed |= {id(t) for t in part[1:] if isinstance(t, Tensor)}
    distinct = {id(t): t for t in tensors_in(inputs) if t.layout == torch.strided}
    return [t for key, t in distinct.items() if key not in fixed]


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (tuple, list, dict)) and not isinstance(value, PackedSequence):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def replaced(inputs: tuple[Any, ...], new: dict[int, Tensor]) -> tuple[Any, ...]:
    """Return inputs in which tensors are exchanged: number in ``leaves`` -> what stands there."""
    memo = {id(leaf): new[i] for i, leaf in enumerate(leaves(inputs)) if i in new}
    copied: tuple[Any, ...] = copy_inputs(inputs, False, memo)
    return copied


def find_masks(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return the tensors that are masks of positions of another one, by number."""
    two_valued = {number: x for number, x in enumerate(tensors) if _may_mask(x)}
    others = [x for number, x in enumerate(tensors) if number not in two_valued]
    return {
        n: x
        for n, x in two_valued.items()
        if any(list(places_of(x, other)) for other in others)
    }


def _may_mask(x: Tensor) -> bool:
    """Return whether a tensor holds zeros, and one other number, such as 1 or minus infinity."""
    if x.dim() < 2 or x.is_complex() or not x.numel():
        return False
    rest = x[x != 0]
    return 0 < rest.numel() < x.numel() and bool((rest == rest[0]).all())


def places_of(mask: Tensor, x: Tensor) -> Iterator[Tensor]:
    """Yield the positions (batch, tokens) of a tensor that a mask may leave out, in both readings of the mask."""
    flat = mask.squeeze() != 0
    for places in (flat, flat.mT) if flat.dim() == 2 else ():
        if x.shape[:2] == places.shape:
            yield ~places
            yield places
            return


def new_contents(x: Tensor) -> list[Tensor]:
    """Return other contents for a tensor, in the order of their strength; none where there is only one value.

    Few distinct values, such as the numbers of tokens, become others of them. Other floating-point numbers become
    others that occur, and then random ones.
    """
    if x.dtype == torch.bool or x.is_complex() or not x.numel():
        return []
    values, places = torch.unique(x, return_inverse=True)
    if not x.is_floating_point() or len(values) <= min(MAX_VALUES, x.numel() // 2):
        shifts = (
            [] if len(values) < 2 else [1] if len(values) < 4 else [1, len(values) // 2]
        )
        return [values[(places + shift) % len(values)] for shift in shifts]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    noise = torch.randn(x.shape, generator=generator).to(x)
    random = x.mean() + STRENGTH * x.std().nan_to_num().clamp(min=1e-3) * noise
    return [x.flatten()[order].reshape(x.shape), random]


def at(x: Tensor, content: Tensor, dim: int, position: int) -> Tensor:
    """Return a copy of a tensor that has another content at one position of a dimension."""
    changed = x.clone()
    changed.select(dim, position).copy_(content.select(dim, position))
    return changed


def cut(
    inputs: tuple[Any, ...],
    sizes: dict[int, set[int]],
    size: int,
    start: int,
    length: int,
) -> tuple[Any, ...]:
    """Return inputs of which only a part is left: number in ``leaves`` -> the dimensions of ``size`` that are cut."""
    new = {}
    for number, leaf in enumerate(leaves(inputs)):
        part = leaf
        for dim in sizes.get(number, set()):
            if leaf.shape[dim] == size:
                part = part.narrow(dim, start, length)
        new[number] = part.clone()
    return replaced(inputs, new)
