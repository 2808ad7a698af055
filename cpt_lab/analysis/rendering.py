"""Tables and pages for people: a table is made once and shown on a terminal, in Markdown or in HTML.

>>> print(terminal(pd.DataFrame({"arm": ["CR", "static 8"], "cost": ["0.63", "1.00"]})))
arm       cost
CR        0.63
static 8  1.00
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from cpt_core.schedules.profiles import SUITE
from cpt_extras.figures import picture
from cpt_lab.paths import notebooks_dir


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str  # its heading
    notes: tuple[str, ...] = ()  # paragraphs; words between backticks are set as code
    # stands in the page itself, no other file is needed; or the address of a picture
    figure: Figure | str | None = None
    alt: str = ""  # what the figure shows, in words
    # a cell that is a list is folded up behind its length; one that is a dict of page, name, failed and error is a
    # link, and one to the page of what went wrong
    table: pd.DataFrame | None = None
    # classes of the table: "left" aligns everything left, "folded" folds it up behind its number of lines
    style: str = ""
    points: tuple[tuple[str, str], ...] = ()  # a list of (text, place)


class NotebookTable:
    """A table that a notebook shows with wrapped, left-aligned cells; its text form is Markdown.

    Args:
        frame: the table.
        caption: a sentence above it.
    """

    def __init__(self, frame: pd.DataFrame, caption: str = "") -> None:
        self.frame = frame
        self.caption = caption

    def __repr__(self) -> str:
        return "\n\n".join(filter(None, (self.caption, markdown(self.frame))))

    def html(self) -> str:
        """Return the table as HTML that needs no style sheet."""
        style = "text-align: left; vertical-align: top; white-space: normal"
        head = "".join(
            f'<th style="{style}">{escape(str(name))}</th>'
            for name in self.frame.columns
        )
        lines = []
        for line in self.frame.itertuples(index=False, name=None):
            cells = "".join(
                f'<td style="{style}">{_code(escape(str(cell)))}</td>' for cell in line
            )
            lines.append(f"<tr>{cells}</tr>")
        caption = f"<p>{escape(self.caption)}</p>" if self.caption else ""
        return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"text/html": self.html(), "text/plain": repr(self)}, raw=True)


def _code(text: str) -> str:
    """Return text with the words between backticks set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def terminal(frame: pd.DataFrame) -> str:
    """Return a table as text, its first column aligned left and the others right."""
    lines = [
        list(map(str, line))
        for line in (frame.columns, *frame.itertuples(index=False, name=None))
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [
            w.rjust(n) if i else w.ljust(n)
            for i, (w, n) in enumerate(zip(x, widths, strict=True))
        ]
        for x in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def markdown(frame: pd.DataFrame) -> str:
    """Return a table in Markdown."""
    lines = [
        frame.columns,
        ["---"] * len(frame.columns),
        *frame.itertuples(index=False, name=None),
    ]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def render(
    template: str, folder: Path = Path(__file__).parent, /, **values: Any
) -> str:
    """Fill in one of the templates of a folder, that of this file unless given; what goes into HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    used: dict[str, str] = {}  # of the glossary, what the page uses
    marked = partial(_marked, glossary=glossary(), used=used)
    environment.filters |= {
        "marked": marked,
        "contents": contents,
        "picture": _picture,
        "markdown": markdown,
    }
    return environment.get_template(template).render(values, used=used)


# "Equal cost: mlp6 on digits, 600 steps, 4 cycles, q_min 3, q_max 8, demo scale": what is shown, of what, trained how
_EXPERIMENT = re.compile(
    r"(?:(?P<part>[^:,]+): )?(?P<name>.+?), (?P<how>(?:[\d,]+ steps, )?(?:\d+ cycles?, )?q_min .+)"
)


def contents(
    sections: Sequence[Section],
) -> list[tuple[str, list[tuple[str, list[tuple[int, str]]]]]]:
    """Return what a page holds, experiments together that show the same of the same.

    Returns:
        (part, entries) each; an entry is (name, links), a link (number of the section from 1, words). Sections that are
        no experiments are a part without a name, with one entry. What all experiments share at their ends is left out.
    """
    found = [_EXPERIMENT.fullmatch(section.title) for section in sections]
    ends = {f", {m['how'].rpartition(', ')[2]}" for m in found if m}
    shared = ends.pop() if len(ends) == 1 else ""
    parts: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for number, (section, m) in enumerate(zip(sections, found, strict=True), 1):
        part, name = (
            (m["part"] or "Quality against cost", m["name"])
            if m
            else (section.title, "")
        )
        how = m["how"].removesuffix(shared) if m else section.title
        parts.setdefault(part, {}).setdefault(name, []).append((number, how))
    shown = []
    for part, names in parts.items():
        # one training alone needs no settings to be told apart
        entries = [
            (name, at) if not name or len(at) > 1 else ("", [(at[0][0], name)])
            for name, at in names.items()
        ]
        shown.append((part if any(names) else "", entries))
    return shown


def plain(text: str) -> str:
    """Return Markdown as words: without links, emphasis and the signs of formulas."""
    text = re.sub(
        r"\[([^]]+)\]\([^)]+\)", r"\1", text.replace(r"\cdot", "x").replace(r"\,", " ")
    )
    return re.sub(r"\\mathrm|[${}*\\`]", "", text)


def glossary() -> dict[str, str]:
    """Return what the notebooks' glossary says of every word, in plain text."""
    text = (notebooks_dir() / "glossary.md").read_text(encoding="utf-8")
    text = plain(re.sub(r" (Notebook|Lesson)\s\[\d.*", "", text))
    return {
        name: " ".join(said.split())
        for name, said in re.findall(r"^## (.+)\n\n((?:.+\n)+)", text, re.M)
    }


def _marked(escaped: str, glossary: dict[str, str], used: dict[str, str]) -> str:
    """Set words between backticks as code; where a word of the glossary stands first, it leads to what that says."""
    names = {
        word: name
        for name in glossary
        for of in name.split(" and ")
        for word in (of, of.capitalize())
    }
    names |= {
        arm: name for name in glossary if name == "names of schedules" for arm in SUITE
    }

    def mark(found: re.Match[str]) -> str:
        if found["code"]:
            return f"<code>{found['code']}</code>"
        if (name := names[found["word"]]) in used:
            return found[0]
        used[name] = glossary[name]
        return f'<a class="word" href="#word-{len(used)}">{found[0]}</a>'

    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"``?(?P<code>[^`]+)``?|\b(?P<word>{words})s?\b", mark, str(escaped))


def _picture(figure: Figure | str) -> dict[str, Any]:
    """Return a figure as the address of an image that needs no other file, and the width at which it is shown."""
    if isinstance(figure, str):
        return {"src": figure, "width": 480}
    png, width, _ = picture(figure)
    return {
        "src": f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "width": width,
    }
