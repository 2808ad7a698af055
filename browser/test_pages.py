"""Report, reproduce page and site, as files: on a screen, magnified, in dark mode and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.pages import PageLog, assert_accessible
from cpt_lab.analysis.statistics import interval

VIEWS: dict[str, dict[str, Any]] = {
    "screen": {"viewport": {"width": 1366, "height": 768}},
    "200-percent": {
        "viewport": {"width": 683, "height": 384},
        "device_scale_factor": 2,
    },  # what a browser's zoom does
    "dark": {"viewport": {"width": 1366, "height": 768}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "device_scale_factor": 2,
        "is_mobile": True,
    },
}
SITE = (
    "index.html",
    "notebooks/01_schedules.html",
    "notebooks/05_node_classification.html",  # wide tables
    "notebooks/16_a_graph_convolution_at_few_bits.html",  # wide outputs, formulas
    "api/index.html",
    "api/make_schedule.html",
    "docs/int8.html",  # the widest tables
    "explorer.html",
)
OWN_PAGES = ("report", "reproduced")  # each is the name of a fixture
PAGES = (*OWN_PAGES, *SITE)
TALLEST = 5000  # pixels of a screenshot

# Words that a reader can reach only by moving the whole page; what scrolls in a box of its own is reached there.
OUTSIDE = """() => {
    const boxed = e => e && (e !== document.body && e !== document.documentElement) &&
        (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(e).overflowX) ||
            getComputedStyle(e).position === "fixed" || boxed(e.parentElement));
    const hidden = e => !e.checkVisibility({visibilityProperty: true, opacityProperty: true});
    const found = [], range = document.createRange();
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let t = texts.nextNode(); t; t = texts.nextNode()) {
        const e = t.parentElement;
        if (!t.data.trim() || e.closest("script, style, noscript, template") || hidden(e) || boxed(e)) continue;
        range.selectNodeContents(t);
        for (const r of range.getClientRects())
            if (r.width > 1 && r.height > 1 && (r.left < -1 || r.right > WIDTH + 1)) found.push(t.data.trim());
    }
    return found;
}"""
PICTURES = """() => [...document.images].filter(i => i.checkVisibility())
    .filter(i => !i.alt.trim() || !i.complete || !i.naturalWidth).map(i => i.outerHTML.slice(0, 200))"""

# Pictures of the report whose words are too small: shown narrower than they were made, and than 600 pixels.
SHRUNK = """() => [...document.images].filter(i => i.checkVisibility())
    .filter(i => i.clientWidth < Math.min(600, i.getAttribute("width") ?? 600)).map(i => [i.clientWidth, i.alt])"""
# Pictures of the site that a screen cuts off.
CUT = """() => [...document.querySelectorAll(".content img")]
    .filter(i => i.getBoundingClientRect().right > WIDTH).map(i => i.alt)"""


@pytest.fixture
def heard() -> Iterator[PageLog]:
    """Fail on any console message or network request of the page."""
    log = PageLog(offline=True)
    yield log
    assert log.messages == []


@pytest.fixture
def visit(
    browser: Browser, heard: PageLog, request: pytest.FixtureRequest
) -> Iterator[Callable[[str, str], Page]]:
    """Return a function that opens a page in a view."""
    contexts = []

    def open_(name: str, view: str) -> Page:
        name, hash_, rest = name.partition("#")
        path = (
            request.getfixturevalue(name)
            if name in OWN_PAGES
            else request.getfixturevalue("site") / name
        )
        contexts.append(browser.new_context(**VIEWS[view]))
        page = contexts[-1].new_page()
        heard.listen(page)
        page.goto(path.as_uri() + hash_ + rest)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_page_fits_and_is_accessible(
    name: str, view: str, visit: Callable[[str, str], Page], shots: Path
) -> None:
    """Check layout, described images, a silent console, and no serious finding of axe."""
    page, width = visit(name, view), VIEWS[view]["viewport"]["width"]
    shot = f"{name.removesuffix('.html').replace('/', '-')}-{view}.png"
    height = min(page.evaluate("document.documentElement.scrollHeight"), TALLEST)
    page.set_viewport_size({"width": width, "height": height})
    page.screenshot(path=shots / shot)
    page.set_viewport_size(VIEWS[view]["viewport"])
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE.replace("WIDTH", str(width))) == []
    assert page.evaluate(PICTURES) == []
    assert (
        page.evaluate(SHRUNK if name in OWN_PAGES else CUT.replace("WIDTH", str(width)))
        == []
    )
    assert_accessible(page)


def test_reproduced_page_shows_runs_and_paper(
    visit: Callable[[str, str], Page],
) -> None:
    """Show the figure of the demo runs and the table of the paper's claims."""
    page = visit("reproduced", "screen")
    expect(
        page.get_by_role("columnheader", name="the paper says").first
    ).to_be_visible()
    assert page.locator("img").count() >= 1
    assert page.get_by_text("your data").count() == 0


def test_notebook_page_offers_download(visit: Callable[[str, str], Page]) -> None:
    """Link the file as in the repository; servers save it, folders may show it."""
    page = visit("notebooks/03_image_classification.html", "screen")
    link = page.get_by_role("link", name="Download this notebook")
    handed = Path(unquote(urlsplit(link.evaluate("a => a.href")).path))
    assert link.get_attribute("download") is not None
    assert (
        handed.read_bytes()
        == (Path(__file__).parents[1] / "notebooks" / handed.name).read_bytes()
    )


def test_explorer_trains_and_states_verdict(visit: Callable[[str, str], Page]) -> None:
    """Show both costs, train both in a worker, and derive the verdict from the numbers."""
    page = visit("explorer.html", "phone")
    verdict, train = page.locator("#verdict"), page.locator("#train")
    page.get_by_label("Schedule", exact=True).select_option("RTH")
    page.get_by_label("Gradient bits").press("ArrowLeft")
    page.get_by_label("Seeds").select_option("3")
    expect(verdict).to_contain_text("RTH against static 3 and 4 mixed")
    assert page.evaluate("shown.python").endswith("q_grad=7)")
    train.click()
    expect(train).to_contain_text("Stop")
    expect(train).to_have_text("Train", timeout=120_000)
    loss, accuracy = page.evaluate("[found.at(-1).loss, found.at(-1).accuracy]")
    mean, low, _ = interval(100 * (a - b) for a, b in zip(*accuracy, strict=True))
    verdict_text = verdict.inner_text()
    assert f"{mean:+.2f} ± {mean - low:.2f} points".replace("-", "−") in verdict_text
    assert verdict_text.startswith("Too uncertain to say") == (abs(mean) <= mean - low)
    assert max(map(max, loss)) < 1
    assert page.locator("#accuracy path").count() == 2 * 3 + 2
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert_accessible(page)
    page.get_by_label("Cycles").press("ArrowLeft")  # three: RTH would end at q_min
    expect(page.locator("#problem")).to_contain_text("even number of cycles")
    expect(train).to_be_disabled()


def test_explorer_of_static_precision(visit: Callable[[str, str], Page]) -> None:
    """Read settings from the address; static precision is its baseline."""
    page = visit("explorer.html#family=STATIC&q_min=6&q_grad=6", "screen")
    expect(page.locator("#verdict")).to_contain_text(
        "At a cost of 0.5625, static 6 is its own static rival"
    )
    page.get_by_label("Schedule", exact=True).select_option("ER")
    expect(page.locator("#verdict")).to_contain_text("ER against static")
    assert "family=ER&q_min=6" in page.url


def test_explorer_of_incomparable_settings(visit: Callable[[str, str], Page]) -> None:
    """Ignore invalid settings, and report equal bits and diverged trainings."""
    page = visit("explorer.html#q_min=2&q_max=abc&rate=7", "screen")
    assert page.evaluate("shown.s.q_max") == 8
    assert page.evaluate("shown.s.rate") == 0.1
    page = visit("explorer.html#q_min=5&q_max=5", "screen")
    expect(page.locator("#verdict")).to_contain_text(
        "there is nothing to compare. Raise q_max."
    )
    page = visit(
        "explorer.html#family=RR&q_min=1&q_max=2&q_grad=1&rate=1&seeds=3", "screen"
    )
    page.locator("#train").click()
    expect(page.locator("#train")).to_have_text("Train", timeout=120_000)
    assert page.locator("#numbers tr").last.inner_text().count("diverged") == 2
