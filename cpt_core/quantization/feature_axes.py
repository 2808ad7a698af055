"""Marks of tensors: where their features lie, and whether they weight tokens or are computed weights.

A range runs along features, never over tokens. Shapes do not tell which axis is which: keys (features, tokens) look
like values (tokens, features). So facts about a tensor are an attribute of the tensor, a ``TensorMark``, and the mode
of a model, which receives every torch function, passes them on from arguments to outputs (``FeatureAxes.follow``):

- ``FOLLOWERS`` computes the feature dimension of functions that move, add or remove dimensions.
- Functions that keep the number of dimensions, such as copies, slices, concatenations and sums of tensors, keep it.
- Any other function loses it: the output is untracked, and an operation gives it a range that spans the tensor, but
  does not depend on it in evaluation.

A tensor without a mark has its features in the last dimension. Sizes and the memory layout have no influence.

Compilers cannot trace attributes of tensors. In compiled code the position of the features is inferred from the
strides, which gives the same answer for views, but not for copies and for features that a convolution puts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# attribute of a tensor that holds its ``TensorMark``
ATTRIBUTE = "_feature_mark"


class TensorMark(NamedTuple):
    """Facts about a tensor that its shape does not tell.

    Attributes:
        dim: dimension of the features, counted from the end: of a softmax or of attention scores, that of the tokens
            which they weight; None if it is not tracked.
        weights_tokens: whether the elements are weights of tokens: a softmax, or scores of attention.
        is_computed_weight: whether the tensor is computed from parameters and buffers only.
    """

    dim: int | None = -1
    weights_tokens: bool = False
    is_computed_weight: bool = False


NO_MARK = TensorMark()
PARAMETER_MARK = TensorMark(is_computed_weight=True)
# (feature dimension, tensor, other arguments, keyword arguments, output) -> feature dimension; None: not tracked
Follower = Callable[
    [int | None, Tensor, Sequence[Any], dict[str, Any], Tensor], int | None
]


class FeatureAxes:
    """Marks of the tensors of one running model.

    Attributes:
        has_marks: whether any tensor has a mark.
    """

    def __init__(self) -> None:
        self.has_marks = False

    def clear(self) -> None:
        """Stop tracking after the model has run."""
        self.has_marks = False

    def mark_of(self, x: Tensor) -> TensorMark:
        """Return the mark of a tensor."""
        if torch.compiler.is_compiling():
            is_turned = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
            return TensorMark(dim=-2) if is_turned else NO_MARK
        mark: TensorMark = getattr(x, ATTRIBUTE, NO_MARK)
        return mark

    def mark(self, x: Tensor, mark: TensorMark) -> None:
        """Mark a tensor, except in compiled code."""
        if torch.compiler.is_compiling():
            return
        if mark != NO_MARK:
            self.has_marks = True
            setattr(x, ATTRIBUTE, mark)
        elif hasattr(x, ATTRIBUTE):
            delattr(x, ATTRIBUTE)

    def follow(
        self,
        function: Any,
        args: Any,
        kwargs: dict[str, Any],
        output: Any,
        buffers: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Mark the output of a function.

        Args:
            function: torch function that has run.
            args: its positional arguments.
            kwargs: its keyword arguments.
            output: its output.
            buffers: function that returns the buffers of the running modules.
        """
        follower = FOLLOWERS.get(function)
        if follower is _last:
            return
        sources = tensor_arguments(args, kwargs)
        marks = [_own_mark(x) for x in sources]
        if function is Tensor.__setitem__:
            self._mark_written(args[0], args[2], moves_last_dimension(function, args))
            return
        if not sources or not (follower or any(marks)):
            return
        is_weight = _are_weights(sources, marks, buffers)
        is_join = bool(args) and isinstance(args[0], (list, tuple))
        outputs = output if isinstance(output, (list, tuple)) else (output,)
        for x in outputs:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            dim, weights_tokens = _joint_mark(sources, marks, x, is_weight, is_join)
            if follower is not None:
                mark = marks[0] or NO_MARK
                weights_tokens = mark.weights_tokens
                dim = follower(mark.dim, sources[0], args[1:], kwargs, x)
            self.mark(
                x, TensorMark(dim, weights_tokens or function in SOFTMAX, is_weight)
            )
            is_in_place = x is sources[0] and _is_in_place(function)
            if is_in_place and dim != -1 and x._base is not None:
                # a part of a larger tensor was written to
                self._mark_written(x._base, x)

    def _mark_written(self, target: Tensor, value: Any, is_moved: bool = False) -> None:
        """Mark a tensor of which a part was overwritten with ``value``; ``is_moved``: in other dimensions."""
        mark = _own_mark(value) if isinstance(value, Tensor) else None
        if not is_moved and (mark is None or mark.dim == -1):
            return
        dim = None
        if mark is not None and value.dim() == target.dim():
            dim = mark.dim
        self.mark(target, self.mark_of(target)._replace(dim=dim))


def tensor_arguments(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments, and in lists and tuples of them."""
    tensors = []
    arguments = (*args, *kwargs.values()) if kwargs else args
    for value in arguments:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, Tensor)]
    return tensors


def _own_mark(x: Tensor) -> TensorMark | None:
    """Return the mark of a tensor; None if it has none."""
    if type(x) is nn.Parameter:
        return PARAMETER_MARK
    return getattr(x, ATTRIBUTE, None)


def _is_in_place(function: Any) -> bool:
    """Return whether a torch function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _are_weights(
    sources: Sequence[Tensor],
    marks: Sequence[TensorMark | None],
    buffers: Callable[[], Iterable[Tensor]],
) -> bool:
    """Return whether all floating-point arguments of a function are weights, computed weights or buffers."""
    others = []
    for x, mark in zip(sources, marks, strict=True):
        if mark is not None and mark.is_computed_weight:
            continue
        if x.is_floating_point():
            others.append(x)
    if len(others) == len(sources):
        return False
    known = {id(buffer) for buffer in buffers()} if others else set()
    return all(id(x) in known or id(x._base) in known for x in others)


def _joint_mark(
    sources: Sequence[Tensor],
    marks: Sequence[TensorMark | None],
    output: Tensor,
    is_weight: bool,
    is_join: bool,
) -> tuple[int | None, bool]:
    """Return the feature dimension of the output of a function that moves no dimension, and ``weights_tokens``.

    Tensors that are expanded do not count beside one of the shape of the output, and parameters do not count beside
    activations. Of tensors that are added or joined, one with features elsewhere decides, since the others may be empty
    caches, masks or biases.
    """
    candidates = []
    for x, mark in zip(sources, marks, strict=True):
        is_factor = mark is not None and mark.is_computed_weight and not is_weight
        if x.is_floating_point() and not is_factor:
            candidates.append((x, mark or NO_MARK))
    same_shape = [mark for x, mark in candidates if x.shape == output.shape]
    same_rank = [mark for x, mark in candidates if x.dim() == output.dim()]
    relevant = same_shape or same_rank
    if not same_shape and not is_join and len(candidates) > 1:
        return -1, False  # an outer product
    if not relevant:
        is_last = all(mark.dim == -1 for _, mark in candidates)
        return -1 if is_last else None, False
    dims = {mark.dim for mark in relevant}
    if len(dims) > 1 and (same_shape or is_join):
        dims.discard(-1)
    weights_tokens = any(mark.weights_tokens for mark in relevant)
    return dims.pop() if len(dims) == 1 else None, weights_tokens


# --- functions that move, add or remove dimensions --------------------------------------------------------------------


def _argument(
    name: str,
    position: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    default: Any = None,
) -> Any:
    """Return an argument by its position after the tensor, or by its name."""
    return args[position] if len(args) > position else kwargs.get(name, default)


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


def _moved(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions after ``movedim(source, destination)``."""
    source, destination = [*args, *kwargs.values()]
    if isinstance(source, int):
        source, destination = [source], [destination]
    sources = [dim % dims for dim in source]
    places = {
        place % dims: dim for dim, place in zip(sources, destination, strict=True)
    }
    others = iter(dim for dim in range(dims) if dim not in sources)
    return [places[i] if i in places else next(others) for i in range(dims)]


Order = Callable[[int, Sequence[Any], dict[str, Any]], list[int]]


def _by_order(order_of: Order) -> Follower:
    """Return the follower of a function that permutes dimensions."""

    def follow(
        dim: int | None,
        x: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        y: Tensor,
    ) -> int | None:
        rank = x.dim()
        if dim is None or not rank:
            return dim
        return order_of(rank, args, kwargs).index(dim % rank) - rank

    return follow


def _unsqueezed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``unsqueeze(dim)``."""
    if dim is None:
        return None
    new = _argument("dim", 0, args, kwargs) % y.dim()
    place = dim + x.dim()
    return place + (new <= place) - y.dim()


def _reshaped(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``view``, ``reshape``, ``flatten`` and ``unflatten``: find the dimension with the features' stride."""
    if dim is None or dim == -1:
        return dim
    if not x.numel():
        return dim if -dim <= y.dim() else None
    stride, size = prod(x.shape[x.dim() + dim + 1 :]), x.shape[dim]
    step = 1
    for place in range(-1, -y.dim() - 1, -1):
        is_feature = step == stride and (y.shape[place] > 1 or size == 1)
        if is_feature:
            return place
        step *= y.shape[place]
        # features are part of a vector that ends with the last dimension
        if place == -1 and step > stride and step % (stride * size) == 0:
            return -1
    return None


def _removed(dim: int, rank: int, removed: Iterable[int]) -> int | None:
    """Return the feature dimension after dimensions were removed."""
    places = {place % rank for place in removed}
    if dim % rank in places:
        return None
    return dim + sum(place > dim % rank for place in places)


def _selected(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``select(dim, index)`` and ``unbind(dim)``."""
    if dim is None:
        return None
    return _removed(dim, x.dim(), [_argument("dim", 0, args, kwargs, 0)])


def _squeezed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``squeeze()`` and ``squeeze(dim)``."""
    dims = _argument("dim", 0, args, kwargs, range(x.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    removed = [place for place in dims if x.shape[place] == 1]
    if dim is None or dim == -1 or not x.dim():
        return dim
    return _removed(dim, x.dim(), removed)


def _reduced(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow sums and means; what was summed over features has a number per token."""
    if dim is None or dim == -1 or x.dim() == y.dim():
        return dim
    dims = _argument("dim", 0, args, kwargs)
    if dims is None:
        return -1
    return _removed(dim, x.dim(), [dims] if isinstance(dims, int) else dims)


def _stacked(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int:
    """Follow ``stack(tensors, dim)``; tensors without features, as of ``unbind(-1)``, get the new one."""
    new = _argument("dim", 0, args, kwargs, 0) % y.dim()
    if dim is None:
        return int(new) - y.dim()
    place = dim + y.dim() - 1
    return place + int(new <= place) - y.dim()


def _indexed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``x[index]``."""
    if dim is None:
        return None
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all(i is None or isinstance(i, (int, slice, EllipsisType)) for i in index):
        is_kept = dim == -1 or x.dim() == y.dim()
        return dim if is_kept else None
    if not x.dim():
        return -1
    num_indexed = sum(i is not None and i is not Ellipsis for i in index)
    num_hidden = x.dim() - num_indexed
    if num_indexed + index.count(None) == len(index):  # no ellipsis
        index = (*index, Ellipsis)
    places: list[int | None] = []  # dimension of x of every dimension of the output
    position = 0
    for i in index:
        if i is None:
            places.append(None)
        elif i is Ellipsis:
            places += range(position, position + num_hidden)
            position += num_hidden
        elif isinstance(i, slice):
            places.append(position)
            position += 1
        else:
            position += 1
    feature = dim % x.dim()
    if feature in places:
        return places.index(feature) - len(places)
    return -1 if dim == -1 else None


def _last(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int:
    """Follow functions whose outputs have features in the last dimension."""
    return -1


def _softmaxed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow a softmax: the elements along its dimension belong together."""
    softmax_dim = _argument("dim", 0, args, kwargs)
    if not isinstance(softmax_dim, int) or not y.dim():
        return dim
    return softmax_dim % y.dim() - y.dim()


def _convolved(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int:
    """Follow a convolution: channels come before the positions."""
    return 1 - int(_argument("weight", 0, args, kwargs).dim())


def _methods(*names: str) -> list[Any]:
    """Return functions of these names of tensors and of torch."""
    functions = []
    for name in names:
        for namespace in (torch, Tensor, functional, torch.ops.aten):
            if hasattr(namespace, name):
                functions.append(getattr(namespace, name))
    return functions


def _properties(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


def moves_last_dimension(function: Any, args: Sequence[Any]) -> bool:
    """Return whether a call is ``x[..., None]`` or ``x[..., i] = y``, after which features are in another dimension."""
    if function is not Tensor.__getitem__ and function is not Tensor.__setitem__:
        return False
    index = args[1]
    if type(index) is not tuple or not index:
        return False
    if function is Tensor.__getitem__:
        return index[-1] is None
    value = args[2]
    is_column = isinstance(index[-1], int) and isinstance(value, Tensor)
    return is_column and value.dim() > 0 and value.is_floating_point()


# name of a function -> order of dimensions of its output
ORDERS: dict[str, Order] = {
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims", "transpose_copy"), _transposed
    ),
    **dict.fromkeys(("permute", "permute_copy"), _permuted),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(("t", "t_copy"), _reversed),
    "adjoint": _matrix_transposed,
}
FOLLOWERS: dict[Any, Follower] = {
    **dict.fromkeys(_properties("T", "H"), _by_order(_reversed)),
    **dict.fromkeys(_properties("mT", "mH"), _by_order(_matrix_transposed)),
}
for _name, _order in ORDERS.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _by_order(_order))
# names of functions -> follower
FOLLOWERS_BY_NAMES: dict[str, Follower] = {
    "unsqueeze": _unsqueezed,
    "stack": _stacked,
    "unbind": _selected,
}
for _name, _follower in FOLLOWERS_BY_NAMES.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _follower)
CONVOLUTIONS = _methods(
    *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3))
)
FOLLOWERS |= dict.fromkeys(CONVOLUTIONS, _convolved)
SOFTMAX = frozenset(
    _methods("softmax", "log_softmax", "softmin", "_softmax")
    + _methods("_log_softmax", "_safe_softmax")
)
FOLLOWERS |= dict.fromkeys(SOFTMAX, _softmaxed)
# functions whose outputs have their features in the last dimension
RESETS = frozenset(
    _methods("linear", "bilinear", "layer_norm", "rms_norm", "embedding", "einsum")
    + _methods("scaled_dot_product_attention", "matmul", "__matmul__", "mm", "bmm")
)
# functions whose outputs are followed although no tensor has a mark yet
ALWAYS_FOLLOWED = frozenset(FOLLOWERS)
FOLLOWERS |= dict.fromkeys(RESETS, _last)
# the others leave features that are in the last dimension there
FOLLOWED_BY_NAMES: dict[str, Follower] = {
    **dict.fromkeys(
        "view reshape flatten unflatten view_as reshape_as ravel".split(), _reshaped
    ),
    "select": _selected,
    "squeeze": _squeezed,
    **dict.fromkeys(
        "sum mean amax amin prod std var logsumexp nansum nanmean".split(),
        _reduced,
    ),
    "__getitem__": _indexed,
}
for _name, _follower in FOLLOWED_BY_NAMES.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _follower)
