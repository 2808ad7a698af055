"""Safe reading of pickles of arrays, matrices and tables of lists: nothing that a pickle names is run.

A pickle is a program: it names functions, and gives objects such as scipy's sparse matrices a content that they trust.
Here every name stands for an inert object that stores its arguments (``Inert``), a file may use only opcodes that plain
data needs, and arrays are built only from bytes whose number fits their shape.

>>> import pickle
>>> to_array(load_inert(pickle.dumps(np.eye(2, dtype=np.int8), 2))).tolist()
[[1, 0], [0, 1]]
"""

import io
import math
import pickle
import pickletools
from typing import Any, NamedTuple

import numpy as np

OPCODES = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD".split()
)
MAX_PICKLED_TUPLES = 1_000  # an array needs five; tuples in tuples without end overflow the stack when they are hashed
MODULE_ALIASES = {
    "__builtin__": "builtins",
    "numpy.core.multiarray": "numpy._core.multiarray",
}  # former names
# number types by the names that pickles have for them; a flag is a byte
NUMBER_TYPES = {name: name for name in "i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()} | {
    "b1": "u1"
}


class Inert:
    """Stand-in for an object that a pickle names: stores its arguments and its state, and does nothing."""

    args: tuple
    state: Any = None

    def __new__(cls, *args: Any) -> "Inert":
        """Store the arguments."""
        inert = object.__new__(cls)
        inert.args = args
        return inert

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _List(Inert):
    """Stand-in for ``list``, which a table of lists names."""


class _ArrayClass(Inert):
    """Stand-in for ``numpy.ndarray``, which an array names."""


class _Dtype(Inert):
    """Stand-in for ``numpy.dtype``."""


class _Array(Inert):
    """Stand-in for an array: its state is (version, shape, type, order, bytes)."""


class _Encoded(Inert):
    """Stand-in for bytes that a newer Python wrote as text."""


class _NoBytes(Inert):
    """Stand-in for empty bytes, which a newer Python writes as a call."""


class _Csr(Inert):
    """Stand-in for a ``scipy.sparse.csr_matrix``: its state is a table of arrays."""


def _table(*factory: Any) -> dict:
    """Return an empty dict, which stands for a ``defaultdict``."""
    return {}


INERT_CLASSES = {
    "builtins.list": _List,
    "collections.defaultdict": _table,
    "numpy.ndarray": _ArrayClass,
    "numpy.dtype": _Dtype,
    "numpy._core.multiarray._reconstruct": _Array,
    "scipy.sparse.csr_matrix": _Csr,
    "_codecs.encode": _Encoded,
    "builtins.bytes": _NoBytes,
}


class CsrParts(NamedTuple):
    """Arrays of a sparse matrix, not checked against each other."""

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a name."""
        module = (
            "scipy.sparse"
            if module.startswith("scipy.sparse.")
            else MODULE_ALIASES.get(module, module)
        )
        if f"{module}.{name}" not in INERT_CLASSES:
            raise ValueError(
                f"a file of arrays needs no {module}.{name}: not unpickled"
            )
        return INERT_CLASSES[f"{module}.{name}"]


def load_inert(content: bytes) -> Any:
    """Return the content of a pickle, with stand-ins for arrays, which ``to_array`` and ``to_csr_parts`` convert.

    Raises:
        ValueError: for opcodes, names and numbers of opcodes that plain data does not need.
    """
    tuples = 0
    for step, argument, position in pickletools.genops(content):
        if step.name not in OPCODES:
            raise ValueError(
                f"a file of arrays needs no {step.name} (at byte {position}): not unpickled"
            )
        if "PUT" in step.name and (
            argument is None or not 0 <= argument <= len(content)
        ):
            raise ValueError(
                f"it numbers its parts up to {argument} in {len(content)} bytes: not unpickled"
            )
        tuples += step.name.startswith("TUPLE")
    if tuples > MAX_PICKLED_TUPLES:
        raise ValueError(f"a file of arrays needs no {tuples:,} tuples: not unpickled")
    return _InertUnpickler(io.BytesIO(content), encoding="latin1").load()


def to_array(value: Any) -> np.ndarray:
    """Return an array of at most two dimensions from its stand-in.

    Raises:
        ValueError: for any other value, and for bytes that do not fit the shape.
    """
    state = value.state if isinstance(value, _Array) else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError(f"an array expected, got {_type_name(value)}")
    _, shape, dtype, in_columns, data = state
    if (
        not isinstance(shape, tuple)
        or len(shape) > 2
        or not all(_is_size(size) for size in shape)
    ):
        raise ValueError("an array has a shape that is no row or table")
    kind, content = _number_type(dtype), _array_bytes(data)
    if math.prod(shape) * kind.itemsize != len(content):
        raise ValueError(
            f"an array of shape {shape} and type {kind} has {len(content)} bytes"
        )
    return np.frombuffer(content, kind).reshape(
        shape, order="F" if in_columns is True else "C"
    )


def to_csr_parts(value: Any) -> CsrParts:
    """Return the arrays of a sparse matrix from its stand-in; ValueError if one is missing or no array."""
    state = value.state if isinstance(value, _Csr) else None
    if not isinstance(state, dict):
        raise ValueError(f"a sparse matrix expected, got {_type_name(value)}")
    if missing := {"data", "indices", "indptr", "_shape"} - set(state):
        raise ValueError(f"a sparse matrix lacks {', '.join(sorted(missing))}")
    shape = state["_shape"]
    if (
        not isinstance(shape, tuple)
        or len(shape) != 2
        or not all(_is_size(size) for size in shape)
    ):
        raise ValueError("a sparse matrix has a shape that is no table")
    return CsrParts(
        to_array(state["data"]),
        to_array(state["indices"]),
        to_array(state["indptr"]),
        shape,
    )


def _number_type(value: Any) -> np.dtype:
    name = value.args[0] if isinstance(value, _Dtype) and value.args else None
    state = value.state if isinstance(value, _Dtype) else None
    order: Any = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
    if (
        not isinstance(name, str)
        or name not in NUMBER_TYPES
        or order not in ("<", ">", "=", "|")
    ):
        raise ValueError(f"an array holds no numbers, but {str(name)[:20]!r}")
    return np.dtype(NUMBER_TYPES[name]).newbyteorder("=" if order == "|" else order)


def _array_bytes(value: Any) -> bytes:
    if isinstance(value, _Encoded) and value.args[1:] == ("latin1",):
        value = value.args[0]
    if isinstance(value, _NoBytes) and not value.args:
        value = b""
    if isinstance(value, str):
        value = value.encode("latin1")
    if not isinstance(value, bytes):
        raise ValueError(f"the bytes of an array expected, got {_type_name(value)}")
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _type_name(value: Any) -> str:
    return type(value).__name__.lstrip("_").lower()
