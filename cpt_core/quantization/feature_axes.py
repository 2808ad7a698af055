"""Feature axis of tensors: the last axis, until a torch function moves it.

A range runs along features, never over tokens. Of two activations that are multiplied, shapes alone do not tell which
axis is which: keys (features, tokens) look like values (tokens, features). The mode of a model receives every torch
function, so ``FeatureAxes`` tracks the features through transpositions, and through functions that keep the shape, such
as copies. The memory layout of a tensor has no influence.

The position is an attribute of the tensor, which compilers cannot trace. In compiled code it is inferred from the
strides, which gives the same answer for views, but not for copies and for features that a convolution puts first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# attribute of tensors whose features are not in the last dimension: the dimension, counted from the end
ATTRIBUTE = "_feature_dim"


class FeatureAxes:
    """Positions of the feature axes of the tensors of one running model.

    Attributes:
        has_moved: whether the features of any tensor are not in its last dimension.
    """

    def __init__(self) -> None:
        self.has_moved = False

    def clear(self) -> None:
        """Stop tracking after the model has run."""
        self.has_moved = False

    def dim(self, x: Tensor) -> int:
        """Return the dimension of a tensor's features, counted from the end."""
        if torch.compiler.is_compiling():
            is_turned = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
            return -2 if is_turned else -1
        return getattr(x, ATTRIBUTE, -1)

    def mark(self, x: Tensor, dim: int) -> None:
        """Record the dimension of a tensor's features, counted from the end."""
        if not torch.compiler.is_compiling():
            self.has_moved = True
            setattr(x, ATTRIBUTE, dim)

    def follow(
        self, function: Any, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """Record the feature axes of the output of a function."""
        if torch.compiler.is_compiling():
            return
        source = args[0] if args else None
        if (
            isinstance(source, (list, tuple)) and source
        ):  # tensors to concatenate or stack
            source = source[0]
        if not isinstance(source, Tensor):
            return
        dim = self.dim(source)
        if function in MOVES and source.dim():
            order = MOVES[function](source.dim(), args[1:], kwargs)
            dim = order.index(dim % source.dim()) - source.dim()
            if dim != -1:
                self.mark(output, dim)
            return
        if dim != -2:
            return
        outputs = output if isinstance(output, (list, tuple)) else (output,)
        for x in outputs:
            if isinstance(x, Tensor) and _keeps_axes(source, x):
                self.mark(x, dim)


def _keeps_axes(source: Tensor, output: Tensor) -> bool:
    """Return whether ``output`` has its axes in the order of ``source``, as copies, slices and concatenations do."""
    if output.dim() < 2:
        return False
    is_joined = source.dim() == output.dim() and source.shape[-2] == output.shape[-2]
    return is_joined or source.shape[-1] == output.shape[-1]


def _exchanged(dims: int, first: int, second: int) -> list[int]:
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _transposed(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions after ``transpose(dim0, dim1)``, with positional or keyword arguments."""
    first, second = [*args, *kwargs.values()]
    return _exchanged(dims, first, second)


def _permuted(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions after ``permute(dims)``, or ``permute(*dims)``."""
    arguments = [*args, *kwargs.values()]
    is_sequence = isinstance(arguments[0], (list, tuple))
    order = arguments[0] if is_sequence else arguments
    return [dim % dims for dim in order]


def _reversed(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions after ``.T`` and ``t()``."""
    return list(range(dims))[::-1]


def _matrix_transposed(
    dims: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int]:
    """Return the order of dimensions after ``.mT``."""
    return _exchanged(dims, -1, -2)


Order = Callable[[int, Sequence[Any], dict[str, Any]], list[int]]
# torch function -> (number of dimensions, arguments after the tensor) -> order of dimensions of its output
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
