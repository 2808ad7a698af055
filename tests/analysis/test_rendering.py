"""Pages in HTML, and tables in CSV files that spreadsheets do not evaluate."""

import ast
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from cpt_lab.analysis.rendering import Section, contents, render
from cpt_lab.analysis.spreadsheets import FORMULA_STARTS, without_formula, write_csv
from cpt_lab.paths import ROOT, paper_dir


def page(*sections):
    return render("page.html.j2", title="T", notes=[], sections=sections)


@pytest.mark.slow
def test_page_escapes_html():
    good = {"page": "x.html?<d>", "name": "<e>", "failed": None, "error": ""}
    bad = {"page": None, "name": "<e>", "failed": "y.html?<d>", "error": "<f>"}
    cells = ["<b>", good, bad, {**bad, "page": "x.html"}, ["<g>"]]
    frame = pd.DataFrame({"<a>": cells})
    points = (("<j>", "<k>"),)
    notes = ("a `<code>` & more",)
    section = Section("<h>", notes, Figure(), "'<i>", frame, points=points)
    folded = Section("<l>", ("<m>",), table=frame, style="folded")
    sections = [section, folded, section, section]
    shown = render("page.html.j2", title="<n>", notes=["<o>"], sections=sections)
    assert not re.search("<[a-o]>", shown)
    assert "alt='&#39;&lt;i&gt;'" in shown
    assert "<p>a <code>&lt;code&gt;</code> &amp; more</p>" in shown
    found = re.findall("<td>(.*?)</td>", shown, re.DOTALL)
    failed = '<br><a class="failed" href="y.html?&lt;d&gt;">failed: &lt;f&gt;</a>'
    assert [re.sub(r"\s*\n\s*", "", cell) for cell in found[1:4]] == [
        '<a href="x.html?&lt;d&gt;">&lt;e&gt;</a>',
        f"&lt;e&gt;{failed}",
        f'<a href="x.html">&lt;e&gt;</a>{failed}',
    ]


def test_page_links_first_glossary_word():
    """Link each glossary word where it first occurs."""
    notes = ("Of arms, arm by arm, and `margin`, CR and RR.", "Their scale.")
    shown = page(Section("arms", notes))
    links = re.findall(r'href="#word-(\d)">(\w+)</a>', shown)
    assert links == [("1", "arms"), ("2", "CR"), ("3", "scale")]
    entries = re.findall(r'<dt id="word-\d">([\w ]+)</dt>', shown)
    assert entries == ["arm", "names of schedules", "scale"]
    assert "arm by arm, and <code>margin</code>" in shown


def test_contents_group_experiments_by_settings():
    one, two = "mlp6 on digits, 8 x 8", "GCN on own graph (a, b)"
    settings = ("600 steps, 4 cycles, q_min 3, q_max 8", "600 steps, q_min 4, q_max 8")
    titles = [
        "Claims",
        f"{one}, {settings[0]}, demo scale",
        f"{two}, 1,064 steps, q_min 2, q_max 8, demo scale",
        f"{one}, {settings[1]}, demo scale",
        f"Equal cost: {one}, 1 cycle, q_min 3, q_max 8, demo scale",
        "Costs: ranked",
    ]
    first = (one, [(2, settings[0]), (4, settings[1])])
    assert contents([Section(title) for title in titles]) == [
        ("", [("", [(1, "Claims")])]),
        ("Quality against cost", [first, ("", [(3, two)])]),
        ("Equal cost", [("", [(5, one)])]),
        ("", [("", [(6, "Costs: ranked")])]),
    ]
    titles[-1] = titles[1].replace("demo", "paper")
    shown = page(*map(Section, titles))
    part = shown.partition("<summary>Contents</summary>")[2].partition("</details>")[0]
    assert re.findall(r"#part-(\d)", part) == ["1", "2", "4", "6", "3", "5"]
    assert f'<a href="#part-6">{settings[0]}, paper scale</a>' in part
    for tag, count in (("ul", 3), ("li", 6)):
        assert part.count(f"<{tag}>") == part.count(f"</{tag}>") == count


# --- CSV files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_write_csv_escapes_formulas(start, tmp_path):
    text = f"{start}cmd|' /C calc'!A0"
    columns = {text: [text, "static 8"], "seed": [0, 1]}
    frame = pd.DataFrame(columns, index=pd.Index([text, "ben"], name="x"))
    write_csv(frame, tmp_path / "table.csv", index_label="student")
    read = pd.read_csv(tmp_path / "table.csv")
    assert read.columns.tolist() == ["student", f"'{text}", "seed"]
    assert read.student.tolist() == [f"'{text}", "ben"]
    assert read.iloc[:, 1].tolist() == [f"'{text}", "static 8"]


NUMBERS = ("-0.5", "+3", "-1e-5", "-inf", -0.5, -3, np.float64(-1.0))


@pytest.mark.parametrize("cell", [*NUMBERS, None, True, "", "a=b", "3-4"])
def test_without_formula_keeps_numbers_and_texts(cell):
    assert without_formula(cell) is cell


@pytest.mark.parametrize("separator", [";", "\t", "; "])
def test_write_csv_quotes_foreign_separators(separator, tmp_path):
    text = f"ada{separator}=1+1"
    write_csv(pd.DataFrame({"student": [text]}), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes().splitlines()[1] == f'"{text}"'.encode()
    assert pd.read_csv(tmp_path / "a.csv").student.tolist() == [text]


def test_write_csv_keeps_numbers_and_tables(tmp_path):
    """Keep numbers exact, escape lone surrogates, and write the table of claims again as it is."""
    path = tmp_path / "a.csv"
    steps = pd.array([-1, 2, None], dtype="Int64")
    frame = pd.DataFrame({"loss": [-0.1, 1e-300, np.nan], "steps": steps, "ok": True})
    write_csv(frame, path)
    assert path.read_text() == frame.to_csv(index=False)
    assert pd.read_csv(path).loss.equals(frame.loss)
    write_csv(pd.DataFrame({"student": ["a\udcff"]}, dtype=object), path)
    assert path.read_text() == "student\na\\udcff\n"
    claims = paper_dir() / "claims.csv"
    write_csv(pd.read_csv(claims, dtype=str, keep_default_na=False), path)
    assert path.read_bytes() == claims.read_bytes()


def test_write_csv_is_only_csv_writer():
    """Require all packages and tools to write tables with `write_csv`."""
    writers = {"to_csv", "to_excel", "writer", "DictWriter"}
    places = set()
    packages = [*ROOT.glob("cpt_*"), ROOT / "bench", ROOT / "book", ROOT / "examples"]
    for package in [*packages, ROOT / "browser"]:
        for path in package.rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            names = set(re.findall(r"\.(\w+)", source))
            if names & writers:  # parse the few files that may have one
                nodes = ast.walk(ast.parse(source))
                found = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
                places |= {str(path.relative_to(ROOT))} if found & writers else set()
    assert places == {"cpt_lab/analysis/spreadsheets.py"}
