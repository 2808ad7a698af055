"""Exported notebooks: formulas as MathML, no network access, no widgets, described images."""

import base64
import io
import re
from functools import cache
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
from cpt_lab.analysis import quality_cost
from cpt_lab.analysis.run_table import committed
from cpt_lab.analysis.style import name_points, subplots
from cpt_lab.paths import notebooks_dir
from cpt_lessons.export import glossary_page, notebook_page
from cpt_lessons.notebooks import notebooks
from cpt_lessons.predictions import PREDICTIONS

FORMULA = re.compile(r"\$\$.+?\$\$|(?<!\\)\$[^$\n]+?\$", re.DOTALL)


def text_of(page):
    """Return the text of a page without code, styles and images."""
    body = page[page.index("<main>") :]
    return re.sub(
        r"<(pre|style|annotation)\b.*?</\1>|<img[^>]*>", "", body, flags=re.DOTALL
    )


@cache
def page_of(path):
    return notebook_page(nbformat.read(path, as_version=4), path.stem)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_exported_notebook_renders_formulas_offline(path):
    book = nbformat.read(path, as_version=4)
    written = [
        m
        for cell in book.cells
        if cell.cell_type == "markdown"
        for m in FORMULA.findall(cell.source)
    ]
    page = page_of(path)
    assert len(re.findall("<math[ >]", page)) == len(written)
    assert len(re.findall('<math[^>]*display="block"', page)) == sum(
        formula.startswith("$$") for formula in written
    )
    assert not re.search(r"\$|\\[a-zA-Z]{2,}|merror", text_of(page))
    assert "<script" not in page
    # a link of the text fetches nothing by itself
    leads = re.compile(
        r'<a href="(https://arxiv\.org/abs/[\d.]+|glossary\.html(#[\w-]+)?)"'
    )
    assert not re.search(
        r"""(?:src|href)=["'](?!data:|#)[^"']*:|@import|url\((?!["']?data:)""",
        leads.sub("<a", page),
    )
    assert set(re.findall(r'href="([^#"][^"]*)"', leads.sub("<a", page))) <= {
        f"{p.stem}.html" for p in notebooks()
    }
    assert f"<title>{path.stem}</title>" in page
    for question in re.findall(
        r'exercises\.reveal\("([^"]+)"', "\n".join(cell.source for cell in book.cells)
    ):
        assert page.count(escape(PREDICTIONS[question][1], quote=False)) == 1


def test_exported_notebook_hides_installation_cell():
    book = new_notebook(
        cells=[
            new_code_cell("install()", metadata={"tags": ["remove-cell"]}),
            new_code_cell("show()"),
        ]
    )
    page = notebook_page(book)
    assert ">install<" not in page
    assert ">show<" in page
    assert len(book.cells) == 2
    assert not any("find_spec" in page_of(path) for path in notebooks())


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_exported_notebook_images_have_descriptions(path):
    book = nbformat.read(path, as_version=4)
    kinds = [
        k
        for cell in book.cells
        for output in cell.get("outputs", [])
        for k in output.get("data", {})
    ]
    images = re.findall(r"<img\b[^>]*>", page_of(path))
    alts = [m[1] for image in images if (m := re.search(r'\balt="([^"]{15,})"', image))]
    assert len(alts) == len(images) == kinds.count("image/png")
    assert not [alt for alt in alts if alt.startswith("No description")]


def displayed(figure):
    """Return the data and metadata with which a figure-aware kernel shows a cell value."""
    shell = InteractiveShell.instance()
    try:
        select_figure_formats(shell, {"png"})
        with capture_output() as captured:
            assert shell.display_formatter.format(figure) == ({}, {})
    finally:
        InteractiveShell.clear_instance()
    (shown,) = captured.outputs
    return shown.data, shown.metadata


def test_figure_output_is_sharp_and_described():
    with subplots(figsize=(2, 1)) as (figure, ((ax,),)):
        ax.plot([0, 1], label='"so"')
        ax.set(xlabel="step", ylabel="loss < 1")
        figure.suptitle(r"own (a\$b)")
    data, metadata = displayed(figure)
    said = 'own (a$b). loss < 1 against step. "so"'
    numbers = "1: 1 part, 2 points; x 0..1, mean 0.5; y 0..1, mean 0.5; xy mean 0.5"
    picture, shown = (
        Image.open(io.BytesIO(base64.b64decode(data["image/png"]))),
        metadata["image/png"],
    )
    assert shown["alt"] == figure.description() == said
    assert (shown["width"], shown["height"]) == (
        picture.width // 2,
        picture.height // 2,
    )
    assert data["text/plain"] == f"<Figure: {said}>\n{numbers}"
    outputs = [
        new_output("display_data", data, metadata=metadata),
        new_output("display_data", data),
    ]
    page = notebook_page(
        new_notebook(
            cells=[new_markdown_cell("# A"), new_code_cell("1", outputs=outputs)]
        )
    )
    first, second = re.findall(r"<img\b[^>]*>", page)
    assert unescape(re.search(r"""alt=(['"])(.*?)\1""", first)[2]) == said
    assert f'width="{picture.width // 2}"' in first
    assert (
        'alt="figure under the heading A"' in second
    )  # a picture that has no words of its own
    assert (
        "metadata" not in outputs[1] or outputs[1].metadata == {}
    )  # the page is a copy


def test_figure_description_can_be_given():
    with subplots(alt="a line\nthat rises") as (figure, ((ax,),)):
        ax.set_title("not this")
    assert figure.description() == "a line that rises"


def drawn(*given, **options):
    """Return the description of the data of a one-line figure."""
    with subplots() as (figure, ((ax,),)):
        ax.plot(*given, **options)
    return describe_data(figure)


@pytest.mark.slow
def test_figure_data_follows_changed_row_value():
    runs = committed("image_digits").query("model == 'mlp6' and q_min == 3")
    said = describe_data(quality_cost.figure_3(runs))
    one = runs.index[len(runs) // 2]
    changed = runs.copy()
    changed.loc[one, "accuracy"] += 0.002
    assert (
        describe_data(quality_cost.figure_3(runs.sample(frac=1, random_state=0)))
        == said
    )
    assert describe_data(quality_cost.figure_3(changed)) != said


def test_figure_data_follows_swapped_values():
    assert drawn([1, 2, 3], [4, 5, 7]) != drawn([1, 2, 3], [5, 4, 7])
    assert drawn([1, 2, 3], [4, 5, 7]) == drawn([2, 1, 3], [5, 4, 7])


def test_figure_data_ignores_last_digits():
    edges = (12.34565, -1e-13), (123456.5, 1e-13)  # of rounding
    pairs = [
        ([0.1 + 0.2, 1], [0.3, 1]),
        *(([1, x], [1, x * (1 + error)]) for x, error in edges),
    ]
    for here, there in [*pairs, ([-1, 1e-16, 1], [-1, -2e-17, 1])]:
        assert drawn(here) == drawn(there)
        assert "e-" not in drawn(here)[0]


def test_figure_data_covers_all_artist_kinds():
    with subplots(1, 3) as (figure, ((bars, errors, picture),)):
        bars.bar([1, 2], [3, 5], width=1)
        bars.axhline(9)
        errors.errorbar([1, 2], [10, float("nan")], yerr=[2, 1], fmt="none")
        errors.scatter([4], [11])
        errors.axvspan(0, 7)
        picture.imshow([[0, 1], [2, 5]])
    first, second, third = describe_data(figure)
    assert first.startswith(
        "1: 3 parts, 12 points; x 0.5..2.5, mean 1.4; y 0..9, mean "
    )
    assert second.startswith("2: 3 parts, 8 points; x 0..7, mean ")
    assert "; y 8..12, mean 10.3333; xy mean " in second
    assert third == "3: picture 0..5, mean 2"
    with subplots() as (empty, _):
        pass
    assert describe_data(empty) == []


def test_figure_data_ignores_point_labels():
    with subplots() as (figure, ((ax,),)):
        ax.plot([1, 1.001, 1.002], [1, 1.001, 1], "o")
        said = describe_data(figure)
        name_points(
            ax, ["one", "two", "three"], [1, 1.001, 1.002], [1, 1.001, 1], ["black"] * 3
        )
        assert len(ax.lines) > 1  # which join the names to the points
    assert describe_data(figure) == said


def test_glossary_page_has_linked_anchors():
    found = [
        f for p in notebooks() for f in FORMULA.findall(p.read_text(encoding="utf-8"))
    ]
    assert len(found) > 50
    assert {f.startswith("$$") for f in found} == {True, False}
    text = (notebooks_dir() / "glossary.md").read_text(encoding="utf-8")
    page = glossary_page(text)
    anchors = re.findall(r'<h\d id="([^"]*)"', page)
    assert len(anchors) == len(re.findall("^##? ", text, flags=re.M)) > 20
    assert {"bitops", "fp-agg-and-q-agg", "noise-exposure"} <= set(anchors)
    assert set(re.findall(r'href="#([^"]*)"', page)) == set(anchors)
    books = notebook_page(
        new_notebook(
            cells=[new_markdown_cell("[BitOps](glossary.md#bitops) [b](glossary.mdx)")]
        )
    )
    assert '<a href="glossary.html#bitops">BitOps</a>' in books


def test_exported_formula_keeps_its_parts():
    book = new_notebook(
        cells=[
            new_markdown_cell(
                r"With $q_{\min} < \frac{1}{2}$, `$HOME` and 5 \$." "\n\n$$x^2$$"
            )
        ]
    )
    page = notebook_page(book)
    assert re.search(
        r"<msub><mi>q</mi>.*min.*</msub>.*<mfrac>.*<mn>1</mn>.*<mn>2</mn>.*</mfrac></mrow></math>",
        page,
    )
    assert re.search(
        r'display="block"[^>]*><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>',
        page,
    )
    assert "<code>$HOME</code>" in page
    assert "5 $." in page


def test_exported_pages_exclude_widgets_and_progress_bars():
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/plain": ["runs:   0%|  | 0/85"],
    }
    outputs = [new_output("display_data", view), new_output("stream", text="12 runs\n")]
    book = new_notebook(
        cells=[new_code_cell("1", outputs=outputs)], metadata={"widgets": {"state": {}}}
    )
    page = notebook_page(book)
    assert "0/85" not in page
    assert "12 runs" in page
    assert len(book.cells[0].outputs) == 2  # the page is a copy
    assert [o.output_type for o in clean(book).cells[0].outputs] == ["stream"]
    assert "widgets" not in book.metadata


def test_exported_page_note_is_escaped():
    assert "ValueError: &lt;b&gt; is wrong" in notebook_page(
        new_notebook(), "x", "ValueError: <b> is wrong"
    )
