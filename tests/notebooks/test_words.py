"""The first use of a word of the glossary leads there, the first page of the paper to the paper, the last line on."""

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
    """The text of a notebook without code, formulas, headings and tables."""
    return re.sub("|".join(HIDDEN), " ", text, flags=re.S | re.M)


@cache
def said(path):
    return prose(
        "\n\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")
    )


def unlinked(text, word):
    """The line in which a word is used first, if it does not lead to the glossary there; else ""."""
    first = re.search(rf"\b{word}s?\b", text, flags=re.I)
    if not first:
        return ""
    target = f"glossary.md#{word.lower().replace(' ', '-')}"
    for link in re.finditer(r"\[[^\]]*\]\(([^)]*)\)", text):
        if link.start() < first.start() < link.end() and link[1] == target:
            return ""
    return text[text.rfind("\n", 0, first.start()) + 1 :].splitlines()[0]


@pytest.mark.parametrize("word", WORDS)
def test_the_first_use_of_a_word_leads_to_the_glossary(path, word):
    assert unlinked(said(path), word) == ""


def test_the_paper_leads_to_itself(path):
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
def test_what_counts_as_a_first_use(text, line):
    assert unlinked(prose(text), "arm") == line
