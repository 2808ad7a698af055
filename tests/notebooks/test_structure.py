"""Structure of notebooks beyond nbval: outputs, parameters, imports, sections and links."""

import ast
import json
import re
import sys

import nbformat
import papermill
import pytest
from notebook_dataflow import (
    COURSE,
    FOLDER,
    MACHINE_DEPENDENT,
    NOTEBOOKS,
    PAPER,
    PREDICTING,
    ROWS,
    code_cells,
    dependent_cells,
    pictures,
    read,
)

from cpt_lab.experiments.registry import task_of_dataset
from cpt_lessons.notebooks import parameters_of
from cpt_lessons.parameters import check_parameters

OPENING = re.compile(
    r"# \d\d · [^\n]+\n\n\*\*Study time\*\* \d+ minutes[^\n]*\n\n\*\*Needs\*\* [^\n]+\n\n"
    r"\*\*Outcome\*\* (?:(?!\. )[^\n])+\.(?:\n|$)"  # one sentence
)


PICTURE, TABLE = {"image/png", "text/plain"}, {"text/html", "text/plain"}


@pytest.fixture
def book(path):
    return read(path)


def tagged(book, tag):
    return [c for c in code_cells(book) if tag in c.metadata.get("tags", [])]


def texts(cell):
    return "".join(
        o.get("text", "")
        for o in cell.outputs
        if o.output_type == "stream" and o.name == "stdout"
    )


def test_notebook_runs_without_errors_or_warnings(book):
    assert [c.execution_count for c in code_cells(book)] == list(
        range(1, len(code_cells(book)) + 1)
    )
    assert book.metadata.kernelspec.name == "python3"
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    for cell in code_cells(book):
        assert not [
            o
            for o in cell.outputs
            if o.output_type == "error" or o.get("name") == "stderr"
        ], cell.source


def test_notebook_compared_cells_have_plain_outputs(book):
    cells = tagged(book, "nbval-check-output")
    assert len(cells) >= 3
    for cell in cells:
        shown = [o for o in cell.outputs if o.output_type == "display_data"]
        assert texts(cell).strip() or shown, cell.source
        assert all(
            o.output_type == "stream" and o.name == "stdout"
            for o in cell.outputs
            if o not in shown
        ), cell.source
        assert all(set(o.data) in (PICTURE, TABLE) for o in shown), cell.source


def test_notebook_figures_are_compared_by_numbers(book):
    """Compare figures of stored rows by their numbers, and exclude figures of runs on this machine."""
    ran, rows = dependent_cells(book, MACHINE_DEPENDENT), dependent_cells(book, ROWS)
    for cell in pictures(book):
        tags = {"nbval-check-output", "nbval-ignore-output"} & set(
            cell.metadata.get("tags", [])
        )
        assert len(tags) == 1, (
            f"{cell.id}: a picture is compared, or has the tag nbval-ignore-output"
        )
        if cell.id in ran | rows:
            assert tags == {
                "nbval-ignore-output" if cell.id in ran else "nbval-check-output"
            }, cell.id
        for text in (
            o.data["text/plain"]
            for o in cell.outputs
            if "image/png" in o.get("data", {})
        ):
            assert cell.id not in rows or re.search(
                r"^1: .* mean ", text, flags=re.M
            ), cell.id
            assert cell.id in ran or "not a result" not in text, cell.id


def test_reached_traces_figures_to_runs():
    code = (
        "runs, kept = P.run(specs), committed('x')",
        "runs = P.run(specs)\nkept = committed('x')",
        "draw(runs)",
        "for runs in split(kept):\n    draw(runs)",
        "draw([runs for runs in kept])",
        "with record(model) as seen:\n    model(x)\nprint(1)",
        "draw(seen)",
        "seen = 1",
        "draw(seen)",
        "def step():\n    return runs",
        "step()",
    )
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c, id=str(i)) for i, c in enumerate(code)]
    )
    assert dependent_cells(book, MACHINE_DEPENDENT) == {"0", "2", "6", "9", "10"}
    assert dependent_cells(book, ROWS) == {"0", "1", "3", "4"}


def test_notebook_opens_with_install_cell(book, path):
    cell, first = code_cells(book)[0], code_cells(read(NOTEBOOKS[0]))[0]
    extras = {
        "04": "lessons,vision",
        "06": "lessons,text",
    }  # not "notebooks": where one is open, a kernel runs
    assert cell.source == first.source.replace(
        "[lessons]", f"[{extras.get(path.name[:2], 'lessons')}]"
    )
    assert "install" in cell.metadata.tags
    assert cell.outputs == []
    assert "parameters" in code_cells(book)[1].metadata.tags


def test_notebook_has_one_parameters_cell(book, path):
    """Give parameters as literals that are checked and read."""
    (cell,) = tagged(book, "parameters")
    statements = ast.parse(cell.source).body
    assert all(isinstance(s, ast.Assign | ast.AnnAssign) for s in statements)
    targets = [
        s.target if isinstance(s, ast.AnnAssign) else s.targets[0] for s in statements
    ]
    values = {
        target.id: ast.literal_eval(s.value)
        for target, s in zip(targets, statements, strict=True)
    }
    assert values["scale"] == "smoke"
    check_parameters(task_of_dataset(values.get("dataset", "digits")), **values)
    assert parameters_of(path).keys() == values.keys()
    later = "\n".join(
        c.source for c in code_cells(book)[code_cells(book).index(cell) + 1 :]
    )
    tree = ast.parse(later)
    (call,) = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "check_parameters"
    ]
    assert {k.arg for k in call.keywords} == values.keys()
    read = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "P"
    }
    read |= {"workers", "device"} if "run" in read else set()  # P.run reads it
    whole = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and any(ast.unparse(a) == "P" for a in n.args)
    ]
    read |= (
        values.keys()
        if any("paper_runs." in ast.unparse(call.func) for call in whole)
        else set()
    )
    used = values.keys() - {
        "scale"
    }  # the text of 00 to 02 does not depend on the scale, but it is checked
    assert used <= read, f"never read: {used - read}"


def test_notebook_imports_only_allowed_packages(book, path):
    sources = [c.source for c in code_cells(book)]
    assert len(sources) == len(set(sources)), "code is shown twice"
    tree = ast.parse("\n".join(sources))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    modules = {
        a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names
    }
    modules |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    allowed = {
        "cpt_core",
        "cpt_extras",
        "cpt_lab",
        "cpt_lessons",
        "torch",
        *sys.stdlib_module_names,
    }
    if path.name[:2] in (
        "00",
        "09",
        "18",
    ):  # they train by themselves, and have to have data
        allowed.add("sklearn")
    assert {m.split(".")[0] for m in modules} <= allowed


def test_notebook_text_has_required_sections(book, path):
    text = "\n".join(c.source for c in book.cells if c.cell_type == "markdown")
    assert len(text.split()) >= 250
    assert not re.search(r"^ {4}", text, flags=re.M), (
        "an indented block is shown as code, not as a formula"
    )
    if path in PREDICTING:
        assert "Predict" in text
        assert "Exercises" in text
    if path.name[:2] not in PAPER:
        assert OPENING.match(book.cells[0].source)
        assert "## Summary" in text
    assert f"]({path.name})" in (FOLDER / "README.md").read_text()
    assert "ppendix" not in text


def test_notebook_contains_no_machine_paths(path):
    text = path.read_text()
    assert len(text) < 700_000
    assert "widget-view" not in text
    plain = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not re.search(r"(?<![\w.])/(root|home|work|tmp|Users)/", plain)
    assert not re.search(r"Traceback|ipykernel_\d+", plain)


def test_notebook_ends_with_next_link(book, path):
    way = re.search(r"^Next: .*$", book.cells[-1].source, flags=re.M)
    assert way, "the last cell has a line that begins with Next:"
    links = re.findall(r"\]\(([^)]+)\)", way[0])
    if path == COURSE[-1]:
        assert links == ["../docs/reproducing/index.md", "../README.md"]
    else:
        assert links == [COURSE[COURSE.index(path) + 1].name]


def test_start_notebook_lists_all_notebooks():
    text = read(NOTEBOOKS[0]).cells[-1].source
    assert re.findall(r"^\| \[\w+\]\((\w+\.ipynb)\)", text, flags=re.M) == [
        p.name for p in COURSE[1:]
    ]


def test_bands_have_failing_controls():
    content = json.loads(
        (FOLDER.parent / "data" / "results" / "bands.json").read_text()
    )
    assert content["bands"]
    for name, band in content["bands"].items():
        assert len(band["values"]) >= 10, name
        assert all(band["low"] <= v <= band["high"] for v in band["values"]), name
        assert band["control"], name
        assert not any(band["low"] <= v <= band["high"] for v in band["control"]), name


def test_notebook_assertions_on_runs_have_messages(book):
    """Assert only what holds for any data, and give the reason."""
    for cell in code_cells(book):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Assert) and "runs" in ast.unparse(node.test):
                assert node.msg is not None, cell.source
                assert not re.search(r"loss|status", ast.unparse(node.test)), (
                    cell.source
                )


def test_notebook_parameters_have_papermill_types(path):
    inferred = papermill.inspect_notebook(str(path)).values()
    assert [
        parameter["name"]
        for parameter in inferred
        if parameter["inferred_type_name"] == "None"
    ] == []
