"""Safe reading of pickled arrays: equal to pickle, without running code or trusting content."""

import operator
import pickle
import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
from helpers import refused

from cpt_lab.data.inert_pickle import load_inert, to_array, to_csr_parts

ARRAYS = {
    "int32": np.arange(6, dtype=np.int32).reshape(2, 3),
    "float64": np.linspace(0, 1, 5),
    "big end first": np.arange(4, dtype=">i2"),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "flags": np.array([True, False]),
    "empty": np.empty((0, 3), np.float32),
}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", ARRAYS)
def test_load_inert_matches_pickle(name, protocol):
    expected = ARRAYS[name]
    result = to_array(load_inert(pickle.dumps(expected, protocol)))
    assert result.shape == expected.shape
    assert np.array_equal(result, expected)


class Call:
    """Object whose pickle asks for a function call, with a state for the result."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments, state)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (print, ("run",)),
        (eval, ("1 + 1",)),
        (np.zeros, ((2,),)),
        (operator.attrgetter, ("x",)),
        (scipy.sparse.csc_matrix, ((2, 2),)),
        (np.frombuffer, (b"1234",)),
        (dict, ()),
    ],
)
def test_load_inert_rejects_foreign_functions(function, arguments, capsys):
    file = pickle.dumps(Call(function, *arguments), 2)
    refused("a file of arrays needs no .*: not unpickled", load_inert, file)
    assert capsys.readouterr().out == ""


def array_pickle(shape=(2,), kind="i4", order="<", data=b"\1\0\0\0\2\0\0\0"):
    """Return the pickle of an array with the given state."""
    dtype_state = (3, order, None, None, None, -1, -1, 0)
    dtype = Call(np.dtype, kind, False, True, state=dtype_state)
    reconstruct = np.empty(0).__reduce__()[0]
    state = (1, shape, dtype, False, data)
    return pickle.dumps(Call(reconstruct, np.ndarray, (0,), b"b", state=state), 2)


NO_TABLE = "a shape that is no row or table"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (3,)}, r"an array of shape \(3,\) and type int32 has 8 bytes"),
        ({"shape": (1,)}, r"an array of shape \(1,\) and type int32 has 8 bytes"),
        ({"shape": (1 << 62, 2)}, "has 8 bytes"),
        ({"shape": (-2,)}, NO_TABLE),
        ({"shape": (2.0,)}, NO_TABLE),
        ({"shape": (True, 2)}, NO_TABLE),
        ({"shape": (1, 1, 2)}, NO_TABLE),
        ({"shape": [2]}, NO_TABLE),
        ({"kind": "O8"}, "holds no numbers, but 'O8'"),
        ({"kind": "V8"}, "holds no numbers, but 'V8'"),
        ({"kind": "U1"}, "holds no numbers, but 'U1'"),
        ({"kind": "c8"}, "holds no numbers, but 'c8'"),
        ({"kind": "i4,i4"}, "holds no numbers, but 'i4,i4'"),
        ({"order": "x"}, "holds no numbers"),
        ({"data": [1, 2]}, "the bytes of an array expected, got list"),
        ({"data": None}, "the bytes of an array expected, got nonetype"),
        ({"data": b""}, "has 0 bytes"),
    ],
)
def test_load_inert_rejects_inconsistent_arrays(changes, message):
    assert to_array(load_inert(array_pickle())).tolist() == [1, 2]
    refused(message, to_array, load_inert(array_pickle(**changes)))


HOSTILE = {  # pickle crashes on each of them, or takes all memory
    "tuples in tuples": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "a part numbered 2**31": b"\x80\x02]r\xff\xff\xff\x7f.",
    "an unknown step": b"\x80\x02\x8f.",
    "a persistent object": b"\x80\x02K\x01Q.",
    "an extension": b"\x80\x02\x82\x01.",
}
LOAD_ALL = """
import pickle, sys
from cpt_lab.data.inert_pickle import load_inert
for name, content in pickle.load(sys.stdin.buffer).items():
    try:
        load_inert(content)
    except ValueError as error:
        print(name, "not unpickled" in str(error), flush=True)
"""


@pytest.mark.slow
def test_load_inert_rejects_hostile_opcodes():
    """Run in a child process, which a file that is accepted may end."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL],
        input=pickle.dumps(HOSTILE),
        capture_output=True,
        check=False,
        timeout=120,
    )
    lines = done.stdout.decode().splitlines()
    assert lines == [f"{name} True" for name in HOSTILE], done.stderr.decode()
    assert done.returncode == 0


def test_to_array_rejects_other_objects():
    refused("an array expected, got dict", to_array, {})
    array = load_inert(pickle.dumps(np.eye(2), 2))
    refused("a sparse matrix expected, got array", to_csr_parts, array)
    matrix = scipy.sparse.csr_matrix(np.eye(2))
    del matrix.__dict__["indices"]
    incomplete = load_inert(pickle.dumps(matrix, 2))
    refused("a sparse matrix lacks indices", to_csr_parts, incomplete)
