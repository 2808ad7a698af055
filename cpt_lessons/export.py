"""An executed notebook as one HTML page that needs nothing from the network. Needs the extra "notebooks"."""

import re
from html import escape
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from cpt_lessons.predictions import with_answers

# nbconvert's page without the scripts that it would fetch: MathJax, RequireJS, Mermaid; pictures say what they show.
ALT = """{% block data_png scoped %}{% set alt = output | get_metadata("alt", "image/png") | escape_html %}
{{ super() | replace("<img ", '<img alt="' ~ alt ~ '" ', 1) }}{% endblock %}"""
TEMPLATE = (
    "{% extends 'lab/index.html.j2' %}"
    + ALT
    + "".join(
        f"{{% block {name} %}}{{% endblock %}}"
        for name in (
            "html_head_js",
            "html_head_js_mathjax",
            "html_head_js_mermaidjs",
            "jupyter_widgets",
        )
    )
)


class _Renderer(IPythonRenderer):
    """Formulas as MathML, which browsers show by themselves; links that lead somewhere from where the page is."""

    def inline_math(self, body: str) -> str:
        return convert(body)

    def block_math(self, body: str) -> str:
        return convert(body, display="block")

    def latex_environment(self, name: str, body: str) -> str:
        return convert(f"\\begin{{{name}}}{body}\\end{{{name}}}", display="block")

    def link(self, text: str, url: str, title: str | None = None) -> str:
        """Link to the page of a notebook or the glossary; write other files as plain text."""
        if url.startswith(("../", "solutions/")):
            return text
        return super().link(
            text,
            re.sub(r"^(\d\d_\w+|glossary)\.(?:ipynb|md)\b", r"\1.html", url),
            title,
        )


class _Exporter(HTMLExporter):
    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        return MarkdownWithMath(
            renderer=_Renderer(escape=False, anchor_link_text="¶")
        ).render(source)


def notebook_page(
    book: nbformat.NotebookNode, title: str = "notebook", note: str = ""
) -> str:
    """Return an executed notebook, which stays as it is, as one HTML page, with a note as a line of text above it all.

    Cells with the tag "remove-cell" are left out.
    """
    book = _described(without_widgets(nbformat.from_dict(book)))
    visible_cells = [
        cell
        for cell in book.cells
        if "remove-cell" not in cell.metadata.get("tags", [])
    ]
    book.cells = [nbformat.from_dict(cell) for cell in with_answers(visible_cells)]
    if note:
        book.cells.insert(
            0, nbformat.v4.new_markdown_cell(f"> {escape(note, quote=False)}")
        )
    text, _ = _Exporter(raw_template=TEMPLATE).from_notebook_node(
        book, {"metadata": {"name": title}}
    )
    return text


def glossary_page(text: str) -> str:
    """Return the glossary as an HTML page that the pages of notebooks link to."""
    page = notebook_page(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)]),
        "glossary",
    )
    return re.sub(
        r'(<h\d id="|href="#)([^"]*)"', lambda m: f'{m[1]}{m[2].lower()}"', page
    )


def _described(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Give every picture a description: its own, else the heading that it stands under."""
    heading = "this notebook"
    for cell in book.cells:
        if cell.cell_type == "markdown":
            heading = (
                re.findall(r"^#+ +(.*)$", cell.source, flags=re.MULTILINE) or [heading]
            )[-1]
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                if kind.startswith("image/"):
                    output.metadata.setdefault(kind, {}).setdefault(
                        "alt", f"figure under the heading {heading}"
                    )
    return book


def without_widgets(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove widgets, which need a kernel, from a notebook."""
    view = "application/vnd.jupyter.widget-view+json"
    for cell in book.cells:
        if "outputs" in cell:
            cell.outputs = [
                output for output in cell.outputs if view not in output.get("data", {})
            ]
    book.metadata.pop("widgets", None)
    return book
