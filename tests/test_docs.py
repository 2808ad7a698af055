"""Examples in docstrings run, and REPRODUCING.md is what the docstrings say."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from cpt_core.analysis import reproducing

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in (ROOT / "cpt_core").rglob("*.py")
    if p.name != "__main__.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0
    assert module.__doc__


def test_reproducing_is_up_to_date():
    assert (ROOT / "REPRODUCING.md").read_text() == reproducing.text(), "run: python -m cpt_core docs"


def test_the_readme_example_runs():
    """The three-line example, cut out of the README and run as it stands there."""
    readme = (ROOT / "README.md").read_text()
    code = readme.split("<!-- example -->")[1].split("```python")[1].split("```")[0]
    assert code.count("cpt.") >= 3
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def test_links_of_the_pages_lead_somewhere():
    import re

    for page in [*ROOT.glob("*.md"), *ROOT.glob("data/**/*.md"), *ROOT.glob("notebooks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not link.startswith(("http", "mailto")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
