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
(``ATTACHED_MARKS``), or where an argument is a parameter or a fixed tensor of the model (``fixed_tensors``).

A computed weight depends on parameters and constants: fixed tensors of the model, tensors that a function such as
``torch.ones`` creates (``FACTORIES``), and what is computed from these. Data of the input is never a constant.

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
from torch.nn.parameter import is_lazy

# attribute of a tensor that holds its ``AttachedMark``
ATTRIBUTE = "_feature_mark"


class TensorMark(NamedTuple):
    """Facts about a tensor that its shape does not tell.

    Attributes:
        dim: dimension of the features, counted from the end: of a softmax or of attention scores, that of the tokens
            which they weight; None if it is not tracked.
        weights_tokens: whether the elements are weights of tokens: a softmax, or scores of attention.
        is_computed_weight: whether the tensor is computed from parameters and constants only.
        is_constant: whether it is computed from constants only.
    """

    dim: int | None = -1
    weights_tokens: bool = False
    is_computed_weight: bool = False
    is_constant: bool = False


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
        mark: the mark, or its values, as pickles hold them for ``torch.load``.
    """

    __slots__ = ("__weakref__", "mark")

    def __init__(self, mark: Sequence[Any]) -> None:
        self.mark = TensorMark(*mark)
        ATTACHED_MARKS.add(ref(self, ATTACHED_MARKS.discard))

    def __reduce__(self) -> tuple[Any, ...]:
        """Register copies and unpickled marks, too."""
        return AttachedMark, (tuple(self.mark),)


# ``torch.load`` with ``weights_only=True`` loads marked tensors
torch.serialization.add_safe_globals([AttachedMark])


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


# attributes of every module, none of which is a tensor of its own
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))


def fixed_tensors(root: nn.Module) -> dict[int, Tensor]:
    """Return buffers and other tensors that are attributes of modules below ``root``: {id: tensor}."""
    fixed = {}
    for module in root.modules():
        tensors = list(module._buffers.values())
        for name, value in vars(module).items():
            if name in MODULE_ATTRIBUTES or type(value) in PLAIN_TYPES:
                continue
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, (list, tuple)) and value:
                # a list without a tensor in front, such as a vocabulary, may be long
                tensors += value if isinstance(value[0], Tensor) else ()
            elif isinstance(value, dict) and value:
                first = next(iter(value.values()))
                tensors += value.values() if isinstance(first, Tensor) else ()
        for x in tensors:
            if isinstance(x, Tensor) and not x.requires_grad and not is_lazy(x):
                fixed[id(x)] = x
    return fixed


def is_constant(x: Tensor, fixed: dict[int, Tensor]) -> bool:
    """Return whether a tensor is computed from constants only; a view is constant if its base is."""
    if id(x) in fixed:
        return True
    base = x if x._base is None else x._base
    if id(base) in fixed:
        return True
    mark = _own_mark(base)
    return mark is not None and mark.is_constant


def follow_marks(
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    output: Any,
    fixed: dict[int, Tensor],
) -> None:
    """Mark the output of a function.

    Args:
        function: torch function that has run.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: its output.
        fixed: fixed tensors of the model, see ``fixed_tensors``.
    """
    follower = FOLLOWERS.get(function)
    if follower is _last and "out" not in kwargs:
        return
    if kwargs:
        args, kwargs = _bound(args, kwargs)
    if _follow_write(function, args, kwargs, fixed):
        return
    sources = tensor_arguments(args, kwargs)
    if function in REFERENCES:
        sources = sources[:1] if function not in FACTORIES else sources[1:]
    marks = [_own_mark(x) for x in sources]
    origin = _origin(sources, marks, fixed, function)
    if not (follower or origin.is_constant or any(marks)):
        return
    for x in tensor_arguments((output,), {}):
        mark = NO_MARK
        if x.is_floating_point() and sources:
            if follower is None:
                mark = _joint_mark(sources, marks, x, origin.is_weight, args)
            else:
                source = marks[0] or NO_MARK
                dim = _followed(follower, source.dim, sources[0], args[1:], kwargs, x)
                mark = TensorMark(dim, source.weights_tokens or function in SOFTMAX)
        set_mark(x, _with_origin(mark, x, origin, fixed))
        is_written = bool(args) and x is args[0] and _is_in_place(function)
        if is_written and x._base is not None:
            # a part of a larger tensor was written to
            _mark_written(x._base, x, origin, fixed)


def _follow_write(
    function: Any, args: Any, kwargs: dict[str, Any], fixed: dict[int, Tensor]
) -> bool:
    """Mark the target of a function that writes to a part of a tensor; return False for any other function."""
    if function is Tensor.__setitem__:
        target, value = args[0], args[2]
        is_moved = moves_last_dimension(function, args)
    elif function in COPIES and _is_column(args[0]):
        target, value = args[0]._base, tensor_arguments(args, kwargs)[-1]
        is_moved = True
    else:
        return False
    if isinstance(value, Tensor):
        origin = _origin([value], [_own_mark(value)], fixed)
        _mark_written(target, value, origin, fixed, is_moved)
    return True


def _mark_written(
    target: Tensor,
    value: Tensor,
    origin: Origin,
    fixed: dict[int, Tensor],
    is_moved: bool = False,
) -> None:
    """Mark a tensor of which a part was overwritten with ``value``; ``is_moved``: in other dimensions."""
    mark = mark_of(value)
    dim = mark_of(target).dim
    if is_moved or mark.dim != -1:
        is_kept = _own_mark(value) is not None and value.dim() == target.dim()
        dim = mark.dim if is_kept else None
    for x in (target, target._base):
        if x is None or isinstance(x, nn.Parameter):
            continue
        former = _origin([x], [_own_mark(x)], fixed)
        written = mark_of(x)
        if x is target:
            written = written._replace(dim=dim)
        set_mark(x, _with_origin(written, x, former.joined(origin), fixed))


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


def has_weights(
    args: Sequence[Any], kwargs: dict[str, Any], fixed: dict[int, Tensor]
) -> bool:
    """Return whether a parameter or fixed tensor is among the arguments, or in a list or tuple of them."""
    # most functions take this path, so that this is a loop without intermediate lists
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is nn.Parameter or id(value) in fixed:
            return True
        if kind is list or kind is tuple:
            for x in value:
                if type(x) is nn.Parameter or id(x) in fixed:
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


class Origin(NamedTuple):
    """Kind of data that a tensor is computed from; data of the input if neither is true.

    Attributes:
        is_weight: whether these are parameters and constants.
        is_constant: whether these are constants.
    """

    is_weight: bool = False
    is_constant: bool = False

    def joined(self, other: Origin) -> Origin:
        """Return the origin of a tensor that is computed from tensors of two origins."""
        if not (any(self) and any(other)):
            return Origin()
        is_weight = self.is_weight or other.is_weight
        return Origin(is_weight, not is_weight)


def _origin(
    sources: Sequence[Tensor],
    marks: Sequence[TensorMark | None],
    fixed: dict[int, Tensor],
    function: Any = None,
) -> Origin:
    """Return the origin of the output of a function.

    Integers and booleans, such as masks, may be data of the input, unless they are indices of rows to look up.
    """
    if not sources:
        return Origin(is_constant=function in FACTORIES)
    has_weight, are_constants = False, True
    for x, mark in zip(sources, marks, strict=True):
        if mark is not None and mark.is_computed_weight:
            has_weight = True
        elif not is_constant(x, fixed):
            if x.is_floating_point() or _is_index(x, function):
                return Origin()
            are_constants = False
    return Origin(has_weight, are_constants and not has_weight)


def _with_origin(
    mark: TensorMark, x: Tensor, origin: Origin, fixed: dict[int, Tensor]
) -> TensorMark:
    """Return the mark of a tensor with its origin; fixed tensors are known to be constants without a mark."""
    is_new_constant = origin.is_constant and id(x) not in fixed
    is_weight = origin.is_weight and x.is_floating_point()
    return mark._replace(is_computed_weight=is_weight, is_constant=is_new_constant)


def _is_index(x: Tensor, function: Any) -> bool:
    """Return whether a tensor among the arguments of a function holds indices of rows to look up."""
    return function in LOOKUPS and x.dtype != torch.bool and not x.is_complex()


def _joint_mark(
    sources: Sequence[Tensor],
    marks: Sequence[TensorMark | None],
    output: Tensor,
    is_weight: bool,
    args: Sequence[Any],
) -> TensorMark:
    """Return the feature dimension and ``weights_tokens`` of the output of a function that moves no dimension.

    Tensors that are expanded do not count beside one of the shape of the output, and parameters do not count beside
    activations. Of tensors that are added or joined, one with features elsewhere decides, since the others may be empty
    caches, masks or biases.
    """
    is_join = bool(args) and isinstance(args[0], (list, tuple))
    candidates = []
    for x, mark in zip(sources, marks, strict=True):
        is_factor = mark is not None and mark.is_computed_weight and not is_weight
        if x.is_floating_point() and not is_factor:
            candidates.append((x, mark or NO_MARK))
    same_shape = [mark for x, mark in candidates if x.shape == output.shape]
    same_rank = [mark for x, mark in candidates if x.dim() == output.dim()]
    for preferred in (
        [mark for mark in same_shape if not mark.is_constant],
        [mark for mark in same_shape if mark.weights_tokens],
    ):
        # scores of attention and data of the input decide beside masks and biases
        same_shape = preferred or same_shape
    relevant = same_shape or same_rank
    if not same_shape and not is_join and len(candidates) > 1:
        return NO_MARK  # an outer product
    if not relevant:
        is_last = all(mark.dim == -1 for _, mark in candidates)
        return NO_MARK if is_last else TensorMark(None)
    dims = {mark.dim for mark in relevant}
    if len(dims) > 1 and (same_shape or is_join):
        dims.discard(-1)
    weights_tokens = any(mark.weights_tokens for mark in relevant)
    return TensorMark(dims.pop() if len(dims) == 1 else None, weights_tokens)


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
    """Follow ``view``, ``reshape``, ``flatten`` and ``unflatten``: find the dimension with the features' stride.

    A column, such as ``x.view(*x.shape, 1)``, has the features in the last dimension of more than one element.
    """
    if dim == -1 and x.shape[-1] > 1 and y.shape[-1] == 1 and y.numel():
        place = next(i for i in range(-1, -y.dim() - 1, -1) if y.shape[i] > 1)
        return place if x.shape[-1] % y.shape[place] == 0 else -1
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


def _unfolded(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``unfold(dimension, size, step)``, which appends a dimension for the elements of a window."""
    dims = _dims("dimension", 0, args, kwargs)
    if dim is None or dims is None or dims[0] % x.dim() == dim % x.dim():
        return None
    return dim - 1


def _stacked_last(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``dstack`` and ``column_stack``: tensors of fewer dimensions get a new last one."""
    return dim if dim is None or x.dim() == y.dim() else -2


def _rotated(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow ``rot90(k, dims)``."""
    turns, dims = _dims("k", 0, args, kwargs), _dims("dims", 1, args, kwargs)
    if dim is None or (turns is not None and turns[0] % 2 == 0):
        return dim
    first, second = dims or (0, 1)
    return _exchanged(x.dim(), first, second).index(dim % x.dim()) - x.dim()


def _untracked(
    dim: int | None, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], y: Tensor
) -> int | None:
    """Follow functions that may put features anywhere."""
    return None if y.dim() > 1 else -1


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


def adds_column(function: Any, output: Any) -> bool:
    """Return whether a call is ``x.view(*x.shape, 1)`` in any spelling, after which features are not the last ones."""
    return function in RESHAPES and output.shape[-1:] == (1,)


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
    **dict.fromkeys(("dstack", "column_stack"), _stacked_last),
    **dict.fromkeys(("as_strided", "diagonal", "diagonal_copy"), _untracked),
    "rot90": _rotated,
}
for _name, _follower in FOLLOWERS_BY_NAMES.items():
    FOLLOWERS |= dict.fromkeys(_methods(_name), _follower)
# not ``functional.unfold``, which is im2col
UNFOLD = torch.ops.aten.unfold
FOLLOWERS |= dict.fromkeys((Tensor.unfold, UNFOLD, UNFOLD.default), _unfolded)
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
LOOKUPS = frozenset(
    _methods("__getitem__", "index_select", "gather", "take", "take_along_dim")
    + _methods("index")
)
# functions that create a tensor like another one, of which they read no element
REFERENCE_FACTORIES = frozenset(
    _methods(*(f"{name}_like" for name in "ones zeros full empty".split()))
    + _methods(*(f"{name}_like" for name in "rand randn randint".split()))
    + _methods(*(f"new_{name}" for name in "ones zeros full empty tensor".split()))
)
# functions that read no element of one of their arguments
REFERENCES = REFERENCE_FACTORIES | frozenset(
    _methods("type_as", "to", "view_as", "reshape_as", "expand_as")
)
# functions that create a tensor, a constant unless they are given tensors
FACTORIES = REFERENCE_FACTORIES | frozenset(
    _methods("ones", "zeros", "full", "empty", "eye", "tensor", "scalar_tensor")
    + _methods("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices")
    + _methods("arange", "range", "linspace", "logspace", "as_tensor", "asarray")
)
# functions whose outputs are followed although no tensor has a mark yet
ALWAYS_FOLLOWED = frozenset(FOLLOWERS) | COPIES | FACTORIES
FOLLOWERS |= dict.fromkeys(RESETS, _last)
# the others leave features that are in the last dimension there, except for columns
RESHAPES = frozenset(
    _methods(
        *"view reshape flatten unflatten view_as reshape_as ravel view_copy".split(),
        *("_unsafe_view", "_reshape_copy"),
    )
)
FOLLOWERS |= dict.fromkeys(RESHAPES, _reshaped)
FOLLOWED_BY_NAMES: dict[str, Follower] = {
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
