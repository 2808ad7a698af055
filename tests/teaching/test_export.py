"""Exported notebooks: formulas as MathML, no network access, no widgets, described images; data of figures."""

import base64
import io
import re
from html import escape, unescape

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import select_figure_formats
from IPython.utils.capture import capture_output
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from book.notebooks import clean
from cpt_extras.figures import describe_data
from cpt_lab.analysis.style import name_points, subplots
from cpt_lab.paths import notebooks_dir
from cpt_lessons.export import glossary_page, notebook_page
from cpt_lessons.notebooks import notebooks
from cpt_lessons.predictions import PREDICTIONS

FORMULA = re.compile(r"\$\$.+?\$\$|(?<!\\)\$[^$\n]+?\$", re.DOTALL)
# links of the text, which fetch nothing by themselves
TEXT_LINK = re.compile(
    r'<a href="(https://arxiv\.org/abs/[\d.]+|glossary\.html(#[\w-]+)?)"'
)
FETCHED = r"""(?:src|href)=["'](?!data:|#)[^"']*:|@import|url\((?!["']?data:)"""


def text_of(page):
    """Return the text of a page without code, styles and images."""
    left_out = r"<(pre|style|annotation)\b.*?</\1>|<img[^>]*>"
    return re.sub(left_out, "", page[page.index("<main>") :], flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_exported_notebook_is_self_contained(path):
    """Render formulas, answers and described images without network access or installation cells."""
    book = nbformat.read(path, as_version=4)
    page = notebook_page(book, path.stem)
    texts = [cell.source for cell in book.cells if cell.cell_type == "markdown"]
    formulas = FORMULA.findall("\n\n".join(texts))
    num_displayed = sum(formula.startswith("$$") for formula in formulas)
    assert len(re.findall("<math[ >]", page)) == len(formulas)
    assert len(re.findall('<math[^>]*display="block"', page)) == num_displayed
    assert not re.search(r"\$|\\[a-zA-Z]{2,}|merror", text_of(page))

    assert "<script" not in page
    assert "find_spec" not in page
    assert f"<title>{path.stem}</title>" in page
    without_links = TEXT_LINK.sub("<a", page)
    assert not re.search(FETCHED, without_links)
    links = set(re.findall(r'href="([^#"][^"]*)"', without_links))
    assert links <= {f"{p.stem}.html" for p in notebooks()}
    sources = "\n".join(cell.source for cell in book.cells)
    for question in re.findall(r'exercises\.reveal\("([^"]+)"', sources):
        assert page.count(escape(PREDICTIONS[question][1], quote=False)) == 1

    outputs = [o for cell in book.cells for o in cell.get("outputs", [])]
    num_images = sum("image/png" in output.get("data", {}) for output in outputs)
    images = re.findall(r"<img\b[^>]*>", page)
    assert len(images) == num_images
    for image in images:
        assert re.search(r'\balt="(?!No description)[^"]{15,}"', image)


def page_of(*cells, **metadata):
    return notebook_page(new_notebook(cells=list(cells), metadata=metadata))


def test_exported_formula_keeps_its_parts():
    text = r"With $q_{\min} < \frac{1}{2}$, `$HOME` and 5 \$." "\n\n$$x^2$$"
    page = page_of(new_markdown_cell(text))
    fraction = r"<mfrac>.*<mn>1</mn>.*<mn>2</mn>.*</mfrac></mrow></math>"
    assert re.search(rf"<msub><mi>q</mi>.*min.*</msub>.*{fraction}", page)
    power = r"<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>"
    assert re.search(rf'display="block"[^>]*>{power}', page)
    assert "<code>$HOME</code>" in page
    assert "5 $." in page


def test_exported_pages_exclude_widgets_and_progress_bars():
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/plain": ["runs:   0%|  | 0/85"],
    }
    outputs = [new_output("display_data", view), new_output("stream", text="12 runs\n")]
    cells = [new_code_cell("1", outputs=outputs)]
    book = new_notebook(cells=cells, metadata={"widgets": {"state": {}}})
    page = notebook_page(book)
    assert "0/85" not in page
    assert "12 runs" in page
    assert len(book.cells[0].outputs) == 2  # the page is a copy
    assert [o.output_type for o in clean(book).cells[0].outputs] == ["stream"]
    assert "widgets" not in book.metadata


def test_glossary_page_has_linked_anchors():
    text = (notebooks_dir() / "glossary.md").read_text(encoding="utf-8")
    page = glossary_page(text)
    anchors = re.findall(r'<h\d id="([^"]*)"', page)
    assert len(anchors) == len(re.findall("^##? ", text, flags=re.M)) > 20
    assert {"bitops", "fp-agg-and-q-agg", "noise-exposure"} <= set(anchors)
    assert set(re.findall(r'href="#([^"]*)"', page)) == set(anchors)
    links = new_markdown_cell("[BitOps](glossary.md#bitops) [b](glossary.mdx)")
    assert '<a href="glossary.html#bitops">BitOps</a>' in page_of(links)


# --- figures ----------------------------------------------------------------------------------------------------------


def displayed(figure):
    """Return the data and metadata with which a figure-aware kernel shows a cell value."""
    shell = InteractiveShell.instance()
    try:
        select_figure_formats(shell, {"png"})
        with capture_output() as captured:
            assert shell.display_formatter.format(figure) == ({}, {})
    finally:
        InteractiveShell.clear_instance()
    (output,) = captured.outputs
    return output.data, output.metadata


def test_figure_output_is_sharp_and_described():
    with subplots(figsize=(2, 1)) as (figure, ((ax,),)):
        ax.plot([0, 1], label='"so"')
        ax.set(xlabel="step", ylabel="loss < 1")
        figure.suptitle(r"own (a\$b)")
    data, metadata = displayed(figure)
    description = 'own (a$b). loss < 1 against step. "so"'
    numbers = "1: 1 part, 2 points; x 0..1, mean 0.5; y 0..1, mean 0.5; xy mean 0.5"
    size = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).size
    width, height = (pixels // 2 for pixels in size)
    assert metadata["image/png"] == {
        "alt": figure.description(),
        "width": width,
        "height": height,
    }
    assert figure.description() == description
    assert data["text/plain"] == f"<Figure: {description}>\n{numbers}"

    described = new_output("display_data", data, metadata=metadata)
    outputs = [described, new_output("display_data", data)]
    page = page_of(new_markdown_cell("# A"), new_code_cell("1", outputs=outputs))
    first, second = re.findall(r"<img\b[^>]*>", page)
    assert unescape(re.search(r"""alt=(['"])(.*?)\1""", first)[2]) == description
    assert f'width="{width}"' in first
    assert 'alt="figure under the heading A"' in second
    assert outputs[1].metadata == {}  # the page is a copy


def test_figure_description_can_be_given():
    with subplots(alt="a line\nthat rises") as (figure, ((ax,),)):
        ax.set_title("not this")
    assert figure.description() == "a line that rises"


def line_data(*given):
    """Return the description of the data of a one-line figure."""
    with subplots() as (figure, ((ax,),)):
        ax.plot(*given)
    return describe_data(figure)


def test_figure_data_follows_swapped_values():
    assert line_data([1, 2, 3], [4, 5, 7]) != line_data([1, 2, 3], [5, 4, 7])
    assert line_data([1, 2, 3], [4, 5, 7]) == line_data([2, 1, 3], [5, 4, 7])


@pytest.mark.parametrize(
    ("values", "same_values"),
    [
        ([0.1 + 0.2, 1], [0.3, 1]),
        ([1, 12.34565], [1, 12.34565 * (1 - 1e-13)]),  # edges of rounding
        ([1, 123456.5], [1, 123456.5 * (1 + 1e-13)]),
        ([-1, 1e-16, 1], [-1, -2e-17, 1]),
    ],
)
def test_figure_data_ignores_last_digits(values, same_values):
    assert line_data(values) == line_data(same_values)
    assert "e-" not in line_data(values)[0]


def test_figure_data_covers_all_artist_kinds():
    with subplots(1, 3) as (figure, ((bars, errors, picture),)):
        bars.bar([1, 2], [3, 5], width=1)
        bars.axhline(9)
        errors.errorbar([1, 2], [10, float("nan")], yerr=[2, 1], fmt="none")
        errors.scatter([4], [11])
        errors.axvspan(0, 7)
        picture.imshow([[0, 1], [2, 5]])
    first, second, third = describe_data(figure)
    beginning = "1: 3 parts, 12 points; x 0.5..2.5, mean 1.4; y 0..9, mean "
    assert first.startswith(beginning)
    assert second.startswith("2: 3 parts, 8 points; x 0..7, mean ")
    assert "; y 8..12, mean 10.3333; xy mean " in second
    assert third == "3: picture 0..5, mean 2"
    with subplots() as (empty, _):
        pass
    assert describe_data(empty) == []


def test_figure_data_ignores_point_labels():
    x, y = [1, 1.001, 1.002], [1, 1.001, 1]
    with subplots() as (figure, ((ax,),)):
        ax.plot(x, y, "o")
        data = describe_data(figure)
        name_points(ax, ["one", "two", "three"], x, y, ["black"] * 3)
        assert len(ax.lines) > 1  # which join the names to the points
    assert describe_data(figure) == data
