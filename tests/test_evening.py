"""The page "The method in an evening" shows code that is there, of the method alone, whole and in order."""

import ast
import importlib
import inspect
import re
import textwrap

import pytest
from test_architecture import METHOD

from book import evening


@pytest.fixture(scope="module")
def page():
    return evening.page()


@pytest.mark.parametrize("entry", evening.entries(), ids=lambda e: e.name)
def test_what_is_shown_is_what_python_finds(page, entry):
    """Asked of Python itself; nothing is missing but the docstring, and of a class its methods."""
    assert entry.file.partition("/")[0] in METHOD
    value = importlib.import_module(f"cpt_core.{entry.file.removesuffix('.py').replace('/', '.')}")
    for part in entry.name.split("."):
        value = inspect.getattr_static(value, part)
    inner = (getattr(value, key, None) for key in ("fget", "func", "__func__"))
    value = inspect.unwrap(next(filter(None, inner), value))
    if not callable(value):  # a constant: its name and the words of its value
        assert re.search(rf"^{entry.name}\b.* = ", entry.source)
        wanted = ast.unparse(ast.parse(entry.source).body[0].value)
        source = (evening.LIBRARY / entry.file).read_text(encoding="utf-8")
        assert wanted in [ast.unparse(n.value) for n in ast.parse(source).body if getattr(n, "value", None)]
        return
    whole = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    doc = ast.get_docstring(whole)
    whole.body = [n for n in whole.body[bool(doc) :] if not (inspect.isclass(value) and isinstance(n, ast.FunctionDef))]
    fence = f"```python\n{textwrap.dedent(entry.source)}\n```"
    assert page.count(fence) == 1
    assert ast.unparse(ast.parse(textwrap.dedent(entry.source)).body[0]) == ast.unparse(whole)
    assert entry.doc == (doc or "")
    assert not doc or doc.split("\n")[0].split("``")[0].split("*")[0].split("_")[0] in page
    line = (evening.LIBRARY / entry.file).read_text(encoding="utf-8").splitlines()[entry.line - 1]
    assert line == entry.source.splitlines()[0]
    assert f'href="cpt_core/{entry.file}.html#L-{entry.line}"' in page


def test_every_entry_of_the_table_is_read():
    assert len(evening.entries()) == evening.TABLE.count("@") > 30
    with pytest.raises(LookupError, match=r"cpt_core/schedules/cost\.py has no nonsense"):
        evening.shown("schedules/cost.py", "nonsense")


def test_chapters_are_in_order(page):
    numbers = [int(n) for n in re.findall(r"^## (\d+)\. ", page, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    names = [e.name.replace("_", "&#95;") for e in evening.entries()]
    assert re.findall(r"^### (.*)$", page, re.M) == names
    assert len(set(names)) == len(names)


def test_wrong_changes_stand_beside_what_they_break(page):
    found = [(e, m) for e in evening.entries() for m in e.mutants]
    assert len(found) >= 10
    for entry, mutant in found:
        assert mutant.before in entry.source
        assert f"- {mutant.what} (`tests/{mutant.tests[0]}`" in page.partition(f'#L-{entry.line}">')[2]
    beside = {m.what for e, m in found if e.name == "nearest"}
    assert beside == {"half is rounded up", "values above the range stay there"}


def test_the_end_counts_what_was_shown(page):
    blocks = [b for b in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)]
    wrong = len(re.findall(r"^- .* \(`tests/", page, re.M))
    lines = sum(len(block.splitlines()) for block in blocks)
    assert f"Shown: {lines:,} lines in {len(blocks)} pieces. Beside them stand {wrong} wrong changes" in page
