"""Rendering of one table as terminal text, Markdown and HTML."""

import re

import pandas as pd
import pytest
from jinja2 import UndefinedError
from matplotlib.figure import Figure

from cpt_lab.analysis.metrics import METRICS, interval_text, intervals, plural
from cpt_lab.analysis.rendering import Section, contents, markdown, render, terminal
from cpt_lab.experiments.schema import Metric

FRAME = pd.DataFrame({"arm": ["CR", "static 8"], "n": [3, 12]})


def page(*sections):
    return render("page.html.j2", title="T", notes=[], sections=sections)


def test_table_renders_as_text_and_markdown():
    assert terminal(FRAME) == "arm        n\nCR         3\nstatic 8  12"
    assert (
        markdown(FRAME) == "| arm | n |\n| --- | --- |\n| CR | 3 |\n| static 8 | 12 |"
    )


def test_page_renders_table_with_glossary():
    shown = page(Section("numbers", table=FRAME, style="left"))
    assert '<th><a class="word" href="#word-1">arm</a></th><th>n</th>' in shown
    assert (
        '<dt id="word-1">arm</dt><dd>One setting that an experiment compares: a schedule or a static precision.'
        in shown
    )
    assert "<tr><td>static 8</td><td>12</td></tr>" in shown
    assert '<table class="left">' in shown


def test_page_escapes_html():
    good = {"page": "x.html?<d>", "name": "<e>", "failed": None, "error": ""}
    bad = {"page": None, "name": "<e>", "failed": "y.html?<d>", "error": "<f>"}
    frame = pd.DataFrame(
        {"<a>": ["<b>", good, bad, {**bad, "page": "x.html"}, ["<g>"]]}
    )
    section = Section(
        "<h>", ("a `<code>` & more",), Figure(), "'<i>", frame, points=(("<j>", "<k>"),)
    )
    folded = Section("<l>", ("<m>",), table=frame, style="folded")
    shown = render(
        "page.html.j2",
        title="<n>",
        notes=["<o>"],
        sections=[section, folded, section, section],
    )
    assert not re.search("<[a-o]>", shown)
    assert "alt='&#39;&lt;i&gt;'" in shown
    assert "<p>a <code>&lt;code&gt;</code> &amp; more</p>" in shown
    failed = '<br><a class="failed" href="y.html?&lt;d&gt;">failed: &lt;f&gt;</a>'
    cells = [
        re.sub(r"\s*\n\s*", "", cell)
        for cell in re.findall("<td>(.*?)</td>", shown, re.DOTALL)
    ]
    assert cells[1:4] == [
        '<a href="x.html?&lt;d&gt;">&lt;e&gt;</a>',
        f"&lt;e&gt;{failed}",
        f'<a href="x.html">&lt;e&gt;</a>{failed}',
    ]


def test_page_links_first_glossary_word():
    """Link each glossary word where it first occurs."""
    shown = page(
        Section(
            "arms", ("Of arms, arm by arm, and `margin`, CR and RR.", "Their scale.")
        )
    )
    assert re.findall(r'href="#word-(\d)">(\w+)</a>', shown) == [
        ("1", "arms"),
        ("2", "CR"),
        ("3", "scale"),
    ]
    assert re.findall(r'<dt id="word-(\d)">([\w ]+)</dt>', shown) == [
        ("1", "arm"),
        ("2", "names of schedules"),
        ("3", "scale"),
    ]
    assert "arm by arm, and <code>margin</code>" in shown


def test_contents_group_experiments_by_settings():
    one, two = "mlp6 on digits, 8 x 8", "GCN on own graph (a, b)"
    titles = [
        "Claims",
        f"{one}, 600 steps, 4 cycles, q_min 3, q_max 8, demo scale",
        f"{two}, 1,064 steps, q_min 2, q_max 8, demo scale",
        f"{one}, 600 steps, q_min 4, q_max 8, demo scale",
        f"Equal cost: {one}, 1 cycle, q_min 3, q_max 8, demo scale",
        "Costs: ranked",
    ]
    assert contents([Section(title) for title in titles]) == [
        ("", [("", [(1, "Claims")])]),
        (
            "Quality against cost",
            [
                (
                    one,
                    [
                        (2, "600 steps, 4 cycles, q_min 3, q_max 8"),
                        (4, "600 steps, q_min 4, q_max 8"),
                    ],
                ),
                ("", [(3, two)]),
            ],
        ),
        ("Equal cost", [("", [(5, one)])]),
        ("", [("", [(6, "Costs: ranked")])]),
    ]
    shown = page(
        *map(Section, titles[:-1]), Section(titles[1].replace("demo", "paper"))
    )
    found = re.search(r"<summary>Contents</summary>(.*?)</details>", shown, re.DOTALL)[
        1
    ]
    assert re.findall(r"#part-(\d)", found) == ["1", "2", "4", "6", "3", "5"]
    assert (
        '<a href="#part-6">600 steps, 4 cycles, q_min 3, q_max 8, paper scale</a>'
        in found
    )
    assert found.count("<ul>") == found.count("</ul>") == 3
    assert found.count("<li>") == found.count("</li>") == 6


def test_page_folds_lists_in_tables():
    frame = pd.DataFrame({"claim": ["x", "y"], "evidence": [["one", "two"], []]})
    shown = page(Section("claims", table=frame))
    assert "<summary>2 effects</summary><ul><li>one</li><li>two</li></ul>" in shown
    assert shown.count("<details>") == 1


def test_render_rejects_missing_values():
    with pytest.raises(UndefinedError, match="'sections' is undefined"):
        render("page.html.j2", title="T", notes=[])


def test_metric_text_formats_numbers():
    assert METRICS["accuracy"].text([0.123, float("nan")]) == ["12.3", "–"]
    lines = pd.DataFrame(
        {
            "difference": [0.5, 0.5, float("nan")],
            "low": [0.25, *[float("nan")] * 2],
            "high": 0.75,
        }
    )
    assert intervals(Metric("x", "x", factor=2.0), lines) == [
        "+1.0 [+0.5, +1.5]",
        "+1.0",
        "",
    ]
    assert interval_text(-0.5, -1, 0) == "-0.50 [-1.00, +0.00]"
    assert [plural(n, "seed") for n in (0, 1, 2)] == ["0 seeds", "1 seed", "2 seeds"]
