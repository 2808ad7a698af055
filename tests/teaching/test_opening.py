"""The cell that opens a notebook: it asks for the wheel where the package is missing, and else for nothing."""

import importlib.util
from types import SimpleNamespace

import nbformat
import pytest

from cpt_lessons.notebooks import notebooks

WHEEL = "cpt_core-{}-py3-none-any.whl".format


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the first cell of a notebook asks of IPython, in a folder of some files: a line for every magic."""
    monkeypatch.chdir(tmp_path)

    def run(number, *there):
        for name in there:
            (tmp_path / name).touch()
        lines, (path,) = [], notebooks(number)
        first = next(
            cell.source
            for cell in nbformat.read(path, as_version=4).cells
            if cell.cell_type == "code"
        )
        exec(
            first,
            {
                "get_ipython": lambda: SimpleNamespace(
                    run_line_magic=lambda *line: lines.append(line)
                )
            },
        )
        return lines

    return run


@pytest.fixture
def bare(monkeypatch):
    """An interpreter that does not know the package."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: None if name == "cpt_core" else found(name, *of),
    )


@pytest.mark.parametrize(
    ("number", "there", "wanted"),
    [
        ("00", [WHEEL("0.1.0")], f"./{WHEEL('0.1.0')}[lessons]"),
        (
            "04",
            [WHEEL("0.1.0"), "other-1-py3-none-any.whl"],
            f"./{WHEEL('0.1.0')}[lessons,vision]",
        ),
        ("06", [WHEEL("0.2.0")], f"./{WHEEL('0.2.0')}[lessons,text]"),
    ],
)
def test_where_the_package_is_missing_the_wheel_is_asked_for(
    number, there, wanted, asked, bare
):
    assert asked(number, *there) == [("pip", f"install -q '{wanted}'")]


@pytest.mark.parametrize("there", [[], [WHEEL("0.9.0"), WHEEL("0.10.0")]])
def test_without_one_wheel_it_says_what_to_do_and_asks_for_nothing(there, asked, bare):
    with pytest.raises(
        AssertionError,
        match=r"put one file cpt_core-\*\.whl here, beside this notebook",
    ):
        asked("00", *there)


def test_where_the_package_is_nothing_is_asked_for(asked):
    assert asked("00", WHEEL("0.1.0")) == []
