"""First cell of every notebook: installs the wheel if the package is missing, otherwise nothing."""

import importlib.util
from types import SimpleNamespace

import nbformat
import pytest

from cpt_lessons.notebooks import notebooks

WHEEL = "cpt_core-{}-py3-none-any.whl".format


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return the IPython magics run by a notebook's first cell in a folder with given files."""
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
    """Simulate an interpreter without the package."""
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
def test_first_cell_installs_wheel_if_package_missing(
    number, there, wanted, asked, bare
):
    assert asked(number, *there) == [("pip", f"install -q '{wanted}'")]


@pytest.mark.parametrize("there", [[], [WHEEL("0.9.0"), WHEEL("0.10.0")]])
def test_first_cell_without_one_wheel_explains(there, asked, bare):
    with pytest.raises(
        AssertionError,
        match=r"put one file cpt_core-\*\.whl here, beside this notebook",
    ):
        asked("00", *there)


def test_first_cell_with_package_installs_no_wheel(asked):
    assert asked("00", WHEEL("0.1.0")) == []
