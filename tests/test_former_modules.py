"""Former module names of cpt_lab and cpt_lessons."""

import subprocess
import sys
from importlib import import_module

import pytest

from cpt_lab.former_names import FORMER_NAMES


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_former_module_name_imports_with_a_warning(former, name, monkeypatch):
    """Both names are one module object, and the warning points at the import."""
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{former} is now {name}$") as warned:
        module = import_module(former)

    assert module is sys.modules[name] is import_module(name)
    assert module.__name__ == module.__spec__.name == name
    assert len(warned) == 1


def test_former_module_name_works_in_from_imports():
    """Of a package that nothing has been imported from yet."""
    script = (
        "import warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "from cpt_lab.sweeps import lines\n"
        "from cpt_lab.sweeps.lines import newest\n"
        "import cpt_lab.sweeps.lines\n"
        "import cpt_lab.sweeps.row_format as row_format\n"
        "assert lines is row_format is cpt_lab.sweeps.lines\n"
        "assert newest is row_format.newest\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_former_module_warning_names_the_importing_line():
    script = (
        "import warnings\nwarnings.simplefilter('always')\nimport cpt_lessons.places\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert "<string>:3: DeprecationWarning: cpt_lessons.places is now" in ran.stderr
