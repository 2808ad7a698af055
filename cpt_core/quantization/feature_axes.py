"""Marks of tensors: where their features lie, and whether they weight tokens or are computed weights.

A range runs along features, never over tokens. Shapes do not tell which axis is which: keys (features, tokens) look
like values (tokens, features). So facts about a tensor are an attribute of the tensor, a ``TensorMark``, and the mode
of a model, which receives every torch function, passes them on from arguments to outputs (``follow_marks``):

- ``FOLLOWERS`` computes the feature dimension of functions that move, add or remove dimensions.
- Functions that keep the number of dimensions, such as copies, slices, concatenations and sums of tensors, keep it.
- Any other function loses it: the output is untracked, and an operation gives it a range that spans the tensor, but
  does not depend on it in evaluation.

A tensor without a mark has its features in the last dimension. Sizes and the memory layout have no influence.

Marks outlive a call of the model, as in a cache of keys, and other models and threads read them. Following costs time
per function, so functions that create no marks are followed only while some tensor of the process has one
(``ATTACHED_MARKS``), or where an argument is a parameter.

Compilers cannot trace attributes of tensors. In compiled code the position of the features is inferred from the
strides, which gives the same answer for views, but not for copies and for features that a convolution puts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index as to_index
from types import EllipsisType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

# attribute of a tensor that holds its ``AttachedMark``
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


# weak references to the ``AttachedMark`` of all marked tensors of the process
ATTACHED_MARKS: set[Any] = set()


class AttachedMark:
    """Holder of a ``TensorMark``, kept alive by the tensors that have it as an attribute.

    Args:
        mark: the mark.
    """

    __slots__ = ("__weakref__", "mark")

    def __init__(self, mark: TensorMark) -> None:
        self.mark = mark
        ATTACHED_MARKS.add(ref(self, ATTACHED_MARKS.discard))

    def __reduce__(self) -> tuple[Any, ...]:
        """Register copies and unpickled marks, too."""
        return AttachedMark, (self.mark,)


def mark_of(x: Tensor) -> TensorMark:
    """Return the mark of a tensor."""
    if torch.compiler.is_compiling():
        is_turned = x.dim() > 1 and x.stride(-1) != 1 and x.stride(-2) == 1
        return TensorMark(dim=-2) if is_turned else NO_MARK
    attached = getattr(x, ATTRIBUTE, None)
    return NO_MARK if attached is None else attached.mark


def set_mark(x: Tensor, mark: TensorMark) -> None:
    """Mark a tensor, except in compiled code."""
    if torch.compiler.is_compiling():
        return
    if mark != NO_MARK:
        setattr(x, ATTRIBUTE, AttachedMark(mark))
    elif hasattr(x, ATTRIBUTE):
        delattr(x, ATTRIBUTE)


def follow_marks(
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
    if function is Tensor.__setitem__:
        _mark_written(args[0], args[2], moves_last_dimension(function, args))
        return
    if kwargs:
        args, kwargs = _bound(args, kwargs)
    sources = tensor_arguments(args, kwargs)
    if function in COPIES and _is_column(sources[0]):
        _mark_written(sources[0]._base, sources[-1], is_moved=True)
        return
    marks = [_own_mark(x) for x in sources]
    if not sources or not (follower or any(marks)):
        return
    is_weight = _are_weights(sources, marks, buffers)
    outputs = output if isinstance(output, (list, tuple)) else (output,)
    for x in outputs:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        if follower is None:
            is_join = bool(args) and isinstance(args[0], (list, tuple))
            dim, weights_tokens = _joint_mark(sources, marks, x, is_weight, is_join)
        else:
            mark = marks[0] or NO_MARK
            weights_tokens = mark.weights_tokens
            dim = _followed(follower, mark.dim, sources[0], args[1:], kwargs, x)
        set_mark(x, TensorMark(dim, weights_tokens or function in SOFTMAX, is_weight))
        is_in_place = x is sources[0] and _is_in_place(function)
        if is_in_place and dim != -1 and x._base is not None:
            # a part of a larger tensor was written to
            _mark_written(x._base, x)


def _mark_written(target: Any, value: Any, is_moved: bool = False) -> None:
    """Mark a tensor of which a part was overwritten with ``value``; ``is_moved``: in other dimensions."""
    mark = _own_mark(value) if isinstance(value, Tensor) else None
    if not is_moved and (mark is None or mark.dim == -1):
        return
    dim = None
    if mark is not None and value.dim() == target.dim():
        dim = mark.dim
    set_mark(target, mark_of(target)._replace(dim=dim))


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
    attached = getattr(x, ATTRIBUTE, None)
    return None if attached is None else attached.mark


def has_parameters(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a parameter is among the arguments, or in a list or tuple of them."""
    # most functions take this path, so that this is a loop without intermediate lists
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is nn.Parameter:
            return True
        if (kind is list or kind is tuple) and nn.Parameter in map(type, value):
            return True
    return False


def _is_in_place(function: Any) -> bool:
    """Return whether a torch function writes to the elements of its first argument."""
    # overloads of operators have names such as "copy_.default"
    name = getattr(function, "__name__", "").partition(".")[0]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place and function not in MOVED_IN_PLACE


def _is_column(x: Tensor) -> bool:
    """Return whether a tensor is a view, such as ``y[..., i]``, in which the last dimension of ``y`` was selected."""
    base = x._base
    if base is None or not 0 < x.dim() < base.dim():
        return False
    return x.is_floating_point() and x.stride(-1) != base.stride(-1)


def _followed(
    follower: Follower,
    dim: int | None,
    x: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    y: Tensor,
) -> int | None:
    """Return the feature dimension that a follower gives; a tensor without dimensions has none to follow."""
    if not x.dim() or not y.dim():
        return -1
    return follower(dim, x, args, kwargs, y)


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


# other name of an argument that torch accepts -> its name
ALIASES = {
    **dict.fromkeys(("self", "tensors", "x", "a", "x1"), "input"),
    **dict.fromkeys(("axis", "axes"), "dim"),
    "axis0": "dim0",
    "axis1": "dim1",
}


def _bound(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a function with the first one by position, and the others by their usual names."""
    kwargs = {ALIASES.get(name, name): kwargs[name] for name in kwargs if name != "out"}
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    return args, kwargs


def _argument(
    name: str, position: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return an argument by its position after the tensor, or by its name; None if it is not passed."""
    return args[position] if len(args) > position else kwargs.get(name)


def _dims(
    name: str, position: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int] | None:
    """Return the dimensions in an argument, one or a sequence; None if it is not passed, or names them."""
    value = _argument(name, position, args, kwargs)
    dims = value if isinstance(value, (list, tuple)) else [value]
    if not all(hasattr(dim, "__index__") for dim in dims):
        return None
    return [to_index(dim) for dim in dims]


def _exchanged(dims: int, first: int, second: int) -> list[int]:
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _transposed(
    dims: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int] | None:
    """Return the order of dimensions after ``transpose(dim0, dim1)``."""
    first, second = _dims("dim0", 0, args, kwargs), _dims("dim1", 1, args, kwargs)
    if first is None or second is None:
        return None
    return _exchanged(dims, first[0], second[0])


def _permuted(
    dims: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int] | None:
    """Return the order of dimensions after ``permute(dims)``, or ``permute(*dims)``."""
    is_variadic = len(args) == dims and not isinstance(args[0], (list, tuple))
    order = _dims("dims", 0, [args] if is_variadic else args, kwargs)
    return None if order is None else [dim % dims for dim in order]


def _reversed(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the order of dimensions after ``.T`` and ``t()``."""
    return list(range(dims))[::-1]


def _matrix_transposed(
    dims: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[int]:
    """Return the order of dimensions after ``.mT``."""
    return _exchanged(dims, -1, -2)


def _moved(dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the order of dimensions after ``movedim(source, destination)``."""
    source = _dims("source", 0, args, kwargs)
    destination = _dims("destination", 1, args, kwargs)
    if source is None or destination is None:
        return None
    sources = [dim % dims for dim in source]
    places = {
        place % dims: dim for dim, place in zip(sources, destination, strict=True)
    }
    others = iter(dim for dim in range(dims) if dim not in sources)
    return [places[i] if i in places else next(others) for i in range(dims)]


# (number of dimensions, arguments, keyword arguments) -> order of dimensions; None: not known
Order = Callable[[int, Sequence[Any], dict[str, Any]], list[int] | None]


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
        order = order_of(rank, args, kwargs)
        if dim is None or order is None:
            return None
        return order.index(dim % rank) - rank

    return follow


def _unsqueezed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``unsqueeze(dim)``, also in place."""
    dims = _dims("dim", 0, args, kwargs)
    if dim is None or dims is None:
        return None
    new = dims[0] % y.dim()
    # a number becomes one feature
    place = max(dim + y.dim() - 1, 0)
    return place + (new <= place and y.dim() > 1) - y.dim()


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


def _unbound(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``unbind(dim)``."""
    if dim is None:
        return None
    return _removed(dim, x.dim(), _dims("dim", 0, args, kwargs) or [0])


def _selected(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``select(dim, index)``; as for ``x[..., i]``, what remains of the last dimension is in the last one."""
    return -1 if dim == -1 else _unbound(dim, x, args, kwargs, y)


def _squeezed(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``squeeze()`` and ``squeeze(dim)``; in place, the former shape is not known."""
    if dim is None or dim == -1:
        return dim
    if x is y:
        return None
    dims = _dims("dim", 0, args, kwargs)
    dims = list(range(x.dim())) if dims is None else dims
    return _removed(dim, x.dim(), [place for place in dims if x.shape[place] == 1])


def _reduced(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow sums and means; what was summed over features has a number per token."""
    if dim is None or dim == -1 or x.dim() == y.dim():
        return dim
    dims = _dims("dim", 0, args, kwargs)
    return None if dims is None else _removed(dim, x.dim(), dims)


def _stacked(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int:
    """Follow ``stack(tensors, dim)``; tensors without features, as of ``unbind(-1)``, get the new one."""
    new = (_dims("dim", 0, args, kwargs) or [0])[0] % y.dim()
    if dim is None:
        return new - y.dim()
    place = dim + y.dim() - 1
    return place + (new <= place) - y.dim()


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
    dims = _dims("dim", 0, args, kwargs)
    return dim if dims is None else dims[0] % y.dim() - y.dim()


def _convolved(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int:
    """Follow a convolution: channels come before the positions."""
    return 1 - int(_argument("weight", 0, args, kwargs).dim())


def _methods(*names: str) -> list[Any]:
    """Return functions of these names of tensors and of torch, with the overloads of operators."""
    functions = []
    for name in names:
        for namespace in (torch, Tensor, functional, torch.special):
            if hasattr(namespace, name):
                functions.append(getattr(namespace, name))
        # graphs of torch.export call the overloads of an operator
        for operator_name in (name, f"special_{name}"):
            packet = getattr(torch.ops.aten, operator_name, None)
            if packet is not None:
                overloads = [getattr(packet, name) for name in packet.overloads()]
                functions += [packet, *overloads]
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
        # an ellipsis after None may stand for no dimension
        return index[-1] is None or (index[-1] is Ellipsis and len(index) > 1)
    value = args[2]
    is_column = isinstance(index[-1], int) and isinstance(value, Tensor)
    return is_column and value.dim() > 0 and value.is_floating_point()


TRANSPOSES = "transpose swapaxes swapdims".split()
# functions that move dimensions of a tensor and write to no element
MOVED_IN_PLACE = frozenset(
    _methods("t_", "squeeze_", "unsqueeze_", *(f"{name}_" for name in TRANSPOSES))
)
# name of a function -> order of dimensions of its output
ORDERS: dict[str, Order] = {
    **dict.fromkeys((*TRANSPOSES, "transpose_copy"), _transposed),
    **dict.fromkeys((f"{name}_" for name in TRANSPOSES), _transposed),
    **dict.fromkeys(("permute", "permute_copy"), _permuted),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(("t", "t_", "t_copy", "numpy_T"), _reversed),
    **dict.fromkeys(("adjoint", "matrix_H", "mT", "mH"), _matrix_transposed),
}
FOLLOWERS: dict[Any, Follower] = {
    **dict.fromkeys(_properties("T", "H"), _by_order(_reversed)),
    **dict.fromkeys(_properties("mT", "mH"), _by_order(_matrix_transposed)),
}
for _name, _order in ORDERS.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _by_order(_order))
# names of functions -> follower
FOLLOWERS_BY_NAMES: dict[str, Follower] = {
    **dict.fromkeys(("unsqueeze", "unsqueeze_", "unsqueeze_copy"), _unsqueezed),
    "stack": _stacked,
    **dict.fromkeys(("unbind", "unbind_copy"), _unbound),
}
for _name, _follower in FOLLOWERS_BY_NAMES.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _follower)
CONVOLUTIONS = _methods(
    "convolution",
    *(f"conv{n}d" for n in (1, 2, 3)),
    *(f"conv_transpose{n}d" for n in (1, 2, 3)),
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
COPIES = frozenset(_methods("copy_"))
# functions whose outputs are followed although no tensor has a mark yet
ALWAYS_FOLLOWED = frozenset(FOLLOWERS) | COPIES
FOLLOWERS |= dict.fromkeys(RESETS, _last)
# the others leave features that are in the last dimension there
FOLLOWED_BY_NAMES: dict[str, Follower] = {
    **dict.fromkeys(
        "view reshape flatten unflatten view_as reshape_as ravel view_copy "
        "_unsafe_view _reshape_copy".split(),
        _reshaped,
    ),
    **dict.fromkeys(("select", "select_copy"), _selected),
    **dict.fromkeys(("squeeze", "squeeze_", "squeeze_copy"), _squeezed),
    **dict.fromkeys(
        "sum mean amax amin prod std var logsumexp nansum nanmean".split(),
        _reduced,
    ),
    "__getitem__": _indexed,
}
for _name, _follower in FOLLOWED_BY_NAMES.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _follower)
