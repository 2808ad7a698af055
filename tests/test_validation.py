"""Argument validation, optional imports and atomic file writing."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import numpy as np
import pytest
from helpers import refused

from cpt_core.validation import check_choice, check_int, check_types, suggest_names
from cpt_extras.files import write_atomically
from cpt_extras.optional_libraries import import_optional


@pytest.mark.parametrize("value", [3, True, 2.0, "3", None])
def test_check_int_accepts_integers_only(value):
    if value == 3:
        assert check_int("steps", value) == check_int("steps", value, 3) == 3
        refused(
            "steps must be a whole number of at least 4, got 3",
            check_int,
            "steps",
            value,
            4,
        )
    else:
        refused(f"steps must be an integer, got {value!r}", check_int, "steps", value)
        refused(
            f"steps must be a whole number of at least 1, got {value!r}",
            check_int,
            "steps",
            value,
            1,
        )


def test_check_choice_accepts_any_collection():
    for names in (("a", "b"), ["a", "b"], {"a": 1, "b": 2}, (name for name in "ab")):
        assert check_choice("letter", "b", names) == "b"
    refused(
        r"unknown letter 'c'; choose from a, b$",
        check_choice,
        "letter",
        "c",
        {"a": 1, "b": 2},
    )


def test_suggest_names_offers_nearest_names():
    many = [f"cifar{i}/resnet{j}" for i in range(10) for j in range(10)]
    with pytest.raises(
        ValueError,
        match=r"^unknown grid 'cifar3/resnt4'; the nearest of 100 are cifar3/resnet4, ",
    ) as said:
        check_choice("grid", "cifar3/resnt4", many)
    assert str(said.value).count("cifar") == 4
    assert (
        suggest_names("?", many).count("cifar")
        == suggest_names(None, many).count("cifar")
        == 3
    )  # nothing is near, three are shown


def test_import_optional_names_missing_library_only():
    assert (
        import_optional("json", "text").dumps([1])
        == import_optional("json:dumps", "")([1])
        == "[1]"
    )
    with pytest.raises(
        ImportError, match=r'^no_such_library cannot be imported; .* ".\[text\]"$'
    ):
        import_optional("no_such_library.part:name", "text")
    with pytest.raises(ImportError, match=r"cpt_core\.nonsense") as caught:
        import_optional("cpt_core.nonsense", "text")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "asked", "extra"),
    [
        ("threadpoolctl", "vision", "lab"),
        ("PIL", "vision", "vision"),
        ("sklearn", "", "lab"),
        ("dgl", "", "graph"),
    ],
)
def test_import_optional_names_providing_extra(module, asked, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    refused(
        rf'^{module} cannot be imported; .* ".\[{extra}\]"$',
        import_optional,
        module,
        asked,
        error=ImportError,
    )
    monkeypatch.setitem(sys.modules, "cpt_core.nonsense", None)
    refused(
        r"^import of cpt_core\.nonsense halted",
        import_optional,
        "cpt_core.nonsense",
        "",
        error=ImportError,
    )


@pytest.mark.parametrize(
    ("part", "module", "extra"), [("hf", "transformers", "text"), ("lightning",) * 3]
)
def test_callback_modules_name_missing_extra(part, module, extra, monkeypatch):
    monkeypatch.delitem(sys.modules, f"cpt_extras.integrations.{part}", raising=False)
    for name in (module, f"{module}.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf'^{module} cannot be imported; .* ".\[{extra}\]"$'
    ):
        import_module(f"cpt_extras.integrations.{part}")


def test_write_atomically_never_shows_partial_file(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("old")

    def write(temporary):
        temporary.write_text("half")
        assert path.read_text() == "old"
        raise OSError("the disk is full")

    refused("the disk is full", write_atomically, path, write, error=OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    refused(
        "is a folder; name a file",
        write_atomically,
        tmp_path,
        write,
        error=IsADirectoryError,
    )
    with path.open() as reader:
        write_atomically(path, lambda temporary: temporary.write_text("new"))
        assert reader.read() == "old"  # the file it has opened is another one now
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def described(
    whole: int,
    part: float,
    word: str | None,
    many: tuple[str, ...],
    pairs: Mapping[str, Sequence[int]],
    call: Callable[[], int],
) -> None:
    check_types(described, locals(), parts=True)


def test_check_types_follows_annotations():
    right = {
        "whole": np.int64(3),
        "part": 3,
        "word": None,
        "many": ["a"],
        "pairs": {"a": [1, 2]},
        "call": int,
    }
    described(**right)
    for name, value, wanted in (
        ("whole", True, "an integer"),
        ("whole", 2.5, "an integer"),
        ("part", False, "a number"),
        ("part", "3", "a number"),
        ("word", 3, "a string or None"),
        ("many", "a", r"tuple\[str, ...\]"),
        ("many", ("a", 1), r"tuple\[str, ...\]"),
        ("pairs", [], r"Mapping\[str, Sequence\[int\]\]"),
        ("pairs", {"a": ["1"]}, r"Mapping\[str, Sequence\[int\]\]"),
        ("call", 3, "a function"),
    ):
        refused(f"^{name} must be {wanted}, got ", described, **right | {name: value})


@pytest.mark.parametrize("value", ["abc", b"abc", {"a": 1}, 3, None])
def test_check_types_rejects_string_as_sequence(value):
    def take(many: Sequence[str]) -> None: ...

    check_types(take, {"many": ("a", 1)})
    refused(r"^many must be Sequence\[str\], got ", check_types, take, {"many": value})
