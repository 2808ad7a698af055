"""Pages of the documentation site and its link checker; ``make book`` builds the site."""

import base64
import inspect
import io
import json
import re
import sys
from fnmatch import fnmatch
from html import unescape
from operator import attrgetter
from pathlib import Path

import pytest
from helpers import run_command
from PIL import Image

pytest.importorskip("pygments", reason="the extra book")

import cpt_core
from book import links, pages

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
UNREACHED = {  # shown or downloaded, but no page of the contents
    *(f"downloads/{path.name}" for path in NOTEBOOKS),
    *(
        f"data/results/{name}.png"
        for name in (
            "figure_3",
            "learning_rate_decay",
            "where_to_spend_bits",
            "when_to_switch",
            "order_of_bits",
            "late_switch_by_recipe",
        )
    ),
}


@pytest.fixture(scope="session")
def site_pages():
    return pages.pages()


@pytest.fixture
def conf():
    return pytest.importorskip("book.conf", reason="the extra book")


def is_orphan(text):
    return "orphan: true" in str(text)[:60]


@pytest.mark.slow
def test_site_has_page_for_every_public_name(site_pages):
    kinds = "autoclass|autofunction|py:data"
    for name in pages.NAMES:
        directive = rf"^\.\. ({kinds}):: cpt_core\.{re.escape(name)}$"
        assert re.search(directive, site_pages[f"api/{name}.md"], re.M)
        entry = rf"^   \* - :doc:`{name}`\n     - \S"
        assert re.search(entry, site_pages["api/index.md"], re.M), name


def contents_of(name, site_pages):
    """Yield the pages that the contents of a page list."""
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```", str(site_pages[name]), re.M | re.S
    )
    for line in "".join(trees).splitlines():
        entry = re.sub(r".*<(.*)>$", r"\1", line)
        if not entry or entry.startswith(":"):
            continue
        pattern = (Path(name).parent / entry).as_posix()
        stems = {page: re.sub(r"\.(md|ipynb)$", "", page) for page in site_pages}
        matches = [page for page, stem in stems.items() if fnmatch(stem, pattern)]
        assert matches, f"{name} lists {entry}"
        yield from matches


@pytest.mark.slow
def test_site_contents_list_every_page(site_pages):
    reached, new = set(), {"index.md"}
    while new:
        reached |= new
        new = {page for name in new for page in contents_of(name, site_pages)} - reached
    alone = site_pages.keys() - reached
    assert {name for name in alone if not is_orphan(site_pages[name])} == UNREACHED
    documents = [path for pattern in pages.DOCUMENTS for path in ROOT.glob(pattern)]
    assert len(documents) > 30
    assert {path.relative_to(ROOT).as_posix() for path in documents} <= reached


@pytest.mark.slow
def test_site_page_links_lead_to_pages(site_pages):
    targets = []
    for name, text in site_pages.items():
        if not isinstance(text, str) or is_orphan(text):
            continue
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            markdown = [c["source"] for c in cells if c["cell_type"] == "markdown"]
            text = "\n".join("".join(source) for source in markdown)
        for match in pages.LINK.finditer("".join(pages.CODE.split(text)[::2])):
            target = ((ROOT / name).parent / match[2]).resolve()
            targets.append(target.relative_to(ROOT).as_posix())
    assert len(targets) > 100
    assert set(targets) <= site_pages.keys()


@pytest.mark.slow
def test_site_notebook_page_has_answers_and_download(site_pages):
    answers = 0
    for path in NOTEBOOKS:
        cells = json.loads(site_pages[f"notebooks/{path.name}"])["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        texts = ["".join(output.get("text", "")) for output in outputs]
        assert not any(map(pages.PROMPT.search, texts))
        answers += sum("<summary>Answer" in "".join(cell["source"]) for cell in cells)
        assert site_pages[f"downloads/{path.name}"] == path.read_bytes()
        download = f"{{download}}`Download this notebook <../downloads/{path.name}>`"
        line = f"{download} and [run it](../docs/installing.md#notebooks).\n"
        assert re.match(rf"# .*\n\n{re.escape(line)}", "".join(cells[0]["source"]))
    assert answers > 5


def test_without_prompts_removes_unanswered_questions():
    prompts = {
        "no prediction yet - put a letter": [],
        "choose first, in the cell": ["kept\n"],
        "not attempted yet": [],
    }
    outputs = [
        {"output_type": "stream", "text": [f"a: {prompt}\n", *more]}
        for prompt, more in prompts.items()
    ]
    cell = {"cell_type": "code", "id": "a", "outputs": outputs}
    (shown,) = pages.without_prompts([cell])
    assert shown["outputs"] == [{"output_type": "stream", "text": "kept\n"}]


def test_relink_points_file_links_to_pages():
    text = "[a](LICENSE#x) [b](cpt_core/schedules) [c](README.md) [d](https://e.org) `[e](f)`\n```\n[g](h)\n```\n"
    linked, reached = pages.relink(ROOT / "README.md", text, [ROOT / "README.md"])
    expected = text.replace("LICENSE#x", "LICENSE.md#x")
    assert linked == expected.replace("e/schedules", "e/schedules/index.md")
    assert {path.name for path in reached} == {"LICENSE", "schedules", "README.md"}
    message = r"docs/sweeps\.md links to nowhere\.md, which is not there"
    with pytest.raises(FileNotFoundError, match=message):
        pages.relink(ROOT / "docs/sweeps.md", "[a](nowhere.md)", [])


def test_docstring_names_link_to_api_pages(conf):
    sentence = "``make_schedule`` gives a {}, ``q_max`` or ``Rex(d=0.5)``."
    lines = [sentence.format("``CyclicSchedule``"), "Paper: section 3."]
    conf.mark_sources(None, "function", "cpt_core.make_schedule", None, None, lines)
    link = ":py:obj:`CyclicSchedule <cpt_core.CyclicSchedule>`"
    assert lines == [sentence.format(link), "**Paper:** section 3."]


def documented_objects():
    """Return the public names and public members of classes, by path."""
    objects = {name: attrgetter(name)(cpt_core) for name in pages.NAMES}
    for name, value in list(objects.items()):
        if inspect.isclass(value):
            members = vars(value).items()
            objects |= {f"{name}.{key}": m for key, m in members if key[0] != "_"}
    kinds = (type, property, classmethod, staticmethod)
    return {
        path: value
        for path, value in objects.items()
        if inspect.isroutine(value) or isinstance(value, kinds)
    }


@pytest.mark.slow
def test_docstrings_of_public_names_are_valid_rest(conf):
    from docutils.core import publish_doctree
    from sphinx.ext.napoleon import Config, GoogleDocstring

    config = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)
    objects = documented_objects()
    assert len(objects) > 100
    for path, value in objects.items():
        kind = "class" if inspect.isclass(value) else "function"
        text = inspect.getdoc(value) or ""
        lines = GoogleDocstring(text, config, what=kind).lines()
        conf.mark_sources(None, kind, path, value, None, lines)
        text = re.sub(r":py:obj:`(.*?)`", r"*\1*", "\n".join(lines))
        warnings = io.StringIO()
        settings = {"warning_stream": warnings, "report_level": 2}
        publish_doctree(text, settings_overrides=settings)
        assert not warnings.getvalue(), f"{path}: {warnings.getvalue()}\n{text}"


def test_write_places_every_page(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "pages", lambda: {"a.md": "ü", "b/c.png": b"two"})
    pages.write(tmp_path)
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "ü"
    assert (tmp_path / "b/c.png").read_bytes() == b"two"


GOOD = '<a href="b/c.html#here">x</a><a href="#top">y</a><p id="top"></p><a href="https://a.org/b">z</a>'
BAD = {
    '<a href="b/d.html">x</a>': "b/d.html: is not there",
    '<a href="b/c.html#there">x</a>': "b/c.html#there: has no such anchor",
    '<a href="#down">x</a>': "#down: has no such anchor",
    '<a href="../x.html">x</a>': "../x.html: leads out of the site",
    '<a href="https:/a.org">x</a>': "https:/a.org: is no address",
    '<script src="https://a.org/b.js"></script>': "https://a.org/b.js: is loaded from the network",
    '<link rel="stylesheet" href="//a.org/b.css">': "//a.org/b.css: is loaded from the network",
}


@pytest.mark.parametrize(("bad", "reason"), BAD.items())
def test_link_checker_names_broken_links(tmp_path, bad, reason):
    (tmp_path / "site/b").mkdir(parents=True)
    page = '<p id="here"><img src="data:image/png;base64,AA" alt="a"></p>'
    (tmp_path / "site/b/c.html").write_text(page)
    (tmp_path / "site/index.html").write_text(GOOD)
    assert links.problems(tmp_path / "site") == []
    (tmp_path / "site/index.html").write_text(GOOD + bad)
    assert links.problems(tmp_path / "site") == [f"index.html: {reason}"]


CAPTIONS = ['bits rise from 3 to 8 < 9, "twice"', "the loss falls"]
INTRODUCTION = "# Lesson\n\n{download}`Get it <downloads/lesson.ipynb>`, $q_{max}$ and\n\n$$x^2$$\n"


def picture(color, alt):
    """Return the output of a cell that shows a one-pixel image."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1), color).save(buffer, "png")
    png = base64.b64encode(buffer.getvalue()).decode()
    return {
        "output_type": "display_data",
        "data": {"image/png": png, "text/plain": "<Figure: other words>"},
        "metadata": {"image/png": {"alt": alt, "width": 50}},
    }


def workbook():
    """Return a notebook with outputs that running it would not give."""
    printed = {"output_type": "stream", "name": "stdout", "text": "as committed"}
    shown = [picture("red", CAPTIONS[0]), picture("blue", CAPTIONS[1])]
    code = {"cell_type": "code", "metadata": {}, "execution_count": 1}
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": INTRODUCTION},
        {**code, "id": "b", "source": "raise SystemExit", "outputs": [printed]},
        {**code, "id": "c", "source": "show()", "outputs": shown},
    ]
    metadata = {"language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


@pytest.mark.slow
def test_sphinx_builds_offline_pages(site_pages, tmp_path):
    """Build a site of three pages, with stored cell outputs and without running cells."""
    pytest.importorskip("sphinx", reason="the extra book")
    source, site, notebook = tmp_path / "source", tmp_path / "site", workbook()
    files = {
        "index.md": "# Site\n\n```{toctree}\nlesson\napi/schedules.Rex\n```\n",
        "lesson.ipynb": json.dumps(notebook),
        "downloads/lesson.ipynb": json.dumps(notebook),
        "api/schedules.Rex.md": site_pages["api/schedules.Rex.md"],
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    run_command(*sphinx, "-c", ROOT / "book", source, site)

    lesson = (site / "lesson.html").read_text()
    assert lesson.count("<math") == 2
    assert "as committed" in lesson
    images = re.findall(r'<img\b(?=[^>]*_images/)[^>]*\balt="([^"]*)"', lesson)
    assert [unescape(alt) for alt in images] == CAPTIONS
    box = r'<div class="picture docutils container">\s*(?:<a [^>]*>)?<img '
    assert len(re.findall(box, lesson)) == len(images)
    (download,) = re.findall(r'href="(_downloads/[^"]*/lesson\.ipynb)"', lesson)
    assert json.loads((site / download).read_text()) == notebook
    rex = (site / "api/schedules.Rex.html").read_text()
    assert "<strong>Differs:</strong> d = 0.9" in rex
    line = re.search(r'href="\.\./cpt_core/schedules/profiles\.py\.html#L-(\d+)"', rex)
    lines = (ROOT / "cpt_core/schedules/profiles.py").read_text().splitlines()
    assert "class Rex" in "".join(lines[int(line[1]) - 1 : int(line[1]) + 1])
    assert [p for p in links.problems(site) if "cpt_core/" not in p] == []
