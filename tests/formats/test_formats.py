"""Number formats: all values of small formats, names, ladders and invalid input."""

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

THEIRS = {
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


@pytest.mark.parametrize("name", THEIRS)
def test_format_values_match_ml_dtypes(name):
    format, dtype = Format.of(name), np.dtype(THEIRS[name])
    codes = np.arange(2**format.bits).astype(
        np.uint8 if format.bits <= 8 else np.uint16
    )
    with np.errstate(invalid="ignore"):  # NaN among them
        values = codes.view(dtype).astype(np.float32)
    assert np.array_equal(
        format.values().numpy(), np.unique(values[np.isfinite(values)] + 0.0)
    )
    assert format.largest == float(ml_dtypes.finfo(dtype).max)
    assert format.bits == ml_dtypes.finfo(dtype).bits
    assert bool(np.isinf(values).any()) == (format.specials == "infinity")
    assert bool(np.isnan(values).any()) == (format.specials != "none")


def test_format_values_match_hand_lists():
    assert FORMATS["affine2"].values().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert FORMATS["symmetric3"].values().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert FORMATS["log2_3"].values().tolist() == [-1, -0.5, -0.25, 0, 0.25, 0.5, 1]
    assert FORMATS["mxint8"].values().tolist() == list(range(-127, 128))
    assert FORMATS["nvfp4"].values().tolist() == FORMATS["e2m1"].values().tolist()
    for name, format in FORMATS.items():
        if format.bits <= 8:
            found = format.values()
            assert found.dtype == torch.float32
            assert bool((found.diff() > 0).all()), name
            assert len(found) <= 2**format.bits
            assert float(found.abs().max()) == pytest.approx(format.largest)
    refused("at most 16 bits", FORMATS["float32"].values)


def options():
    return st.fixed_dictionaries(
        {},
        optional={
            "granularity": st.sampled_from(GRANULARITIES),
            "rounding": st.sampled_from(ROUNDINGS),
            "hadamard": st.sampled_from([0, 2, 16, 32]),
        },
    )


elements = st.one_of(
    st.builds(Format.affine, st.integers(1, 23)),
    st.builds(Format.symmetric, st.integers(2, 23)),
    st.builds(Format.log2, st.integers(2, 8)),
    st.builds(
        Format.minifloat,
        st.integers(2, 7),
        st.integers(0, 23),
        st.sampled_from([None, "none", "nan", "infinity"]),
    ),
    st.builds(Format.minifloat, st.just(8), st.integers(0, 23)),
)
blocks = st.one_of(
    st.builds(Format.nvfp4, st.integers(1, 64)),
    st.builds(
        Format.mx,
        elements.filter(lambda f: f.kind in ("minifloat", "symmetric")),
        st.integers(1, 64),
        partial=st.booleans(),
    ),
    st.sampled_from(list(FORMATS.values())),
)


@given(st.one_of(elements, blocks), st.booleans(), options())
def test_format_name_roundtrips(format, saturate, chosen):
    format = replace(format, saturate=saturate)
    assert Format.of(str(format)) == format
    assert Format.of(format) is format
    assert hash(Format.of(str(format))) == hash(format)
    level = FormatQuantizer(format=format, **chosen)
    assert FormatQuantizer.of(str(level)) == level
    assert FormatQuantizer.of(level) is level
    assert (
        FormatQuantizer.of(str(format))
        == FormatQuantizer.of(format)
        == FormatQuantizer(format=format)
    )


@given(st.one_of(elements, blocks), options())
def test_on_level_overrides_only_named_fields(format, chosen):
    """Change what the level names, and take the remaining fields from the role."""
    role = Quantizer("per_tensor", "stochastic", running=True)
    level = FormatQuantizer(format=format, **chosen)
    found = on_level(role, level)
    if level.plain:
        assert found is role
        assert level == FormatQuantizer.of(f"affine{format.bits}")
        return
    assert found.format == format
    assert found.granularity == chosen.get("granularity", "per_tensor")
    assert found.rounding == chosen.get("rounding", "stochastic")
    assert found.running == (found.granularity == "per_tensor")
    assert found.hadamard == level.hadamard
    assert on_level(Quantizer("per_row"), level).granularity == chosen.get(
        "granularity", "per_tensor" if format.scale == "e4m3" else "per_row"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Format.of("e9m9"),
            "bits of a minifloat.s exponent must be .* at least 2 and at most 8",
        ),
        (lambda: Format.of("nonsense"), "unknown format 'nonsense'"),
        (lambda: Format.of(8), "a format is a Format or its name, got 8"),
        (lambda: Format.of("e4m3:nonsense=1"), "unknown option of a format 'nonsense'"),
        (
            lambda: Format.of("e4m3:rounding=nearest"),
            "unknown option of a format 'rounding'",
        ),
        (
            lambda: FormatQuantizer.of("e4m3:nonsense=1"),
            "unknown option of a format 'nonsense'.*hadamard",
        ),
        (
            lambda: FormatQuantizer.of("e4m3:rounding=up"),
            "unknown rounding 'up'; choose from nearest, stochastic",
        ),
        (
            lambda: FormatQuantizer.of(Quantizer("per_row")),
            "a level has a Format, its name, or a FormatQuantizer",
        ),
        (
            lambda: Format.affine(0),
            "bits of affine formats must be .* at least 1 and at most 23, got 0",
        ),
        (
            lambda: Format.symmetric(1),
            "bits of symmetric formats must be .* at least 2 and at most 23, got 1",
        ),
        (
            lambda: Format.log2(9),
            "bits of log2 formats must be .* at least 2 and at most 8, got 9",
        ),
        (
            lambda: Format.minifloat(1, 2),
            "bits of a minifloat.s exponent must be .* at least 2 and at most 8",
        ),
        (lambda: Format.mx("affine4"), "blocks of minifloats or whole numbers"),
        (
            lambda: Format.mx("e2m1", block=0),
            "block must be a whole number of at least 1, got 0",
        ),
        (
            lambda: FormatQuantizer("per_row", format=Format.affine(4), hadamard=12),
            "power of two as its size, got 12",
        ),
        (
            lambda: FormatQuantizer.of("affine4:clipping=rms"),
            "unknown option of a format 'clipping'",
        ),
        (lambda: Quantizer("per_cow"), "unknown granularity 'per_cow'"),
        (
            lambda: FormatQuantizer.of(
                FormatQuantizer("per_tensor", running=True, format=FORMATS["e4m3"])
            ),
            "a FormatQuantizer that is not running; got",
        ),
        (
            lambda: find_quantizer(FormatQuantizer("per_row", format=FORMATS["e4m3"])),
            "no format, which a ladder gives",
        ),
        (
            lambda: Format.minifloat(8, 7, "none"),
            "e8m7 with specials 'none' has numbers beyond the largest of float32",
        ),
        (lambda: Format.minifloat(8, 1, "nan"), "beyond the largest of float32"),
        (
            lambda: FormatQuantizer.of("mxfp4:hadamard=x"),
            "option .hadamard. of format .mxfp4:hadamard=x. cannot be",
        ),
        (
            lambda: Format.of("mxfp4:partial=True"),
            "option 'partial' of format 'mxfp4:partial=True' cannot be 'True'",
        ),
    ],
)
def test_format_rejects_invalid_fields(make, words):
    refused(words, make)


def test_format_ladder_is_sorted_mapping():
    ladder = FormatLadder({8: "e4m3", 3: "mxfp4", 4: Format.nvfp4()})
    assert ladder.levels == tuple(ladder) == (3, 4, 8)
    assert [level in ladder for level in (2, 3)] == [False, True]
    assert str(ladder[4]) == "nvfp4"
    assert ladder.bits(3) == 4
    assert ladder == FormatLadder.from_dict(ladder.to_dict()) == as_ladder(ladder)


@given(
    st.dictionaries(
        st.integers(1, 32), st.one_of(elements, blocks), min_size=1, max_size=6
    )
)
def test_format_ladder_roundtrips_through_dict(formats):
    ladder = FormatLadder(formats)
    assert FormatLadder.from_dict(ladder.to_dict()) == ladder
    filled = ladder.filled()
    filled.check(range(min(formats), max(formats) + 1))
    assert all(filled[level] == ladder[level] for level in ladder.levels)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {0: "e4m3"},
        {33: "e4m3"},
        {1.5: "e4m3"},
        {True: "e4m3"},
        {4: "e9"},
        ["e4m3"],
        None,
    ],
)
def test_format_ladder_rejects_invalid_levels(bad):
    refused(r"ladder is a mapping|level|unknown format", FormatLadder, bad)


def test_format_ladder_names_missing_level():
    ladder = FormatLadder({3: "e2m1", 8: "e4m3"})
    refused(
        r"hole at level 5: its levels are 3, 8; ladder.filled\(\)",
        ladder.check,
        [3, 8, 5],
    )
    for level in set(range(1, 32)) - {3, 8}:
        with pytest.raises(ValueError, match=f"hole at level {level}:"):
            ladder[level]
    assert str(ladder[32]) == "float32"
    assert str(ladder.filled()[7]) == "e2m1"
    assert str(AFFINE[24]) == "float32"
    assert AFFINE[23] == Format.affine(23)


def test_format_ladder_hash_is_stable_across_processes():
    stored = pickle.dumps(FormatLadder({3: "mxfp4", 8: "e4m3"}))
    code = (
        "import pickle; from cpt_extras.formats.ladder import FormatLadder\n"
        f"print({{FormatLadder({{3: 'mxfp4', 8: 'e4m3'}}): 1}}[pickle.loads({stored!r})])"
    )
    assert (
        run_command(
            sys.executable, "-c", code, env=os.environ | {"PYTHONHASHSEED": "7"}
        )
        == "1\n"
    )
