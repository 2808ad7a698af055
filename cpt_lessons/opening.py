"""The cell that opens every notebook: where the package is missing, as in Colab or a bare kernel, it installs it."""

from __future__ import annotations

# A kernel runs already where a notebook is open: the extra "notebooks" would put another one in its place.
EXTRAS = {"04": "lessons,vision", "06": "lessons,text"}

GUARD = """\
# Nothing to do here, unless this notebook was opened by itself, in Colab, say: then its package is installed.
from importlib.util import find_spec

if not find_spec("cpt_core"):
    from glob import glob

    wheels = glob("./cpt_core-*.whl")
    assert len(wheels) == 1, "put one file cpt_core-*.whl here, beside this notebook, and run this cell again"
    get_ipython().run_line_magic("pip", f"install -q '{wheels[0]}[EXTRAS]'")
"""


def guard(number: str) -> str:
    """Return the first cell of the notebook of this number: it does nothing where ``cpt_core`` can be imported.

    The wheel lies beside the notebook, as a course hands one out or as it is uploaded to Colab; it brings the committed
    rows. No name is asked of an index, where somebody else might have taken it.

    >>> print(guard("00").splitlines()[-1])
        get_ipython().run_line_magic("pip", f"install -q '{wheels[0]}[lessons]'")
    """
    return GUARD.replace("EXTRAS", EXTRAS.get(number, "lessons")).strip()
