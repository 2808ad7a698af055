"""Which axis of a tensor holds features: the last one, until a function of torch moves it.

A range runs along features, never over tokens. Of two activations that are multiplied, shapes alone do not tell which
axis is which: keys (features, tokens) look like values (tokens, features). The mode of a model sees every function, so
it follows the features through transpositions, and through functions that keep the shape, such as copies. How a tensor
lies in memory plays no part.

The place is an attribute of the tensor, which compilers cannot follow. In compiled code the order in memory tells. It
says the same of views; not of copies, and of features that a convolution puts first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ATTRIBUTE = "_feature_dim"  # of tensors whose features are not in the last dimension: the dimension, from the end


class FeatureAxes:
    """The places of features of the tensors of one running model.

    Attributes:
        has_moved: whether the features of any tensor are not in its last dimension.
    """

    def __init__(self) -> None:
        self.has_moved = False

    def clear(self) -> None:
        """Look for moved features no longer, when the model has run."""
        self.has_moved = False

    def dim(self, x: Tensor) -> int:
        """Return the dimension of a tensor's features, counted from the end."""
        if torch.compiler.is_compiling():
            is_turned = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
            return -2 if is_turned else -1
        return getattr(x, ATTRIBUTE, -1)

    def mark(self, x: Tensor, dim: int) -> None:
        """Note the dimension of a tensor's features, counted from the end."""
        if not torch.compiler.is_compiling():
            self.has_moved = True
            setattr(x, ATTRIBUTE, dim)

    def follow(
        self, function: Any, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note where the features of a function's output are."""
        if torch.compiler.is_compiling():
            return
        source = args[0] if args else None
        if isinstance(source, (list, tuple)) and source:  # of tensors that are joined
            source = source[0]
        if not isinstance(source, Tensor):
            return
        place = self.dim(source)
        if function in MOVES and source.dim():
            order = MOVES[function](source.dim(), args[1:], kwargs)
            place = order.index(place % source.dim()) - source.dim()
            if place != -1:
                self.mark(output, place)
            return
        if place != -2:
            return
        for x in output if isinstance(output, (list, tuple)) else (output,):
            if isinstance(x, Tensor) and _keeps_axes(source, x):
                self.mark(x, place)


def _keeps_axes(source: Tensor, output: Tensor) -> bool:
    """Return whether a function leaves positions last: copies, parts, joined parts and heads of features do."""
    if output.dim() < 2:
        return False
    is_joined = source.dim() == output.dim() and source.shape[-2] == output.shape[-2]
    return is_joined or source.shape[-1] == output.shape[-1]


def _exchanged(dims: int, first: int, second: int) -> list[int]:
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _transposed(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions behind ``transpose(dim0, dim1)``, however they are given."""
    first, second = [*args, *kwargs.values()]
    return _exchanged(dims, first, second)


def _permuted(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions behind ``permute(dims)``, or ``permute(*dims)``."""
    given = [*args, *kwargs.values()]
    places = given[0] if isinstance(given[0], (list, tuple)) else given
    return [place % dims for place in places]


def _reversed(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions behind ``.T`` and ``t()``."""
    return list(range(dims))[::-1]


def _matrix_transposed(
    dims: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int]:
    """Return the order of dimensions behind ``.mT``."""
    return _exchanged(dims, -1, -2)


Order = Callable[[int, Sequence[Any], dict[str, Any]], list[int]]
# function -> the order of dimensions: of how many, and its arguments behind the tensor
MOVES: dict[Any, Order] = {
    Tensor.transpose: _transposed,
    torch.transpose: _transposed,
    Tensor.swapaxes: _transposed,
    torch.swapaxes: _transposed,
    Tensor.swapdims: _transposed,
    torch.swapdims: _transposed,
    Tensor.permute: _permuted,
    torch.permute: _permuted,
    Tensor.t: _reversed,
    torch.t: _reversed,
    Tensor.T.__get__: _reversed,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _matrix_transposed,  # type: ignore[attr-defined]
    Tensor.adjoint: _matrix_transposed,
    torch.adjoint: _matrix_transposed,
}
