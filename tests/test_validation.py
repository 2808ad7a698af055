"""Argument validation, optional imports and atomic file writing."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import numpy as np
import pytest
from helpers import refused

from cpt_core.validation import check_int, check_types
from cpt_extras.files import write_atomically
from cpt_extras.optional_libraries import import_optional


def test_check_int_accepts_integers_only():
    assert check_int("steps", 3) == check_int("steps", 3, 3) == 3
    refused(
        "steps must be a whole number of at least 4, got 3", check_int, "steps", 3, 4
    )
    for value in (True, 2.0, "3", None):
        refused(f"steps must be an integer, got {value!r}", check_int, "steps", value)
        message = f"steps must be a whole number of at least 1, got {value!r}"
        refused(message, check_int, "steps", value, 1)


def example(
    whole: int,
    part: float,
    word: str | None,
    many: tuple[str, ...],
    pairs: Mapping[str, Sequence[int]],
    call: Callable[[], int],
    sequence: Sequence[str] = (),
) -> None:
    check_types(example, locals(), parts=True)


LEGAL = {
    "whole": np.int64(3),
    "part": 3,
    "word": None,
    "many": ["a"],
    "pairs": {"a": [1, 2]},
    "call": int,
}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("whole", (True, 2.5), "an integer"),
        ("part", (False, "3"), "a number"),
        ("word", (3,), "a string or None"),
        ("many", ("a", ("a", 1)), r"tuple\[str, ...\]"),
        ("pairs", ([], {"a": ["1"]}), r"Mapping\[str, Sequence\[int\]\]"),
        ("call", (3,), "a function"),
        ("sequence", ("abc", b"abc", {"a": 1}, 3, None), r"Sequence\[str\]"),
    ],
)
def test_check_types_follows_annotations(name, values, expected):
    example(**LEGAL)
    check_types(example, {"sequence": ("a", 1)})  # parts are not looked at
    for value in values:
        refused(f"^{name} must be {expected}, got ", example, **LEGAL | {name: value})
        if name == "sequence":
            refused(f"^{name} must be", check_types, example, {name: value})


@pytest.mark.parametrize(
    ("module", "given_extra", "extra"),
    [
        ("no_such_library.part:name", "text", "text"),
        ("threadpoolctl", "vision", "lab"),
        ("PIL", "vision", "vision"),
        ("sklearn", "", "lab"),
        ("dgl", "", "graph"),
    ],
)
def test_import_optional_names_providing_extra(module, given_extra, extra, monkeypatch):
    name = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, name, None)
    message = rf'^{name} cannot be imported; .* ".\[{extra}\]"$'
    refused(message, import_optional, module, given_extra, error=ImportError)
    monkeypatch.setitem(sys.modules, "cpt_core.nonsense", None)
    message = r"^import of cpt_core\.nonsense halted"
    refused(message, import_optional, "cpt_core.nonsense", "", error=ImportError)


@pytest.mark.parametrize(
    ("part", "module", "extra"), [("hf", "transformers", "text"), ("lightning",) * 3]
)
def test_callback_modules_name_missing_extra(part, module, extra, monkeypatch):
    name = f"cpt_extras.integrations.{part}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for missing in (module, f"{module}.pytorch"):
        monkeypatch.setitem(sys.modules, missing, None)
    message = rf'^{module} cannot be imported; .* ".\[{extra}\]"$'
    refused(message, import_module, name, error=ImportError)


def test_write_atomically_never_shows_partial_file(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")

    def write(temporary):
        temporary.write_text("half")
        assert path.read_text() == "old"
        raise OSError("the disk is full")

    refused("the disk is full", write_atomically, path, write, error=OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    message = "is a folder; name a file"
    refused(message, write_atomically, tmp_path, write, error=IsADirectoryError)
    with path.open() as reader:
        write_atomically(path, lambda temporary: temporary.write_text("new"))
        assert reader.read() == "old"  # the file it has opened is another one now
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
