"""Number formats and ladders: all values of small formats, names and invalid input."""

import os
import pickle
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import refused, run_command
from hypothesis import given
from hypothesis import strategies as st

from cpt_core.quantization.roles import (
    GRANULARITIES,
    ROUNDINGS,
    Quantizer,
    find_quantizer,
)
from cpt_extras.formats.format import FORMATS, Format
from cpt_extras.formats.ladder import AFFINE, FormatLadder, as_ladder
from cpt_extras.formats.ladder_rounding import on_level
from cpt_extras.formats.quantizer import FormatQuantizer
from cpt_extras.formats.tensor_rounding import quantize

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3:specials=infinity": ml_dtypes.float8_e4m3,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}


@pytest.mark.parametrize("name", ML_DTYPES)
def test_format_values_match_ml_dtypes(name):
    format, dtype = Format.of(name), np.dtype(ML_DTYPES[name])
    codes = np.arange(2**format.bits).astype(f"uint{8 * dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN among them
        values = codes.view(dtype).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)] + 0.0)
    assert np.array_equal(format.values().numpy(), finite)
    assert format.largest == float(ml_dtypes.finfo(dtype).max)
    assert format.bits == ml_dtypes.finfo(dtype).bits
    assert np.isinf(values).any() == (format.specials == "infinity")
    assert np.isnan(values).any() == (format.specials != "none")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("affine2", [0, 1 / 3, 2 / 3, 1]),
        ("symmetric3", [-3, -2, -1, 0, 1, 2, 3]),
        ("log2_3", [-1, -0.5, -0.25, 0, 0.25, 0.5, 1]),
        ("mxint8", range(-127, 128)),
        ("nvfp4", FORMATS["e2m1"].values().tolist()),
    ],
)
def test_format_values_match_hand_lists(name, values):
    assert FORMATS[name].values().tolist() == pytest.approx(list(values))


SPECIALS = st.sampled_from([None, "none", "nan", "infinity"])
ELEMENTS = st.one_of(
    st.builds(Format.affine, st.integers(1, 23)),
    st.builds(Format.symmetric, st.integers(2, 23)),
    st.builds(Format.log2, st.integers(2, 8)),
    st.builds(Format.minifloat, st.integers(2, 7), st.integers(0, 23), SPECIALS),
    st.builds(Format.minifloat, st.just(8), st.integers(0, 23)),
)
MX_ELEMENTS = ELEMENTS.filter(lambda f: f.kind in ("minifloat", "symmetric"))
SIZES = st.integers(1, 64)
ANY_FORMAT = st.one_of(
    ELEMENTS,
    st.builds(Format.nvfp4, SIZES),
    st.builds(Format.mx, MX_ELEMENTS, SIZES, partial=st.booleans()),
    st.sampled_from(list(FORMATS.values())),
)
LEVEL_FIELDS = {
    "granularity": st.sampled_from(GRANULARITIES),
    "rounding": st.sampled_from(ROUNDINGS),
    "hadamard": st.sampled_from([0, 2, 16, 32]),
}
FIELDS = st.fixed_dictionaries({}, optional=LEVEL_FIELDS)


@given(ANY_FORMAT, st.booleans(), FIELDS)
def test_format_name_roundtrips(format, saturate, fields):
    format = replace(format, saturate=saturate)
    assert Format.of(str(format)) == format
    assert Format.of(format) is format
    assert hash(Format.of(str(format))) == hash(format)
    level = FormatQuantizer(format=format, **fields)
    assert FormatQuantizer.of(str(level)) == level
    assert FormatQuantizer.of(level) is level
    plain = FormatQuantizer(format=format)
    assert FormatQuantizer.of(str(format)) == FormatQuantizer.of(format) == plain


@given(ANY_FORMAT, FIELDS)
def test_on_level_overrides_only_named_fields(format, fields):
    """Change what the level names, and take the remaining fields from the role."""
    role = Quantizer("per_tensor", "stochastic", running=True)
    level = FormatQuantizer(format=format, **fields)
    found = on_level(role, level)
    if level.plain:
        assert found is role
        assert level == FormatQuantizer.of(f"affine{format.bits}")
        return
    defaults = {"granularity": "per_tensor", "rounding": "stochastic", "hadamard": 0}
    expected = defaults | fields
    assert found.format == format
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.running == (found.granularity == "per_tensor")
    default = "per_tensor" if format.scale == "e4m3" else "per_row"
    by_row = on_level(Quantizer("per_row"), level)
    assert by_row.granularity == fields.get("granularity", default)


E4M3 = FORMATS["e4m3"]
RUNNING = FormatQuantizer("per_tensor", running=True, format=E4M3)
EXPONENT = "bits of a minifloat.s exponent must be .* at least 2 and at most 8"


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (FORMATS["float32"].values, (), "at most 16 bits"),
        (Format.of, ("e9m9",), EXPONENT),
        (Format.of, ("nonsense",), "unknown format 'nonsense'"),
        (Format.of, (8,), "a format is a Format or its name, got 8"),
        (Format.of, ("e4m3:nonsense=1",), "unknown option of a format 'nonsense'"),
        (Format.of, ("e4m3:rounding=nearest",), "option of a format 'rounding'"),
        (
            Format.of,
            ("mxfp4:partial=True",),
            "option 'partial' of format 'mxfp4:partial=True' cannot be 'True'",
        ),
        (Format.affine, (0,), "bits of affine .* at least 1 and at most 23, got 0"),
        (Format.symmetric, (1,), "symmetric .* at least 2 and at most 23, got 1"),
        (Format.log2, (9,), "bits of log2 .* at least 2 and at most 8, got 9"),
        (Format.minifloat, (1, 2), EXPONENT),
        (
            Format.minifloat,
            (8, 7, "none"),
            "e8m7 with specials 'none' has numbers beyond the largest of float32",
        ),
        (Format.minifloat, (8, 1, "nan"), "beyond the largest of float32"),
        (Format.mx, ("affine4",), "blocks of minifloats or whole numbers"),
        (Format.mx, ("e2m1", 0), "block must be a .* of at least 1, got 0"),
        (Quantizer, ("per_cow",), "unknown granularity 'per_cow'"),
        (FormatQuantizer.of, ("e4m3:nonsense=1",), "format 'nonsense'.*hadamard"),
        (
            FormatQuantizer.of,
            ("e4m3:rounding=up",),
            "unknown rounding 'up'; choose from nearest, stochastic",
        ),
        (
            FormatQuantizer.of,
            ("mxfp4:hadamard=x",),
            "option .hadamard. of format .mxfp4:hadamard=x. cannot be",
        ),
        (
            FormatQuantizer.of,
            ("affine4:clipping=rms",),
            "unknown option of a format 'clipping'",
        ),
        (
            FormatQuantizer.of,
            (Quantizer("per_row"),),
            "a level has a Format, its name, or a FormatQuantizer",
        ),
        (FormatQuantizer.of, (RUNNING,), "FormatQuantizer that is not running; got"),
        (find_quantizer, (RUNNING,), "no format, which a ladder gives"),
        (FormatQuantizer.of, ("affine4:hadamard=12",), "power of two .*, got 12"),
    ],
)
def test_format_rejects_invalid_fields(call, arguments, message):
    refused(message, call, *arguments)


# --- ladders ------------------------------------------------------------------------------------


def test_format_ladder_is_sorted_mapping():
    ladder = FormatLadder({8: "e4m3", 3: "mxfp4", 4: Format.nvfp4()})
    assert ladder.levels == tuple(ladder) == (3, 4, 8)
    assert [level in ladder for level in (2, 3)] == [False, True]
    assert str(ladder[4]) == "nvfp4"
    assert ladder.bits(3) == 4
    assert as_ladder(ladder) == ladder


@pytest.mark.slow
@given(st.dictionaries(st.integers(1, 32), ANY_FORMAT, min_size=1, max_size=6))
def test_format_ladder_roundtrips_through_dict(formats):
    ladder = FormatLadder(formats)
    assert FormatLadder.from_dict(ladder.to_dict()) == ladder
    filled = ladder.filled()
    filled.check(range(min(formats), max(formats) + 1))
    assert all(filled[level] == ladder[level] for level in ladder.levels)


def test_format_ladder_names_missing_level():
    ladder = FormatLadder({3: "e2m1", 8: "e4m3"})
    message = r"hole at level 5: its levels are 3, 8; ladder.filled\(\)"
    refused(message, ladder.check, [3, 8, 5])
    for level in set(range(1, 32)) - {3, 8}:
        refused(f"hole at level {level}:", ladder.__getitem__, level)
    assert str(ladder[32]) == "float32"
    assert str(ladder.filled()[7]) == "e2m1"
    assert str(AFFINE[24]) == "float32"
    assert AFFINE[23] == Format.affine(23)
    refused("unknown format 'e9'", FormatLadder, {4: "e9"})
    for level in (0, 33):
        refused("level must be .* at least 1 and at most 32", FormatLadder, {level: 8})


def test_format_ladder_hash_is_stable_across_processes():
    stored = pickle.dumps(FormatLadder({3: "mxfp4", 8: "e4m3"}))
    code = (
        "import pickle; from cpt_extras.formats.ladder import FormatLadder\n"
        f"print({{FormatLadder({{3: 'mxfp4', 8: 'e4m3'}}): 1}}[pickle.loads({stored!r})])"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    assert run_command(sys.executable, "-c", code, env=env) == "1\n"


# --- options that nothing could apply -------------------------------------------------


def test_ladder_refuses_zero_point_of_level():
    """A level takes the zero point of its role, so that one of its own would be dropped."""
    for format in (Format.affine(4), FORMATS["mxfp4"]):
        with_zero = FormatQuantizer(format=format, zero_point=True)
        refused("zero_point: a level takes", FormatLadder, {4: with_zero})
        refused("zero_point: a level takes", quantize, torch.ones(32), format=with_zero)


def test_quantize_refuses_hadamard_of_single_tensor():
    for format in ("mxfp4:hadamard=32", "affine4:hadamard=2", "float32:hadamard=2"):
        refused("format: a Hadamard", quantize, torch.ones(32), format=format)
