"""Links of notebooks: glossary words at their first use, and the paper."""

import re
from functools import cache

import pytest
from notebook_dataflow import read

WORDS = ("BitOps", "arm", "band", "noise exposure", "ledger", "rank correlation")
PAPER = "](https://arxiv.org/abs/2403.02243)"
HIDDEN = (
    r"^ *```.*?^ *```",  # code
    r"`[^`\n]*`",
    r"\$\$.+?\$\$",  # formulas
    r"(?<!\\)\$[^$\n]+?\$",
    r"<summary>.*?</summary>",  # the heading of what is folded
    r"^#+ [^\n]*$",  # headings
    r"^\|[^\n]*$",  # tables
)


def prose(text):
    """Return the text of a notebook without code, formulas, headings and tables."""
    return re.sub("|".join(HIDDEN), " ", text, flags=re.S | re.M)


@cache
def said(path):
    return prose(
        "\n\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    )


def unlinked(text, word):
    """Return the line of the first use of a word without a glossary link, else ""."""
    first = re.search(rf"\b{word}s?\b", text, flags=re.I)
    if not first:
        return ""
    target = f"glossary.md#{word.lower().replace(' ', '-')}"
    for link in re.finditer(r"\[[^\]]*\]\(([^)]*)\)", text):
        if link.start() < first.start() < link.end() and link[1] == target:
            return ""
    return text[text.rfind("\n", 0, first.start()) + 1 :].splitlines()[0]


@pytest.mark.parametrize("word", WORDS)
def test_glossary_word_links_at_first_use(path, word):
    assert unlinked(said(path), word) == ""


def test_notebook_links_paper(path):
    assert PAPER in said(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("One [arm](glossary.md#arm) and an arm.", ""),
        ("All [**arms**](glossary.md#arm) here.", ""),
        ("Harm, alarms and the armed.", ""),
        ("# Arms\n\n| arm |\n\n`arm` $arm$ [arm](glossary.md#arm)", ""),
        (
            "First.\nAn arm, then an [arm](glossary.md#arm).\nLast.",
            "An arm, then an [arm](glossary.md#arm).",
        ),
        ("An [arm](glossary.md#band).", "An [arm](glossary.md#band)."),
        ("An [arm](02_more.ipynb).", "An [arm](02_more.ipynb)."),
    ],
)
def test_unlinked_finds_first_use(text, line):
    assert unlinked(prose(text), "arm") == line
