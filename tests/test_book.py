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


def picture(color, alt):
    """Return the output of a cell that shows a one-pixel image."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1), color).save(buffer, "png")
    data = {
        "image/png": base64.b64encode(buffer.getvalue()).decode(),
        "text/plain": "<Figure: other words>",
    }
    return {
        "output_type": "display_data",
        "data": data,
        "metadata": {"image/png": {"alt": alt, "width": 50}},
    }


WORDS = ['bits rise from 3 to 8 < 9, "twice"', "the loss falls"]


def cell(kind, name, source, **more):
    return {"cell_type": kind, "id": name, "metadata": {}, "source": source, **more}


def ran(name, source, *outputs):
    return cell("code", name, source, execution_count=1, outputs=list(outputs))


WORKBOOK = {
    "cells": [
        cell(
            "markdown",
            "a",
            "# Lesson\n\n{download}`Get it <downloads/lesson.ipynb>`, $q_{max}$ and\n\n$$x^2$$\n",
        ),
        ran(
            "b",
            "raise SystemExit",
            {"output_type": "stream", "name": "stdout", "text": "as committed"},
        ),
        ran("c", "show()", *map(picture, ("red", "blue"), WORDS)),
    ],
    "metadata": {"language_info": {"name": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@pytest.fixture(scope="module")
def made():
    return pages.pages()


def prose(name, text):
    """Return the text of a page without its code."""
    if name.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "markdown"
        )
    return "".join(pages.CODE.split(text)[::2])


def test_site_has_page_for_every_public_name(made):
    for name in pages.NAMES:
        directive = (
            rf"^\.\. (autoclass|autofunction|py:data):: cpt_core\.{re.escape(name)}$"
        )
        assert re.search(directive, made[f"api/{name}.md"], re.M)
        assert re.search(
            rf"^   \* - :doc:`{name}`\n     - \S", made["api/index.md"], re.M
        ), name


def test_site_contents_list_every_page(made):
    reached, new = set(), {"index.md"}
    while new:
        reached |= new
        found = set()
        for name in new:
            for tree in re.findall(
                r"^```\{toctree\}\n(.*?)^```", str(made[name]), re.M | re.S
            ):
                for line in tree.splitlines():
                    entry = re.sub(r".*<(.*)>$", r"\1", line)
                    if entry and not entry.startswith(":"):
                        wanted = (Path(name).parent / entry).as_posix()
                        matches = {
                            page
                            for page in made
                            if fnmatch(re.sub(r"\.(md|ipynb)$", "", page), wanted)
                        }
                        assert matches, f"{name} lists {entry}"
                        found |= matches
        new = found - reached
    alone = {
        name
        for name in made
        if name not in reached and "orphan: true" not in str(made[name])[:60]
    }
    downloads = {f"downloads/{path.name}" for path in ROOT.glob("notebooks/*.ipynb")}
    names = ("figure_3", "learning_rate_decay", "where_to_spend_bits", "when_to_switch")
    figures = {f"data/results/{name}.png" for name in names}
    assert alone == {*figures, *downloads}
    documents = [path for pattern in pages.DOCUMENTS for path in ROOT.glob(pattern)]
    assert len(documents) > 30
    assert {path.relative_to(ROOT).as_posix() for path in documents} <= reached


def test_site_page_links_lead_to_pages(made):
    seen = 0
    for name, text in made.items():
        if isinstance(text, str) and "orphan: true" not in text[:60]:
            for match in pages.LINK.finditer(prose(name, text)):
                target = (ROOT / name).parent / match[2]
                assert target.resolve().relative_to(ROOT).as_posix() in made, (
                    f"{name}: {match[2]}"
                )
                seen += 1
    assert seen > 100


def test_site_notebook_page_has_answers_and_download(made):
    answers = 0
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = json.loads(made[f"notebooks/{path.name}"])["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert not [
            output
            for output in outputs
            if pages.PROMPT.search("".join(output.get("text", "")))
        ]
        answers += sum("<summary>Answer" in "".join(cell["source"]) for cell in cells)
        assert made[f"downloads/{path.name}"] == path.read_bytes()
        line = f"`Download this notebook <../downloads/{path.name}>` and [run it](../docs/installing.md#notebooks).\n"
        assert re.match(
            rf"# .*\n\n{{download}}{re.escape(line)}", "".join(cells[0]["source"])
        )
    assert answers > 5
    prompts = [
        {"output_type": "stream", "text": [f"a: {said}\n", *more]}
        for said, more in DEAD.items()
    ]
    (cell,) = pages.without_prompts(
        [{"cell_type": "code", "id": "a", "outputs": prompts}]
    )
    assert cell["outputs"] == [{"output_type": "stream", "text": "kept\n"}]


DEAD = {
    "no prediction yet - put a letter": (),
    "choose first, in the cell": ("kept\n",),
    "not attempted yet": (),
}


def test_relinked_points_file_links_to_pages():
    text = "[a](LICENSE#x) [b](cpt_core/schedules) [c](README.md) [d](https://e.org) `[e](f)`\n```\n[g](h)\n```\n"
    led, reached = pages.relink(ROOT / "README.md", text, [ROOT / "README.md"])
    assert led == text.replace("LICENSE#x", "LICENSE.md#x").replace(
        "cpt_core/schedules", "cpt_core/schedules/index.md"
    )
    assert {path.name for path in reached} == {"LICENSE", "schedules", "README.md"}
    with pytest.raises(
        FileNotFoundError,
        match=r"docs/sweeps\.md links to nowhere\.md, which is not there",
    ):
        pages.relink(ROOT / "docs/sweeps.md", "[a](nowhere.md)", [])


def test_docstring_names_link_to_api_pages():
    conf = pytest.importorskip("book.conf", reason="the extra book")
    lines = [
        "``make_schedule`` gives a ``CyclicSchedule``, ``q_max`` or ``Rex(d=0.5)``.",
        "Paper: section 3.",
    ]
    conf.mark_sources(None, "function", "cpt_core.make_schedule", None, None, lines)
    led = ":py:obj:`CyclicSchedule <cpt_core.CyclicSchedule>`"
    assert lines == [
        f"``make_schedule`` gives a {led}, ``q_max`` or ``Rex(d=0.5)``.",
        "**Paper:** section 3.",
    ]


def test_docstrings_of_public_names_are_valid_rest():
    conf = pytest.importorskip("book.conf", reason="the extra book")
    from docutils.core import publish_doctree
    from sphinx.ext.napoleon import Config, GoogleDocstring

    settings, seen = Config(napoleon_use_ivar=True, napoleon_use_rtype=False), 0
    for name in pages.NAMES:
        value = attrgetter(name)(cpt_core)
        members = vars(value).items() if inspect.isclass(value) else ()
        of = {name: value} | {
            f"{name}.{key}": member for key, member in members if key[0] != "_"
        }
        for place, thing in of.items():
            what = "class" if inspect.isclass(thing) else "function"
            if not (
                inspect.isroutine(thing)
                or isinstance(thing, (type, property, classmethod, staticmethod))
            ):
                continue
            lines = GoogleDocstring(
                inspect.getdoc(thing) or "", settings, what=what
            ).lines()
            conf.mark_sources(None, what, place, thing, None, lines)
            said, text = (
                io.StringIO(),
                re.sub(r":py:obj:`(.*?)`", r"*\1*", "\n".join(lines)),
            )
            publish_doctree(
                text, settings_overrides={"warning_stream": said, "report_level": 2}
            )
            assert not said.getvalue(), f"{place}: {said.getvalue()}\n{text}"
            seen += 1
    assert seen > 100


def test_write_places_every_page(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "pages", lambda: {"a.md": "ü", "b/c.png": b"two"})
    pages.write(tmp_path)
    assert (tmp_path / "a.md").read_text(encoding="utf-8") == "ü"
    assert (tmp_path / "b/c.png").read_bytes() == b"two"


GOOD = '<a href="b/c.html#here">x</a><a href="#top">y</a><p id="top"></p><a href="https://a.org/b">z</a>'


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ('<a href="b/d.html">x</a>', "b/d.html: is not there"),
        ('<a href="b/c.html#there">x</a>', "b/c.html#there: has no such anchor"),
        ('<a href="#down">x</a>', "#down: has no such anchor"),
        ('<a href="../x.html">x</a>', "../x.html: leads out of the site"),
        ('<a href="https:/a.org">x</a>', "https:/a.org: is no address"),
        (
            '<script src="https://a.org/b.js"></script>',
            "https://a.org/b.js: is loaded from the network",
        ),
        (
            '<link rel="stylesheet" href="//a.org/b.css">',
            "//a.org/b.css: is loaded from the network",
        ),
    ],
)
def test_link_checker_names_broken_links(tmp_path, bad, why):
    site = tmp_path / "site"
    (site / "b").mkdir(parents=True)
    (site / "b/c.html").write_text(
        '<p id="here"><img src="data:image/png;base64,AA" alt="a"></p>'
    )
    (site / "index.html").write_text(GOOD)
    assert links.problems(site) == []
    (site / "index.html").write_text(GOOD + bad)
    assert links.problems(site) == [f"index.html: {why}"]


@pytest.mark.slow
def test_sphinx_builds_offline_pages(made, tmp_path):
    """Build a site of three pages, with stored cell outputs and without running cells."""
    pytest.importorskip("sphinx", reason="the extra book")
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "api").mkdir(parents=True)
    (source / "index.md").write_text(
        "# Site\n\n```{toctree}\nlesson\napi/schedules.Rex\n```\n"
    )
    (source / "lesson.ipynb").write_text(json.dumps(WORKBOOK))
    (source / "api/schedules.Rex.md").write_text(made["api/schedules.Rex.md"])
    (source / "downloads").mkdir()
    (source / "downloads/lesson.ipynb").write_text(json.dumps(WORKBOOK))
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        ROOT / "book",
        source,
        site,
    ]
    run_command(*command)
    lesson = (site / "lesson.html").read_text()
    assert lesson.count("<math") == 2
    assert "as committed" in lesson
    images = re.findall(r"<img\b[^>]*_images/[^>]*>", lesson)
    assert [
        unescape(re.search(r'\balt="([^"]*)"', image)[1]) for image in images
    ] == WORDS
    boxes = re.findall(
        r'<div class="picture docutils container">\s*(?:<a [^>]*>)?<img ', lesson
    )
    assert len(boxes) == len(images)
    (handed,) = re.findall(r'href="(_downloads/[^"]*/lesson\.ipynb)"', lesson)
    assert json.loads((site / handed).read_text()) == WORKBOOK
    rex = (site / "api/schedules.Rex.html").read_text()
    assert "<strong>Differs:</strong> d = 0.9" in rex
    line = re.search(r'href="\.\./cpt_core/schedules/profiles\.py\.html#L-(\d+)"', rex)
    lines = (ROOT / "cpt_core/schedules/profiles.py").read_text().splitlines()
    assert "class Rex" in "".join(lines[int(line[1]) - 1 : int(line[1]) + 1])
    assert [p for p in links.problems(site) if "cpt_core/" not in p] == []
