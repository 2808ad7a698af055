"""Notebooks in JupyterLab at smoke scale: run top to bottom, and answered like a reader would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browser.lab import RAW_MATHS, Notebook, Server
from browser.pages import PageLog, assert_accessible
from cpt_lessons.notebooks import notebooks

WIDTH, HEIGHT = 1366, 768
NO_PREDICTION = (
    "03",
    "04",
    "05",
    "06",
    "07",
    "08",
    "13",
    "14",
)  # the paper, and two lessons
OURS = {"include": [[".jp-OutputArea-output"], [".jp-MarkdownOutput"]]}
WITHOUT = {
    "image-alt": "JupyterLab drops the alt of a picture's metadata; that it is in the file is asked below",
}
# What JupyterLab says to the console of itself.
ITS_OWN: tuple[str, ...] = ()


@pytest.fixture(params=notebooks(), ids=lambda path: path.stem)
def name(request: pytest.FixtureRequest) -> str:
    """Return the file name of a notebook."""
    return request.param.name


@pytest.fixture
def heard() -> PageLog:
    """Record the console messages and network requests of the page."""
    return PageLog(ITS_OWN)


@pytest.fixture
def book(
    name: str, browser: Browser, server: Server, heard: PageLog, shots: Path
) -> Iterator[Notebook]:
    """Open the notebook."""
    context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    page = context.new_page()
    heard.listen(page)
    yield Notebook(page, server, name)
    page.screenshot(path=shots / f"lab-{Path(name).stem}-end.png")
    context.close()
    server.stop_kernels()


def test_notebook_runs_and_accepts_answers(
    book: Notebook, heard: PageLog, shots: Path
) -> None:
    """Check all parts in one test, since later parts need earlier cells to have run."""
    stem, page = book.path.stem, book.page
    book.run_all()
    book.picture(shots / f"lab-{stem}.png")
    state = book.state()
    for i, cell in enumerate(state):
        assert not {
            "application/vnd.jupyter.error",
            "application/vnd.jupyter.stderr",
        } & {*cell["types"]}, cell["text"]
        assert all(cell["pictures"]), f"cell {i}: a picture that is not loaded"

    assert page.evaluate(RAW_MATHS) == []
    assert page.locator("mjx-merror").count() == 0
    assert page.locator(".jp-Notebook details[open]").count() == 0, (
        "an answer that nobody asked for"
    )
    saved = book.saved().cells  # a folded cell has no number in the page
    assert all(
        c.execution_count for c in saved if c.cell_type == "code" and c.source.strip()
    )
    figure_outputs = [
        o
        for c in saved
        for o in c.get("outputs", [])
        if "image/png" in o.get("data", {})
    ]
    assert all(o.metadata.get("image/png", {}).get("alt") for o in figure_outputs)
    assert any(cell["pictures"] for cell in state)

    predictions(book)
    exercise(book)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        light = "true" if scheme == "light" else "false"
        page.locator(f"body[data-jp-theme-light={light}]").wait_for(state="attached")
        assert_accessible(page, OURS, WITHOUT)
    book.picture(shots / f"lab-{stem}-dark.png")
    assert heard.messages == []


def predictions(book: Notebook) -> None:
    """Check that a question shows its answer only after a choice."""
    question_cells = book.containing(r'exercises\.predict\(\s*"([^"]+)"')
    answer_cells = book.containing(r'exercises\.reveal\(\s*"([^"]+)"')
    assert question_cells or book.path.stem[:2] in NO_PREDICTION
    assert set(question_cells) == set(answer_cells)
    for question, answer_cell in answer_cells.items():
        before = book.state()[answer_cell]["text"]
        assert f"{question}: choose first" in before
        assert "the answer is" not in before
        answered_source = re.sub(
            r'(predict\(\s*"[^"]+",\s*)""',
            r'\1"a"',
            book.cells[question_cells[question]].source,
        )
        assert f"{question}: noted 'a'" in book.run(
            question_cells[question], answered_source
        )
        assert f"{question}: the answer is" in book.run(answer_cell)


def exercise(book: Notebook) -> None:
    """Check that typed-in solutions are correct and nonsense is not."""
    checks = book.containing(r'exercises\.check\("([^"]+)"')
    if book.path.stem[:2] == "14":
        assert not checks  # it tells what came out of earlier questions
        return
    last_cell = max(
        checks.values()
    )  # the last cell with one; the solutions hold those of all
    solutions = book.path.parent / "solutions" / f"{book.path.name[:2]}_solutions.py"
    first = next(iter(checks))
    output = book.run(
        last_cell,
        f'{solutions.read_text(encoding="utf-8")}exercises.check("{first}", "nonsense")\n',
    )
    assert re.findall(r"exercise (\S+): correct", output) == list(checks)
    assert f"exercise {first}: not yet" in output
