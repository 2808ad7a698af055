"""Examples in docstrings run, and REPRODUCING.md is what the docstrings say."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from cpt_lab.analysis import reproducing

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
    assert (ROOT / "REPRODUCING.md").read_text() == reproducing.text(), "run: python -m cpt_lab docs"


def test_the_readme_says_what_the_rows_say():
    page = (ROOT / "README.md").read_text()
    assert reproducing.readme(page) == page, "run: python -m cpt_lab docs"
    outcome = page.split(reproducing.OUTCOME[0])[1].split(reproducing.OUTCOME[1])[0]
    assert [line[:4] for line in outcome.splitlines() if line.startswith("- ")] == ["- H2", "- H1", "- H5"]
    assert reproducing.readme(page.replace(outcome, "an older outcome")) == page
    with pytest.raises(ValueError, match=r"README\.md must have the lines"):
        reproducing.readme(page.replace(reproducing.OUTCOME[1], ""))


README = (ROOT / "README.md").read_text().split("<!-- example -->")[1:]


@pytest.mark.parametrize(
    "example", README, ids=["three lines", "which precision and where", "formats, roles, costs", "deploy"]
)
def test_the_readme_examples_run(example, tmp_path):
    """The examples, cut out of the README and run as they stand there; a mark begins one, of one block or more."""
    blocks = [b.split("```")[0] for b in example.split("```python")[1:]]
    code = "\n".join(b for b in blocks if "PrecisionCallback" not in b)
    assert code.count("cpt.") >= 3
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path)


def test_links_of_the_pages_lead_somewhere():
    import re

    for page in [*ROOT.glob("*.md"), *ROOT.glob("data/**/*.md"), *ROOT.glob("notebooks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not link.startswith(("http", "mailto")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
