"""Tables and pages: one table for a terminal, for Markdown and for HTML.

``Section`` is a part of a page; ``render`` fills a template with sections, links the words of the glossary and embeds
the figures.

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
    # a figure is embedded in the page; a string is the address of a picture
    figure: Figure | str | None = None
    alt: str = ""  # the figure in words
    # a cell that is a list is folded up behind its length; a cell that is a dict of page, name, failed and error is a
    # link to a page, with a second link to the page of a failure
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
    """Return a table as text, its first column aligned left and all others right."""
    rows = [list(map(str, frame.columns))]
    for line in frame.itertuples(index=False, name=None):
        rows.append(list(map(str, line)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if cells:
            cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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
    """Return a filled template; values in HTML are escaped.

    Args:
        template: name of the template file.
        folder: folder of the template, by default the one of this module.
        values: variables of the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=_is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    used_terms: dict[str, str] = {}  # entries of the glossary that the page uses
    mark_terms = partial(_mark_terms, glossary=glossary(), used=used_terms)
    environment.filters |= {
        "marked": mark_terms,
        "contents": contents,
        "picture": _picture,
        "markdown": markdown,
    }
    return environment.get_template(template).render(values, used=used_terms)


def _is_html(name: str | None) -> bool:
    return name is not None and name.endswith(".html.j2")


# Title of an experiment, (part: )name, settings:
# "Equal cost: mlp6 on digits, 600 steps, 4 cycles, q_min 3, q_max 8, demo scale"
_EXPERIMENT = re.compile(
    r"(?:(?P<part>[^:,]+): )?(?P<name>.+?), (?P<how>(?:[\d,]+ steps, )?(?:\d+ cycles?, )?q_min .+)"
)


def contents(
    sections: Sequence[Section],
) -> list[tuple[str, list[tuple[str, list[tuple[int, str]]]]]]:
    """Return the table of contents of a page, with experiments of the same part and name grouped.

    Returns:
        (part, entries) each; an entry is (name, links), a link (number of the section from 1, text). Sections that are
        not experiments are a part without a name, with one entry. Settings that all experiments share at the end of
        their titles are left out.
    """
    matches = [_EXPERIMENT.fullmatch(section.title) for section in sections]
    ends = {f", {m['how'].rpartition(', ')[2]}" for m in matches if m}
    shared = ends.pop() if len(ends) == 1 else ""
    parts: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for number, (section, m) in enumerate(zip(sections, matches, strict=True), 1):
        part, name = (
            (m["part"] or "Quality against cost", m["name"])
            if m
            else (section.title, "")
        )
        how = m["how"].removesuffix(shared) if m else section.title
        parts.setdefault(part, {}).setdefault(name, []).append((number, how))
    page_parts = []
    for part, names in parts.items():
        # one training alone needs no settings to be told apart
        entries = [
            (name, links) if not name or len(links) > 1 else ("", [(links[0][0], name)])
            for name, links in names.items()
        ]
        page_parts.append((part if any(names) else "", entries))
    return page_parts


def plain(text: str) -> str:
    """Return Markdown as plain text, without links, emphasis and the signs of formulas."""
    text = re.sub(
        r"\[([^]]+)\]\([^)]+\)", r"\1", text.replace(r"\cdot", "x").replace(r"\,", " ")
    )
    return re.sub(r"\\mathrm|[${}*\\`]", "", text)


def glossary() -> dict[str, str]:
    """Return the entries of the notebooks' glossary in plain text, by term."""
    text = (notebooks_dir() / "glossary.md").read_text(encoding="utf-8")
    text = plain(re.sub(r" (Notebook|Lesson)\s\[\d.*", "", text))
    return {
        name: " ".join(definition.split())
        for name, definition in re.findall(r"^## (.+)\n\n((?:.+\n)+)", text, re.M)
    }


def _mark_terms(escaped: str, glossary: dict[str, str], used: dict[str, str]) -> str:
    """Set words between backticks as code, and link the first use of every glossary term to its entry."""
    names = {
        word: name
        for name in glossary
        for term in name.split(" and ")
        for word in (term, term.capitalize())
    }
    names |= {
        arm: name for name in glossary if name == "names of schedules" for arm in SUITE
    }

    def mark(match: re.Match[str]) -> str:
        if match["code"]:
            return f"<code>{match['code']}</code>"
        name = names[match["word"]]
        if name in used:
            return match[0]
        used[name] = glossary[name]
        return f'<a class="word" href="#word-{len(used)}">{match[0]}</a>'

    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"``?(?P<code>[^`]+)``?|\b(?P<word>{words})s?\b", mark, str(escaped))


def _picture(figure: Figure | str) -> dict[str, Any]:
    """Return the address of an image, embedded as data for a figure, and the width at which it is shown."""
    if isinstance(figure, str):
        return {"src": figure, "width": 480}
    png, width, _ = picture(figure)
    return {
        "src": f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "width": width,
    }
