"""The HTML report and the page of ``make reproduce``: order, glossary, consistent numbers and hostile names."""

import base64
import html
import re
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.figure import Figure

from cpt_lab.analysis import (
    claims,
    predictors,
    report,
    reproduction,
    run_groups,
    run_table,
)
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.rendering import Section
from cpt_lab.experiments import designs
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import stores
from tests.helpers import row_of, smoke_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("few_preregistered"),
    pytest.mark.filterwarnings("ignore::cpt_core.schedules.schedule.ShortCycleWarning"),
]

NAMES = ("deficit_facebook", "equal_cost_pydoc", "image_digits", "language_pydoc")
STORES = [results_dir() / f"{name}.jsonl" for name in NAMES]
STUDY = SimpleNamespace(sections=lambda runs: [Section("Preregistered questions")])


def plain(page):
    """Return a page as text without images and tags."""
    page = re.sub(r"src='data:[^']*'|<style>.*?</style>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def written(rows, folder):
    """Write a report of the rows, and return its HTML."""
    store = folder / "made_up.jsonl"
    for row in rows:
        stores.append_row(store, {"schema": stores.SCHEMA_VERSION, **row})
    return report.write_report([store], folder / "page.html").read_text()


def rows_of(specs, **changes):
    return [{**row_of(spec, 0.5 + 0.01 * i), **changes} for i, spec in enumerate(specs)]


@pytest.fixture(scope="session")
def stored():
    return run_table.load(*STORES, every_rate=True)


@pytest.fixture(scope="session")
def page(stored, tmp_path_factory):
    """Return the report of four committed stores and of a study."""
    out = tmp_path_factory.mktemp("report") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "load", lambda *files, every_rate: stored)  # read once
        patch.setattr(report, "studies", lambda part: [STUDY])
        patch.setattr(run_groups, "preregistered", frozenset)
        return report.write_report(STORES, out).read_text()


@pytest.fixture
def quick(monkeypatch):
    """Skip the parts of a report that do not depend on rows, and all studies."""
    monkeypatch.setattr(report, "studies", lambda part: ())
    monkeypatch.setattr(report, "figure_2", Figure)
    monkeypatch.setattr(report, "differences", tuple)
    monkeypatch.setattr(report, "_versions", str)
    for name in ("ptb_costs", "cost_groups"):
        monkeypatch.setitem(MEASURES, name, lambda runs, claim: [])


def test_report_lists_sections_in_order(page, golden):
    """Compare headings with their figures, tables and folded parts; link each from the contents."""
    _, *parts = re.split(r"<h2", page)
    lines, marks = [], {}
    for part in parts:
        mark, heading = re.match(r' id="(part-\d+)">([^<]*)', part).groups()
        marks[mark] = heading
        header = re.findall(r"<th>(.*?)</th>", part)
        columns = [re.sub("<[^>]*>", "", cell) for cell in header]
        lines.append(f"{html.unescape(heading)}: {part.count('<img')} figures")
        lines.append(f"  {part.count('<details')} folded, columns {columns}")
    golden("report_sections.txt", "\n".join(lines) + "\n")
    assert len(set(marks.values())) == len(marks)
    links = dict(re.findall(r'<a href="#(part-\d+)">([^<]*)</a>', page))
    assert links.keys() == marks.keys()
    for mark, words in links.items():
        assert words.removesuffix(", demo scale") in marks[mark]
    assert "How few bits can a network be trained with" in page.split("<h2")[0]
    before, _ = page.split("Numbers printed in the paper: not run</h2>")
    _, measured = before.split("Numbers printed in the paper</h2>")
    assert "<td>not run</td>" not in measured


def test_report_is_self_contained_html(page):
    assert re.findall(r"(?:src|href)=['\"](?!data:|#)[^'\"]*", page) == []
    assert not re.search(r"https?://|<script|@import|url\(", page)
    images = re.findall(r"src='data:image/png;base64,([^']*)'", page)
    assert len(images) == len(re.findall(r"<img alt='[^']{15,}'", page)) >= 6
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


def test_report_shows_numbers_of_stores(page, stored):
    digits = stored[(stored.model == "mlp6") & (stored.q_min == 3)]
    accuracy = digits[digits.arm == "CR"].accuracy.mean()
    assert f"<td>{100 * accuracy:.1f}</td>" in page
    text = plain(page)
    for words in (
        "92.23 +- 0.09 %",
        "opposite sign in ",
        "confirmed, exact",
        "Pareto front",
        "data/results/image_digits.jsonl",
        "keep the best one on the test set",
    ):
        assert words in text
    count = sum(len(path.read_bytes().splitlines()) for path in STORES)
    assert f"{count} of {count} rows intact" in text


def test_report_links_glossary(page):
    entries = dict(re.findall(r'<dt id="(word-\d+)">(.*?)</dt><dd>.{40,}?</dd>', page))
    links = re.findall(r'<a class="word" href="#(word-\d+)">', page)
    assert links == list(entries)
    words = {"arm", "relative cost", "savings", "noise exposure", "names of schedules"}
    assert words <= set(entries.values())
    explanations = " ".join(re.findall("<dd>(.*?)</dd>", page))
    assert not re.search(r"[$\\`*{]", explanations)


def test_report_and_ledger_share_correlation_intervals(page, stored):
    names = [c.id for c in claims.claims() if c.measure == "correlation"]
    runs = run_table.tuned(stored)
    entries = claims.judge_claims(runs, names)
    ledger = "\n".join(line for entry in entries for line in entry.evidence())
    found = predictors.predictors_by_title(runs)
    assert len(found) == ledger.count("rank correlation") >= 2
    for frame in found.values():
        r = frame.set_index("predictor").loc["relative_cost"]
        number = f"{r.strength:+.2f} [{r.low:+.2f}, {r.high:+.2f}]"
        assert f"over {r.arms} arms: {number}, n = {r.seeds}" in ledger
        assert plain(page).count(number) >= 2  # in the ledger, and among predictors


def test_report_handles_empty_stores(quick, tmp_path):
    empty = report.write_report([], tmp_path / "empty.html").read_text()
    assert "is stored yet; <code>cpt plan</code> lists the" in empty
    page = written([row_of(smoke_spec("digits"), 0.5)], tmp_path)
    assert "1 run at smoke " in page
    assert "<th>runs that count" not in page


def test_report_counts_failed_runs(quick, tmp_path):
    """Count failed runs if all runs of a network failed, or all but one."""
    arms = {"schedules": ["RR", "CR"], "static_bits": [8], "seeds": [0]}
    lost = {"metrics": [], "bitops": {}, "status": "failed", "error": "x"}
    rows = rows_of(designs.quality_cost("demo", "digits", "mlp6", **arms), **lost)
    others = rows_of(designs.quality_cost("demo", "digits", "resnet8_w8", **arms))
    rows += [others[0], *({**row, **lost} for row in others[1:])]
    page = written(rows, tmp_path)
    assert page.count("<td>1</td>") >= 6  # runs, finished or failed


def test_report_uses_singular_for_one(page, quick, tmp_path):
    """Write "1 run", and omit the deviation of a single seed."""
    one_arm = {"q_max": [8], "schedules": ["CR"], "seeds": [0]}
    rows = rows_of(designs.quality_cost("paper", "cifar10", **one_arm))
    (spec,) = designs.quality_cost("paper", "ptb", static_bits=[], **one_arm)
    rows.append({**row_of(spec, 90.0, "perplexity"), "bitops": {"paper": 7e13}})
    one = plain(written(rows, tmp_path))
    for text in (plain(page), one):
        assert not re.search(r"nan\b", text)
        assert not re.search(r"(?<![\d.,])1 (runs|effects|arms|seeds|lines)\b", text)
    assert "7.00 (n = 1)" in one


@pytest.mark.parametrize(
    ("field", "values", "pattern"),
    [
        ("lr", (0.1, 0.2), r", demo scale, recipe [0-9a-f]{8}$"),
        ("n_cycles", (4, 8), r"600 steps, [48] cycles, q_min 3"),
    ],
)
def test_report_gives_experiments_unique_names(field, values, pattern):
    specs = [
        spec
        for value in values
        for spec in designs.quality_cost("demo", static_bits=[8], **{field: value})
    ]
    runs = run_table.table(rows_of(specs))
    groups = run_groups.quality_cost_groups(runs)
    names = {name for name, _ in run_groups.with_unique_names(groups)}
    assert len(names) == 2
    assert all(re.search(pattern, name) for name in names)
    found = predictors.predictors_by_title(runs)
    assert len(found) == len(set(predictors.summary(found).experiment)) == 2


HOSTILE = "<script>alert('x')</script>&\""


def test_report_escapes_row_texts(quick, tmp_path):
    rows = []
    for spec in designs.quality_cost("demo", static_bits=[8], seeds=[0, 1, 2]):
        row = row_of(replace(spec, arm=HOSTILE) if spec.arm == "CR" else spec, 0.5)
        row |= {"title": HOSTILE, "error": HOSTILE, "device": HOSTILE}
        row["provenance"] = {**row["provenance"], "versions": {"torch": HOSTILE}}
        rows.append(row)
    shown = written(rows, tmp_path)
    assert HOSTILE not in shown
    assert "<script>" not in shown
    assert html.unescape(shown).count(HOSTILE) > 10  # headings, arms, evidence, stores
    evidence = re.findall(r"<summary>1 effect</summary><ul><li>([^\n]*)</li>", shown)
    assert any("&lt;script&gt;" in line for line in evidence)


# --- the page of make reproduce -------------------------------------------------------------------

CLAIM = "CR matches static q_max (section 4.2)"
MEASURED = "CR minus static 8: -2.00, n = 8"
LINE = (CLAIM, MEASURED, "copies, demo scale", "static 8 reaches 75 %", "inconclusive")
COMMITTED = pd.DataFrame([LINE], columns=reproduction.CLAIM_COLUMNS)


def claims_here(measured, baseline="static 8 reaches 50 %"):
    return COMMITTED.assign(measured=measured, baseline=baseline)


@pytest.fixture
def reproduced(tmp_path, monkeypatch):
    """Return a function that writes the page of a run with synthetic claims."""
    monkeypatch.setattr(report, "runs_dir", lambda: tmp_path / "runs")
    monkeypatch.setattr(report, "_versions", str)

    def claims_table(topic, runs=None):  # runs that are judged by no rule
        assert topic == "images", "claims of a section without runs were judged"
        if runs is None:
            return COMMITTED
        seeds = runs["seed"].nunique()
        return claims_here(f"CR minus static 8: -1.00, n = {seeds}")

    monkeypatch.setattr(reproduction, "claims_table", claims_table)

    def write(*seeds, scale="demo", **sections):
        arms = {"schedules": ["RR", "CR"], "static_bits": [8], "seeds": seeds}
        for row in rows_of(designs.quality_cost("demo", "digits", **arms)):
            store = tmp_path / "runs" / scale / "rows.jsonl"
            stores.append_row(store, {"schema": stores.SCHEMA_VERSION, **row})
        return report.write(tmp_path, scale, [], **sections).read_text()

    return write


def test_reproduce_page_compares_claims_with_rows(reproduced):
    page = reproduced(0, 1, 2)
    text = plain(page)
    assert text.startswith("Cyclic precision training: notebooks run at demo scale")
    here = "CR minus static 8: -1.00, n = 3; static 8 reaches 50 %"
    header = "the paper says your runs committed rows data and scale baseline verdict"
    assert f"{header} {CLAIM} {here} {MEASURED}" in text
    assert "Image classification: the paper, your runs, committed rows" in text
    assert "Your runs are all that are stored" in text
    assert "Language: the paper" not in text  # nothing of it was run
    assert "too few seeds" not in text
    before, after = page.split("data:image/png;base64,")
    assert "matches static q_max" in plain(before)
    assert "<th>n</th>" in after


def test_reproduce_page_omits_verdict_for_one_seed(reproduced):
    page = reproduced(0)
    text = plain(page)
    assert "n = 1; static 8 reaches 50 %; too few seeds to decide" in text
    assert "1 seed: too few to compare." in text
    assert "Pareto" not in page
    assert "<td>yes</td>" not in page


def test_reproduce_page_marks_smoke_runs(reproduced):
    page = reproduced(0, 1, 2, scale="smoke")
    assert "nothing on this page is a result of it" in page.split("<h2")[0]
    assert "notebooks run at smoke scale</h1>" in page
    assert "matches static q_max" not in plain(page)
    assert "data:image" not in page


def test_reproduce_page_introduces_user_data(reproduced):
    """Introduce the results on user data only if there are some."""
    part = [Section("3 bits are enough")]
    introduction = "What was found for your data comes first"
    assert introduction not in reproduced(committed=part)
    page = reproduced(own_data=part, committed=[Section("At equal cost")])
    assert introduction in page
    titles = ("3 bits are enough", "At equal cost", ">Notebooks<")
    places = [page.index(title) for title in titles]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ("–", "not run"),
        ("RR: +1.00, n = 2", "RR: +1.00, n = 2; too few seeds to decide"),
        ("RR: +1, n = 2; ER: +1, n = 3", "RR: +1, n = 2; ER: +1, n = 3"),
    ],
)
def test_compare_claims_reports_run_status(measured, shown):
    lines = report.compare_claims(claims_here(measured, "–"), COMMITTED)
    assert lines["your runs"].tolist() == [shown]
    assert lines["committed rows"].tolist() == COMMITTED["measured"].tolist()
    assert lines["verdict"].tolist() == ["inconclusive"]
